"""Deaths that exchanges do not tell of: with NCCL the main thread waits on its device."""

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dbsl.base.errors import SyncError
from dbsl.cluster.collectives import pairs_with_server
from dbsl.cluster.heartbeats import Heartbeats
from tests.helpers import free_port

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


@pytest.mark.parametrize("dies", [2, 0])
def test_a_death_that_no_exchange_tells_of_ends_the_others(run_ranks, launcher, dies, capfd):
    results = run_ranks(waiting_rank, dies, world_size=3, timeout_s=HANGS_S - 5)
    assert results == [None] * 3
    said = capfd.readouterr().err
    assert said.count(f"error: rank {dies} died or fell silent") == 2


def meeting_rank(rank, port):
    """Meet twice, the second time without rank 2; rank 1 is late, and rank 0 has the store."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3"}
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    heartbeats = Heartbeats(rank, 3, 20.0)
    dist.barrier()
    if rank == 2:
        os._exit(1)
    if rank == 1:
        time.sleep(3.0)  # it computes, while rank 0 finds that one is missing
    with pytest.raises(SyncError) as lost, heartbeats.naming_the_missing():
        dist.barrier()
    del store
    return str(lost.value)


def test_all_hear_who_died_before_the_one_that_has_the_store_ends(run_ranks):
    first, second, _ = run_ranks(meeting_rank, free_port(), world_size=3)
    assert first.startswith("rank 2 died or fell silent")
    assert second == first


def test_ranks_that_leave_one_after_the_other_are_not_mourned(run_ranks, launcher):
    assert run_ranks(waiting_rank, None, world_size=3) == ["left"] * 3
