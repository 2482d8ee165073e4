"""The line of step times, with a floor where they show one, fitted to measured steps; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.plan.types import TimeModel

TOLERANCE = 0.10  # relative error of a prediction up to which the line is said to hold
_SIZES_FOR_A_FLOOR = 4  # a line and a floor are three numbers


def fit_time_model(
    batch_sizes: Sequence[int], times_s: Sequence[float], errors: Sequence[float] = ()
) -> TimeModel:
    """Fit step time against batch size by least squares on the *relative* error (weights 1/t).

    A line whose intercept comes out below zero is no model of a step; the slope alone is then
    fitted, through the origin.

    Noise is not to make a floor. There is one only where the line alone is off by more than
    `TOLERANCE` and by more than four standard errors, and a floor below at least two of four or
    more sizes brings the largest error below a third of the line's.

    Args:
        batch_sizes: Samples per step, ascending.
        times_s: Seconds of a step with each.
        errors: Standard errors of the times, relative to them.

    Raises:
        SettingError: If a time is not a finite number above 0.
    """
    x, t = np.asarray(batch_sizes, dtype=np.float64), np.asarray(times_s, dtype=np.float64)
    if not (np.isfinite(t) & (t > 0)).all():
        raise SettingError(f"step times must be finite and above 0 s, got {list(times_s)}")

    def off(model: TimeModel) -> float:
        return max(abs(model.time(size, 1) / time_s - 1) for size, time_s in zip(x, t, strict=True))

    line = _fit_line(x, t)
    if len(x) < _SIZES_FOR_A_FLOOR or off(line) <= max(TOLERANCE, 4 * max(errors, default=0.0)):
        return line
    fits = []
    for flat in range(2, len(x)):
        floor = float((1 / t[:flat]).sum() / (1 / t[:flat] ** 2).sum())
        fits.append(replace(_fit_line(x[flat:], t[flat:]), floor=floor))
    best = min(fits, key=off)
    return best if off(best) < off(line) / 3 else line


def _fit_line(x: np.ndarray, t: np.ndarray) -> TimeModel:
    """Return the line alone."""
    slope, intercept = np.polyfit(x, t, 1, w=1 / t) if len(x) > 1 else (t[0] / x[0], 0.0)
    if intercept <= 0 or slope <= 0:
        ratio = x / t
        slope, intercept = float(ratio.sum() / (ratio**2).sum()), 0.0
    return TimeModel(float(slope), float(intercept))
