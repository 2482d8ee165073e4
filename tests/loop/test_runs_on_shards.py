"""Runs on shards that come through a cache."""

import datasets
import pytest

from tests.helpers import SHARDED, fingerprint, rounds_of, run_in_ranks, write_shards
from tests.loop.test_resume import ROUNDS, killed, run

LITTLE = 60e3 / 2**30  # GiB: of 110 kB


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf_cache")
    (tmp_path / "shards").mkdir()
    whole = {"train_samples": None, "eval_samples": None, "resolutions": (8, 16)}
    whole |= {"epochs": 2, "lr_milestones": ()}
    read = {"dataset": str(write_shards(tmp_path / "shards")), "loader_workers": 0}
    return ROUNDS | whole | read | {"shuffle_block": 16}


def on_disk(tmp_path):
    files = (tmp_path / "hf_cache/dbsl/row-groups").glob("*.arrow*")
    return sum(file.stat().st_size for file in files)


def test_a_killed_run_goes_on_through_a_smaller_cache_to_the_same_bits(settings, tmp_path):
    run(tmp_path / "whole", cache_gib=1.0, **settings)
    folder = tmp_path / "killed"
    killed(folder, 45, cache_gib=1.0, **settings)
    run(folder, resume=str(folder), cache_gib=LITTLE, **settings)
    assert on_disk(tmp_path) <= LITTLE * 2**30
    assert fingerprint(folder) == fingerprint(tmp_path / "whole")


def test_processes_share_a_cache_and_each_image_comes_once_an_epoch(settings, tmp_path, capsys):
    settings = {**settings, "resolutions": (8,)}
    said = run_in_ranks(tmp_path / "run", cache_gib=2 * LITTLE, **settings)
    assert "row groups through a cache of" in said
    assert on_disk(tmp_path) <= 2 * LITTLE * 2**30
    rounds = rounds_of(tmp_path / "run")
    assert len(rounds) == 2 * 2 * 2
    assert sum(row["samples"] for row in rounds) == 2 * SHARDED[0]
