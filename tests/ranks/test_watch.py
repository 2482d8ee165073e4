"""Failures that exchanges do not tell of: with NCCL the main thread waits on its device."""

import os
import time

import pytest
import torch.distributed as dist

import dbsl.cluster.alive
from dbsl.base.errors import ReadError, SyncError
from dbsl.cluster.alive import Watch
from tests.helpers import slow

HANGS_S = 90.0  # beyond the test's own limit
LOST = RuntimeError("[pair.cc:7] Timed out waiting for a peer")  # as gloo says in the end
READ = ReadError("shard 3 is gone (Connection reset)")


def failing_rank(rank, one, error, waits):
    """Meet twice, but one rank dies, hangs or fails; others wait on a device or in an exchange."""
    dbsl.cluster.alive._END_S = 0.5
    watch = Watch()
    dist.barrier()
    with pytest.raises((SyncError, ReadError)) as ended, watch.watching():  # noqa: PT012
        if rank == one and error == "dies":
            os._exit(1)
        if rank == one and error == "hangs":
            time.sleep(HANGS_S)
        if rank == one:
            raise error
        if rank == 1 and waits:
            time.sleep(HANGS_S)  # in a collective of NCCL, for ranks that have failed
        if error == "hangs":
            raise LOST
        time.sleep(rank == 0)  # it computes, while another finds that one is missing
        dist.barrier()
    return str(ended.value)


@pytest.mark.parametrize(
    ("one", "error", "waits", "said"),
    [
        (2, "dies", False, "rank 2 died or fell silent ("),
        pytest.param(2, "dies", True, "rank 2 died or fell silent (", marks=slow),
        (2, READ, True, f"rank 2 failed: {READ}"),
        pytest.param(0, READ, False, f"rank 0 failed: {READ}", marks=slow),
        (1, "hangs", False, "rank 1 hangs (Timed out waiting for a peer)"),
        pytest.param(0, "hangs", False, "rank 0 hangs (Timed out waiting", marks=slow),
    ],
)
def test_all_end_and_say_which_rank_died_failed_or_hangs(run_ranks, capfd, one, error, waits, said):
    found = run_ranks(failing_rank, one, error, waits, world_size=3, expect_errors=True)
    ended = found.pop(one)
    assert ended == (str(error) if error is READ else None)
    printed = capfd.readouterr().err
    for text in found:
        assert text.startswith(said) if text else f"error: {said}" in printed
    assert (None in found) == waits


def leaving_rank(rank):
    """Leave one after the other, rank 0 first; the last one fails later."""
    watch = Watch()
    time.sleep(0.3 * rank)
    if rank == 2:
        with pytest.raises(OSError, match="late"), watch.watching():
            raise OSError("late")
    else:
        with watch.watching():
            pass
        time.sleep(1.0)  # writes its summary, say
    return "left"


def test_ranks_that_leave_one_after_the_other_hear_of_no_late_error(run_ranks):
    assert run_ranks(leaving_rank, world_size=3) == ["left"] * 3
