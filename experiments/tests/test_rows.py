"""Rows of benchmarks: how they are kept."""

from experiments.benchmarks.demos.table import Table
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
