"""The settings that a run was given, and those that it found.

A run's ``config.yaml`` has the given settings at the top level, and a mapping ``found`` of those
that the run found. Read back unchanged, the file repeats the run. The found settings hold until
another setting or the number of processes changes; then all are found anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from dbsl.base.errors import SettingError, require
from dbsl.config.fields import Role, with_role
from dbsl.config.settings import RunConfig

T = TypeVar("T")
PROCESSES = "processes"  # beside the found settings: the number of processes
FOUND = "found"  # the mapping in config.yaml, and Config's field for it


def says_unlike(config: RunConfig) -> bool:
    """Whether settings ask for several workers that differ."""
    several = config.small_workers is not None or bool(config.local_batch_sizes)
    return several or config.small_ratio > 0


def still_true(
    found: Mapping[str, Any],
    before: RunConfig,
    now: RunConfig,
    processes: int,
    launched_precision: str | None = None,
) -> dict[str, Any]:
    """Return the found settings that still hold: all, unless a setting has changed.

    Only settings that are not free, or that plans are made from, matter. `before` are the settings
    that the run was given; `processes` and `launched_precision`, which replaces ``auto``, are this
    launch's. If only epochs changed, what follows from their number is dropped.
    """
    cls, auto = type(now), now.mixed_precision == "auto"
    precision = launched_precision if auto else None
    free = {*with_role(cls, Role.FREE)} - {*with_role(cls, Role.PLAN)} | {FOUND}
    names = (field.name for field in fields(now) if field.name not in free)
    changed = {name for name in names if getattr(before, name) != getattr(now, name)}
    same = found.get(PROCESSES) == processes
    if changed - {"epochs"} or not same or precision not in (None, found.get("mixed_precision")):
        return {}
    of_epochs = {"lr_milestones", "warmup_epochs"} if changed else ()
    return {name: value for name, value in found.items() if name not in of_epochs}


def with_found(given: RunConfig) -> RunConfig:
    """Return the settings, filled in with those that an earlier run found and that hold."""
    values = {name: value for name, value in given.found.items() if name != PROCESSES}
    said = {"profile": None} if "slope" in values else {}  # it was used
    return replace(given, **values, **said)


def found_by(given: RunConfig, complete: RunConfig, processes: int) -> dict[str, Any]:
    """Return the settings that a run found: its complete ones that differ from those given."""
    free = {FOUND, *with_role(type(given), Role.FREE)}
    names = (field.name for field in fields(given) if field.name not in free)
    found = (name for name in names if getattr(given, name) != getattr(complete, name))
    return {PROCESSES: processes, **{name: getattr(complete, name) for name in found}}


def for_workers(
    config: RunConfig, name: str, values: Sequence[T] | None, processes: int | None = None
) -> list[list[T | None]]:
    """Return a value for each resolution and worker: [resolution][worker].

    `values` is None, one for all, one for each resolution, or one for each resolution and worker
    (all workers of the first resolution, then of the second). With `processes`: these, not workers.
    """
    rows, workers = len(config.resolutions), processes or config.workers
    values, who = [None] if values is None else list(values), "process" if processes else "worker"
    if len(values) not in (1, rows, rows * workers):
        each = f"one per resolution ({rows}) or one per resolution and {who} ({rows * workers})"
        raise SettingError(f"{name} must have 1 value, {each}, got {len(values)} values")
    if len(values) == rows * workers:
        return [values[r * workers : (r + 1) * workers] for r in range(rows)]
    return [[value] * workers for value in (values * rows if len(values) == 1 else values)]


def check_lengths(config: RunConfig) -> None:
    """Refuse a complete config's lists that do not fit its workers or resolutions."""
    rows, workers = len(config.resolutions), config.workers
    small, by_hand = config.small_batch_size, config.local_batch_sizes
    text = f"small_batch_size must have one value, or one per resolution ({rows})"
    require(small is None or len(small) in (1, rows), text, small)
    text = f"local_batch_sizes must have one value per worker ({workers})"
    require(by_hand is None or len(by_hand) in (workers, workers * rows), text, by_hand)
    for name in ("large_batch_size", "micro_batch_size"):
        if isinstance(sizes := getattr(config, name), tuple):
            for_workers(config, name, sizes)


def from_workers(values: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return the shortest setting from which `for_workers` gives [resolution][worker] back."""
    alike = all(len(set(row)) == 1 for row in values)
    return tuple(value for row in values for value in (row[:1] if alike else row))
