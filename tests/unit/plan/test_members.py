"""Workers that are lost and come back: who has which samples of which epoch, and from when on."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from dbsl.cluster.serving import ServedCluster
from dbsl.cluster.wire import Answer, encode
from dbsl.extras.emulate import Emulation
from dbsl.plan.types import TimeModel, Turn
from experiments.benchmarks.coverage.cases import Case, Loss, Stop
from experiments.benchmarks.coverage.check import check
from experiments.benchmarks.coverage.prepare import prepare


def case(*losses, workers=3, rounds=1, epochs=8, sync="asp", slow=None, **options):
    options |= {"sync": sync, "workers": workers, "rounds_per_epoch": rounds, "epochs": epochs}
    options = {"push": "weights", "small_workers": 0, "staleness": 2, **options}
    options |= {"resolutions": (8,), "min_batch_size": 1}
    emulation = Emulation(slowdown=slow or {}, disturbance=None, noise=0.0, seed=0)
    model = TimeModel(0.001, 0.01)
    losses = tuple(Loss(*loss) for loss in losses)
    return Case(options, 90, [model] * workers, [5] * workers, 1, emulation, losses)


def know(planner, *clocks, inside=(), lost=()):
    """Have workers at these clocks; those inside have begun their next round."""
    members = planner.members
    members.clocks = [*clocks]
    members.active = set(range(len(clocks))) - set(lost)
    members.inside = set(inside)


def leave_out(planner, *workers):
    """Plan without workers that are not there when the run begins."""
    for worker in workers:
        assert planner.drop(worker, 8) == 0
        planner.members.leave(worker)


def samples_of(run, epoch):
    """Return the samples of each worker in an epoch."""
    return [row.samples for row in run.plans.planner.decide(epoch).workers]


def test_a_worker_that_was_lost_has_a_share_again_from_the_first_epoch_that_nobody_has_begun():
    run = prepare(case())
    planner = run.plans.planner
    know(planner, 1, 2, 1, inside=(0, 1, 2))
    assert planner.drop(2, 8) == 60  # of epochs 2 and 3, begun
    assert samples_of(run, 3) == [45, 45, 0]
    know(planner, 2, 3, 1, inside=(0, 1), lost=(2,))
    assert planner.bring_back(8) == 4
    assert [samples_of(run, epoch) for epoch in (2, 3, 4)] == [[30] * 3, [45, 45, 0], [30] * 3]


def test_a_worker_that_is_back_and_has_begun_nothing_is_lost_without_a_sample():
    run = prepare(case(rounds=3))
    planner = run.plans.planner
    leave_out(planner, 2)
    know(planner, 1, 1, 0, inside=(1,), lost=(2,))
    assert planner.bring_back(24) == 1
    know(planner, 1, 2, 3, inside=(1,))
    assert planner.drop(2, 24) == 0
    assert samples_of(run, 1) == [45, 45, 0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_worker_lost_while_another_waits_for_it_costs_the_rounds_that_were_begun_and_no_more(
    staleness,
):
    options = {"sync": "ssp", "staleness": staleness, "workers": 2, "epochs": 4}
    played = check(case((0.45, 1), slow={1: 4}, **options))
    assert (played.lost_workers, played.lost) == (1, 45 * (1 + staleness))


@pytest.mark.parametrize("lost_s", [0.05, 0.1, 0.15, 0.2])
@pytest.mark.parametrize("workers", [2, 4])
def test_what_other_workers_left_of_an_epoch_is_trained_on_once_after_a_loss_and_a_resume(
    lost_s, workers
):
    """It is lost in the epoch that others had begun, or later; then the run stops again."""
    leads = case((lost_s, 1), epochs=4, rounds=3)
    played = check(replace(leads, stops=(Stop(3, workers), Stop(8))))
    assert (played.stops, played.resized, played.lost_workers) == (2, 1, 1)


def test_a_loss_in_what_other_workers_left_of_an_epoch_leaves_its_first_rounds_alone():
    run = prepare(case(rounds=3))
    planner = run.plans.planner
    planner.plans.set(1, 3, replace(planner.plans.first[8], first_round=1, taken=30))
    know(planner, 5, 4, 4, inside=(0, 1))
    assert planner.drop(2, 24) == 20  # of the rounds that were begun: both that are left
    planner.members.leave(2)
    assert [plan.taken for plan in planner.plans.of_epoch(1)] == [30]
    assert samples_of(run, 2) == [45, 45, 0]


def test_a_served_worker_asks_for_the_plan_of_an_epoch_that_a_loss_may_change():
    run = prepare(case())
    leave_out(run.plans.planner, 2)
    now = replace(run.plans.planner.plans.last[8], first_round=1, taken=30)
    cluster = ServedCluster.__new__(ServedCluster)
    cluster._link = SimpleNamespace(ask=lambda kind: (Answer.GOES_ON, encode(now)))
    cluster._waited_s = 0.0
    assert cluster.plan(Turn((1,), 0, 0)) == now
