"""Joint steps: one global batch over workers of unequal speed, and what an epoch of it takes.

Pure functions. The global batch, and with it the learning rate and the number of steps, does not
depend on how it is split: dynamic batch sizes of Ye, Zhou, Shi, Sun, Lv (arXiv 2007.11831).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import
from dbsl.plan.machines import Machines, largest_remainder

optimize = lazy_import("scipy.optimize")


def split_batch(samples: int, sizes: Sequence[int] | np.ndarray, least: int = 1) -> np.ndarray:
    """Split the samples of a joint step in proportion to its parts' `sizes`, int64 [n].

    Parts come to `samples` exactly. Each has at least `least` samples (or its size, if that is
    less) or none: of too few samples the largest parts get some. None is above its size, but where
    what is left is less than `least`: three samples for two parts of 2 are 3 and none; and where
    there are more samples than all sizes: the largest part takes the rest.
    """
    sizes = np.array(sizes, dtype=np.int64)
    if samples >= sizes.sum():
        sizes[sizes.argmax()] += samples - sizes.sum()
        return sizes
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
    total: int, weights: np.ndarray, lowest: np.ndarray, highest: np.ndarray
) -> np.ndarray:
    """Split `total` in proportion to `weights`, each part within its bounds, int64 [n].

    Parts that meet a bound stay there and the others share the rest. If even the lowest bounds
    are more than the total, the first part alone takes it.
    """
    if lowest.sum() > total:
        parts = np.zeros(len(weights), dtype=np.int64)
        parts[0] = total
        return parts
    parts, free, left = np.zeros(len(weights), dtype=np.int64), np.ones(len(weights), bool), total
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
    global_batch_size: int,
    machines: Machines,
    limits: np.ndarray | None = None,
    least: int = 1,
) -> np.ndarray:
    """Return the batch sizes, int64 [n], with which a joint step is soonest over.

    They sum to the global batch and lie in [least, limit]. All workers take a_i*x + b_i <= T, with
    the lowest T for which that is enough. Floors change nothing: every worker takes part, so that
    T is at least the highest of them with any sizes.

    Raises:
        SettingError: If the workers cannot hold the global batch, or are more than its samples.
    """
    slopes, intercepts = machines.slopes, machines.intercepts
    workers = len(slopes)
    if limits is None:
        limits = np.full(workers, global_batch_size)
    check_global_batch(global_batch_size, workers, limits, least)

    def held(time_s: float) -> np.ndarray:
        return np.clip((time_s - intercepts) / slopes, least, limits)

    # Later by more than a rounding error: at `latest` each worker holds exactly its limit.
    latest = float((slopes * limits + intercepts).max()) * (1 + 1e-9)
    soonest = float((slopes * least + intercepts).min())
    enough = held(soonest).sum() >= global_batch_size
    time_s = (
        soonest
        if enough
        else optimize.brentq(
            lambda t: held(t).sum() - global_batch_size, soonest, latest, xtol=1e-12, rtol=1e-12
        )
    )
    sizes = np.maximum(np.floor(held(time_s) + 1e-6), least).astype(np.int64)
    # Samples that rounding left go to the worker that is done soonest with one more; samples that
    # it gave too many are taken from the slowest.
    while sizes.sum() > global_batch_size:
        times = np.where(sizes > least, slopes * sizes + intercepts, -np.inf)
        sizes[int(times.argmax())] -= 1
    queue = [
        (slopes[i] * (sizes[i] + 1) + intercepts[i], i)
        for i in range(workers)
        if sizes[i] < limits[i]
    ]
    heapq.heapify(queue)
    for _ in range(global_batch_size - int(sizes.sum())):
        _, i = heapq.heappop(queue)
        sizes[i] += 1
        if sizes[i] < limits[i]:
            heapq.heappush(queue, (slopes[i] * (sizes[i] + 1) + intercepts[i], i))
    return sizes


def check_global_batch(
    global_batch_size: int, workers: int, limits: np.ndarray, least: int = 1
) -> None:
    """Raise ``SettingError`` unless each worker can have `least` samples of the global batch."""
    if not least * workers <= global_batch_size <= int(limits.sum()):
        raise SettingError(
            f"global_batch_size must be in [{least * workers}, {limits.sum()}], {least} a worker "
            f"up to what all workers hold, got {global_batch_size}"
        )
