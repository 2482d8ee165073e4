"""A run that was killed or stopped goes on to the bits of one that was not."""

import itertools
import json
import os
import shutil
import signal
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

from dbsl.base.errors import EXIT_STOPPED, RunStopped, one_line_errors
from dbsl.checkpoint import disk, resume
from dbsl.checkpoint.checkpointer import Checkpointer
from dbsl.checkpoint.disk import Found, newest, read_manifest
from dbsl.checkpoint.resume import changed_settings
from dbsl.cluster.simulated import SimulatedCluster
from dbsl.cluster.steps import Stepper
from dbsl.config.complete import with_resolved
from dbsl.config.hooks import found_extras
from dbsl.config.parse import parse_config
from dbsl.log.rows import in_code, read_metrics
from dbsl.model import load_model
from dbsl.open import _given_now
from dbsl.plan.types import LostWorker
from dbsl.run.evaluation import Evaluation
from dbsl.run.folder import RunFolder
from tests import helpers
from tests.helpers import (
    fingerprint,
    metrics_of,
    rounds_of,
    slow,
    start_ranks,
    to_flags,
    torchrun,
    wait_all,
    wait_until,
)
from train import Config

SETTINGS = {
    "resolutions": (16, 32),
    "epochs": 3,
    "lr_milestones": (2,),
    "dropout": (0.1, 0.3),
    "checkpoint_every": 1,
    "log_every": 2,
}
ROUNDS = {"small_workers": 1, "large_batch_size": (3,), "rounds_per_epoch": 2}
JOINT = {"local_batch_sizes": (3, 3, 4, 6)}
ONE_SIDE = {"resolutions": (16,), "dropout": (0.1,)}
MODES = {
    "bsp": ROUNDS,
    "ssp": {**ROUNDS, "sync": "ssp", "slowdown": ("0:2.0",)},
    "asp": {**ROUNDS, "sync": "asp", "slowdown": ("3:2.5",), "time_noise": 0.1},
    "balance": {**ROUNDS, "balance": "dynamic", "slowdown": ("3:3.0",)},
    "step": {**JOINT, "sync": "step"},
    "link": {
        "sync": "step",
        "global_batch_size": 18,
        "workers": 3,
        "rounds_per_epoch": 2,
        "balance": "dynamic",
        "slowdown": ("0:3.0",),
        "time_noise": 0.5,
        "link_gbps": 1.0,
        "resolutions": (16,),
        "dropout": (0.1,),
        "train_samples": 90,
        "epochs": 5,
    },
    "gradients": {**JOINT, "push": "gradients", "push_every": 2},
    "delta": {**ROUNDS, "merge": "delta", "ema_decay": 0.6, "mixup": 0.4, "cutmix": 1.0},
    "gradients-asp": {**JOINT, "push": "gradients", "sync": "asp"},
    "micro": {**JOINT, "push": "gradients", "push_every": 2, "micro_batch_size": (2, 4)},
}


def run(folder, **settings):
    return helpers.run(folder, **{**SETTINGS, **settings})


def at_step(monkeypatch, number, act):
    """Do something when a run has taken so many steps."""
    after_step, count = Checkpointer.after_step, itertools.count(1)

    def counted(self, **options):
        if next(count) == number:
            act()
        after_step(self, **options)

    monkeypatch.setattr(Checkpointer, "after_step", counted)


def stopped(folder, step, **settings):
    """Run until a signal comes after so many steps, and saves."""
    with helpers.stopped_at_step(step):
        run(folder, **settings)


def killed(folder, monkeypatch, step, **settings):
    """Run in a process of its own, and kill that after so many steps and a checkpoint."""

    def kill():
        deadline = time.monotonic() + 30  # checkpoints are written beside the training
        while not [*folder.glob("checkpoints/*/manifest.json")] and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            at_step(monkeypatch, step, kill)
            run(folder, **settings)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [*folder.glob("checkpoints/*/manifest.json")]  # else nothing would be resumed
    assert not (folder / "summary.json").exists()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folders = {}

    def of(mode, precision):
        key = mode, precision
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("unbroken") / mode
            run(folders[key], **MODES[mode], mixed_precision=precision)
        return fingerprint(folders[key])

    return of


@pytest.fixture
def misaligned(monkeypatch):
    """Have a resumed run's tensors lie where an unbroken run never has them, whatever the CPU."""
    read, known = disk.read_shard, {}

    def moved(state):
        if isinstance(state, dict):
            return {key: moved(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return type(state)(map(moved, state))
        if not isinstance(state, torch.Tensor) or not state.is_floating_point():
            return state
        if id(state) not in known:  # one tensor may be in several places
            flat = torch.empty(state.numel() + 3, dtype=state.dtype)[3:]
            known[id(state)] = state, flat.view(state.shape).copy_(state)
        return known[id(state)][1]

    monkeypatch.setattr(disk, "read_shard", lambda *arguments: moved(read(*arguments)))


KILLED = {"balance": "epochs-float32", "gradients": "in-rounds-bf16"}  # the rest is slow
AT_STEP = {"step": 7, "link": 19, "gradients": 20, "gradients-asp": 20, "ssp": 45, "asp": 60}


@pytest.mark.usefixtures("misaligned")
@pytest.mark.parametrize(
    ("mode", "every", "precision"),
    [
        pytest.param(
            mode, every, precision, id=f"{mode}-{name}", marks=[slow] * (KILLED.get(mode) != name)
        )
        for mode in MODES
        for name, every, precision in (
            ("epochs-float32", 1, "no"),
            ("in-rounds-bf16", "0.0001m", "bf16"),
        )
    ],
)
def test_killed_and_resumed_is_the_unbroken_run(
    tmp_path, monkeypatch, unbroken, mode, every, precision
):
    expected = unbroken(mode, precision)
    settings = {**MODES[mode], "checkpoint_every": every, "resume": "auto"}
    settings["mixed_precision"] = precision
    folder = tmp_path / "run"
    with monkeypatch.context() as patches:
        killed(folder, patches, AT_STEP.get(mode, 30), **settings)
    run(folder, **settings)
    assert fingerprint(folder) == expected


STOPPED = {("step", "no"), ("asp", "bf16")}  # the rest is slow


@pytest.mark.usefixtures("misaligned", "usual_signals")
@pytest.mark.parametrize(
    ("mode", "number", "precision"),
    [
        pytest.param(mode, number, precision, marks=[slow] * ((mode, precision) not in STOPPED))
        for mode in ("bsp", "asp", "step", "gradients", "link")
        for number, precision in ((signal.SIGTERM, "no"), (signal.SIGINT, "bf16"))
    ],
)
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(
    tmp_path, monkeypatch, capsys, unbroken, mode, number, precision
):
    expected = unbroken(mode, precision)
    settings = {**MODES[mode], "checkpoint_every": 0, "mixed_precision": precision}
    with monkeypatch.context() as patches:
        at_step(
            patches,
            {"gradients": 9, "link": 14}.get(mode, 11),
            lambda: os.kill(os.getpid(), number),
        )
        with pytest.raises(SystemExit) as stopped, one_line_errors():
            run(tmp_path / "run", **settings)
    assert stopped.value.code == EXIT_STOPPED == 75
    assert signal.getsignal(number) is not None
    said = capsys.readouterr().err
    assert f"stopped ({number.name}) and saved as {tmp_path / 'run/checkpoints/save-'}" in said
    assert f"--resume {tmp_path / 'run'}" in said
    state = json.loads((tmp_path / "run/checkpoints/save-000001/rank-00000.json").read_text())
    run(tmp_path / "run", **settings, resume=str(tmp_path / "run"))
    assert fingerprint(tmp_path / "run") == expected
    if mode != "gradients":  # whose rounds are recorded by epoch
        content = (tmp_path / "run/metrics.jsonl").read_bytes()[state["log"]["metrics_bytes"] :]
        first = next(e for e in map(json.loads, content.splitlines()) if e["event"] == "round")
        assert 0 < state["progress"]["steps"] < first["steps"]  # in the middle of a round


def test_a_worker_lost_until_the_state_is_copied_is_in_the_checkpoint_that_max_minutes_leaves(
    tmp_path, monkeypatch
):
    @contextmanager
    def held(cluster):
        cluster._membership.append(LostWorker(1, 1, 0, 5, "its process died"))
        yield

    monkeypatch.setattr(SimulatedCluster, "held", held)
    with pytest.raises(RunStopped, match="max_minutes"):
        run(tmp_path / "run", **ROUNDS, max_minutes=1e-6)
    (shard,) = tmp_path.glob("run/checkpoints/save-*/rank-00000.json")
    log = json.loads(shard.read_text())["log"]
    assert (log["lost_workers"], log["lost_samples"]) == ([1], 5)
    saved = (tmp_path / "run/metrics.jsonl").read_bytes()[: log["metrics_bytes"]]
    assert [row["event"] for row in map(json.loads, saved.splitlines())].count("lost") == 1


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run(folder, **ROUNDS)
    return folder


@pytest.fixture(scope="module")
def ended(finished, tmp_path_factory):
    """A run of three epochs that was killed between its last checkpoint and its summary."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("ended") / "run")
    (folder / "summary.json").unlink()
    (folder / "checkpoints/epoch-0004").mkdir()  # never whole: a run that goes on removes it
    return folder


def files_of(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: path.read_bytes() for path in files}


def test_a_finished_run_is_left_as_it_is(finished, capsys):
    before = fingerprint(finished)
    run(finished, **ROUNDS, resume="auto")
    said = capsys.readouterr().out
    assert "is finished: nothing to resume" in said
    assert "without effect" not in said
    run(finished, **ROUNDS | {"lr": 0.5, "log_every": 7}, model="resnet18", resume="auto")
    told, over = capsys.readouterr().out.splitlines()[-2:]
    words = "model test_resnet -> resnet18"
    assert told == f"warning: without effect on a finished run: {words}, lr 0.02 -> 0.5"
    assert "is finished: nothing to resume" in over
    with pytest.raises(ValueError, match=r"epochs must be at least 3, which .*, got 1$"):
        run(finished, **ROUNDS, resume="auto", epochs=1, lr_milestones=None)
    assert fingerprint(finished) == before


def test_a_run_that_keeps_no_checkpoint_is_not_made_longer_by_starting_again(tmp_path):
    settings = {**ROUNDS, **ONE_SIDE, "lr_milestones": None, "keep_checkpoints": 0}
    run(tmp_path / "run", **settings, epochs=1, save_best=False)
    before = files_of(tmp_path / "run")
    assert not [path for path in before if "checkpoints" in path.parts]
    assert [p.name for p in before if p.suffix == ".safetensors"] == ["model.safetensors"]
    message = r"keep_checkpoints must be at least 1 .* without a checkpoint in .*run$"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **settings, epochs=2, resume="auto")
    assert files_of(tmp_path / "run") == before


def test_a_finished_run_that_is_made_longer_is_not_finished_until_it_ends(tmp_path):
    settings = {**ROUNDS, **ONE_SIDE, "lr_milestones": None}
    run(tmp_path / "run", **settings, epochs=1)
    settings |= {"resume": "auto"}
    stopped(tmp_path / "run", 40, **settings, epochs=3)
    assert not (tmp_path / "run/summary.json").exists()
    with pytest.raises(ValueError, match=r"^epochs must be above the 2 that are complete, got 1$"):
        run(tmp_path / "run", **settings, epochs=1)
    run(tmp_path / "run", **settings, epochs=3)
    assert json.loads((tmp_path / "run/summary.json").read_text())["epochs"] == 3


def test_a_changed_setting_is_listed_and_needs_consent_if_it_changes_the_training(
    ended, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(ended, tmp_path / "run")
    again = {**ROUNDS, "resume": str(folder / "checkpoints/epoch-0002"), "lr": 0.01}
    with pytest.raises(ValueError, match=r"allow_config_change must be given .* lr 0.02 -> 0.01$"):
        run(folder, **again, keep_checkpoints=7)
    printed = capsys.readouterr().out
    assert "changed since the checkpoint: lr 0.02 -> 0.01" in printed
    assert "changed since the checkpoint: keep_checkpoints 2 -> 7" in printed
    left = {name: extra for name, extra in found_extras().items() if name != "noise"}
    monkeypatch.setattr(resume, "found_extras", lambda: left)  # its file is not there any more
    run(folder, **again, allow_config_change=True)
    assert "warning: state is dropped of extras that are gone: noise\n" in capsys.readouterr().out
    assert {e["learning_rate"] for e in rounds_of(folder) if e["epoch"] == 2} == {0.002}
    assert (folder / "checkpoints/epoch-0003.old").is_dir()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "test_efficientnet"}, "model must stay test_resnet, whose weights the run has"),
        (
            {"optimizer": "adamw", "momentum": 0.8},
            "optimizer must stay sgd, whose state the run has",
        ),
        ({"opt_kwargs": ("maximize=True",)}, "opt_kwargs must stay empty, whose state the run has"),
        ({"lr": 0.01, "allow_config_change": False}, "allow_config_change must be given"),
        ({"epochs": 2, "lr_milestones": (1,)}, "epochs must be above the 3 that are complete"),
    ],
    ids=["model", "optimizer", "opt_kwargs", "lr", "epochs"],
)
def test_a_refused_resume_leaves_all_as_it_was(ended, tmp_path, settings, message):
    folder = tmp_path / "run"
    shutil.copytree(ended, folder)
    before = files_of(folder)
    with pytest.raises(ValueError, match=message):
        run(folder, **ROUNDS, resume="auto", **{"allow_config_change": True, **settings})
    assert files_of(folder) == before
    assert (folder / "checkpoints/epoch-0004").exists()


def test_another_model_is_refused_inside_an_epoch_too(left, tmp_path):
    """The weights lie elsewhere than those of an epoch's end."""
    folder = shutil.copytree(left("bsp", True), tmp_path / "run")
    before = files_of(folder)
    settings = {**MODES["bsp"], "train_samples": 90, "resume": str(folder), "model": "test_vit"}
    with pytest.raises(ValueError, match=r"^model must stay .* weights the run has, got test_vit$"):
        run(folder, **settings, allow_config_change=True)
    assert files_of(folder) == before


def test_a_checkpoint_of_other_classes_says_so(ended, tmp_path, monkeypatch):
    shutil.copytree(ended, tmp_path / "run")
    monkeypatch.setattr(
        "dbsl.checkpoint.resume.read_manifest",
        lambda folder: replace(read_manifest(folder), classes=3),
    )
    with pytest.raises(ValueError, match="got 3 classes in the checkpoint, 10 in the data"):
        run(tmp_path / "run", **ROUNDS, resume="auto", epochs=4)


# Without a barrier, a worker of the longer run had begun its next epoch before the last had ended.
@pytest.mark.parametrize(
    "mode", ["bsp", pytest.param("step", marks=slow), pytest.param("gradients", marks=slow)]
)
def test_a_run_made_longer_is_one_that_was_that_long(tmp_path, mode):
    settings = {**MODES[mode], "warmup_epochs": 0, "schedule": "fixed", "dropout": (0.1,)}
    settings |= {"checkpoint_every": 0, "lr_milestones": (1,)}  # the last is saved all the same
    run(tmp_path / "whole", **settings, epochs=3)
    run(tmp_path / "longer", **settings, epochs=2)
    run(tmp_path / "longer", **settings, epochs=3, resume="auto")
    rows = [fingerprint(tmp_path / name)[0] for name in ("whole", "longer")]
    kinds = ("round", "eval", "noise")
    assert [[r for r in of if r["event"] in kinds] for of in rows] == [
        [r for r in rows[0] if r["event"] in kinds]
    ] * 2
    assert fingerprint(tmp_path / "whole")[1] == fingerprint(tmp_path / "longer")[1]


@pytest.mark.parametrize(
    "workers", [pytest.param(4, marks=slow), 3], ids=["same workers", "other workers"]
)
def test_an_epoch_under_way_keeps_its_resolution_where_a_run_is_made_longer(tmp_path, workers):
    settings = {**ROUNDS, "large_batch_size": (4, 8), "lr_milestones": None}
    with pytest.raises(RunStopped):
        run(tmp_path / "run", **settings, epochs=2, max_minutes=1e-6)
    before = files_of(tmp_path / "run")
    again = {**settings, "resume": "auto", "workers": workers, "allow_config_change": True}
    message = r"epoch 1, which is under way, .* stay 32 px, got 16 .* --lr-milestones 1,2\b"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **again, epochs=8)
    assert files_of(tmp_path / "run") == before
    run(tmp_path / "run", **again | {"lr_milestones": (1, 2)}, epochs=3)
    rounds = rounds_of(tmp_path / "run")
    assert [sum(e["samples"] for e in rounds if e["epoch"] == n) for n in range(3)] == [60] * 3


def evaluating_to(monkeypatch, accuracies):
    """Have evaluations come to these accuracies, one after the other."""
    results = iter(accuracies)
    monkeypatch.setattr("train.evaluate", lambda *_: Evaluation(next(results), 1.0, 20, 16))


def test_the_best_weights_are_kept_and_go_with_a_resumed_run(tmp_path, monkeypatch):
    folder, best = tmp_path / "run", tmp_path / "run/model_best.safetensors"
    checkpoints = [folder / f"checkpoints/epoch-000{n}" for n in (1, 2, 3)]
    evaluating_to(monkeypatch, [0.5, 0.9, 0.9])
    run(folder, **ROUNDS, **ONE_SIDE, keep_checkpoints=3)
    weights = [(path / "model.safetensors").read_bytes() for path in checkpoints]
    assert best.read_bytes() == weights[1] != weights[2]
    assert best.samefile(checkpoints[2] / best.name)  # at no cost of disk
    assert not load_model(folder, best=True).training
    assert not load_model(checkpoints[0]).training
    evaluating_to(monkeypatch, [0.1, 0.2])  # from the first on, without what came after it
    (folder / "summary.json").unlink()
    run(folder, **ROUNDS, **ONE_SIDE, resume=str(checkpoints[0]))
    assert best.read_bytes() == weights[0]
    assert json.loads((folder / "summary.json").read_text())["best_accuracy"] == 0.5


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        pytest.param("never", [], marks=slow),
        ("stage", [(0, 0), (1, 0), (2, 0)]),  # 16 px, 32 px, and the next learning rate
        pytest.param("round", [(e, r) for e in range(3) for r in range(2)], marks=slow),
    ],
)
def test_momentum_is_cleared_where_it_is_said_to_be(tmp_path, monkeypatch, when, expected):
    forgotten, turns = [], []
    begin, forget = Stepper.begin, Stepper.forget

    def forgets(self, worker):
        forgotten.append((worker, bool(self.optimizers[worker].state)))
        forget(self, worker)

    def begins(self, turn, **options):
        turns.extend((worker, turn.epoch, turn.round) for worker, _ in forgotten)
        assert not any(self.optimizers[worker].state for worker, _ in forgotten)
        had_some.extend(had for _, had in forgotten)
        forgotten.clear()
        begin(self, turn, **options)

    had_some = []
    monkeypatch.setattr(Stepper, "forget", forgets)
    monkeypatch.setattr(Stepper, "begin", begins)
    run(tmp_path / "run", **ROUNDS, reset_momentum=when, checkpoint_every=0)
    for worker in range(4):
        assert [turn[1:] for turn in turns if turn[0] == worker] == expected
    assert had_some == [turn[1:] != (0, 0) for turn in turns]


@pytest.mark.parametrize(
    ("mode", "workers"),
    [
        pytest.param(mode, workers, marks=[slow] * (workers != short))
        for mode, short in (("bsp", 3), ("asp", 2), ("step", 6))
        for workers in (2, 3, 6)
    ],
)
def test_other_workers_cover_the_rest_of_the_epoch_once(tmp_path, mode, workers):
    settings = {**MODES[mode], "train_samples": 90, "large_batch_size": (3,)}
    partly = mode == "bsp"  # it is stopped when a part of the workers has pushed
    if mode == "step":
        settings |= {"large_batch_size": None}
    stopped(tmp_path / "run", 21 if partly else 17, **settings)
    (saved,) = tmp_path.glob("run/checkpoints/save-*/rank-00000.json")
    state = json.loads(saved.read_text())
    before = metrics_before(tmp_path / "run", state)
    settings |= {"workers": workers, "slowdown": None, "resume": str(tmp_path / "run")}
    run(tmp_path / "run", **settings, allow_config_change=True)
    rounds = rounds_of(tmp_path / "run")
    events = metrics_of(tmp_path / "run")
    undone = sum(e["event"] == "undone" for e in events)  # and done again, by all workers
    assert (undone > 0) == partly
    after = rounds[len(before) - undone :]
    for epoch in range(3):
        seen = sum(e["samples"] for e in rounds if e["epoch"] == epoch)
        if mode == "step" and epoch == min(e["epoch"] for e in after):
            seen += state["progress"]["steps"] * 15  # of the round that was under way
        assert seen == 90
    assert {e["worker"] for e in after} == set(range(workers))
    assert json.loads((tmp_path / "run/summary.json").read_text())["samples_seen"] == 3 * 90


def samples_by_epoch(folder, epochs=3):
    """Return the samples that metrics.jsonl has of each epoch."""
    rows = [r for r in read_metrics(folder / "metrics.jsonl") if r["event"] in ("round", "restart")]
    return [sum(row["samples"] for row in rows if row["epoch"] == epoch) for epoch in range(epochs)]


CHANGES = {  # of settings that plans are made from, or of how workers meet: by the mode they change
    "bsp": {
        "large_batch_size": {"large_batch_size": (5,)},
        "by_hand": {"local_batch_sizes": (2, 3, 4, 5), "small_workers": None},
        "train_samples": {"train_samples": 72},
        "resolutions": {"resolutions": (8, 16, 32), "dropout": (0.1,)},
        "rounds_per_epoch": {"rounds_per_epoch": 3},
        "momentum": {"optimizer": "momentum", "momentum": 0.5},
        "seed": {"seed": 5},
        "asp": {"sync": "asp"},
        "step": {**JOINT, "sync": "step", "small_workers": None, "rounds_per_epoch": 1},
        "gradients": {**JOINT, "push": "gradients", "small_workers": None, "rounds_per_epoch": 1},
    },
    "step": {
        "global_batch_size": {"local_batch_sizes": None, "global_batch_size": 24},
        "drop_last": {"drop_last": True},
        "bsp": {"sync": "bsp", "local_batch_sizes": None, **ROUNDS},
        "gradients": {"sync": "bsp", "push": "gradients"},
    },
    "gradients": {
        "global_batch_size": {"local_batch_sizes": (4, 4, 4, 8)},
        "bsp": {"push": "weights", "push_every": 1, "local_batch_sizes": None, **ROUNDS},
        "step": {"sync": "step", "push": "weights", "push_every": 1},
    },
    "balance": {"none": {"balance": "none"}, "dbs": {"balance": "dbs"}},
    "asp": {
        "small_workers": {"small_workers": 0},
        "bsp": {"sync": "bsp"},
        "step": {**JOINT, "sync": "step", "small_workers": None, "rounds_per_epoch": 1},
    },
}
INSIDE = {  # what must stay inside an epoch, as the refusal has it
    ("bsp", "train_samples"): "training images must stay 90",
    ("bsp", "seed"): "seed must stay 0",
    ("bsp", "step"): "sync must stay bsp",
    ("bsp", "gradients"): "push must stay weights",
    ("step", "global_batch_size"): "global_batch_size at 32 px must stay 16",
    ("step", "drop_last"): "drop_last must stay false",
    ("step", "bsp"): "sync must stay step",
    ("step", "gradients"): "sync must stay step",
    ("gradients", "global_batch_size"): "global_batch_size at 16 px must stay 16",
    ("gradients", "bsp"): "push must stay gradients",
    ("gradients", "step"): "sync must stay bsp",
    ("asp", "step"): "sync must stay asp",
}
SHORT = {  # by where the run was stopped: what is refused inside an epoch, or trained by
    True: {("bsp", "large_batch_size"), ("bsp", "step"), ("step", "bsp"), ("asp", "small_workers")},
    False: {("bsp", "step"), ("step", "bsp"), ("bsp", "momentum")},
}
SHORT[True] |= {("bsp", "seed")}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Give a run that was stopped after its first epoch, or inside one; each is made once."""
    folders = {}

    def left(mode, inside):
        if (mode, inside) not in folders:
            folder = folders[mode, inside] = tmp_path_factory.mktemp(mode) / "run"
            step = {"step": 10, "gradients": 10}.get(mode, 21)
            settings = {**MODES[mode], "train_samples": 90}
            if inside:
                stopped(folder, step, **settings)
            else:
                run(folder, **settings | {"epochs": 1, "lr_milestones": ()})
        return folders[mode, inside]

    return left


@pytest.mark.parametrize(
    ("mode", "name", "inside"),
    [
        pytest.param(mode, name, inside, marks=() if (mode, name) in SHORT[inside] else slow)
        for mode, names in CHANGES.items()
        for name in names
        for inside in (False, True)
    ],
)
def test_a_run_trains_by_what_was_changed_and_takes_each_sample_once(
    left, tmp_path, mode, name, inside
):
    folder = shutil.copytree(left(mode, inside), tmp_path / "run")
    before = files_of(folder)
    settings = {**MODES[mode], "train_samples": 90, **CHANGES[mode][name]}
    settings |= {"resume": str(folder), "allow_config_change": True}
    if inside and (mode, name) in INSIDE:
        with pytest.raises(ValueError, match=f"{INSIDE[mode, name]} inside an epoch, got "):
            run(folder, **settings)
        assert files_of(folder) == before
        return
    run(folder, **settings)
    rounds = rounds_of(folder)
    samples = [90, *[settings["train_samples"]] * 2]
    if settings.get("drop_last"):
        samples[1:] = [80, 80]
    assert samples_by_epoch(folder) == samples
    assert json.loads((folder / "summary.json").read_text())["samples_seen"] == sum(samples)
    plans = json.loads((folder / "plan.json").read_text())
    trained = {e["worker"]: e["local_batch_size"] for e in rounds if e["epoch"] == 2}
    assert trained == {
        worker: row["local_batch_size"] for worker, row in enumerate(plans["32 px"]["workers"])
    }
    told = [row for row in read_metrics(folder / "metrics.jsonl") if row["event"] == "plan"]
    of_epoch = [row for row in told if row["first_epoch"] <= 2 < row["end_epoch"]]
    assert {w["worker"]: w["local_batch_size"] for w in of_epoch[-1]["workers"]} == trained
    assert all(row["end_epoch"] > row.get("from_epoch", 0) for row in told)


def test_a_change_that_was_allowed_stays_allowed_where_the_run_is_killed_before_it_saves(
    left, tmp_path, monkeypatch, capsys
):
    folder = shutil.copytree(left("bsp", True), tmp_path / "run")
    resumed = ["--resume", str(folder)]

    def resume(*flags):
        AcceleratorState._reset_state(True)
        helpers.main(parse_config(Config, [*resumed, *flags]))

    with monkeypatch.context() as patches:
        at_step(patches, 1, lambda: {}["killed"])
        with pytest.raises(KeyError):
            resume("--lr", "0.01", "--large-batch-size", "4", "--allow-config-change")
    with pytest.raises(ValueError, match=r"got lr 0.02 -> 0.03$"):
        resume("--lr", "0.03")
    resume()
    assert "changed since the checkpoint: lr 0.02 -> 0.01 (as config.yaml has it)" in (
        capsys.readouterr().out
    )
    assert max(e["learning_rate"] for e in rounds_of(folder) if e["epoch"] == 1) == 0.01


def test_settings_of_other_workers_are_written_as_they_are_trained_with(left):
    """config.yaml repeats the run: what was given for three workers is no setting of one of two."""
    folder = left("step", False)
    checkpoint = newest(folder)
    found = Found(folder, *checkpoint)
    given = Config(**{**SETTINGS, **MODES["step"]}, workers=4)
    now = resume.adapt_to_processes(given, found, 2, given)
    written = _given_now(given, given, now)
    assert (written.workers, written.local_batch_sizes) == (2, None)
    assert written == replace(now, global_batch_size=None)  # found out, not given
    assert _given_now(replace(given, workers=None), given, now).workers is None


def test_joint_steps_that_other_workers_took_are_counted_once_however_often_workers_change(
    tmp_path,
):
    settings = {**MODES["step"], "train_samples": 90}
    stopped(tmp_path / "run", 1, **settings)
    settings |= {"local_batch_sizes": None, "global_batch_size": 16, "allow_config_change": True}
    settings |= {"resume": str(tmp_path / "run")}
    stopped(tmp_path / "run", 1, **settings, workers=3)  # all in the first round
    run(tmp_path / "run", **settings, workers=2)
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["samples_seen"] == 3 * 90
    assert samples_by_epoch(tmp_path / "run") == [90] * 3


def test_joint_steps_that_other_workers_took_to_the_last_are_an_epoch_without_a_loss(
    tmp_path, capsys
):
    settings = {**MODES["step"], "train_samples": 90}
    stopped(tmp_path / "run", 6, **settings)
    other = {"workers": 2, "local_batch_sizes": None, "global_batch_size": 16}
    capsys.readouterr()
    run(tmp_path / "run", **{**settings, **other}, resume="auto", allow_config_change=True)
    assert samples_by_epoch(tmp_path / "run") == [90] * 3
    rows = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["steps"] for row in rows if row["event"] == "round" and row["epoch"] == 0] == [0, 0]
    first = next(row for row in rows if row["event"] == "eval")
    assert (first["epoch"], first["learning_rate"] > 0) == (0, True)
    line = next(line for line in capsys.readouterr().out.splitlines() if "epoch 1/3" in line)
    assert "nan" not in line


def test_a_run_is_not_made_shorter_than_a_worker_has_come(tmp_path, monkeypatch):
    settings = {**MODES["asp"], "slowdown": ("3:9.0",), "train_samples": 90}

    def leave():
        path = tmp_path / "run/metrics.jsonl"
        epochs = [r["epoch"] for r in read_metrics(path) if r["event"] == "round"]
        if {0, 1} <= set(epochs):
            os.kill(os.getpid(), signal.SIGTERM)

    after_step = Checkpointer.after_step
    with monkeypatch.context() as patches:
        patches.setattr(
            Checkpointer, "after_step", lambda self, **o: (leave(), after_step(self, **o))[1]
        )
        with pytest.raises(RunStopped):
            run(tmp_path / "run", **settings)
    before = files_of(tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"^epochs must be at least [23], as many as workers may have begun"
    ):
        run(
            *(tmp_path / "run",),
            **{**settings, "epochs": 1, "lr_milestones": ()},
            resume="auto",
            allow_config_change=True,
        )
    assert files_of(tmp_path / "run") == before


@pytest.mark.parametrize("to", ["none", pytest.param("dbs", marks=slow)])
def test_samples_of_epochs_with_several_plans_come_once_where_plans_follow_no_longer(
    tmp_path, monkeypatch, to
):
    settings = {**MODES["asp"], **ONE_SIDE, "balance": "dynamic", "train_samples": 90}
    settings |= {"epochs": 4, "lr_milestones": (), "slowdown": ("3:2.5",)}
    after_step = Checkpointer.after_step

    def stop_between_plans(self, **options):
        planner = self._session.run.planner
        if len({s[-1].plan.workers for s in planner.ledger.segments.values()}) > 1:
            os.kill(os.getpid(), signal.SIGTERM)
        after_step(self, **options)

    with monkeypatch.context() as patches:
        patches.setattr(Checkpointer, "after_step", stop_between_plans)
        with pytest.raises(RunStopped):
            run(tmp_path / "run", **settings)
    again = {"resume": "auto", "allow_config_change": True}
    run(tmp_path / "run", **{**settings, "balance": to}, **again)
    assert samples_by_epoch(tmp_path / "run", 4) == [90] * 4


def test_what_was_found_for_other_workers_is_found_anew(left):
    """Also where the number of workers was given: half of four workers are half of two."""
    folder = left("bsp", False)
    found = Found(folder, *newest(folder))
    config = {**MODES["bsp"], "small_workers": None, "small_ratio": 0.5, "workers": 4}
    given = Config(
        **config, resolved={"small_workers": 2, "small_batch_size": (2,), "processes": 1}
    )
    now = resume.adapt_to_processes(with_resolved(given), found, 2, given)
    assert (now.workers, now.small_workers, now.small_batch_size) == (2, None, None)


def test_batches_of_two_workers_are_no_batches_of_two_resolutions(left):
    folder, manifest = left("bsp", False), newest(left("bsp", False))[1]
    sizes = {"local_batch_sizes": [3, 5], "resolutions": [16, 32]}
    manifest = replace(manifest, workers=2, config={**manifest.config, **sizes})
    given = Config(workers=1, local_batch_sizes=(3, 5), resolutions=(16, 32))
    now = resume.adapt_to_processes(given, Found(folder, folder, manifest), 1, given)
    assert now.local_batch_sizes is None


def test_rounds_that_were_not_finite_are_counted_on_with_other_workers(left, tmp_path):
    folder = shutil.copytree(left("bsp", False), tmp_path / "run")
    planned = resume.plan_restart

    def with_refused(saved, *rest):
        saved.state["cluster"]["refused"] = 7
        return planned(saved, *rest)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(resume, "plan_restart", with_refused)
        again = {"epochs": 2, "lr_milestones": (), "resume": "auto", "allow_config_change": True}
        run(folder, **ROUNDS, **again, train_samples=90, workers=3)
    assert json.loads((folder / "summary.json").read_text())["refused_rounds"] == 7


def test_a_rest_of_fewer_samples_than_workers_and_rounds_is_trained_on_once(tmp_path):
    settings = {"sync": "asp", "rounds_per_epoch": 3, "train_samples": 72, "epochs": 2}
    settings |= {"intercept": (0.01,), "large_batch_size": (4,), "lr_milestones": ()}
    settings |= {"resolutions": (16,), "dropout": (0.0,)}
    slow_first = {"slope": (0.5, 0.001), "workers": 2}
    stopped(tmp_path / "run", 38, **settings, **slow_first)  # the other has done all its rounds
    resumed = {"workers": 6, "slope": (0.001,), "resume": str(tmp_path / "run")}
    run(tmp_path / "run", **settings, **resumed, allow_config_change=True)
    rounds = rounds_of(tmp_path / "run")
    assert any(e["steps"] == 0 for e in rounds)
    assert sum(e["samples"] for e in rounds) == 2 * 72


def metrics_before(folder, state):
    content = (folder / "metrics.jsonl").read_bytes()[: state["log"]["metrics_bytes"]]
    rows = map(in_code, map(json.loads, content.splitlines()))
    return [e for e in rows if e["event"] == "round"]


def test_a_checkpoint_of_before_a_setting_was_there_has_its_default():
    config = Config(epochs=3, mixup=0.2)
    assert changed_settings({"epochs": 2}, config) == {"epochs": (2, 3), "mixup": (0.0, 0.2)}


def test_a_folder_in_use_is_refused_and_goes_on(tmp_path, monkeypatch):
    def second():
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on ") as error:
            RunFolder(tmp_path / "run", Accelerator(cpu=True), new=False)
        refused.append(error)

    refused = []
    at_step(monkeypatch, 3, second)
    run(tmp_path / "run", **ROUNDS, **ONE_SIDE, epochs=1, lr_milestones=None)
    assert refused
    assert (tmp_path / "run/summary.json").exists()
    assert not (tmp_path / "run/.lock").exists()


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        ("no-such-folder", "resume must be auto, a run folder or a checkpoint in one, got no-such"),
        ("auto", "resume auto must go with output_dir"),
    ],
)
def test_a_run_that_is_not_there_cannot_be_resumed(resume, message):
    with pytest.raises(ValueError, match=message):
        parse_config(Config, ["--resume", resume])


def test_resuming_by_folder_keeps_the_runs_settings_and_flags_win(ended):
    config = parse_config(Config, ["--resume", str(ended), "--report-to", "tensorboard"])
    assert (config.lr, config.rounds_per_epoch, config.report_to) == (0.02, 2, "tensorboard")
    assert with_resolved(config).workers == 4  # found out by the run, which was given none


# --- real processes


def start(folder, ranks=3, **settings):
    return start_ranks(to_flags(folder, **{**SETTINGS, **settings, "resume": "auto"}), ranks)


def wait_for(path, processes):
    wait_until(lambda: path.exists() or any(p.poll() is not None for p in processes), 90, path)
    assert path.exists(), [p.stderr for p in processes]


REAL = {
    "bsp": {**ROUNDS, "epochs": 6},
    "step": {"sync": "step", "local_batch_sizes": (3, 5, 8), "epochs": 6},
    "short": {**ROUNDS, **ONE_SIDE},
}


@pytest.mark.parametrize(
    ("mode", "ranks"),
    [("short", 2), pytest.param("bsp", 3, marks=slow), pytest.param("step", 3, marks=slow)],
)
def test_of_several_processes_one_is_killed_the_rest_name_it_and_all_resume_to_the_same_bits(
    tmp_path, mode, ranks
):
    settings, last = {**REAL[mode], "worker_timeout": 30}, ranks - 1
    assert wait_all(start(tmp_path / "whole", ranks, **settings)) == [0] * ranks
    broken = start(tmp_path / "run", ranks, **settings)
    wait_for(tmp_path / "run/checkpoints/epoch-0001/manifest.json", broken)
    broken[last].kill()
    assert wait_all(broken) == [2] * last + [-9]
    said = [process.stderr for process in broken[:last]]
    assert all(f"error: rank {last} died or fell silent" in text for text in said), said
    again = start(tmp_path / "run", ranks, **settings)
    assert wait_all(again) == [0] * ranks, again[0].stderr
    assert "resumed from" in again[0].stdout
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


def test_a_round_whose_steps_are_all_taken_asks_again_after_a_resume(tmp_path, monkeypatch):
    """Others, in processes of their own, may have steps left, and ask when these are taken."""
    asked, after_step = [], Checkpointer.after_step

    def stops(self, *, round_over):
        asked.append((round_over, self._progress.steps))
        if round_over and len(asked) < 10:
            self._stop()
        after_step(self, round_over=round_over)

    monkeypatch.setattr(Checkpointer, "after_step", stops)
    settings = {**ROUNDS, **ONE_SIDE, "epochs": 1, "lr_milestones": None}
    with pytest.raises(RunStopped):
        run(tmp_path / "run", **settings)
    *_, last = asked
    asked[:] = [None] * 10
    run(tmp_path / "run", **settings, resume="auto")
    assert asked[10] == last
    assert asked[11][1] == 1


@slow
def test_a_run_stopped_while_some_wait_at_the_barrier_goes_on(tmp_path):
    """The others are through with their steps, and the first one asks them at its round's end."""
    unlike = {"local_batch_sizes": (1, 40, 40), "slope": (0.01,), "intercept": (0.0,)}
    settings = {
        **unlike,
        "epochs": 4,
        "resolutions": (16,),
        "dropout": (0.1,),
        "train_samples": 120,
    }
    running = start(tmp_path / "run", **settings, worker_timeout=60)
    wait_for(tmp_path / "run/checkpoints/epoch-0002/manifest.json", running)
    running[0].terminate()
    assert wait_all(running) == [75] * 3, running[0].stderr
    steps = []
    for rank in range(3):
        (shard,) = tmp_path.glob(f"run/checkpoints/save-*/rank-0000{rank}.json")
        progress = json.loads(shard.read_text())["progress"]
        steps.append(progress["steps"] if progress else 0)
    assert 0 < steps[0] < 40, steps
    assert steps[1:] == [1, 1]
    again = start(tmp_path / "run", **settings, worker_timeout=30)
    assert wait_all(again) == [0, 0, 0], again[0].stderr


LONG = {**ROUNDS, "epochs": 16, "resolutions": (16,), "dropout": (0.1,), "train_samples": 120}


@slow
def test_a_worker_that_dies_without_a_barrier_is_dropped_and_the_run_ends(tmp_path):
    settings = {**LONG, "sync": "asp", "worker_timeout": 30}
    folder = tmp_path / "run"
    processes = start(folder, **settings)
    wait_for(folder / "checkpoints/epoch-0002/manifest.json", processes)
    processes[2].kill()
    assert wait_all(processes)[:2] == [0, 0], processes[0].stderr
    assert "warning: rank 2 (worker 2) was lost after" in processes[0].stdout + processes[0].stderr
    assert json.loads((folder / "summary.json").read_text())["lost_workers"] == [2]
    events = read_metrics(folder / "metrics.jsonl")
    (lost,) = [e for e in events if e["event"] == "lost"]
    trained = {
        epoch: sum(e["samples"] for e in events if e["event"] == "round" and e["epoch"] == epoch)
        for epoch in range(16)
    }
    assert trained[15] == 120  # the others have taken its share over
    assert sum(trained.values()) + lost["samples"] == 16 * 120


@slow
def test_a_lost_worker_is_back_after_the_next_resume(tmp_path):
    settings = {**LONG, "sync": "asp", "worker_timeout": 30}
    folder = tmp_path / "run"
    processes = start(folder, **settings)
    wait_for(folder / "checkpoints/epoch-0002/manifest.json", processes)
    processes[2].kill()
    wait_until(lambda: '"lost"' in (folder / "metrics.jsonl").read_text())
    for process in processes[:2]:
        process.send_signal(signal.SIGTERM)
    assert wait_all(processes)[:2] == [EXIT_STOPPED] * 2, processes[0].stderr
    again = start(folder, **settings)
    assert wait_all(again) == [0, 0, 0], again[0].stderr
    rounds = [e for e in rounds_of(folder) if e["epoch"] == 15]
    assert {e["worker"] for e in rounds} == {0, 1, 2}
    assert min(e["samples"] for e in rounds) > 0
    assert sum(e["samples"] for e in rounds) == 120


@slow
def test_torchrun_restarts_and_the_run_goes_on_by_itself(tmp_path):
    launcher = torchrun(to_flags(tmp_path / "run", **{**SETTINGS, **ROUNDS, "epochs": 8}))
    wait_until((tmp_path / "run/checkpoints/epoch-0002/manifest.json").exists, 90)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    try:
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, said
    events = [e["event"] for e in metrics_of(tmp_path / "run")]
    assert events.count("eval") == 8
