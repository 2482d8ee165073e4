"""Step profiles kept between runs, each with what it was measured on: none is used elsewhere."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dbsl.base.errors import SettingError, px
from dbsl.base.files import write_text
from dbsl.profile.memory import MemoryModel, PeakMemory, confirm_batch
from dbsl.profile.timing import (
    Setup,
    StepProfile,
    StepSpec,
    TrainingStep,
    batch_sizes_to_measure,
    profile_memory,
    profile_steps,
)

logger = logging.getLogger(__name__)

_FORMAT = 2
_MEMORY_UP_TO = 64  # samples: enough to see the line, and no more than fits anywhere
_CUDA_MEMORY_UP_TO = 1024


@dataclass(eq=False)
class Profiler:
    """Profiles of one model on this device: from a file, from the cache, or measured.

    Every process gets profiles of its own device. They measure together or not at all, since one
    alone would find the machine idle. Profiles of another setup are not used.
    """

    spec: StepSpec
    seconds: float  # about how long measuring may take for each resolution
    rough: bool = False  # times need not be good: of three batch sizes, and nothing is kept
    refresh: bool = False  # measure even what the cache has
    file: Path | None = None  # has the profiles instead, and must be of the same setup
    # Bytes that a run needs besides one worker's training, from those of an optimizer's state.
    reserve: Callable[[float], float] = lambda state_bytes: 0.0

    def __post_init__(self) -> None:
        self._accelerator = self.spec.accelerator
        self._others: dict[int | None, Profiler] = {None: self}
        self._announced = False
        self.path = self.file or cache_file(self.spec.setup)

    @cached_property
    def _known(self) -> dict[int, StepProfile]:
        """What the file, or the cache, has: read once it is asked for, as a file has one setup."""
        skip = self.refresh and not self.file
        return {} if skip else _read(self.path, self.spec.setup, strict=bool(self.file))

    def in_micro_batches(self, most: int | None) -> Profiler:
        """Return a profiler of steps in micro-batches of at most so many samples; None: whole."""
        if most not in self._others:
            setup = replace(self.spec.setup, micro_batch=most)
            self._others[most] = replace(self, spec=replace(self.spec, setup=setup))
        return self._others[most]

    def largest_batch(
        self,
        resolution: int,
        *,
        at_most: int,
        what: str = "large batch",
        why_most: str = "a larger one would leave a round too few steps",
    ) -> int:
        """Return the largest batch whose training step fits into memory, at most `at_most`.

        On a CUDA device one step with it confirms the prediction. A line says `what` was found, and
        `why_most`, where `at_most` bounds it.
        """
        known = self._known.get(resolution)
        memory = known and known.memory
        if not self._all(memory is not None):
            self._accelerator.print(
                f"measuring memory of {self.spec.setup.model}{px(resolution, ' at ')}"
            )
            step, largest = TrainingStep(self.spec, resolution), _MEMORY_UP_TO
            if self._accelerator.device.type == "cuda":
                # It costs seconds there. A line to tens of thousands of samples needs a long base.
                largest = confirm_batch(step, max(largest, min(_CUDA_MEMORY_UP_TO, at_most)))
            memory = profile_memory(step, batch_sizes_to_measure(largest))
            del step  # the next step needs the memory of its model and images
        if memory is None:
            raise SettingError(
                f"{re.sub('[ -]', '_', what)}_size must be given, got auto, but batch sizes "
                "made no measurable difference to memory here"
            )
        memory = self._for_now(memory)
        batch = min(memory.largest_batch(), at_most)
        if self._accelerator.device.type == "cuda":
            batch = confirm_batch(TrainingStep(self.spec, resolution), batch)
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
        # A line that was fitted to much larger batches says little of small ones.
        ends = (known.batch_sizes[0], known.batch_sizes[-1]) if known and not held_out else (0, 0)
        covers = ends[0] <= large_batch_size <= ends[1]
        usable = covers and (not known.misses or self.rough or self.file is not None)
        if self.file and not usable:
            there = [f"{px(r, after=' ')}up to {p.batch_sizes[-1]}" for r, p in self._known.items()]
            raise SettingError(
                f"profile must have {px(resolution, after=' with ')}batches up to "
                f"{large_batch_size}, got {', '.join(there) or 'nothing'} in {self.file}"
            )
        if self._all(usable):
            if not self._announced:
                again = "" if self.file else " (--profile again measures them)"
                self._accelerator.print(f"step times from {self.path}{again}")
                self._announced = True
            return replace(known, memory=self._for_now(known.memory))
        self._accelerator.print(
            f"measuring steps of {self.spec.setup.model}{px(resolution, ' at ')}, "
            f"{self.seconds:g} s at most"
        )
        sizes = batch_sizes_to_measure(large_batch_size)
        if self.rough:
            sizes = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
        step = TrainingStep(self.spec, resolution)
        profile = profile_steps(step, sizes, seconds=self.seconds, held_out=held_out)
        if covers and known.largest_error < profile.largest_error:
            profile = known
        self._known[resolution] = profile
        if not self.rough:
            try:
                write_profiles(self.path, self.spec.setup, self._known)
            except OSError as error:
                logger.warning("step times were not saved for the next run (%s)", error)
        return replace(profile, memory=self._for_now(profile.memory))

    def _for_now(self, memory: MemoryModel | None) -> MemoryModel | None:
        """Return a memory model, kept or new, for what this run holds and what is free now."""
        return memory and replace(
            memory,
            capacity_bytes=PeakMemory(self._accelerator.device).capacity(),
            reserve_bytes=self.reserve(memory.state_bytes),
        )

    def _all(self, here: bool) -> bool:
        failing = torch.tensor([int(not here)], device=self._accelerator.device)
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
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}
    return StepProfile(**values | {"memory": row["memory"] and MemoryModel(**row["memory"])})


def write_profiles(path: Path, setup: Setup, profiles: Mapping[int, StepProfile]) -> None:
    """Write profiles and what they are of, as JSON."""
    content = {
        "format": _FORMAT,
        "setup": asdict(setup),
        "profiles": {str(r): asdict(profiles[r]) for r in sorted(profiles)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.resolve(), json.dumps(content, indent=2) + "\n")
