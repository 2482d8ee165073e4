"""When a run is to stop, by a signal or a limit on its time; and the seconds that it took.

A first SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGHUP (the terminal is closed) asks the run to finish
its step, save and end; a second one ends it at once, as if nothing had been set up. A signal that
the parent process has it ignore stays ignored: SIGHUP under nohup, SIGINT in the background job of
a script.
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

# A fork's signals are not its parent's.
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def deadline_of(max_minutes: float | None) -> float | None:
    """Return when a run of at most so many minutes is to stop, by time.monotonic(); None: never."""
    if max_minutes is None:
        return None
    # They count on when torchrun or accelerate restarts the processes of a launch.
    ends = float(remember("deadline", repr(time.time() + 60 * max_minutes)))
    return time.monotonic() + ends - time.time()


class Stopping:
    """Watches for signals and for a deadline, by time.monotonic(); None: never.

    `on_signal` is called in another thread after the first signal; `then` says what the process
    does after it, for the line that says so.
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
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets none
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            # The main thread may wait outside Python, where it runs no handler: Python writes each
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
            self._told.shutdown(socket.SHUT_RDWR)  # forks may have it, too
            self._told.close()

    @property
    def reason(self) -> str | None:
        """Why the run is to stop, or None."""
        over = self.deadline is not None and time.monotonic() >= self.deadline
        return self.signal or ("max_minutes" if over else None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        # Whoever reads what is printed may be gone by the same signal: a terminal, `tee`.
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) is not None:  # a daemon may have none
                setattr(sys, name, _BestEffort(stream))
        while self._before:  # the next one ends the process
            signal.signal(*self._before.popitem())
        # Not print: the signal may have come in the middle of one.
        with suppress(OSError):
            os.write(2, f"{self.signal}: {self._then}; repeat to end now\n".encode())

    def _tell(self, hears: socket.socket, own: set[int]) -> None:
        # The main thread may be anywhere, also inside a lock that a listener takes.
        told = False
        with hears:  # to the end: Python complains of signals that nobody reads
            while number := hears.recv(1):  # none: it is over
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
    """Counts from its making on, and goes on from where an earlier session stopped.

    What comes before `start_training` is start-up (`start_up_s`, of all sessions together), and no
    part of the training.
    """

    def __init__(self) -> None:
        self.paused_s = self.start_up_s = 0.0
        self._made = self._loop_began = self._begun = time.perf_counter()

    @property
    def total_s(self) -> float:
        """Seconds since the run began, earlier sessions and their starts included."""
        return self.start_up_s + time.perf_counter() - self._loop_began

    def start_training(self, since: float | None = None) -> float:
        """Note that training begins here; return the seconds of this session's start-up.

        They count from this watch's making, or `since` a moment of time.perf_counter().
        """
        now = time.perf_counter()
        self._loop_began += now - self._made
        start_up_s = now - (self._made if since is None else since)
        self.start_up_s += start_up_s
        self._begun = time.perf_counter()
        return start_up_s

    def train_s(self, moment: float) -> float:
        """Return the seconds of training up to a moment of time.perf_counter().

        A moment of the start-up, such as that of an epoch's end that was resumed with, has none.
        """
        return max(moment, self._begun) - self._loop_began - self.paused_s

    @contextmanager
    def evaluating(self, *, pauses: bool) -> Iterator[Callable[[], float]]:
        """Give what tells the seconds so far; if training `pauses`, it does not count them."""
        began = time.perf_counter()
        try:
            yield lambda: time.perf_counter() - began
        finally:
            self.paused_s += pauses * (time.perf_counter() - began)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "loop_s": time.perf_counter() - self._loop_began,
            "start_up_s": self.start_up_s,
            "paused_s": self.paused_s,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned, before training begins."""
        self._loop_began -= state["loop_s"]
        self.start_up_s, self.paused_s = state["start_up_s"], state["paused_s"]
