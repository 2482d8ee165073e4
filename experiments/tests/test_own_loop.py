"""The benchmark of other loops measures, in two processes."""

import pytest

from experiments.benchmarks import own_loop


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "columns"),
    [
        (
            ("overhead", 2, 3, 8),
            {"plain_ms", "library_ms", "ratio", "half_interval", "added_us", "epochs"},
        ),
        (("burden", "dynamic", 0, 3, 160), {"all_s", "epoch_s", "loss", "batch_0", "batch_1"}),
        (("merges", "Rounds", 8, 3), {"merge_s", "weights"}),
        (("merges", "LocalSGD", 8, 3), {"merge_s", "weights"}),
    ],
)
def test_the_benchmark_of_foreign_loops_measures_in_two_processes(call, columns):
    assert own_loop.measure((), *call).keys() == columns
