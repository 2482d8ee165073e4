"""What a step's time depends on: the device, the model, and how it is trained.

Profiles kept between runs, each with what it was measured on, so that none is used elsewhere.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import, local_processes
from dbsl.base.words import px
from dbsl.config.settings import ClipMode
from dbsl.loss import LossOf
from dbsl.optimizer import BuildOptimizer
from dbsl.profile.memory import MemoryModel, PeakMemory, confirm_batch
from dbsl.profile.timing import (
    Example,
    StepProfile,
    TrainingStep,
    batch_sizes_to_measure,
    profile_memory,
    profile_steps,
)

timm = lazy_import("timm")


@dataclass(frozen=True)
class Setup:
    """Everything that a step's time depends on, but its resolution and its batch size.

    Of a loss function it has the text, not that of what it calls.
    """

    device: str  # name of the device
    model: str
    parameters: int
    trained: int  # parameters that are not frozen
    num_classes: int
    precision: str
    optimizer: str
    momentum: bool  # whether the optimizer has momentum
    weight_decay: bool  # whether the optimizer decays weights
    compile: bool
    cpu_threads: int
    local_processes: int  # processes that run on the machine at the same time
    torch: str
    timm: str
    clip: ClipMode | None = None  # how gradients are clipped
    micro_batch: int | None = None  # samples that are computed at once
    loss: str | None = None  # digest of the loss function's text; None: cross-entropy

    @staticmethod
    def of(
        name: str,
        model: nn.Module,
        num_classes: int,
        accelerator: Accelerator,
        *,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        compiled: bool = False,
        clip: ClipMode | None = None,
        micro_batch: int | None = None,
        loss: str | None = None,
    ) -> Setup:
        """Return the setup of this process."""
        return Setup(
            device=device_name(accelerator.device),
            model=name,
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            num_classes=num_classes,
            precision=str(accelerator.mixed_precision),
            optimizer=optimizer,
            momentum=momentum > 0,
            weight_decay=weight_decay > 0,
            compile=compiled,
            cpu_threads=torch.get_num_threads(),
            local_processes=local_processes(),
            torch=torch.__version__,
            timm=timm.__version__,
            clip=clip,
            micro_batch=micro_batch,
            loss=loss,
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


logger = logging.getLogger(__name__)

_FORMAT = 2
_MEMORY_UP_TO = 64  # samples: enough to see the line, and no more than fits anywhere
_CUDA_MEMORY_UP_TO = 1024


class Profiler:
    """Profiles of one model on this device: from a file, from the cache, or measured.

    Every process gets profiles of its own device. They measure together or not at all, since one
    alone would find the machine idle.

    Args:
        setup: The profiles must be measured in this setup.
        model: The model, on its device.
        accelerator: Device, precision, processes.
        seconds: About how long measuring may take for each resolution.
        rough: Whether times need not be good: three batch sizes are measured, and nothing is kept.
        refresh: Measure even what the cache has.
        file: Take the profiles from this file instead.
        loss_of: Mean loss of the model on images and labels; unset: cross-entropy.
        optimizer_settings: What the optimizer takes beside its name, momentum and weight decay.
            The setup's name of the model tells setups apart that differ in them.
        build_optimizer: Builds the optimizer; unset: timm's of the setup's name.
        example: Batch of a size at a resolution, on the device; unset: random images.
        reserve: Bytes that a run needs beside one worker's training, from those of an optimizer's
            state.

    Raises:
        SettingError: If the file is of another device or setup, or is no profile.
    """

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        accelerator: Accelerator,
        *,
        seconds: float,
        rough: bool = False,
        refresh: bool = False,
        file: Path | None = None,
        loss_of: LossOf | None = None,
        optimizer_settings: Mapping[str, Any] | None = None,
        build_optimizer: BuildOptimizer | None = None,
        example: Example | None = None,
        reserve: Callable[[float], float] = lambda state_bytes: 0.0,
    ) -> None:
        self.setup = setup
        self.file = file
        self.path = file or cache_file(setup)
        self._model = model
        self._accelerator = accelerator
        self._seconds = seconds
        self._rough = rough
        self._loss_of = loss_of
        self._optimizer_settings = optimizer_settings
        self._build_optimizer = build_optimizer
        self._example = example
        self._reserve = reserve
        self._refresh = refresh
        self._others: dict[int | None, Profiler] = {None: self}
        self._known = {} if refresh and not file else _read(self.path, setup, strict=bool(file))
        self._announced = False

    @property
    def again(self) -> str:
        """What to do, in words, about step times that are no good."""
        if self.file:
            return f"measure {self.file} again on a quiet machine (python -m dbsl.profile)"
        how = "--profile-refresh --profile-seconds 30" if self._rough else "the next run"
        return f"{how} measures again (on a quiet machine)"

    def in_micro_batches(self, most: int | None) -> Profiler:
        """Return a profiler of steps in micro-batches of at most so many samples; None: whole."""
        if most not in self._others:
            other = copy.copy(self)
            other.setup = replace(self.setup, micro_batch=most)
            other.path = self.file or cache_file(other.setup)
            fresh = self._refresh and not self.file
            other._known = {} if fresh else _read(other.path, other.setup, strict=bool(self.file))
            self._others[most] = other
        return self._others[most]

    def largest_batch(
        self,
        resolution: int,
        *,
        limit_bytes: float | None = None,
        at_most: int,
        what: str = "large batch",
        why_most: str = "a larger one would leave a round too few steps",
    ) -> int:
        """Return the largest batch whose training step fits into memory, at most `at_most`.

        On a CUDA device one step with it confirms the prediction.

        Args:
            resolution: Image side, pixels.
            limit_bytes: Bytes that a step may use; None: what is free.
            at_most: Samples.
            what: What is looked for, in the line that says what was found.
            why_most: Why it is not above `at_most`, in that line.
        """
        known = self._known.get(resolution)
        if self._all(known is not None and known.memory is not None):
            memory = known.memory
        else:
            self._accelerator.print(
                f"measuring memory of {self.setup.model}{px(resolution, ' at ')}"
            )
            step, largest = self._step(resolution), _MEMORY_UP_TO
            if self._accelerator.device.type == "cuda":
                # It costs seconds there. A line to tens of thousands of samples needs a long base.
                largest = confirm_batch(step, max(largest, min(_CUDA_MEMORY_UP_TO, at_most)))
            memory = profile_memory(step, batch_sizes_to_measure(largest))
        if memory is None:
            raise SettingError(
                f"{re.sub('[ -]', '_', what)}_size must be given, got auto, but batch sizes "
                "made no measurable difference to memory here"
            )
        memory = self._adapted(memory)
        batch = min(memory.largest_batch(limit_bytes), at_most)
        if self._accelerator.device.type == "cuda":
            batch = confirm_batch(self._step(resolution), batch)
        self._accelerator.print(
            f"{what}{px(resolution, ' at ')}: {batch} ({memory.describe()}"
            f"{f'; {why_most}' if batch == at_most else ''})"
        )
        return batch

    def profile(
        self, resolution: int, large_batch_size: int, held_out: Sequence[int] = ()
    ) -> StepProfile:
        """Return the profile of a resolution, measured with batches up to `large_batch_size`.

        Kept times that no line fits, of a busy machine perhaps, are measured again; the better ones
        stay.
        """
        known = self._known.get(resolution)
        covers = known is not None and _covers(known, large_batch_size) and not held_out
        usable = covers and (not known.misses or self._rough or self.file is not None)
        if self.file and not usable:
            raise SettingError(
                f"profile must have {px(resolution, after=' with ')}batches up to "
                f"{large_batch_size}, got {_contents(self._known)} in {self.file}"
            )
        if self._all(usable):
            if not self._announced:
                again = "" if self.file else " (--profile-refresh measures them again)"
                self._accelerator.print(f"step times from {self.path}{again}")
                self._announced = True
            return replace(known, memory=known.memory and self._adapted(known.memory))
        self._accelerator.print(
            f"measuring steps of {self.setup.model}{px(resolution, ' at ')}, "
            f"{self._seconds:g} s at most"
        )
        sizes = batch_sizes_to_measure(large_batch_size)
        if self._rough:
            sizes = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
        profile = profile_steps(
            self._step(resolution),
            sizes,
            seconds=self._seconds,
            held_out=held_out,
        )
        if covers and known.largest_error < profile.largest_error:
            profile = known
        self._known[resolution] = profile
        if not self._rough:
            try:
                write_profiles(self.path, self.setup, self._known)
            except OSError as error:
                logger.warning("step times are not kept for the next run (%s)", error)
        return replace(profile, memory=profile.memory and self._adapted(profile.memory))

    def _step(self, resolution: int) -> TrainingStep:
        return TrainingStep(
            self._model,
            resolution,
            self.setup.num_classes,
            self._accelerator,
            loss_of=self._loss_of,
            optimizer=self.setup.optimizer,
            momentum=self.setup.momentum,
            weight_decay=self.setup.weight_decay,
            optimizer_settings=self._optimizer_settings,
            build=self._build_optimizer,
            compiled=self.setup.compile,
            clip=self.setup.clip,
            micro_batch=self.setup.micro_batch,
            example=self._example,
        )

    def _adapted(self, memory: MemoryModel) -> MemoryModel:
        """Return a memory model, kept or new, for what this run holds and what is free now."""
        capacity = PeakMemory(self._accelerator.device).capacity()
        return memory.adapted(capacity, self._reserve(memory.state_bytes))

    def _all(self, here: bool) -> bool:
        """Whether a condition holds in every process."""
        failing = torch.tensor([0 if here else 1], device=self._accelerator.device)
        return self._accelerator.reduce(failing).item() == 0


def cache_file(setup: Setup) -> Path:
    """Return where this process's profiles are kept, under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # What is off is left out, so that what was measured before there was such a setting stays.
    said = {name: value for name, value in asdict(setup).items() if value is not None}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    # Devices of one name differ in what else runs on them: each process of a machine has its own.
    place = f"-{os.environ.get('LOCAL_RANK', 0)}" if setup.local_processes > 1 else ""
    return root / "dbsl" / "profiles" / f"{setup.model}-{digest[:24]}{place}.json"


def _covers(profile: StepProfile, large_batch_size: int) -> bool:
    # A line that was fitted to much larger batches says little of small ones.
    return profile.batch_sizes[-1] >= large_batch_size >= profile.batch_sizes[0]


def _contents(profiles: Mapping[int, StepProfile]) -> str:
    return (
        ", ".join(f"{px(r, after=' ')}up to {p.batch_sizes[-1]}" for r, p in profiles.items())
        or "nothing"
    )


def _read(path: Path, setup: Setup, *, strict: bool) -> dict[int, StepProfile]:
    """Return a file's profiles; without `strict` none where it is missing or of another setup."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise SettingError(f"format {content['format']}")
        found = content["setup"]
        profiles = {int(r): _profile(row) for r, row in content["profiles"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if not strict:
            return {}
        raise SettingError(
            "profile must be a file that python -m dbsl.profile --output wrote, "
            f"got {path} ({error})"
        ) from None
    for field in fields(Setup):
        ours, theirs = getattr(setup, field.name), found.get(field.name)
        if ours != theirs and field.name != "loss":  # a file's is for its user to say
            if strict:
                raise SettingError(
                    f"profile must be of this run's {field.name} {ours!r}, got {theirs!r} in {path}"
                )
            return {}
    return profiles


def _profile(row: Mapping[str, Any]) -> StepProfile:
    memory = row["memory"]
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    values["memory"] = MemoryModel(**memory) if memory else None
    profile = StepProfile(**values)
    profile.time_model  # noqa: B018  # a slope out of bounds is refused here
    return profile


def write_profiles(path: Path, setup: Setup, profiles: Mapping[int, StepProfile]) -> None:
    """Write profiles and what they are of, as JSON."""
    content = {
        "format": _FORMAT,
        "setup": asdict(setup),
        "profiles": {str(r): asdict(profiles[r]) for r in sorted(profiles)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=2) + "\n")
