"""Joint steps and rounds in every format, two processes on a shaped link. Needs root, ip and tc.

    sudo python -m experiments.benchmarks.demos.slow_link tune --dataset DATASET
    sudo python -m experiments.benchmarks.demos.slow_link accuracy --dataset DATASET
    sudo python -m experiments.benchmarks.demos.slow_link time --dataset DATASET

experiments/configs/links/README.md says what is asked. ``tune`` chooses learning rates on held-out
training images. ``accuracy`` trains every arm with every seed on a link that is not shaped, and
counts bytes: runs repeat to the bit, so that accuracy does not depend on the link. ``time`` trains
every arm at every rate, in turns, and needs a machine with nothing else on it. Rows that are there
are not made again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.benchmarks.demos.arms import half_of, run_plain, run_train
from experiments.benchmarks.demos.link import ADDRESSES, link, sent_bytes
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MODULE = "experiments.benchmarks.demos.slow_link"
RESULTS = Path("experiments/results/links")
BATCH = 64  # a process's
SAMPLES, STEPS = 5000, 40  # of an epoch, of both
EPOCHS = {"test_resnet": 8, "resnet10t": 4}
MEGABYTES = {"test_resnet": 1.5, "resnet10t": 19.7}  # weights in float32
RATES = {"test_resnet": (100.0, 10.0), "resnet10t": (1000.0, 100.0, 10.0)}  # Mb/s
ROUNDS = (1, 4, 8, 16)  # merges an epoch
JOINT = ("float32", "bf16", "powersgd:4:4", "powersgd:4:40")  # 40: the first epoch is uncompressed
MERGED = {"float32": 1.0, "bf16": 0.5, "int8": 0.25, "int4": 0.125, "int2": 0.0625}  # of the bytes
TUNING_SEEDS, GRID = (100, 101), (0.05, 0.1, 0.2)
LOCAL_STEPS = 8  # as in the documentation of LocalSGD
WHOLE_S, PART_S = 60.0, 30.0


@dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        rounds: Merges an epoch; 0: joint steps.
        wire: What travels; empty: a loop of Accelerate's documentation.
    """

    rounds: int
    wire: str = ""

    def __str__(self) -> str:
        if not self.wire:
            return "accelerate_local_sgd" if self.rounds else "accelerate_ddp"
        return f"rounds_{self.rounds} {self.wire}" if self.rounds else f"step {self.wire}"

    @property
    def family(self) -> str:
        """The arm in float32 whose learning rate it has."""
        return str(Arm(self.rounds, "float32"))

    def link_s(self, model: str, megabits: float) -> float:
        """Return about how long an epoch's exchanges take, to choose how much of a run is timed."""
        wire, _, steps = self.wire.partition(":4:")
        share = int(steps) / STEPS / EPOCHS[model] + 0.02 if steps else MERGED.get(wire, 1.0)
        return (self.rounds or STEPS) * share * MEGABYTES[model] * 8 / megabits


DDP, LOCAL_SGD = Arm(0), Arm(4)  # 4.9 averages an epoch
ARMS = (
    *(DDP, LOCAL_SGD),
    *(Arm(0, wire) for wire in JOINT),
    *(Arm(rounds, wire) for rounds in ROUNDS for wire in MERGED),
)
FAMILIES = tuple(Arm(rounds, "float32") for rounds in (0, *ROUNDS))


def main(argv: Sequence[str] | None = None) -> None:
    """Run a part; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["tune", "accuracy", "time"])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--seeds", nargs="+", type=int, help="unset: 0 to 4; with time 0 to 2")
    parser.add_argument("--models", nargs="+", default=list(EPOCHS), choices=list(EPOCHS))
    parser.add_argument("--megabits", nargs="+", type=float, help="of part time")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=[],
        metavar="ARM",
        help="unset: all; tune: those in float32",
    )
    parser.add_argument("--folder", type=Path, default=RESULTS)
    arguments = parser.parse_args(argv)
    for name in set(arguments.arms) - set(map(str, ARMS)):
        parser.error(f"arms must be among {', '.join(map(str, ARMS))}; got {name}")
    data = {"dataset": arguments.dataset, "label_column": arguments.label_column}
    tuned = Table(arguments.folder / "tuning.csv", ("arm", "model", "lr", "seed"), f"{MODULE} tune")
    arms = [arm for arm in ARMS if str(arm) in arguments.arms]
    if arguments.part == "tune":
        tune(tuned, arguments.models, data, arms or FAMILIES)
        return
    arms = arms or ARMS
    runs = {
        (arm, model): {**data, "model": model, "lr": rate_of(tuned.rows, arm, model)}
        for model in arguments.models
        for arm in arms
    }
    for (arm, model), run in runs.items():
        if run["lr"] is None:
            parser.error(f"lr must be tuned first, got no end of the grid for {arm} of {model}")
    if arguments.part == "accuracy":
        table = Table(
            arguments.folder / "accuracy.csv", ("arm", "model", "seed"), f"{MODULE} accuracy"
        )
        for seed in arguments.seeds or range(5):
            for (arm, model), run in runs.items():
                if not table.has(arm, model, seed):
                    table.add(arm, model, seed, whole_run(arm, {**run, "seed": seed}))
        return
    keys = ("arm", "model", "megabits", "turn")
    table = Table(arguments.folder / "time.csv", keys, f"{MODULE} time")
    for turn in arguments.seeds or range(3):
        for model in arguments.models:
            for megabits in arguments.megabits or RATES[model]:
                for arm in arms:
                    if not table.has(arm, model, megabits, turn):
                        run = {**runs[arm, model], "seed": turn}
                        table.add(arm, model, megabits, turn, timed_run(arm, megabits, run))


def tune(table: Table, models: Sequence[str], data: dict[str, Any], arms: Sequence[Arm]) -> None:
    """Train each arm at each rate on its grid; an end that is best extends the grid."""
    for model in models:
        for arm in arms:
            run = {**data, "model": model, "holdout": 0.1, "eval_samples": SAMPLES}

            def train(lr: float, seed: int, arm: Arm = arm, run: dict[str, Any] = run) -> dict:
                with link(None) as prefixes:
                    return measure(arm, prefixes, {**run, "lr": lr, "seed": seed})

            tune_arm(table, str(arm), model, train)


def tune_arm(
    table: Table, arm: str, model: str, train: Callable[[float, int], dict[str, float]]
) -> None:
    """Train an arm at each rate, ``train(lr, seed)``, until the best is at no end of the grid."""
    grid = list(GRID)
    while grid:
        for lr in grid:
            for seed in TUNING_SEEDS:
                if not table.has(arm, model, lr, seed):
                    table.add(arm, model, lr, seed, train(lr, seed))
        tried = mean_by_rate(table.rows, arm, model)
        best = max(tried, key=tried.__getitem__)
        grid = [best / 2] * (best == min(tried)) + [best * 2] * (best == max(tried))


def mean_by_rate(rows: Sequence[dict[str, str]], arm: str, model: str) -> dict[float, float]:
    """Return the mean held-out accuracy of each rate that all tuning seeds have tried."""
    own = [row for row in rows if (row["arm"], row["model"]) == (arm, model)]
    found: dict[float, list[float]] = {}
    for row in own:
        found.setdefault(float(row["lr"]), []).append(float(row["accuracy"]))
    return {lr: fmean(each) for lr, each in found.items() if len(each) == len(TUNING_SEEDS)}


def best_rate(rows: Sequence[dict[str, str]], arm: str, model: str) -> float | None:
    """Return the rate with the highest mean, or None where the grid has not been run to its end."""
    means = mean_by_rate(rows, arm, model)
    best = max(means, key=means.__getitem__, default=None)
    return None if best in (None, min(means, default=0), max(means, default=0)) else best


def rate_of(rows: Sequence[dict[str, str]], arm: Arm, model: str) -> float | None:
    """Return the best rate of an arm, if it was tuned itself, or else that of its family."""
    own = best_rate(rows, str(arm), model)
    return own if own is not None else best_rate(rows, arm.family, model)


def whole_run(arm: Arm, run: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy after all epochs, and the bytes that a worker sent in an epoch."""
    sent: list[int] = []
    with link(None) as prefixes:
        found = measure(arm, prefixes, run, lambda: sent.append(sent_bytes()))
        sent.append(sent_bytes())
    epochs = EPOCHS[run["model"]]
    half, end = sent
    return {
        "lr": run["lr"],
        "accuracy": found["accuracy"],
        "megabytes": (end - half) / 2 / (epochs - half_of(epochs)) / 1e6,  # a worker's
        "total_megabytes": end / 2 / 1e6,  # start, first epochs and evaluation too
    }


def timed_run(arm: Arm, megabits: float, run: dict[str, Any]) -> dict[str, float]:
    """Return seconds of an epoch once warm, and of the whole training.

    Where its exchanges take more than a minute only two epochs are run, and of a quarter of the
    images if they are still too long. Then a first epoch and later ones like the second are the
    whole. A row says what was run, as epochs and as share of the images.
    """
    epochs, share = EPOCHS[run["model"]], 1.0
    link_s = arm.link_s(run["model"], megabits)
    ran = epochs if (whole := epochs * link_s <= WHOLE_S) else 2
    if not whole and link_s > PART_S and arm.rounds != 1 and arm is not LOCAL_SGD:
        share = 10 / 40 if arm.wire else 10 / 39  # Accelerate's loop leaves out the last few images
    with link(megabits) as prefixes:
        run = run if whole else {**run, "eval_samples": 100}
        found = measure(arm, prefixes, run, epochs=ran, share=share)
    first_s = (found["train_s"] - (ran - half_of(ran)) * found["epoch_s"]) / half_of(ran)
    whole_s = found["train_s"] if whole else (first_s + (epochs - 1) * found["epoch_s"]) / share
    row = {"lr": run["lr"], "epochs": ran, "share": share, "epoch_s": found["epoch_s"] / share}
    return {**row, "train_s": whole_s, **({"accuracy": found["accuracy"]} if whole else {})}


def measure(
    arm: Arm,
    prefixes: Sequence[Sequence[str]],
    run: dict[str, Any],
    halfway: Any = None,
    *,
    epochs: int | None = None,
    share: float = 1.0,
) -> dict[str, float]:
    """Return seconds and accuracy of one run of an arm.

    Args:
        arm: What is run.
        prefixes: Of both processes' commands.
        run: Settings of plain.py, by its names.
        halfway: See `run_train`.
        epochs: Of the run; None: all.
        share: Of the images, and of the rounds and PowerSGD's first steps; an epoch of a quarter
            then has steps and rounds like those of a whole one.
    """
    run = {**run, "epochs": epochs or EPOCHS[run["model"]], "train_samples": int(SAMPLES * share)}
    if not arm.wire:
        steps = LOCAL_STEPS if arm.rounds else 1
        plain = {"eval_samples": None, **run, "batch": BATCH, "local_steps": steps}
        return run_plain(prefixes, ADDRESSES[0], halfway, **plain)
    flags: dict[str, Any] = {name.replace("_", "-"): value for name, value in run.items()}
    flags |= {"local-batch-sizes": [BATCH, BATCH], "wire": scaled(arm.wire, share)}
    flags |= {"slope": 0.001, "intercept": 0.005}  # not measured: equal shares in every run
    flags |= {"rounds-per-epoch": int(arm.rounds * share)} if arm.rounds else {"sync": "step"}
    return run_train(prefixes, ADDRESSES[0], flags, halfway)


def scaled(wire: str, share: float) -> str:
    """Return PowerSGD with a share of its uncompressed first steps; other formats as they are."""
    name, *numbers = wire.split(":")
    return wire if not numbers else f"{name}:{numbers[0]}:{max(2, round(int(numbers[1]) * share))}"


if __name__ == "__main__":
    main()
