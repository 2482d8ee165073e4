"""Two processes on two cores, one of which also runs another program; no emulation.

    python -m experiments.benchmarks.demos.uneven --dataset DATASET --turns 5

Three arms in turn, the same samples, global batch and annealed learning rate: Accelerate's
documented data-parallel loop, train.py's joint steps with equal parts, and the same with
``--balance dynamic``, which gives each process the part that it can do in the time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.arms import run_plain, run_train
from experiments.benchmarks.demos.table import Table

SETTINGS = {"model": "test_resnet", "train_samples": 5000, "eval_samples": 5000, "lr": 0.1}
BATCH = 64  # a process's, where parts are equal
BURDEN = "while True: pass"


def main(argv: Sequence[str] | None = None) -> None:
    """Run all arms in turn; rows of an earlier call stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--turns", type=int, default=5, help="each with a seed of its own")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--burdens", type=int, default=1, help="programs beside the second process")
    parser.add_argument("--output", type=Path, default=Path("experiments/results/demos/uneven.csv"))
    arguments = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error(f"cores must be at least 2, got {len(cores)}")
    table = Table(
        arguments.output, ("arm", "burdens", "turn"), "experiments.benchmarks.demos.uneven"
    )
    prefixes = [["taskset", "-c", str(core)] for core in cores[:2]]
    data = {"dataset": arguments.dataset, "label_column": arguments.label_column}
    burdens = [
        subprocess.Popen([*prefixes[1], sys.executable, "-c", BURDEN])
        for _ in range(arguments.burdens)
    ]
    try:
        for turn in range(arguments.turns):
            settings = {**data, **SETTINGS, "epochs": arguments.epochs, "seed": turn}
            for arm in ("accelerate_ddp", "equal", "balanced"):
                if not table.has(arm, arguments.burdens, turn):
                    table.add(arm, arguments.burdens, turn, measure(arm, prefixes, settings))
    finally:
        for burden in burdens:
            burden.kill()
    table.report("epoch_s", "accelerate_ddp")


def measure(
    arm: str, prefixes: Sequence[Sequence[str]], settings: dict[str, Any]
) -> dict[str, float]:
    """Return seconds and accuracy of one run of an arm."""
    if arm == "accelerate_ddp":
        return run_plain(prefixes, "127.0.0.1", **settings, batch=BATCH)
    flags: dict[str, Any] = {name.replace("_", "-"): value for name, value in settings.items()}
    flags |= {"sync": "step"}
    if arm == "equal":
        flags |= {"local-batch-sizes": [BATCH, BATCH]}
    else:
        flags |= {"global-batch-size": 2 * BATCH, "balance": "dynamic"}
    return run_train(prefixes, "127.0.0.1", flags)


if __name__ == "__main__":
    main()
