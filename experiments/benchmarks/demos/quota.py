"""Processes of given speeds: a CPU quota each, in short periods. Needs root and cgroups.

A core that has nothing to do for a part of each period halts, and is slow after it wakes: the same
work took 3 to 5 ms of its time. So a loop of idle priority keeps each core busy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 10_000  # a tenth of the default: a step of training has several
_VERSION_1 = Path("/sys/fs/cgroup/cpu")
ROOT = _VERSION_1 if _VERSION_1.is_dir() else Path("/sys/fs/cgroup")
_BUSY = """import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent: pass"""
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


@contextmanager
def quotas(parts: Sequence[float], cores: Sequence[int]) -> Iterator[list[list[str]]]:
    """Make a cgroup for each process; gives what commands inside begin with.

    Args:
        parts: Of a core's time, for each process.
        cores: Where each is pinned to, by place among this process's cores.

    Raises:
        RuntimeError: If cgroups cannot be made, as without root.
    """
    there = sorted(os.sched_getaffinity(0))
    groups = [ROOT / f"dbsl{rank}-{os.getpid()}" for rank in range(len(parts))]
    used = {str(there[core]) for core in cores}
    # In the root's group: idle priority counts only inside one.
    loops = [
        subprocess.Popen(
            ["sh", "-c", _ENTER, str(ROOT), "taskset", "-c", core, sys.executable, "-c", _BUSY]
        )
        for core in used
    ]

    try:
        try:
            if ROOT != _VERSION_1:
                (ROOT / "cgroup.subtree_control").write_text("+cpu")
            for group, part in zip(groups, parts, strict=True):
                group.mkdir()
                limit(group, part)
        except OSError as error:
            raise RuntimeError(f"CPU quotas need root and cgroups: {error}") from None
        yield [
            ["sh", "-c", _ENTER, str(group), "taskset", "-c", str(there[core])]
            for group, core in zip(groups, cores, strict=True)
        ]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for group in filter(Path.is_dir, groups):
            deadline = time.monotonic() + 5.0
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)  # forks that were killed are in it for a moment
            group.rmdir()


def limit(group: Path, part: float) -> None:
    """Let a cgroup have a part of a core's time."""
    quota = round(PERIOD_US * part)
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota))
