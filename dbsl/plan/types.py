"""Plans, and workers' reports on their rounds: plain values that every room knows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import IntEnum
from itertools import groupby
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dbsl.base.errors import SettingError, require
from dbsl.config.fields import Within

Numbers = float | np.ndarray  # one number, or one for each of n workers
_BOUNDS = {"slope": Within(0, open_low=True), "intercept": Within(), "floor": Within(0)}


class NoPlanError(SettingError):
    """The settings are sound, but the time model admits no plan under them."""


@dataclass(frozen=True)
class TimeModel:
    """Time of one training step with x samples, ``slope * x + intercept`` seconds (eq. 2).

    A fast device waits for its host in steps with few samples. Such a step takes `floor` seconds,
    whatever its batch. It models one worker, or n with arrays [n] as coefficients.
    """

    slope: Numbers  # a, seconds per sample
    intercept: Numbers  # b, seconds per step
    floor: Numbers = 0.0  # least time of a step, seconds

    def __post_init__(self) -> None:
        for name, values in vars(self).items():
            kind = np.asarray(values).dtype.kind if isinstance(values, Real | np.ndarray) else ""
            must = f"{name} must be a number of seconds, or an array of them"
            require(kind and kind in "iuf", must, repr(values))
            _BOUNDS[name].check(name, tuple(np.ravel(values).tolist()))
            if kind in "iu" and not isinstance(values, int):  # small numpy types overflow
                object.__setattr__(self, name, values.astype(float))
        sizes = {np.size(values) for values in vars(self).values()}
        must = "slope, intercept and floor must have one value, or as many as each other"
        require(len(sizes - {1}) < 2 and 0 not in sizes, must, sorted(sizes))

    @staticmethod
    def of(models: TimeModel | Sequence[TimeModel], workers: int) -> TimeModel:
        """Return the model of `workers` workers, from one for all or one for each."""
        rows = [models] if isinstance(models, TimeModel) else list(models)
        columns = zip(*(vars(row).values() for row in rows), strict=True)
        return TimeModel(*(np.broadcast_to(np.ravel(c), workers) for c in columns))

    def __len__(self) -> int:
        return np.size(self.slope)

    def __getitem__(self, workers: int | slice | Sequence[int]) -> TimeModel:
        columns = (column[workers] for column in vars(self).values())
        return TimeModel(*(c if isinstance(c, np.ndarray) else float(c) for c in columns))

    def __iter__(self) -> Iterator[TimeModel]:
        return (self[worker] for worker in range(len(self)))

    @property
    def equal(self) -> bool:
        """Whether all workers have the same times."""
        return all((column == np.ravel(column)[0]).all() for column in vars(self).values())

    def sample_time(self, local_batch_size: Numbers) -> Numbers:
        """Return seconds per sample in full batches, ``a + b/x`` (the bracket of eq. 3)."""
        line = self.slope + self.intercept / local_batch_size
        return self._bounded(line, self.floor / local_batch_size)

    def time(self, samples: Numbers, steps: Numbers = 1) -> Numbers:
        """Return the seconds that `steps` steps over `samples` samples take together.

        A smaller last batch is treated as if all were equal; the error is less than a step.
        """
        return self._bounded(self.slope * samples + self.intercept * steps, self.floor * steps)

    def _bounded(self, line: Numbers, least: Numbers) -> Numbers:
        if not isinstance(line, np.ndarray):
            return max(least, line) if self.floor else line
        return np.where(np.greater(self.floor, 0), np.maximum(least, line), line)


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker's part of an epoch."""

    local_batch_size: int
    samples: int  # its share of the epoch
    steps: int
    merge_weight: float  # the model-update factor f, in (0, 1]
    predicted_time_s: float  # each started step counted whole
    simplified_time_s: float  # (a + b/x) * samples, eq. 3: steps counted in fractions
    small: bool


@dataclass(frozen=True)
class Plan:
    """A plan of one epoch: what was solved for, and each worker's part, small workers first.

    Workers' samples sum to `samples` exactly. `large_samples` and `small_samples` are the solved
    shares; a worker's own may differ by one. If workers differ in speed or in their
    largest batch, these two, the update factor and `large_batch_size` are None.
    """

    samples: int
    time_ratio: float  # k: time relative to an all-large plan
    all_large_time_s: float  # predicted, if all batches were large and shares balanced
    equal_batch_time_s: float  # predicted for equal shares, all in the smallest large batch
    workers: tuple[WorkerPlan, ...]
    notes: tuple[str, ...] = ()  # bounds that were met, and what was done
    large_batch_size: int | None = None
    small_batch_size: int | None = None
    large_samples: int | None = None
    small_samples: int | None = None
    update_factor: float | None = None
    global_batch_size: int | None = None  # B that all workers share; None: each has its own batch
    first_round: int = 0  # of an epoch, from which the plan applies
    taken: int = 0  # samples of that epoch in earlier rounds

    @property
    def time_s(self) -> float:
        """Predicted seconds of an epoch for the slowest worker."""
        return max(w.predicted_time_s for w in self.workers)

    @property
    def idle_share(self) -> float:
        """Share of all workers' time, in [0, 1), spent waiting for the slowest."""
        busy = sum(w.predicted_time_s for w in self.workers)
        return 1.0 - busy / (self.time_s * len(self.workers))

    @property
    def small_share(self) -> float:
        """Share of the samples, in [0, 1], that are trained on in small batches."""
        return sum(w.samples for w in self.workers if w.small) / self.samples


def plan_from_plain(plan: Mapping[str, Any]) -> Plan:
    """Return the plan that `asdict` converted."""
    workers = tuple(WorkerPlan(**worker) for worker in plan["workers"])
    return Plan(**{**plan, "notes": tuple(plan["notes"]), "workers": workers})


def plan_of_epochs(plan: Plan) -> dict[str, Any]:
    """Return a plan of whole epochs as users read it, in plain values."""
    place = {"first_round", "taken"}
    return {name: value for name, value in asdict(plan).items() if name not in place}


class StepLine(NamedTuple):
    """A worker's figures, reported at intervals of its optimizer steps."""

    worker: int
    epoch: int
    round: int
    step: int  # steps that the worker has taken in the run
    progress: float  # share of the epoch that was over when the step began, in [0, 1)
    loss: float  # mean over the samples since the previous line
    learning_rate: float
    # Norm of the mean gradient of the step's batch; with sync step, of the global batch; with
    # gradients:STEPS, of the mean over all batches summed since the last push.
    gradient_norm: float
    images_per_s: float  # since the previous line, without time between the worker's rounds
    memory_gib: float  # see `dbsl.profile.memory.memory_in_use`
    figures: Mapping[str, float] = {}  # the loss function's own, like the loss


NO_FAULT, BAD_LOSS, BAD_WEIGHTS = 0, 1, 2  # why a report is refused


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
    time_s: float  # compute only: no pull, push or waiting
    loss: float  # mean over the round's samples
    merge_weight: float
    staleness: int = 0
    learning_rate: float = 0.0  # in the round's last step
    predicted_time_s: float = 0.0  # compute time by the plan
    # On the cluster's clock, which is virtual in simulation: the round's compute time, and the time
    # since the worker's last round spent waiting for others and in transfers; for joint steps of
    # real processes, all time but computing.
    compute_time_s: float = 0.0
    wait_time_s: float = 0.0
    refused: bool = False  # loss or weights were not finite: the round was not merged
    # What was not finite: NO_FAULT, BAD_LOSS, BAD_WEIGHTS, or BAD_WEIGHTS + 1 + the number of
    # the first such tensor, parameters before buffers.
    fault: int = NO_FAULT
    # Squared norms of the gradients of a batch and of a part of it, at the round's first step; a
    # batch of 0 if they were not measured (see dbsl.extras.noise).
    micro_batch: int = 0
    micro_square: float = 0.0
    gradient_batch: int = 0
    gradient_square: float = 0.0
    lines: tuple[StepLine, ...] = ()  # not yet in the main process
    figures: Mapping[str, float] = field(default_factory=dict)  # the loss function's own


# Names in rows of metrics.jsonl and in charts, which a figure of yours must not have.
RESERVED = {
    *("event", "virtual_time_s", "share", "idle_time_share"),
    *("first_epoch", "from_epoch", "end_epoch", "last_epoch"),
    *(f"workers_{name}" for name in ("compute_time_s", "wait_time_s", "idle_time_share")),
    *(f"{kind}_workers_time_s" for kind in ("small", "large")),
    *(f"predicted_{kind}_workers_time_s" for kind in ("small", "large")),
    *(*StepLine._fields, *(field.name for field in fields(RoundReport))),
}


def report_from_plain(values: Mapping[str, Any]) -> RoundReport:
    """Return the report that `asdict` converted, even if it was in a checkpoint since."""
    lines = tuple(StepLine(*line) for line in values.get("lines", ()))
    return RoundReport(**{**values, "lines": lines})


def join_reports(reports: Sequence[RoundReport]) -> list[RoundReport]:
    """Return one report per worker, from those of its processes, which are adjacent."""
    several = (list(own) for _, own in groupby(reports, key=lambda report: report.worker))
    return [_join(own) if len(own) > 1 else own[0] for own in several]


def _join(reports: Sequence[RoundReport]) -> RoundReport:
    first, samples = reports[0], [report.samples for report in reports]

    def mean(values: Iterable[float]) -> float:
        weighted = [v * n for v, n in zip(values, samples, strict=True) if n]
        return sum(weighted) / max(sum(samples), 1)

    # The slowest process sets the compute time; it waits least for other workers. All processes
    # log the same steps, and know of a gradient that is not finite: a bad loss says more.
    lines = zip(*(report.lines for report in reports), strict=False)
    return replace(
        first,
        samples=sum(samples),
        time_s=max(report.time_s for report in reports),
        compute_time_s=max(report.compute_time_s for report in reports),
        wait_time_s=min(report.wait_time_s for report in reports),
        predicted_time_s=sum(report.predicted_time_s for report in reports),
        loss=mean(report.loss for report in reports),
        refused=any(report.refused for report in reports),
        fault=min((report.fault for report in reports if report.fault), default=NO_FAULT),
        lines=tuple(
            own[0]._replace(
                loss=mean(line.loss for line in own),
                images_per_s=sum(line.images_per_s for line in own),
                memory_gib=max(line.memory_gib for line in own),
                figures={name: mean(line.figures[name] for line in own) for name in own[0].figures},
            )
            for own in lines
        ),
        figures={name: mean(r.figures[name] for r in reports) for name in first.figures},
    )


@dataclass(frozen=True)
class Turn:
    """Workers of this process train on their parts of one round, from a pull to a push.

    It is one worker's turn or, in joint steps, that of every worker in the process.
    """

    ends_epoch: ClassVar[bool] = False
    workers: tuple[int, ...]
    epoch: int
    round: int


@dataclass(frozen=True)
class EpochEnd:
    """Every worker has pushed the epoch's last round: time to evaluate and to save."""

    ends_epoch: ClassVar[bool] = True
    epoch: int
    weights: Any = field(repr=False)  # global weights at that moment: a tensor
    ended_at: float  # the moment, by time.perf_counter()


@dataclass(frozen=True)
class LostWorker:
    """A lost worker; the others continue without it."""

    rank: int
    worker: int
    rounds: int  # rounds that it pushed
    samples: int  # its samples of current epochs; nobody trains on them any more
    reason: str


class Action(IntEnum):
    """What a process wants to do after a step; the highest value of all processes wins."""

    GO_ON = 0
    SAVE = 1
    STOP = 2
