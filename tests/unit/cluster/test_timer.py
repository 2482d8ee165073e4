"""A worker's time is what it computes; a slowed worker really takes longer."""

import pytest
import torch

from dbsl.base import machine
from dbsl.cluster import steps as module
from dbsl.cluster.steps import ComputeTimer
from dbsl.extras.emulate import Emulation

CPU = torch.device("cpu")


class Time:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def time(monkeypatch):
    monkeypatch.setattr(module, "time", passing := Time())
    monkeypatch.setattr(machine, "time", passing)
    return passing


def test_what_is_computed_counts_up_to_the_last_mark_and_reading_starts_at_0(time):
    timer = ComputeTimer(CPU)
    for marked in (False, True):
        with timer.running((0, 1)):  # workers share what one process does for all
            time.sleep(2.0)
            if marked:
                timer.mark()
                time.sleep(20.0)  # the exchange of gradients
        time.sleep(5.0)  # waiting for others
    assert timer.take_seconds(0) == timer.take_seconds(1) == 4.0
    assert timer.take_seconds(0) == 0.0


@pytest.mark.parametrize("marked", [False, True])
def test_a_slowed_worker_takes_as_much_longer_as_it_should(time, marked):
    timer = ComputeTimer(CPU, Emulation({1: 3.0}))
    for worker, expected in enumerate((3.0, 9.0)):
        began = time.now
        with timer.running((worker,)):
            time.sleep(3.0)
            if marked:
                timer.mark()
        assert timer.take_seconds(worker) == expected
        assert time.now - began == expected  # the process really waits
