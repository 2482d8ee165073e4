"""Seconds of any step at several batch sizes, and the line through them."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsl.base.errors import require
from dbsl.plan.types import TimeModel

TOLERANCE = 0.10  # relative error of a prediction up to which the line is accepted
_SURE_ENOUGH = 0.02  # standard error of a median time, relative to it
_TURNS = 4  # fewer may agree by chance
_SIZES_FOR_A_FLOOR = 4  # a line and a floor are three numbers


@dataclass(frozen=True)
class StepTimes:
    """Measured seconds of a step at each batch size, and the `model` (a line) through them.

    `times_s` are medians, `errors` their standard errors, relative to them.
    """

    batch_sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    errors: tuple[float, ...]
    model: TimeModel


def measure_step(
    step: Callable[[int], object], batch_sizes: Sequence[int], *, seconds: float = 20.0
) -> StepTimes:
    """Measure ``step(batch_size)``: a forward and backward pass and the optimizer's step.

    Processes that train together measure at the same time, each by itself: `step` must not wait
    for another. The device is synchronised. Sizes ascend; two or more separate a fixed part from
    the rest. Measuring ends when every median is known to 2 % or about `seconds` have passed, but
    after at least two turns.
    """
    sizes = np.asarray(batch_sizes).tolist()
    whole = isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes)
    ascends = whole and sizes[0] >= 1 and sorted(set(sizes)) == sizes
    require(ascends, "batch_sizes must be integers that ascend from at least 1", str(sizes))
    number = isinstance(seconds, (int, float)) and 0 <= seconds < math.inf
    require(number, "seconds must be at least 0 and finite", seconds)
    times, errors = measure_step_times(step, sizes, seconds=seconds)
    model = fit_time_model(sizes, times, errors)
    return StepTimes(tuple(sizes), tuple(times), tuple(errors), model)


def measure_step_times(
    step: Callable[[int], object], batch_sizes: Sequence[int], *, seconds: float
) -> tuple[list[float], list[float]]:
    """Return the median seconds of ``step(batch_size)`` for each size, and their relative errors.

    Sizes take turns, so that a slow spell of the machine affects all. A turn has steps for about a
    quarter of the longest step's time, and waits for the device once. Measuring ends when the
    standard error of every median is small enough or time is up, but after at least 2 turns.
    """
    began = time.perf_counter()
    for size in reversed(batch_sizes):  # the first one compiles, or tries cuDNN's algorithms
        step(size)
    block_s = 0.25 * _seconds_a_step(step, max(batch_sizes), 0.0)
    samples: list[list[float]] = [[] for _ in batch_sizes]
    for turn in itertools.count(1):
        for size, taken in zip(batch_sizes, samples, strict=True):
            taken.append(_seconds_a_step(step, size, block_s))
        if turn == 1:
            continue
        errors = [_median_error(taken) for taken in samples]
        sure = turn >= _TURNS and max(errors) < _SURE_ENOUGH
        if sure or time.perf_counter() - began > seconds:
            return [statistics.median(taken) for taken in samples], errors


def shortest_step(step: Callable[[int], object], batch_size: int) -> float:
    """Return the least seconds of three ``step(batch_size)`` calls, after a warm-up."""
    step(batch_size)
    return min(_seconds_a_step(step, batch_size, 0.0) for _ in range(3))


def _seconds_a_step(step: Callable[[int], object], batch_size: int, at_least_s: float) -> float:
    """Return the mean seconds of consecutive steps over `at_least_s`, with at least one step."""
    began = now = _clock()
    steps = 0
    while not steps or now - began < at_least_s:
        step(batch_size)
        steps, now = steps + 1, time.perf_counter()
    return (_clock() - began) / steps


def _clock() -> float:
    if torch.accelerator.is_available():  # torch's own timer does not support all
        torch.accelerator.synchronize()
    return time.perf_counter()


def _median_error(times_s: Sequence[float]) -> float:
    """Return the standard error of the median over the median.

    It is half the distance of the order statistics around the median. A few delayed steps do not
    move the median, but would inflate a standard deviation.
    """
    count = len(times_s)
    low, median, high = np.quantile(times_s, 0.5 + np.array([-0.5, 0, 0.5]) / count**0.5)
    return float(0.5 * (high - low) / median * count / (count - 1))


def fit_time_model(
    batch_sizes: Sequence[int], times_s: Sequence[float], errors: Sequence[float] = ()
) -> TimeModel:
    """Fit step time against batch size by least squares on the *relative* error (weights 1/t).

    A line with an intercept below zero does not model a step; then only the slope is fitted,
    through the origin.

    Noise must not create a floor. There is one only if the line is off by more than
    `TOLERANCE` and by more than four standard errors, and a floor under at least two of four or
    more sizes cuts the largest error below a third of the line's.

    `batch_sizes` ascend; `errors` are standard errors of the times, relative to them.
    """
    x, t = np.asarray(batch_sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)

    def off(model: TimeModel) -> float:
        return max(abs(model.time(size, 1) / time_s - 1) for size, time_s in zip(x, t, strict=True))

    line = _fit_line(x, t)
    if len(x) < _SIZES_FOR_A_FLOOR or off(line) <= max(TOLERANCE, 4 * max(errors, default=0.0)):
        return line
    fits = []
    for flat in range(2, len(x)):
        floor = float((1 / t[:flat]).sum() / (1 / t[:flat] ** 2).sum())
        fits.append(replace(_fit_line(x[flat:], t[flat:]), floor=floor))
    best = min(fits, key=off)
    return best if off(best) < off(line) / 3 else line


def _fit_line(x: np.ndarray, t: np.ndarray) -> TimeModel:
    """Return the line, without a floor."""
    slope, intercept = np.polyfit(x, t, 1, w=1 / t) if len(x) > 1 else (t[0] / x[0], 0.0)
    if intercept <= 0 or slope <= 0:
        ratio = x / t
        slope, intercept = float(ratio.sum() / (ratio**2).sum()), 0.0
    return TimeModel(float(slope), float(intercept))
