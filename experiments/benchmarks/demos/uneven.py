"""Processes of unlike speed: plain DDP, equal parts, and balanced ones. Needs root and cgroups.

    sudo python -m experiments.benchmarks.demos.uneven arms --dataset DATASET
    sudo python -m experiments.benchmarks.demos.uneven splits --dataset DATASET

experiments/configs/uneven/README.md says what is asked. Speeds are CPU quotas. ``arms`` trains in
turns: Accelerate's documented data-parallel loop, train.py's joint steps with equal parts, and the
same with ``--balance``, which gives each process the part that it can do in the time. ``splits``
times parts set by hand, of which the fastest is the limit. Both need a machine with nothing else
on it. Rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.arms import run_plain, run_train
from experiments.benchmarks.demos.quota import quotas
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MODULE = "experiments.benchmarks.demos.uneven"
MODEL, SAMPLES, EPOCHS, SPLIT_EPOCHS = "test_resnet", 5000, 12, 4
BATCH = 64  # a process's, where parts are equal
ARMS = ("accelerate_ddp", "equal", "dynamic", "dbs")
ALONE = "alone"  # after the fact: the first process, with the joint batch of all
SLOW_PARTS = (64, 51, 43, 36, 30, 26, 22, 18)  # samples of 128, of the slower process


@dataclass(frozen=True)
class Machine:
    """Processes by their part of a core's time.

    Attributes:
        parts: By process.
        cores: Where each process is pinned to.
    """

    parts: tuple[float, ...]
    cores: tuple[int, ...] = (0, 1)

    @property
    def limit(self) -> float:
        """Time of the best parts over that of equal ones, by the speeds alone."""
        return len(self.parts) * min(self.parts) / sum(self.parts)


MACHINES = {
    "1:1": Machine((1.0, 1.0)),
    "2:1": Machine((1.0, 0.5)),
    "4:1": Machine((1.0, 0.25)),
    "2:2:1": Machine((0.6, 0.6, 0.3), (0, 1, 0)),
    "2:1:1": Machine((0.8, 0.4, 0.4), (0, 1, 1)),
}
SWEPT = ("2:1", "4:1")


def main(argv: Sequence[str] | None = None) -> None:
    """Run a part; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["arms", "splits"])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--turns", type=int, help="each with its own seed; unset: 5 (splits: 3)")
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=(*ARMS, ALONE))
    parser.add_argument("--lr", type=float, default=0.4, help="0.4: tuned for results/links")
    parser.add_argument("--folder", type=Path, default=Path("experiments/results/uneven"))
    arguments = parser.parse_args(argv)
    if (cores := len(os.sched_getaffinity(0))) < 2:
        parser.error(f"cores must be at least 2, got {cores}")
    run = {"dataset": arguments.dataset, "label_column": arguments.label_column}
    run |= {"model": MODEL, "train_samples": SAMPLES, "lr": arguments.lr}
    arms, names, turns = arguments.arms, arguments.machines or list(MACHINES), arguments.turns or 5
    run |= {"epochs": EPOCHS}
    if splits := arguments.part == "splits":
        arms = [f"{2 * BATCH - part}/{part}" for part in SLOW_PARTS]
        names, turns = arguments.machines or list(SWEPT), arguments.turns or 3
        run |= {"epochs": SPLIT_EPOCHS, "eval_samples": 100}
    file = arguments.folder / ("splits.csv" if splits else "quota.csv")
    table = Table(file, ("arm", "machine", "turn"), f"{MODULE} {arguments.part}")
    for turn in range(turns):
        for name in names:
            for arm in arms:
                if not table.has(arm, name, turn):
                    found = measure(arm, MACHINES[name], {**run, "seed": turn})
                    table.add(arm, name, turn, {"lr": arguments.lr, **found})


def measure(arm: str, machine: Machine, run: dict[str, Any]) -> dict[str, float]:
    """Return seconds and accuracy of one run of an arm."""
    processes = len(machine.parts)
    if arm == ALONE:
        machine = Machine(machine.parts[:1], machine.cores[:1])
    with quotas(machine.parts, machine.cores) as prefixes:
        if arm == "accelerate_ddp":
            plain = {"eval_samples": None, **run, "batch": BATCH}
            return run_plain(prefixes, "127.0.0.1", **plain)
        flags = {name.replace("_", "-"): value for name, value in run.items()}
        return run_train(
            prefixes, "127.0.0.1", {**flags, "sync": "step", **flags_of(arm, processes)}
        )


def flags_of(arm: str, processes: int) -> dict[str, Any]:
    """Return the flags of an arm of train.py: a rule of `--balance`, or parts by hand as 96/32."""
    if arm == "equal":
        return {"local-batch-sizes": [BATCH] * processes}
    if arm == ALONE:
        return {"workers": 1, "local-batch-sizes": [BATCH * processes]}
    if "/" in arm:
        return {"local-batch-sizes": [*map(int, arm.split("/"))]}
    at_these_speeds = {"profile": "again"}
    return {"global-batch-size": BATCH * processes, "balance": arm, **at_these_speeds}


if __name__ == "__main__":
    main()
