"""Runs as processes of one command; a script of a few lines stands for train.py."""

import fcntl
import os
import signal
import threading

import pytest

from dbsl.base.errors import RunStopped
from dbsl.run.folder import LOCK
from dbsl.run.stopping import Stopping
from experiments.compare import jobs
from experiments.compare.jobs import Launch, is_finished, launch_all
from tests.helpers import wait_until

SCRIPT = """
import os, pathlib, signal, sys, time
kind, folder = sys.argv[1], pathlib.Path(sys.argv[sys.argv.index("--output-dir") + 1])
assert sys.argv[-2:] == ["--resume", "auto"]
folder.mkdir(exist_ok=True)
print("says", kind)
if kind in ("fails", "diverges"):
    sys.exit(2 if kind == "fails" else 3)
def stop(*_):
    if (folder / "checkpoints").exists():
        os._exit(1)  # a second signal ends a run at once
    (folder / "checkpoints/save-1").mkdir(parents=True, exist_ok=True)
    (folder / "checkpoints/save-1/manifest.json").touch()
    time.sleep(0.3)
    sys.exit(75)
if kind != "starting":  # train.py takes seconds until it listens
    signal.signal(signal.SIGTERM, stop)
began = time.time()
(folder / "device").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
(folder / "began").touch()
while kind in ("slow", "starting") and time.time() < began + 60:
    time.sleep(0.01)
while kind == "pair" and len(list(folder.parent.glob("*/began"))) < 2:  # as one of two at a time
    time.sleep(0.01)
    if time.time() > began + 60:
        sys.exit(3)
(folder / "summary.json").write_text("{}")
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(jobs, "SCRIPT", script)

    def launch(*kinds):
        return [
            Launch(f"{kind} {n}", tmp_path / f"runs/{n}", (kind,)) for n, kind in enumerate(kinds)
        ]

    return launch


def launch(runs, at_a_time=1, **options):
    with Stopping() as stopping:
        launch_all(runs, at_a_time, stopping, **options)


def test_as_many_run_at_a_time_as_was_asked_for_and_finished_ones_are_left_alone(make, tmp_path):
    runs = make("pair", "pair", "quick")
    (tmp_path / "runs/2").mkdir(parents=True)
    (tmp_path / "runs/2/summary.json").write_text("mine")
    launch(runs, 2)
    assert all(is_finished(run.folder) for run in runs)
    assert (tmp_path / "runs/2/summary.json").read_text() == "mine"
    assert (tmp_path / "runs/0.log").read_text() == "says pair\n"
    assert not (tmp_path / "runs/2.log").exists()


def test_one_at_a_time_prints_here(make, tmp_path, capfd):
    launch(make("quick", "quick"))
    printed = capfd.readouterr().out
    assert "run 1/2: quick 0" in printed
    assert printed.count("says quick") == 2
    assert not (tmp_path / "runs/0.log").exists()


@pytest.mark.parametrize("other", ["slow", "starting"])
def test_a_run_that_fails_stops_the_others_which_can_go_on(make, tmp_path, other):
    with pytest.raises(ValueError, match=r"got status 2 of .*runs/1 \(see .*runs/1.log\)"):
        launch(make(other, "fails", "quick"), 2)
    assert not any(is_finished(tmp_path / f"runs/{n}") for n in range(3))


def test_a_run_that_diverges_leaves_the_others_alone_and_is_told_at_the_end(make, tmp_path, capsys):
    launch(make("diverges", "quick", "quick"), 2)
    assert [is_finished(tmp_path / f"runs/{n}") for n in range(3)] == [False, True, True]
    line = f"warning: diverges 0 diverged and has no result (see {tmp_path}/runs/0.log)"
    assert capsys.readouterr().out.splitlines()[-1] == line


@pytest.mark.usefixtures("usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_runs_after_they_have_saved(make, tmp_path, number):
    def interrupt():
        wait_until(lambda: len(list(tmp_path.glob("runs/*/began"))) == 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(RunStopped, match="repeat the command to continue"):
        launch(make("slow", "starting", "quick"), 2)
    assert [p.parts[-3] for p in sorted(tmp_path.glob("runs/*/*/save-1"))] == ["0"]
    assert not (tmp_path / "runs/2").exists()


def test_what_was_ended_before_its_first_checkpoint_begins_anew(make, tmp_path):
    saved = tmp_path / "runs/1/checkpoints/epoch-0001/manifest.json"
    for path in (tmp_path / "runs/0/leftover", saved, tmp_path / "runs/1/leftover"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    launch(make("quick", "quick"))
    assert not (tmp_path / "runs/0/leftover").exists()
    assert (tmp_path / "runs/1/leftover").exists()


def test_a_run_under_way_elsewhere_is_left_alone(make, tmp_path):
    (run,) = make("quick")
    run.folder.mkdir(parents=True)
    with open(run.folder / LOCK, "w") as lock:
        lock.write("process 7 on another")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match=r"no run under way, got .* in use by process 7 on"):
            launch([run])
    assert (run.folder / LOCK).exists()


@pytest.mark.parametrize("visible", ["4,7", "GPU-a,GPU-b", None])
def test_runs_take_turns_on_the_devices_that_a_scheduler_gave(make, tmp_path, monkeypatch, visible):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launch(make("pair", "pair"), 2)
    found = {(tmp_path / f"runs/{n}/device").read_text() for n in (0, 1)}
    assert found == {*(visible or "0,1").split(",")}


def test_a_run_that_another_command_has_finished_meanwhile_is_left_alone(make, tmp_path):
    """Its folder has no checkpoint, as that of a run that came to nothing."""
    runs = make("quick", "quick")
    told = []

    def other_ends():
        told.append([run.folder.name for run in runs if is_finished(run.folder)])
        if len(told) == 1:
            runs[1].folder.mkdir()
            (runs[1].folder / "summary.json").write_text("the other's")

    launch(runs, on_finished=other_ends)
    assert (runs[1].folder / "summary.json").read_text() == "the other's"
    assert told == [["0"], ["0", "1"]]
