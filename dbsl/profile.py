"""Measure how long a training step takes on this device, and fit t = a*x + b to it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.benchmark import Timer

from dbsl.plan import TimeModel


def measure_time_model(
    model: nn.Module,
    resolution: int,
    large_batch_size: int,
    num_classes: int,
    accelerator: Accelerator,
    *,
    seconds: float,
) -> TimeModel:
    """Measure training steps on this device; over several processes the mean of their times.

    Runs on a copy of the model and on synthetic images: weights and data stay untouched, and what
    the data path costs is not in it. All processes measure at once, as they will train.
    """
    scratch = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(scratch.parameters(), lr=0.0, momentum=0.9)

    def step(batch_size: int) -> None:
        with accelerator.autocast():
            loss = F.cross_entropy(scratch(images[:batch_size]), labels[:batch_size])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    images = torch.randn(large_batch_size, 3, resolution, resolution, device=accelerator.device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.arange(large_batch_size, device=accelerator.device) % num_classes
    sizes = batch_sizes_to_measure(large_batch_size)
    accelerator.wait_for_everyone()
    times = torch.tensor(measure_step_times(step, sizes, seconds=seconds))
    times = accelerator.reduce(times.to(accelerator.device), reduction="mean")
    return fit_time_model(sizes, times.tolist())


def batch_sizes_to_measure(large_batch_size: int, points: int = 4) -> list[int]:
    """Return a geometric grid of batch sizes that ends at the large one, each half of the next.

    It stays above 1, where batch norm refuses a feature map of one pixel.
    """
    smallest = min(2, large_batch_size)
    return sorted({max(smallest, large_batch_size >> k) for k in range(points)})


def fit_time_model(batch_sizes: Sequence[int], times_s: Sequence[float]) -> TimeModel:
    """Fit step time against batch size by least squares on the *relative* error (weights 1/t).

    A line whose intercept comes out below zero is no model of a step; the slope alone is then
    fitted, through the origin.
    """
    x, t = np.asarray(batch_sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    slope, intercept = np.polyfit(x, t, 1, w=1 / t) if len(x) > 1 else (t[0] / x[0], 0.0)
    if intercept <= 0 or slope <= 0:
        ratio = x / t
        slope, intercept = float(ratio.sum() / (ratio**2).sum()), 0.0
    return TimeModel(float(slope), float(intercept))


def measure_step_times(
    step: Callable[[int], object],
    batch_sizes: Sequence[int],
    *,
    seconds: float,
    relative_error: float = 0.02,
) -> list[float]:
    """Return the median time of ``step(batch_size)`` in seconds for each size, after warm-up.

    Sizes take turns, so that a slow spell of the machine falls on all of them. It ends when the
    standard error of every median is small enough, after at least 3 repeats, or when time is up.
    """
    timers = [
        Timer(
            "step(batch_size)",
            globals={"step": step, "batch_size": size},
            num_threads=torch.get_num_threads(),  # Timer's own default is 1
        )
        for size in batch_sizes
    ]
    for timer in timers:
        timer.timeit(2)
    samples: list[list[float]] = [[] for _ in timers]
    deadline = time.perf_counter() + seconds
    while len(samples[0]) < 3 or time.perf_counter() < deadline:
        for timer, taken in zip(timers, samples, strict=True):
            taken.append(timer.timeit(1).median)  # the timer waits for the device
        if len(samples[0]) >= 3 and max(map(_median_error, samples)) < relative_error:
            break
    return [statistics.median(taken) for taken in samples]


def _median_error(times_s: Sequence[float]) -> float:
    """Return the standard error of the median over the median, for roughly normal noise."""
    spread = statistics.stdev(times_s) * 1.2533 / len(times_s) ** 0.5
    return spread / statistics.median(times_s)
