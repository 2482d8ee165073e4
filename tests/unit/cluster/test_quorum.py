"""Rounds at a barrier that go on with those who came: who counts, who is late, what is counted."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from benchmarks.coverage.cases import Stop, cases
from benchmarks.coverage.check import check, check_drawn
from benchmarks.coverage.player import play
from dbsl.base.errors import SyncError
from dbsl.base.serialize import pack, unpack
from dbsl.cluster.membership import too_few_without
from dbsl.cluster.quorum import Quorum
from dbsl.cluster.server import Server
from dbsl.plan.turns import MissedRound, Restart, RoundReport
from dbsl.run.checks import check_processes
from tests.helpers import slow
from tests.unit.plan.test_members import case
from train import Config


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(min_workers=2, grace_s=5.0, workers=3, rounds=10):
    quorum = Quorum(
        min_workers,
        grace_s,
        rounds_per_epoch=rounds,
        samples_of=lambda worker, epoch, round_: 100 * worker + round_,
    )
    server = Server(
        torch.zeros(1),
        workers,
        rule="mean",
        staleness=0,
        rounds_per_epoch=rounds,
        quorum=quorum,
    )
    quorum.clock = Clock()
    for worker in range(workers):
        server.begin(worker)
    return server


def push(server, worker, value, factor=1.0):
    round_ = server.round_of(worker)
    report = RoundReport(worker, 0, round_, 8, 4, 40, 10, 1.0, 0.5, factor)
    server.push(torch.tensor([float(value)]), report)


def come(server, worker, value):
    """Push, and begin what comes next if it may."""
    push(server, worker, value)
    server.enter(worker)
    if server.may_start(worker):
        server.begin(worker)


def at(server, now):
    """Let time pass, as those do who wait."""
    server.quorum.clock.now = now
    server.settle(timer=True)


def test_a_round_goes_on_without_those_who_have_not_come_when_the_grace_is_over():
    server = make()
    push(server, 0, 1.0, factor=1.0)
    at(server, 100.0)
    assert server.version == 0  # one is too few, however long it takes
    push(server, 1, 4.0, factor=0.5)
    at(server, 104.9)
    assert server.version == 0
    at(server, 105.0)
    assert server.snapshot().item() == 2.0  # (1 + 0.5 * 4) / 1.5: weighted among those who came
    assert server.clocks == [1, 1, 1]
    assert list(server.quorum.missed) == [MissedRound(2, 0, 0, 200)]


def test_when_all_have_come_nobody_waits_for_the_grace():
    server = make()
    for worker in range(3):
        push(server, worker, worker)
    assert (server.version, server.snapshot().item()) == (1, 1.0)
    assert not server.quorum.missed


@pytest.mark.parametrize("comes", [True, False])
def test_an_epoch_ends_with_what_its_last_round_was_merged_to(comes):
    server = make(rounds=1)
    push(server, 0, 3.0)
    push(server, 1, 3.0)
    assert not server.finished
    if comes:
        push(server, 2, 6.0)
    else:
        at(server, 5.0)
    (end,) = server.finished
    assert end.weights.item() == (4.0 if comes else 3.0)


def test_a_push_in_the_last_moment_of_the_grace_counts_and_one_after_it_is_dropped():
    in_time, late = make(), make()
    for server, moment in ((in_time, 5.0), (late, 5.001)):
        push(server, 0, 0.0)
        push(server, 1, 0.0)
        server.quorum.clock.now = moment
        push(server, 2, 9.0)
    assert (in_time.snapshot().item(), in_time.quorum.late_pushes) == (3.0, 0)
    assert (late.snapshot().item(), late.quorum.late_pushes) == (0.0, 1)
    assert [report.worker for report in late.reports] == [0, 1]  # it is no round of the run
    assert late.quorum.missed[0].worker == 2


def late_by(seconds):
    """Return a server whose third worker pushes round 0 so long after the others began round 1."""
    server = make()
    come(server, 0, 0.0)
    come(server, 1, 0.0)
    at(server, 5.0)
    for worker in (0, 1):
        server.begin(worker)
    server.quorum.clock.now += seconds
    come(server, 2, 9.0)
    return server


def test_a_late_worker_begins_the_open_round_if_that_was_begun_within_the_grace():
    server = late_by(5.0)
    assert server.round_of(2) == 1
    for worker in range(3):
        push(server, worker, worker)
    assert server.snapshot().item() == 1.0
    assert len(server.quorum.missed) == 1


def test_a_later_worker_rests_until_the_next_round_and_both_rounds_are_counted():
    server = late_by(5.1)
    assert not server.may_start(2)
    push(server, 0, 1.0)
    push(server, 1, 3.0)
    assert server.snapshot().item() == 2.0  # at once: nobody else takes part
    assert server.may_start(2)
    assert list(server.quorum.missed) == [MissedRound(2, 0, 0, 200), MissedRound(2, 0, 1, 201)]


def test_a_worker_that_is_away_for_rounds_misses_each_and_holds_none_up():
    server = make()
    for round_ in range(4):
        push(server, 0, round_)
        push(server, 1, round_)
        at(server, server.quorum.clock.now + 5.0)
    assert server.clocks == [4, 4, 4]
    assert [row.round for row in server.quorum.missed] == [0, 1, 2, 3]
    push(server, 2, 9.0)  # of round 0
    assert server.snapshot().item() == 3.0


def test_a_round_that_lacks_workers_takes_a_resting_one_in():
    server = late_by(5.1)
    server.drop(1)
    assert server.may_start(2)  # two are to push each round
    server.begin(2)
    push(server, 0, 1.0)
    at(server, server.quorum.clock.now + 60.0)
    assert server.version == 1
    push(server, 2, 3.0)
    assert (server.version, server.snapshot().item()) == (2, 2.0)


def test_a_late_worker_that_a_round_lacks_begins_it_at_once():
    server = make()
    push(server, 0, 0.0)
    push(server, 1, 0.0)
    at(server, 5.0)
    for worker in (0, 1):
        server.begin(worker)
    push(server, 0, 1.0)
    server.drop(1)
    at(server, 100.0)
    come(server, 2, 9.0)
    assert server.may_start(2)
    push(server, 2, 3.0)
    assert server.snapshot().item() == 2.0


def test_a_round_is_merged_when_the_one_that_it_waited_for_is_lost():
    server = make()
    push(server, 0, 1.0)
    push(server, 1, 3.0)
    server.drop(2)
    assert server.snapshot().item() == 2.0
    assert not server.quorum.missed  # its samples are counted as lost
    assert server.shortage() is None
    server.drop(1)
    assert server.shortage() == 1


def test_workers_that_joined_for_later_do_not_count_for_the_open_round():
    server = make(workers=4)
    server.active = {0, 1}
    server.join(2, 10)
    assert server.shortage() is None
    server.drop(1)
    assert server.shortage() == 1


def test_the_state_of_a_quorum_is_kept():
    server = late_by(5.1)
    push(server, 0, 1.0)
    push(server, 1, 3.0)
    push(server, 0, 1.0)
    tree, tensors = pack(server.state_dict())
    other = make()
    other.load_state_dict(unpack(json.loads(json.dumps(tree)), tensors))
    assert other.quorum.state_dict() == server.quorum.state_dict()
    assert other.clocks == server.clocks


# --- simulated


def late_case(*changes, **options):
    """Three workers, of which one takes three times as long."""
    defaults = {"min_workers": 2, "grace_seconds": 0.01, "sync": "bsp", "slow": {2: 3.0}}
    return case(*changes, **{**defaults, **options})


def test_simulated_a_slow_worker_is_late_and_every_sample_is_counted():
    played = check(late_case())
    assert played.late > 0
    assert played.missed > 0
    assert played.trained + played.missed == played.expected


def test_simulated_equal_workers_are_never_late_even_without_grace():
    played = check(late_case(slow={}, grace_seconds=0.0))
    assert (played.late, played.missed) == (0, 0)


def test_simulated_long_enough_a_grace_leaves_nobody_out():
    assert check(late_case(grace_seconds=60.0)).missed == 0


def test_plans_that_follow_the_machines_see_late_workers_and_make_them_punctual():
    fixed = check(late_case(rounds=2, grace_seconds=0.05))
    moved = check(late_case(rounds=2, grace_seconds=0.05, balance="dynamic"))
    assert moved.missed < 0.5 * fixed.missed


def test_simulated_a_worker_dies_and_comes_back_at_a_barrier():
    played = check(late_case((0.3, 1, False), (0.4, 1, True), min_workers=1, slow={}))
    assert (played.lost_workers, played.joined_workers) == (1, 1)
    assert not played.ended


def test_simulated_fewer_workers_than_rounds_need_end_the_run():
    played = play(late_case((0.3, 1, False), min_workers=3))
    assert played.ended


@pytest.mark.parametrize("push", ["weights", "gradients"])
@pytest.mark.parametrize("workers", [2, 3, 5])  # of three, one of which was lost
@pytest.mark.parametrize("grace_s", [0.01, 60.0])  # over when the run is stopped, or not
def test_resumed_after_a_loss_every_sample_is_trained_on_once_or_counted(grace_s, workers, push):
    resized = 0
    for lost_s, turn in itertools.product((0.05, 0.095, 0.15), range(1, 6)):  # it pushes at 0.09
        options = {"min_workers": 1, "grace_seconds": grace_s, "push": push, "epochs": 3}
        played = late_case((lost_s, 1, False), **options)
        played = check(replace(played, stops=(Stop(turn, workers), Stop(turn + 1, 4))))
        assert (played.lost_workers, played.ended) == (1, False)
        resized += played.resized
    assert resized > 5


def test_what_is_counted_of_late_workers_goes_on_when_others_take_over():
    server = late_by(5.1)
    other = make(workers=2)
    row = MissedRound(2, 0, 0, 200)
    state = server.quorum.state_dict()
    other.restart(Restart(torch.zeros(1), 1, 1, missed=(row,), late_pushes=state["late_pushes"]))
    assert other.quorum.late_pushes == 1
    assert list(other.quorum.missed) == [row]


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(cases("quorum"))
def test_with_a_quorum_every_sample_is_trained_on_once_or_counted(case):
    check_drawn(case)


@slow
@settings(max_examples=400, suppress_health_check=list(HealthCheck))
@given(cases("quorum"))
def test_with_a_quorum_every_sample_is_trained_on_once_or_counted_at_length(case):
    check_drawn(case)


# --- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync": "step", "min_workers": 2}, "min_workers must be unset with sync step, .* got 2"),
        ({"sync": "asp", "min_workers": 2}, "min_workers must be unset with sync asp, .* got 2"),
        ({"min_workers": 2}, "grace_seconds must be given with min_workers, got min_workers 2"),
        ({"grace_seconds": 3}, "min_workers must be given with grace_seconds, got grace_seconds 3"),
        ({"min_workers": 0, "grace_seconds": 3}, "min_workers must be at least 1, got 0"),
        ({"min_workers": 1, "grace_seconds": -1}, "grace_seconds must be at least 0, got -1"),
        ({"min_workers": 1, "grace_seconds": math.inf}, "grace_seconds must be finite, got inf"),
        ({"worker_timeout": math.inf}, "worker_timeout must be finite, got inf"),
    ],
)
def test_a_quorum_that_cannot_be_had_is_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        Config(**settings)


def test_a_grace_that_the_timeout_cuts_short_is_refused_but_where_the_clock_is_virtual():
    config = Config(min_workers=1, grace_seconds=30, worker_timeout=30)
    check_processes(config, SimpleNamespace(num_processes=1))
    several = SimpleNamespace(num_processes=2)
    with pytest.raises(ValueError, match="grace_seconds must be below the worker_timeout of 30 s"):
        check_processes(config, several)
    check_processes(replace(config, grace_seconds=29.0), several)


def test_a_run_that_too_few_workers_are_left_of_says_what_has_happened():
    server = make(min_workers=3, workers=4)
    assert too_few_without(server, 2) is None
    server.drop(2)
    said = "2 of 4 workers are left, fewer than --min-workers 3"
    assert too_few_without(server, 3) == said


def test_fewer_workers_at_the_start_than_a_round_needs_is_a_bad_case():
    with pytest.raises(
        (ValueError, SyncError), match="min_workers must be at most the 1 worker of the start"
    ):
        play(late_case(absent=(0, 1)))
