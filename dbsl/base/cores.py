"""The CPU cores that a process may use, and how many processes share the machine."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import psutil

_THREADS = "OMP_NUM_THREADS"
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by torchrun, accelerate


def cores_of_process() -> int:
    """Return this process's part of the cores that the launch may run on, at least 1."""
    can_tell = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return max(1, cores // local_processes())


def lower_priority() -> None:
    """Have this thread give way to the others, on Linux; elsewhere it would be the process."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def threads_of_process(jobs: int = 1) -> int:
    """Return how many threads torch is to use here: of this process's cores, shared by `jobs` runs.

    ``OMP_NUM_THREADS`` is an upper bound if the user has set it. torchrun and accelerate launch set
    it to 1 themselves where it was not set; such a 1 does not count.
    """
    threads = max(1, cores_of_process() // jobs)
    first = os.environ.get(_THREADS, "").partition(",")[0].strip()  # the outer one of nested levels
    bound = int(first) if first.isdecimal() else 0
    if bound == 0 or (bound == 1 and _launcher_has_set_it()):
        return threads
    return min(threads, bound)


def local_processes() -> int:
    """Return how many processes the launcher has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _launcher_has_set_it() -> bool:
    """Whether ``OMP_NUM_THREADS`` is a launcher's: it was itself started without."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return False
    try:
        return _THREADS not in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return True  # another user's process, say: the launcher set it more often
