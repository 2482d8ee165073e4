"""Measured speeds of workers, and shares that fit them.

Pure functions on arrays, one entry per worker, so that 100,000 workers cost milliseconds. The
global batch of joint steps does not depend on its split, nor do the learning rate and the
number of steps: dynamic batch sizes of Ye, Zhou, Shi, Sun, Lv (arXiv 2007.11831).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dbsl.base.errors import require
from dbsl.plan.types import TimeModel

NOISE = 0.10  # standard deviation of a measured time, relative
_PRIOR = 0.5  # relative uncertainty of a planned time model's coefficients
_DRIFT = 0.005  # relative drift of both coefficients between two measurements
_OUTLIER = 3.0  # standard deviations: two such measurements mean that the machine has changed
_JUMP = 4.5  # standard deviations: so does one such measurement
_LOWEST = 1e-3


@dataclass(frozen=True)
class WorkerProfiles:
    """What the workers can do, by resolution, one entry per worker."""

    models: dict[int, TimeModel]  # slope, intercept and floor are arrays [n]
    large_batch_sizes: dict[int, list[int]]  # samples of a large step
    measured: bool  # whether the time models were measured, not given
    limits: dict[int, list[int]] | None = None  # most samples a step; None: no bound
    micro_batch_sizes: dict[int, list[int]] | None = None  # most samples at once; None: any
    processes: dict[int, TimeModel] | None = None  # one entry per process, if workers have several
    # Most samples of a batch that fit into memory; None: it was not measured.
    fits: dict[int, list[int | None]] | None = None


def zero_of(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a rising function reaches 0, to the last bit; `low` if it is not below 0."""
    if rising(low) >= 0:
        return low
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return high


def steps_in_shares(shares: np.ndarray, sizes: np.ndarray, rounds: int) -> np.ndarray:
    """Return the steps of shares that are cut into rounds and then into batches, int64 [n]."""
    bounds = [shares * r // rounds for r in range(rounds + 1)]
    return sum(-(-(bounds[r + 1] - bounds[r]) // sizes) for r in range(rounds))


def largest_remainder(weights: Sequence[float] | np.ndarray, total: int) -> np.ndarray:
    """Split `total` into integers proportional to `weights` that sum to it exactly, int64 [n].

    Every part is its quota rounded down or up; the largest fractions go up, ties by position.
    """
    weights = np.asarray(weights, dtype=np.float64)
    quotas = weights / weights.sum() * total
    # A quota meant to be whole may end up a hair below it: that is no remainder of almost 1.
    hair = np.minimum(1e-9 * np.maximum(quotas, 1.0), min(1e-3, 0.5 / len(weights)))
    parts = np.floor(quotas + hair).astype(np.int64)
    order = np.argsort(parts - quotas, kind="stable")
    missing = total - int(parts.sum())
    parts[order[:missing]] += 1
    return parts


class SpeedEstimate:
    """How much slower a worker is than its planned time model: a Kalman filter on two factors.

    A step of x samples takes ``u*a*x + v*b`` seconds with the planned a and b of its resolution,
    or ``v*f`` where the floor f applies. An estimate thus carries over to the next resolution.
    Measurements at one batch size move only their common level; a second size separates u and v.
    """

    def __init__(self) -> None:
        self.factors = np.ones(2)  # u, v
        self.covariance = np.eye(2) * _PRIOR**2
        self.measured = 0  # at 0, the estimate is the plan
        self.outlier = 0.0  # the last measurement's deviation, if it was set aside

    def observe(self, planned: TimeModel, local_batch_size: float, step_time_s: float) -> None:
        """Update with the measured time of a step."""
        parts = np.array([planned.slope * local_batch_size, max(planned.intercept, 0.0)])
        if planned.floor and planned.floor * self.factors[1] > parts @ self.factors:
            parts = np.array([0.0, planned.floor])
        expected = parts.sum()
        direction, measured = parts / expected, step_time_s / expected
        scale = float(direction @ self.factors)
        noise = (NOISE * max(scale, _LOWEST)) ** 2
        self.covariance += np.eye(2) * (_DRIFT * scale) ** 2
        error = measured - scale
        variance = float(direction @ self.covariance @ direction) + noise
        deviation = error / math.sqrt(variance)
        before, self.outlier = self.outlier, 0.0
        self.measured += 1
        if abs(deviation) > _OUTLIER:
            if self.measured > 1 and abs(deviation) < _JUMP and before * deviation <= 0:
                self.outlier = deviation  # wait for the next measurement
                return
            # The time changed by more than noise: forget how sure the estimate was.
            self.covariance += np.eye(2) * error**2 / float(direction @ direction)
            variance = float(direction @ self.covariance @ direction) + noise
        gain = self.covariance @ direction / variance
        self.factors = np.maximum(self.factors + gain * error, _LOWEST)
        self.covariance -= np.outer(gain, direction @ self.covariance)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimate in plain numbers."""
        return {name: np.asarray(value).tolist() for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.__dict__ |= {k: np.array(v) if isinstance(v, list) else v for k, v in state.items()}

    def model(self, planned: TimeModel) -> TimeModel:
        """Return the estimated time model for a resolution with this planned one."""
        u, v = self.factors
        return TimeModel(
            slope=float(u * planned.slope),
            intercept=float(v * max(planned.intercept, 0.0)),
            floor=float(v * planned.floor),
        )


def split_batch(samples: int, sizes: Sequence[int] | np.ndarray, least: int = 1) -> np.ndarray:
    """Split the samples of a joint step in proportion to its parts' `sizes`, int64 [n].

    Each part has at least `least` samples (or its size, if that is less) or none at all: if samples
    are too few, the largest parts get some. A part exceeds its size only if the rest would be below
    `least` (three samples for two parts of 2 become 3 and 0), or if there are more samples
    than all sizes.
    """
    sizes = np.array(sizes, dtype=np.int64)
    if samples >= sizes.sum():
        return largest_remainder(sizes, samples)
    lowest = np.minimum(least, sizes)
    order = np.argsort(-sizes, kind="stable")
    reach = np.cumsum(lowest[order])
    taking = order[: max(1, int(np.searchsorted(reach, samples, side="right")))]
    parts = np.zeros_like(sizes)
    held = min(samples, int(sizes[taking].sum()))
    parts[taking] = bounded_split(held, sizes[taking], lowest[taking], sizes[taking])
    parts[order[0]] += samples - held
    return parts


def bounded_split(
    total: int, weights: np.ndarray, lowest: np.ndarray | int, highest: np.ndarray | int
) -> np.ndarray:
    """Split `total` in proportion to `weights`, each part within its bounds, int64 [n].

    A bound is one for all parts or one for each. Parts that meet a bound stay there and the others
    share the rest. If the lowest bounds sum to more than the total, the first part takes it all.
    """
    lowest, highest = (np.broadcast_to(bound, len(weights)) for bound in (lowest, highest))
    parts, free, left = np.zeros(len(weights), dtype=np.int64), np.ones(len(weights), bool), total
    if lowest.sum() > total:
        parts[0] = total
        return parts
    while free.any():
        quotas = weights[free] / weights[free].sum() * left
        low, high = lowest[free], highest[free]
        # Only one side per pass: fixing parts that are too low lowers the others, and vice versa.
        lacking, exceeding = np.maximum(low - quotas, 0), np.maximum(quotas - high, 0)
        if not lacking.any() and not exceeding.any():
            parts[free] = largest_remainder(weights[free], left)
            break
        side, bound = (lacking, low) if lacking.sum() >= exceeding.sum() else (exceeding, high)
        fixed = np.flatnonzero(free)[side > 0]
        parts[fixed] = bound[side > 0]
        left -= int(parts[fixed].sum())
        free[fixed] = False
    return parts


def balanced_sizes(
    global_batch_size: int, model: TimeModel, limits: np.ndarray, least: int = 1
) -> np.ndarray:
    """Return the batch sizes, int64 [n], with which a joint step ends soonest.

    They sum to the global batch and lie in [least, limit]. All workers take a_i*x + b_i <= T, with
    the lowest T for which that is enough. Floors change nothing: every worker takes part, so
    T is at least the highest floor with any sizes.
    """
    slopes, intercepts = model.slope, model.intercept
    check_global_batch(global_batch_size, limits, least)

    def held(time_s: float) -> np.ndarray:
        return np.clip((time_s - intercepts) / slopes, least, limits)

    # Later by more than a rounding error: at `latest` each worker holds exactly its limit.
    latest = float((slopes * limits + intercepts).max()) * (1 + 1e-9)
    soonest = float((slopes * least + intercepts).min())
    time_s = zero_of(lambda t: held(t).sum() - global_batch_size, soonest, latest)
    sizes = np.maximum(np.floor(held(time_s) + 1e-6), least).astype(np.int64)
    # Samples that rounding left go to the worker that finishes first with one more; excess
    # samples are taken from the slowest.
    while sizes.sum() > global_batch_size:
        times = np.where(sizes > least, slopes * sizes + intercepts, -np.inf)
        sizes[int(times.argmax())] -= 1
    with_one_more = slopes * (sizes + 1) + intercepts
    queue = [(with_one_more[i], i) for i in range(len(sizes)) if sizes[i] < limits[i]]
    heapq.heapify(queue)
    for _ in range(global_batch_size - int(sizes.sum())):
        _, i = heapq.heappop(queue)
        sizes[i] += 1
        if sizes[i] < limits[i]:
            heapq.heappush(queue, (slopes[i] * (sizes[i] + 1) + intercepts[i], i))
    return sizes


def check_global_batch(global_batch_size: int, limits: np.ndarray, least: int) -> None:
    """Raise ``SettingError`` unless each worker can have `least` samples of the global batch."""
    lowest, highest = least * len(limits), int(limits.sum())
    ends = f"[{lowest}, {highest}], {least} a worker up to what all workers hold"
    must = f"global_batch_size must be in {ends}"
    require(lowest <= global_batch_size <= highest, must, global_batch_size)
