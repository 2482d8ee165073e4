"""Deaths that exchanges do not tell of: with NCCL the main thread waits on its device."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dbsl.base.errors import ReadError, SyncError
from dbsl.cluster.alive import Heartbeats
from dbsl.cluster.wire import pairs_with_server
from tests.helpers import free_port, slow

HANGS_S = 30.0  # far beyond the test's own limit


@pytest.fixture
def launcher(monkeypatch):
    """The store that a launcher serves."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(store.port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("WORLD_SIZE", "3")
    return store


def waiting_rank(rank, dies):
    pairs = pairs_with_server(timedelta(seconds=20))
    heartbeats = Heartbeats(rank, 3, 20.0, pairs)
    dist.barrier()
    if dies is None:
        if rank == 0:  # leaves first, the others later
            heartbeats.close()
            return "left"
        time.sleep(1.0)
        heartbeats.close()
        return "left"
    if rank == dies:
        os._exit(1)
    time.sleep(HANGS_S)  # in a collective of NCCL
    return "never ended"


@pytest.mark.parametrize("dies", [0, pytest.param(2, marks=slow)])
def test_a_death_that_no_exchange_tells_of_ends_the_others(run_ranks, launcher, dies, capfd):
    results = run_ranks(waiting_rank, dies, world_size=3, timeout_s=HANGS_S - 5)
    assert results == [None] * 3
    said = capfd.readouterr().err
    assert said.count(f"error: rank {dies} died or fell silent") == 2


def meet_or_raise(error):
    if error is not None:
        raise error
    dist.barrier()


def meeting_rank(rank, port, error):
    """Meet twice, the second time without rank 2; rank 1 is late, and rank 0 has the store."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    heartbeats = Heartbeats(rank, 3, 20.0)
    dist.barrier()
    if rank == 2 and error is None:
        os._exit(1)
    if rank == 1:
        time.sleep(3.0)  # it computes, while rank 0 finds that one is missing
    with pytest.raises((SyncError, ReadError)) as ended, heartbeats.naming_the_missing():
        meet_or_raise(error if rank == 2 else None)
    time.sleep(4.0)  # trackers are told, say
    heartbeats.close()
    del store
    return str(ended.value)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(None, id="death"),
        pytest.param(
            ReadError("shard 3 is gone (Connection reset by peer)"), id="error", marks=slow
        ),
    ],
)
def test_all_hear_who_died_or_failed_before_the_one_that_has_the_store_ends(run_ranks, error):
    first, second, third = run_ranks(meeting_rank, free_port(), error, world_size=3)
    found = "failed: shard 3 is gone (Connection reset by peer)" if error else "died or fell silent"
    assert first.startswith(f"rank 2 {found}")
    assert second == first
    assert third == (str(error) if error else None)


def failing_rank(rank):
    heartbeats = Heartbeats(rank, 3, 20.0, pairs_with_server(timedelta(seconds=20)))
    dist.barrier()
    if rank == 1:
        with pytest.raises(MemoryError), heartbeats.naming_the_missing():
            raise MemoryError("40 MB are missing")
        heartbeats.close()
        return "failed"
    time.sleep(HANGS_S)  # in a collective of NCCL
    return "never ended"


def test_an_error_that_no_exchange_tells_of_ends_the_others(run_ranks, launcher, capfd):
    results = run_ranks(failing_rank, world_size=3, timeout_s=HANGS_S - 5)
    assert results == [None, "failed", None]
    assert capfd.readouterr().err.count("error: rank 1 failed: 40 MB are missing") == 2


def test_a_process_that_has_left_is_not_ended_by_an_error_of_another(launcher, monkeypatch):
    """It writes its summary, say."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    first, second = (Heartbeats(rank, 2, 20.0) for rank in range(2))
    second._confess(OSError("late"))
    first._end_soon()  # as its thread does when it has seen that
    first.close()
    time.sleep(3.6)
    second.close()
    assert not ended


def test_ranks_that_leave_one_after_the_other_are_not_mourned(run_ranks, launcher):
    assert run_ranks(waiting_rank, None, world_size=3) == ["left"] * 3
