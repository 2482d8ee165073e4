"""Speeds of workers, estimated from the times of their rounds; pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dbsl.plan.types import Plan, TimeModel

NOISE = 0.10  # standard deviation of a measured time, relative
_PRIOR = 0.5  # relative uncertainty of a planned time model's coefficients
_DRIFT = 0.005  # relative drift of both coefficients between two measurements
_OUTLIER = 3.0  # standard deviations: two such measurements mean that the machine has changed
_JUMP = 4.5  # standard deviations: so does one such measurement
_LOWEST = 1e-3


class SpeedEstimate:
    """How much slower a worker is than its planned time model: a Kalman filter on two factors.

    A step of x samples takes ``u*a*x + v*b`` seconds with the planned a and b of its resolution,
    so that what is learnt at one resolution holds at the next; where the floor f holds, ``v*f``.
    Measurements at one batch size move their common level alone; a second size tells u from v.
    """

    def __init__(self) -> None:
        self.factors = np.ones(2)  # u, v
        self._covariance = np.eye(2) * _PRIOR**2
        self._known = False  # before the first measurement all is plan
        self._outlier = 0.0  # the last measurement's deviation, if it was set aside

    def observe(self, planned: TimeModel, local_batch_size: float, step_time_s: float) -> None:
        """Take in the measured time of a step."""
        parts = np.array([planned.slope * local_batch_size, max(planned.intercept, 0.0)])
        if planned.floor and planned.floor * self.factors[1] > parts @ self.factors:
            parts = np.array([0.0, planned.floor])
        expected = parts.sum()
        direction, measured = parts / expected, step_time_s / expected
        scale = float(direction @ self.factors)
        noise = (NOISE * max(scale, _LOWEST)) ** 2
        self._covariance += np.eye(2) * (_DRIFT * scale) ** 2
        error = measured - scale
        variance = float(direction @ self._covariance @ direction) + noise
        deviation = error / math.sqrt(variance)
        before, self._outlier = self._outlier, 0.0
        if abs(deviation) > _OUTLIER:
            if self._known and abs(deviation) < _JUMP and before * deviation <= 0:
                self._outlier = deviation  # wait for the next to tell
                return
            # The time has changed, beyond noise: forget how sure the estimate was.
            self._covariance += np.eye(2) * error**2 / float(direction @ direction)
            variance = float(direction @ self._covariance @ direction) + noise
        self._known = True
        gain = self._covariance @ direction / variance
        self.factors = np.maximum(self.factors + gain * error, _LOWEST)
        self._covariance -= np.outer(gain, direction @ self._covariance)

    def state_dict(self) -> dict[str, Any]:
        """Return the estimate in plain numbers."""
        return {
            "factors": self.factors.tolist(),
            "covariance": self._covariance.tolist(),
            "known": self._known,
            "outlier": self._outlier,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.factors = np.array(state["factors"])
        self._covariance = np.array(state["covariance"])
        self._known = state["known"]
        self._outlier = state["outlier"]

    def model(self, planned: TimeModel) -> TimeModel:
        """Return the time model as estimated, for a resolution with this planned one."""
        u, v = self.factors
        return TimeModel(
            slope=float(u * planned.slope),
            intercept=float(v * max(planned.intercept, 0.0)),
            floor=float(v * planned.floor),
        )


def proportional_parts(parts: Sequence[float], times_s: Sequence[float]) -> np.ndarray:
    """Return the published rule's new proportions, p_i <- (p_i/t_i) / sum_j(p_j/t_j), [n].

    It takes a step to cost nothing but its samples, and believes each measurement.
    """
    speeds = np.asarray(parts, dtype=np.float64) / np.asarray(times_s, dtype=np.float64)
    return speeds / speeds.sum()


def predicted_time_s(plan: Plan, models: Sequence[TimeModel]) -> float:
    """Return the seconds of a plan's epoch for workers with these time models."""
    return max(
        model.time(worker.samples, worker.steps)
        for worker, model in zip(plan.workers, models, strict=True)
    )
