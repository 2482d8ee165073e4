"""Two machines of two processes each, 100 Mb/s between them. Needs root, ip and tc.

    sudo python -m experiments.benchmarks.demos.islands tune --dataset DATASET
    sudo python -m experiments.benchmarks.demos.islands run --dataset DATASET

experiments/configs/islands/README.md says what is asked. Machines are network namespaces: their two
processes reach each other without the link, and share a core. ``tune`` chooses learning rates on
held-out training images, on a link that is not shaped. Rows that are there are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.arms import run_train
from experiments.benchmarks.demos.link import ADDRESSES, link
from experiments.benchmarks.demos.slow_link import EPOCHS, SAMPLES, best_rate, tune_arm
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MODULE = "experiments.benchmarks.demos.islands"
MODEL, MEGABITS, ROUNDS = "test_resnet", 100.0, 8
ARMS: dict[str, dict[str, Any]] = {  # each process computes 32 samples a step
    "step": {"sync": "step", "local-batch-sizes": [32] * 4},
    "workers": {"rounds-per-epoch": ROUNDS, "local-batch-sizes": [32] * 4},
    "islands": {"rounds-per-epoch": ROUNDS, "local-batch-sizes": [64] * 2, "worker-processes": 2},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run a part; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["tune", "run"])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(5))
    parser.add_argument("--folder", type=Path, default=Path("experiments/results/islands"))
    arguments = parser.parse_args(argv)
    data = {"dataset": arguments.dataset, "label-column": arguments.label_column}
    data |= {"epochs": EPOCHS[MODEL], "train-samples": SAMPLES}
    held_out = data | {"holdout": 0.1, "eval-samples": SAMPLES}
    keys = ("arm", "model", "lr", "seed")
    tuned = Table(arguments.folder / "tuning.csv", keys, f"{MODULE} tune")
    if arguments.part == "tune":
        for arm in ARMS:
            tune_arm(
                *(tuned, arm, MODEL),
                lambda lr, seed, arm=arm: measure(arm, None, {**held_out, "lr": lr, "seed": seed}),
            )
        return
    rates = {arm: best_rate(tuned.rows, arm, MODEL) for arm in ARMS}
    if missing := [arm for arm, lr in rates.items() if lr is None]:
        parser.error(f"lr must be tuned first, got no end of the grid for {', '.join(missing)}")
    table = Table(arguments.folder / "islands.csv", ("arm", "seed"), f"{MODULE} run")
    for seed in arguments.seeds:
        for arm, lr in rates.items():  # in turn, on one machine
            if not table.has(arm, seed):
                found = measure(arm, MEGABITS, {**data, "lr": lr, "seed": seed})
                table.add(arm, seed, {"lr": lr} | found)


def measure(arm: str, megabits: float | None, flags: dict[str, Any]) -> dict[str, float]:
    """Return seconds of an epoch once warm and of the whole training, and the last accuracy."""
    # Step times are not measured: shares are equal in every run.
    common = {"model": MODEL, "slope": 0.001, "intercept": 0.005}
    with link(megabits) as (one, other):
        return run_train([one, one, other, other], ADDRESSES[0], common | flags | ARMS[arm])


if __name__ == "__main__":
    main()
