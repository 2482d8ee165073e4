"""What an epoch of each way of training takes, from what was measured or said; which to take.

Pure: nothing is run here. A way is settings of a run, and its plans are those that the run makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dbsl.base.errors import SettingError, as_given, plural
from dbsl.cluster.formats import joint_messages, message_bytes
from dbsl.config.complete import from_workers
from dbsl.config.fields import UNSET, without_effect
from dbsl.config.settings import FLOAT32, RunConfig, takes_joint_steps, wire_of
from dbsl.plan.follow import PlanMaker
from dbsl.plan.islands import Islands
from dbsl.plan.machines import KnownWorkers, largest_remainder
from dbsl.plan.types import Plan, TimeModel
from dbsl.profile.memory import MemoryModel
from dbsl.run.workers import equal_but_for_noise

if TYPE_CHECKING:
    from dbsl.extras.emulate import EmulatedLink

JOINT_WIRES, ROUND_WIRES, ROUNDS = ("float32", "bf16", "powersgd:4:4"), ("float32", "int4"), 8
OTHER_ROUNDS = 4  # asp and islands
AS_FAST = 1.05  # times the fastest's seconds: ways up to there count as equally fast
INNER = "inner float32"  # the exchange of gradients inside a worker of several processes
# If several ways are as fast as the fastest, the first of these is advised; among rounds the most,
# then float32. The order follows measured accuracies: workers that meet more often lose less.
RULES = (
    ("step equal", "float32", "little is to be gained"),
    ("step balanced", "float32", "unlike workers get unlike parts"),
    ("step", "bf16", "bf16 sends {less}"),
    ("step", "powersgd", "PowerSGD sends {less}"),
    ("islands", "", "machines that merge send {less}"),
    ("bsp", "", "{merges} an epoch, {less} sent"),
    ("asp", "", "here nobody waits"),
)
# What tells ways apart, as a way has it that says nothing of it.
PLAIN: dict[str, Any] = {
    **dict.fromkeys(("local_batch_sizes", "large_batch_size", "global_batch_size", "merge")),
    **dict.fromkeys(("worker_processes", "workers", "balance_every", "floor", "profile")),
    **{"sync": "bsp", "wire": "float32", "rounds_per_epoch": 1, "balance": "none"},
}
_ALIKE = {"small_workers": None, "small_ratio": 0.0}  # no worker is small


@dataclass(frozen=True)
class Measured:
    """What is known of the processes, one entry each, and of what is between them."""

    models: Mapping[int, TimeModel]  # a step by itself, loading included, by resolution
    shares: Mapping[int, float]  # share of the run's epochs, by resolution
    samples: int
    least: int  # samples that the model trains on
    large: Mapping[int, Sequence[int]]  # samples of a step in rounds, by resolution
    shapes: Sequence[torch.Size]  # trained parameters
    numbers: tuple[int, int]  # weights in matrices, and others
    link: EmulatedLink
    inner: EmulatedLink | None = None  # inside a machine; None: exchanges there take no time
    nodes: Sequence[int] = ()  # the machine of each process, from 0
    # Seconds of exchanges that were measured, by kind and wire: what a joint step takes beyond its
    # slowest process, a merge, or a push and a pull of each worker. The link says the others.
    exchange_s: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    memory: Sequence[MemoryModel] = ()  # none: not known
    sure: float = 0.0  # largest relative spread of what was measured twice

    @property
    def planned(self) -> dict[int, TimeModel]:
        """The time models that plans are made by, and a run is given: in four digits."""
        alike = {r: equal_but_for_noise(m, min(self.large[r])) for r, m in self.models.items()}
        return {
            r: TimeModel(*(np.array([float(f"{x:.4g}") for x in c]) for c in vars(m).values()))
            for r, m in alike.items()
        }


@dataclass(frozen=True)
class Way:
    """A way of training, and what an epoch of it takes."""

    kind: str  # that `RULES` know
    settings: Mapping[str, Any]
    wire: str  # what travels
    rounds: int  # merges of an epoch; of joint steps 1
    plans: Mapping[int, Plan]  # by resolution
    compute_s: tuple[float, ...]  # by worker
    exchange_s: float  # the slowest worker's
    epoch_s: float
    images_per_s: float
    bytes_per_epoch: int  # that all processes send together
    steps: int  # optimizer steps of the worker that takes most
    memory_mib: float | None  # the process that needs most
    fits: bool  # into memory, as far as that is known

    @property
    def waiting_s(self) -> tuple[float, ...]:
        """Seconds that each worker waits for the slowest."""
        most = max(self.compute_s)
        return tuple(0.0 if self.kind == "asp" else most - own for own in self.compute_s)

    @property
    def key(self) -> str:
        """What its exchange is known by."""
        return f"{self.kind} {self.wire}"

    @property
    def name(self) -> str:
        """The way in a few words."""
        rounds = "" if self.kind.startswith("step") else f" {self.rounds}"
        return f"{self.kind}{rounds} {self.wire}"

    def flags(self, given: RunConfig) -> str:
        """Return what is to be added to a command with the settings that were given."""
        own = {n: v for n, v in {**PLAIN, **self.settings}.items() if v != getattr(given, n)}
        words = {n: UNSET if v is None else as_given(v) for n, v in own.items()}
        return " ".join(f"--{name.replace('_', '-')} {text}" for name, text in words.items())


def ways_of(config: RunConfig, measured: Measured) -> list[Way]:
    """Return all ways that the processes of a run can take, the fastest first."""
    found, reason = [], None
    for kind, settings in _candidates(config, measured):
        try:
            found.append(_predict(kind, settings, config, measured))
        except SettingError as error:  # there is no such plan
            reason = error
    if not found:
        raise reason
    if not (fitting := [way for way in found if way.fits]):
        most = min(one.capacity_bytes * (1 - one.margin) for one in measured.memory) / 2**20
        raise SettingError(
            "large_batch_size must be one with which a worker fits into memory, got "
            f"{as_given(from_workers([*measured.large.values()]))}, which needs "
            f"{min(way.memory_mib for way in found):.0f} MiB of {most:.0f}"
        )
    return sorted(fitting, key=lambda way: way.epoch_s)


def advise(ways: Sequence[Way]) -> tuple[Way, str]:
    """Return the way to take, and why in a sentence."""
    taken = min((w for w in ways if w.epoch_s <= AS_FAST * ways[0].epoch_s), key=rank)
    joint = min(ways, key=rank)
    waiting_s = sum(joint.waiting_s) / len(joint.waiting_s)
    exchange, waiting = (s / joint.epoch_s for s in (max(0.0, joint.exchange_s), waiting_s))
    ratio, rounds = joint.bytes_per_epoch / taken.bytes_per_epoch, taken.rounds
    less = f"1/{ratio:.0f} of the bytes" if ratio >= 1.5 else f"{100 / ratio:.0f} % of the bytes"
    balanced, own = RULES[1], RULES[rank(taken)[0]]
    rules = dict.fromkeys([balanced, own] if taken.kind == balanced[0] else [own])
    text = ", ".join(rule[2] for rule in rules).format(less=less, merges=plural(rounds, "merge"))
    return taken, f"a joint step is {exchange:.0%} exchange and {waiting:.0%} waiting: {text}"


def rank(way: Way) -> tuple[int, int, bool]:
    """Return a way's place in the order of `RULES`."""
    rules = ((n, way.kind.startswith(kind), w) for n, (kind, w, _) in enumerate(RULES))
    place = next(n for n, alike, wire in rules if alike and wire in way.wire)
    return place, -way.rounds, way.wire != "float32"


def _candidates(config: RunConfig, measured: Measured) -> Iterator[tuple[str, dict[str, Any]]]:
    large, workers, planned = measured.large, config.workers, measured.planned
    columns = {
        n: [vars(m)[n].tolist() for m in planned.values()] for n in vars(planned[min(large)])
    }
    times = {n: from_workers(c) for n, c in columns.items() if n != "floor" or np.any(c)}
    total = {r: sum(sizes) for r, sizes in large.items()}
    if takes_joint_steps(config) and config.global_batch_size:
        total = dict.fromkeys(large, config.global_batch_size)
    equal = [largest_remainder(np.ones(workers), b).tolist() for b in total.values()]
    splits = {"step equal": equal}
    joint = {"sync": "step", "local_batch_sizes": _in_a_row(equal), **_ALIKE}
    with suppress(SettingError):  # settings without joint steps: each is refused below
        _, maker = _of_way(joint, config, measured)
        plans = (maker.replan(r, planned[r], range(workers)) for r in large)
        balanced = [[worker.local_batch_size for worker in plan.workers] for plan in plans]
        splits |= {"step balanced": balanced} if balanced != equal else {}
    for (kind, split), wire in itertools.product(splits.items(), JOINT_WIRES):
        sizes = {"local_batch_sizes": _in_a_row(split), "wire": wire}
        yield kind, {"sync": "step", **sizes, **_ALIKE, **times}
    rounds = {"large_batch_size": from_workers([*large.values()]), **times}
    for power, wire in itertools.product(range(ROUNDS.bit_length()), ROUND_WIRES):
        yield "bsp", {"rounds_per_epoch": 2**power, "wire": wire, **rounds}
    yield "asp", {"sync": "asp", "rounds_per_epoch": OTHER_ROUNDS, **rounds}
    sizes = np.bincount(measured.nodes or range(workers)).tolist()
    if 1 < len(sizes) < workers:
        starts = np.cumsum([0, *sizes[:-1]])
        joined = [np.add.reduceat(row, starts).tolist() for row in large.values()]
        one = {"worker_processes": tuple(sizes), "large_batch_size": from_workers(joined)}
        yield "islands", {"rounds_per_epoch": OTHER_ROUNDS, **rounds, **one, **_ALIKE}


def _in_a_row(rows: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(itertools.chain(*(rows[:1] if all(row == rows[0] for row in rows) else rows)))


def _of_way(
    settings: Mapping[str, Any], config: RunConfig, measured: Measured
) -> tuple[RunConfig, PlanMaker]:
    """Return a way's settings, and what plans it as its run does, whose step times are given."""
    sizes = settings.get("worker_processes") or (1,) * config.workers
    own = replace(config, **{**PLAIN, **settings, "workers": len(sizes)})
    own = replace(own, small_workers=own.small_workers or 0)
    islands = Islands(sizes)
    starts = [processes.start for processes in islands.processes]
    large = {r: np.add.reduceat(row, starts).tolist() for r, row in measured.large.items()}
    models = {r: islands.join(model) for r, model in measured.planned.items()}
    known = KnownWorkers(models, large, measured=False)
    return own, PlanMaker(own, known, measured.samples, measured.least)


def _predict(kind: str, settings: dict[str, Any], config: RunConfig, measured: Measured) -> Way:
    own, maker = _of_way(settings, config, measured)
    islands, workers = Islands.of(own), own.workers
    plans = {r: maker.first(r, str) for r in measured.shares}
    compute_s, exchange_s, sent, steps = np.zeros(workers), np.zeros(workers), 0.0, 0.0
    inside = np.array(islands.sizes) - 1
    whole = sum(joint_messages(FLOAT32, measured.shapes))
    for resolution, share in measured.shares.items():
        rows = plans[resolution].workers
        samples, counts = np.array([(w.samples, w.steps) for w in rows]).T
        times_s = islands.join(measured.models[resolution]).time(samples, counts)
        if islands.several:
            times_s = times_s + counts * _inside_s(whole, inside + 1, measured)
            sent += share * 2 * whole * float((inside * counts).sum())
        times = counts.max() if own.sync == "step" else own.rounds_per_epoch
        each_s = np.asarray(_exchange_s(kind, own, float(times_s.max()) / times, measured))
        compute_s, exchange_s = compute_s + share * times_s, exchange_s + share * times * each_s
        sent += share * 2 * (workers - 1) * sum(_messages(own, measured)) * times
        steps += share * counts.max()
    slowest = int((compute_s + exchange_s).argmax())
    epoch_s = float((compute_s + exchange_s)[slowest])
    needs, fits = _memory(plans, islands, measured.memory)
    return Way(
        kind=kind,
        settings=settings | without_effect(own),
        wire=own.wire,
        rounds=own.rounds_per_epoch,
        plans=plans,
        compute_s=tuple(compute_s.tolist()),
        exchange_s=float(exchange_s[slowest]),
        epoch_s=epoch_s,
        images_per_s=measured.samples / epoch_s,
        bytes_per_epoch=round(sent),
        steps=round(steps),
        memory_mib=needs,
        fits=fits,
    )


def _exchange_s(
    kind: str, config: RunConfig, behind_s: float, measured: Measured
) -> float | Sequence[float]:
    """Return the seconds of an exchange, perhaps of each worker's: as measured, or by the link."""
    of, names = measured.exchange_s, (kind, *["step equal"] * (config.sync == "step"))

    def by_link(wire: str) -> float | np.ndarray:
        workers, link = config.workers, measured.link
        own = replace(config, wire=wire)
        sizes = _messages(own, measured)
        if config.sync == "step":
            # PowerSGD's one bucket is full when all is computed.
            behind = 0.0 if wire_of(own).rank else behind_s
            return sum(link.joint_step_s(size, workers, behind) for size in sizes)
        if config.sync == "bsp":
            return link.barrier_s(sum(sizes), workers, at_server=False)
        # All come to rank 0's link, which its own worker, or its machine's, do not need.
        nodes = np.array(measured.nodes if len({*measured.nodes}) > 1 else range(workers))
        away = nodes != nodes[0]
        return 2 * away.sum() * link.message_s(sum(sizes)) * away

    for name in names:
        if (known := of.get(f"{name} {config.wire}")) is not None:
            return known
    for name in names:  # what it takes besides sending may be known of float32
        if (whole := of.get(f"{name} float32")) is not None:
            return max(0.0, whole - by_link("float32")) + by_link(config.wire)
    return by_link(config.wire)


def _messages(config: RunConfig, measured: Measured) -> list[int]:
    """Return the bytes of each sum of an exchange."""
    wire = wire_of(config)
    if config.sync == "step":
        return joint_messages(wire, measured.shapes)
    return [message_bytes(wire.name, *measured.numbers)]


def _inside_s(size: int, processes: np.ndarray, measured: Measured) -> np.ndarray:
    """Return the seconds of a sum inside each worker, of so many processes."""
    inner = measured.inner
    by_link = inner.all_reduce_s(size, processes) if inner else 0.0
    return np.where(processes > 1, measured.exchange_s.get(INNER, by_link), 0.0)


def _memory(
    plans: Mapping[int, Plan], islands: Islands, memory: Sequence[MemoryModel]
) -> tuple[float | None, bool]:
    """Return the most MiB that a process needs, and whether all fit."""
    needs = []
    for one, worker in zip(memory, islands.owners, strict=True) if memory else ():
        batch = max(plan.workers[worker].local_batch_size for plan in plans.values())
        at_once = -(-batch // islands.sizes[worker])
        needs.append(one.fixed_bytes + one.reserve_bytes + at_once * one.sample_bytes)
    rooms = [one.capacity_bytes * (1 - one.margin) for one in memory]
    fits = all(need <= room for need, room in zip(needs, rooms, strict=True))
    return (max(needs) / 2**20 if needs else None), fits
