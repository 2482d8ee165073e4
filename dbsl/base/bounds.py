"""Bounds of settings, stated in their types."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from dbsl.base.errors import SettingError


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number of a list: ``Annotated[float, Within(0, 1)]``."""

    low: float = float("-inf")
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``SettingError`` naming setting, bound and value unless the value lies within.

        No bound lets infinity pass.
        """
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below and math.isfinite(value):  # NaN is neither above nor below
            return
        if math.isinf(value):
            raise SettingError(f"{name} must be finite, got {value:g}")
        if self.high == float("inf"):
            bound = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        else:
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            bound = f"in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"
        raise SettingError(f"{name} must be {bound}, got {value:g}")


def in_range(name: str, value: float, *bounds: float, **ends: bool) -> None:
    """Check one value that has no type of its own; the bounds are those of `Within`."""
    Within(*bounds, **ends).check(name, value)


def check_bounds(config: Any) -> None:
    """Raise ``SettingError`` for the first field of a dataclass outside the bounds of its type."""
    for name, bound in _bounds(type(config)):
        value = getattr(config, name)
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (int, float)):
                bound.check(name, number)


@lru_cache
def _bounds(cls: type) -> tuple[tuple[str, Within], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return tuple(
        (field.name, bound)
        for field in fields(cls)
        for bound in getattr(hints[field.name], "__metadata__", ())
        if isinstance(bound, Within)
    )
