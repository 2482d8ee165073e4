"""A joint batch split over unequal processes, by number of samples or by their lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsl.base.errors import require, require_whole
from dbsl.plan.machines import balanced_sizes, zero_of
from dbsl.plan.types import TimeModel


@dataclass(frozen=True)
class BatchSplit:
    """A joint batch split over processes so that all take equally long.

    `times_s` are predicted seconds of each process's part; `equal_time_s` is the slowest process's
    time with equal parts.
    """

    local_batch_sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    equal_time_s: float


def split_batch(
    global_batch_size: int,
    time_models: Sequence[TimeModel],
    *,
    limits: Sequence[int] | None = None,
    least: int = 1,
) -> BatchSplit:
    """Split a joint batch over processes with these step times so that all finish together.

    `measure_step` fits such times. `limits` are the most samples that each process can hold (None:
    no limit), and `least` is the fewest that each gets.
    """
    right = isinstance(time_models, Sequence) and all(
        isinstance(model, TimeModel) and model.slope > 0 and model.intercept >= 0
        for model in time_models
    )
    must = "time_models must be one or more TimeModel with slope above 0, intercept of at least 0"
    require(right and len(time_models), must, str(time_models))
    count = len(time_models)
    require_whole("least", least, 1)
    require_whole("global_batch_size", global_batch_size, least * count)
    most = np.asarray([global_batch_size] * count if limits is None else limits)
    fits = most.shape == (count,) and most.dtype.kind in "iu" and (most >= least).all()
    must = f"limits must be one integer for each of {count} processes, at least {least}"
    require(fits, must, str(limits))
    model = TimeModel.of(time_models, count)
    sizes = balanced_sizes(global_batch_size, model, most, least)
    equal = np.full(len(sizes), global_batch_size / len(sizes))
    return BatchSplit(
        tuple(sizes.tolist()),
        tuple(np.asarray(model.time(sizes, 1)).tolist()),
        float(np.asarray(model.time(equal, 1)).max()),
    )


def deal(lengths: np.ndarray, speeds: Sequence[float], least: int = 1) -> list[np.ndarray]:
    """Return the places in a joint batch that each process gets, ascending, int64.

    A batch is padded to its longest sample, so its cost is samples times that length. If parts
    are contiguous in the sorted lengths, no exchange makes a part cheaper. The largest padded cost
    over speed is the least that contiguous parts allow, with the longest samples on the fastest
    process or on the slowest. Each gets at least `least` samples.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    descending = np.asarray(lengths)[order].tolist()
    fastest_first, found = sorted(range(len(speeds)), key=lambda p: -speeds[p]), []
    for processes in (fastest_first, fastest_first[::-1]):
        of_each = [float(speeds[p]) for p in processes]
        found.append((*_soonest(descending, of_each, least), processes))
    _, counts, processes = min(found, key=lambda each: each[0])
    ends = np.cumsum([0, *counts])
    parts = {p: order[ends[n] : ends[n + 1]] for n, p in enumerate(processes)}
    return [np.sort(parts[process]) for process in range(len(speeds))]


def _soonest(lengths: list[float], speeds: list[float], least: int) -> tuple[float, list[int]]:
    """Return the earliest time to finish the sorted samples, and how many each then takes."""
    latest = 2 * lengths[0] * len(lengths) / min(speeds)
    time = zero_of(lambda t: len(_taken(lengths, speeds, least, t)) - 0.5, 0.0, latest)
    return time, _taken(lengths, speeds, least, time)


def _taken(lengths: list[float], speeds: list[float], least: int, time: float) -> list[int]:
    """Return how many samples each takes within a time, in order; empty if some are left."""
    counts, first = [], 0
    for number, speed in enumerate(speeds):
        rest = len(lengths) - first - least * (len(speeds) - number - 1)
        count = min(rest, max(least, int(time * speed / lengths[first])))
        if count * lengths[first] > time * speed:
            return []
        counts.append(count)
        first += count
    return counts if first == len(lengths) else []
