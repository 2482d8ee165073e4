"""Bounds of settings, stated in their types."""

from __future__ import annotations

import typing
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any


def in_range(
    name: str,
    value: float,
    low: float = float("-inf"),
    high: float = float("inf"),
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise ``ValueError`` naming setting, bound and value unless the value lies in the range."""
    above = value > low if open_low else value >= low
    below = value < high if open_high else value <= high
    if above and below:  # NaN is neither
        return
    if high == float("inf"):
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
    else:
        bound = f"in {'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    raise ValueError(f"{name} must be {bound}, got {value:g}")


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number of a list: ``Annotated[float, Within(0, 1)]``."""

    low: float = float("-inf")
    high: float = float("inf")
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``ValueError`` naming setting, bound and value unless the value lies within."""
        in_range(
            name,
            value,
            self.low,
            self.high,
            open_low=self.open_low,
            open_high=self.open_high,
        )


def check_bounds(config: Any) -> None:
    """Raise ``ValueError`` for the first field of a dataclass outside the bounds of its type."""
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
