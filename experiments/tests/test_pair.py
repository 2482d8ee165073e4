"""Processes of unlike speed: quotas and arms; no root, no time."""

import pytest

from experiments.benchmarks.demos import pair, quota


@pytest.mark.parametrize("version", [1, 2])
def test_quotas_are_written_as_the_kernel_has_them(tmp_path, version):
    if version == 2:
        (tmp_path / "cpu.max").write_text("max 100000")
    quota.limit(tmp_path, 0.25)
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    one = {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "2500"}
    assert found == (one if version == 1 else {"cpu.max": "2500 10000"})


def test_a_whole_core_has_no_quota(tmp_path):
    quota.limit(tmp_path, 1.0)
    assert (tmp_path / "cpu.cfs_quota_us").read_text() == "-1"


def test_the_limit_is_that_of_the_speeds_and_flags_name_the_joint_batch():
    assert pair.limit(pair.MACHINES["2.5:1"]) == pytest.approx(1 / 1.4)
    flags = pair.flags_of({"train_samples": 5, "lr": 0.1}, "no")
    assert flags["train-samples"] == 5
    assert flags["global-batch-size"] == pair.BATCH
