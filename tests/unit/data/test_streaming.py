import fcntl
import gc
import os
import re
import shutil
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import datasets
import fsspec
import huggingface_hub
import numpy as np
import pyarrow.parquet
import pytest
import torch
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from dbsl.base.errors import ReadError, SettingError
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.extras.streaming import Prefetch, StreamSettings, _most_held, _uses
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
    with pytest.raises(SettingError, match="train of dataset must have rows, got "):
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


def test_what_is_held_out_or_left_out_takes_no_room(shards, cache):
    data = load(shards, train_samples=24, eval_samples=3)
    assert sorted(read_all(data.train, 16)[1]) == [0] * 8 + [1] * 8 + [2] * 8
    few = on_disk(cache)
    shutil.rmtree(cache)
    data = load(shards)
    read_all(data.train, 16)
    assert few < 0.6 * on_disk(cache)  # a third of the images, and what a file has beside them


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


def test_a_row_group_that_fails_is_tried_again_and_then_named_in_one_line(shards, monkeypatch):
    fail_often(monkeypatch, 2)
    data = load(shards)
    assert read_all(data.train, 16)[0] == list(range(TRAIN))
    data = load(shards, seed=1, train_samples=90)
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

    def failing(self, group, rows, path):
        failed[group, path.stem] = failed.get((group, path.stem), 0) + 1
        if failed[group, path.stem] <= times:
            path.write_bytes(b"ARROW1")
            raise OSError("no route")
        write(self, group, rows, path)

    monkeypatch.setattr(Shards, "write", failing)


def test_half_of_a_file_is_never_taken_for_whole(shards, cache):
    data = load(shards)
    name = data.train._split.names[3]
    read_all(data.train, 16)
    whole = (cache / name).read_bytes()
    (cache / name).write_bytes(whole[: len(whole) // 2])
    assert read_all(load(shards).train, 16)[0] == list(range(TRAIN))
    assert (cache / name).read_bytes() == whole


def test_what_a_killed_process_left_is_used_or_removed(shards, cache):
    load(shards)
    half = cache / f"{'a' * 32}.arrow.1.500"
    half.write_bytes(b"x" * 1000)
    data = load(shards, LITTLE)
    assert not half.exists()
    assert len(read(data.train, plain(16), [range(8)])[1]) == 8


def test_files_that_another_process_holds_stay_and_the_rest_goes_by_its_use(tmp_path):
    cache, other = (GroupCache(tmp_path, 10_000, 2) for _ in range(2))
    names = [f"{number:032x}.arrow" for number in range(8)]
    for number, name in enumerate(names[:5]):
        owner = cache if number else other
        owner.fetch(name, 1000, lambda path: _arrow(path, 600), "it")
        if number:
            owner.release(name)
        os.utime(tmp_path / name, (number, number))
    cache.knows(*names[2:5])
    gone = []
    for name in names[5:]:
        before = {file.name for file in tmp_path.glob("*.arrow")}
        weight = 10_000 - on_disk(tmp_path) + 1  # a byte too much
        cache.fetch(name, weight, lambda path: _arrow(path, 1), "it")
        gone.append(before - {file.name for file in tmp_path.glob("*.arrow")})
    # Other data first, then what was used last; not what is held.
    assert gone == [{names[1]}, {names[4]}, {names[3]}]


def _arrow(path, size):
    batch = pyarrow.record_batch({"image": [b"x" * size]})
    with pyarrow.ipc.new_file(str(path), batch.schema) as file:
        file.write(batch)


def test_one_process_of_a_machine_writes_what_several_need(tmp_path):
    cache, other = (GroupCache(tmp_path, 10_000, 2) for _ in range(2))
    name, written = f"{1:032x}.arrow", []

    def write(path):
        written.append(path)
        with pytest.raises(group_cache.Timeout):  # what the other would wait for
            FileLock(tmp_path / "writing-0.lock").acquire(timeout=0)
        _arrow(path, 10)

    for owner in (cache, other):
        owner.fetch(name, 100, write, "it")
    assert len(written) == 1
    with pytest.raises(BlockingIOError):  # nobody may remove it
        fcntl.flock(os.open(tmp_path / name, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    cache.release(name)
    other.release(name)
    fcntl.flock(os.open(tmp_path / name, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_cache_that_is_too_small_is_refused_with_the_least_that_is_enough(shards):
    data = load(shards, 12e3 / 2**30, block=16)
    with pytest.raises(ValueError, match=r"cache_gib must be at least .* blocks of 16") as found:
        data.train.check_room(7)
    least = float(re.search(r"at least ([\d.e-]+)", str(found.value))[1])
    with pytest.raises(ValueError, match="cache_gib must be at least"):
        read_all(load(shards, 12e3 / 2**30).train, 16)
    data = load(shards, least, block=16)
    data.train.check_room(7)
    for epoch in range(6):
        for batches in epoch_of(data, epoch=epoch):
            read(data.train, plain(16), batches)


@pytest.mark.parametrize("ahead", [0, 2])
def test_room_for_given_batches_is_what_they_need(shards, ahead):
    data = load(shards).train
    batches = [np.arange(n, n + 5) % TRAIN for n in (0, 40, 80, 0)]  # the first images again
    data._ahead = ahead
    least = _most_held(data._split, *_uses(data._split, batches), len(batches), ahead)
    for room, enough in ((least, True), (least - 1, False)):
        data._cache.share = room
        for use in (data.check_batches, lambda b: Prefetch(data._cache, data._split, b, ahead)):
            with nullcontext() if enough else pytest.raises(SettingError, match="cache_gib must"):
                use(batches)


def test_a_later_call_ends_an_earlier_one(shards):
    data = load(shards, LITTLE)
    batches = epoch_of(data)[0]
    for later in (data.train, data.evaluation):
        first = data.train.batches(batches, plain(16))
        next(first)
        assert len(list(later.batches([np.arange(4)] * 3, plain(16)))) == 3
        with pytest.raises(RuntimeError, match="a later call"):
            list(first)


def test_one_that_ended_while_it_fetched_lets_go_of_nothing_that_the_next_one_holds(
    shards, monkeypatch
):
    data, fetch = load(shards).train, GroupCache.fetch
    asked, may_go_on = [], threading.Event()

    def slow(self, *what):
        path = fetch(self, *what)
        asked.append(what)
        if len(asked) == 1:  # the first one's, which is ended meanwhile
            may_go_on.wait(20)
        return path

    monkeypatch.setattr(GroupCache, "fetch", slow)
    batches = [np.arange(TRAIN)] * 2
    first = Prefetch(data._cache, data._split, batches, 1)
    wait_until(lambda: asked)
    second = Prefetch(data._cache, data._split, batches, 1)
    second.wait(1)
    may_go_on.set()
    holders = data._cache._holders
    wait_until(lambda: not any(first in own for own in holders.values()))
    assert data._cache._held.keys() == set(data._split.names)
    second.stop()
    assert not data._cache._held


def test_a_cache_that_a_stopped_process_has_locked_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(group_cache, "_LOCKED_WITHIN_S", 0.1, raising=False)
    cache = GroupCache(tmp_path, 10_000)
    with FileLock(tmp_path / "all.lock", timeout=1):
        for use in (lambda: cache._make_room(0), lambda: GroupCache(tmp_path, 10_000)):
            with pytest.raises(ReadError, match=f"{tmp_path} has been locked .* for 0.1 s"):
                use()
    cache._make_room(0)


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
    with pytest.raises(ValueError, match="dataset must be parquet shards with cache_gib"):
        load(dataset)


def test_the_line_of_a_run_tells_of_its_cache(shards):
    line = load(shards, block=16).train.described(0)
    assert line == "12 row groups through a cache of 1 GiB, shuffled in 6 blocks"


def test_nothing_is_held_once_data_are_gone(shards):
    data = load(shards, LITTLE)
    next(data.train.batches(epoch_of(data)[0], plain(16)))
    held = data.train._cache._held
    assert held
    del data
    wait_until(lambda: gc.collect() < 0 or not held, 10)
