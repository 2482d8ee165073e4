"""Rows of benchmarks in a CSV: those of before that are measured anew give way, others stay."""

import csv

from experiments.benchmarks.record import record


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_rows_that_are_measured_anew_stand_where_those_of_before_stood(tmp_path):
    path = tmp_path / "table.csv"
    keep = lambda row: row["part"] != "b"  # noqa: E731
    record(path, [{"part": part, "s": 1} for part in "abbc"], "first", keep=keep)  # no file yet
    record(path, [{"part": "b", "mib": 7}], "second", keep=keep)
    found = [(row["part"], row["s"], row["mib"], row["command"]) for row in rows_of(path)]
    assert found == [("a", "1", "", "first"), ("b", "", "7", "second"), ("c", "1", "", "first")]
    assert list(rows_of(path)[0])[:4] == ["part", "s", "mib", "device"]
    record(path, [{"part": "d"}], "third")  # without a rule nothing of before stays
    assert [row["part"] for row in rows_of(path)] == ["d"]
