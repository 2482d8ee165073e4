import os
from types import SimpleNamespace

import psutil
import pytest

from dbsl.base.machine import cores_of_process, threads_of_process

LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 16 cores, on which nobody has said anything."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    for name in ("LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("processes", "cores"), [(1, 16), (4, 4), (32, 1)])
def test_cores_are_shared_among_local_processes(monkeypatch, processes, cores):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert cores_of_process() == cores


@pytest.mark.parametrize("launcher", [None, *LAUNCHERS])
@pytest.mark.parametrize(
    ("given", "its_own", "threads"),
    [
        *((None, False, 16), ("3", True, 3), ("3", False, 3), ("99", True, 16), ("4,2", True, 4)),
        *(("1", True, 1), ("1", False, 16), ("many", True, 16), ("0", True, 16)),
    ],
)
def test_the_users_number_of_threads_is_a_bound_and_a_launchers_1_is_none(
    monkeypatch, launcher, given, its_own, threads
):
    """`its_own`: the launcher was started with it, so that it is the user's."""
    for name, value in (("OMP_NUM_THREADS", given), (launcher, "no")):
        if name and value:
            monkeypatch.setenv(name, value)
    parent = SimpleNamespace(environ=lambda: {"OMP_NUM_THREADS": given} if its_own else {})
    monkeypatch.setattr(psutil, "Process", lambda pid: parent)
    if given == "1" and launcher is None:  # nobody else can have set it
        threads = 1
    assert (threads_of_process(), threads_of_process(jobs=4)) == (threads, min(4, threads))
