"""Slow links with four and eight simulated workers: joint steps, PowerSGD, rounds of few bits.

    python -m experiments.benchmarks.demos.more_workers tune --dataset DATASET --jobs 2
    python -m experiments.benchmarks.demos.more_workers run --dataset DATASET --jobs 2

experiments/configs/links/README.md says what is asked ('More workers'). Seconds are those of the
virtual clock. The link's rate changes no digit, so that all seeds run at one rate, and one at both.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from experiments.benchmarks.demos.arms import run_train
from experiments.benchmarks.demos.slow_link import (
    EPOCHS,
    RESULTS,
    SAMPLES,
    Arm,
    rate_of,
    tune_arm,
)
from experiments.benchmarks.demos.table import Table

MODULE = "experiments.benchmarks.demos.more_workers"
CASES = {"four": ("test_resnet", 4), "eight": ("test_resnet", 8), "four_larger": ("resnet10t", 4)}
BATCH = 128  # samples of a joint step
STEP_S = {"test_resnet": (0.00037, 0.007), "resnet10t": (0.0018, 0.008)}  # a sample's, a step's
OVERLAP = 0.5  # of a step's computing that uncompressed gradients travel behind
TUNED = (Arm(0, "float32"), Arm(0, "powersgd:4:4"), Arm(8, "float32"))
ARMS = (*TUNED, Arm(8, "int4"), Arm(8, "int2"))
RATES = (10.0, 100.0)  # Mb/s
SEEDS = range(5)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune, or make the runs that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["tune", "run"])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(argv)
    path = RESULTS / "more_workers_tuning.csv"
    tuned = Table(path, ("arm", "model", "lr", "seed"), f"{MODULE} tune")
    keys = ("arm", "model", "megabits", "seed")
    table = Table(RESULTS / "more_workers.csv", keys, f"{MODULE} run")

    def tune(case: str, arm: Arm) -> None:
        def train(lr: float, seed: int) -> dict[str, float]:
            return run(case, arm, RATES[0], seed, lr=lr, dataset=given.dataset, holdout=0.1)

        tune_arm(tuned, str(arm), case, train)

    def report(case: str, arm: Arm, megabits: float, seed: int) -> None:
        if not table.has(arm, case, megabits, seed):
            if (lr := rate_of(tuned.rows, arm, case)) is None:
                parser.error(f"lr must be tuned first, got no end of the grid for {arm} of {case}")
            found = run(case, arm, megabits, seed, lr=lr, dataset=given.dataset)
            table.add(arm, case, megabits, seed, {"lr": lr, **found})

    work = [
        partial(report, case, arm, megabits, seed)
        for case in given.cases
        for megabits in RATES
        for seed in (SEEDS if megabits == RATES[0] else SEEDS[:1])
        for arm in ARMS
    ]
    if given.part == "tune":
        work = [partial(tune, case, arm) for case in given.cases for arm in TUNED]
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in [pool.submit(each) for each in work]:
            done.result()


def run(case: str, arm: Arm, megabits: float, seed: int, **flags: Any) -> dict[str, float]:
    """Return accuracy and virtual seconds of one run."""
    model, workers = CASES[case]
    slope, intercept = STEP_S[model]
    flags |= {"seed": seed, "model": model, "epochs": EPOCHS[model], "cpu-threads": 1}
    flags |= {"label-column": "coarse_label", "train-samples": SAMPLES, "workers": workers}
    flags |= {"local-batch-sizes": ",".join([str(BATCH // workers)] * workers), "wire": arm.wire}
    flags |= {"slope": slope, "intercept": intercept, "link-gbps": megabits / 1000}
    flags |= {"rounds-per-epoch": arm.rounds} if arm.rounds else {"sync": "step"}
    flags |= {"link-overlap": OVERLAP} if arm == TUNED[0] else {}
    flags |= {"eval-samples": SAMPLES} if "holdout" in flags else {}
    found = run_train([[]], "127.0.0.1", flags)
    return {name: found[name] for name in ("virtual_s", "accuracy")}


if __name__ == "__main__":
    main()
