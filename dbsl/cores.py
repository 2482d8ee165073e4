"""The CPU cores that a process may use, and how many processes share the machine."""

from __future__ import annotations

import os


def cores_of_process() -> int:
    """Return this process's part of the cores that the launch may run on, at least 1."""
    can_tell = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return max(1, cores // local_processes())


def local_processes() -> int:
    """Return how many processes the launcher has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
