"""Plans: who trains on how much, in which batches, and how long that takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dbsl.base.errors import SettingError

Rounding = Literal["round", "truncate"]
UpdateFactor = Literal["data", "sqrt", "none"]


class NoPlanError(SettingError):
    """The settings are sound, but the time model admits no plan under them."""


@dataclass(frozen=True)
class TimeModel:
    """Time of one training step with x samples, ``slope * x + intercept`` seconds (eq. 2).

    A fast device waits for its host in steps with few samples. Such a step takes `floor` seconds,
    whatever its batch.
    """

    slope: float  # a, seconds per sample
    intercept: float  # b, seconds per step
    floor: float = 0.0  # the least that a step takes, seconds

    def __post_init__(self) -> None:
        for name in ("slope", "intercept", "floor"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise SettingError(f"{name} must be a finite number of seconds, got {value}")
        if self.floor < 0:
            raise SettingError(f"floor must be at least 0 seconds per step, got {self.floor}")
        if self.slope <= 0:
            raise SettingError(f"slope must be above 0 seconds per sample, got {self.slope}")

    def sample_time(self, local_batch_size: float) -> float:
        """Return seconds per sample in full batches, ``a + b/x`` (the bracket of eq. 3)."""
        line = self.slope + self.intercept / local_batch_size
        return max(self.floor / local_batch_size, line) if self.floor else line

    def time(self, samples: int, steps: int) -> float:
        """Return the seconds that `steps` steps over `samples` samples take together.

        A last, smaller batch counts as if all were of one size, which is wrong by less than a step.
        """
        line = self.slope * samples + self.intercept * steps
        return max(self.floor * steps, line) if self.floor else line


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One worker's part of an epoch."""

    local_batch_size: int
    samples: int  # its share of the epoch
    steps: int
    merge_weight: float  # the model-update factor f, in (0, 1]
    predicted_time_s: float  # every begun step counted whole
    simplified_time_s: float  # (a + b/x) * samples, eq. 3: steps counted in fractions
    small: bool


@dataclass(frozen=True)
class Plan:
    """A dual-batch plan of one epoch: the solved quantities and one `WorkerPlan` per worker.

    Small workers come first. The workers' samples sum to `samples` exactly. `large_samples` and
    `small_samples` are the solved shares; a worker's own share may differ from them by one sample.
    Where workers differ in speed or in their largest batch, no single value holds: those two, the
    update factor and `large_batch_size` are None.
    """

    samples: int
    time_ratio: float  # k: time over that of an all-large plan
    all_large_time_s: float  # predicted, were all batches large and the shares balanced
    equal_batch_time_s: float  # predicted, had all the smallest large batch and equal shares
    workers: tuple[WorkerPlan, ...]
    notes: tuple[str, ...] = ()  # bounds that were met, and what was done
    large_batch_size: int | None = None
    small_batch_size: int | None = None
    large_samples: int | None = None
    small_samples: int | None = None
    update_factor: float | None = None
    global_batch_size: int | None = None  # B of joint steps; None where workers have rounds

    @property
    def time_s(self) -> float:
        """Predicted seconds of an epoch, those of the slowest worker."""
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


@dataclass(frozen=True)
class CurrentPlan:
    """A plan in force from one round of an epoch on."""

    plan: Plan
    first_round: int = 0
    start: int = 0  # samples of the epoch that earlier rounds took
    # Places in the epoch's order that earlier rounds left, if these are not all that follow.
    left: tuple[tuple[int, int], ...] = ()


def plan_from_plain(plan: Mapping[str, Any]) -> Plan:
    """Return the plan that `asdict` was given."""
    workers = tuple(WorkerPlan(**worker) for worker in plan["workers"])
    return Plan(**{**plan, "notes": tuple(plan["notes"]), "workers": workers})


def segments_from_plain(segments: Mapping[int, Any]) -> dict[int, list[CurrentPlan]]:
    """Return the segments, by epoch, that a planner's state holds."""
    return {
        epoch: [CurrentPlan(**{**row, "plan": plan_from_plain(row["plan"])}) for row in rows]
        for epoch, rows in segments.items()
    }


def segment_at(segments: Sequence[CurrentPlan], round_: int) -> CurrentPlan | None:
    """Return the segment of an epoch that a round is in; None: the round was over before them."""
    return next((s for s in reversed(segments) if s.first_round <= round_), None)


def segments_to_plain(segments: Mapping[int, Sequence[CurrentPlan]]) -> dict[int, Any]:
    """Return plans by epoch as plain values, for a planner's state."""
    return {epoch: [asdict(segment) for segment in rows] for epoch, rows in segments.items()}
