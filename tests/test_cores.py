import os

from dbsl.cores import cores_of_process


def test_cores_are_shared_among_local_processes(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert cores_of_process() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores_of_process() == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert cores_of_process() == 1
