"""From the step times of any loop to who gets which batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np

from dbsl.base.errors import require
from dbsl.plan.machines import balanced_sizes
from dbsl.plan.types import TimeModel
from dbsl.profile.fit import fit_time_model, measure_step_times


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
    for another. The device is synchronised. Sizes ascend; two or more tell a fixed part from the
    rest. It ends when every median is known to 2 % or when about `seconds` are up, after two turns
    at least.
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


def split_batch(
    global_batch_size: int,
    time_models: Sequence[TimeModel],
    *,
    limits: Sequence[int] | None = None,
    least: int = 1,
) -> BatchSplit:
    """Split a joint batch over processes with these step times so that all are done together.

    The times are as `measure_step` fits them. `limits` are samples that each process can hold at
    most (None: no limit), and `least` those that it gets at least.
    """
    right = isinstance(time_models, Sequence) and all(
        isinstance(model, TimeModel) and model.slope > 0 and model.intercept >= 0
        for model in time_models
    )
    must = "time_models must be one or more TimeModel with slope above 0, intercept of at least 0"
    require(right and len(time_models), must, str(time_models))
    count = len(time_models)
    whole = isinstance(least, Integral) and least >= 1
    require(whole, "least must be an integer of at least 1", least)
    enough = isinstance(global_batch_size, Integral) and global_batch_size >= least * count
    must = f"global_batch_size must be an integer of at least {least * count}"
    require(enough, must, global_batch_size)
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
