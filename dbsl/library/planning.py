"""From the step times of any loop to who gets which batch."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dbsl.base.errors import SettingError
from dbsl.plan.machines import balanced_sizes
from dbsl.plan.types import TimeModel

TOLERANCE = 0.10  # relative error of a prediction up to which the line is said to hold
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


@dataclass(frozen=True)
class BatchSplit:
    """A joint batch split over processes so that all take as long.

    `times_s` are predicted seconds of each process's part, `equal_time_s` those of the slowest
    process, were all parts equal.
    """

    local_batch_sizes: tuple[int, ...]
    times_s: tuple[float, ...]
    equal_time_s: float


def measure_step(
    step: Callable[[int], object], batch_sizes: Sequence[int], *, seconds: float = 20.0
) -> StepTimes:
    """Measure ``step(batch_size)``: a forward and backward pass and the optimizer's step.

    Processes that train together measure at the same time, each by itself: `step` must not wait
    for another. The device is synchronised. It ends when every median is known to 2 % or when
    `seconds` are up, after two turns at least.

    Args:
        step: Takes one step of that many samples.
        batch_sizes: Samples of the steps, ascending; two or more tell a fixed part from the rest.
        seconds: To spend at most, about.
    """
    sizes = [int(size) for size in batch_sizes]
    if not sizes or sizes[0] < 1 or sorted(set(sizes)) != sizes:
        raise SettingError(f"batch_sizes must ascend from at least 1, got {list(batch_sizes)}")
    times, errors = measure_step_times(step, sizes, seconds=seconds)
    model = fit_time_model(sizes, times, errors)
    return StepTimes(tuple(sizes), tuple(times), tuple(errors), model)


def split_batch(
    global_batch_size: int,
    time_models: Sequence[TimeModel],
    *,
    limits: Sequence[int] | None = None,
    least: int = 1,
) -> BatchSplit:
    """Split a joint batch over processes with these step times so that all are done together.

    Args:
        global_batch_size: Samples over all processes.
        time_models: Step time of each process, as `measure_step` fits it.
        limits: Samples that each process can hold at most; None: no limit.
        least: Samples that each process gets at least.
    """
    model = TimeModel.of(time_models, len(time_models))
    most = np.full(len(time_models), global_batch_size) if limits is None else np.asarray(limits)
    sizes = balanced_sizes(global_batch_size, model, most, least)
    equal = np.full(len(sizes), global_batch_size / len(sizes))
    return BatchSplit(
        tuple(sizes.tolist()),
        tuple(np.asarray(model.time(sizes, 1)).tolist()),
        float(np.asarray(model.time(equal, 1)).max()),
    )


def measure_step_times(
    step: Callable[[int], object],
    batch_sizes: Sequence[int],
    *,
    seconds: float,
    relative_error: float = 0.02,
) -> tuple[list[float], list[float]]:
    """Return the median seconds of ``step(batch_size)`` for each size, and their relative errors.

    Sizes take turns, so that a slow spell of the machine falls on all of them: a step that warms up
    and is left out, then steps for about a quarter of the longest step's time. It ends when the
    standard error of every median is small enough, or when time is up, after 2 turns at least.
    """
    from torch.utils.benchmark import Timer, timer  # imports compilers

    timers = [
        Timer(
            "step(batch_size)",
            globals={"step": step, "batch_size": size},
            num_threads=torch.get_num_threads(),  # Timer's own default is 1
        )
        for size in batch_sizes
    ]
    began = time.perf_counter()
    step(max(batch_sizes))  # the first one compiles, or tries cuDNN's algorithms
    second = timer()  # which waits for the device
    step(max(batch_sizes))
    block_s = max(0.25 * (timer() - second), 1e-3)
    samples: list[list[float]] = [[] for _ in timers]
    for turn in itertools.count(1):
        for each, taken in zip(timers, samples, strict=True):
            taken += each.blocked_autorange(min_run_time=block_s).times  # waits for the device
        if turn == 1:
            continue
        errors = [_median_error(taken) for taken in samples]
        if max(errors) < relative_error or time.perf_counter() - began > seconds:
            return [statistics.median(taken) for taken in samples], errors


def _median_error(times_s: Sequence[float]) -> float:
    """Return the standard error of the median over the median, for roughly normal noise."""
    error = statistics.stdev(times_s) * 1.2533 / len(times_s) ** 0.5
    return error / statistics.median(times_s)


def fit_time_model(
    batch_sizes: Sequence[int], times_s: Sequence[float], errors: Sequence[float] = ()
) -> TimeModel:
    """Fit step time against batch size by least squares on the *relative* error (weights 1/t).

    A line whose intercept comes out below zero is no model of a step; the slope alone is then
    fitted, through the origin.

    Noise is not to make a floor. There is one only where the line alone is off by more than
    `TOLERANCE` and by more than four standard errors, and a floor below at least two of four or
    more sizes brings the largest error below a third of the line's.

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
    """Return the line alone."""
    slope, intercept = np.polyfit(x, t, 1, w=1 / t) if len(x) > 1 else (t[0] / x[0], 0.0)
    if intercept <= 0 or slope <= 0:
        ratio = x / t
        slope, intercept = float(ratio.sum() / (ratio**2).sum()), 0.0
    return TimeModel(float(slope), float(intercept))
