"""The small batch and the shares of a plan, and the bounds that they meet; pure.

Parts of `plan_dual_batch`. Equation numbers are those of Lu, Liu, Hong and Wu (COMPSAC
2022); workers are the entries of `Machines`, the small ones first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.plan.machines import Machines, largest_remainder
from dbsl.plan.split import bounded_split
from dbsl.plan.types import NoPlanError, TimeModel

DEFAULT_TIME_RATIO = 1.05
# Share of the large batch above which a solved small batch is as good as large.
NEARLY_LARGE = 0.75


def round_half_up(value: float) -> int:
    """Return the nearest integer, a half upwards, as the journal rounds."""
    return math.floor(value + 0.5)


@dataclass(frozen=True)
class SmallBatch:
    """The small batch that is looked for: by a time ratio, or by a share of the samples.

    Attributes:
        machines: The workers, the small ones first.
        samples: Training samples per epoch.
        small_workers: Workers on the small batch, at least 1.
        min_batch_size: Smallest batch that may be found.
        to_integer: How a solved size is rounded.
    """

    machines: Machines
    samples: int
    small_workers: int
    min_batch_size: int
    to_integer: Callable[[float], int]

    def wanted_ratio(self, time_ratio: float | None, small_share: float | None) -> float:
        """Return k as given, or as the share of small batches implies it, within its bounds.

        Raises:
            NoPlanError: If no small worker's time depends on its batch size.
        """
        machines = self.machines
        fixed = np.maximum(machines.intercepts, machines.floors)[: self.small_workers]
        if (fixed <= 0).all():
            eighth = max(self.min_batch_size, int(machines.limits[0]) // 8)
            raise NoPlanError(
                "intercept must be above 0 s for a small batch to exist, got "
                f"{machines.intercepts[0]:g}{self._nearest(eighth)}"
            )
        speeds = machines.speeds(machines.limits)
        large_part = float(speeds[self.small_workers :].sum() / speeds.sum())
        if small_share is not None:
            if large_part == 0:
                raise SettingError("small_share must leave some workers large, got only small ones")
            if not 0 < small_share < 1 - large_part:
                raise SettingError(
                    f"small_share must be in (0, {1 - large_part:.4g}) (what the small workers "
                    f"would take in large batches), got {small_share:g}"
                )
            return (1 - small_share) / large_part
        ratio = DEFAULT_TIME_RATIO if time_ratio is None else time_ratio
        if not (math.isfinite(ratio) and ratio > 1):
            raise SettingError(f"time_ratio must be above 1, got {ratio}")
        if ratio * large_part >= 1:
            raise SettingError(
                f"time_ratio must be below {1 / large_part:.4g} (beyond it the large workers take "
                f"all samples), got {ratio}{self._nearest(self.min_batch_size)}"
            )
        return ratio

    def solve(
        self, ratio: float, clamp: bool, notes: list[str]
    ) -> tuple[int, tuple[int, int] | None]:
        """Return B_S; for equal workers also the whole d_L, and the d_S that it leaves.

        Args:
            ratio: The time ratio k.
            clamp: Whether a B_S below the smallest that is allowed is raised to it.
            notes: Takes what is to be said of the result.

        Raises:
            NoPlanError: If B_S is too small, and not to be raised.
        """
        machines = self.machines
        batch, published = self._exact(ratio)
        if batch < self.min_batch_size:
            bound = (
                f"the solved small batch must be at least min_batch_size={self.min_batch_size}, "
                f"got {batch} (time_ratio {ratio:g}, slope {machines.slopes[0]:g}, intercept "
                f"{machines.intercepts[0]:g})"
            )
            if not clamp:
                raise NoPlanError(bound)
            batch, published = self.min_batch_size, None
            notes.append(f"{bound}; taken as {batch}, samples moved to finish together")
        largest = int(machines.limits[: self.small_workers].max())
        if batch > NEARLY_LARGE * largest:
            notes.append(_nearly_large(machines.model(0), batch, largest))
        return batch, published

    def _exact(self, ratio: float) -> tuple[int, tuple[int, int] | None]:
        """Return `solve`'s result without bounds.

        B_S follows from the exact time and the whole d_S, and is rounded once. Both pieces of a
        step's time, the line and the floor, bound it from below: the larger bound holds.
        """
        machines, samples, to_integer = self.machines, self.samples, self.to_integer
        workers, small_workers = len(machines.limits), self.small_workers
        if not machines.equal:
            time_s = ratio * machines.balanced_time(samples, machines.limits)
            large_speeds = machines.speeds(machines.limits)[small_workers:]
            rest = samples - time_s * float(large_speeds.sum())
            return to_integer(machines.common_batch(small_workers, time_s, rest)), None
        model, limit = machines.model(0), int(machines.limits[0])
        large = to_integer(ratio * samples / workers)
        rest = samples - large * (workers - small_workers)
        if rest < small_workers:
            raise SettingError(
                f"time_ratio must leave every small worker a sample of {samples}, got {ratio:g}"
                f"{self._nearest(self.min_batch_size)}"
            )
        small = to_integer(rest / small_workers)
        time_s = ratio * model.sample_time(limit) * samples / workers
        sample_time = time_s / small  # small workers'
        exact = model.intercept / (sample_time - model.slope)
        if model.floor and sample_time > model.slope:
            exact = max(exact, model.floor / sample_time)
        # Whole samples may use up a ratio close to 1: then both batches are equally large.
        batch = to_integer(exact) if 0 < exact <= limit else limit
        return batch, (large, small)

    def _nearest(self, batch: int) -> str:
        """Return what a plan with this small batch would be, for the end of an error."""
        machines, samples = self.machines, self.samples
        sizes = machines.limits.copy()
        sizes[: self.small_workers] = np.minimum(batch, sizes[: self.small_workers])
        try:
            all_large_s = machines.balanced_time(samples, machines.limits)
            ratio = machines.balanced_time(samples, sizes) / all_large_s
        except NoPlanError:
            return ""
        return f"; the nearest plan has small_batch_size {batch} and time ratio {ratio:.4g}"


def _nearly_large(model: TimeModel, batch: int, largest: int) -> str:
    """Return the note on a solved small batch that is nearly the large one."""
    if model.floor > model.time(batch, 1) * (1 - 1e-9):
        below = (model.floor - model.intercept) / model.slope
        why = f"a step of fewer than {below:.0f} samples takes no less time"
    else:
        worth = model.intercept / model.slope
        why = f"a step costs {worth:.0f} samples' time before its first"
    return (
        f"the small batch, {batch}, is {batch / largest:.0%} of the large one, since {why}: dual "
        "batch gains next to nothing here. --compile lowers that cost; a larger "
        "--large-batch-size or --time-ratio makes the small batch smaller; more "
        "--rounds-per-epoch merge more often instead"
    )


def published_shares(
    published: tuple[int, int], workers: int, small: int, total: int
) -> np.ndarray:
    """Return shares, int64 [n]: d_L for every large worker, the rest spread over the small ones."""
    shares = np.full(workers, published[0], dtype=np.int64)
    rest = total - published[0] * (workers - small)
    shares[:small] = largest_remainder(np.ones(small), rest)
    return shares


def end_together(machines: Machines, shares: np.ndarray, sizes: np.ndarray, rounds: int) -> bool:
    """Whether all workers end within the time of the longest step a round."""
    times = machines.times(shares, sizes, rounds)
    return bool(times.max() - times.min() <= rounds * float(machines.step_times(sizes).max()))


def fit_rounds(
    machines: Machines,
    samples: int,
    shares: np.ndarray,
    sizes: np.ndarray,
    rounds: int,
    least: int,
    notes: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Lower batch sizes that exceed a round of their worker's share; shares follow.

    A worker so slow that its round would have fewer than `least` samples gets that many.
    """
    lowered = np.zeros(len(sizes), dtype=bool)
    for _ in range(32):
        over = sizes > shares // rounds
        if not over.any():
            break
        lowered |= over
        sizes = np.where(over, np.maximum(shares // rounds, 1), sizes)
        shares = largest_remainder(machines.speeds(sizes), samples)
    lowest = rounds * least
    slow = np.flatnonzero(shares < lowest)
    if len(slow) and lowest * len(shares) <= samples:
        shares = bounded_split(
            samples,
            machines.speeds(sizes),
            np.full(len(shares), lowest),
            np.full(len(shares), samples),
        )
        sizes = np.where(lowered, np.clip(shares // rounds, 1, machines.limits), sizes)
        notes.append(
            f"{len(slow)} of {len(shares)} workers are so slow that they finish late with the "
            f"{lowest} samples that each takes at least (worker {slow[0]})"
        )
    if shares.min() < rounds or (sizes > shares // rounds).any():
        slowest = int(shares.argmin())
        raise SettingError(
            f"samples must leave each worker at least one per round ({rounds} a worker and epoch), "
            f"got {samples} over {len(shares)} workers, {shares[slowest]} for worker {slowest}"
        )
    if lowered.any():
        first = int(lowered.argmax())
        notes.append(
            f"batches of {lowered.sum()} workers lowered to their samples of a round (worker "
            f"{first}: {sizes[first]})"
        )
    return shares, sizes


def batch_sizes(
    limits: np.ndarray, small_workers: int, batch: int | None, notes: list[str]
) -> np.ndarray:
    """Return every worker's batch size, small ones held to their limits."""
    sizes = limits.copy()
    if small_workers:
        highest = int(limits[:small_workers].max())
        if not 1 <= batch <= highest:
            raise SettingError(
                f"small_batch_size must be in [1, large_batch_size={highest}], got {batch}"
            )
        sizes[:small_workers] = np.minimum(batch, sizes[:small_workers])
        held = int((limits[:small_workers] < batch).sum())
        if held:
            notes.append(
                f"{held} of {small_workers} small workers hold fewer than {batch} samples and take "
                "what they hold"
            )
    return sizes


def check_fits(
    large: int, small: int | None, shares: np.ndarray, small_workers: int, rounds: int, given: bool
) -> None:
    """Refuse batches above what an equal worker has in a round; a solved one is then no plan."""
    checks = []
    if small_workers < len(shares):
        checks.append(("large_batch_size", large, shares[-1], SettingError))
    if small_workers:
        kind = SettingError if given else NoPlanError
        checks.append(("small_batch_size", small, shares[small_workers - 1], kind))
    for name, batch, share, kind in checks:
        limit = int(share) // rounds
        if batch > limit:
            raise kind(
                f"{name} must be at most {limit}, the samples of such a worker in a round, "
                f"got {batch}"
            )
