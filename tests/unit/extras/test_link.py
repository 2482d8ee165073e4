import pytest

from dbsl.extras.emulate import Link

GB = 1e9 / 8  # bytes a second of 1 Gbit/s


def test_a_ring_sends_every_part_of_the_vector_twice_less_two():
    link = Link(1.0, ms=2.0)
    assert link.message_s(GB) == pytest.approx(1.002)
    assert link.all_reduce_s(GB, 4) == pytest.approx(6 * (0.25 + 0.002))
    assert link.all_reduce_s(GB, 1) == 0.0


def test_gradients_travel_behind_the_stated_share_of_computing():
    link = Link(1.0, overlap=0.5)
    assert link.joint_step_s(GB, 2, compute_s=0.6) == pytest.approx(1.0 - 0.3)
    assert link.joint_step_s(GB, 2, compute_s=4.0) == 0.0
    assert Link(1.0).joint_step_s(GB, 2, compute_s=4.0) == pytest.approx(1.0)


def test_a_barrier_is_a_sum_and_from_a_server_a_broadcast_too():
    link = Link(10.0)
    assert link.barrier_s(GB, 2, at_server=False) == pytest.approx(0.1)
    assert link.barrier_s(GB, 2, at_server=True) == pytest.approx(0.2)
    assert link.barrier_s(GB, 1, at_server=True) == 0.0
    assert link.round_trip_s(GB) == pytest.approx(0.2)
