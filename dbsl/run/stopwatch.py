"""The seconds of a run, those of earlier sessions included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Counts from its making on, and goes on from where an earlier session stopped.

    Attributes:
        eval_s: Seconds spent on evaluation.
    """

    def __init__(self) -> None:
        self.eval_s = 0.0
        self._began = self._loop_began = time.perf_counter()
        self._earlier_s = 0.0  # all earlier sessions together

    @property
    def total_s(self) -> float:
        """Seconds since the run began, earlier sessions and their starts included."""
        return self._earlier_s + time.perf_counter() - self._began

    def train_s(self, moment: float, *, without_evaluation: bool) -> float:
        """Return the seconds of training up to a moment, by time.perf_counter().

        Evaluation is left out where it held the workers up.
        """
        return moment - self._loop_began - (self.eval_s if without_evaluation else 0.0)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], float]]:
        """Count the time in here as evaluation; gives what tells the seconds so far."""
        began = time.perf_counter()
        yield lambda: time.perf_counter() - began
        self.eval_s += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "loop_s": time.perf_counter() - self._loop_began,
            "eval_time_s": self.eval_s,
            "total_s": self.total_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._loop_began = time.perf_counter() - float(state["loop_s"])
        self.eval_s = float(state["eval_time_s"])
        self._earlier_s = float(state["total_s"])
