import time

import pytest
import torch

from dbsl.cluster.clock import ComputeClock
from dbsl.plan.emulate import Emulation

CPU = torch.device("cpu")


def test_only_what_is_computed_counts_and_reading_starts_anew():
    clock = ComputeClock(CPU)
    for _ in range(2):
        with clock.running((0,)):
            time.sleep(0.02)
        time.sleep(0.05)  # waiting for others
    assert 0.04 <= clock.seconds(0) < 0.08
    assert clock.seconds(0) == 0.0


def test_what_follows_the_mark_is_waiting():
    clock = ComputeClock(CPU)
    with clock.running((0,)):
        clock.mark(last=False)
        time.sleep(0.02)
        clock.mark(last=True)
        time.sleep(0.2)  # the exchange of gradients
    assert 0.02 <= clock.seconds(0) < 0.15


def test_several_workers_share_what_one_process_does_for_all():
    clock = ComputeClock(CPU)
    with clock.running((0, 1)):
        time.sleep(0.01)
    assert clock.seconds(0) == clock.seconds(1) >= 0.01


@pytest.mark.parametrize("marked", [False, True])
def test_a_slowed_worker_takes_as_much_longer_as_it_should(marked):
    clock = ComputeClock(CPU, Emulation({1: 3.0}))
    for worker in (0, 1):
        began = time.perf_counter()
        with clock.running((worker,)):
            time.sleep(0.03)
            if marked:
                clock.mark(last=True)
        real_s, counted_s = time.perf_counter() - began, clock.seconds(worker)
        least_s = 0.03 * (3 if worker else 1)
        assert counted_s >= least_s
        assert real_s >= least_s  # the process really waits
