"""The seconds of a run, those of earlier sessions included."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Stopwatch:
    """Counts from its making on, and goes on from where an earlier session stopped.

    What comes before `start_training` is start-up, and no part of the training.

    Attributes:
        eval_s: Seconds spent on evaluation.
        start_up_s: Seconds before training began, of all sessions together.
    """

    def __init__(self) -> None:
        self.eval_s = self.start_up_s = 0.0
        self._began = self._loop_began = time.perf_counter()
        self._earlier_s = self._earlier_loop_s = 0.0  # all earlier sessions together

    @property
    def total_s(self) -> float:
        """Seconds since the run began, earlier sessions and their starts included."""
        return self._earlier_s + time.perf_counter() - self._began

    def start_training(self) -> float:
        """Note that training begins here; return the seconds of this session's start-up."""
        self._loop_began = time.perf_counter()
        spent = self._loop_began - self._began
        self.start_up_s += spent
        return spent

    def train_s(self, moment: float, *, without_evaluation: bool) -> float:
        """Return the seconds of training up to a moment, by time.perf_counter().

        Evaluation is left out where it held the workers up.
        """
        spent = self._earlier_loop_s + moment - self._loop_began
        return spent - (self.eval_s if without_evaluation else 0.0)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], float]]:
        """Count the time in here as evaluation; gives what tells the seconds so far."""
        began = time.perf_counter()
        yield lambda: time.perf_counter() - began
        self.eval_s += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "loop_s": self._earlier_loop_s + time.perf_counter() - self._loop_began,
            "start_up_s": self.start_up_s,
            "eval_time_s": self.eval_s,
            "total_s": self.total_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._earlier_loop_s = state["loop_s"]
        self.start_up_s += state["start_up_s"]
        self.eval_s = state["eval_time_s"]
        self._earlier_s = state["total_s"]
