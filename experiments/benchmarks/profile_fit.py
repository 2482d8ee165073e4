"""How well the fitted line predicts steps it has not seen.

    python -m experiments.benchmarks.profile_fit

Profiles ResNet-18 at 24 and 32 px in float32 and bf16 as train.py does, then times batch sizes that
the fit has not seen, in the same turns, and sets the line's prediction against them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dbsl.plan.solve import TimeModel
from experiments.benchmarks.record import record

HELD_OUT = (12, 24, 48, 96)
COMMAND = [sys.executable, "-m", "dbsl.profile", "--resolutions", "24,32"]
COMMAND += ["--large-batch-size", "128"]


def main() -> None:
    """Profile both precisions with held-out sizes and without, and write profile.csv."""
    rows = []
    for precision in ("no", "bf16"):
        command = [*COMMAND, "--mixed-precision", precision]
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        alone_s = time.perf_counter() - began  # what a user waits for; held-out sizes cost more
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "profile.json"
            command += ["--output", str(output), "--profile-seconds", "60", "--held-out"]
            command += [",".join(map(str, HELD_OUT))]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            profiles = json.loads(output.read_text())["profiles"]
        for resolution, profile in profiles.items():
            line = TimeModel(profile["slope"], profile["intercept"], profile["floor"])
            sizes, times = profile["held_out_sizes"], profile["held_out_times_s"]
            for size, time_s in zip(sizes, times, strict=True):
                rows.append(
                    {
                        "resolution": resolution,
                        "precision": "float32" if precision == "no" else precision,
                        "slope_ms": f"{1e3 * line.slope:.4f}",
                        "intercept_ms": f"{1e3 * line.intercept:.3f}",
                        "held_out_batch": size,
                        "measured_ms": f"{1e3 * time_s:.2f}",
                        "predicted_ms": f"{1e3 * line.time(size, 1):.2f}",
                        "error": f"{line.time(size, 1) / time_s - 1:+.3f}",
                        "profile_seconds": f"{alone_s:.0f}",
                    }
                )
    record(
        Path("experiments/results/profile.csv"),
        rows,
        "python -m experiments.benchmarks.profile_fit",
    )


if __name__ == "__main__":
    main()
