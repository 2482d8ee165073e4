import numpy as np
import pytest
from safetensors.torch import load_file

from dbsl.base.errors import SettingError
from dbsl.extras.emulate import EmulatedLink, Emulation, parse_disturb, parse_slowdown
from tests.helpers import rows, run, short

GB = 1e9 / 8  # bytes a second of 1 Gbit/s


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
    ("values", "message"),
    [
        (["0"], "worker:factor"),
        (["2.0"], "in quotes"),
        (["4:2"], r"a worker in \[0, 3\], got 4"),
        (["1:0.5"], "slowdown of worker 1 must be at least 1, got 0.5"),
        (["1:inf"], "must be finite, got inf"),
        ([f"{'9' * 5000}:2"], "worker:factor"),
        (["0:2", "1:2", "0:3"], r"^slowdown must name each worker once, got 0 twice$"),
        ("0.1", "probability:epochs"),
        ("1.5:4-20", r"probability in \[0, 1\]"),
        ("0.1:20-4", "ascending"),
        ("0.1:0-4", "from 1 on"),
        ("0.1:4-20:0.5", "factor must be at least 1, got 0.5"),
        (f"0.1:4-{'9' * 5000}", "probability:epochs"),
    ],
)
def test_slowdowns_and_disturbances_that_are_none_are_refused(values, message):
    with pytest.raises(SettingError, match=message):
        parse_slowdown(values, 4) if isinstance(values, list) else parse_disturb(values)


def test_a_link_takes_the_seconds_that_its_formulas_say():
    link = EmulatedLink(1.0, ms=2.0)
    assert link.message_s(GB) == pytest.approx(1.002)
    # A ring sends every part of the vector twice, less two.
    assert link.all_reduce_s(GB, 4) == pytest.approx(6 * (0.25 + 0.002))
    assert link.all_reduce_s(GB, 1) == 0.0
    # A barrier is a sum, and from a server a broadcast too.
    link = EmulatedLink(10.0)
    assert link.barrier_s(GB, 2, at_server=False) == pytest.approx(0.1)
    assert link.barrier_s(GB, 2, at_server=True) == pytest.approx(0.2)
    assert link.barrier_s(GB, 1, at_server=True) == 0.0


SETTINGS = {"workers": 2, "epochs": 2, "log_every": 0}


def outcome(folder):
    """Weights, virtual seconds, and each worker's compute and wait time."""
    time_s = rows(folder, "eval")[-1]["virtual_time_s"]
    rounds = rows(folder, "round")
    spent = [sum(row[name] for row in rounds) for name in ("compute_time_s", "wait_time_s")]
    return (folder / "model.safetensors").read_bytes(), time_s, *spent


MODES = [{"rounds_per_epoch": 2, "large_batch_size": (10,)}, {"sync": "asp"}, {"sync": "step"}]
MODES += [{"merge": "delta"}, {"push": "gradients"}, {"sync": "ssp"}]


@pytest.mark.parametrize("mode", short(MODES, MODES[0]), ids=str)
def test_a_link_takes_virtual_time_that_counts_as_waiting_and_no_weights_change(tmp_path, mode):
    run(tmp_path / "free", **SETTINGS, **mode)
    run(tmp_path / "link", **SETTINGS, **mode, emulate=("gbps=0.01", "ms=1.0"))
    model, free_s, compute_s, waited_s = outcome(tmp_path / "free")
    same, link_s, same_s, more_s = outcome(tmp_path / "link")
    assert compute_s == pytest.approx(same_s)
    assert link_s > free_s + 0.5
    assert more_s > waited_s
    if mode.get("sync") not in ("ssp", "asp"):  # where the order of the workers follows from times
        assert model == same
    if "rounds_per_epoch" in mode:  # the formula of the link
        state = load_file(tmp_path / "link/model.safetensors").values()
        numbers = sum(t.numel() for t in state if t.is_floating_point())
        cost_s = EmulatedLink(0.01, 1.0).barrier_s(4 * numbers, 2, at_server=False)
        assert link_s - free_s == pytest.approx(2 * 2 * cost_s, rel=1e-6)
