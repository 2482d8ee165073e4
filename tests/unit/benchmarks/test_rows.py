"""Rows of benchmarks: how they are kept, and what is concluded from them."""

from experiments.benchmarks.demos.hybrid import verdicts
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.recipe import best_rate
from experiments.benchmarks.record import record
from experiments.plots.rows import read


def test_a_demonstration_goes_on_where_its_table_ends(tmp_path):
    def table():
        return Table(tmp_path / "x.csv", ("arm", "turn"), "experiments.benchmarks.demos.uneven")

    for turn, (control, ours) in enumerate([(2.0, 1.0), (4.0, 1.0)]):
        table().add("control", turn, {"epoch_s": control, "accuracy": 0.5})
        table().add("ours", turn, {"epoch_s": ours, "accuracy": 0.5})
    assert [table().has("ours", turn) for turn in range(3)] == [True, True, False]
    assert [row["epoch_s"] for row in table().rows] == ["2", "1", "4", "1"]


def test_an_arm_is_as_good_only_if_the_interval_says_so():
    def rows(arm, seconds, accuracies):
        return [
            {"arm": arm, "model": "m", "turn": str(turn), "train_s": seconds, "accuracy": accuracy}
            for turn, accuracy in enumerate(accuracies)
        ]

    control = rows("ddp", 10.0, [0.50, 0.52, 0.54])
    close, far = rows("cyclic", 8.0, [0.499, 0.520, 0.539]), rows("hybrid", 5.0, [0.49, 0.53, 0.52])
    first, second = verdicts([*control, *close, *far], "m")
    assert first.startswith("cyclic: 0.80 of the seconds, accuracy -0.1 points (at least -0.2)")
    assert "not inferior by 1 point, n=3" in first
    assert "not shown to be not inferior" in second


def test_the_first_seed_decides_each_arms_rate_on_each_data_set():
    names = ("arm", "lr", "turn", "accuracy", "workload")
    runs = ("a 0.2 0 0.41 x", "a 0.4 0 0.43 x", "b 0.4 0 0.2 x", "a 0.2 1 0.99 x", "a 0.2 0 0.6 y")
    rows = [dict(zip(names, run.split(), strict=True)) for run in runs]
    found = [best_rate(rows, *of) for of in (("x", "a"), ("y", "a"), ("y", "b"))]
    assert found == [0.4, 0.2, None]  # the last was not run


def test_rows_that_are_measured_anew_stand_where_those_of_before_stood(tmp_path):
    path = tmp_path / "table.csv"
    keep = lambda row: row["part"] != "b"  # noqa: E731
    record(path, [{"part": part, "s": 1} for part in "abbc"], "first", keep=keep)  # no file yet
    record(path, [{"part": "b", "mib": 7}], "second", keep=keep)
    rows = [(row["part"], row["s"], row["mib"], row["command"]) for row in read(path)]
    assert rows == [("a", "1", "", "first"), ("b", "", "7", "second"), ("c", "1", "", "first")]
    assert list(read(path)[0])[:4] == ["part", "s", "mib", "device"]
    record(path, [{"part": "d"}], "third")  # without a rule nothing of before stays
    assert [row["part"] for row in read(path)] == ["d"]
