"""The hybrid scheme for speed: two processes on two cores, real seconds.

    python -m experiments.benchmarks.demos.hybrid --dataset DATASET --model resnet10t --lr 0.1

Three arms in turn, the same samples, epochs and annealed learning rate: joint steps at the full
resolution (data parallelism), joint steps with the resolution cycling, and the hybrid scheme:
one worker on small batches, four merges an epoch, the resolution cycling. An arm is not inferior to
the first if its accuracy, paired by seed, is not 1 point lower: the lower end of the one-sided 95 %
interval is above -1. With ``--holdout`` the accuracy is of held-out training images, to choose
learning rates by.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from experiments.benchmarks.demos.arms import run_train
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MARGIN = 1.0  # points
BATCH = 64  # a process's
CONTROL = "ddp"
CYCLIC = {"resolutions": [24, 32], "schedule": "cyclic"}
ARMS: dict[str, dict[str, Any]] = {
    CONTROL: {"sync": "step", "local-batch-sizes": [BATCH, BATCH]},
    "cyclic": {"sync": "step", "local-batch-sizes": [BATCH, BATCH], **CYCLIC},
    "hybrid": {"small-workers": 1, "large-batch-size": BATCH, "rounds-per-epoch": 4, **CYCLIC},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "test_vit": {"optimizer": "adamw", "weight-decay": 0.05},
    "resnet10t": {},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run all arms in turn; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--model", default="resnet10t", choices=list(OPTIMIZERS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--lr", nargs="+", type=float, required=True, help="one, or one per arm")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5, help="each with a seed of its own")
    parser.add_argument("--holdout", type=float, help="share of the training images to evaluate on")
    parser.add_argument("--output", type=Path, default=Path("experiments/results/demos/hybrid.csv"))
    arguments = parser.parse_args(argv)
    if arguments.holdout and arguments.output == parser.get_default("output"):
        parser.error("output must be another file with --holdout")
    if len(arguments.lr) not in (1, len(arguments.arms)):
        parser.error(f"lr must be 1 or {len(arguments.arms)} values, got {len(arguments.lr)}")
    rates = arguments.lr * (len(arguments.arms) // len(arguments.lr))
    table = Table(
        arguments.output, ("arm", "model", "lr", "turn"), "experiments.benchmarks.demos.hybrid"
    )
    cores = sorted(os.sched_getaffinity(0))[:2]
    prefixes = [["taskset", "-c", str(core)] for core in cores]
    data = {"dataset": arguments.dataset, "label-column": arguments.label_column}
    data |= {"model": arguments.model, "train-samples": 5000, "epochs": arguments.epochs}
    data |= {"holdout": arguments.holdout} if arguments.holdout else {}
    for turn in range(arguments.turns):
        for arm, lr in zip(arguments.arms, rates, strict=True):
            if not table.has(arm, arguments.model, lr, turn):
                flags = {**data, **OPTIMIZERS[arguments.model], **ARMS[arm], "lr": lr, "seed": turn}
                found = run_train(prefixes, "127.0.0.1", flags)
                table.add(arm, arguments.model, lr, turn, found)
    if arguments.turns > 1 and not arguments.holdout:
        print("\n".join(verdicts(table.rows, arguments.model)))


@dataclass(frozen=True)
class Versus:
    """An arm beside the control, by turn.

    Attributes:
        ratios: Its seconds over the control's.
        less: Its accuracy less the control's, in points.
        low: Lower end of the one-sided 95 % interval of that difference's mean.
    """

    ratios: list[float]
    less: list[float]
    low: float

    @property
    def verdict(self) -> str:
        """Whether it is as good, in words."""
        shown = "not inferior" if self.low > -MARGIN else "not shown to be not inferior"
        return f"{shown} by {MARGIN:g} point"


def compare(rows: Sequence[Mapping[str, str]], model: str) -> dict[str, Versus]:
    """Return each arm of a model, but the control, beside the control."""
    by_arm: dict[str, dict[str, Mapping[str, str]]] = {}
    for row in rows:
        if row["model"] == model:
            by_arm.setdefault(row["arm"], {})[row["turn"]] = row
    control, found = by_arm.pop(CONTROL), {}
    for arm, own in by_arm.items():
        pairs = [(own[turn], control[turn]) for turn in own if turn in control]
        less = [100 * (float(a["accuracy"]) - float(b["accuracy"])) for a, b in pairs]
        half = student.ppf(0.95, len(less) - 1) * statistics.stdev(less) / len(less) ** 0.5
        ratios = [float(a["train_s"]) / float(b["train_s"]) for a, b in pairs]
        found[arm] = Versus(ratios, less, statistics.fmean(less) - half)
    return found


def verdicts(rows: Sequence[Mapping[str, str]], model: str) -> list[str]:
    """Return a line for each arm but the control: seconds over its, and whether it is as good."""
    return [
        f"{arm}: {statistics.fmean(found.ratios):.2f} of the seconds, accuracy "
        f"{statistics.fmean(found.less):+.1f} points (at least {found.low:+.1f}): {found.verdict}, "
        f"n={len(found.less)}"
        for arm, found in compare(rows, model).items()
    ]


if __name__ == "__main__":
    main()
