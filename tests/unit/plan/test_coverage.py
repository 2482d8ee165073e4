"""Every sample once an epoch, in every combination of sync, balance, rounds, pushes and losses."""

from hypothesis import HealthCheck, given, settings

from experiments.benchmarks.coverage.cases import cases
from experiments.benchmarks.coverage.check import check_drawn


@settings(suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_sample_is_trained_on_once_or_counted_as_lost(case):
    check_drawn(case)
