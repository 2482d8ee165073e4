"""What an epoch takes with equal batches, balanced, and with the fastest worker alone."""

import numpy as np
import pytest

from dbsl.plan.alone import EpochTimes, epoch_times
from dbsl.plan.solve import plan_dual_batch, plan_steps
from dbsl.plan.types import TimeModel

TWO_TO_ONE = TimeModel(np.array([2e-3, 1e-3]), np.array([0.02, 0.01]))


def test_joint_steps_are_predicted_by_hand():
    plan = plan_steps(9600, (48, 48), TWO_TO_ONE)
    found = epoch_times(plan, TWO_TO_ONE, [None, None])
    # 100 steps of 96: 48 each; 29 and 67, which end within a sample of each other; 96 for one.
    assert found.equal_s == pytest.approx(100 * (0.002 * 48 + 0.02))
    assert found.balanced_s == pytest.approx(100 * (0.002 * 29 + 0.02))
    assert found.alone_s == pytest.approx(100 * (0.001 * 96 + 0.01))
    assert found.fastest == 1
    more = epoch_times(plan, TWO_TO_ONE, [None, None], exchange_s=0.1)  # in each of 100 steps
    assert (more.equal_s, more.balanced_s) == (found.equal_s + 10, found.balanced_s + 10)
    assert more.alone_s == found.alone_s


def test_batches_given_by_hand_do_not_move_the_balanced_time():
    by_hand, equal = (plan_steps(9600, sizes, TWO_TO_ONE) for sizes in ((80, 16), (48, 48)))
    assert epoch_times(by_hand, TWO_TO_ONE, [None, None]) == epoch_times(
        equal, TWO_TO_ONE, [None, None]
    )


def test_a_global_batch_that_does_not_fit_takes_several_passes_by_which_the_fastest_is_chosen():
    plan = plan_steps(9600, (48, 48), TWO_TO_ONE)
    found = epoch_times(plan, TWO_TO_ONE, [96, 60])
    assert found.alone_s == pytest.approx(100 * (0.001 * 96 + 2 * 0.01))
    assert found.balanced_s == pytest.approx(100 * (0.002 * 36 + 0.02))  # 36 and 60
    # 24 passes of 4 cost the faster worker more than the other one's single pass.
    found = epoch_times(plan, TWO_TO_ONE, [96, 4])
    assert (found.fastest, found.alone_s) == (0, pytest.approx(100 * (0.002 * 96 + 0.02)))


def test_rounds_are_predicted_by_hand():
    plan = plan_dual_batch(6000, 2, 0, 50, TWO_TO_ONE)
    # Balanced are 2,000 and 4,000 samples.
    found = epoch_times(plan, TWO_TO_ONE, [50, 50], rounds=4, exchange_s=0.5)
    assert found.equal_s == pytest.approx(60 * (0.002 * 50 + 0.02) + 2)
    assert found.balanced_s == pytest.approx(40 * (0.002 * 50 + 0.02) + 2)
    assert found.alone_s == pytest.approx(120 * (0.001 * 50 + 0.01))


def test_the_best_way_is_named_with_its_gain():
    assert EpochTimes(4.0, 3.0, 2.5, 1).describe() == (
        "an epoch with equal batches 4 s, balanced 3 s, worker 1 alone 2.5 s: "
        "worker 1 alone is best, 1.20 times as fast as balanced"
    )


def test_no_way_is_called_better_than_one_that_takes_as_long():
    assert (
        EpochTimes(2.0, 2.0, 4.0, 0)
        .describe()
        .endswith("equal batches and balanced take the same time")
    )
