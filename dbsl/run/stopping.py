"""When a run is to stop or to save: a signal, a limit on its time, or the time since the last save.

A first SIGTERM, SIGINT or SIGHUP (the terminal is closed) asks the run to finish its step, save and
end; a second one ends it at once, as if nothing had been set up. A signal that the parent process
has it ignore stays ignored: SIGHUP under nohup, SIGINT in the background job of a script.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from dbsl.cluster.launch import remember

# A fork's signals are not its parent's.
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def deadline_of(max_minutes: float | None) -> float | None:
    """Return when a run of at most so many minutes is to stop, by time.monotonic(); None: never.

    The minutes of a launch count on when torchrun or accelerate restarts its processes.
    """
    if max_minutes is None:
        return None
    ends = float(remember("deadline", repr(time.time() + 60 * max_minutes)))
    return time.monotonic() + ends - time.time()


class Stopping:
    """Watches for signals and for the end of the time that a run was given.

    Args:
        deadline: When to stop, by time.monotonic(); None: never.
        then: What the process does after the first signal, for the line that says so.

    Attributes:
        on_signal: Called in a thread of its own after the first signal.
    """

    def __init__(
        self, deadline: float | None = None, then: str = "finishing the step and saving"
    ) -> None:
        self.deadline = deadline
        self._then = then
        self.signal: str | None = None
        self.on_signal: Callable[[], object] = lambda: None
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python sets none
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
            # The main thread may wait outside Python, where it runs no handler: Python writes each
            # signal's number here at once.
            self._ends = hears, told = socket.socketpair()
            told.setblocking(False)
            self._wakeup_fd = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
            own = set(self._before)
            threading.Thread(
                target=self._tell, args=(hears, own), name="on-signal", daemon=True
            ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()
        self.on_signal = lambda: None
        if self._ends is not None:
            signal.set_wakeup_fd(self._wakeup_fd)
            self._ends[1].shutdown(socket.SHUT_RDWR)  # forks may have it, too
            self._ends[1].close()

    @property
    def reason(self) -> str | None:
        """Why the run is to stop, or None."""
        if self.signal:
            return self.signal
        if self.deadline is not None and time.monotonic() >= self.deadline:
            return "max_minutes"
        return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        self._restore()  # the next one ends the process
        # Not print: the signal may have come in the middle of one.
        os.write(2, f"{self.signal}: {self._then}; once more to end\n".encode())

    def _tell(self, hears: socket.socket, own: set[int]) -> None:
        # The main thread may be anywhere, also inside a lock that a listener takes.
        told = False
        with hears:  # to the end: Python complains of signals that nobody reads
            while number := hears.recv(1):  # none: it is over
                if number[0] in own and not told:
                    told = True
                    self.on_signal()

    def _restore(self) -> None:
        while self._before:
            signal.signal(*self._before.popitem())
