"""Processes of unlike speed: quotas and arms; no root, no time."""

import json

import pytest

from experiments.benchmarks.demos import arms, quota, uneven


def test_something_happens_at_half_of_a_run_and_once(tmp_path):
    happened = []
    watch = arms._at_half(tmp_path / "log", 4, lambda: happened.append(1))
    counts = []
    for epoch in range(4):
        watch()
        counts.append(len(happened))
        with (tmp_path / "log").open("a") as file:
            print(json.dumps({"event": "times", "epoch": epoch + 1}), file=file)
    assert counts == [0, 0, 1, 1]


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
        for parts in (machine.parts, machine.later or machine.parts):
            for core in (0, 1):
                there = [p for p, c in zip(parts, machine.cores, strict=True) if c == core]
                assert 0 < sum(there) <= 1
    assert uneven.MACHINES["4:1"].limit == pytest.approx(0.4)
    assert uneven.flags_of("equal", 3) == {"local-batch-sizes": [64, 64, 64]}
    assert uneven.flags_of("alone", 2) == {"workers": 1, "local-batch-sizes": [128]}
    assert uneven.flags_of("96/32", 2) == {"local-batch-sizes": [96, 32]}
    assert uneven.flags_of("dbs", 3)["global-batch-size"] == 192
