"""What a run was given, and what it found out; what was found holds until its sources change.

A run's ``config.yaml`` has settings as they were given at the top level, and a mapping ``resolved``
of those that the run found out. Read back unchanged, the file repeats the run; a setting that
changes drops what was found from it, which is then found again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from dbsl.base.errors import SettingError
from dbsl.config.fields import JOINT, PROCESSES, UNLIKE, Role, sources, with_role
from dbsl.config.settings import RunConfig, takes_joint_steps

T = TypeVar("T")
_SAID = ("profile",)  # has had its say once step times are found
RESOLVED = "resolved"  # the mapping in config.yaml, and the field of Config that has it


def says_unlike(config: RunConfig) -> bool:
    """Whether settings speak of several workers, unlike ones."""
    several = config.small_workers is not None or bool(config.local_batch_sizes)
    return several or config.small_ratio > 0


def follow(cls: type, found: Collection[str], changed: Collection[str]) -> dict[str, str]:
    """Return which found settings change with their sources, and so on: name and source."""
    follows: dict[str, str] = {}
    while True:
        moved = {*changed, *follows}
        left = {name: sources(cls).get(name, ()) for name in found if name not in moved}
        new = {name: own[0] for name, of in left.items() if (own := [s for s in of if s in moved])}
        if not new:
            return follows
        follows |= new


def still_true(
    resolved: Mapping[str, Any],
    before: RunConfig,
    now: RunConfig,
    processes: int,
    launched_precision: str | None = None,
) -> dict[str, Any]:
    """Return what a run found out, without what does not follow from the settings of now.

    `before` are the settings that it was given; `processes` and `launched_precision`, which stands
    in for ``auto``, are this launch's.
    """
    moved = {f.name: getattr(before, f.name) != getattr(now, f.name) for f in fields(now)}
    moved[PROCESSES] = resolved.get(PROCESSES) != processes
    moved[JOINT] = takes_joint_steps(before) != takes_joint_steps(now)
    moved[UNLIKE] = says_unlike(before) != says_unlike(now)
    own = now.mixed_precision != "auto"
    if not own and launched_precision not in (None, resolved.get("mixed_precision")):
        moved["mixed_precision"] = True
    changed = {name for name, has_moved in moved.items() if has_moved}
    changed |= follow(type(now), resolved, changed).keys()
    return {name: value for name, value in resolved.items() if name not in changed}


def with_resolved(given: RunConfig) -> RunConfig:
    """Return the settings with what an earlier run found out, where it holds, filled in."""
    names = given.resolved.keys() - {PROCESSES}
    values = {name: given.resolved[name] for name in names}
    said = {name: getattr(type(given), name) for name in _SAID if "slope" in names}
    return replace(given, **values, **said)


def set_back(config: RunConfig, given: RunConfig, names: Collection[str]) -> RunConfig:
    """Return the settings with these, which were found out, as they were given."""
    names = {*names, *(_SAID if "slope" in names else ())} - {PROCESSES}
    return replace(config, **{name: getattr(given, name) for name in names})


def found_by(given: RunConfig, complete: RunConfig, processes: int) -> dict[str, Any]:
    """Return what a run found out: where its complete settings are not those it was given."""
    names = [name for name in sources(type(given)) if not is_as_given(name, given, complete)]
    return {PROCESSES: processes, **{name: getattr(complete, name) for name in names}}


def is_as_given(name: str, given: RunConfig, complete: RunConfig) -> bool:
    """Whether a setting is what was given, perhaps written at greater length."""
    own, value = getattr(given, name), getattr(complete, name)
    per_worker = name in with_role(type(given), Role.PER_WORKER) and name != "local_batch_sizes"
    if not per_worker or own in (None, "auto") or not own or not value:
        return own == value
    length = math.lcm(len(own), len(value))  # values of resolutions as those of their workers
    whole, given_whole = ([x for x in xs for _ in range(length // len(xs))] for xs in (value, own))
    return whole == given_whole


def for_workers(
    config: RunConfig, name: str, values: Sequence[T] | None, processes: int | None = None
) -> list[list[T | None]]:
    """Return a value for each resolution and worker: [resolution][worker].

    From none, one for all, one for each resolution, or one for each resolution and worker (all
    workers of the first resolution, then of the second). With `processes`: for each of these.
    """
    rows, workers = len(config.resolutions), processes or config.workers
    values, who = [None] if values is None else list(values), "process" if processes else "worker"
    if len(values) not in (1, rows, rows * workers):
        each = f"one per resolution ({rows}) or one per resolution and {who} ({rows * workers})"
        raise SettingError(f"{name} must have 1 value, {each}, got {len(values)} values")
    if len(values) == rows * workers:
        return [values[r * workers : (r + 1) * workers] for r in range(rows)]
    return [[value] * workers for value in (values * rows if len(values) == 1 else values)]


def from_workers(values: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return the shortest setting from which `for_workers` gives [resolution][worker] back."""
    alike = all(len(set(row)) == 1 for row in values)
    return tuple(value for row in values for value in (row[:1] if alike else row))
