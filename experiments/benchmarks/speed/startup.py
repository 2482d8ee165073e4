"""Seconds from the command to the first optimizer step, and to import train.py.

    accelerate launch -m experiments.benchmarks.speed.startup FLAGS-OF-TRAIN.PY

is what `rows` launches: it says when the first step is over, and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
LAUNCHED = "DBSL_BENCHMARK_LAUNCHED_AT"


def rows(turns: int = 5) -> list[dict[str, Any]]:
    """Start the README's first command over and over, with a warm cache."""
    seconds: dict[str, list[float]] = {}
    for turn in range(turns + 1):  # the first fills the caches
        with tempfile.TemporaryDirectory() as scratch:
            for name, command in _commands(scratch).items():
                took = _start(name, command)
                if turn:
                    seconds.setdefault(name, []).append(took)
    return [
        {
            "part": "start-up",
            "what": name,
            "median": f"{median(values):.2f}",
            "low": f"{min(values):.2f}",
            "high": f"{max(values):.2f}",
            "unit": "s",
        }
        for name, values in seconds.items()
    ]


def _commands(scratch: str) -> dict[str, list[str]]:
    flags = ["experiments.benchmarks.speed.startup", "--small-ratio", "0.1", "--output-dir"]
    return {
        "accelerate launch train.py, first step": [
            *("-m", "accelerate.commands.launch", "-m"),
            *(*flags, f"{scratch}/one"),
        ],
        "python train.py, first step": ["-m", *flags, f"{scratch}/two"],
        "import train": ["-c", "import train"],
        "train.py with a wrong flag": ["train.py", "--lr", "-1"],
    }


def _start(name: str, arguments: list[str]) -> float:
    began = time.time()
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {LAUNCHED: str(began), "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    ended = time.time()
    said = [line for line in done.stdout.splitlines() if line.startswith("first step ")]
    if "first step" in name:
        if not said:
            raise RuntimeError(done.stderr[-2000:])
        return float(said[0].split()[2])
    return ended - began


def main() -> None:
    """Run train.py up to its first optimizer step."""
    import runpy

    from torch.optim.optimizer import register_optimizer_step_post_hook

    def end(*_: Any) -> None:
        print(f"first step {time.time() - float(os.environ[LAUNCHED]):.3f}", flush=True)
        os._exit(0)

    register_optimizer_step_post_hook(end)
    sys.argv[0] = str(ROOT / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
