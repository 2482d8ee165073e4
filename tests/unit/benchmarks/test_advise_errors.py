"""How far off the adviser is said to be: by hand, and in settings of which each is one."""

import json

import pytest

from experiments.benchmarks.demos import advise
from experiments.plots.rows import read

NAMES = ("setting", "way", "predicted_s", "measured_s", "recommended")
ROWS = [
    dict(zip(NAMES, row, strict=True))
    for row in (
        ("1:1 10 m", "x", "1.1", "1", "0"),
        ("1:1 10 m", "y", "0.9", "1.2", "1"),
        ("1:1:1 None m", "x", "2", "2", "1"),
        ("1:1:1 None m", "y", "9", "nan", "0"),
    )
]


def test_errors_are_of_ways_that_were_measured_and_the_advice_is_held_against_the_best():
    found = advise.errors(ROWS)
    assert (found["median"], found["worst"], found["ways"]) == pytest.approx((0.1, 0.25, 3))
    assert found["advised_over_best"] == pytest.approx({"1:1 10 m": 0.2, "1:1:1 None m": 0.0})
    assert len(advise.errors_figure(ROWS).axes[0].lines) == 3


def test_epochs_that_warm_up_are_left_out(tmp_path):
    rows = [{"event": "eval", "train_time_s": s} for s in (5.0, 6.0, 7.5)] + [{"event": "round"}]
    (tmp_path / "log").write_text("\n".join(map(json.dumps, rows)))
    assert advise.epoch_times(tmp_path / "log") == [1.0, 1.5]


def test_settings_are_sixteen_that_fit_on_their_cores_and_none_was_developed_on():
    assert len({*advise.HELD_OUT}) >= 16
    tables = [read(advise.FOLDER / name) for name in ("first.csv", "second.csv")]
    before = {row["setting"] for rows in tables for row in rows}
    assert len(before) == 16 + 9
    assert not {*map(str, advise.HELD_OUT)} & (before | {*map(str, advise.DEVELOPED)})
    for setting in advise.HELD_OUT:
        count = len(setting.parts)
        for side in (0, 1):
            own = [p for rank, p in enumerate(setting.parts) if rank * 2 // count == side]
            assert sum(own) <= 1
