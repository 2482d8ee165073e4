"""The run folder: taken before anything else, and gone again where nothing came of it."""

import errno
import fcntl
import os
import signal
from pathlib import Path

import pytest

from dbsl.base.errors import SettingError, one_line_errors
from dbsl.run.folder import LockedFolder, default_folder, holder_of
from tests.helpers import run, short
from train import Config


def test_runs_of_one_second_that_nobody_named_get_a_folder_each(tmp_path, accelerator):
    path = tmp_path / "runs/digits-resnet18-now"
    folders = [LockedFolder(path, accelerator, new=True, named=False) for _ in range(3)]
    assert [folder.path.name[len(path.name) :] for folder in folders] == ["", "-2", "-3"]
    for folder in folders:
        folder.release()
    with LockedFolder(path, accelerator, new=True) as folder:
        (folder.path / "something").touch()
    with pytest.raises(ValueError, match="output_dir must be a new folder"):
        LockedFolder(path, accelerator, new=True)


def test_a_folder_is_named_after_the_weights_that_a_run_starts_from():
    assert default_folder(Config()).name.startswith("digits-resnet18-")
    local = default_folder(Config(model="local-dir:runs/first/"))
    assert local.parent == Path("runs")
    assert local.name.startswith("digits-first-")


def test_a_folder_left_empty_goes_again_with_the_parents_that_were_made_for_it(
    tmp_path, accelerator
):
    (tmp_path / "mine").mkdir()  # this stays: it was somebody else's
    for name in ("mine/a/b", "mine"):
        with LockedFolder(tmp_path / name, accelerator, new=True) as folder:
            assert (folder.path / ".lock").exists()
        assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


def test_a_folder_that_cannot_be_written_is_refused_before_any_data_is_read(monkeypatch):
    monkeypatch.setattr("train.load_images", lambda *_: pytest.fail("went on"))
    with pytest.raises(ValueError, match="output_dir must be a folder that can be written"):
        run("/proc/no/such")


def test_a_killed_process_frees_its_folder(tmp_path, accelerator):
    told, tell = os.pipe()
    if (child := os.fork()) == 0:
        with LockedFolder(tmp_path / "run", accelerator, new=True):
            os.write(tell, b"held")
            signal.pause()
    os.read(told, 4)
    assert holder_of(tmp_path / "run").startswith(f"process {child} on ")
    with pytest.raises(ValueError, match=f"in use by process {child} on "):
        LockedFolder(tmp_path / "run", accelerator, new=False)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert holder_of(tmp_path / "run") is None
    with LockedFolder(tmp_path / "run", accelerator, new=False):
        assert holder_of(tmp_path / "run").startswith(f"process {os.getpid()} on ")


def test_a_file_system_without_locks_is_refused_in_one_line(tmp_path, accelerator, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(ValueError, match=r"output_dir must be a folder .* No locks available"):
        LockedFolder(tmp_path / "run", accelerator, new=True)


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tmp_path, accelerator, monkeypatch):
    def full(path, *_, **__):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    (tmp_path / "mine").mkdir()
    for name in ("run", "mine"):
        with pytest.raises(SettingError, match=r"output_dir must be a folder .* No space left"):
            LockedFolder(tmp_path / name, accelerator, new=True)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


@pytest.mark.parametrize("model", short(["test_convnext", "vgg11"], "test_convnext"))
def test_images_too_small_for_the_model_are_refused_in_one_line(tmp_path, model):
    line = rf"^model must take images of 16 px, got {model} \(.*size.*\)$"
    with pytest.raises(SettingError, match=line):
        run(tmp_path / "run", model=model, resolutions=(16, 64))
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_measuring_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        assert (tmp_path / "run").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr("dbsl.run.times.profile_workers", interrupt)
    with pytest.raises(SystemExit) as ended, one_line_errors():
        run(tmp_path / "run")
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("workers", "rounds", "samples"), [(4, 1, 3), (2, 2, 7)])
def test_too_few_images_say_what_to_do(tmp_path, workers, rounds, samples):
    # At 16 px the last maps of this model are one pixel: batch norm needs two images a worker.
    settings = {"workers": workers, "rounds_per_epoch": rounds}
    with pytest.raises(ValueError, match=rf"dataset must have at least .* got {samples}: lower --"):
        run(tmp_path / "run", train_samples=samples, **settings)
    assert not (tmp_path / "run").exists()
    run(tmp_path / "run", train_samples=2 * workers * rounds, plan_only=True, **settings)
