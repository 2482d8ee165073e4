"""Turns of the workers: rounds and their reports, ends of epochs, restarts, lost workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Literal, NamedTuple

Merge = Literal["mean", "delta", "ratio", "half"]
Sync = Literal["bsp", "ssp", "asp", "step"]
Push = Literal["weights", "gradients"]


class StepLine(NamedTuple):
    """A worker's figures, reported every so many of its optimizer steps."""

    worker: int
    epoch: int
    round: int
    step: int  # steps that the worker has taken in the run
    progress: float  # share of the epoch that was over when the step began, in [0, 1)
    loss: float  # mean over the samples since the line before
    learning_rate: float
    # Norm of the mean gradient of the step's batch; with sync step of the global batch; with
    # push_every above 1 of the mean over all batches summed since the last push.
    gradient_norm: float
    images_per_s: float  # since the line before, time between the worker's rounds left out
    memory_gib: float  # see `dbsl.profile.memory.memory_in_use`
    figures: Mapping[str, float] = {}  # the loss function's own, as the loss


@dataclass(frozen=True)
class RoundReport:
    """A worker's report of a round, beside its weights; the server adds the staleness."""

    worker: int
    epoch: int
    round: int
    resolution: int
    local_batch_size: int
    samples: int
    steps: int
    time_s: float  # compute alone: no pull, push or waiting
    loss: float  # mean over the round's samples
    merge_weight: float
    staleness: int = 0
    learning_rate: float = 0.0  # in the round's last step
    predicted_time_s: float = 0.0  # compute time by the plan
    # On the cluster's clock, which is virtual where the cluster is simulated: the round's compute,
    # and the time since the worker's last round, spent waiting for others and in transfers.
    compute_time_s: float = 0.0
    wait_time_s: float = 0.0
    refused: bool = False  # loss or weights were not finite: the round was not merged
    # Squared norms of the gradients of a batch and of a part of it, at the round's first step; a
    # batch of 0 where they were not measured (see dbsl.profile.noise).
    micro_batch: int = 0
    micro_square: float = 0.0
    gradient_batch: int = 0
    gradient_square: float = 0.0
    logged: int = 0  # step lines that follow the report on its way to the main process
    lines: tuple[StepLine, ...] = ()  # these
    figures: Mapping[str, float] = field(default_factory=dict)  # the loss function's own


# Names in rows of metrics.jsonl and in charts, next to which a figure's own name stands.
RESERVED = {
    *(own.name for own in fields(RoundReport)),
    *StepLine._fields,
    *("event", "virtual_time_s", "share", "idle_time_share"),
    *("first_epoch", "from_epoch", "end_epoch", "last_epoch"),
    *(f"workers_{name}" for name in ("compute_time_s", "wait_time_s", "idle_time_share")),
    *(f"{kind}_workers_time_s" for kind in ("small", "large")),
    *(f"predicted_{kind}_workers_time_s" for kind in ("small", "large")),
}


def report_from_plain(values: Mapping[str, Any]) -> RoundReport:
    """Return the report that `asdict` was given, also where it has been a checkpoint since."""
    lines = tuple(StepLine(*line) for line in values.get("lines", ()))
    return RoundReport(**{**values, "lines": lines})


@dataclass(frozen=True)
class Round:
    """A turn: workers of this process train on their parts of one round, from a pull to a push.

    It is one worker's turn, or, where all take joint steps, that of every worker in the process.
    """

    workers: tuple[int, ...]
    epoch: int
    round: int


@dataclass(frozen=True)
class EpochEnd:
    """Every worker has pushed the epoch's last round: time to evaluate and to save."""

    epoch: int
    weights: Any = field(repr=False)  # global weights at that moment: a tensor
    ended_at: float  # the moment, by time.perf_counter()


@dataclass(frozen=True)
class Restart:
    """State that other workers, or workers with other plans, take over from those before.

    Attributes:
        weights: The global weights, a tensor.
        version: Global updates so far.
        clock: Rounds that every worker starts with behind it.
        left: Remainders of the epochs that were begun, as places in their order; other epochs are
            whole.
        steps: Joint steps of the round that were taken.
        learning_rate: Of the last of these.
        optimizers: Optimizer state, by worker.
        server_optimizer: State of the server's optimizer, where gradients are pushed.
        time_s: The virtual clock.
        outer: State of the server's outer optimizer, where `merge` is delta.
        refused: Rounds that were not finite so far.
        reports: Of rounds that were merged, and have not been told of.
        finished: Ends of epochs that have not been told of.
        again: Rounds that a barrier had collected, as (worker, epoch, round): nothing was merged
            from them, and all workers train on their samples again.
        steps_under_way: Those of the joint steps that no log has counted.
        samples_under_way: Samples of these.
    """

    weights: Any = field(repr=False)
    version: int
    clock: int
    left: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    steps: int = 0
    learning_rate: float = 0.0
    optimizers: Mapping[int, Any] = field(default_factory=dict, repr=False)
    server_optimizer: Mapping[str, Any] | None = field(default=None, repr=False)
    time_s: float = 0.0
    outer: Mapping[str, Any] | None = field(default=None, repr=False)
    refused: int = 0
    reports: tuple[RoundReport, ...] = ()
    finished: tuple[EpochEnd, ...] = field(default=(), repr=False)
    again: tuple[tuple[int, int, int], ...] = ()
    steps_under_way: int = 0
    samples_under_way: int = 0


@dataclass(frozen=True)
class LostWorker:
    """A worker that the others go on without."""

    rank: int
    worker: int
    rounds: int  # rounds that it had pushed
    samples: int  # its samples of epochs under way; nobody trains on them any more
    reason: str


@dataclass(frozen=True)
class JoinedWorker:
    """A worker that has come while the others train."""

    rank: int
    worker: int
    rounds: int  # rounds of the run that it has behind it: it takes no part in them
    epoch: int  # its first


class Action(IntEnum):
    """What a process wants to do after a step; the strongest wish of all processes counts."""

    GO_ON = 0
    SAVE = 1
    STOP = 2
