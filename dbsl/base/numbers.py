"""Numbers that were read from a file, checked."""

from __future__ import annotations

import math
from typing import Any

from dbsl.base.errors import SettingError


def as_counts(values: Any, length: int, highest: int = 2**53) -> list[int]:
    """Return a list of so many whole numbers in [0, highest].

    Raises:
        SettingError: If it is none.
    """
    good = isinstance(values, list) and len(values) == length
    if not good or not all(type(v) is int and 0 <= v <= highest for v in values):
        raise SettingError(
            f"state must have {length} whole numbers up to {highest}, got {values!r}"
        )
    return list(values)


def as_numbers(values: Any, length: int) -> list[float]:
    """Return a list of so many finite numbers, at least 0.

    Raises:
        SettingError: If it is none.
    """
    good = isinstance(values, list) and len(values) == length
    kinds = (int, float)
    if not good or not all(type(v) in kinds and math.isfinite(v) and v >= 0 for v in values):
        raise SettingError(f"state must have {length} finite numbers, got {values!r}")
    return [float(value) for value in values]
