"""How far off the adviser is said to be: by hand, and in settings of which each is one."""

import json

import pytest

from experiments.benchmarks.demos import advise

ROWS = [
    {"setting": "a", "way": "x", "predicted_s": "1.1", "measured_s": "1", "recommended": "0"},
    {"setting": "a", "way": "y", "predicted_s": "0.9", "measured_s": "1.2", "recommended": "1"},
    {"setting": "b", "way": "x", "predicted_s": "2", "measured_s": "2", "recommended": "1"},
    {"setting": "b", "way": "y", "predicted_s": "9", "measured_s": "nan", "recommended": "0"},
]


def test_errors_are_of_ways_that_were_measured_and_the_advice_is_held_against_the_best():
    found = advise.errors(ROWS)
    assert (found["median"], found["worst"], found["ways"]) == pytest.approx((0.1, 0.25, 3))
    assert found["advised_over_best"] == pytest.approx({"a": 0.2, "b": 0.0})
    assert len(advise.errors_figure(ROWS).axes[0].lines) == 3


def test_epochs_that_warm_up_are_left_out(tmp_path):
    rows = [{"event": "eval", "train_time_s": s} for s in (5.0, 6.0, 7.5)] + [{"event": "round"}]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, rows)))
    assert advise.epoch_times(tmp_path / "log") == [1.0, 1.5]


def test_settings_are_sixteen_that_fit_on_their_cores_and_none_was_developed_on():
    assert len({*advise.HELD_OUT}) >= 16
    assert not {*advise.HELD_OUT} & {*advise.DEVELOPED}
    for setting in advise.HELD_OUT:
        count = len(setting.parts)
        for side in (0, 1):
            own = [p for rank, p in enumerate(setting.parts) if rank * 2 // count == side]
            assert sum(own) <= 1
