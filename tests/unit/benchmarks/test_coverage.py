"""Every sample once an epoch, in every combination of sync, balance, rounds, pushes and losses."""

from hypothesis import HealthCheck, given, settings

from experiments.benchmarks.coverage.cases import cases
from experiments.benchmarks.coverage.check import check_drawn
from tests.helpers import slow


@settings(suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_sample_is_trained_on_once_or_counted_as_lost(case):
    check_drawn(case)


@slow
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(cases("asp") | cases("ssp"))
def test_workers_that_come_and_go_leave_no_sample_out_that_is_not_counted(case):
    check_drawn(case)
