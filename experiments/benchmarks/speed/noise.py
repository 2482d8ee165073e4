"""What the gradient noise scale costs: a measurement beside the steps of a round, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
from torch import Tensor, nn

import train
from dbsl.extras.noise import NoiseProbe, probe_interval
from dbsl.optimizer import build_optimizer
from dbsl.plan.sampler import Part, Step
from dbsl.plan.types import TimeModel, Turn
from experiments.benchmarks.speed.arms import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Settings,
    _batch,
    _model,
    _start,
    synchronize,
)

ROUND, TURNS, WORKERS = 2000, 16, 4  # images of a round


def rows(settings: Settings) -> list[dict[str, Any]]:
    """Return what a measurement takes, as a share of a step and of rounds of 2,000 images."""
    accelerator, data = _start(settings)
    model = _model(settings, data, accelerator)
    optimizer = build_optimizer("sgd", model, LR, MOMENTUM, WEIGHT_DECAY)
    images, labels = _batch(data, settings)

    def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with accelerator.autocast():
            return train.loss_function(model, images, labels, train.Config())

    whole = Step((Part(0, np.arange(len(labels)), 1.0),), 0.0)
    probes = {
        kind: NoiseProbe(kind, every=1, workers=WORKERS, rounds=1, least=2, model=model)
        for kind in ("joined", "micro")
    }
    steps = round(ROUND / settings.batch)
    every = probe_interval(TimeModel(1.0, 0.0), settings.batch, steps, 2)
    times: dict[str, list[float]] = {name: [] for name in ("step", *probes)}
    for turn in range(TURNS):
        began = time.perf_counter()
        loss_of(model, images, labels).backward()
        synchronize()
        spent = time.perf_counter() - began
        who = Turn((turn % WORKERS,), turn // WORKERS, 0)
        for name, probe in probes.items():
            call = partial(probe.measure, who, whole, False, images, labels, loss_of)
            times[name].append(_timed(call))
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize()
        times["step"].append(spent + time.perf_counter() - began)
    found = []
    for name in probes:
        first = WORKERS  # the first round warms up
        ratios = [a / b for a, b in zip(times[name][first:], times["step"][first:], strict=True)]
        share = fmean(ratios) / (steps * (every if name == "micro" else 1))
        found.append(
            {
                "part": "noise scale",
                "what": name,
                "precision": settings.precision,
                "resolution": settings.resolution,
                "median": f"{median(ratios):.3f}",
                "low": f"{min(ratios):.3f}",
                "high": f"{max(ratios):.3f}",
                "unit": "steps",
                "share_of_round": f"{share:.4f}",
            }
        )
    return found


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for value in call().values():
        float(value)  # waits for the device
    return time.perf_counter() - began
