"""Bounds of settings, stated in their types."""

from __future__ import annotations

import math
import typing
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from dbsl.base.errors import SettingError

# No setting is beyond it, unless its bound says so: a larger number is a slip, and the arithmetic
# behind the settings would overflow. Whole numbers up to here are exact as floats, too.
LARGEST = 1e15


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number of a list: ``Annotated[float, Within(0, 1)]``."""

    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``SettingError`` naming setting, bound and value unless the value lies within."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below:  # NaN is neither
            return
        if value in (math.inf, -math.inf) or (value != value and self == Within()):
            bound = "finite"
        elif self.high != LARGEST:
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            bound = f"in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"
        elif value > LARGEST:
            bound = f"at most {LARGEST:g}"
        else:
            bound = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        try:
            shown = f"{value:g}"
        except OverflowError:  # a whole number beyond all floats
            shown = f"one of {len(str(value))} digits"
        raise SettingError(f"{name} must be {bound}, got {shown}")


def in_range(name: str, value: float, *bounds: float, **ends: bool) -> None:
    """Check one value that has no type of its own; the bounds are those of `Within`."""
    Within(*bounds, **ends).check(name, value)


def check_bounds(config: Any) -> None:
    """Raise ``SettingError`` for the first number of a dataclass outside the bounds of its type.

    A type without bounds has those of `Within()`; a list with bounds has a number at least.
    """
    for name, bound in _bounds(type(config)):
        value = getattr(config, name)
        if bound and value == ():
            raise SettingError(f"{name} must have a value, got none")
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (int, float)):
                (bound or Within()).check(name, number)


@lru_cache
def _bounds(cls: type) -> tuple[tuple[str, Within | None], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(cls)}
    return tuple(
        (name, next((bound for bound in metadata if isinstance(bound, Within)), None))
        for name, metadata in found.items()
    )
