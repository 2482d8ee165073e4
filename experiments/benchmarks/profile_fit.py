"""How well the fitted line predicts steps it has not seen.

    python -m experiments.benchmarks.profile_fit

Profiles ResNet-18 at 24 and 32 px in float32 and bf16 as train.py does, then times batch sizes that
the fit has not seen, and sets the line's prediction against them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dbsl.plan.solve import TimeModel
from experiments.benchmarks.record import record

COMMAND = [sys.executable, "-m", "dbsl.profile", "--resolutions", "24,32", "--mixed-precision"]


def measured(precision: str, largest: int) -> list[dict[str, Any]]:
    """Return the profiles of a call of the command, one a resolution."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "profile.json")
        command = [*COMMAND, precision, "--large-batch-size", str(largest), "--output", output]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(Path(output).read_text())["profiles"]


def main() -> None:
    """Profile both precisions, then other batch sizes, and write profile.csv."""
    rows = []
    for precision in ("no", "bf16"):
        began = time.perf_counter()
        lines = measured(precision, 128)
        alone_s = time.perf_counter() - began
        for profile, others in zip(lines, measured(precision, 96), strict=True):
            line = TimeModel(profile["slope"], profile["intercept"], profile["floor"])
            for size, time_s in zip(others["batch_sizes"], others["times_s"], strict=True):
                rows.append(
                    {
                        "resolution": profile["resolution"],
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
