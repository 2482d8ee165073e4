"""Corrupt input of each kind gives a clean error, or none."""

import pytest

from experiments.benchmarks import fuzz
from tests.helpers import slow


@pytest.mark.parametrize(
    ("what", "cases"),
    [
        *(("checkpoints", 2), ("manifests", 80), ("configs", 20), ("parquet files", 30)),
        pytest.param("checkpoints", 40, marks=slow),
    ],
)
def test_corrupt_input_gives_clean_errors_only(what, cases):
    row = fuzz.run_target(what, cases, seed=1)
    assert row["refused"] > 0
    assert row["refused"] + row["accepted"] == cases
