import os
from types import SimpleNamespace

import psutil
import pytest

from dbsl.base.machine import cores_of_process, threads_of_process


def test_cores_are_shared_among_local_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cores_of_process() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores_of_process() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert cores_of_process() == 1


@pytest.mark.parametrize("launcher", [None, "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"])
@pytest.mark.parametrize(
    ("given", "its_own", "threads"),
    [
        *((None, False, 8), ("3", True, 3), ("3", False, 3), ("99", True, 8), ("4,2", True, 4)),
        *(("1", True, 1), ("1", False, 8), ("many", True, 8), ("0", True, 8)),
    ],
)
def test_the_users_number_of_threads_is_a_bound_and_a_launchers_1_is_none(
    monkeypatch, launcher, given, its_own, threads
):
    """`its_own`: the launcher was started with it, so that it is the user's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for name in ("OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    if launcher:
        monkeypatch.setenv(launcher, "no")
    before = {"OMP_NUM_THREADS": given} if its_own else {}
    parent = SimpleNamespace(environ=lambda: before)
    monkeypatch.setattr(psutil, "Process", lambda pid: parent)
    alone = given == "1" and launcher is None  # nobody else can have set it
    assert threads_of_process() == (1 if alone else threads)
    assert threads_of_process(jobs=4) == min(2, 1 if alone else threads)
