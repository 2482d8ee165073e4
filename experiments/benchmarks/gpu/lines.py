"""Stages that hold the lines of step time and memory against steps that were left out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dbsl.data.sources import image_batch
from dbsl.model import build_model
from dbsl.profile.fit import measure_step_times
from dbsl.profile.memory import give_back, is_short_of_memory, peak_bytes, room_bytes
from dbsl.profile.timing import (
    TrainingStep,
    batch_sizes_to_measure,
    profile_memory,
    profile_steps,
)
from dbsl.run.accelerator import start_accelerator
from dbsl.tools import profile as command
from experiments.benchmarks.gpu.child import Settings


def step_lines(settings: Settings, resolution: int) -> Iterator[dict[str, Any]]:
    """Fit both lines, then predict batch sizes between and above those that were measured."""
    step = _step(settings, resolution)
    sizes = batch_sizes_to_measure(16, 3) if settings.dry else batch_sizes_to_measure(512, 6)
    held_out = [6, 12] if settings.dry else [48, 96, 200, 384, 500]
    seconds = 1.0 if settings.dry else 30.0
    profile = profile_steps(step, sizes, seconds=seconds)
    times, _ = measure_step_times(step, held_out, seconds=seconds)
    predicted = [profile.time_model.time(x, 1) for x in held_out]
    errors = [p / t - 1 for p, t in zip(predicted, times, strict=True)]
    yield {
        "precision": str(step.accelerator.mixed_precision),
        "sizes": list(profile.batch_sizes),
        "step_ms": [round(1e3 * t, 4) for t in profile.times_s],
        "slope_us": round(1e6 * profile.slope, 4),
        "intercept_ms": round(1e3 * profile.intercept, 4),
        "floor_ms": round(1e3 * profile.floor, 4),
        "held_out": held_out,
        "held_out_ms": [round(1e3 * t, 4) for t in times],
        "time_errors": [round(error, 4) for error in errors],
        "largest_time_error": round(max(map(abs, errors)), 4),
        "line": profile.describe(),
    }
    memory = profile.memory
    if memory is None:
        yield {"note": "memory is measured on CUDA, and where batch sizes make a difference"}
        return
    larger = [24] if settings.dry else [200, 500, 1500, 4096]
    used, allocated = [], []
    for size in larger:
        used.append(peak_bytes(partial(step, size), step.accelerator.device))
        allocated.append(torch.cuda.max_memory_allocated() / 2**20)  # since the same beginning
    line = [memory.fixed_bytes + size * memory.sample_bytes for size in larger]
    errors = [p / m - 1 for p, m in zip(line, used, strict=True)]
    yield {
        "memory_sizes": larger,
        "memory_mib": [round(m / 2**20, 1) for m in used],
        "allocated_mib": [round(m, 1) for m in allocated],
        "memory_errors": [round(error, 4) for error in errors],
        "largest_memory_error": round(max(map(abs, errors)), 4),
    }


def largest_batch(
    settings: Settings, resolution: int, limit_gib: float | None
) -> Iterator[dict[str, Any]]:
    """Compare the largest batch that the memory line admits with the largest that runs.

    With a limit, CUDA's allocator is held to it: a whole large device may meet other bounds first,
    such as tensors of more than 2^31 numbers.
    """
    step = _step(settings, resolution)
    device = step.accelerator.device
    if device.type != "cuda":
        yield {"note": "not measured: host memory has no allocator that refuses"}
        return
    memory = profile_memory(step, [4, 16] if settings.dry else [64, 128, 256, 512])
    if memory is None:
        yield {"note": "batch sizes make no measurable difference in memory"}
        return
    limit = limit_gib and limit_gib * 2**30
    if limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total)
    room = room_bytes(device)
    capacity = min(limit or room, room)
    predicted = replace(memory, room_bytes=capacity).fits()
    bare = int((capacity - memory.fixed_bytes) // memory.sample_bytes)
    yield {"capacity_gib": round(capacity / 2**30, 2), "predicted": predicted, "line": bare}
    del step

    def runs(size: int) -> None:
        give_back(device)  # what a failed step still holds
        fresh = _step(settings, resolution)  # without the images of another size
        fresh(2)  # the optimizer's state exists from now on
        fresh(size)
        torch.cuda.synchronize(device)

    yield from search(runs, predicted, bare)


def search(runs: Callable[[int], object], predicted: int, bare: int) -> Iterator[dict[str, Any]]:
    """Find the largest batch that runs, from the predicted one on.

    An error that does not say that memory is short may be one after which the device does nothing
    more: it ends the search with what is known.
    """
    reasons: dict[str, int] = {}
    known = 0

    def fits(size: int) -> bool:
        nonlocal known
        try:
            runs(size)
        except RuntimeError as error:
            reasons[str(error).strip().partition("\n")[0][:120]] = size
            if not is_short_of_memory(error):
                raise
            return False
        known = max(known, size)
        return True

    try:
        largest = bisect(fits, predicted, tolerance=0.01)
    except RuntimeError:
        yield {"note": f"{known} runs, another error ended the search", "refusals": reasons}
        return
    yield {
        "runs": largest,
        "predicted_over_runs": round(predicted / largest, 4) if largest else None,
        "line_over_runs": round(bare / largest, 4) if largest else None,
        "refusals": reasons,
    }


def bisect(fits: Callable[[int], bool], guess: int, tolerance: float) -> int:
    """Return the largest size that fits, to within a share of it; 0: none does.

    Args:
        fits: Whether a size fits; a larger one than one that does not is never asked for.
        guess: Where to begin.
        tolerance: Share of the result by which it may be too low.
    """
    low, high = guess, 2 * guess
    if fits(low):
        while fits(high):
            low, high = high, 2 * high
    else:
        while low and not fits(low // 2):
            low //= 2
        low, high = low // 2, low
    while low and high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _step(settings: Settings, resolution: int) -> TrainingStep:
    accelerator = start_accelerator("auto", 60.0)
    name, side = ("test_resnet", 16) if settings.dry else ("resnet18", resolution)
    model = build_model(name, 100, (side,))
    model = model.to(accelerator.device, memory_format=torch.channels_last)
    example = partial(image_batch, classes=100, device=accelerator.device)
    arguments = command.Arguments(model=name, resolutions=(side,))
    return TrainingStep(command.spec_of(arguments, model, accelerator, example), side)
