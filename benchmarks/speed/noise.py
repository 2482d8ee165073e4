"""What the gradient noise scale costs: a measurement beside the steps of a round, in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import train
from benchmarks.speed.arms import LR, MOMENTUM, WEIGHT_DECAY, Settings, _batch, _data, _model
from dbsl.launch import start_accelerator
from dbsl.machines import TimeModel
from dbsl.model import build_optimizer
from dbsl.noise import NoiseProbe, probe_interval
from dbsl.sampler import Part, Step

ROUND, TURNS = 2000, 15  # images of a round


def rows(settings: Settings) -> list[dict[str, Any]]:
    """Return what a measurement takes, as a share of a step and of rounds of 2,000 images."""
    accelerator, data = start_accelerator(settings.precision, 60.0), _data(settings)
    model = _model(settings, data)
    optimizer = build_optimizer("sgd", model, LR, MOMENTUM, WEIGHT_DECAY)
    images, labels = _batch(data, settings)
    loss_of = partial(train.compute_loss, accelerator=accelerator, smoothing=0.0)
    whole = Step((Part(0, np.arange(len(labels)), 1.0),), 0.0)
    probes = {
        "norm of the gradients": NoiseProbe(every=1, micro=False, least=2, model=model),
        "norms and a micro-batch": NoiseProbe(every=1, micro=True, least=2, model=model),
    }
    steps = round(ROUND / settings.batch)
    every = probe_interval(TimeModel(1.0, 0.0), settings.batch, steps, 2)
    times: dict[str, list[float]] = {name: [] for name in ("step", *probes)}
    for _ in range(TURNS):
        began = time.perf_counter()
        loss_of(model, images, labels).backward()
        spent = time.perf_counter() - began
        for name, probe in probes.items():
            times[name].append(
                _timed(partial(probe.measure, whole, False, images, labels, loss_of))
            )
        began = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times["step"].append(spent + time.perf_counter() - began)
    found = []
    for name in probes:
        ratios = [a / b for a, b in zip(times[name][2:], times["step"][2:], strict=True)]
        share = median(ratios) / (steps * (every if "micro" in name else 1))
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
