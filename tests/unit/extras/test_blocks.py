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


def test_samplers_draw_from_blocks():
    blocks = blocks_of([3, 9, 5, 8], 12)
    order = blocks.order(generator(4, "shuffle", 3))
    joint = StepSampler(25, 7, seed=4, blocks=blocks)
    steps = [joint.step(3, n, (7,)) for n in range(joint.steps_per_epoch)]
    met = np.concatenate([part.indices for step in steps for part in step.parts])
    np.testing.assert_array_equal(met, order)
    rounds = EpochSampler([10, 15], seed=4, blocks=blocks)
    np.testing.assert_array_equal(np.concatenate([rounds.indices(w, 3, 0) for w in (0, 1)]), order)


def test_batch_norms_statistics_are_of_few_groups():
    blocks = blocks_of([100] * 300, 5000)
    batches = statistics_batches(30_000, 256, seed=0, blocks=blocks)
    assert len({sample // 100 for batch in batches for sample in batch}) <= 2 * 51
