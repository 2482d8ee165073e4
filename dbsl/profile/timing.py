"""How long a training step takes: measured, and fitted by a line, with a floor where there is one.

Step time is ``t = a*x + b`` (eq. 2). Where a line alone is clearly wrong, as on a fast GPU that
waits for its host in small steps, it has a floor as well: ``t = max(f, a*x + b)``. Warm-up is left
out, the device synchronised, and the fit minimises relative errors.
"""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError, px
from dbsl.base.machine import lazy_import, local_processes
from dbsl.cluster.weights import compile_in_place
from dbsl.cluster.wire import wait_for_all
from dbsl.data.sources import Batch, image_batch
from dbsl.loss import LossOf
from dbsl.model import set_training
from dbsl.optimizer import BuildOptimizer, create_optimizer, make_clip
from dbsl.plan.sampler import Part, micro_parts
from dbsl.plan.types import TimeModel
from dbsl.profile.fit import TOLERANCE, fit_time_model, measure_step_times
from dbsl.profile.memory import MemoryModel, PeakMemory, without_trials

timm = lazy_import("timm")

_LR = 1e-8  # while measuring: some optimizers refuse 0
# Largest relative error of a fitted line above which predictions from it are not to be trusted. R2
# would not do: it is low as well where steps take one time whatever their batch.
BAD_FIT = 0.20
NO_OPTIMIZER = "none"  # for workers that push gradients: the server takes the step

Example = Callable[[int, int], Batch]  # by batch size and resolution


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a step's time depends on, but its resolution and its batch size."""

    device: str  # name of the device
    model: str
    parameters: int
    trained: int  # parameters that are not frozen
    num_classes: int
    precision: str
    optimizer: str = "sgd"  # or `NO_OPTIMIZER`
    momentum: bool = True  # whether the optimizer has momentum
    weight_decay: bool = True  # whether the optimizer decays weights
    compile: bool = False
    cpu_threads: int
    local_processes: int  # processes that run on the machine at the same time
    torch: str
    timm: str
    clip: bool = False  # whether gradients are clipped
    micro_batch: int | None = None  # samples that are computed at once
    # Digest of the loss function's text, not of what it calls; None: cross-entropy.
    loss: str | None = None

    @staticmethod
    def of(name: str, model: nn.Module, num_classes: int, accelerator: Accelerator) -> Setup:
        """Return the setup of this process, its step that of SGD."""
        return Setup(
            device=device_name(accelerator.device),
            model=name,
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            num_classes=num_classes,
            precision=str(accelerator.mixed_precision),
            cpu_threads=torch.get_num_threads(),
            local_processes=local_processes(),
            torch=torch.__version__,
            timm=timm.__version__,
        )


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
    """A training step at any resolution and batch size: its setup, and what no file can hold."""

    setup: Setup
    model: nn.Module  # on its device
    accelerator: Accelerator
    loss_of: LossOf | None = None  # unset: cross-entropy
    example: Example | None = None  # batch on the device; unset: random images
    # what the optimizer takes besides its name, momentum and weight decay; the setup's name of the
    # model tells setups apart that differ in them
    optimizer_settings: Mapping[str, Any] = field(default_factory=dict)
    build_optimizer: BuildOptimizer | None = None  # unset: timm's of the setup's name


@dataclass(frozen=True)
class StepProfile:
    """Measured training steps at one resolution, and the lines fitted to them."""

    resolution: int  # pixels
    batch_sizes: tuple[int, ...]  # ascending
    times_s: tuple[float, ...]  # median time of a step
    errors: tuple[float, ...]  # standard error of each median, relative to it
    slope: float  # a, seconds per sample
    intercept: float  # b, seconds per step
    r_squared: float  # goodness of the fitted line
    largest_error: float  # largest relative error of the line against the measured times
    holds_from: int | None  # smallest measured batch from which on the line is within TOLERANCE
    held_out_sizes: tuple[int, ...] = ()  # measured too, and left out of the fit
    held_out_times_s: tuple[float, ...] = ()
    memory: MemoryModel | None = None
    floor: float = 0.0  # f, the least that a step takes, seconds

    def __post_init__(self) -> None:
        count, finite = len(self.batch_sizes), np.isfinite(self.times_s).all()
        if not finite or not count == len(self.times_s) > 0 or min(self.times_s) <= 0:
            raise SettingError(
                f"times_s must be {count} times, finite and above 0 s, got {self.times_s}"
            )
        _ = self.time_model  # refuses a line out of its bounds

    @property
    def time_model(self) -> TimeModel:
        """The fitted line of step times, and their floor."""
        return TimeModel(self.slope, self.intercept, self.floor)

    @property
    def misses(self) -> bool:
        """Whether the line misses measured times so far that its predictions are not good."""
        return self.largest_error > BAD_FIT

    def describe(self, note: str = "") -> str:
        """Return the fit with a note in one line, and in another what fits into memory."""
        holds = f"within {TOLERANCE:.0%} from batch {self.holds_from} on"
        if self.holds_from is None:
            holds = f"not within {TOLERANCE:.0%} at the largest batch"
        least = f", and {1e3 * self.floor:.4g} ms at least" if self.floor else ""
        text = (
            f"{px(self.resolution, after=': ')}a step with x samples takes "
            f"{1e3 * self.slope:.4g} ms * x + {1e3 * self.intercept:.4g} ms{least} "
            f"(R2 {self.r_squared:.4f}, largest error {self.largest_error:.1%}, {holds})"
        )
        if self.held_out_sizes:
            rows = zip(self.held_out_sizes, self.held_out_times_s, strict=True)
            off = [f"{x}: {self.time_model.time(x, 1) / t - 1:+.1%}" for x, t in rows]
            text = f"{text}; predicted for held-out batches, against measured: {', '.join(off)}"
        text += note
        return f"{text}\n  {self.memory.describe()}" if self.memory else text


class TrainingStep:
    """A training step on a copy of a model, with its frozen parameters, for any batch size."""

    def __init__(self, spec: StepSpec, resolution: int) -> None:
        setup, self.accelerator, self.resolution = spec.setup, spec.accelerator, resolution
        self.micro_batch, self.compiles = setup.micro_batch, setup.compile
        self._example = spec.example or partial(
            image_batch, classes=setup.num_classes, device=spec.accelerator.device
        )
        self._loss_of = spec.loss_of or self._cross_entropy
        self.model = copy.deepcopy(spec.model)
        set_training(self.model)
        self._optimizer: torch.optim.Optimizer | None = None
        if setup.optimizer != NO_OPTIMIZER:
            build = spec.build_optimizer or partial(
                create_optimizer,
                setup.optimizer,
                lr=_LR,
                momentum=0.9 * setup.momentum,
                weight_decay=1e-4 * setup.weight_decay,
                **spec.optimizer_settings,
            )
            self._optimizer = build(self.model)
            for group in self._optimizer.param_groups:
                group["lr"] = _LR
        self._clip = make_clip(self.model, 1.0 if setup.clip else None)
        self._batch: Batch | None = None

    def __call__(self, batch_size: int) -> None:
        """Take one step; a batch size larger than any before makes new images."""
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

    def _cross_entropy(
        self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        with self.accelerator.autocast():
            return F.cross_entropy(model(images), labels)


def profile_steps(
    step: TrainingStep, batch_sizes: Sequence[int], *, seconds: float, held_out: Sequence[int] = ()
) -> StepProfile:
    """Measure training steps on this device, and fit time and memory to them.

    Weights and data stay untouched, and what the data path costs is not in it. All processes
    measure at once, as they will train. It stops repeating after about `seconds`. Batch sizes that
    are `held_out` are measured, too, but left out of the fit.
    """
    wait_for_all()
    sizes = sorted(set(batch_sizes))
    others = sorted(set(held_out) - set(sizes))
    began = time.perf_counter()
    # With micro-batches it does not grow with the batch.
    memory = profile_memory(step, sizes) if step.micro_batch is None else None
    # Only now: memory of the eager copy is an upper bound, and has batch sizes of its own, each of
    # which would make a graph.
    if step.compiles:
        sums = step.micro_batch is not None
        compile_in_place(step.model, step.accelerator.device, sums=sums)
    left = seconds - (time.perf_counter() - began)
    times, errors = measure_step_times(step, [*sizes, *others], seconds=left)
    count = len(sizes)
    profile = fit_profile(step.resolution, sizes, times[:count], errors[:count], memory)
    return replace(profile, held_out_sizes=tuple(others), held_out_times_s=tuple(times[count:]))


def profile_memory(step: TrainingStep, batch_sizes: Sequence[int]) -> MemoryModel | None:
    """Fit a line to a step's peak memory; None where batch sizes make no measurable difference."""
    sizes, peaks = sorted(set(batch_sizes)), PeakMemory(step.accelerator.device)
    if peaks.cuda:
        # cuDNN keeps to the algorithm that it first took for a shape, tried or not. So these are
        # other shapes than those of training, for which it is to try all.
        sizes = [size - (size > 4) for size in sizes]
    with without_trials():
        step(sizes[0])  # the optimizer's state exists from now on
        used = [peaks.of(lambda size=size: step(size)) for size in sizes]  # ascending, for the host
    slope, intercept = np.polyfit(sizes, used, 1) if len(sizes) > 1 else (0.0, 0.0)
    if slope * (sizes[-1] - sizes[0]) < 2**20:  # a MiB in all is no difference
        return None
    return MemoryModel(
        fixed_bytes=max(float(intercept), 0.0),
        sample_bytes=float(slope),
        capacity_bytes=peaks.capacity(),
        margin=peaks.margin,
        reserve_bytes=0.0,
        source=peaks.source,
        state_bytes=float(step.state_bytes),
    )


def batch_sizes_to_measure(large_batch_size: int, points: int = 5) -> list[int]:
    """Return a geometric grid of batch sizes that ends at the large one, each half of the next.

    It stays above 1, where batch norm refuses a feature map of one pixel.
    """
    smallest = min(2, large_batch_size)
    return sorted({max(smallest, large_batch_size >> k) for k in range(points)})


def fit_profile(
    resolution: int,
    batch_sizes: Sequence[int],
    times_s: Sequence[float],
    errors: Sequence[float],
    memory: MemoryModel | None = None,
) -> StepProfile:
    """Fit the line of step times, with a floor where they show one; say how well it holds."""
    line = fit_time_model(batch_sizes, times_s, errors)
    t = np.asarray(times_s, dtype=np.float64)
    predicted = np.array([line.time(x, 1) for x in batch_sizes])
    off = np.abs(predicted / t - 1)
    spread = float(((t - t.mean()) ** 2).sum())
    r_squared = 1.0 - float(((t - predicted) ** 2).sum()) / spread if spread > 0 else 1.0
    bad = np.flatnonzero(off > TOLERANCE)
    first = int(bad[-1]) + 1 if len(bad) else 0
    holds_from = int(batch_sizes[first]) if first < len(batch_sizes) else None
    measured = tuple(batch_sizes), tuple(times_s), tuple(errors)
    fitted = line.slope, line.intercept, r_squared, float(off.max()), holds_from
    return StepProfile(resolution, *measured, *fitted, memory=memory, floor=line.floor)
