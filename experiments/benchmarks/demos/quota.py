"""Processes of given speeds: a CPU quota each, in short periods. Needs root and cgroups.

A core that has nothing to do for a part of each period halts, and is slow after it wakes: the same
work took 3 to 5 ms of its time. So a loop keeps each core busy, in a group of idle priority: where
the kernel groups tasks by session (autogroup), a loop that is idle by itself gets half a core.
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
    idle = ROOT / f"dbsl-idle-{os.getpid()}"
    loops: list[subprocess.Popen] = []

    try:
        try:
            if ROOT != _VERSION_1:
                (ROOT / "cgroup.subtree_control").write_text("+cpu")
            for group, part in zip(groups, parts, strict=True):
                group.mkdir()
                limit(group, part)
            idle.mkdir()
            (idle / "cpu.idle").write_text("1")
            busy = [sys.executable, "-c", _BUSY]
            for core in used:
                loops.append(subprocess.Popen([*_enter(idle, core), *busy]))
        except OSError as error:
            raise RuntimeError(f"CPU quotas need root and cgroups: {error}") from None
        yield [_enter(group, str(there[core])) for group, core in zip(groups, cores, strict=True)]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
        for group in filter(Path.is_dir, [*groups, idle]):
            deadline = time.monotonic() + 5.0
            while (group / "cgroup.procs").read_text() and time.monotonic() < deadline:
                time.sleep(0.05)  # forks that were killed are in it for a moment
            group.rmdir()


def _enter(group: Path, core: str) -> list[str]:
    return ["sh", "-c", _ENTER, str(group), "taskset", "-c", core]


def limit(group: Path, part: float) -> None:
    """Let a cgroup have a part of a core's time; a whole core has no limit, which costs time."""
    quota = str(round(PERIOD_US * part)) if part < 1 else ""
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota or 'max'} {PERIOD_US}")
    else:
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(quota or "-1")
