"""How well the fitted line predicts steps it has not seen.

    python -m experiments.benchmarks.profile_fit

Profiles three models at 32 px in float32 as train.py does, then times five batch sizes that the
fit has not seen, and sets the line's prediction against them: on a quiet machine, and with another
program on one of its cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dbsl.plan.types import TimeModel
from experiments.benchmarks.record import record

COMMAND = [sys.executable, "-m", "dbsl.profile", "--resolutions", "32", "--mixed-precision", "no"]
MODELS = ("resnet18", "mobilenetv3_small_100", "vit_tiny_patch16_224")
OUTPUT = Path("experiments/results/held_out.csv")
BUSY = [sys.executable, "-c", "while True: pass"]


def measured(model: str, largest: int) -> tuple[dict[str, Any], bool]:
    """Return the profile of a call of the command, and whether it said that the line is bad."""
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "profile.json")
        own = ["--model", model, "--large-batch-size", str(largest), "--output", output]
        said = subprocess.run([*COMMAND, *own], check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(Path(output).read_text())["profiles"][0], "a bad fit" in said.stdout


def rows_of(model: str, load: str) -> list[dict[str, Any]]:
    """Profile up to 128 samples, then the sizes between; return a row of each of these."""
    profile, bad = measured(model, 128)
    line = TimeModel(profile["slope"], profile["intercept"], profile["floor"])
    others = measured(model, 96)[0]
    return [
        {
            "model": model,
            "load": load,
            "held_out_batch": size,
            "measured_ms": f"{1e3 * time_s:.2f}",
            "predicted_ms": f"{1e3 * line.time(size, 1):.2f}",
            "error": f"{line.time(size, 1) / time_s - 1:+.3f}",
            "bad_fit_said": bad,
        }
        for size, time_s in zip(others["batch_sizes"], others["times_s"], strict=True)
    ]


def main() -> None:
    """Profile each model, then other batch sizes, and write held_out.csv."""
    rows = [row for model in MODELS for row in rows_of(model, "quiet")]
    other = subprocess.Popen(BUSY)
    try:
        rows += [row for model in MODELS for row in rows_of(model, "a busy core")]
    finally:
        other.kill()
    record(OUTPUT, rows, "python -m experiments.benchmarks.profile_fit")


if __name__ == "__main__":
    main()
