"""Numbers as people read them, in the lines and pictures of a run."""

from __future__ import annotations

import math
from typing import Any


def duration(seconds: float) -> str:
    """Return a time in the unit in which it is easy to read."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    if seconds < 1000:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def short_loss(loss: float) -> str:
    """Return a loss in about six characters, whatever its size."""
    if loss < 100 or not math.isfinite(loss):
        return f"{loss:.3f}"
    return f"{loss:.5g}" if loss < 1e5 else f"{loss:.1e}".replace("e+", "e")


def px(resolution: int, before: str = "", after: str = "") -> str:
    """Return an image side in pixels with what stands around it; nothing where there is none, 0."""
    return f"{before}{resolution} px{after}" if resolution else ""


def as_given(value: Any) -> str:
    """Return a setting's value as a flag has it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "empty"
    return str(value)


def steadier(lr: float, optimizer: str, precision: str, *, finite_loss: bool) -> str:
    """Return what to try where loss or weights were not finite."""
    text = f"lower lr ({lr:g} with {optimizer})"
    if precision != "no":
        return f"{text} or try --mixed-precision no instead of {precision}"
    return f"{text}, or see whether all gradients of the loss are finite" if finite_loss else text


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
