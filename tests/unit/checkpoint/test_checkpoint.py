"""Checkpoints on disk: whole or absent, damaged ones found out, nothing outside the folder."""

import errno
import hashlib
import json
import os
import threading

import numpy as np
import pytest
import torch

from dbsl.checkpoint import checkpoint, disk
from dbsl.checkpoint.disk import CheckpointError, Found, Manifest, pack, write_manifest, write_shard

CONFIG = {"resolutions": [16, 32], "lr": 0.1}
OF_DATA = {"classes": 10, "samples": 100}
COUNTS = {"sequence": 1, "epoch": 0, "processes": 1, "workers": 1}


def write(run_folder, sequence, *, ranks=1):
    folder = run_folder / "checkpoints" / f"save-{sequence:06d}"
    files = {}
    for rank in range(ranks):
        state = {"rank": rank, "weights": torch.full((4,), float(sequence))}
        files |= write_shard(folder, rank, *pack(state))
    counts = {"sequence": sequence, "epoch": 1, "workers": 4, "processes": ranks}
    write_manifest(folder, Manifest(files=files, config=CONFIG, **counts, **OF_DATA))
    return folder


def test_every_process_reads_its_own_shard_back(tmp_path):
    folder = write(tmp_path, 3, ranks=3)
    found = Found.at(folder)
    manifest = found.manifest
    assert (manifest.sequence, manifest.processes, manifest.config) == (3, 3, CONFIG)
    for rank in range(3):
        assert found.shard(rank)["rank"] == rank
    assert found.shard(0)["weights"].tolist() == [3.0] * 4
    assert not [p for p in folder.iterdir() if p.suffix == ".tmp"]


def test_numbers_of_numpy_are_kept_as_numbers():
    tree, _ = pack({"a": np.float32(0.5), "b": (np.int64(3), np.bool_(True))})
    assert disk.unpack(json.loads(json.dumps(tree)), {}) == {"a": 0.5, "b": (3, True)}


def test_tensors_of_a_checkpoint_are_aligned_as_those_of_a_run(tmp_path):
    tree, tensors = pack([torch.arange(float(size)) for size in (1, 3, 5, 7)])
    files = write_shard(tmp_path, 0, tree, tensors)
    write_manifest(tmp_path, Manifest(files=files, config=CONFIG, **COUNTS, **OF_DATA))
    read = Found.at(tmp_path).shard(0)
    assert [len(tensor) for tensor in read] == [1, 3, 5, 7]
    assert all(tensor.data_ptr() % 64 == 0 for tensor in read)


def test_what_a_disk_says_is_not_said_of_the_checkpoint(tmp_path):
    with pytest.raises(OSError, match="No space left"), disk.reading_checkpoint(tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_files_of_other_nodes_are_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    path = tmp_path / "rank-00001.json"
    late = threading.Timer(0.2, path.touch)
    late.start()
    checkpoint._wait_for([path])
    late.join()
    monkeypatch.setattr(checkpoint, "_SEEN_S", 0.1)
    with pytest.raises(OSError, match="all nodes must see it, but rank 0 sees no rank-00002"):
        checkpoint._wait_for([path, tmp_path / "rank-00002.json"])


@pytest.mark.parametrize("name", ["rank-00000.json", "rank-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, name, damage):
    write(tmp_path, 1)
    path = write(tmp_path, 2) / name
    content = path.read_bytes()
    if damage == "flip":
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    elif damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    warnings = []
    found = disk.newest(tmp_path, warnings.append)
    assert (found.folder.name, found.manifest.sequence) == ("save-000001", 1)
    unseen = name == "manifest.json" and damage == "remove"
    assert len(warnings) == (not unseen)
    assert all(line.startswith("skipped: ") and "save-000002" in line for line in warnings)


def test_linked_folders_are_no_checkpoints(tmp_path):
    elsewhere = write(tmp_path / "other", 9)
    write(tmp_path / "run", 1)
    os.symlink(elsewhere, tmp_path / "run/checkpoints/save-000009")
    assert [found.folder.name for found in disk.checkpoints_in(tmp_path / "run")] == ["save-000001"]


def test_a_format_of_the_future_is_named(tmp_path):
    folder = write(tmp_path, 1)
    content = json.loads((folder / "manifest.json").read_text())
    content["manifest"]["format"] = 99
    body = json.dumps(content["manifest"], indent=2)
    content["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(content))
    text = f"of format {disk.FORMAT}, which this version reads, got 99"
    with pytest.raises(CheckpointError, match=text):
        disk.read_manifest(folder)


def test_pruning_keeps_the_newest_good_ones(tmp_path):
    folders = [write(tmp_path, sequence) for sequence in range(1, 6)]
    (folders[4] / "manifest.json").write_text("{")  # the newest, damaged
    (folders[3] / "manifest.json").unlink()  # never completed
    disk.prune(tmp_path, 2)
    names = [f"save-{sequence:06d}" for sequence in range(1, 6)]
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == names[1:]  # the last two may be under way
    assert [p.name for p in disk.set_aside_after(tmp_path, 9)] == [f"{names[4]}.old"]
    left = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert left == [*names[1:3], f"{names[4]}.old"]


def test_checkpoints_after_the_one_resumed_are_set_aside_not_removed(tmp_path):
    for sequence in (1, 2, 3):
        write(tmp_path, sequence)
    (tmp_path / "checkpoints/save-000003/manifest.json").write_text("{}")
    renamed = disk.set_aside_after(tmp_path, 1)
    assert sorted(p.name for p in renamed) == ["save-000002.old", "save-000003.old"]
    assert [found.folder.name for found in disk.checkpoints_in(tmp_path)] == ["save-000001"]
    disk.prune(tmp_path, 1)
    assert (tmp_path / "checkpoints/save-000002.old").is_dir()
