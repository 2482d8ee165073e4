"""Processes of unlike speed: quotas and arms; no root, no time."""

import pytest

from experiments.benchmarks.demos import quota, uneven


@pytest.mark.parametrize("version", [1, 2])
def test_quotas_are_written_as_the_kernel_has_them(tmp_path, version):
    if version == 2:
        (tmp_path / "cpu.max").write_text("max 100000")
    quota.limit(tmp_path, 0.25)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    one = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}
    assert found == (one if version == 1 else {"cpu.max": "2500 10000"})


def test_quotas_fit_on_their_cores_and_the_limit_is_that_of_the_speeds():
    for machine in uneven.MACHINES.values():
        for core in (0, 1):
            there = [p for p, c in zip(machine.parts, machine.cores, strict=True) if c == core]
            assert 0 < sum(there) <= 1
    assert uneven.MACHINES["4:1"].limit == pytest.approx(0.4)
    assert uneven.flags_of("equal", 3) == {"local-batch-sizes": [64, 64, 64]}
    assert uneven.flags_of("alone", 2) == {"workers": 1, "local-batch-sizes": [128]}
    assert uneven.flags_of("96/32", 2) == {"local-batch-sizes": [96, 32]}
    assert uneven.flags_of("dbs", 3)["global-batch-size"] == 192
