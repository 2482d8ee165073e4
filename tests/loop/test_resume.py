"""A run that was killed or stopped goes on to the bits of one that was not."""

import json
import os
import random
import re
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dbsl.base.errors import EXIT_STOPPED, RunStopped, one_line_errors
from dbsl.base.files import write_text
from dbsl.checkpoint import checkpoint, disk, resume
from dbsl.checkpoint.disk import Found, newest, read_manifest
from dbsl.cluster.meeting import SimulatedCluster
from dbsl.cluster.steps import Stepper
from dbsl.config import parse
from dbsl.config.complete import with_found
from dbsl.config.parse import parse_config
from dbsl.model import load_model
from dbsl.plan.types import LostWorker, RoundReport
from tests import helpers
from tests.helpers import fingerprint, rounds_of, rows, samples_by_epoch, short, slow, wait_all
from train import Config

SETTINGS = {"resolutions": (16, 32), "epochs": 3, "lr_milestones": (2,), "dropout": (0.1, 0.3)}
SETTINGS |= {"checkpoint_every": 1, "log_every": 2}
ROUNDS = {"small_workers": 1, "large_batch_size": (3,), "rounds_per_epoch": 2}
JOINT = {"local_batch_sizes": (3, 3, 4, 6)}
ONE_SIDE = {"resolutions": (16,), "dropout": (0.1,)}
MODES = {
    "bsp": ROUNDS,
    "ssp": {**ROUNDS, "sync": "ssp", "slowdown": ("0:2.0",)},
    "asp": {**ROUNDS, "sync": "asp", "slowdown": ("3:2.5",), "emulate": ("noise=0.1",)},
    "int4": {**ROUNDS, "wire": "int4", "merge": "delta"},
    "balance": {**ROUNDS, "balance": "dynamic", "slowdown": ("3:3.0",)},
    "step": {**JOINT, "sync": "step"},
    "link": {
        **{**ONE_SIDE, "sync": "step", "global_batch_size": 18, "train_samples": 90, "workers": 3},
        **{"balance": "dynamic", "slowdown": ("0:3.0",), "emulate": ("noise=0.5", "gbps=1")},
        **{"rounds_per_epoch": 2, "epochs": 5},
    },
    "gradients": {**JOINT, "push": "gradients:2"},
    "delta": {**ROUNDS, "merge": "delta", "ema_decay": 0.6, "mixup": 0.4, "cutmix": 1.0},
    "gradients-asp": {**JOINT, "push": "gradients", "sync": "asp"},
    "micro": {**JOINT, "push": "gradients:2", "micro_batch_size": (2, 4)},
}
run = partial(helpers.run, **SETTINGS)


def stopped(folder, step, **settings):
    """Run until a signal comes after so many steps, and saves."""
    with helpers.stopped_at_step(step):
        run(folder, **settings)


def killed(folder, step, **settings):
    """Run in a process of its own, and kill that after so many steps and a checkpoint."""

    def kill():
        whole = "checkpoints/*/manifest.json"
        helpers.wait_until(lambda: [*folder.glob(whole)], 30, "a checkpoint")
        os.kill(os.getpid(), signal.SIGKILL)

    with helpers.at_step(step, kill):
        child = helpers.Forked(lambda: run(folder, **settings))
    assert child.wait() == -signal.SIGKILL, child.stderr
    assert not (folder / "summary.json").exists()


def test_the_log_is_on_the_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    done, write = [], checkpoint.write_manifest

    def written(*both):
        done.append("manifest.json")
        write(*both)

    monkeypatch.setattr(checkpoint, "write_manifest", written)
    monkeypatch.setattr(checkpoint, "sync_file", lambda path: done.append(path.name))
    helpers.run(tmp_path / "run", epochs=1, lr_milestones=())
    assert done == ["metrics.jsonl", "manifest.json"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    @cache
    def of(mode, precision):
        folder = tmp_path_factory.mktemp("unbroken") / mode
        run(folder, **MODES[mode], mixed_precision=precision)
        return fingerprint(folder)

    return of


@pytest.fixture
def misaligned(monkeypatch):
    """Have a resumed run's tensors lie where an unbroken run never has them, whatever the CPU."""
    read, known = Found.shard, {}

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

    monkeypatch.setattr(Found, "shard", lambda *arguments: moved(read(*arguments)))


# In which mode a run is killed, after which step, how often it saves, and in which precision.
OFTEN = "0.0001m"
KILLED = [
    ("balance", 30, 1, "no"),
    ("gradients", 20, OFTEN, "bf16"),
    *(("bsp", 30, 1, "no"), ("ssp", 45, OFTEN, "bf16"), ("asp", 60, 1, "no")),
    *(("int4", 30, OFTEN, "bf16"), ("step", 7, 1, "no"), ("link", 19, OFTEN, "bf16")),
    *(("delta", 30, OFTEN, "no"), ("gradients-asp", 20, 1, "bf16"), ("micro", 30, OFTEN, "no")),
]


@pytest.mark.usefixtures("misaligned")
@pytest.mark.parametrize(("mode", "step", "every", "precision"), short(KILLED, *KILLED[:2]))
def test_killed_and_resumed_is_the_unbroken_run(tmp_path, unbroken, mode, step, every, precision):
    settings = {**MODES[mode], "checkpoint_every": every, "mixed_precision": precision}
    killed(tmp_path / "run", step, **settings)
    run(tmp_path / "run", **settings, resume="auto")
    assert fingerprint(tmp_path / "run") == unbroken(mode, precision)


def test_a_loop_may_draw_from_the_random_numbers_of_numpy_and_python(tmp_path, monkeypatch):
    def loss_function(model, images, labels, config):
        lam = np.random.beta(0.2, 0.2) * random.random()  # noqa: NPY002
        return lam * torch.nn.functional.cross_entropy(model(images), labels), {}

    monkeypatch.setattr("train.loss_function", loss_function)
    run(tmp_path / "whole")
    np.random.seed(3)  # noqa: NPY002
    killed(tmp_path / "run", 7, checkpoint_every="0.0001m")
    run(tmp_path / "run", checkpoint_every="0.0001m", resume="auto")
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


STOPPED = [
    ("step", 11, signal.SIGTERM, "no"),
    ("asp", 11, signal.SIGINT, "bf16"),
    ("ssp", 11, signal.SIGTERM, "no"),
    *(("bsp", 11, signal.SIGINT, "bf16"), ("gradients", 9, signal.SIGTERM, "no")),
    ("link", 14, signal.SIGINT, "bf16"),
]


@pytest.mark.usefixtures("misaligned", "usual_signals")
@pytest.mark.parametrize(("mode", "step", "number", "precision"), short(STOPPED, *STOPPED[:3]))
def test_a_signal_saves_after_the_step_and_says_how_to_go_on(
    tmp_path, capsys, unbroken, mode, step, number, precision
):
    folder = tmp_path / "run"
    settings = {**MODES[mode], "checkpoint_every": 0, "mixed_precision": precision}
    with (
        helpers.at_step(step, lambda: os.kill(os.getpid(), number)),
        pytest.raises(SystemExit) as ended,
        one_line_errors(),
    ):
        run(folder, **settings)
    assert ended.value.code == EXIT_STOPPED == 75
    said = capsys.readouterr().err
    assert f"stopped ({number.name}) and saved as {folder / 'checkpoints/save-'}" in said
    assert f"--resume {folder}" in said
    state = json.loads((folder / "checkpoints/save-000001/rank-00000.json").read_text())
    run(folder, **settings, resume=str(folder))
    assert fingerprint(folder) == unbroken(mode, precision)
    if mode != "gradients":  # whose rounds are recorded by epoch
        content = (folder / "metrics.jsonl").read_bytes()[state["log"]["metrics_bytes"] :]
        first = next(e for e in map(json.loads, content.splitlines()) if e["event"] == "round")
        assert 0 < state["progress"]["steps"] < first["steps"]  # in the middle of a round


def test_what_comes_until_the_state_is_copied_is_in_the_checkpoint(tmp_path, monkeypatch):
    pushed = RoundReport(1, 0, 0, 16, 3, 9, 3, 1.0, 2.0, 1.0)

    @contextmanager
    def held(cluster):
        cluster._losses.append(LostWorker(1, 1, 0, 5, "its process died"))
        cluster.server.reports.append(pushed)
        yield

    monkeypatch.setattr(SimulatedCluster, "held", held)
    with pytest.raises(RunStopped, match="max_minutes"):
        run(tmp_path / "run", **ROUNDS, max_minutes=1e-6)
    (shard,) = tmp_path.glob("run/checkpoints/save-*/rank-00000.json")
    log = json.loads(shard.read_text())["log"]
    assert (log["so_far"]["lost_workers"], log["so_far"]["lost_samples"]) == ([1], 5)
    saved = (tmp_path / "run/metrics.jsonl").read_bytes()[: log["metrics_bytes"]]
    events = [row["event"] for row in map(json.loads, saved.splitlines())]
    assert (events.count("lost"), events.count("round")) == (1, 1)
    assert log["so_far"]["samples"] == 9


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
    assert "is finished: nothing to resume" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"epochs must be at least 3, which .*, got 1$"):
        run(finished, **ROUNDS, resume="auto", epochs=1, lr_milestones=None)
    assert fingerprint(finished) == before


def test_a_run_that_keeps_no_checkpoint_is_not_made_longer_by_starting_again(tmp_path, capsys):
    settings = {**ROUNDS, **ONE_SIDE, "lr_milestones": None, "keep_checkpoints": 0}
    run(tmp_path / "run", **settings, epochs=1, save_best=False)
    before = files_of(tmp_path / "run")
    assert not [path for path in before if "checkpoints" in path.parts]
    assert [p.name for p in before if p.suffix == ".safetensors"] == ["model.safetensors"]
    message = r"keep_checkpoints must be at least 1 .* without a checkpoint in .*run$"
    for resumed in ("auto", str(tmp_path / "run")):
        with pytest.raises(ValueError, match=message):
            run(tmp_path / "run", **settings, epochs=2, resume=resumed)
        run(tmp_path / "run", **settings, epochs=1, save_best=False, resume=resumed)
        assert "is finished: nothing to resume" in capsys.readouterr().out
    assert files_of(tmp_path / "run") == before


def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch, capsys):
    folder, settings = tmp_path / "run", {**ROUNDS, **ONE_SIDE, "lr_milestones": None, "epochs": 1}
    with monkeypatch.context() as patch:  # after the first file
        killed = lambda *given: write_text(*given) or {}["killed"]  # noqa: E731
        patch.setattr("dbsl.run.folder.write_text", killed)
        with pytest.raises(KeyError):
            run(folder, **settings)
    run(folder, **settings, resume="auto")
    assert "has no checkpoint yet: the run starts again" in capsys.readouterr().out
    assert (folder / "summary.json").exists()


def test_a_changed_setting_is_said_and_trained_by(ended, tmp_path, capsys):
    folder = shutil.copytree(ended, tmp_path / "checkpoints/run")
    again = {"resume": str(folder / "checkpoints/epoch-0002"), "lr": 0.01, "keep_checkpoints": 7}
    run(folder, **ROUNDS, **again)
    printed = capsys.readouterr().out
    for line in ("lr 0.02 -> 0.01", "keep_checkpoints 2 -> 7"):
        assert f"changed since the checkpoint: {line}\n" in printed
    assert {e["learning_rate"] for e in rounds_of(folder) if e["epoch"] == 2} == {0.002}
    assert (folder / "checkpoints/epoch-0003.old").is_dir()


@pytest.mark.parametrize(
    ("inside", "settings", "message"),
    [
        (False, {"model": "test_efficientnet"}, "model must stay test_resnet, whose weights the r"),
        (True, {"model": "test_vit"}, r"model must stay .* weights the run has, got test_vit$"),
        (False, {"optimizer": "adamw", "momentum": 0.8}, "optimizer must stay sgd, whose state"),
        (False, {"opt_kwargs": ("maximize=True",)}, "opt_kwargs must stay empty, whose state the"),
        (False, {"epochs": 2, "lr_milestones": (1,)}, "epochs must be above the 3 that are com"),
    ],
)
def test_a_refused_resume_leaves_all_as_it_was(ended, left, tmp_path, inside, settings, message):
    folder = shutil.copytree(left("bsp", True) if inside else ended, tmp_path / "run")
    before = files_of(folder)
    settings = {**ROUNDS, "train_samples": 90 if inside else 60, **settings}
    with pytest.raises(ValueError, match=f"^{message}"):
        run(folder, **settings, resume="auto")
    assert files_of(folder) == before
    assert inside or (folder / "checkpoints/epoch-0004").exists()


def test_a_checkpoint_of_other_classes_says_so(ended, tmp_path, monkeypatch):
    shutil.copytree(ended, tmp_path / "run")
    monkeypatch.setattr(disk, "read_manifest", lambda path: replace(read_manifest(path), classes=3))
    with pytest.raises(ValueError, match="got 3 classes in the checkpoint, 10 in the data"):
        run(tmp_path / "run", **ROUNDS, resume="auto", epochs=4)


# Without a barrier, a worker of the longer run had begun its next epoch before the last had ended.
@pytest.mark.parametrize("mode", short(["bsp", "step", "gradients"], "bsp"))
def test_a_run_made_longer_is_one_that_was_that_long(tmp_path, mode):
    settings = {**MODES[mode], **ONE_SIDE, "warmup_epochs": 0}
    settings |= {"checkpoint_every": 0, "lr_milestones": (1,)}  # the last is saved all the same
    run(tmp_path / "whole", **settings, epochs=3)
    run(tmp_path / "longer", **settings, epochs=2)
    stopped(tmp_path / "longer", 2, **settings, epochs=3, resume="auto")
    assert not (tmp_path / "longer/summary.json").exists()  # it is not finished until it ends
    run(tmp_path / "longer", **settings, epochs=3, resume="auto")
    found = [fingerprint(tmp_path / name) for name in ("whole", "longer")]
    for metrics, _ in found:
        metrics[:] = [row for row in metrics if row["event"] in ("round", "eval", "noise")]
    assert found[0] == found[1]


def test_an_epoch_under_way_keeps_its_resolution_where_a_run_is_made_longer(tmp_path):
    settings = {**ROUNDS, "large_batch_size": (4, 8), "lr_milestones": None}
    with pytest.raises(RunStopped):
        run(tmp_path / "run", **settings, epochs=2, max_minutes=1e-6)
    before = files_of(tmp_path / "run")
    again = {**settings, "resume": "auto"}
    message = "resolution of epoch 1 must stay 32 px inside an epoch, got 16 px"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **again, epochs=8)
    assert files_of(tmp_path / "run") == before
    run(tmp_path / "run", **again | {"lr_milestones": (1, 2)}, epochs=3)
    assert samples_by_epoch(tmp_path / "run") == [60] * 3


def evaluating_to(monkeypatch, accuracies):
    """Have evaluations come to these accuracies, one after the other."""
    results = iter(accuracies)
    rest = {"loss": 1.0, "samples": 20}
    monkeypatch.setattr("train.evaluate", lambda *_: {"accuracy": next(results), **rest})


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


def test_momentum_is_cleared_at_a_new_stage_where_that_is_asked_for(tmp_path, monkeypatch):
    cleared, seen = [], []
    begin, forget = Stepper.begin, Stepper.forget

    def forgets(self, worker):
        states = self.optimizers[worker].state.values()
        cleared.append((worker, any(state["momentum_buffer"].any() for state in states)))
        forget(self, worker)
        assert not self.optimizers[worker].state

    def begins(self, turn, **options):
        seen.extend((worker, turn.epoch, turn.round, had) for worker, had in cleared)
        cleared.clear()
        begin(self, turn, **options)

    monkeypatch.setattr(Stepper, "forget", forgets)
    monkeypatch.setattr(Stepper, "begin", begins)
    run(tmp_path / "run", **ROUNDS, reset_momentum="stage", checkpoint_every=0)
    for worker in range(4):  # 16 px, where it has none yet, 32 px, and the next learning rate
        stages = [(0, 0, False), (1, 0, True), (2, 0, True)]
        assert [tuple(place) for own, *place in seen if own == worker] == stages


AHEAD = [
    ("bsp", {"workers": 3}, "workers must stay 4"),
    ("bsp", {"large_batch_size": (5,)}, "large_batch_size must stay 3,3"),
    ("asp", {"workers": 2}, "workers must stay 4"),
    ("ssp", {"train_samples": 72}, "training images must stay 90"),
    ("gradients", {"sync": "step", "push": "weights"}, "sync must stay bsp"),
]


@pytest.mark.parametrize(("mode", "change", "what"), short(AHEAD, AHEAD[0]))
def test_other_workers_do_not_go_on_where_some_are_ahead_but_where_they_were_even(
    tmp_path, mode, change, what
):
    folder, settings = tmp_path / "run", {**MODES[mode], "train_samples": 90, "slowdown": None}

    def uneven(saver):
        return saver._epochs_done and len({*saver._cluster.server.clocks}) > 1

    with helpers.stopped_when(uneven):
        run(folder, **settings)
    again, before = {**settings, "resume": str(folder), **change}, files_of(folder)
    why = f"^{what} until all workers have pushed the same rounds, got "
    with pytest.raises(ValueError, match=why):
        run(folder, **again)
    assert files_of(folder) == before
    run(folder, **{**again, "resume": str(folder / "checkpoints/epoch-0001")})
    samples = change.get("train_samples", 90)
    assert samples_by_epoch(folder) == [90, samples, samples]


BY_STEP = {**JOINT, "small_workers": None, "rounds_per_epoch": 1}
WIDER = {"local_batch_sizes": None, "global_batch_size": 24}
BY_ROUND = {"sync": "bsp", "push": "weights", "local_batch_sizes": None, **ROUNDS}
# Settings of plans or exchanges: what is refused inside an epoch, and how.
CHANGES = {
    ("bsp", "large_batch_size"): ({"large_batch_size": (5,)}, None),
    ("bsp", "by_hand"): ({"local_batch_sizes": (2, 3, 4, 5), "small_workers": None}, None),
    ("bsp", "train_samples"): ({"train_samples": 72}, "training images must stay 90"),
    ("bsp", "resolutions"): ({"resolutions": (8, 16, 32), "dropout": (0.1,)}, None),
    ("bsp", "rounds_per_epoch"): ({"rounds_per_epoch": 3}, "rounds_per_epoch must stay 2"),
    ("bsp", "momentum"): ({"optimizer": "momentum", "momentum": 0.5}, None),
    ("bsp", "seed"): ({"seed": 5}, "seed must stay 0"),
    ("bsp", "asp"): ({"sync": "asp"}, None),
    ("bsp", "step"): ({**BY_STEP, "sync": "step"}, "sync must stay bsp"),
    ("bsp", "gradients"): ({**BY_STEP, "push": "gradients"}, "push must stay weights"),
    ("step", "global_batch_size"): (WIDER, "global_batch_size at 32 px must stay 16"),
    ("step", "drop_last"): ({"drop_last": True}, "drop_last must stay false"),
    ("step", "bsp"): (BY_ROUND, "sync must stay step"),
    ("step", "bsp of three"): ({**BY_ROUND, "workers": 3}, "sync must stay step"),
    ("step", "gradients"): ({"sync": "bsp", "push": "gradients"}, "sync must stay step"),
    ("gradients", "global_batch_size"): (WIDER, "global_batch_size at 16 px must stay 16"),
    ("gradients", "bsp"): (BY_ROUND, "push must stay gradients:2"),
    ("gradients", "step"): ({"sync": "step", "push": "weights"}, "sync must stay bsp"),
    ("balance", "none"): ({"balance": "none"}, None),
    ("balance", "dbs"): ({"balance": "dbs"}, None),
    ("asp", "small_workers"): ({"small_workers": 0}, None),
    ("asp", "bsp"): ({"sync": "bsp"}, None),
    ("asp", "step"): ({**BY_STEP, "sync": "step"}, "sync must stay asp"),
}


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Give a run that was stopped after its first epoch, or inside one; each is made once.

    Rounds are stopped where all workers have pushed the same ones.
    """

    @cache
    def left(mode, inside):
        folder = tmp_path_factory.mktemp(mode) / "run"
        settings = {**MODES[mode], "train_samples": 90}
        if inside and mode == "step":
            stopped(folder, 10, **settings)
        elif inside:
            with helpers.stopped_at_round(1):
                run(folder, **settings | ({"slowdown": None} if mode == "asp" else {}))
        else:
            run(folder, **settings | {"epochs": 1, "lr_milestones": ()})
        return folder

    return left


@pytest.mark.parametrize(
    ("inside", "mode", "name"),
    short(
        [(inside, *change) for change in CHANGES for inside in (False, True)],
        *((False, "bsp", "step"), (False, "step", "bsp of three"), (False, "bsp", "seed")),
        *((True, "step", "bsp"), (True, "bsp", "large_batch_size"), (True, "asp", "small_workers")),
    ),
)
def test_a_run_trains_by_what_was_changed_and_takes_each_sample_once(
    left, tmp_path, inside, mode, name
):
    folder = shutil.copytree(left(mode, inside), tmp_path / "run")
    before, (change, refusal) = files_of(folder), CHANGES[mode, name]
    settings = {**MODES[mode], "train_samples": 90, **change}
    settings |= {"resume": str(folder)}
    if refusal and (inside or name == "seed"):
        drawn = "dataset, seed and holdout must be those that drew the run's evaluation images, got"
        message = drawn if name == "seed" else f"{refusal} inside an epoch, got"
        with pytest.raises(ValueError, match=f"^{message} "):
            run(folder, **settings)
        assert files_of(folder) == before
        return
    run(folder, **settings)
    rounds = rounds_of(folder)
    samples = [90, *[settings["train_samples"]] * 2]
    if settings.get("drop_last"):
        samples[1:] = [80, 80]
    assert samples_by_epoch(folder) == samples
    assert helpers.summary_of(folder)["samples_seen"] == sum(samples)
    plans = json.loads((folder / "plan.json").read_text())
    trained = {e["worker"]: e["local_batch_size"] for e in rounds if e["epoch"] == 2}
    planned = plans["32 px"]["workers"]
    assert trained == {worker: row["local_batch_size"] for worker, row in enumerate(planned)}
    told = rows(folder, "plan")
    of_epoch = [row for row in told if row["first_epoch"] <= 2 < row["end_epoch"]]
    assert {w["worker"]: w["local_batch_size"] for w in of_epoch[-1]["workers"]} == trained
    assert all(row["end_epoch"] > row.get("from_epoch", 0) for row in told)


@pytest.mark.parametrize("mode", short(["bsp", "asp", "gradients"], "bsp"))
def test_joint_steps_go_on_with_the_weights_that_the_server_had(left, tmp_path, mode, capsys):
    folder = shutil.copytree(left(mode, False), tmp_path / "run")
    before = load_file(folder / "model.safetensors")
    settings = {**MODES[mode], "train_samples": 90, **BY_STEP, "sync": "step", "push": "weights"}
    run(folder, **settings, lr=1e-9, resume=str(folder))
    after = load_file(folder / "model.safetensors")
    trained = [name for name in before if not re.search("running|num_batches", name)]
    assert trained
    for name in trained:
        assert torch.allclose(before[name], after[name], atol=1e-6), name
    # Where gradients were pushed one optimizer was shared already, and it stays.
    assert ("optimizer states begin empty" in capsys.readouterr().out) == (mode != "gradients")


def test_a_run_whose_checkpoints_cannot_be_read_does_not_start_again(left, tmp_path, capsys):
    folder = shutil.copytree(left("bsp", True), tmp_path / "run")
    for path in folder.glob("checkpoints/*/manifest.json"):
        path.write_text(path.read_text().replace("format", "form"))
    before = files_of(folder)
    with pytest.raises(ValueError, match="resume must name a run with a complete checkpoint, got"):
        run(folder, **MODES["bsp"], train_samples=90, resume="auto")
    assert "warning: skipped: " in capsys.readouterr().out
    assert files_of(folder) == before


@slow
def test_what_workers_send_and_how_they_merge_may_change_between_epochs(tmp_path):
    folder, settings = tmp_path / "run", {**SETTINGS, **ROUNDS, "checkpoint_every": 1}
    settings |= {"epochs": 1, "lr_milestones": ()}
    helpers.run_in_ranks(folder, **settings)
    settings |= {"resume": str(folder), "epochs": 3}
    said = helpers.run_in_ranks(folder, **settings, wire="int8", merge="delta")
    assert "resumed from" in said
    assert samples_by_epoch(folder) == [samples_by_epoch(folder)[0]] * 3


def adapted(config, found, processes, given):
    return replace(config, **resume.changes_for(config, found, processes, given))


def test_settings_of_other_workers_are_written_as_they_are_trained_with(left):
    """config.yaml repeats the run: what was given for three workers is no setting of one of two."""
    given = Config(**{**SETTINGS, **MODES["step"]}, workers=4)
    changes = resume.changes_for(given, newest(left("step", False)), 2, given)
    assert (changes["workers"], changes["local_batch_sizes"]) == (2, None)
    assert changes.keys() == {"workers", "local_batch_sizes", "global_batch_size"}


@pytest.mark.parametrize(
    ("before", "given", "expected"),
    [  # the run of `left` had parts 3, 3, 4 and 6 of a global batch of 16
        ({}, {"local_batch_sizes": (3, 5, 4, 6), "workers": 2}, (None, (3, 5, 4, 6), None)),
        ({}, {"local_batch_sizes": (3, 3, 4, 6), "workers": 2}, (16, None, None)),
        ({"global_batch_size": 16}, {"workers": 4}, (None, None, None)),  # it is taken back
        ({"global_batch_size": 16, "found": {"global_batch_size": 16}}, {}, (16, None, None)),
        ({"large_batch_size": [4]}, {"large_batch_size": (4,), "workers": 2}, (16, None, None)),
        ({"large_batch_size": [4, 4]}, {"large_batch_size": (4,), "workers": 2}, (16, None, None)),
        ({"large_batch_size": [4]}, {"large_batch_size": (9,), "workers": 2}, (16, None, (9,))),
    ],
)
def test_other_workers_keep_the_global_batch_unless_its_parts_are_given(
    left, before, given, expected
):
    found = newest(left("step", False))
    saved = {**found.manifest.config, **before}
    if before:
        saved["local_batch_sizes"] = None
    found = replace(found, manifest=replace(found.manifest, config=saved))
    config = {**SETTINGS, "sync": "step", "workers": 4, **given}
    now = adapted(Config(**config), found, 1, Config(**config))
    assert (now.global_batch_size, now.local_batch_sizes, now.large_batch_size) == expected


def test_a_finished_run_goes_back_to_a_checkpoint_that_is_named_and_its_restarts_do_not(
    tmp_path, monkeypatch, capsys
):
    folder, told = tmp_path / "run", []
    once = {"epochs": 2, "lr_milestones": (), "workers": 2, "train_samples": 40}
    run(folder, **ONE_SIDE, **once)
    first = folder / "checkpoints/epoch-0001"
    monkeypatch.setattr(resume, "remember", lambda *said: told.append(said))
    helpers.train_by("--resume", str(first))
    assert f"resumed from {first}" in capsys.readouterr().out
    assert told == [("run folder", str(folder))]
    monkeypatch.setattr(parse, "recall", dict(told).get)  # in a process that was restarted
    again = parse_config(Config, ["--resume", str(first), "--epochs", "2"])
    assert (again.resume, again.output_dir) == ("auto", str(folder))


def test_joint_steps_that_others_took_to_the_last_are_an_epoch_without_a_loss(tmp_path, capsys):
    settings = {**MODES["step"], "train_samples": 90}
    stopped(tmp_path / "run", 6, **settings)
    other = {"workers": 2, "local_batch_sizes": None, "global_batch_size": 16}
    capsys.readouterr()
    run(tmp_path / "run", **{**settings, **other}, resume="auto")
    assert samples_by_epoch(tmp_path / "run") == [90] * 3
    assert [row["steps"] for row in rows(tmp_path / "run", "round") if row["epoch"] == 0] == [0, 0]
    first = rows(tmp_path / "run", "eval")[0]
    assert (first["epoch"], first["learning_rate"] > 0) == (0, True)
    line = next(line for line in capsys.readouterr().out.splitlines() if "epoch 1/3" in line)
    assert "nan" not in line


def test_what_was_found_for_other_workers_is_found_anew(left):
    """Also where the number of workers was given: half of four workers are half of two."""
    config = {**MODES["bsp"], "small_workers": None, "small_ratio": 0.5, "workers": 4}
    before = {"small_workers": 2, "small_batch_size": (2,), "processes": 1}
    given = Config(**config, found=before)
    found = newest(left("bsp", False))
    now = adapted(with_found(given), found, 2, given)
    assert (now.workers, now.small_workers, now.small_batch_size) == (2, None, None)
    # Batches of two workers are no batches of two resolutions.
    sizes = {"local_batch_sizes": [3, 5], "resolutions": [16, 32]}
    manifest = replace(found.manifest, workers=2, config={**found.manifest.config, **sizes})
    given = Config(workers=1, local_batch_sizes=(3, 5), resolutions=(16, 32))
    now = adapted(given, replace(found, manifest=manifest), 1, given)
    assert now.local_batch_sizes is None
    given, sizes = Config(workers=3, local_batch_sizes=(9,)), {"local_batch_sizes": [9]}
    manifest = replace(found.manifest, workers=1, config={**found.manifest.config, **sizes})
    now = adapted(given, replace(found, manifest=manifest), 1, given)
    assert now.local_batch_sizes is None


def test_a_run_that_is_not_there_cannot_be_resumed():
    with pytest.raises(ValueError, match=r"resume must be auto, a run folder or .*, got no-such"):
        parse_config(Config, ["--resume", "no-such-folder"])
    with pytest.raises(ValueError, match="resume auto must go with output_dir"):
        parse_config(Config, ["--resume", "auto"])


def test_resuming_by_folder_keeps_the_runs_settings_and_flags_win(ended, tmp_path):
    folder = shutil.copytree(ended, tmp_path / "checkpoints/run")
    config = parse_config(Config, ["--resume", str(folder), "--report-to", "tensorboard"])
    assert (config.lr, config.rounds_per_epoch, config.report_to) == (0.02, 2, "tensorboard")
    assert with_found(config).workers == 4  # found out by the run, which was given none


# --- real processes


def start(folder, ranks=3, **settings):
    flags = helpers.to_flags(folder, **{**SETTINGS, **settings, "resume": "auto"})
    return helpers.start_ranks(flags, ranks)


def wait_for(path, processes):
    helpers.wait_until(
        lambda: path.exists() or any(p.poll() is not None for p in processes), 90, path
    )
    assert path.exists(), [p.stderr for p in processes]


REAL = {
    "step": {"sync": "step", "local_batch_sizes": (3, 5, 8), "epochs": 6},
    "powersgd": {**JOINT, "sync": "step", "local_batch_sizes": (3, 5), "wire": "powersgd:2:2"},
    "bsp": {**ROUNDS, **ONE_SIDE, "wire": "int8"},
}


@pytest.mark.parametrize(
    ("mode", "ranks"), short([("bsp", 2), ("step", 3), ("powersgd", 2)], ("bsp", 2))
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
    for text in said:
        assert f"error: rank {last} died or fell silent" in text
    again = start(tmp_path / "run", ranks, **settings)
    assert wait_all(again) == [0] * ranks, again[0].stderr
    assert "resumed from" in again[0].stdout
    assert fingerprint(tmp_path / "run") == fingerprint(tmp_path / "whole")


@slow
def test_a_run_stopped_while_some_wait_at_the_barrier_goes_on(tmp_path):
    """The others are through with their steps, and the first one asks them at its round's end."""
    unlike = {"local_batch_sizes": (1, 40, 40), "slope": (0.01,), "intercept": (0.0,)}
    settings = {**unlike, **ONE_SIDE, "epochs": 4, "train_samples": 120}
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
    helpers.end_ranks(start(tmp_path / "run", **settings, worker_timeout=30))


@slow
def test_a_worker_that_died_without_a_barrier_is_back_after_a_resume(tmp_path):
    settings = {**ROUNDS, **ONE_SIDE, "epochs": 16, "train_samples": 120, "sync": "asp"}
    settings |= {"worker_timeout": 30}
    folder = tmp_path / "run"
    processes = start(folder, **settings)
    wait_for(folder / "checkpoints/epoch-0002/manifest.json", processes)
    processes[2].kill()
    helpers.wait_until(lambda: rows(folder, "lost"), what="the loss")
    for process in processes[:2]:
        process.send_signal(signal.SIGTERM)
    assert wait_all(processes)[:2] == [EXIT_STOPPED] * 2, processes[0].stderr
    helpers.end_ranks(start(folder, **settings))
    (lost,) = rows(folder, "lost")
    trained = samples_by_epoch(folder, 16)
    assert trained[15] == 120
    assert sum(trained) + lost["samples"] == 16 * 120
    last = [row for row in rounds_of(folder) if row["epoch"] == 15 and row["samples"]]
    assert {row["worker"] for row in last} == {0, 1, 2}


@slow
def test_torchrun_restarts_and_the_run_goes_on_by_itself(tmp_path):
    flags = helpers.to_flags(tmp_path / "run", **{**SETTINGS, **ROUNDS, "epochs": 8})
    launcher = helpers.torchrun(flags)
    helpers.wait_until((tmp_path / "run/checkpoints/epoch-0002/manifest.json").exists, 90)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    try:
        _, said = launcher.communicate(timeout=120)
    finally:
        launcher.kill()
    assert launcher.returncode == 0, said
    assert [row["epoch"] for row in rows(tmp_path / "run", "eval")] == [*range(8)]
