"""Random runs: settings, machines, and what befalls them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from dbsl.config.settings import ROUND_WIRES
from dbsl.extras.emulate import Emulation, parse_disturb
from dbsl.extras.streaming import Blocks
from dbsl.plan.types import TimeModel

SYNCS = ("bsp", "ssp", "asp", "step")
BALANCES = ("none", "dynamic", "dbs")
WIRES = {"bsp": ROUND_WIRES, "step": ("float32", "bf16", "fp16")}
WIRES |= {"ssp": ("float32",), "asp": ("float32",)}
ALONE = ("ssp", "asp")  # workers are lost


class Loss(NamedTuple):
    """A simulated worker that is lost."""

    time_s: float  # simulated
    worker: int


class Stop(NamedTuple):
    """A stop inside a turn, after which the run is resumed."""

    turn: int
    workers: int | None = None  # that it is resumed with; None: as many as before


@dataclass(frozen=True)
class Case:
    """A run to be played.

    Attributes:
        options: Settings of train.py's `Config`.
        samples: Training samples.
        models: True and planned time models, one per process of a worker.
        large: Largest batch of each worker.
        least: Samples of a batch at least.
        emulation: Factors on the workers' times.
        losses: Workers that are lost, at simulated times.
        stops: Where the run is stopped and resumed.
        groups: Samples of each row group, where data are read through a cache; empty: they are not.
        block: Samples that are then shuffled together, give or take a group.
    """

    options: dict[str, Any]
    samples: int
    models: list[TimeModel]
    large: list[int]
    least: int
    emulation: Emulation
    losses: tuple[Loss, ...] = ()
    stops: tuple[Stop, ...] = ()
    groups: tuple[int, ...] = ()
    block: int = 1

    @property
    def joint(self) -> bool:
        """Whether workers take joint steps."""
        return self.options["sync"] == "step" or self.options["push"] != "weights"

    @property
    def blocks(self) -> Blocks | None:
        """What draws an epoch's order; None: any order is as likely as another."""
        return Blocks(np.array(self.groups), self.block) if self.groups else None

    def with_workers(self, workers: int) -> Case:
        """Return the case for as many workers; joint steps keep their global batch."""
        options = self.options | {"workers": workers}
        options["small_workers"] = min(workers, options["small_workers"])
        if sizes := options.get("worker_processes"):
            options["worker_processes"] = tuple(_as_many(sizes, workers))
        if self.joint:
            options.setdefault("global_batch_size", sum(self.large))
        return replace(
            self,
            options=options,
            models=_as_many(self.models, sum(options.get("worker_processes") or (1,) * workers)),
            large=_as_many(self.large, workers),
        )


def _as_many(values: Sequence[Any], number: int) -> list[Any]:
    return [values[place % len(values)] for place in range(number)]


@st.composite
def cases(draw, sync: str | None = None, balance: str | None = None) -> Case:
    """Draw a case."""
    sync = sync or draw(st.sampled_from(SYNCS))
    push = "weights"
    if sync != "step":
        push = draw(st.sampled_from(("weights", "weights", "gradients")))
    workers, epochs = draw(st.integers(2, 5)), draw(st.integers(2, 6 if sync in ALONE else 4))
    least = draw(st.sampled_from((1, 1, 2)))
    rounds = 1 if push == "gradients" else draw(st.integers(1, 4))
    samples = draw(st.integers(workers * rounds * least * 3, 120))
    share = samples // workers // rounds
    large = draw(st.lists(st.integers(least, min(12, share)), min_size=workers, max_size=workers))
    options = {
        "balance": balance or draw(st.sampled_from(BALANCES)),
        "workers": workers,
        "epochs": epochs,
        "rounds_per_epoch": rounds,
        "push": push,
        "min_batch_size": least,
        "wire": draw(st.sampled_from(("float32",) if push == "gradients" else WIRES[sync])),
    }
    options |= draw(_options(sync, options))
    models, emulation = draw(_machines(options))
    loss = st.builds(Loss, _moments(samples, options, models), _worker(workers))
    many = 2 * workers if sync in ALONE and draw(st.booleans()) else 0
    losses = draw(st.lists(loss, min_size=many // 2, max_size=many))
    groups, block = draw(_groups(samples))
    return Case(
        options,
        samples,
        models,
        large if draw(st.booleans()) else [large[0]] * workers,
        least,
        emulation,
        tuple(sorted(losses)),
        draw(_stops(epochs * workers * rounds)),
        groups,
        block,
    )


@st.composite
def _options(draw, sync: str, known: dict[str, Any]) -> dict[str, Any]:
    """Draw the other settings, of a run with these settings."""
    workers, rounds, push = known["workers"], known["rounds_per_epoch"], known["push"]
    balance = known["balance"]
    joint = sync == "step" or push == "gradients"
    every = draw(st.none() | st.integers(1, 6))
    if every and sync in ("ssp", "asp") and not joint:
        every *= rounds
    options = {
        "sync": sync,
        "balance": f"{balance}:{every}" if every and balance != "none" else balance,
        "push": f"gradients:{draw(st.integers(1, 3))}" if push == "gradients" else push,
        "drop_last": joint and draw(st.booleans()),
        "small_workers": 0 if joint else draw(st.integers(0, workers // 2)),
        "staleness": draw(st.integers(0, 3)),
        "resolutions": (8, 16) if draw(st.booleans()) and push == "weights" else (8,),
        "seed": draw(st.integers(0, 99)),
    }
    sizes = st.lists(st.integers(1, 3), min_size=workers, max_size=workers)
    if sync == "bsp" and not joint and draw(st.booleans()):
        options["worker_processes"] = tuple(draw(sizes))
    return options


@st.composite
def _machines(draw, options: dict[str, Any]) -> tuple[list[TimeModel], Emulation]:
    """Draw what the processes' time models are, and how much slower workers are than that."""
    workers = options["workers"]
    processes = sum(options.get("worker_processes") or (1,) * workers)
    intercept, speeds = draw(st.sampled_from((0.002, 0.01))), [1.0] * processes
    if draw(st.booleans()):
        speed = st.sampled_from((1.0, 2.0, 7.0))
        speeds = draw(st.lists(speed, min_size=processes, max_size=processes))
    emulation = Emulation(
        slowdown=draw(st.dictionaries(_worker(workers), st.sampled_from((1.5, 3.0, 20.0)))),
        disturbance=parse_disturb("0.3:1-3:4") if draw(st.booleans()) else None,
        noise=draw(st.sampled_from((0.0, 0.2, 0.8))),
        seed=options["seed"],
    )
    return [TimeModel(0.001 * s, intercept * s) for s in speeds], emulation


def _worker(workers: int) -> st.SearchStrategy[int]:
    return st.integers(0, workers - 1)


def _moments(
    samples: int, options: dict[str, Any], models: list[TimeModel]
) -> st.SearchStrategy[float]:
    """Return moments of which most come while the run lasts."""
    fastest = min(models, key=lambda model: model.slope)
    epoch_s = fastest.time(samples / options["workers"], options["rounds_per_epoch"])
    return st.integers(0, 99).map(lambda part: part / 66 * options["epochs"] * epoch_s)


def _stops(turns: int) -> st.SearchStrategy[tuple[Stop, ...]]:
    stop = st.builds(Stop, st.integers(0, turns), st.none() | st.integers(1, 6))
    return st.lists(stop, max_size=3).map(lambda stops: tuple(sorted(stops, key=lambda s: s.turn)))


@st.composite
def _groups(draw, samples: int) -> tuple[tuple[int, ...], int]:
    """Draw the row groups that the samples lie in, of sizes up to all, and the size of blocks."""
    if draw(st.booleans()):
        return (), 1
    cuts = draw(st.sets(st.integers(1, samples - 1), max_size=20))
    bounds = [0, *sorted(cuts), samples]
    sizes = tuple(b - a for a, b in itertools.pairwise(bounds))
    return sizes, draw(st.integers(1, samples))
