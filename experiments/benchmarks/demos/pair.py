"""Two processes of unlike speed against the fast one alone. Needs root and cgroups.

    sudo python -m experiments.benchmarks.demos.pair --dataset DATASET

experiments/configs/pair/README.md says what is asked. Speeds are CPU quotas. Before the arms of a
turn `train.py --plan-only` predicts an epoch with equal batches, with balanced ones and with the
faster process alone. It needs a machine with nothing else on it. Rows that are there are not made
again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.arms import run_plain, run_ranks, run_train
from experiments.benchmarks.demos.quota import quotas
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MODULE = "experiments.benchmarks.demos.pair"
MACHINES = {"1:1": 1.0, "1.5:1": 1 / 1.5, "2.5:1": 0.4, "4:1": 0.25}  # of a core, the slower one's
BATCH = 128  # samples of a joint step
ARMS = ("alone", "ddp", "train.py", "uneven", "rounds")
MERGES = 8
TOLD = re.compile(r"(equal batches|balanced|worker 0 alone) (\d[\d.]*) s")


def limit(slower: float) -> float:
    """Return the seconds of both over those of the faster one alone, by the speeds."""
    return 1 / (1 + slower)


def flags_of(run: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return a run's settings as flags of train.py."""
    own = {name.replace("_", "-"): value for name, value in run.items()}
    return own | {"sync": "step", "global-batch-size": BATCH, "mixed-precision": precision}


def predict(
    prefixes: Sequence[Sequence[str]], run: dict[str, Any], precision: str
) -> dict[str, float]:
    """Return the predicted seconds of an epoch."""
    command = [
        sys.executable,
        "train.py",
        "--plan-only",
        "--resolutions",
        "32",
        "--report-to",
        "none",
    ]
    # Both are machines of their own here, with one cache: it has the times of one of them.
    flags = flags_of(run, precision) | {"profile": "again"}
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    told = dict(TOLD.findall(run_ranks(command, prefixes, "127.0.0.1")))
    names = {"predicted_ddp": "equal batches", "predicted_both": "balanced"}
    names["predicted_alone"] = "worker 0 alone"
    return {name: float(told[words]) for name, words in names.items()}


def measure(
    arm: str, prefixes: Sequence[Sequence[str]], run: dict[str, Any], precision: str
) -> dict[str, float]:
    """Return seconds and accuracy of one run of an arm."""
    if arm == "train.py":
        flags = flags_of(run, precision) | {"balance": "dynamic", "profile": "again"}
        return run_train(prefixes, "127.0.0.1", flags)
    plain = {"eval_samples": None, **run, "precision": precision, "batch": BATCH}
    if arm == "ddp":
        plain["batch"] = BATCH // len(prefixes)
    elif arm != "alone":
        plain |= {"parts": "uneven", "merges": MERGES * (arm == "rounds")}
    return run_plain(prefixes[: 1 if arm == "alone" else 2], "127.0.0.1", **plain)


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and measure in turns; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--samples", type=int, default=8 * BATCH, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--folder", type=Path, default=Path("experiments/results/pair"))
    arguments = parser.parse_args(argv)
    if (cores := len(os.sched_getaffinity(0))) < 2:
        parser.error(f"cores must be at least 2, got {cores}")
    run = {"dataset": arguments.dataset, "label_column": arguments.label_column, "lr": 0.1}
    run |= {"model": arguments.model, "train_samples": arguments.samples, "eval_samples": 100}
    run |= {"epochs": arguments.epochs}
    table = Table(arguments.folder / "pair.csv", ("arm", "machine", "precision", "turn"), MODULE)
    for turn in range(arguments.turns):
        for name, slower in MACHINES.items():
            key = (name, arguments.precision, turn)
            left = [arm for arm in ARMS if not table.has(arm, *key)]
            with quotas((1.0, slower), (0, 1)) as prefixes, tempfile.TemporaryDirectory() as cache:
                os.environ["XDG_CACHE_HOME"] = cache  # times of this speed
                for arm in left:
                    own = {**run, "seed": turn}
                    found = measure(arm, prefixes, own, arguments.precision)
                    if arm == "train.py":
                        found |= predict(prefixes, own, arguments.precision)
                    table.add(arm, *key, found)


if __name__ == "__main__":
    main()
