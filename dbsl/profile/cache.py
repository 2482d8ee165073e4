"""Step profiles kept between runs, each with its setup: none is used for another setup."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dbsl.base.errors import SettingError, px, require
from dbsl.base.files import write_text
from dbsl.profile.fit import shortest_step
from dbsl.profile.memory import MemoryModel, confirm_batch, room_bytes
from dbsl.profile.timing import (
    StepProfile,
    StepSpec,
    TrainingStep,
    batch_sizes_to_measure,
    profile_memory,
    profile_steps,
)

logger = logging.getLogger(__name__)

_FORMAT = 3
# Bounds of the largest batch that measures memory. It costs seconds, but a line to tens of
# thousands of samples needs a wide range.
_MEMORY_UP_TO = (64, 1024)
_MUCH_LESS = 0.75  # share of a kept time; below it, the machine was busy when it was measured
_BAD_FIT = "; a bad fit or noise, here or elsewhere: predictions may be far off (--profile again)"


@dataclass(eq=False)
class Profiler:
    """Profiles of one model on this device: from a file, from the cache, or measured.

    Each process profiles its own device. Either all measure or none does: one measuring by itself
    would find the machine idle.
    """

    spec: StepSpec
    seconds: float  # approximate limit on measuring one resolution
    rough: bool = False  # rough times suffice: measure three batch sizes, save nothing
    refresh: bool = False  # measure even what the cache has
    file: Path | None = None  # read profiles from it instead; its setup must match
    # Bytes that a run needs besides one worker's training, given those of an optimizer's state.
    reserve: Callable[[float], float] = lambda state_bytes: 0.0

    def __post_init__(self) -> None:
        self._accelerator = self.spec.accelerator
        self.path = self.file or cache_file(self.spec.setup)
        # By resolution and micro-batch size; None: the whole batch at once.
        self._known: dict[tuple[int, int | None], StepProfile] = {}
        try:
            kept = [] if self.refresh else read_profiles(self.path, self.spec.setup)
            self._known |= {(own.resolution, own.micro_batch): own for own in kept}
        except SettingError:
            if self.file:
                raise

    def largest_batch(self, resolution: int, at_most: int) -> int:
        """Return the largest batch with a step that fits into CUDA memory, at most `at_most`.

        One step with it confirms the prediction of the memory model.
        """
        known = self._known.get((resolution, None))
        memory = known and known.memory
        if not self.all(memory):
            model = self.spec.setup["model"]
            self._accelerator.print(f"measuring memory of {model}{px(resolution, ' at ')}")
            step, (low, high) = TrainingStep(self.spec, resolution), _MEMORY_UP_TO
            largest = confirm_batch(step, max(low, min(high, at_most)), left=0.5)
            memory = profile_memory(step, batch_sizes_to_measure(largest))
            del step  # the next step needs the memory of its model and images
        memory = self._for_now(memory)
        batch = min(max(1, memory.fits()), at_most) if memory else at_most
        batch = confirm_batch(TrainingStep(self.spec, resolution), batch)
        why = f" ({memory.describe()})" if memory else ""
        told = f"largest batch{px(resolution, ' at ')}, of at most {at_most}: {batch}{why}"
        self._accelerator.print(told)
        return batch

    def profile(self, resolution: int, largest: int, micro_batch: int | None = None) -> StepProfile:
        """Return the profile of steps with up to `largest` samples, and print it.

        Kept times are measured again if the machine seems to have been busy: no line fits them, or
        steps are now much shorter. Longer steps are no reason: the machine may be busy now.
        """
        profile = self._known.get((resolution, micro_batch))
        # A line fitted to much larger batches says little about small ones.
        usable = profile and profile.batch_sizes[0] <= largest <= profile.batch_sizes[-1]
        if self.file and not usable:
            known = self._known.items()
            there = ", ".join(_steps(*of, own.batch_sizes[-1]) for of, own in known) or "nothing"
            must = f"profile must have {_steps(resolution, micro_batch, largest)}"
            raise SettingError(f"{must}, got {there} in {self.file}")
        if self.all(usable and (self.file or self.rough or self._holds(profile))):
            told = f"step times{px(resolution, ' at ')} from {self.path} (--profile again measures)"
            self._accelerator.print(told)
        else:
            profile = self._measured(resolution, largest, micro_batch)
        profile = replace(profile, memory=self._for_now(profile.memory))
        note = "" if self.all(not profile.misses) else _BAD_FIT
        self._accelerator.print(profile.describe(note))
        return profile

    def _holds(self, kept: StepProfile) -> bool:
        """Return whether a few of the smallest and the largest steps are not far below the line."""
        if kept.misses or self.spec.setup["compile"]:  # compiling takes longer than measuring
            return not kept.misses
        step = TrainingStep(self.spec, kept.resolution, kept.micro_batch)
        ends = kept.batch_sizes[-1], kept.batch_sizes[0]  # the larger first: its images serve both
        return all(shortest_step(step, n) > _MUCH_LESS * kept.time_model.time(n) for n in ends)

    def _measured(self, resolution: int, largest: int, micro_batch: int | None) -> StepProfile:
        """Measure and save new times, and return them.

        If no line fits them, measure once more, for twice as long, and use the better ones.
        """
        sizes, setup = batch_sizes_to_measure(largest), self.spec.setup
        if self.rough:
            sizes = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
        found: list[StepProfile] = []
        for seconds in (self.seconds, 2 * self.seconds):
            what = f"measuring steps of {setup['model']}{px(resolution, ' at ')}"
            self._accelerator.print(f"{what}, {seconds:g} s at most")
            step = TrainingStep(self.spec, resolution, micro_batch)
            found.append(profile_steps(step, sizes, seconds=seconds))
            if self.rough or self.all(not found[-1].misses):
                break
        best = min(found, key=lambda each: max(each.largest_error, *each.errors))
        self._known[resolution, micro_batch] = best
        if not self.rough:
            try:
                write_profiles(self.path, setup, self._known.values())
            except OSError as error:
                logger.warning("step times were not saved for the next run (%s)", error)
        return best

    def _for_now(self, memory: MemoryModel | None) -> MemoryModel | None:
        """Return a memory model, kept or new, with the room that this run has for it now."""
        if memory is None:
            return None
        room = room_bytes(self._accelerator.device) - self.reserve(memory.state_bytes)
        return replace(memory, room_bytes=room)

    def all(self, here: Any) -> bool:
        """Return whether this is true in all processes (a collective)."""
        failing = torch.tensor([int(not here)], device=self._accelerator.device)
        return self._accelerator.reduce(failing).item() == 0


def _steps(resolution: int, micro_batch: int | None, largest: int) -> str:
    parts = f" in micro-batches of {micro_batch}" if micro_batch else ""
    return f"{px(resolution, after=' with ')}batches up to {largest}{parts}"


def cache_file(setup: Mapping[str, Any]) -> Path:
    """Return the file of this process's profiles, under ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(setup, sort_keys=True).encode()).hexdigest()
    # Devices with one name may run other jobs too: each process of a machine has its own file.
    place = f"-{os.environ.get('LOCAL_RANK', 0)}" if setup["local_processes"] > 1 else ""
    return root / "dbsl" / "profiles" / f"{setup['model']}-{digest[:24]}{place}.json"


def read_profiles(path: Path, setup: Mapping[str, Any]) -> list[StepProfile]:
    """Return a file's profiles; refuse another kind of file, or another setup."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
        theirs = {name: content["setup"][name] for name in setup}
        rows = [
            row | {"memory": row["memory"] and MemoryModel(**row["memory"])}
            for row in content["profiles"]
        ]
        profiles = [StepProfile(**row) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            "profile must be a file that python -m dbsl.profile --output wrote, "
            f"got {path} ({error})"
        ) from None
    for name, ours in setup.items():
        if name != "loss":  # the file's user answers for its loss
            must, got = f"profile must be of this run's {name} {ours!r}", theirs[name]
            require(ours == got, must, f"{got!r} in {path}")
    return profiles


def write_profiles(path: Path, setup: Mapping[str, Any], profiles: Iterable[StepProfile]) -> None:
    """Write profiles and their setup as JSON."""
    rows = [asdict(profile) for profile in profiles]
    content = {"format": _FORMAT, "setup": setup, "profiles": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path.resolve(), json.dumps(content, indent=2) + "\n")
