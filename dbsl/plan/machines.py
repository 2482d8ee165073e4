"""How long workers take: a model of step time for each, and what follows for all together.

Pure functions on arrays, one entry per worker, so that 100,000 workers cost milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import
from dbsl.plan.types import NoPlanError, TimeModel

optimize = lazy_import("scipy.optimize")


@dataclass(frozen=True)
class Machines:
    """Every worker's time model and largest batch, as arrays of one entry per worker."""

    slopes: np.ndarray  # a_i, float64 [n]
    intercepts: np.ndarray  # b_i, float64 [n]
    floors: np.ndarray  # the least that a step takes, seconds, float64 [n]
    limits: np.ndarray  # B_L of each, the largest batch it may take, int64 [n]

    @staticmethod
    def of(
        workers: int,
        large_batch_size: int | Sequence[int],
        time_model: TimeModel | Sequence[TimeModel],
    ) -> Machines:
        """Return the machines of `workers` workers from one value for all, or one for each.

        Raises:
            SettingError: If a number of values is neither, or a batch size is below 1.
        """
        if workers < 1:
            raise SettingError(f"workers must be at least 1, got {workers}")
        models = [time_model] if isinstance(time_model, TimeModel) else list(time_model)
        limits = np.atleast_1d(np.asarray(large_batch_size, dtype=np.int64))
        for name, count in (("large_batch_size", len(limits)), ("slope", len(models))):
            if count not in (1, workers):
                raise SettingError(
                    f"{name} must have 1 value or one per worker ({workers}), got {count}"
                )
        if limits.min() < 1:
            raise SettingError(f"large_batch_size must be at least 1, got {limits.min()}")
        return Machines(
            slopes=np.broadcast_to([m.slope for m in models], workers),
            intercepts=np.broadcast_to([m.intercept for m in models], workers),
            floors=np.broadcast_to([m.floor for m in models], workers),
            limits=np.broadcast_to(limits, workers),
        )

    @property
    def equal(self) -> bool:
        """Whether all workers are the same."""
        own = (self.slopes, self.intercepts, self.floors, self.limits)
        return all((x == x[0]).all() for x in own)

    def model(self, worker: int) -> TimeModel:
        """Return one worker's time model."""
        return TimeModel(*(float(x[worker]) for x in (self.slopes, self.intercepts, self.floors)))

    def step_times(self, sizes: np.ndarray, steps: int | np.ndarray = 1) -> np.ndarray:
        """Return the seconds of so many steps over `sizes` samples in all."""
        line = self.slopes * sizes + self.intercepts * steps
        return np.where(self.floors > 0, np.maximum(self.floors * steps, line), line)

    def sample_times(self, sizes: np.ndarray) -> np.ndarray:
        """Return seconds per sample in full batches of the given sizes, a_i + b_i/B_i."""
        line = self.slopes + self.intercepts / sizes
        return np.where(self.floors > 0, np.maximum(self.floors / sizes, line), line)

    def speeds(self, sizes: np.ndarray) -> np.ndarray:
        """Return samples per second in full batches of the given sizes."""
        sample_times = self.sample_times(sizes)
        if sample_times.min() <= 0:
            worst = int(sample_times.argmin())
            raise NoPlanError(
                f"intercept must be above {-self.slopes[worst] * sizes[worst]:g} s for a batch of "
                f"{sizes[worst]}, got {self.intercepts[worst]:g}"
            )
        return 1.0 / sample_times

    def balanced_time(self, samples: int, sizes: np.ndarray) -> float:
        """Return the seconds for all samples with shares such that all finish together."""
        return samples / float(self.speeds(sizes).sum())

    def times(self, shares: np.ndarray, sizes: np.ndarray, rounds: int) -> np.ndarray:
        """Return each worker's seconds for its share, every begun step counted whole."""
        return self.step_times(shares, steps_in_shares(shares, sizes, rounds))

    def all_large_time(self, samples: int, rounds: int) -> float:
        """Return the predicted seconds if all took their largest batch, in balanced shares."""
        shares = largest_remainder(self.speeds(self.limits), samples)
        sizes = np.clip(shares // rounds, 1, self.limits)
        return float(self.times(shares, sizes, rounds).max())

    def equal_batch_time(self, samples: int, rounds: int) -> float:
        """Return the predicted seconds with equal shares and one batch size that all can hold.

        A launcher that knows a single batch size plans like this.
        """
        shares = largest_remainder(np.ones(len(self.limits)), samples)
        sizes = np.clip(shares // rounds, 1, self.limits.min())
        return float(self.times(shares, sizes, rounds).max())

    def common_batch(self, small: int, time_s: float, samples: float) -> float:
        """Return B for which the first `small` workers do `samples` samples in `time_s` seconds.

        Worker i takes min(B, its limit); B is at most the highest limit, and 0 where even the
        smallest batches would do more than the samples.
        """
        own = (self.slopes, self.intercepts, self.floors, self.limits)
        few = Machines(*(x[:small] for x in own))

        def surplus(batch: float) -> float:
            done = time_s / few.sample_times(np.minimum(batch, few.limits))
            return float(done.sum()) - samples

        lowest, highest = 1e-3, float(few.limits.max())
        if surplus(lowest) >= 0:
            return 0.0
        return highest if surplus(highest) <= 0 else optimize.brentq(surplus, lowest, highest)


def steps_in_shares(shares: np.ndarray, sizes: np.ndarray, rounds: int) -> np.ndarray:
    """Return the steps of shares that are cut into rounds, each into batches, int64 [n]."""
    bounds = [shares * r // rounds for r in range(rounds + 1)]
    return sum(-(-(bounds[r + 1] - bounds[r]) // sizes) for r in range(rounds))


def largest_remainder(weights: Sequence[float] | np.ndarray, total: int) -> np.ndarray:
    """Split `total` into integers proportional to `weights` that sum to it exactly, int64 [n].

    Every part is its quota rounded down or up; the largest fractions go up, ties by position.
    """
    weights = np.asarray(weights, dtype=np.float64)
    quotas = weights / weights.sum() * total
    # A quota meant to be whole may come out a hair below it: that is no remainder of almost 1.
    parts = np.floor(quotas + 1e-9 * np.maximum(quotas, 1.0)).astype(np.int64)
    order = np.argsort(parts - quotas, kind="stable")
    missing = total - int(parts.sum())
    parts[order[:missing]] += 1
    return parts
