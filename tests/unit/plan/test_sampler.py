import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dbsl.plan.sampler
from dbsl.config.settings import RunConfig
from dbsl.plan.batches import TurnSampler
from dbsl.plan.machines import WorkerProfiles
from dbsl.plan.sampler import EpochSampler, Part, _permutation, micro_parts
from dbsl.plan.solve import PlanRules, plan_dual_batch, plan_steps
from dbsl.plan.types import TimeModel

MODEL = TimeModel(0.001, 0.01)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 2), st.floats(0.1, 1))
def test_micro_batches_have_every_sample_once_and_weights_that_sum_to_the_parts(
    samples, most, least, weight
):
    part = Part(3, np.arange(samples), weight)
    micro = micro_parts(part, most, least)
    assert np.concatenate([m.indices for m in micro]).tolist() == list(range(samples))
    assert sum(m.weight for m in micro) == pytest.approx(weight)
    assert sum(m.share for m in micro) == pytest.approx(1)
    assert [m.first for m in micro] == [True] + [False] * (len(micro) - 1)
    assert [m.last for m in micro] == [False] * (len(micro) - 1) + [True]
    assert max(len(m.indices) for m in micro) <= max(most, 2 * least - 1)
    assert micro_parts(part, None) == [part]
    assert {m.worker for m in micro} == {3}


@given(st.integers(1, 4), st.none() | st.integers(1, 9), st.booleans())
def test_the_batches_of_all_turns_have_each_sample_of_an_epoch_once(rounds, most, joint):
    micro = most and {8: [most] * 3}
    known = WorkerProfiles({}, {}, measured=False, micro_batch_sizes=micro)
    options = {"sync": "step" if joint else "bsp", "rounds_per_epoch": rounds}
    draws = {"known": known, "resolution_at": lambda epoch: 8}
    config = RunConfig(workers=3, resolutions=(8,), **options)
    sampler = TurnSampler(config, 103, rounds, 1, **draws)
    plan = plan_dual_batch(103, 3, 1, 8, MODEL, PlanRules(rounds=rounds))
    plan = plan_steps(103, (12, 6, 2), [MODEL] * 3) if joint else plan
    turns = [((0, 1, 2), r) for r in range(rounds)]
    turns = turns if joint else [((w,), r) for (ws, r) in turns for w in ws]
    steps = [step for ws, r in turns for step in sampler.batches_of(plan, ws, 5, r)]
    batches = [batch.indices for step in steps for batch in step.batches]
    assert sorted(np.concatenate(batches)) == list(range(103))
    assert max(map(len, batches)) <= (most or 12)
    for step in steps:
        assert sum(batch.weight for batch in step.batches) == pytest.approx(1)
        for part in step.parts:
            own = [batch for batch in step.batches if batch.worker == part.worker]
            assert np.array_equal(np.concatenate([b.indices for b in own]), part.indices)
            assert [b.last for b in own] == [False] * (len(own) - 1) + [True]


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=8),
    st.integers(0, 5),
    st.integers(0, 2**31),
    st.integers(1, 4),
)
def test_uneven_workers_cover_each_sample_once_an_epoch(workers, epoch, seed, rounds):
    shares = [max(share, rounds) for share, _ in workers]
    sampler = EpochSampler(shares, rounds=rounds, seed=seed)
    seen = []
    for worker, (_, local_batch_size) in enumerate(workers):
        of_worker = [
            [step.parts[0].indices for step in sampler.steps(worker, epoch, r, local_batch_size)]
            for r in range(rounds)
        ]
        assert sum(len(b) for batches in of_worker for b in batches) == shares[worker]
        for batches in of_worker:
            sizes = [len(b) for b in batches]
            assert max(sizes) <= local_batch_size
            assert len(sizes) == -(-sum(sizes) // local_batch_size)  # the fewest
            assert max(sizes) - min(sizes) <= 1
        seen += [b for batches in of_worker for b in batches]
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(sum(shares)))


def test_epochs_are_shuffled_anew_and_repeat_with_the_seed():
    def epoch(seed, number):
        return EpochSampler([50, 50], seed=seed).indices(0, number, 0).tolist()

    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


@pytest.mark.parametrize("rest", [0, 1, 5])
def test_a_remainder_of_few_samples_is_covered_once_in_steps_that_have_some(rest):
    shares = [rest // 2, rest - rest // 2]
    sampler = EpochSampler(shares, rounds=3, first_round=1, start=20 - rest)
    steps = [s for w in range(2) for r in (1, 2, 3) for s in sampler.steps(w, 0, r, 8)]
    parts = [part.indices for step in steps for part in step.parts]
    assert all(map(len, parts))
    order = EpochSampler([20]).indices(0, 0, 0)
    assert sorted(np.concatenate([[], *parts])) == sorted(order[20 - rest :])


def test_thousands_of_workers_share_one_permutation():
    _permutation.cache_clear()
    sampler = EpochSampler([10] * 5000)
    assert sum(len(sampler.indices(w, 0, 0)) for w in range(5000)) == 50000
    assert _permutation.cache_info().misses == 1


@given(st.integers(0, 100), st.integers(1, 40), st.integers(1, 7))
def test_evaluation_counts_each_sample_once_over_all_ranks(samples, batch_size, world_size):
    batches = [
        batch
        for rank in range(world_size)
        for batch in dbsl.plan.sampler.evaluation_batches(samples, batch_size, rank, world_size)
    ]
    assert sorted(i for batch in batches for i in batch) == list(range(samples))
    assert all(1 <= len(batch) <= batch_size for batch in batches)


@pytest.mark.parametrize(
    ("given", "device", "largest", "size"),
    [
        (None, "cpu", 5000, 256),
        (None, "cuda", 500, 2000),
        (None, "cuda", 5000, 2000),
        (None, "cuda", 128, 512),
        (None, "cuda", 8, 256),
        (64, "cuda", 500, 64),
    ],
)
def test_evaluation_takes_many_images_at_once_on_cuda_where_training_does(
    given, device, largest, size
):
    assert dbsl.plan.sampler.evaluation_batch_size(given, device, largest) == size
