"""Slow links at equal virtual time, four simulated workers: what is best at which rate?

    python -m experiments.benchmarks.slow epochs --dataset FOLDER
    python -m experiments.benchmarks.slow tune --dataset FOLDER --jobs 2
    python -m experiments.benchmarks.slow run --dataset FOLDER --jobs 2 --seeds 5

experiments/configs/slow/README.md is the registration. Every arm has as many epochs as fit into the
virtual seconds that `dual_3` of experiments/configs/gap takes on the link. `tune` climbs on
held-out training images: from an arm's start (on later links from its best point on the first) it
moves to the best neighbour, one place up or down in one setting or half or twice the learning rate,
until none is better. `run` takes what `tune` has found. An arm of several parts is a chain of
`train.py` calls on one run folder, a part for each stage of the learning rate, as in recipe.py.

One GPU takes 16 runs at a time (`--jobs 16`) under NVIDIA's MPS. Images packed by `gpu --pack`
need experiments/benchmarks/gpu/standin first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from threading import Lock, Semaphore
from typing import Any

from accelerate import Accelerator

import train
from dbsl.config.complete import with_resolved
from dbsl.config.parse import parse_config
from dbsl.config.settings import RunConfig
from dbsl.data.sources import TrainingData
from dbsl.plan.stages import default_milestones
from dbsl.run.prepare import Replaced, prepare
from dbsl.run.training import SimulatedTimes
from experiments.benchmarks.demos.table import Table

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "experiments/configs"
RESULTS = Path("experiments/results/slow")
TUNING_SEEDS = (100, 101)
AGAIN = 3  # settings of the first tuning seed that the second one tries, too
BUDGET = "gap/dual_3"  # an arm, whose seconds all have for
GBPS = {0.1: 133, 0.01: 133, 1.0: 66}  # its epochs by link; in the order in which they run
_DATA: dict[int | None, TrainingData] = {}  # by the number of training images
Point = tuple[int, ...]  # the place of each of an arm's settings, and n of the rate 0.1 * 2**n

# After joint steps: what a chain's later part must take back.
ROUNDS = {"sync": "bsp", "local-batch-sizes": "None", "link-overlap": 0, "wire": "float32"}
LARGE = "causes/all_large_rounds_8"  # 156 samples a step, eight steps an epoch
HALVED = "16"  # merges an epoch that leave a worker 78 samples between them
DUAL_3 = ("gap/dual_3", "causes/dual_3_rounds_4", "causes/dual_3_rounds_8")  # 1, 4 and 8 merges
DUAL_4 = ("gap/dual_4", "causes/dual_4_rounds_4", "causes/dual_4_rounds_8")
MERGES = ("1", "2", "4", "8", "16")
SIZES = tuple(",".join([size] * 4) for size in ("32", "64", "128", "256"))


@dataclass(frozen=True)
class Arm:
    """Flags of train.py for all parts, `settings` that are tuned beside the rate, and parts.

    `start` has the place of each setting, and n of the rate, on the first link.
    """

    flags: Mapping[str, Any]
    start: Point
    settings: Mapping[str, Sequence[str]] = field(default_factory=dict)
    parts: Sequence[Mapping[str, Any]] = ({},)  # flags by stage of the learning rate

    def at(self, point: Point) -> list[dict[str, Any]]:
        """Return the flags of each part at a point, but for the rate."""
        chosen = {
            name: own[n] for (name, own), n in zip(self.settings.items(), point, strict=False)
        }
        found = [{**self.flags, **chosen, **part} for part in self.parts]
        for flags in found:
            if flags.get("config") == LARGE and flags.get("sync") != "step":
                size = "78" if flags["rounds-per-epoch"] == HALVED else "156"
                flags["large-batch-size"] = f"{size},{size}"
        return found

    def neighbours(self, point: Point) -> list[Point]:
        """Return the points that differ from this one by one place in one setting."""
        moved = [
            (*point[:n], place + by, *point[n + 1 :])
            for n, place in enumerate(point)
            for by in (-1, 1)
        ]
        sizes = [len(own) for own in self.settings.values()]
        return [p for p in moved if all(0 <= n < size for n, size in zip(p, sizes, strict=False))]


JOINT = {"config": "gap/ddp_128", "link-overlap": 0.5}
PARTS_OF_128 = {"sync": "step", "local-batch-sizes": "32,32,32,32", "rounds-per-epoch": 1}
ARMS = {
    "ddp": Arm(JOINT, (1,)),
    "ddp_fp16": Arm(JOINT | {"wire": "fp16"}, (1,)),
    "powersgd": Arm(
        {"config": "gap/ddp_128"},
        (2, 2),
        {"wire": ("powersgd:1", "powersgd:2", "powersgd:4", "powersgd:8")},
    ),
    "larger_batch": Arm(
        JOINT,
        (1, 3),
        {"local-batch-sizes": SIZES[1:]},
    ),
    "local_sgd": Arm({"config": LARGE}, (2, 3), {"rounds-per-epoch": MERGES}),
    "diloco": Arm(
        {"config": LARGE, "merge": "delta"},
        (2, 1, 1, 3),
        {
            "rounds-per-epoch": MERGES,
            "outer-lr": ("0.35", "0.7", "1.4"),
            "outer-momentum": ("0.2", "0.5", "0.8", "0.9"),
        },
    ),
    "post_local": Arm(
        {"config": LARGE},
        (2, 2),
        {"rounds-per-epoch": MERGES},
        (PARTS_OF_128 | {"link-overlap": 0.5, "wire": "fp16"}, ROUNDS),
    ),
    "qsr": Arm(
        {"config": LARGE}, (3, 3), {"rounds-per-epoch": MERGES}, ({}, {"rounds-per-epoch": 1})
    ),
    "dual_3_rounds": Arm({}, (1, 2), {"config": DUAL_3}),
    "dual_4_rounds": Arm({}, (1, 3), {"config": DUAL_4}),
    "dual_4_int": Arm({}, (2, 1, 3), {"config": DUAL_4, "wire": ("int2", "int4", "int8")}),
}

AFTER = {  # the fact: what a sceptic missed
    "powersgd_larger": Arm(
        {"config": "gap/ddp_128"},
        (1, 1, 2),
        {
            "local-batch-sizes": SIZES,
            "wire": ("powersgd:4", "powersgd:8", "powersgd:16"),
        },
    ),
    "powersgd_1_larger": Arm(
        {"config": "gap/ddp_128"},
        (1, 0, 2),
        {
            "local-batch-sizes": SIZES,
            "wire": ("powersgd:1", "powersgd:2", "powersgd:4"),
        },
    ),
    "fp16_larger": Arm(JOINT | {"wire": "fp16"}, (2, 3), {"local-batch-sizes": SIZES}),
    "local_sgd_once": Arm({"config": LARGE}, (0, 2), {"rounds-per-epoch": MERGES}),
    "local_sgd_int": Arm(
        {"config": LARGE},
        (3, 1, 2),
        {"rounds-per-epoch": MERGES, "wire": ("int2", "int4", "int8")},
    ),
}
EVERY = ARMS | AFTER


def main(argv: Sequence[str] | None = None) -> None:
    """Print the epochs of all arms, tune them, or make the runs that the table lacks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("do", choices=("epochs", "tune", "run"))
    parser.add_argument("--dataset", required=True, help="folder of CIFAR-100")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(EVERY))
    parser.add_argument("--gbps", nargs="+", type=float, default=list(GBPS), choices=list(GBPS))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=5, help="of `run`")
    given = parser.parse_args(argv)
    every = [(gbps, name) for gbps in given.gbps for name in given.arms]
    if given.do == "epochs":
        for gbps, name in every:
            print(
                f"{gbps:g} Gb/s  {name}: {epochs_of(given.dataset, gbps, EVERY[name].start, name)}"
            )
        return
    tuning, registered = (
        _Runs(given.dataset, given.jobs, name) for name in ("tuning", "arms_runs")
    )

    def work(case: tuple[float, str]) -> None:
        if given.do == "tune":
            print(f"{case[0]:g} Gb/s  {case[1]}: {tune(tuning, *case)}")
        else:
            point = best(tuning.table.rows, *case)
            registered.make([(*case, point, seed) for seed in range(given.seeds)])

    for link in given.gbps:  # its arms beside each other: each climbs a step at a time
        with ThreadPoolExecutor(len(given.arms)) as arms:
            list(arms.map(work, [case for case in every if case[0] == link]))


def tune(runs: _Runs, gbps: float, name: str) -> Point:
    """Return an arm's best point on a link, by the mean of the tuning seeds."""
    first, *others = TUNING_SEEDS

    def measured(points: Iterable[Point], seed: int = first) -> dict[Point, float]:
        cases = {point: (gbps, name, point, seed) for point in points}
        runs.make([*cases.values()])
        return {point: runs.accuracy(*case) for point, case in cases.items()}

    known, start = next(iter(GBPS)), EVERY[name].start
    if gbps != known and name in ARMS:
        start = best(runs.table.rows, known, name)
    found = climb(start, EVERY[name].neighbours, measured)
    for seed in others:
        measured(sorted(found, key=found.__getitem__, reverse=True)[:AGAIN], seed)
    return best(runs.table.rows, gbps, name)


def climb(
    start: Point,
    neighbours: Callable[[Point], list[Point]],
    measured: Callable[[Iterable[Point]], Mapping[Point, float]],
) -> dict[Point, float]:
    """Return what was measured on the way from a start to a point that no neighbour exceeds."""
    found = dict(measured([start]))
    while True:
        here = max(found, key=found.__getitem__)
        if not (new := [point for point in neighbours(here) if point not in found]):
            return found
        found |= measured(new)


def best(rows: Sequence[Mapping[str, Any]], gbps: float, name: str) -> Point:
    """Return the point with the highest mean over the tuning seeds, if all of them tried it.

    Raises:
        LookupError: If there is none.
    """
    found: dict[str, list[float]] = {}
    for row in rows:
        if (row["arm"], float(row["gbps"])) == (name, gbps):
            found.setdefault(row["point"], []).append(float(row["accuracy"]))
    means = {point: fmean(own) for point, own in found.items() if len(own) == len(TUNING_SEEDS)}
    if not means:
        raise LookupError(f"{name} must be tuned at {gbps:g} Gb/s before it runs")
    return tuple(map(int, max(means, key=means.__getitem__).split()))


class _Runs:
    """A table of runs, and those that it lacks."""

    def __init__(self, dataset: str, jobs: int, table: str) -> None:
        self.dataset, self._free, self._lock = dataset, Semaphore(jobs), Lock()
        self._tuning = table == "tuning"
        keys = ("arm", "gbps", "point", "turn")
        self.table = Table(RESULTS / f"{table}.csv", keys, "experiments.benchmarks.slow")

    def make(self, cases: Sequence[tuple[float, str, Point, int]]) -> None:
        """Make the runs that are not in the table, as many at a time as there are jobs."""
        lacking = [case for case in cases if not self.table.has(*_key(*case))]
        with ThreadPoolExecutor(max(1, len(lacking))) as pool:
            list(pool.map(self._run, lacking))

    def accuracy(self, *case: Any) -> float:
        key = dict(zip(("arm", "gbps", "point", "turn"), _key(*case), strict=True))
        row = next(row for row in self.table.rows if key.items() <= row.items())
        return float(row["accuracy"])

    def _run(self, case: tuple[float, str, Point, int]) -> None:
        gbps, name, point, seed = case
        with self._lock:  # planning is not for several threads
            epochs = epochs_of(self.dataset, gbps, point, name)
        flags = {"dataset": self.dataset, "link-gbps": gbps, "lr": rate(point), "seed": seed}
        flags |= {"holdout": 0.1} if self._tuning else {}
        with self._free:
            found = measure(EVERY[name].at(point), epochs, flags)
        self.table.add(*_key(*case), {"lr": rate(point), "epochs": epochs} | found)


def _key(gbps: float, name: str, point: Point, seed: int) -> tuple[str, str, str, str]:
    return name, f"{gbps:g}", " ".join(map(str, point)), str(seed)


def rate(point: Point) -> float:
    """Return a point's learning rate."""
    return 0.1 * 2.0 ** point[-1]


# --- epochs


class _LoadedOnce(Replaced):
    """What is prepared with data that are read once."""

    def load_data(self, config: RunConfig, accelerator: Accelerator) -> TrainingData:
        if config.train_samples not in _DATA:
            _DATA[config.train_samples] = super().load_data(config, accelerator)
        return _DATA[config.train_samples]


@cache
def _accelerator() -> Accelerator:
    return Accelerator(cpu=True)


@cache
def epoch_s(dataset: str, gbps: float, flags: tuple[tuple[str, Any], ...]) -> float:
    """Return the virtual seconds of an epoch, which is planned and not trained."""
    words = ["--dataset", dataset, "--link-gbps", str(gbps), *_as_words(dict(flags))]
    config = with_resolved(parse_config(train.Config, words))
    run = prepare(config, _accelerator(), train.loss_function, _LoadedOnce())
    times, workers = SimulatedTimes(run), range(run.config.workers)
    return sum(max(sum(times(worker, 0, turn)) for worker in workers) for turn in range(run.rounds))


def epochs_of(dataset: str, gbps: float, point: Point, name: str) -> int:
    """Return the most epochs that fit into the seconds of `BUDGET` on a link."""
    seconds = [
        epoch_s(dataset, gbps, tuple(flags.items()))
        for flags in ({"config": BUDGET}, *EVERY[name].at(point))
    ]
    return fitting(GBPS[gbps] * seconds[0], seconds[1:])


def fitting(budget_s: float, seconds: Sequence[float]) -> int:
    """Return the most epochs whose stages take at most a budget, by the seconds of their epochs."""
    epochs = 1
    while True:
        ends = stage_ends(epochs + 1)
        lengths = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
        taken = (length * seconds[min(n, len(seconds) - 1)] for n, length in enumerate(lengths))
        if sum(taken) > budget_s * (1 + 1e-9):  # all epochs of equal times
            return epochs
        epochs += 1


def stage_ends(epochs: int) -> tuple[int, ...]:
    """Return the epochs after which the learning rate's stages end."""
    return (*default_milestones(epochs), epochs)


# --- a run


def measure(
    parts: Sequence[Mapping[str, Any]], epochs: int, common: Mapping[str, Any]
) -> dict[str, float]:
    """Return accuracy at the last epoch and virtual seconds of a chain of runs."""
    ends = stage_ends(epochs)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "run")
        for number in range(len(ends)) if len(parts) > 1 else [len(ends) - 1]:
            flags = {**parts[min(number, len(parts) - 1)], **common, "epochs": ends[number]}
            flags |= {"warmup-epochs": min(2.0, epochs / 10), "eval-every": 1000}  # at the end
            flags["resume" if folder.exists() else "output-dir"] = folder
            words = ["--report-to", "none", "--no-save-best", "--allow-config-change"]
            # The end of this part is a milestone of the next.
            words += ["--lr-milestones", *map(str, ends[:number])]
            if not _train([*words, *_as_words(flags)]):
                return {"accuracy": 0.0}
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    evaluation = [row for row in map(json.loads, lines) if row["event"] == "eval"][-1]
    return {
        "virtual_s": evaluation["virtual_time_s"],
        "accuracy": 100 * summary["final_accuracy"],
        "train_accuracy": 100 * summary["train_accuracy"],
    }


def _train(words: Sequence[str]) -> bool:
    """Run train.py; return whether its losses stayed finite."""
    done = subprocess.run(
        [sys.executable, "train.py", *words],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "max_bad_rounds" not in done.stderr:
        raise RuntimeError(f"train.py {' '.join(words)} ended with: {done.stderr[-2000:]}")
    return not done.returncode


def _as_words(flags: Mapping[str, Any]) -> list[str]:
    path = {"config": CONFIGS / f"{flags['config']}.yaml"}
    return [word for name, value in (flags | path).items() for word in (f"--{name}", str(value))]


if __name__ == "__main__":
    main()
