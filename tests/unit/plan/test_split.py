"""Global batches: sums exact, bounds kept, every sample once, and the split that ends soonest."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dbsl.config.settings import RunConfig
from dbsl.plan.machines import (
    WorkerProfiles,
    balanced_sizes,
    bounded_split,
    split_batch,
)
from dbsl.plan.sampler import StepSampler, whole_steps
from dbsl.plan.solve import PlanRules, plan_dual_batch, plan_steps
from dbsl.plan.spec import make_plan, resize_plan, specs_of
from dbsl.plan.types import TimeModel

sizes_lists = st.lists(st.integers(1, 40), min_size=1, max_size=8)


@given(sizes_lists, sizes_lists, st.integers(0, 400), st.integers(0, 9), st.booleans())
def test_each_sample_once_an_epoch_whatever_the_sizes_and_their_changes(
    sizes, others, extra, seed, drop_last
):
    samples = sum(sizes) + extra
    sampler = StepSampler(samples, sum(sizes), seed=seed, drop_last=drop_last)
    # From the middle of the epoch on, the same global batch is split otherwise.
    changed = bounded_split(sum(sizes), np.resize(others, len(sizes)), 1, sum(sizes))
    seen, totals = [], []
    for number in range(sampler.steps_per_epoch):
        now = sizes if number < sampler.steps_per_epoch // 2 else changed
        step = sampler.step(3, number, now)
        total = sum(len(part.indices) for part in step.parts)
        assert sum(part.weight for part in step.parts) == pytest.approx(1.0)
        for part, size in zip(step.parts, now, strict=True):
            assert len(part.indices) <= size
            assert part.weight == pytest.approx(len(part.indices) / total)
        assert step.odd == (not all(len(part.indices) for part in step.parts))
        totals.append(total)
        seen += [part.indices for part in step.parts]
    seen = np.sort(np.concatenate(seen))
    kept = samples - samples % sum(sizes) if drop_last else samples
    assert len(seen) == kept
    assert len(np.unique(seen)) == kept
    assert max(totals) - min(totals) <= (not drop_last)  # no step of a few samples that are left


def test_a_step_of_one_sample_joins_another_where_it_cannot_stand_alone():
    alone = StepSampler(3, 2)
    assert [len(alone.step(0, number, (2,)).parts[0].indices) for number in (0, 1)] == [1, 2]
    sampler = StepSampler(3, 2, least=2)
    assert sampler.steps_per_epoch == 1
    assert sorted(sampler.step(0, 0, (2,)).parts[0].indices) == [0, 1, 2]
    assert plan_steps(3, (2,), MODELS[:1], PlanRules(least=2)).samples == 3


def test_the_global_batches_do_not_depend_on_the_split():
    sampler = StepSampler(103, 20, seed=4)
    for number in range(sampler.steps_per_epoch):
        one, two = (sampler.step(1, number, sizes) for sizes in ((20,), (3, 16, 1)))
        assert np.concatenate([p.indices for p in two.parts]).tolist() == list(one.parts[0].indices)
        assert one.progress == two.progress


def test_a_process_has_the_parts_of_its_own_workers_alone():
    sampler, sizes = StepSampler(103, 20, seed=4), (9, 7, 4)
    for number in range(sampler.steps_per_epoch):
        whole, own = sampler.step(1, number, sizes), sampler.step(1, number, sizes, (1,))
        (part,), theirs = own.parts, whole.parts[1]
        assert (part.worker, part.weight) == (theirs.worker, theirs.weight)
        assert part.indices.tolist() == theirs.indices.tolist()
        assert (own.progress, own.odd) == (whole.progress, whole.odd)


@given(sizes_lists, st.data(), st.integers(1, 3))
def test_a_short_batch_leaves_parts_empty_or_large_enough(sizes, data, least):
    samples = data.draw(st.integers(1, sum(sizes)))
    parts = split_batch(samples, sizes, least)
    assert parts.sum() == samples
    # Above its size a part is by less than another part would need at least.
    assert (parts - sizes).clip(min=0).sum() < least
    small = (parts > 0) & (parts < np.minimum(least, sizes))
    assert not small.any() or samples < least
    assert split_batch(3, [2, 2], 2).tolist() == [3, 0]
    assert split_batch(sum(sizes) + 1, sizes, least).max() <= max(sizes) + 1


def test_no_process_takes_alone_what_an_epoch_has_left():
    assert split_batch(15, [1] * 8).tolist() == [2] * 7 + [1]
    begin, end = whole_steps(1007, 8, fewest=8)[-2:].tolist()
    assert max(split_batch(end - begin, [1] * 8)) == 2


@given(
    st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.integers(0, 300), st.integers(0, 5)
)
def test_bounded_parts_sum_exactly_and_keep_their_bounds(weights, extra, low):
    lowest = np.full(len(weights), low)
    highest = lowest + np.arange(len(weights)) * 7 + extra
    total = int(lowest.sum() + extra)
    parts = bounded_split(total, np.array(weights), lowest, highest)
    assert parts.sum() == total
    assert (parts >= lowest).all()
    assert (parts <= highest).all()


def test_a_batch_that_fills_every_worker_to_its_limit_is_split_so():
    models = [TimeModel(0.0625, 0.0), TimeModel(0.021561237374960213, 0.0)]
    assert balanced_sizes(58, TimeModel.of(models, 2), np.array([6, 52])).tolist() == [6, 52]


SLOPE_INTERCEPT_LIMIT = st.tuples(st.floats(1e-4, 1e-1), st.floats(0, 0.2), st.integers(1, 60))


@given(st.lists(SLOPE_INTERCEPT_LIMIT, min_size=2, max_size=4), st.data())
def test_no_exchange_of_one_sample_makes_a_balanced_step_faster(workers, data):
    model = TimeModel.of([TimeModel(a, b) for a, b, _ in workers], len(workers))
    limits = np.array([limit for *_, limit in workers])
    total = data.draw(st.integers(len(workers), int(limits.sum())))
    sizes = balanced_sizes(total, model, limits)
    assert sizes.sum() == total
    assert ((sizes >= 1) & (sizes <= limits)).all()
    slowest = model.time(sizes).max()
    for giver in range(len(workers)):
        for taker in range(len(workers)):
            moved = sizes.copy()
            moved[giver] -= 1
            moved[taker] += 1
            if giver != taker and moved[giver] >= 1 and moved[taker] <= limits[taker]:
                assert model.time(moved).max() >= slowest * (1 - 1e-9)


@pytest.mark.parametrize("size", [17, 1])
def test_a_global_batch_that_nobody_can_hold_is_refused(size):
    with pytest.raises(ValueError, match=rf"global_batch_size must be in \[2, 16\].*, got {size}$"):
        balanced_sizes(size, TimeModel.of(TimeModel(0.001, 0.01), 2), np.full(2, 8))


MODELS = [TimeModel(0.001, 0.01)] * 3


def test_a_plan_of_joint_steps_counts_what_the_sampler_gives():
    plan = plan_steps(103, (12, 6, 2), MODELS)
    sampler = StepSampler(103, 20)
    steps = [sampler.step(0, number, (12, 6, 2)) for number in range(6)]
    for worker, mine in enumerate(plan.workers):
        assert mine.samples == sum(len(step.parts[worker].indices) for step in steps)
        assert mine.steps == 6
    assert [w.merge_weight for w in plan.workers] == [0.6, 0.3, 0.1]
    assert plan.global_batch_size == 20
    assert plan_steps(103, (12, 6, 2), MODELS, PlanRules(drop_last=True)).samples == 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"local_batch_sizes": (40, 40, 40)}, "sum to at most the 103 training samples, got 120"),
        ({"global_batch_size": 24, "min_batch_size": 9}, "min_batch_size must be at most 8, 24 s"),
        ({"global_batch_size": 104}, "must be at most the 103 training samples, got 104"),
    ],
)
def test_sizes_that_make_no_step_are_refused(settings, message):
    config = RunConfig(workers=3, resolutions=(8,), sync="step", **settings)
    known = WorkerProfiles({}, {8: [8] * 3}, measured=False)
    with pytest.raises(ValueError, match=message):
        specs_of(config, known, 103, 1)
    with pytest.raises(ValueError, match="local_batch_sizes must be at least 1, got 0"):
        plan_steps(103, (4, 0, 4), MODELS)


@given(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), st.integers(1, 3))
def test_other_proportions_never_drift_or_empty_a_part(proportions, rounds):
    limits = np.full(3, 20)
    models, active = TimeModel.of(MODELS, 3), range(3)
    known = WorkerProfiles({8: models}, {8: [8] * 3}, False, {8: limits})
    options = {"workers": 3, "resolutions": (8,), "min_batch_size": 1, "rounds_per_epoch": rounds}

    def resized(plan, **more):
        spec = specs_of(RunConfig(**options, **more), known, 103, least=1)[8]
        return resize_plan(spec, plan, models, np.array(proportions), active)

    joint = plan_steps(103, (12, 6, 2), MODELS)
    moved = resized(joint, sync="step", global_batch_size=20)
    assert sum(w.local_batch_size for w in moved.workers) == 20
    assert min(w.local_batch_size for w in moved.workers) >= 1
    of_rounds = plan_dual_batch(103, 3, 1, 8, MODELS[0], PlanRules(rounds=rounds))
    moved = resized(of_rounds)
    assert sum(w.samples for w in moved.workers) == 103
    assert all(w.samples >= rounds >= 1 and w.local_batch_size >= 1 for w in moved.workers)


def test_no_part_of_a_new_plan_is_above_what_its_worker_can_hold():
    models, limits = TimeModel.of(TimeModel(0.001, 0.01), 4), np.array([4, 60, 60, 60])
    known = WorkerProfiles({8: models}, {8: [60] * 4}, False, {8: limits})
    how = {"workers": 4, "resolutions": (8,), "sync": "step", "global_batch_size": 64}
    spec = specs_of(RunConfig(**how, min_batch_size=8), known, 1000, least=1)[8]
    plan = make_plan(spec, models)
    assert [w.local_batch_size for w in plan.workers] == [4, 20, 20, 20]


def test_one_model_of_all_workers_gives_each_its_times_and_refuses_what_one_of_them_must_not_have():
    each = [TimeModel(0.001, 0.01), TimeModel(0.002, -0.01, 0.05), TimeModel(0.004, 0)]
    every, sizes = TimeModel.of(each, 3), np.array([1, 20, 300])
    assert [*every] == each
    pairs = list(zip(each, sizes.tolist(), strict=True))
    assert every.time(sizes, 2).tolist() == [m.time(b, 2) for m, b in pairs]
    assert every.sample_time(sizes).tolist() == [m.sample_time(b) for m, b in pairs]
    assert [*every[[2, 0]]] == [each[2], each[0]]
    with pytest.raises(ValueError, match="slope must be above 0, got -1"):
        TimeModel(np.array([1.0, -1.0]), np.zeros(2))
