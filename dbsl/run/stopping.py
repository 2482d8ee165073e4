"""Stopping a run on a signal or at its time limit, and measuring its time.

A first SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGHUP (the terminal is closed) asks the run to finish
its step, save and end; a second ends it at once, as without a handler. A signal that the parent
process set to be ignored remains ignored: SIGHUP under nohup, SIGINT in a script's background job.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TextIO

from dbsl.base.machine import STOP_SIGNALS, remember

# A forked child must not report its signals to the parent.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def deadline_of(max_minutes: float | None) -> float | None:
    """Return when a run of `max_minutes` must stop, by time.monotonic(); None: never."""
    if max_minutes is None:
        return None
    # The deadline remains when torchrun or accelerate restarts the processes of a launch.
    ends = float(remember("deadline", repr(time.time() + 60 * max_minutes)))
    return time.monotonic() + ends - time.time()


class Stopping:
    """Watches for signals and for a deadline, by time.monotonic(); None: never.

    The first signal calls `on_signal` in another thread, and prints a line in which `then` says
    what the process does next.
    """

    def __init__(
        self,
        deadline: float | None = None,
        then: str = "finishing the step and saving",
        on_signal: Callable[[], object] = lambda: None,
    ) -> None:
        self.deadline = deadline
        self._then, self._on_signal = then, on_signal
        self.signal: str | None = None
        self._told: socket.socket | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # Python allows no other
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            # The main thread runs no handler while it waits outside Python, but Python writes each
            # signal's number here at once.
            hears, self._told = socket.socketpair()
            self._told.setblocking(False)
            self._wakeup_fd = signal.set_wakeup_fd(self._told.fileno(), warn_on_full_buffer=False)
            given = (hears, set(self._before))
            threading.Thread(target=self._tell, args=given, name="on-signal", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
        if self._told is not None:
            signal.set_wakeup_fd(self._wakeup_fd)
            self._told.shutdown(socket.SHUT_RDWR)  # forks may hold it, too
            self._told.close()

    @property
    def reason(self) -> str | None:
        """Why the run must stop, or None."""
        over = self.deadline is not None and time.monotonic() >= self.deadline
        return self.signal or ("max_minutes" if over else None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        # The same signal may have ended the reader of the output: a terminal, `tee`.
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) is not None:  # a daemon may have none
                setattr(sys, name, _BestEffort(stream))
        while self._before:  # the next signal ends the process
            signal.signal(*self._before.popitem())
        # Not print: the signal may have interrupted one.
        with suppress(OSError):
            os.write(2, f"{self.signal}: {self._then}; repeat to end now\n".encode())

    def _tell(self, hears: socket.socket, own: set[int]) -> None:
        # The main thread may be anywhere, even holding a lock that `on_signal` takes.
        told = False
        with hears:  # to the end: Python complains about unread signals
            while number := hears.recv(1):  # empty: it is closed
                if number[0] in own and not told:
                    told = True
                    self._on_signal()


class _BestEffort:
    """A stream that drops what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class Stopwatch:
    """Measures time from its creation, and continues where an earlier session stopped.

    Time before `start_training` is start-up (`start_up_s`, over all sessions), not training.
    """

    def __init__(self) -> None:
        self.paused_s = self.start_up_s = 0.0
        self._made = self._loop_began = self._begun = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Seconds since the run began, including earlier sessions and their start-up."""
        return self.start_up_s + time.perf_counter() - self._loop_began

    def start_training(self, since: float | None = None) -> float:
        """Record that training begins here; return the seconds of this session's start-up.

        It is measured from this watch's creation, or from `since`, a time.perf_counter() value.
        """
        now = time.perf_counter()
        self._loop_began += now - self._made
        start_up_s = now - (self._made if since is None else since)
        self.start_up_s += start_up_s
        self._begun = time.perf_counter()
        return start_up_s

    def train_s(self, moment: float) -> float:
        """Return the seconds of training up to a moment of time.perf_counter().

        A moment during start-up, such as an epoch's end from the checkpoint, adds none.
        """
        return max(moment, self._begun) - self._loop_began - self.paused_s

    @contextmanager
    def evaluating(self, *, pauses: bool) -> Iterator[Callable[[], float]]:
        """Yield a function that returns the seconds so far; if training `pauses`, exclude them."""
        began = time.perf_counter()
        try:
            yield lambda: time.perf_counter() - began
        finally:
            self.paused_s += pauses * (time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {
            "loop_s": time.perf_counter() - self._loop_began,
            "start_up_s": self.start_up_s,
            "paused_s": self.paused_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned, before training begins."""
        self._loop_began -= state["loop_s"]
        self.start_up_s, self.paused_s = state["start_up_s"], state["paused_s"]
