"""Real processes at a barrier that goes on without those who are late, or are gone."""

import os
import time
from functools import partial
from unittest.mock import patch

import pytest

from dbsl.cluster.quorum import Quorum
from dbsl.plan.turns import EpochEnd
from tests.ranks.test_sync import make, make_reports

EPOCHS, GRACE_S = 12, 0.5


def train(rank, world_size, dedicated, on_round):
    """Train to the end, 0.1 s a round; `on_round(worker, turn)` may delay it, or end the process.

    Return the rounds that this process took, and on rank 0 what its server has counted.
    """
    quorum = Quorum(2, GRACE_S, rounds_per_epoch=1, samples_of=lambda *place: 10)
    weights, cluster, plan = make(
        rank,
        "bsp",
        world_size=world_size,
        epochs=EPOCHS,
        dedicated_server=dedicated,
        quorum=quorum,
    )
    taken, ends, pushed, missed, lost = [], [], [], [], []
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            ends.append(turn.epoch)
            time.sleep(1.3 * GRACE_S if turn.epoch == 0 else 0.0)  # an evaluation: all wait for it
        else:
            cluster.plan(turn)
            cluster.pull(turn)
            time.sleep(0.1)
            on_round(turn.workers[0], turn.epoch)
            cluster.push(make_reports(turn, plan))
            taken.append(turn.epoch)
        pushed += [(r.worker, r.epoch) for r in cluster.reports()]
        missed += [(m.worker, m.epoch) for m in cluster.missed()]
        lost += [(row.worker, row.samples // 10) for row in cluster.membership()]
    cluster.close()
    pushed += [(r.worker, r.epoch) for r in cluster.reports()]
    missed += [(m.worker, m.epoch) for m in cluster.missed()]
    finite = weights.vector.isfinite().all().item()
    return taken, ends, pushed, missed, lost, cluster.late_pushes, finite


def late_rank(rank, world_size, dedicated, slow):
    def on_round(worker, epoch):
        if worker == slow and epoch == 2:
            time.sleep(2 * GRACE_S)

    return train(rank, world_size, dedicated, on_round)


@pytest.mark.parametrize(
    ("slow", "dedicated"),
    [(2, False), (0, False), pytest.param(1, True, marks=pytest.mark.slow)],
)
def test_a_late_worker_misses_rounds_that_are_counted_and_takes_part_again(
    run_ranks, slow, dedicated
):
    results = run_ranks(late_rank, 3 + dedicated, dedicated, slow, world_size=3 + dedicated)
    _, ends, pushed, missed, lost, late, _ = results[0]
    assert ends == list(range(EPOCHS))
    everything = {(worker, epoch) for worker in range(3) for epoch in range(EPOCHS)}
    assert set(pushed) | set(missed) == everything
    assert len(pushed) + len(missed) == len(everything)
    assert {worker for worker, _ in missed} == {slow}
    assert (slow, 2) in missed
    assert (slow, EPOCHS - 1) in pushed
    assert (late, lost) == (1, [])
    taken = results[slow + dedicated][0]
    assert taken == sorted({2, *(e for w, e in pushed if w == slow)})
    assert all(result[-1] for result in results)


def dying_rank(rank, world_size):
    def on_round(worker, epoch):
        if worker == 2 and epoch == 2:
            os._exit(9)

    return train(rank, world_size, False, on_round)


class StoppedError(Exception):
    """The run is to be saved and to end."""


def too_few_left(rank, world_size):
    """Train until rank 2, then rank 1 has died; return what rank 0 would save, and why."""

    def on_round(worker, epoch):
        if worker == 3 - epoch // 2 and epoch % 2 == 0:
            os._exit(9)

    def stop(cluster):
        raise StoppedError(cluster.stop_reason, cluster.state_dict()["server"]["active"])

    with patch("dbsl.cluster.protocol.Cluster.on_stop", property(lambda c: partial(stop, c))):
        try:
            train(rank, world_size, False, on_round)
        except StoppedError as stopped:
            return stopped.args


def test_where_too_few_are_left_the_run_is_to_be_saved_as_of_before_the_loss(run_ranks):
    (reason, active), *_ = run_ranks(too_few_left, 3, world_size=3)
    assert reason.startswith("rank 1 was lost (")
    assert reason.endswith("): 1 of 3 workers are left, fewer than --min-workers 2")
    assert active == [0, 1]  # worker 1 begins its round anew after a resume


def test_where_enough_are_left_rounds_go_on_without_one_that_died(run_ranks):
    results = run_ranks(dying_rank, 3, world_size=3)
    _, ends, pushed, missed, lost, late, _ = results[0]
    assert ends == list(range(EPOCHS))
    assert [epoch for worker, epoch in pushed if worker == 2] == [0, 1]
    assert all([e for w, e in pushed if w == w_] == list(range(EPOCHS)) for w_ in (0, 1))
    ((worker, rounds),) = lost
    assert worker == 2
    assert 1 <= rounds + len(missed) <= 3  # those that others had begun
    assert late == 0
