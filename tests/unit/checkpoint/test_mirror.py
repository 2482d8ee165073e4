"""A mirror is the folder or lags behind it; what is half there never counts."""

import itertools
import json
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import fsspec
import pytest
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from dbsl.checkpoint import disk
from dbsl.checkpoint.disk import Found, newest, prune, read_manifest, remove, write_shard
from dbsl.config.parse import RUN_FOLDER, parse_config
from dbsl.extras import mirror as mirroring
from dbsl.extras.mirror.bucket import tried
from dbsl.run.folder import LOCK
from tests.unit.checkpoint.test_checkpoint import write
from train import Config

URL = "memory://bucket/run"
CALLS = ("ls", "cat_file", "put_file", "get_file", "rm_file", "rm")
MAIN = SimpleNamespace(is_main_process=True, num_processes=1, print=print)


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    for name in ("dbsl.extras.mirror.bucket.pause_s", "dbsl.extras.mirror.pause_s"):
        monkeypatch.setattr(name, lambda number: 0.001)
    return wiped(fsspec.filesystem("memory"))


def wiped(fs):
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    return fs


@pytest.fixture
def calls(monkeypatch):
    """Count the calls of a file system; those that `fails` names fail, a write half-way."""

    calls = SimpleNamespace(count=0, failed=0, fails=lambda number: False)
    for name in CALLS:
        original = getattr(MemoryFileSystem, name)

        def call(fs, *arguments, name=name, original=original, **options):
            calls.count += 1
            if not calls.fails(calls.count):
                return original(fs, *arguments, **options)
            calls.failed += 1
            if name == "put_file":
                with open(arguments[0], "rb") as file:
                    content = file.read()
                fs.pipe_file(arguments[1], content[: len(content) // 2])
            raise ConnectionResetError("the connection was cut")

        monkeypatch.setattr(MemoryFileSystem, name, call)
    return calls


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a checkpoint of a number: written once, since that waits for the disk."""
    return cache(lambda sequence: write(tmp_path_factory.mktemp("checkpoints"), sequence))


@pytest.fixture
def folder_with(checkpoint):
    def add(path, *sequences):
        for sequence in (0, *sequences):
            if sequence:
                source = checkpoint(sequence)
                shutil.copytree(source, path / "checkpoints" / source.name, dirs_exist_ok=True)
            for name in ("config.yaml", "metrics.jsonl", "plots/plan.png"):
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_text(f"{name} at {sequence}")
        return path

    return add


class Mirror(mirroring.Mirror):
    """A mirror for as long as a `with` lasts."""

    def __enter__(self):
        self.report(None, ())
        return self

    def __exit__(self, kind, *_):
        self.close(kind)


def mirror_of(folder, found=None, **settings):
    mirror = Mirror()
    mirror.open(Config(**{"mirror": URL, **settings}), folder, found, MAIN)
    return mirror


@pytest.fixture
def mirrored(tmp_path, folder_with):
    """Return the folder of a run with these checkpoints, which was mirrored."""

    def mirrored(*sequences, name="run", **settings):
        folder = folder_with(tmp_path / name, *sequences)
        with mirror_of(folder, **settings):
            pass
        return folder

    return mirrored


pulled = mirroring.Mirror().config


def pull(path):
    """Return the sequence of the checkpoint that was pulled, which is seen to be whole."""
    assert pulled(Config(resume=URL, output_dir=str(path)), MAIN).resume == str(path)
    (folder,) = (path / "checkpoints").iterdir()
    found = Found.at(folder)
    found.check()
    manifest = found.manifest
    for name in ("config.yaml", "metrics.jsonl"):
        assert int((path / name).read_text().split()[-1]) >= manifest.sequence
    return manifest.sequence


def names_in(memory, folder="checkpoints"):
    inside = (path.split(f"/bucket/run/{folder}/") for path in memory.find("/bucket/run"))
    return sorted({parts[1].partition("/")[0] for parts in inside if len(parts) == 2})


def test_a_mirror_follows_the_folder(tmp_path, memory, folder_with):
    folder = folder_with(tmp_path / "run", 1, 2)
    (folder / "README.md").write_text("of a run that goes on now")
    with mirror_of(folder) as mirror:
        mirror.wait()
        assert names_in(memory) == ["save-000001", "save-000002"]
        folder_with(folder, 3)
        prune(folder, 2)
        (folder / "README.md").unlink()
    assert names_in(memory) == ["save-000002", "save-000003"]
    expected = {p for p in folder.rglob("*") if p.is_file() and p.name != "mirror.json"}
    there = {path.removeprefix("/bucket/run/") for path in memory.find("/bucket/run")}
    own = {path for path in there if not path.endswith("mirror.json") and "/run/" not in path}
    assert own == {path.relative_to(folder).as_posix() for path in expected}
    for name in own:
        assert memory.cat_file(f"/bucket/run/{name}") == (folder / name).read_bytes()
    assert mirror.failures == 0
    assert pull(tmp_path / "pulled") == 3
    assert (tmp_path / "pulled/plots/plan.png").read_text() == "plots/plan.png at 3"


def test_any_call_may_fail_once_and_the_mirror_is_whole_nonetheless(
    tmp_path, memory, calls, capsys, folder_with
):
    for number in itertools.count(1):
        wiped(memory)
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        folder = folder_with(tmp_path / "run", 1)
        calls.count, calls.failed, calls.fails = 0, 0, lambda count, n=number: count == n
        with mirror_of(folder) as mirror:
            mirror.wait()
            folder_with(folder, 2)
            prune(folder, 1)
        said = capsys.readouterr().out
        assert said.count("could not be written (the connection was cut)") == mirror.failures <= 1
        assert said.count("is up to date again") == mirror.failures
        assert names_in(memory) == ["save-000002"]
        if not calls.failed:
            break
    assert number > 30  # calls that there are
    assert pull(tmp_path / "pulled") == 2


def test_a_run_cut_off_at_any_call_leaves_a_whole_checkpoint(
    tmp_path, memory, calls, monkeypatch, folder_with, mirrored
):
    monkeypatch.setattr(mirroring, "_TRIES", 1)
    folder, pulls = mirrored(1), []
    before = dict(memory.store)
    for number in itertools.count(1):
        wiped(memory).store.update(before)
        shutil.rmtree(folder / "checkpoints")
        old = folder_with(folder, 1) / "checkpoints/save-000001"
        with mirror_of(folder, Found.at(old)) as mirror:
            mirror.wait()
            folder_with(folder, 2)
            remove(old)
            calls.count, calls.failed, calls.fails = 0, 0, lambda count, n=number: count >= n
        calls.fails = lambda count: False
        shutil.rmtree(tmp_path / "pulled", ignore_errors=True)
        pulls.append(pull(tmp_path / "pulled"))
        if not calls.failed:
            break
    assert number > 15
    assert set(pulls) == {1, 2}
    assert pulls == sorted(pulls)


def test_a_pull_may_lose_the_connection_at_any_call(tmp_path, calls, capsys, mirrored):
    mirrored(1, 2)
    for number in itertools.count(1):
        calls.count, calls.failed, calls.fails = 0, 0, lambda count, n=number: count == n
        assert pull(tmp_path / f"pulled{number}") == 2
        if not calls.failed:
            break
    for first in range(1, number):
        calls.count, calls.fails = 0, lambda count, n=first: count >= n
        with pytest.raises(ValueError, match=r"^resume must be a URL that can be read, got .* cut"):
            pull(tmp_path / "never")
    assert not [p for p in tmp_path.iterdir() if "never" in p.name]
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        *((kind, 1) for kind in (PermissionError, FileNotFoundError, ImportError)),
        (NotImplementedError, 1),  # no second try can mend these
        (json.JSONDecodeError("cut off", '{"items": [', 11), 2),
    ],
)
def test_an_answer_that_is_cut_off_is_asked_for_again_and_what_cannot_be_mended_is_not(
    error, tries
):
    calls = []

    def call():
        calls.append(error)
        if len(calls) < 2:
            raise error

    with pytest.raises(error) if tries == 1 else nullcontext():
        tried(call)
    assert len(calls) == tries


@pytest.mark.parametrize("kind", ["byte", "file", "listing", "half a listing", "way out"])
def test_a_damaged_checkpoint_is_passed_over_with_a_line(tmp_path, memory, capsys, kind, mirrored):
    mirrored(1, 2)
    newest = "/bucket/run/checkpoints/save-000002"
    listing = json.loads(memory.cat_file(f"{newest}/mirror.json"))
    if kind == "byte":
        content = memory.cat_file(f"{newest}/rank-00000.safetensors")
        memory.pipe_file(f"{newest}/rank-00000.safetensors", content[:-1] + b"\x01")
    elif kind == "way out":
        listing["files"]["run/../../../out"] = {}
        memory.pipe_file(f"{newest}/mirror.json", json.dumps(listing).encode())
    elif kind == "half a listing":
        memory.pipe_file(f"{newest}/mirror.json", json.dumps(listing).encode()[:100])
    else:
        memory.rm_file(f"{newest}/{'mirror.json' if kind == 'listing' else 'run/config.yaml'}")
    assert pull(tmp_path / "pulled") == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "skipped" in x]
    assert line.startswith(f"warning: skipped: {URL}/checkpoints/save-000002 is ")


def test_a_url_without_a_whole_checkpoint_cannot_be_resumed(tmp_path, mirrored):
    mirrored()
    with pytest.raises(ValueError, match=f"a URL with a complete checkpoint, got {URL}"):
        pull(tmp_path / "pulled")
    with pytest.raises(ValueError, match=f"a URL with a complete checkpoint, got {URL}"):
        parse_config(Config, ["--resume", URL])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_is_there_is_not_pulled_into_but_one_of_a_killed_start_is(tmp_path, mirrored):
    mirrored(1)
    with pytest.raises(ValueError, match=r"output_dir must be a new folder, got .*run, which"):
        pull(tmp_path / "run")
    folder = tmp_path / "pulled"
    folder.mkdir()
    text = "output_dir must be a new folder"
    with FileLock(folder / LOCK), pytest.raises(ValueError, match=text):
        pull(folder)
    pull(folder)
    assert newest(folder).manifest.sequence == 1


def test_the_newest_state_wins_on_a_slow_connection(tmp_path, memory, monkeypatch, folder_with):
    folder, ready, go, put = folder_with(tmp_path / "run"), threading.Event(), threading.Event(), []
    original = MemoryFileSystem.put_file

    def slow(fs, local, there, **options):
        put.append(there)
        if "save-000001/" in there:
            ready.set()
            assert go.wait(10)
        return original(fs, local, there, **options)

    with mirror_of(folder) as mirror:
        mirror.wait()
        monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
        folder_with(folder, 1)
        mirror.saved()
        assert ready.wait(10)
        for sequence in range(2, 6):
            folder_with(folder, sequence)
            prune(folder, 1, mirror.uploading)
            mirror.saved()
        assert (folder / "checkpoints/save-000001").exists()  # it is on its way
        go.set()
        mirror.wait()
        prune(folder, 1)
    whole = {path.split("/")[-2] for path in put if path.endswith("manifest.json")}
    assert whole == {"save-000001", "save-000005"}
    assert names_in(memory) == ["save-000005"]


def test_a_connection_that_hangs_holds_the_end_up_for_so_long_only(
    tmp_path, monkeypatch, capsys, folder_with
):
    folder, go = folder_with(tmp_path / "run", 1), threading.Event()
    mirror, put_file = mirror_of(folder), MemoryFileSystem.put_file
    hangs = lambda *what, **how: go.wait(20) and put_file(*what, **how)  # noqa: E731
    monkeypatch.setattr(MemoryFileSystem, "put_file", hangs)
    monkeypatch.setattr(mirroring, "_PATIENCE_S", 0.1)
    with mirror:
        pass
    assert f"warning: {URL} lacks the run's last state" in capsys.readouterr().out
    go.set()
    (thread,) = (t for t in threading.enumerate() if t.name == "mirror")
    thread.join(20)


def test_shards_that_come_late_are_waited_for_and_lost_ones_are_not(tmp_path, memory, folder_with):
    checkpoint = folder_with(tmp_path / "run", 1) / "checkpoints/save-000001"
    with mirror_of(tmp_path / "run") as mirror:
        mirror.saving = {1: {1}}.__getitem__  # and rank 2 saves nothing
        mirror.saved()
        write = partial(write_shard, checkpoint, 1, {"rank": 1}, {}, late=True)
        threading.Timer(0.3, write).start()
        mirror._ending = False
    there = names_in(memory, "checkpoints/save-000001")
    assert {"rank-00001.json", "rank-00001.safetensors", "rank-00001.sums.json"} <= {*there}


def test_a_checkpoint_made_anew_under_its_old_name_replaces_it(tmp_path, folder_with, mirrored):
    folder = mirrored(1, 2)
    old = folder / "checkpoints/save-000001"
    remove(folder / "checkpoints/save-000002")  # the run goes back to its first
    found = Found.at(old)
    with mirror_of(folder, found, resume=str(old)):
        folder_with(folder, 2)
        shard = write_shard(folder / "checkpoints/save-000002", 0, {"rank": "anew"}, {})
        manifest = replace(read_manifest(folder / "checkpoints/save-000002"), files=shard)
        disk.write_manifest(folder / "checkpoints/save-000002", manifest)
    assert pull(tmp_path / "pulled") == 2
    text = (tmp_path / "pulled/checkpoints/save-000002/rank-00000.json").read_text()
    assert "anew" in text


def test_another_process_that_takes_the_mirror_over_ends_this_ones(tmp_path, capsys, folder_with):
    folder = folder_with(tmp_path / "run", 1)
    found = Found(folder, None, read_manifest(folder / "checkpoints/save-000001"))
    with mirror_of(folder) as first:
        first.wait()
        mirror_of(folder, found)
        folder_with(folder, 2)
        first.wait()
        assert "another process mirrors to" in capsys.readouterr().out
    assert pull(tmp_path / "pulled") == 1


def test_a_mirror_of_another_run_or_ahead_of_this_one_is_refused(
    tmp_path, memory, folder_with, mirrored, monkeypatch
):
    folder = mirrored(1, 2)
    before = dict(memory.store)
    other = folder_with(tmp_path / "other", 1)
    message = r"which has another run \(--resume memory.* continues"
    for settings in ({}, {"resume": "auto"}):
        with pytest.raises(ValueError, match=message):
            mirror_of(other, **settings)
    old = folder / "checkpoints/save-000001"
    with pytest.raises(ValueError, match=r"mirror must not be ahead of .*, got save-000002 at mem"):
        mirror_of(folder, Found.at(old), resume=str(folder))
    assert memory.store == before
    with monkeypatch.context() as launch:  # restarted, after it went back to a named checkpoint
        launch.setattr(mirroring, "recall", {RUN_FOLDER: str(folder)}.get)
        with mirror_of(folder, Found.at(old), resume=str(folder)):
            pass
    wiped(memory).pipe_file("/bucket/run/thesis.pdf", b"dear")
    with pytest.raises(ValueError, match=r"mirror must be empty .*, which has thesis.pdf"):
        mirror_of(other)


def test_a_finished_run_that_kept_no_checkpoint_is_not_written_over(tmp_path, memory, folder_with):
    folder = folder_with(tmp_path / "run")
    (folder / "summary.json").write_text("{}")
    with mirror_of(folder):
        pass
    before = dict(memory.store)
    with pytest.raises(ValueError, match="which has another run"):
        mirror_of(folder_with(tmp_path / "other"), resume="auto")
    assert memory.store == before


def test_a_run_lost_before_its_first_checkpoint_begins_again(
    tmp_path, memory, folder_with, mirrored
):
    mirrored()
    again = {"resume": "auto", "output_dir": str(tmp_path / "again"), "mirror": URL}
    config = Config(**again)
    assert pulled(config, MAIN) == config
    assert parse_config(Config, ["--mirror", URL, "--resume", "auto", "--output-dir", "no"])
    with pytest.raises(ValueError, match="another run"):
        mirror_of(folder_with(tmp_path / "again", 1))
    with mirror_of(tmp_path / "again", resume="auto"):
        pass
    assert names_in(memory) == ["save-000001"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nowhere://x", r"written, got nowhere://x \(Protocol not known: nowhere\)"),
        ("s3://bucket/run", r"written, got s3://bucket/run \(.*: pip install s3fs\)"),
        ("file:///proc/no/such", r"written, got file:///proc/no/such \(\[Errno 2\]"),
        ("http://127.0.0.1:1/x", r"written, got http://127.0.0.1:1/x \("),
    ],
)
def test_a_url_that_cannot_be_written_is_refused_in_one_line(tmp_path, monkeypatch, url, message):
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(ValueError, match=f"mirror must be a URL that can be {message}") as error:
        mirror_of(tmp_path, mirror=url)
    assert "\n" not in str(error.value)
    message = r"resume must be a URL (that can be read|with a co.*), got"
    with pytest.raises(ValueError, match=message):
        parse_config(Config, ["--resume", url])


def test_a_url_without_permission_is_refused(tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError("Access Denied")

    monkeypatch.setattr(LocalFileSystem, "put_file", denied)
    with pytest.raises(ValueError, match=r"can be written, got file://.*bucket \(Access Denied\)"):
        mirror_of(tmp_path, mirror=f"file://{tmp_path}/bucket")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mirror": "/mnt/x"}, "mirror must be a URL such as s3://bucket/runs/x, or none, got"),
        ({"mirror": "file://"}, "mirror must name a folder at the URL, got file://"),
        ({"mirror": "s3:///"}, "mirror must name a folder at the URL, got s3:///"),
        ({"resume": "file:///"}, "resume must name a folder at the URL, got file:///"),
        ({"mirror": "ftp://me:secret@host/x"}, "mirror must have no password in it"),
        ({"resume": URL, "eval_only": True}, "resume must be a run folder with eval_only, got"),
        ({"resume": URL, "plan_only": True}, "resume must be a run folder with plan_only, got"),
    ],
)
def test_what_does_not_go_with_a_url_is_refused(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        Config(**settings)
    assert "secret" not in str(error.value)
