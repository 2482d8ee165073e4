import gc
import os
import shutil
import time
from contextlib import suppress
from types import SimpleNamespace

import datasets
import fsspec
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import torch
from filelock import FileLock, Timeout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dbsl.base.errors import ReadError, SettingError
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.extras.streaming import StreamSettings
from dbsl.extras.streaming import groups as group_cache
from dbsl.extras.streaming.groups import GroupCache
from dbsl.extras.streaming.shards import Shards
from dbsl.plan.sampler import EpochSampler
from tests.helpers import SHARDED, make_table, plain, read, read_all, wait_until, write_shards

TRAIN, EVALUATION, GROUP = SHARDED
LITTLE = 50e3 / 2**30  # GiB: of fourteen row groups of 8 kB
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.fixture(autouse=True)
def cache(cache, monkeypatch):
    monkeypatch.setattr(group_cache, "PAUSES_S", (0, 0))
    return cache / "row-groups"


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_shards(tmp_path_factory.mktemp("shards"))


def load(dataset, gib=1.0, block=16, seed=0, **settings):
    settings = {"cache_gib": gib, "shuffle_block": block, "loader_workers": 0} | settings
    return load_data(StreamSettings(dataset=str(dataset), **settings), seed)


def test_a_split_without_rows_is_left_out_or_refused(tmp_path):
    folder = write_shards(tmp_path)
    pyarrow.parquet.write_table(
        pyarrow.parquet.read_table(folder / "test-00000-of-00001.parquet")[:0],
        folder / "test-00000-of-00001.parquet",
    )
    data = load(folder)
    assert (len(data.train) + len(data.evaluation), data.eval_split) == (TRAIN, "a fifth of train")
    for path in folder.glob("train-*"):
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(path)[:0], path)
    with pytest.raises(SettingError, match=r"split 'train' of .* has no row with a label"):
        load(folder)


def epoch_of(data, rounds=1, shares=(60, 36), epoch=0, size=7):
    sampler = EpochSampler(shares, rounds=rounds, seed=4, blocks=data.train.blocks)
    return [
        [step.parts[0].indices for step in sampler.steps(worker, epoch, round_, size)]
        for round_ in range(rounds)
        for worker in range(len(shares))
    ]


def on_disk(cache):
    """Return the bytes that the cache takes; loaders may remove files meanwhile."""
    size = 0
    for file in cache.glob("*.arrow*"):
        with suppress(FileNotFoundError):
            size += file.stat().st_size
    return size


def test_images_are_those_that_are_read_without_a_cache(shards):
    streamed, stored = load(shards), load_data(ImageConfig(str(shards)))
    for name, count in (("train", TRAIN), ("evaluation", EVALUATION)):
        ours, theirs = getattr(streamed, name), getattr(stored, name)
        np.testing.assert_array_equal(ours.labels, theirs.labels)
        batches = np.array_split(np.arange(count), 5)
        assert all(map(torch.equal, *(read(split, plain(16), batches) for split in (ours, theirs))))
    for name in ("image_side", "class_names", "eval_split", "crop_pct"):
        assert getattr(streamed, name) == getattr(stored, name)
    assert stored.train.blocks is None


def test_opening_reads_labels_and_one_row_group_of_each_split(shards, monkeypatch):
    written = count_writes(monkeypatch)
    data = load(shards, holdout=None, train_samples=60)
    assert written == [0, 0]
    assert np.bincount(data.train.labels).tolist() == [20, 20, 20]


def count_writes(monkeypatch):
    """Return the row groups that are read from shards from now on."""
    written, write = [], Shards.write

    def counted(self, group, *more):
        written.append(group)
        write(self, group, *more)

    monkeypatch.setattr(Shards, "write", counted)
    return written


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_cache_that_holds_little_gives_the_bits_of_one_that_holds_all(shards, cache, workers):
    results = []
    for gib in (1.0, LITTLE):
        data, most, seen = load(shards, gib, loader_workers=workers), 0, []
        for epoch in range(1 if workers else 2):
            for batches in epoch_of(data, epoch=epoch, size=3):
                for images, labels in data.train.batches(batches, plain(16, "crop"), epoch):
                    most = max(most, on_disk(cache))
                    seen.append((images, labels))
        results.append(seen)
        del data, batches
        gc.collect()  # what the first one holds, the second one may not remove
    assert most <= LITTLE * 2**30
    for one, other in zip(*results, strict=True):
        assert all(map(torch.equal, one, other))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 95), st.integers(1, 4), st.integers(1, 12), st.integers(1, 30), st.data())
def test_uneven_shares_meet_each_image_once_through_a_little_cache(
    shards, first, rounds, size, block, draw
):
    shares = [first, TRAIN - first]
    rounds = min(rounds, *shares)
    data = load(shards, LITTLE * 2, block)
    rest = epoch_of(data, rounds, shares, size=size)
    order = draw.draw(st.permutations(range(len(rest))))  # workers take turns in any order
    met = [n for turn in order for n in read_all(data.train, 16, rest[turn])[0]]
    assert sorted(met) == list(range(TRAIN))


def test_a_subset_of_large_row_groups_has_the_images_of_its_labels(tmp_path):
    numbers = np.random.default_rng(0).permutation(600)
    images = [Image.new("RGB", (4, 4), (n % 250, n // 250, 0)) for n in numbers]
    folder = tmp_path / "images"
    folder.mkdir()
    make_table(images, [n % 7 for n in numbers]).to_parquet(folder / "train.parquet")
    for subset in ({"holdout": 0.3}, {"train_samples": 200, "eval_samples": 90}):
        streamed, stored = load(folder, **subset), load_data(ImageConfig(str(folder), **subset))
        for name in ("train", "evaluation"):
            ours, theirs = getattr(streamed, name), getattr(stored, name)
            order = [np.random.default_rng(1).permutation(len(ours))]
            of_both = [read(source, plain(4), order) for source in (ours, theirs)]
            assert all(map(torch.equal, *of_both))


def test_row_groups_that_are_there_are_not_read_again(shards, monkeypatch):
    read_all(load(shards).train, 16)
    written = count_writes(monkeypatch)
    data = load(shards)
    read_all(data.train, 16)
    assert written == []
    assert load(shards, seed=3).train._split.names == data.train._split.names


def test_loader_processes_read_what_only_the_main_process_can_reach(shards, monkeypatch):
    memory = fsspec.filesystem("memory")
    for file in shards.iterdir():
        memory.pipe(f"/bucket/{file.name}", file.read_bytes())
    memory.pipe("/bucket/README.md", b"# no shard")
    data = load("memory://bucket", LITTLE, loader_workers=1)
    batches = np.array_split(np.arange(TRAIN), 8)
    assert read_all(data.train, 16, batches)[0] == list(range(TRAIN))
    one = load("memory://bucket/train-00000-of-00003.parquet", holdout=0.25)
    assert (len(one.train), len(one.evaluation)) == (24, 8)


def test_a_hub_id_is_read_from_the_files_that_the_hub_names(shards, monkeypatch):
    patterns = {"train": [f"{shards}/train-*"], "validation": [f"{shards}/test-*"]}
    files = datasets.data_files.DataFilesDict.from_patterns(patterns)
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr(datasets, "load_dataset_builder", {"user/name": builder}.get)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dbsl.base.machine.answers", lambda url: True)
    data = load("user/name")
    assert (len(data.train), data.eval_split) == (TRAIN, "validation")


def test_a_row_group_that_fails_is_tried_again_and_then_named_in_one_line(
    shards, cache, monkeypatch
):
    fail_often(monkeypatch, 2)
    data = load(shards)
    assert read_all(data.train, 16)[0] == list(range(TRAIN))
    shutil.rmtree(cache)
    data = load(shards)
    fail_often(monkeypatch, 99)
    line = r"row group \d of .*train-0.*.parquet cannot be read, tried 3 times \(no route\)"
    with pytest.raises(ReadError, match=line):
        read_all(data.train, 16)


def test_shards_that_are_not_alike_are_refused_at_once(shards, tmp_path, monkeypatch):
    shutil.copytree(shards, tmp_path / "unlike")
    (other,) = tmp_path.glob("unlike/train-00001*")
    pyarrow.parquet.write_table(pyarrow.table({"image": [b""]}), other)
    monkeypatch.setattr(group_cache, "PAUSES_S", (1000,))
    with pytest.raises(ValueError, match=r"in all shards, got .*train-00001.* without 'label'"):
        load(tmp_path / "unlike")


def test_a_split_without_a_column_is_said_to_be_left_out(shards, tmp_path, caplog):
    shutil.copytree(shards, tmp_path / "unlike")
    (other,) = tmp_path.glob("unlike/test-*")
    table = pyarrow.parquet.read_table(other)
    pyarrow.parquet.write_table(table.drop_columns(["label"]), other)
    assert load(tmp_path / "unlike").eval_split != "test"
    assert f"split 'test' of '{tmp_path}/unlike' has no column 'label' and is left" in caplog.text


def fail_often(monkeypatch, times):
    """Let each row group fail so often, with a part of its file written."""
    failed, write = {}, Shards.write

    def failing(self, group, path):
        failed[group, path.stem] = failed.get((group, path.stem), 0) + 1
        if failed[group, path.stem] <= times:
            path.write_bytes(b"ARROW1")
            raise OSError("no route")
        write(self, group, path)

    monkeypatch.setattr(Shards, "write", failing)


def test_what_a_killed_process_left_is_removed_and_a_file_that_is_being_written_is_not(tmp_path):
    for name, age in (("a", 1000), ("b", 10)):
        half = tmp_path / f"{name * 32}.arrow.500"
        half.write_bytes(b"x" * 300)
        os.utime(half, (time.time() - age,) * 2)
    cache = GroupCache(tmp_path, 1000)
    assert [file.name[0] for file in tmp_path.glob("*.arrow*")] == ["b"]
    names = [f"{number:032x}.arrow" for number in range(2)]
    for name in names:
        cache.fetch(name, 400, lambda path: path.write_bytes(b"x" * 400), "it")
        cache.let_go(name)
    assert [file.name for file in tmp_path.glob("*.arrow")] == [names[1]]  # 500 bytes are taken


def test_files_that_a_process_needs_go_last_and_the_rest_by_its_use(tmp_path):
    cache, other = (GroupCache(tmp_path, 6000, 2) for _ in range(2))
    names = [f"{number:032x}.arrow" for number in range(6)]
    for number, name in enumerate(names):
        owner = cache if number else other
        owner.fetch(name, 1000, lambda path: path.write_bytes(b"x" * 1000), "it")
        if number:
            owner.let_go(name)
            os.utime(tmp_path / name, (number, number))
    cache.knows(*names[2:5])
    gone = []
    for left in range(5, -1, -1):
        before = {file.name for file in tmp_path.glob("*.arrow")}
        cache.limit = 1000 * left
        cache._make_room(0)
        gone += before - {file.name for file in tmp_path.glob("*.arrow")}
    # Other data first, then what was used last; at the end what is needed.
    assert gone == [names[number] for number in (1, 5, 4, 3, 2, 0)]


def test_one_process_of_a_machine_writes_what_several_need(tmp_path):
    cache, other = (GroupCache(tmp_path, 10_000, 2) for _ in range(2))
    name, written = f"{1:032x}.arrow", []

    def write(path):
        written.append(path)
        with pytest.raises(Timeout):  # what the other would wait for
            FileLock(tmp_path / "writing-0.lock").acquire(timeout=0)
        path.touch()

    for owner in (cache, other):
        owner.fetch(name, 100, write, "it")
    assert len(written) == 1


def test_a_cache_that_is_too_small_is_told_of_once_and_gives_the_same_bits(shards, cache, caplog):
    small, large = load(shards, 12e3 / 2**30), load(shards, 1.0, seed=0)
    size = max(file.stat().st_size for file in cache.glob("*.arrow"))
    for epoch in range(2):
        for batches in epoch_of(small, epoch=epoch):
            for one in small.train.batches(batches, plain(16)):
                assert on_disk(cache) <= 12e3 + 5 * size  # four threads and a reader write
                assert len(one[1])
        both = (read(data.train, plain(16), batches) for data in (small, large))
        assert all(map(torch.equal, *both))
    assert caplog.text.count("cache_gib is too small: the batches at hand need") == 1


def test_what_others_removed_is_read_again(shards, cache):
    data = load(shards)
    batches = data.train.batches([np.arange(TRAIN)] * 2, plain(16))
    _, labels = next(batches)
    for name in data.train._split.names:
        (cache / name).unlink()
    assert torch.equal(next(batches)[1], labels)


def test_a_bad_image_is_left_out_and_one_that_lies_elsewhere_is_not_read(shards, tmp_path, caplog):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (12, 12)).save(secret)
    file = shards / "train-00000-of-00003.parquet"
    rows = pyarrow.parquet.read_table(file).to_pylist()
    rows[2]["image"] = {"bytes": b"no image", "path": None}
    rows[9]["image"] = {"bytes": None, "path": str(secret)}
    folder = tmp_path / "bad"
    folder.mkdir()
    schema = pyarrow.parquet.read_schema(file)
    table = pyarrow.Table.from_pylist(rows, schema)
    pyarrow.parquet.write_table(table, folder / "train.parquet", row_group_size=GROUP)
    data = load(folder, holdout=0.25, max_bad_images=2)
    for source in (data.train, data.evaluation):
        read_all(source, 16)
    bad = data.train.bad | data.evaluation.bad
    assert sorted(bad) == [2, 9]
    assert bad[9] == "its bytes must be in the shard"
    assert "row group 1 of" in caplog.text


@pytest.mark.parametrize("dataset", ["digits", "nowhere/at-all", "no such folder", "memory://none"])
def test_data_that_are_no_shards_are_refused(dataset):
    with pytest.raises(ValueError, match=r"cannot be opened \(.*\): give parquet shards"):
        load(dataset)


def test_the_line_of_a_run_tells_of_its_cache(shards):
    line = load(shards, block=16).train.described(0)
    assert line == "12 row groups through a cache of 1 GiB, shuffled in 6 blocks"


def test_nothing_is_needed_once_data_are_gone(shards, cache):
    def needed():
        return [file for file in cache.glob("*.arrow") if file.stat().st_mtime > time.time() + 9]

    data = load(shards, LITTLE)
    next(data.train.batches(epoch_of(data)[0], plain(16)))
    assert needed()
    del data
    wait_until(lambda: gc.collect() < 0 or not needed(), 10)
