"""A run that is mirrored is the run that is not, and goes on from its mirror to the same bits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dbsl.base.errors import EXIT_STOPPED, RunStopped
from dbsl.checkpoint.disk import MANIFEST
from tests import helpers
from tests.helpers import end_ranks, fingerprint, free_port, slow, start_ranks, to_flags, wait_until
from tests.unit.checkpoint.test_mirror import wiped

SETTINGS = {"small_workers": 1, "large_batch_size": (3,), "rounds_per_epoch": 2, "epochs": 3}
SETTINGS |= {"lr_milestones": (2,), "checkpoint_every": 1}
run = partial(helpers.run, **SETTINGS)


def resume(url, folder):
    helpers.train_by("--resume", url, "--output-dir", str(folder))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    run(folder)
    return fingerprint(folder)


@pytest.fixture
def memory():
    return wiped(fsspec.filesystem("memory"))


def test_a_run_whose_connection_was_cut_has_its_bits_and_says_so_and_goes_on_from_its_mirror(
    tmp_path, memory, monkeypatch, capsys, unbroken
):
    put, cut = MemoryFileSystem.put_file, iter([True, True])

    def put_file(fs, local, there, **options):
        if there.endswith("manifest.json") and next(cut, False):
            raise ConnectionResetError("cut")
        put(fs, local, there, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    monkeypatch.setattr("dbsl.extras.mirror.pause_s", lambda number: 0.01)
    url = "memory://bucket/run"
    run(tmp_path / "run", mirror=url)
    said = capsys.readouterr().out
    assert fingerprint(tmp_path / "run") == unbroken
    assert said.count(f"warning: {url} could not be written (cut)") == 1
    assert json.loads(memory.cat_file("/bucket/run/summary.json"))["mirror_failures"] == 2
    for name in ("model.safetensors", "config.yaml", "plots/accuracy.png", "README.md"):
        assert memory.cat_file(f"/bucket/run/{name}") == (tmp_path / f"run/{name}").read_bytes()

    memory.rm_file("/bucket/run/summary.json")  # as if it had been killed after its second epoch
    memory.rm_file("/bucket/run/model.safetensors")
    memory.rm("/bucket/run/checkpoints/epoch-0003", recursive=True)
    resume(url, tmp_path / "again")
    assert f"pulled epoch-0002 of {url} into {tmp_path / 'again'}" in capsys.readouterr().out
    assert fingerprint(tmp_path / "again") == unbroken
    assert memory.exists("/bucket/run/summary.json")  # it went on being mirrored

    resume(url, tmp_path / "third")
    assert "third is finished: nothing to resume" in capsys.readouterr().out
    assert fingerprint(tmp_path / "third") == unbroken


def test_a_stopped_run_is_mirrored_and_the_same_command_goes_on_elsewhere(tmp_path, unbroken):
    settings = {"mirror": f"file://{tmp_path}/bucket", "resume": "auto"}
    with pytest.raises(RunStopped):
        run(tmp_path / "run", **settings, max_minutes=1e-6)
    shutil.rmtree(tmp_path / "run")  # another machine
    helpers.train_by(*to_flags(tmp_path / "run", **SETTINGS, **settings, max_minutes=60))
    assert fingerprint(tmp_path / "run") == unbroken
    assert (tmp_path / "bucket/summary.json").exists()


@pytest.mark.parametrize("number", helpers.short([4, *range(1, 13, 2)], 4))
def test_a_run_killed_in_the_middle_of_an_upload_goes_on_from_its_mirror_to_the_same_bits(
    tmp_path, monkeypatch, unbroken, number
):
    url, put, since = f"file://{tmp_path}/bucket", LocalFileSystem.put_file, []

    def put_file(fs, local, there, **options):
        if since or there.endswith("epoch-0001/mirror.json"):  # which was whole with that
            since.append(there)
        if len(since) <= number:
            return put(fs, local, there, **options)
        content = Path(local).read_bytes()
        Path(there).write_bytes(content[: len(content) // 2])
        return os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patches:
        patches.setattr(LocalFileSystem, "put_file", put_file)
        killed = helpers.Forked(lambda: run(tmp_path / "run", mirror=url))
        assert killed.wait(120) == -signal.SIGKILL, killed.stderr
    resume(url, tmp_path / "again")
    assert fingerprint(tmp_path / "again") == unbroken


@slow
@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_three_processes_stop_with_their_mirror_whole_and_go_on_from_it(tmp_path, sync, unbroken):
    url = f"file://{tmp_path}/bucket"
    settings = {**SETTINGS, "epochs": 12, "sync": sync, "worker_timeout": 200}
    if sync == "bsp":
        end_ranks(start_ranks(to_flags(tmp_path / "whole", **settings), 3), 200)
    flags = to_flags(tmp_path / "run", **settings, mirror=url)
    processes = start_ranks(flags, 3)
    wait_until((tmp_path / "run/checkpoints/epoch-0002/manifest.json").exists, 90)
    processes[0].terminate()
    assert helpers.wait_all(processes) == [EXIT_STOPPED] * 3, processes[0].stderr
    (newest,) = (tmp_path / "bucket/checkpoints").glob("save-*/mirror.json")
    assert len([*newest.parent.glob("rank-*.safetensors")]) == 3
    shutil.rmtree(tmp_path / "run")
    again = start_ranks(["--resume", url, "--output-dir", str(tmp_path / "again")], 3)
    assert "resumed from" in end_ranks(again, 250)
    if sync == "bsp":
        assert fingerprint(tmp_path / "again") == fingerprint(tmp_path / "whole")
    assert (tmp_path / "bucket/summary.json").exists()


@pytest.fixture
def s3(monkeypatch):
    """An S3 server on this machine, with a bucket."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    port = free_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, **quiet)
    fs = fsspec.filesystem("s3", skip_instance_cache=True)

    def made():
        with suppress(Exception):
            fs.mkdir("s3://bucket")
            return True

    wait_until(made, 60, "moto")
    yield server
    server.kill()
    server.wait()


@slow
def test_a_mirror_on_s3(tmp_path, s3, capsys, unbroken):
    url = "s3://bucket/runs/x"
    run(tmp_path / "run", mirror=url)
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    names = [path.rpartition("/")[2] for path in fs.ls("bucket/runs/x/checkpoints")]
    assert sorted(names) == ["epoch-0002", "epoch-0003"]
    fs.rm_file("bucket/runs/x/summary.json")
    fs.rm_file(f"bucket/runs/x/checkpoints/epoch-0003/{MANIFEST}")
    resume(url, tmp_path / "again")
    said = capsys.readouterr().out
    assert re.search(r"skipped: .*/epoch-0003 is damaged: a file is missing", said)
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "again") == unbroken
    with pytest.raises(ValueError, match=r"mirror must be a URL that can be written, got s3://no"):
        run(tmp_path / "other", mirror="s3://nobody/x")
    assert not (tmp_path / "other").exists()
    s3.kill()  # an outage, and a new run that cannot begin
    s3.wait()
    with pytest.raises(ValueError, match=r"mirror must be a URL that can be written, got s3://bu"):
        run(tmp_path / "other", mirror="s3://bucket/y")
