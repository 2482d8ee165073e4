"""Stages that measure speed: images/s against the bare step, kernels and waits of a step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dbsl.run.turns import TurnStep, WorkerTurn
from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.runs import common_flags, peak_memory, train_here
from experiments.benchmarks.speed.arms import Settings as ArmSettings
from experiments.benchmarks.speed.arms import synchronize
from experiments.benchmarks.speed.steps import Arm, compare, ratio

_TURN_S, _GUESS = 1.5, {24: 70_000, 32: 45_000}  # images/s, to make turns of about that length


def images_per_second(
    settings: Settings, resolution: int, batch: int, compiled: bool, more: bool = False
) -> Iterator[dict[str, Any]]:
    """Let train.py's rounds and the bare step take turns, with `more` also other rounds."""
    arm = ArmSettings(
        dataset=settings.data,
        model="test_resnet" if settings.dry else "resnet18",
        resolution=16 if settings.dry else resolution,
        batch=8 if settings.dry else batch,
        precision="bf16",
        compiled=compiled and not settings.dry,
        round_steps=2 if settings.dry else 25,
    )
    images = 32 if settings.dry else int(_TURN_S * _GUESS[resolution] * batch / (batch + 150))
    arms: dict[str, Arm] = {}
    began = time.perf_counter()
    try:
        arms["bare"] = Arm("bare", arm)
        arms["rounds"] = Arm("rounds", arm)
        if more:
            arms["no-probe"] = Arm("rounds", replace(arm, probe=False))
            arms["four-times-longer"] = Arm("rounds", replace(arm, round_steps=4 * arm.round_steps))
        yield {"start_s": round(time.perf_counter() - began, 1)}
        found = compare(arms, images, turns=2 if settings.dry else 7)
    finally:
        for started in arms.values():
            started.close()
    yield {
        "images_per_s": round(median(found["rounds"]["rates"]), 1),
        "bare_images_per_s": round(median(found["bare"]["rates"]), 1),
        "of_bare_step": round(ratio(found, "rounds", "bare"), 4),
        "over_rounds": {name: round(ratio(found, name, "rounds"), 4) for name in list(arms)[2:]},
        "rates": [round(rate, 1) for rate in found["rounds"]["rates"]],
        "bare_rates": [round(rate, 1) for rate in found["bare"]["rates"]],
        "peak_mib": found["rounds"]["peak_mib"],
        "bare_peak_mib": found["bare"]["peak_mib"],
    }


class _Enough(Exception):
    """The round that was to be looked at is over."""


def kernels(
    settings: Settings, resolution: int, batch: int, compiled: bool
) -> Iterator[dict[str, Any]]:
    """Count what a step of train.py asks of the device, and how often it waits for it."""
    steps = 2 if settings.dry else 15
    batch = 8 if settings.dry else batch
    steps_of, calls, found = WorkerTurn.steps, [0], {}

    def watched(turn: WorkerTurn, *given: object) -> Iterator[TurnStep]:
        calls[0] += 1
        steps_left = steps_of(turn, *given)
        synchronize()
        if calls[0] == 3:
            with torch.profiler.profile() as profile:
                yield from steps_left
                synchronize()
            found.update(_counts(profile, steps))
            raise _Enough
        began = time.perf_counter()
        yield from steps_left
        found["host_ms"] = round(1e3 * (time.perf_counter() - began) / steps, 3)
        synchronize()
        found["step_ms"] = round(1e3 * (time.perf_counter() - began) / steps, 3)

    WorkerTurn.steps = watched
    with tempfile.TemporaryDirectory() as scratch:
        flags = common_flags(settings, Path(scratch) / "run")
        flags += ["--workers", "1", "--local-batch-sizes", str(batch), "--no-noise-scale"]
        # An epoch is a round, and the third is looked at: a piece of the images is enough.
        flags += ["--train-samples", str(steps * batch), "--epochs", "3", "--eval-every", "3"]
        flags += ["--slope", "0.001", "--intercept", "0.01", "--log-every", "0"]
        flags += ["--resolutions", "16" if settings.dry else str(resolution)]
        try:
            train_here([*flags, "--compile" if compiled and not settings.dry else "--no-compile"])
        except _Enough:
            yield {**found, **peak_memory()}


def _counts(profile: torch.profiler.profile, steps: int) -> dict[str, Any]:
    """Return operators, calls of CUDA's runtime and the longest kernels, of one step.

    One wait at the end of all steps is this measurement's own.
    """
    top = sum(1 for event in profile.events() if _is_top_level(event))
    calls, kernels = {}, []
    for average in profile.key_averages():
        if average.key.startswith(("cuda", "cu")) and average.key[:5] != "cudnn":
            calls[average.key] = round(average.count / steps, 2)
        on_device = average.device_type == torch.autograd.DeviceType.CUDA
        if getattr(average, "is_user_annotation", False):
            continue  # a span around kernels, which are there themselves
        if on_device and average.self_device_time_total:
            kernels.append((average.self_device_time_total, average.count, average.key))
    kernels.sort(reverse=True)
    return {
        "aten_operators": round(top / steps, 1),
        "launches": round(sum(n for name, n in calls.items() if "LaunchKernel" in name), 1),
        "graph_launches": round(sum(n for name, n in calls.items() if "GraphLaunch" in name), 2),
        "waits": round(sum(n for name, n in calls.items() if "Synchronize" in name), 2),
        "copies": round(sum(n for name, n in calls.items() if "Memcpy" in name), 2),
        "runtime_calls": dict(sorted(calls.items(), key=lambda pair: -pair[1])[:12]),
        "device_ms": round(sum(time for time, _, _ in kernels) / 1e3 / steps, 3),
        "longest_kernels": [
            {"name": name[:90], "ms": round(time / 1e3 / steps, 4), "times": round(n / steps, 1)}
            for time, n, name in kernels[:12]
        ],
    }


def _is_top_level(event: Any) -> bool:
    """Whether an event is an ATen operator that no other operator calls."""
    if not event.name.startswith("aten::"):
        return False
    above = event.cpu_parent
    while above is not None:
        if above.name.startswith("aten::"):
            return False
        above = above.cpu_parent
    return True
