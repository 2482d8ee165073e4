"""Every sample once an epoch, in every combination of sync, balance, rounds, pushes and losses."""

from hypothesis import HealthCheck, assume, given, settings

from benchmarks.coverage import cases, check


@settings(suppress_health_check=list(HealthCheck))
@given(cases())
def test_every_sample_is_trained_on_once_or_counted_as_lost(case):
    try:
        check(case)
    except ValueError:  # there is no such plan
        assume(False)
