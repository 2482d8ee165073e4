"""Settings that are one value for all, one for each resolution, or one for each worker, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from dbsl.base.errors import SettingError

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
