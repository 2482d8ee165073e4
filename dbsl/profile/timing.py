"""Time of a training step: measured, and fitted by a line, with a floor where there is one.

Step time is ``t = a*x + b`` (eq. 2). Where a line is clearly wrong, as on a fast GPU that waits for
its host in small steps, there is also a floor: ``t = max(f, a*x + b)``. Warm-up is excluded, the
device is synchronised, and the fit minimises relative errors.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import px
from dbsl.base.machine import lazy_import, local_processes
from dbsl.cluster.weights import compile_in_place
from dbsl.cluster.wire import wait_for_all
from dbsl.data.sources import Batch
from dbsl.loss import LossOf
from dbsl.model import set_training
from dbsl.optimizer import BuildOptimizer, make_clip
from dbsl.plan.sampler import Part, micro_parts
from dbsl.plan.types import TimeModel
from dbsl.profile.fit import fit_time_model, measure_step_times
from dbsl.profile.memory import MemoryModel, peak_bytes, without_trials

timm = lazy_import("timm")

_LR = 1e-8  # while measuring: some optimizers refuse 0
# Largest relative error of a fitted line above which its predictions are not trusted. R2 would not
# do: it is also low where step time does not depend on the batch size.
_BAD_FIT = 0.20
_UNSURE = 0.10  # relative standard error of a time above which a good fit is chance
NO_OPTIMIZER = "none"  # for workers that push gradients: the server takes the step

Example = Callable[[int, int], Batch]  # by batch size and resolution


def setup_of(
    name: str, model: nn.Module, num_classes: int, accelerator: Accelerator, **step: Any
) -> dict[str, Any]:
    """Return all that a model's step time depends on, except resolution and batch size.

    `step` describes the step: ``optimizer`` (or `NO_OPTIMIZER`), whether it has ``momentum`` and
    ``weight_decay``, whether gradients are clipped (``clip``) and the model compiled (``compile``),
    and ``loss``, a digest of the loss function's text, but not of functions it calls.
    """
    return {
        "device": device_name(accelerator.device),
        "model": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "num_classes": num_classes,
        "precision": str(accelerator.mixed_precision),
        "cpu_threads": torch.get_num_threads(),
        "local_processes": local_processes(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        **step,
    }


def device_name(device: torch.device) -> str:
    """Return the name of a device's hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "cpu"


@dataclass(frozen=True)
class StepSpec:
    """A training step at any resolution and batch size."""

    setup: Mapping[str, Any]  # key of its kept times; see `setup_of`
    model: nn.Module  # on its device
    accelerator: Accelerator
    loss_of: LossOf
    example: Example  # batch on the device
    build_optimizer: BuildOptimizer | None  # None: workers push gradients, and the server steps


@dataclass(frozen=True)
class StepProfile:
    """Measured training steps at one resolution, and the lines fitted to them."""

    resolution: int  # pixels
    batch_sizes: Sequence[int]  # ascending
    times_s: Sequence[float]  # median time of a step
    errors: Sequence[float]  # standard error of each median, relative to it
    slope: float  # a, seconds per sample
    intercept: float  # b, seconds per step
    floor: float  # f, shortest time of a step, seconds
    largest_error: float  # largest relative error of the line against the measured times
    micro_batch: int | None = None  # samples computed at once; None: the whole batch
    memory: MemoryModel | None = None

    @property
    def time_model(self) -> TimeModel:
        """The fitted line of step times, and their floor."""
        return TimeModel(self.slope, self.intercept, self.floor)

    @property
    def misses(self) -> bool:
        """Whether predictions are poor: the line misses measured times, or they are noise."""
        return self.largest_error > _BAD_FIT or max(self.errors, default=0.0) > _UNSURE

    def describe(self, note: str = "") -> str:
        """Return the fit and a note in one line, and the memory model in another."""
        least = f", and {1e3 * self.floor:.4g} ms at least" if self.floor else ""
        text = (
            f"{px(self.resolution, after=': ')}a step with x samples takes "
            f"{1e3 * self.slope:.4g} ms * x + {1e3 * self.intercept:.4g} ms{least} "
            f"(largest error {self.largest_error:.1%}){note}"
        )
        return f"{text}\n  {self.memory.describe()}" if self.memory else text


class TrainingStep:
    """A training step on a copy of a model, with its frozen parameters, for any batch size."""

    def __init__(self, spec: StepSpec, resolution: int, micro_batch: int | None = None) -> None:
        self.accelerator, self.resolution = spec.accelerator, resolution
        self.micro_batch, self.compiles = micro_batch, spec.setup["compile"]
        self._example, self._loss_of = spec.example, spec.loss_of
        self.model = copy.deepcopy(spec.model)
        set_training(self.model)
        self._optimizer = spec.build_optimizer and spec.build_optimizer(self.model)
        for group in self._optimizer.param_groups if self._optimizer else ():
            group["lr"] = _LR
        self._clip = make_clip(self.model, 1.0 if spec.setup["clip"] else None)
        self._batch: Batch | None = None

    def __call__(self, batch_size: int) -> None:
        """Take one step; make new images for a batch larger than any before."""
        parts = micro_parts(Part(0, np.arange(batch_size), 1.0), self.micro_batch)
        at_once = max(len(part.indices) for part in parts)
        if self._batch is None or at_once > len(self._batch[0]):
            self._batch = None  # free the old ones first
            self._batch = self._example(at_once, self.resolution)
        for part in parts:
            images, labels = (tensor[: len(part.indices)] for tensor in self._batch)
            (self._loss_of(self.model, images, labels) * part.weight).backward()
        if self._optimizer is not None:
            self._clip(self._optimizer)
            self._optimizer.step()
        self.model.zero_grad(set_to_none=True)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state; there is none before the first step."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        values = [value for state in states for value in state.values()]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def profile_steps(step: TrainingStep, batch_sizes: Sequence[int], *, seconds: float) -> StepProfile:
    """Measure training steps on this device, and fit their time and, on CUDA, their memory.

    Weights and data are not changed, and the cost of the data path is excluded. All processes
    measure at once, as they will train. Repeats stop after about `seconds`.
    """
    wait_for_all()
    sizes, began, device = sorted(set(batch_sizes)), time.perf_counter(), step.accelerator.device
    # With micro-batches, memory does not grow with the batch.
    whole_on_cuda = device.type == "cuda" and step.micro_batch is None
    memory = profile_memory(step, sizes) if whole_on_cuda else None
    # Compile only now: memory of the eager copy is an upper bound, and measuring it takes other
    # batch sizes, each of which would compile a graph.
    if step.compiles:
        compile_in_place(step.model, device, step.compiles, sums=step.micro_batch is not None)
    left = seconds - (time.perf_counter() - began)
    times, errors = measure_step_times(step, sizes, seconds=left)
    return fit_profile(
        step.resolution, sizes, times, errors, micro_batch=step.micro_batch, memory=memory
    )


def profile_memory(step: TrainingStep, batch_sizes: Sequence[int]) -> MemoryModel | None:
    """Fit a line to a step's peak CUDA memory; None if the batch size hardly matters."""
    # cuDNN keeps the algorithm that it first chose for a shape, tried or not. These shapes differ
    # from those of training, for which it should try all.
    sizes = [size - (size > 4) for size in batch_sizes]
    with without_trials():
        step(sizes[0])  # creates the optimizer's state
        used = [peak_bytes(partial(step, size), step.accelerator.device) for size in sizes]
    slope, intercept = np.polyfit(sizes, used, 1) if len(sizes) > 1 else (0.0, 0.0)
    if slope * (sizes[-1] - sizes[0]) < 2**20:  # less than a MiB in total
        return None
    return MemoryModel(max(float(intercept), 0.0), float(slope), float(step.state_bytes))


def batch_sizes_to_measure(large_batch_size: int, points: int = 5) -> list[int]:
    """Return a geometric grid of batch sizes up to the large one, each half of the next.

    It leaves out 1, with which batch norm refuses a feature map of one pixel.
    """
    smallest = min(2, large_batch_size)
    return sorted({max(smallest, large_batch_size >> k) for k in range(points)})


def fit_profile(
    resolution: int,
    batch_sizes: Sequence[int],
    times_s: Sequence[float],
    errors: Sequence[float],
    **more: Any,
) -> StepProfile:
    """Fit a line to step times, with a floor where they show one; record its largest error."""
    line = fit_time_model(batch_sizes, times_s, errors)
    rows = zip(batch_sizes, times_s, strict=True)
    off = max(abs(line.time(size, 1) / time_s - 1) for size, time_s in rows)
    fitted = line.slope, line.intercept, line.floor, off
    return StepProfile(resolution, batch_sizes, times_s, errors, *fitted, **more)
