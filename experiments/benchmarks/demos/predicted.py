"""What `--plan-only` says of two unlike processes, held against measured epochs. Needs root.

    sudo python -m experiments.benchmarks.demos.predicted --dataset DATASET

Speeds are CPU quotas. At each of them `train.py --plan-only` predicts an epoch with equal batches,
with balanced ones and with the faster process alone; then all three are trained, from the same
step times. It needs a machine with nothing else on it. Rows that are there are not made again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.benchmarks.demos.arms import run_ranks, run_train
from experiments.benchmarks.demos.quota import quotas
from experiments.benchmarks.demos.table import Table

MODULE = "experiments.benchmarks.demos.predicted"
SPEEDS = {"1:1": (1.0, 1.0), "2:1": (1.0, 0.5), "4:1": (1.0, 0.25)}
BATCH = 128  # samples of a joint step
FLAGS = {"model": "test_resnet", "train-samples": 5000, "eval-samples": 500, "lr": 0.1}
FLAGS |= {"epochs": 4, "seed": 0, "sync": "step"}
ARMS = {  # by the words of the prediction
    "equal batches": {"local-batch-sizes": f"{BATCH // 2},{BATCH // 2}"},
    # Both processes have one cache, and are alike but for their quotas.
    "balanced": {"global-batch-size": BATCH, "profile": "again"},
    "worker 0 alone": {"workers": 1, "local-batch-sizes": BATCH},
}
TOLD = re.compile(r"(equal batches|balanced|worker 0 alone) (\d[\d.]*) s")


def predict(prefixes: Sequence[Sequence[str]], flags: dict[str, object]) -> dict[str, float]:
    """Return the predicted seconds of an epoch, by arm."""
    command = [sys.executable, "train.py", "--plan-only", "--resolutions", "32"]
    command += ["--mixed-precision", "no", "--global-batch-size", str(BATCH), "--report-to", "none"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    said = run_ranks(command, prefixes, "127.0.0.1")
    told = {arm: float(seconds) for arm, seconds in TOLD.findall(said.splitlines()[-2])}
    if told.keys() != ARMS.keys():
        raise RuntimeError(f"--plan-only said nothing of {ARMS.keys() - told.keys()}: {said}")
    return told


def main(argv: Sequence[str] | None = None) -> None:
    """Predict and train at each speed; rows of an earlier call stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--turns", type=int, default=2)
    default = Path("experiments/results/uneven/predicted.csv")
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args(argv)
    flags = {**FLAGS, "dataset": arguments.dataset, "label-column": arguments.label_column}
    table = Table(arguments.output, ("arm", "machine", "turn"), MODULE)
    for turn in range(arguments.turns):
        for speeds, parts in SPEEDS.items():
            if all(table.has(arm, speeds, turn) for arm in ARMS):
                continue
            with (
                quotas(parts, (0, 1)) as prefixes,
                tempfile.TemporaryDirectory() as cache,  # the arms train by the times of the plan
            ):
                os.environ["XDG_CACHE_HOME"] = cache
                told = predict(prefixes, flags)
                for arm, own in ARMS.items():
                    alone = arm == "worker 0 alone"
                    found = run_train(prefixes[: 1 if alone else 2], "127.0.0.1", {**flags, **own})
                    row = {"predicted_s": told[arm], "epoch_s": found["epoch_s"]}
                    table.add(arm, speeds, turn, row)


if __name__ == "__main__":
    main()
