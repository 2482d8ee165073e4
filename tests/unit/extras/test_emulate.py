import numpy as np
import pytest

from dbsl.base.errors import SettingError
from dbsl.extras.emulate import Emulation, parse_disturb, parse_slowdown


def test_factors_are_those_given_and_repeat():
    emulation = Emulation(parse_slowdown(["0:2.0", "3:1.5"], 4))
    assert [emulation.factor(worker, 7) for worker in range(4)] == [2.0, 1.0, 1.0, 1.5]
    noisy = Emulation(noise=0.1, seed=3)
    assert noisy.noise_factor(1, 2, 0) == Emulation(noise=0.1, seed=3).noise_factor(1, 2, 0)
    factors = [noisy.noise_factor(0, epoch, 0) for epoch in range(4000)]
    assert np.mean(factors) == pytest.approx(1.0, abs=0.01)
    assert np.std(factors) == pytest.approx(0.1, rel=0.1)


def test_disturbances_start_and_last_as_the_paper_says():
    emulation = Emulation(disturbance=parse_disturb("0.1:4-20:3"), seed=5)
    lengths, gaps = [], []
    for worker in range(20):
        slow = [emulation.factor(worker, epoch) for epoch in range(200)]
        assert set(slow) == {1.0, 3.0}
        edges = np.flatnonzero(np.diff([1.0, *slow, 1.0]))
        starts, ends = edges[::2], edges[1::2]
        lengths += (ends - starts)[:-1].tolist()
        gaps += (starts[1:] - ends[:-1]).tolist()
    # Two spells may meet: a worker that has just recovered is idle again.
    assert min(lengths) >= 4
    assert np.median(lengths) == pytest.approx(12, abs=2)
    assert np.mean(gaps) == pytest.approx(1 / 0.1, rel=0.15)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0", "worker:factor"),
        ("2.0", "in quotes"),
        ("a:2", "worker:factor"),
        ("4:2", r"a worker in \[0, 3\], got 4"),
        ("1:0.5", "slowdown of worker 1 must be at least 1, got 0.5"),
        ("1:nan", "worker:factor"),
        ("1:inf", "must be finite, got inf"),
        (f"{'9' * 5000}:2", "worker:factor"),
    ],
)
def test_slowdowns_that_are_none_are_refused(value, message):
    with pytest.raises(SettingError, match=message):
        parse_slowdown([value], 4)


def test_two_slowdowns_of_one_worker_are_refused():
    with pytest.raises(SettingError, match=r"^slowdown must name each worker once, got 0 twice$"):
        parse_slowdown(["0:2", "1:2", "0:3"], 4)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0.1", "probability:epochs"),
        ("x:4-20", "probability:epochs"),
        ("1.5:4-20", r"probability in \[0, 1\]"),
        ("0.1:20-4", "ascending"),
        ("0.1:0-4", "from 1 on"),
        ("0.1:4-20:0.5", "factor must be at least 1, got 0.5"),
        (f"0.1:4-{'9' * 5000}", "probability:epochs"),
    ],
)
def test_disturbances_that_are_none_are_refused(value, message):
    with pytest.raises(SettingError, match=message):
        parse_disturb(value)
