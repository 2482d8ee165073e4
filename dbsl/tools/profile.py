"""Measure step time and memory from the shell: ``python -m dbsl.profile``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import lt
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.files import check_output
from dbsl.base.machine import threads_of_process
from dbsl.cluster.weights import compiles
from dbsl.config.fields import Count, Excludes, Positive, Within, check_fields
from dbsl.config.parse import parse_flags
from dbsl.config.settings import Compile, Precision
from dbsl.data.sources import image_batch
from dbsl.model import build_model, check_model
from dbsl.optimizer import check_optimizer, create_optimizer
from dbsl.profile.cache import Profiler, write_profiles
from dbsl.profile.timing import NO_OPTIMIZER, Example, StepSpec, setup_of
from dbsl.run.accelerator import start_accelerator

_Two = Annotated[int, Within(2)]


@dataclass(frozen=True)
class Arguments:
    """Measure step time and memory on this machine; lists take commas or spaces."""

    model: str = "resnet18"  # timm name of the model
    num_classes: Count = 100  # outputs of the classifier
    # image sides in pixels, ascending
    resolutions: Annotated[tuple[int, ...], Within(1, 8192, order=lt)] = (24, 32)
    large_batch_size: _Two = 128  # largest batch to measure
    # name in timm.optim, as in train.py; none: no optimizer, for workers that push gradients
    optimizer: str = "sgd"
    # momentum of the optimizer; only whether it is 0 changes the step
    momentum: float = 0.9
    # weight decay of the optimizer; only whether it is 0 changes the step
    weight_decay: float = 5e-4
    clip_grad: bool = False  # clip gradients in the measured steps, as with train.py --clip-grad
    # most samples on the device at once; unset: the whole batch
    micro_batch_size: Annotated[_Two | None, Excludes(compile="cudagraphs")] = None
    # precision of forward passes; auto: bf16 where the device computes it natively, else no
    mixed_precision: Precision = "auto"
    compile: Compile = "auto"  # measure with torch.compile, as train.py --compile has it
    cpu_threads: Count | None = None  # threads of torch; unset: all cores, or OMP_NUM_THREADS
    profile_seconds: Positive = 30.0  # seconds to measure for, all resolutions together
    output: Path | None = None  # file to write the profile to, for train.py --profile

    def __post_init__(self) -> None:
        check_fields(self)
        if self.output is not None:
            check_output("output", self.output)
        if self.optimizer != NO_OPTIMIZER:
            check_optimizer(self.optimizer)


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m dbsl.profile``."""
    given = parse_flags(Arguments, argv, prog="python -m dbsl.profile")
    name, sides, classes = given.model, given.resolutions, given.num_classes
    torch.set_num_threads(given.cpu_threads or threads_of_process())
    accelerator = start_accelerator(given.mixed_precision, 1800.0)  # seconds to wait
    model = build_model(name, classes, sides)
    model.to(accelerator.device, memory_format=torch.channels_last)
    example = partial(image_batch, classes=classes, device=accelerator.device)
    check_model(model, SimpleNamespace(num_classes=classes, example=example), name, sides)
    spec = spec_of(given, model, accelerator, example)
    print(f"{name} on {spec.setup['device']}, precision {spec.setup['precision']}")
    seconds = given.profile_seconds / len(sides)
    profiler = Profiler(spec, seconds=seconds, refresh=True)
    largest, at_once = given.large_batch_size, given.micro_batch_size
    profiles = [profiler.profile(side, largest, at_once) for side in sides]
    if given.output:
        write_profiles(given.output, spec.setup, profiles)


def spec_of(
    given: Arguments, model: nn.Module, accelerator: Accelerator, example: Example
) -> StepSpec:
    """Return the step that train.py takes with these settings and cross-entropy."""

    def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with accelerator.autocast():
            return F.cross_entropy(model(images), labels)

    rates = {"momentum": given.momentum, "weight_decay": given.weight_decay}
    build = partial(create_optimizer, given.optimizer, lr=0.1, **rates)
    setup = setup_of(
        *(given.model, model, given.num_classes, accelerator),
        optimizer=given.optimizer,
        **{name: rate > 0 for name, rate in rates.items()},
        clip=given.clip_grad,
        compile=compiles(given, accelerator.device),
        loss=None,
    )
    built = None if given.optimizer == NO_OPTIMIZER else build
    return StepSpec(setup, model, accelerator, loss_of, example, built)
