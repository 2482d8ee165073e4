"""Step times and memory that a run measures of a fork, against the same loop written by hand.

    python -m experiments.benchmarks.own_loss

A distilling loss with a teacher, a second head, and an optimizer of two parts (Muon and AdamW).
Step times and memory are those that the run plans with. The loop takes the same steps without this
project's code.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train
from dbsl.profile import cache
from dbsl.profile.memory import PeakMemory
from dbsl.profile.timing import StepProfile
from dbsl.run.accelerator import start_accelerator
from dbsl.run.prepare import Replaced, prepare
from experiments.benchmarks.record import record

SIZES = (16, 32, 64)
SIDE, CLASSES, TURNS = 32, 10, 15


class TwoHeads(nn.Module):
    """A timm model with a second head, of four classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = timm.create_model("resnet10t", num_classes=0)
        self.first, self.second = (nn.Linear(self.body.num_features, n) for n in (CLASSES, 4))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of both heads."""
        features = self.body(images)
        return self.first(features), self.second(features)


def distilling() -> Callable[..., Tensor]:
    """Return a loss with a teacher."""
    teacher = timm.create_model("resnet18", num_classes=CLASSES).eval().requires_grad_(False)

    def loss_function(model: nn.Module, images: Tensor, labels: Tensor, config: Any) -> Tensor:
        with torch.no_grad():
            wanted = teacher(images).softmax(1)
        scores = model(images)
        return F.cross_entropy(scores, labels) + F.cross_entropy(scores, wanted)

    return loss_function


def of_two_heads(model: nn.Module, images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return the loss of both heads."""
    first, second = model(images)
    return F.cross_entropy(first, labels) + F.cross_entropy(second, labels % 4)


def plain(model: nn.Module, images: Tensor, labels: Tensor, config: Any) -> Tensor:
    """Return cross-entropy."""
    return F.cross_entropy(model(images), labels)


def one_model() -> nn.Module:
    """Return a timm model."""
    return timm.create_model("resnet10t", num_classes=CLASSES)


def sgd(model: nn.Module, config: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def muon(model: nn.Module, config: Any) -> list[torch.optim.Optimizer]:
    """Return Muon for the one matrix that the model has, and AdamW for all else."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.01), torch.optim.AdamW(others, lr=0.01)]


@dataclass(frozen=True)
class Fork:
    """A fork: its model, its loss and its optimizer."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    optimizer: Callable[..., Any]


def main() -> int:
    """Measure all forks, each in turns with its loop."""
    torch.set_num_threads(1)
    forks = {
        "plain": Fork(one_model, plain, sgd),
        "distilling": Fork(one_model, distilling(), sgd),
        "second head": Fork(TwoHeads, of_two_heads, sgd),
        "Muon and AdamW": Fork(one_model, plain, muon),
    }
    rows = [row for name, fork in forks.items() for row in compare(name, fork)]
    record(
        Path("experiments/results/own_loss.csv"), rows, "python -m experiments.benchmarks.own_loss"
    )
    return 0


def compare(name: str, fork: Fork) -> list[dict[str, Any]]:
    """Return a row for each batch size; the loop is measured before and after the run's profile."""
    before_s, loop_b = by_hand(fork)
    profile = as_planned(fork)
    after_s, _ = by_hand(fork)
    rows = []
    for size in SIZES:
        loop_s = (before_s[size] + after_s[size]) / 2
        planned_s = profile.time_model.time(size, 1)
        planned_b = profile.memory.sample_bytes * (size - SIZES[0])
        row = {"fork": name, "batch": size, "loop_ms": f"{1e3 * loop_s:.2f}"}
        row |= {"planned_ms": f"{1e3 * planned_s:.2f}", "ratio": f"{planned_s / loop_s:.3f}"}
        row |= {"loop_mib": f"{loop_b[size] / 2**20:.1f}"}  # more than the smallest batch's
        rows.append(row | {"planned_mib": f"{planned_b / 2**20:.1f}"})
    return rows


def as_planned(fork: Fork) -> StepProfile:
    """Return what a run of the fork measures before it plans."""
    config = train.Config(
        **{"lr": 0.01, "workers": 1, "large_batch_size": (SIZES[-1],), "train_samples": 600},
        **{"mixed_precision": "no", "report_to": "none", "cpu_threads": 1},
        **{"profile_refresh": True, "profile_seconds": 20.0, "resolutions": (SIDE,)},
    )
    accelerator = start_accelerator("no", 60.0)
    seen, measure = [], cache.profile_steps

    def noted(*given: Any, **how: Any) -> StepProfile:
        seen.append(measure(*given, **how))
        return seen[-1]

    with patch.object(cache, "profile_steps", noted):
        prepare(config, accelerator, fork.loss, Replaced(None, fork.model, fork.optimizer))
    return seen[0]


def by_hand(fork: Fork) -> tuple[dict[int, float], dict[int, float]]:
    """Return seconds of a step and the bytes that it needs more than the smallest, by batch."""
    model = fork.model().to(memory_format=torch.channels_last).train()
    built = fork.optimizer(model, None)
    optimizers = built if isinstance(built, list) else [built]
    peaks, seconds = PeakMemory(torch.device("cpu")), {size: [] for size in SIZES}

    def step(size: int) -> None:
        images = torch.randn(size, 3, SIDE, SIDE).to(memory_format=torch.channels_last)
        labels = torch.randint(0, CLASSES, (size,))
        began = time.perf_counter()
        fork.loss(model, images, labels, None).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        seconds[size].append(time.perf_counter() - began)

    step(SIZES[0])
    used = {size: peaks.of(lambda size=size: step(size)) for size in SIZES}
    for _ in range(TURNS):
        for size in SIZES:
            step(size)  # takes the caches for this size
            seconds[size].pop()
            for _ in range(64 // size):
                step(size)
    median = {size: float(np.median(times)) for size, times in seconds.items()}
    return median, {size: used[size] - used[SIZES[0]] for size in SIZES}


if __name__ == "__main__":
    sys.exit(main())
