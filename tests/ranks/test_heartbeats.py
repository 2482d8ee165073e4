"""Deaths that exchanges do not tell of: with NCCL the main thread waits on its device."""

import os
import time

import pytest
import torch.distributed as dist

import dbsl.cluster.alive
from dbsl.base.errors import ReadError, SyncError
from dbsl.cluster.alive import Heartbeats
from tests.helpers import slow

HANGS_S = 90.0  # beyond the test's own limit


def meet(heartbeats, error=None):
    heartbeats.enter()
    if error is not None:
        raise error
    dist.barrier()


def met(workers=None, **limits):
    """Return heartbeats of processes that have met once; the limits are seconds."""
    for name, seconds in limits.items():
        setattr(dbsl.cluster.alive, name, seconds)
    heartbeats = Heartbeats(20.0, workers)
    meet(heartbeats)
    return heartbeats


def waiting_rank(rank, one, raises):
    """Wait for what does not come; one rank dies without a word, or raises an error."""
    heartbeats = met(_END_S=0.5)
    if rank != one:
        time.sleep(HANGS_S)  # in a collective of NCCL
    elif not raises:
        os._exit(1)
    with pytest.raises(MemoryError), heartbeats.watching():
        raise MemoryError("40 MB are missing")
    return "failed"


@pytest.mark.parametrize(
    ("one", "raises", "said"),
    [
        (1, True, "failed: 40 MB are missing"),
        (0, False, "died or fell silent"),
        pytest.param(2, False, "died or fell silent", marks=slow),
    ],
)
def test_a_death_or_an_error_that_no_exchange_tells_of_ends_the_others(
    run_ranks, one, raises, said, capfd
):
    results = run_ranks(waiting_rank, one, raises, world_size=3, expect_errors=True)
    assert results == [None, "failed" if raises else None, None]
    assert capfd.readouterr().err.count(f"error: rank {one} {said}") == 2


def late_rank(rank):
    """Leave the run; rank 0 takes its time to answer."""
    heartbeats = met(_TOLD_S=0.1)
    with heartbeats.watching():
        dist.barrier()
        if rank == 0:
            for pulse in heartbeats._pulses.values():
                pulse._says = lambda: time.sleep(1.5) or "0 "
        time.sleep(0.5)
    return [pulse.thread.is_alive() for pulse in heartbeats._pulses.values()]


def test_no_process_ends_before_the_last_beat_however_late(run_ranks):
    assert run_ranks(late_rank, world_size=2) == [[False], [False]]


def meeting_rank(rank, error):
    """Meet twice, the second time without rank 2; rank 1 is late."""
    heartbeats = met()
    if rank == 2 and error is None:
        os._exit(1)
    time.sleep(rank == 1)  # it computes, while rank 0 finds that one is missing
    with pytest.raises((SyncError, ReadError)) as ended, heartbeats.watching():
        meet(heartbeats, error if rank == 2 else None)
    return str(ended.value)


@pytest.mark.parametrize(
    "error", [None, pytest.param(ReadError("shard 3 is gone (Connection reset)"), marks=slow)]
)
def test_all_hear_who_died_or_failed(run_ranks, error):
    first, second, third = run_ranks(meeting_rank, error, world_size=3, expect_errors=not error)
    found = f"failed: {error}" if error else "died or fell silent"
    assert first.startswith(f"rank 2 {found}")
    assert second == first
    assert third == (str(error) if error else None)


def hanging_rank(rank, one):
    """Meet twice; one rank lives, and does not come to the second time."""
    heartbeats = met(NOTICED_S=0.5, _END_S=0.5)
    if rank == one:
        time.sleep(HANGS_S)
    error = RuntimeError("[pair.cc:7] Timed out waiting for a peer")  # as gloo says in the end
    with pytest.raises(SyncError) as ended, heartbeats.watching():
        meet(heartbeats, error)
    return str(ended.value)


@pytest.mark.parametrize("one", [0, 1])
def test_a_rank_that_hangs_is_named_and_ended(run_ranks, one):
    results = run_ranks(hanging_rank, one, expect_errors=True)
    assert results.pop(one) is None
    assert results == [f"rank {one} hangs (Timed out waiting for a peer)"]


def stepping_rank(rank):
    """Take steps in workers of two processes: worker 0 is slow, and a process of worker 1 hangs."""
    heartbeats = met({0: 0, 1: 0, 2: 1, 3: 1}, NOTICED_S=0.5, _END_S=0.5)
    for _ in range((0, 0, 3, 2)[rank]):
        heartbeats.enter_inside()
    if rank != 2:
        time.sleep(HANGS_S)
    with pytest.raises(SyncError) as ended, heartbeats.watching():
        raise RuntimeError("[pair.cc:7] Timed out waiting for a peer")
    return str(ended.value)


def test_of_a_workers_processes_the_one_that_hangs_is_named_though_another_worker_is_slow(
    run_ranks,
):
    results = run_ranks(stepping_rank, world_size=4, expect_errors=True)
    said = "rank 3 (a process of worker 1) hangs (Timed out waiting for a peer)"
    assert results == [None, None, said, None]


def leaving_rank(rank):
    """Leave one after the other, rank 0 first; the last one fails later."""
    heartbeats = met(_END_S=0.2)
    if rank == 2:
        time.sleep(0.5)
        with pytest.raises(OSError, match="late"), heartbeats.watching():
            raise OSError("late")
    else:
        time.sleep(0.3 * rank)
        with heartbeats.watching():
            pass
        time.sleep(1.0)  # writes its summary, say
    return "left"


def test_ranks_that_leave_one_after_the_other_are_not_mourned_and_hear_of_no_late_error(run_ranks):
    assert run_ranks(leaving_rank, world_size=3) == ["left"] * 3
