import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dbsl.base.seeds import generator
from dbsl.extras.average import statistics_batches
from dbsl.extras.streaming import Blocks
from dbsl.plan.sampler import EpochSampler, StepSampler

GROUPS = st.lists(st.integers(1, 9), min_size=1, max_size=30)


def blocks_of(sizes, block):
    return Blocks(np.array(sizes), block)


@given(GROUPS, st.integers(1, 80), st.integers(0, 99))
def test_an_order_in_blocks_has_each_sample_once_and_a_group_within_one_block(sizes, block, seed):
    blocks, rng = blocks_of(sizes, block), np.random.default_rng(seed)
    order = blocks.order(np.random.default_rng(seed))
    assert sorted(order) == list(range(sum(sizes)))
    groups, cut = blocks._cut(rng)
    assert sorted(groups) == list(range(len(sizes)))
    assert cut.max() < blocks.count
    begin = 0
    for number in range(blocks.count):
        of_block = groups[cut == number]
        end = begin + blocks.sizes[of_block].sum()
        held = np.repeat(np.arange(len(sizes)), sizes)[order[begin:end]]
        assert set(held) == set(of_block)
        begin = end


@given(
    GROUPS,
    st.integers(1, 40),
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(0, 9),
)
def test_uneven_workers_cover_blocks_once_also_with_other_shares_in_the_middle(
    sizes, block, parts, rounds, seed
):
    samples = sum(sizes)
    shares = np.maximum(np.array(parts) * samples // sum(parts), rounds)
    shares[-1] += samples - shares.sum()
    if shares.min() < rounds:
        return
    blocks, whole = blocks_of(sizes, block), {"seed": seed, "blocks": blocks_of(sizes, block)}
    sampler = EpochSampler(shares, rounds=rounds, seed=seed, blocks=blocks)
    workers, stop = range(len(shares)), rounds // 2
    seen = [sampler.indices(w, 3, r) for r in range(stop) for w in workers]
    start = sampler.start_of(stop)
    left = samples - start
    rest = EpochSampler([left], rounds=1, first_round=stop, start=start, **whole)
    seen.append(rest.indices(0, 3, stop))
    assert sorted(np.concatenate(seen)) == list(range(samples))
    size = min(7, samples)
    joint = StepSampler(samples, size, **whole)
    steps = [joint.step(3, n, (size,)) for n in range(joint.steps_per_epoch)]
    met = np.concatenate([part.indices for step in steps for part in step.parts])
    np.testing.assert_array_equal(met, blocks.order(generator(seed, "shuffle", 3)))


def test_batch_norms_statistics_are_of_few_groups():
    blocks = blocks_of([100] * 300, 5000)
    batches = statistics_batches(30_000, 256, seed=0, blocks=blocks)
    assert len({sample // 100 for batch in batches for sample in batch}) <= 2 * 51
