"""What a run was given, and what it found out; what was found holds until its sources change.

A run's ``config.yaml`` keeps the two apart: settings as they were given at the top level, and a
mapping ``resolved`` of those that the run found out for itself. Read back unchanged, the file
repeats the run; a setting that changes drops what was found from it, which is then found anew.

Settings that are one value for all, one for each resolution, or one for each worker, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from dbsl.base.errors import SettingError
from dbsl.config.settings import RunConfig


def says_unlike(
    small_ratio: float, small_workers: int | None, local_batch_sizes: Sequence[int] | None
) -> bool:
    """Whether these settings speak of several workers, unlike ones."""
    return small_ratio > 0 or small_workers is not None or bool(local_batch_sizes)


RESOLVED = "resolved"  # the mapping in config.yaml, and the field of Config that has it
# No settings, but sources: how many processes there are, on which nodes, whether all workers share
# each step, and whether something is said of unlike workers.
PROCESSES, NODES, JOINT, UNLIKE = "processes", "nodes", "joint steps", "unlike workers"

_DATA = ("dataset", "image_column", "label_column", "train_samples", "holdout")
_STEP = (
    *("model", "optimizer", "mixed_precision", "compile", "sync_batch_norm"),
    *("clip_grad", "clip_mode", "layer_decay", "opt_kwargs"),
    *("drop_path", "model_kwargs", "grad_checkpointing"),
)
_ROUND = ("workers", "rounds_per_epoch", JOINT, "resolutions", *_DATA)
_BATCHES = ("global_batch_size", "local_batch_sizes")

# Every setting that a run may find out, and what it is found from. Sources come first: what is
# dropped takes along what was found from it. A setting is a source of its own.
SOURCES: dict[str, tuple[str, ...]] = {
    "cpu_threads": (PROCESSES, NODES),  # unset where nodes differ: each process by its cores
    "mixed_precision": (),  # the machine's, or accelerate launch's
    "lr": ("optimizer",),
    "workers": (PROCESSES, "dedicated_server", UNLIKE),
    "small_workers": ("small_ratio", "workers"),
    "resolutions": ("dataset", "image_column"),
    "lr_milestones": ("epochs",),
    "warmup_epochs": ("epochs",),
    "local_batch_sizes": ("workers", "resolutions"),
    "global_batch_size": (*_ROUND, "local_batch_sizes"),
    "large_batch_size": (*(*_ROUND, *_STEP, *_BATCHES, "memory_limit"),),
    "micro_batch_size": (
        *(*_ROUND, *_STEP, *_BATCHES, "memory_limit", "large_batch_size", "push"),
    ),
    "slope": (
        *(*_STEP, "dataset", "resolutions", "workers", "cpu_threads", "large_batch_size"),
        *(*_BATCHES, "micro_batch_size", "profile", "profile_refresh", "intercept", "floor"),
    ),
    "intercept": ("slope",),
    "floor": ("slope",),
    "small_batch_size": (
        *(*_ROUND, "model", "small_workers", "large_batch_size", "slope", "intercept", "floor"),
        *("time_ratio", "small_share", "min_batch_size", "update_factor", "rounding"),
    ),
}
_LISTS = ("large_batch_size", "micro_batch_size", "slope", "intercept", "floor", "small_batch_size")
# Settings that say how to find one; with it found they have had their say.
_DONE = {"slope": {"profile": None, "profile_refresh": False}}


def check_names(resolved: Any) -> None:
    """Raise ``SettingError`` unless it maps settings that a run finds out."""
    if not isinstance(resolved, Mapping):
        raise SettingError(f"resolved must map settings to values, got {resolved!r}")
    for name in resolved:
        if name not in SOURCES and name != PROCESSES:
            raise SettingError(
                f"resolved must name settings that a run finds out ({', '.join(SOURCES)}), "
                f"got {name}"
            )


def still_true(
    resolved: Mapping[str, Any],
    before: RunConfig,
    now: RunConfig,
    processes: int,
    launched_precision: str | None = None,
) -> dict[str, Any]:
    """Return what a run found out, without what does not follow from the settings of now.

    Args:
        resolved: What it found out.
        before: The settings that it was given.
        now: Those that are given now.
        processes: Of this launch.
        launched_precision: What this launch was asked for; it stands in for ``auto``.
    """
    changed = {
        field.name
        for field in fields(now)
        if getattr(before, field.name) != getattr(now, field.name)
    }
    if resolved.get(PROCESSES) != processes:
        changed.add(PROCESSES)
    if _joint(before) != _joint(now):
        changed.add(JOINT)
    if launched_precision not in (None, resolved.get("mixed_precision")):
        changed.add("mixed_precision")
    if _says_unlike(before) != _says_unlike(now):
        changed.add(UNLIKE)
    for name, sources in SOURCES.items():
        if name in resolved and changed.intersection(sources):
            changed.add(name)
    return {name: value for name, value in resolved.items() if name not in changed}


def with_resolved(given: RunConfig) -> RunConfig:
    """Return the settings with what an earlier run found out, where it holds, filled in."""
    values: dict[str, Any] = {}
    for name, value in given.resolved.items():
        if name != PROCESSES:
            values |= {name: value} | _DONE.get(name, {})
    return replace(given, **values)


def set_back(config: RunConfig, given: RunConfig, names: Collection[str]) -> RunConfig:
    """Return the settings with these, which were found out, as they were given."""
    names = {*names}.union(*(_DONE.get(name, ()) for name in names)) - {PROCESSES}
    return replace(config, **{name: getattr(given, name) for name in names})


def found_by(given: RunConfig, complete: RunConfig, processes: int) -> dict[str, Any]:
    """Return what a run found out: where its complete settings are not those it was given."""
    found = {
        name: getattr(complete, name) for name in SOURCES if not is_as_given(name, given, complete)
    }
    return {PROCESSES: processes, **found}


def _joint(config: RunConfig) -> bool:
    return config.sync == "step" or config.push == "gradients"


def _says_unlike(config: RunConfig) -> bool:
    return says_unlike(config.small_ratio, config.small_workers, config.local_batch_sizes)


def is_as_given(name: str, given: RunConfig, complete: RunConfig) -> bool:
    """Whether a setting is what was given, perhaps written at greater length."""
    own, value = getattr(given, name), getattr(complete, name)
    if name not in _LISTS or own in (None, "auto") or not own or not value:
        return own == value
    length = math.lcm(len(own), len(value))
    return _at_length(own, length) == _at_length(value, length)


def _at_length(values: Sequence[Any], length: int) -> list[Any]:
    """Return values of resolutions, or of all, as values of resolutions and workers."""
    return [value for value in values for _ in range(length // len(values))]


T = TypeVar("T")


def for_workers(
    name: str, values: Sequence[T] | None, resolutions: Sequence[int], workers: int
) -> list[list[T | None]]:
    """Return a value for each resolution and worker: [resolution][worker].

    From none, one for all, one for each resolution, or one for each resolution and worker (all
    workers of the first resolution, then of the second).

    Raises:
        SettingError: If the number of values is none of these.
    """
    rows = len(resolutions)
    values = [None] if values is None else list(values)
    if len(values) not in (1, rows, rows * workers):
        raise SettingError(
            f"{name} must have 1 value, one per resolution ({rows}) or one per resolution and "
            f"worker ({rows * workers}), got {len(values)} values"
        )
    if len(values) == rows * workers:
        return [values[r * workers : (r + 1) * workers] for r in range(rows)]
    return [[value] * workers for value in (values * rows if len(values) == 1 else values)]


def from_workers(values: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return the shortest setting from which `for_workers` gives [resolution][worker] back."""
    if all(len(set(row)) == 1 for row in values):
        return tuple(row[0] for row in values)
    return tuple(value for row in values for value in row)
