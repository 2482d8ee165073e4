"""Plans that follow the machines: right after two sizes, steady under noise, exact in coverage."""

import json
from dataclasses import replace

import numpy as np
import pytest

from dbsl.checkpoint.disk import pack, unpack
from dbsl.config.fields import word_of
from dbsl.config.settings import RunConfig
from dbsl.plan.batches import TurnSampler
from dbsl.plan.follow import Planner
from dbsl.plan.machines import SpeedEstimate, WorkerProfiles
from dbsl.plan.members import Members
from dbsl.plan.spec import make_plan, specs_of
from dbsl.plan.types import RoundReport, TimeModel

SAMPLES = 6400
PLANNED = TimeModel(0.001, 0.02)
# Speeds 1, 2, 4 with the same fixed cost of a step.
TRUE = [TimeModel(PLANNED.slope / speed, PLANNED.intercept) for speed in (1, 2, 4)]


def planner_of(config, samples, large):
    """Return the planner of a run at 8 px whose workers are as planned."""
    workers, rounds = config.workers, config.rounds_per_epoch
    models = {8: TimeModel.of(PLANNED, workers)}
    known = WorkerProfiles(models, {8: [large] * workers}, measured=False)
    specs = specs_of(config, known, samples, 1)
    how = {"balance": word_of(config.balance), "every": config.balance_every or rounds}
    how |= {"members": Members(workers, rounds), "sampler": TurnSampler(config, samples, rounds, 1)}
    first = {8: make_plan(specs[8], models[8])}
    return Planner(first, lambda epoch: 8, models, specs=specs, **how)


@pytest.mark.parametrize(("workers", "goal"), [(4, {"time_ratio": 1.5}), (22, {})])
def test_those_that_are_left_have_a_plan_where_they_cannot_reach_the_goal(workers, goal):
    config = RunConfig(workers=workers, small_workers=2, resolutions=(8,), **goal)
    planner = planner_of(config, 50_000, 128)
    assert planner.drop(0, 10) == 0
    plan = planner.decide(0, 0)
    assert plan.workers[0].samples == 0
    assert sum(worker.samples for worker in plan.workers) == 50_000
    assert [worker.local_batch_size for worker in plan.workers if worker.small] == [16]


def joint_planner(balance):
    steps = {"sync": "step", "global_batch_size": 192, "balance": balance}
    config = RunConfig(workers=3, resolutions=(8,), min_batch_size=1, **steps)
    return planner_of(config, SAMPLES, 64)


def measure(planner, epoch, noise=lambda: 1.0, true=TRUE, round_=0):
    plan = planner.decide(epoch, round_)
    for worker, (mine, model) in enumerate(zip(plan.workers, true, strict=True)):
        time_s = model.time(mine.samples, mine.steps) * noise()
        counts = (mine.local_batch_size, mine.samples, mine.steps, time_s, 0.5, 1.0)
        planner.observe(RoundReport(worker, epoch, round_, 8, *counts, compute_time_s=time_s))
    return plan


def imbalance(plan, true=TRUE):
    """Slowest over mean step time, with the workers' true speeds."""
    pairs = zip(true, plan.workers, strict=True)
    times = [model.slope * w.local_batch_size + model.intercept for model, w in pairs]
    return max(times) / np.mean(times)


def test_what_is_decided_can_be_asked_without_deciding_more():
    planner = joint_planner("dynamic:1")
    assert planner.at(0, 0) is None
    first = measure(planner, 0)
    before = planner.state_dict()
    assert planner.at(0, 0) is first
    assert planner.at(1, 0) is None
    assert planner.state_dict() == before
    second = measure(planner, 1)
    assert planner.at(1, 0) is second is not first
    assert joint_planner("none").at(3, 0).workers == first.workers


@pytest.mark.parametrize(("least", "sizes"), [(2, [61, 3]), (16, [48, 16])])
def test_the_first_plan_of_joint_steps_keeps_the_smallest_batch(least, sizes):
    steps = {"sync": "step", "global_batch_size": 64, "min_batch_size": least}
    config = RunConfig(workers=2, resolutions=(8,), **steps)
    models = {8: TimeModel(np.array([1e-3, 2e-2]), np.full(2, 1e-2), np.zeros(2))}
    known = WorkerProfiles(models, {8: [64] * 2}, measured=False)
    plan = make_plan(specs_of(config, known, SAMPLES, 1)[8], models[8])
    assert [worker.local_batch_size for worker in plan.workers] == sizes


def test_two_epochs_without_noise_balance_unequal_workers():
    planner = joint_planner("dynamic:1")
    assert imbalance(measure(planner, 0)) > 1.3  # equal parts
    measure(planner, 1)
    plan = measure(planner, 2)
    assert imbalance(plan) < 1.03
    assert sum(w.local_batch_size for w in plan.workers) == 192
    for epoch in range(3, 12):
        assert measure(planner, epoch) is plan or imbalance(planner.at(epoch)) < 1.03


def test_noise_neither_shakes_the_split_nor_keeps_it_wrong():
    generator = np.random.default_rng(0)
    planner = joint_planner("dynamic:1")
    plans = [
        measure(planner, epoch, lambda: generator.lognormal(-0.005, 0.0998)) for epoch in range(50)
    ]
    assert planner.changes <= 8
    assert np.mean([imbalance(plan) for plan in plans[5:]]) < 1.05


def test_parts_by_the_published_rule_are_those_of_the_paper():
    planner = joint_planner("dbs:1")
    measure(planner, 0)
    speeds = 1 / np.array([model.time(64) for model in TRUE])  # in equal parts
    sizes = [worker.local_batch_size for worker in planner.decide(1).workers]
    np.testing.assert_allclose(sizes, 192 * speeds / speeds.sum(), atol=1)


def test_the_published_rule_keeps_the_sum_and_the_parts_above_zero():
    generator = np.random.default_rng(1)
    planner = joint_planner("dbs:1")
    slow = [TimeModel(0.4, 0.02), *TRUE[1:]]  # 400 times slower: its quota rounds to 0
    for epoch in range(12):
        plan = measure(planner, epoch, lambda: generator.uniform(0.8, 1.2), slow)
        sizes = [w.local_batch_size for w in plan.workers]
        assert sum(sizes) == 192  # the published code drifts
        assert min(sizes) >= 1
        assert len({w.steps for w in plan.workers}) == 1  # or the all-reduce would hang
    assert sizes[0] == 1


def test_a_machine_that_changes_is_believed_at_once_and_noise_is_not():
    estimate = SpeedEstimate()
    generator = np.random.default_rng(2)
    for _ in range(30):
        estimate.observe(PLANNED, 64, (0.064 + 0.02) * generator.normal(1, 0.1))
    assert estimate.model(PLANNED).time(64, 1) == pytest.approx(0.084, rel=0.08)
    estimate.observe(PLANNED, 64, 3 * 0.084)  # three times as slow from one epoch to the next
    assert estimate.model(PLANNED).time(64, 1) == pytest.approx(3 * 0.084, rel=0.1)


def test_what_is_learnt_at_one_resolution_holds_at_another():
    estimate, higher = SpeedEstimate(), TimeModel(0.004, 0.03)
    for size in (64, 20, 64, 20):
        estimate.observe(PLANNED, size, 2 * PLANNED.time(size))
    for size in (10, 50, 100):
        assert estimate.model(higher).time(size) == pytest.approx(2 * higher.time(size), rel=0.05)


def test_what_a_slow_host_adds_to_the_floor_is_learnt_and_the_slope_stays():
    planned, estimate = TimeModel(2e-5, 0.0, floor=5e-3), SpeedEstimate()
    for _ in range(3):
        estimate.observe(planned, 100, 2 * 5e-3)
        estimate.observe(planned, 1000, 2e-2)
    found = estimate.model(planned)
    assert (found.floor, found.slope) == pytest.approx((1e-2, 2e-5), rel=0.05)


def test_a_gain_below_the_dead_band_changes_nothing_but_where_measurements_have_doubled():
    planner = joint_planner("dynamic:1")
    nearly = [TimeModel(PLANNED.slope * f, PLANNED.intercept) for f in (1.0, 1.04, 0.97)]
    plans = [measure(planner, epoch, true=nearly) for epoch in range(12)]
    changed = [epoch for epoch in range(1, 12) if plans[epoch] is not plans[epoch - 1]]
    assert changed == [2]  # after 4 and 8 measurements there is nothing left to gain


def rounds_planner(balance, rounds, every):
    options = {"rounds_per_epoch": rounds, "balance": f"{balance}:{every}"}
    config = RunConfig(workers=3, small_workers=1, resolutions=(8,), min_batch_size=2, **options)
    return planner_of(config, 601, 20)


def slower(factor, worker=2):
    """Return the workers' true models where one is so many times as slow as planned."""
    slow = TimeModel(factor * PLANNED.slope, factor * PLANNED.intercept)
    return [slow if number == worker else PLANNED for number in range(3)]


@pytest.mark.parametrize("balance", ["dynamic", "dbs"])
@pytest.mark.parametrize("every", [1, 4])
def test_a_worker_that_is_behind_keeps_the_plan_that_those_ahead_began_with(balance, every):
    planner = rounds_planner(balance, 4, every)
    began = [planner.decide(0, round_) for round_ in range(4)]  # the leader's rounds
    measure(planner, 0, true=slower(4))
    assert planner.decide(1) != began[0]  # its next epoch
    for epoch in range(1, 40):
        planner.decide(epoch)
    assert [planner.at(0, round_) for round_ in range(4)] == began


def test_after_a_spell_of_slowness_the_published_rule_gives_batches_their_planned_sizes_back():
    planner = rounds_planner("dbs", 4, 1)
    planned = planner.decide(0)
    slow = slower(40, worker=0)
    for true in (slow, [PLANNED] * 3):
        for epoch in range(5 * (true is not slow), 5 + 5 * (true is not slow)):
            for round_ in range(4):
                plan = measure(planner, epoch, true=true, round_=round_)
        sizes = [(w.local_batch_size, w.samples) for w in plan.workers]
        for worker, (size, samples) in zip(planned.workers, sizes, strict=True):
            assert size == min(worker.local_batch_size, samples // 4)
        assert (sizes[0][0] < planned.workers[0].local_batch_size) == (true is slow)


@pytest.mark.parametrize("balance", ["dynamic", "dbs"])
def test_merge_weights_follow_the_shares_that_a_slow_worker_leaves(balance):
    planner = rounds_planner(balance, 2, 1)
    slow = slower(5)
    for epoch in range(3):
        plan = measure(planner, epoch, true=slow)
    most = max(w.samples for w in plan.workers)
    assert plan.workers[2].samples < most / 3
    for worker in plan.workers:
        assert worker.merge_weight == pytest.approx(worker.samples / most)


def test_dual_batch_keeps_its_balance_when_a_worker_slows_down():
    planner = rounds_planner("dynamic", 1, 1)
    slowed = slower(2)
    for epoch in range(3):
        measure(planner, epoch, true=slowed)
    plan = planner.decide(3)
    times = [m.time(w.samples, w.steps) for m, w in zip(slowed, plan.workers, strict=True)]
    assert max(times) / np.mean(times) < 1.1
    assert plan.workers[0].local_batch_size < plan.workers[1].local_batch_size == 20


def test_a_planner_goes_on_from_its_state_as_if_nothing_had_been():
    rng = np.random.default_rng(0)
    noise = rng.lognormal(0.0, 0.05, (12, 3)).tolist()
    one = joint_planner("dynamic:1")
    for epoch in range(6):
        values = iter(noise[epoch])
        measure(one, epoch, lambda values=values: next(values))
    two = joint_planner("dynamic:1")
    tree, tensors = pack(one.state_dict())
    two.load_state_dict(unpack(json.loads(json.dumps(tree)), tensors))
    for epoch in range(6, 12):
        for planner in (one, two):
            values = iter(noise[epoch])
            measure(planner, epoch, lambda values=values: next(values))
    assert one.plans.last == two.plans.last
    assert [*one.estimates(8)] == [*two.estimates(8)]
    assert one.changes > two.changes >= 0


def test_a_round_without_samples_teaches_nothing():
    planner = joint_planner("dynamic:1")
    before = [*planner.estimates(8)]
    counts = (8, 0, 3, 1e-3, 0.5, 1.0)  # its process took part in steps of which it had nothing
    planner.observe(RoundReport(0, 0, 0, 8, *counts, compute_time_s=1e-3))
    assert [*planner.estimates(8)] == before


@pytest.mark.parametrize("least", [2, 8])
def test_a_slow_workers_round_has_the_smallest_batch_at_least(least):
    config = RunConfig(
        workers=3, resolutions=(8,), rounds_per_epoch=4, balance="dynamic", small_workers=0
    )
    planner = planner_of(replace(config, min_batch_size=least), SAMPLES, 20)
    for epoch in range(4):
        plan = measure(planner, epoch, true=[PLANNED, PLANNED, TimeModel(1.0, 20.0)])
    assert plan.workers[2].local_batch_size == least
    assert plan.workers[2].samples >= 4 * least
