"""One function is the loss of training, step times, memory and the noise scale, with figures."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import nn

import train
from dbsl.base.errors import SettingError
from dbsl.data.sources import TensorData
from dbsl.profile.timing import fit_profile
from tests.helpers import end_ranks, own, rows, short, start_ranks, stopped_at_step, table

SAMPLES, CLASSES, WIDTH = 44, 3, 6
SETTINGS = {"workers": 4, "epochs": 2, "lr": 0.05, "lr_milestones": (1,)}
SETTINGS |= {"slope": (0.001,), "intercept": (0.01,)}
SETTINGS |= {"report_to": "none", "mixed_precision": "no", "cpu_threads": 1}
ROUNDS = {"large_batch_size": (6,), "small_workers": 1, "rounds_per_epoch": 2}
MODES = {
    "bsp": ROUNDS,
    "asp": {**ROUNDS, "sync": "asp"},
    "ssp": {**ROUNDS, "sync": "ssp"},
    "step": {"sync": "step", "local_batch_sizes": (2, 3, 2, 4)},
    "gradients": {"push": "gradients:2", "local_batch_sizes": (2, 3, 2, 4)},
    "micro": {**ROUNDS, "micro_batch_size": (2,)},
}


def numbers():
    split = table(SAMPLES, WIDTH, CLASSES)
    split.tensors[0][:, 0] = torch.arange(SAMPLES)  # a sample's number
    return TensorData(split, split, CLASSES)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        return self.head(self.body(inputs))


class Teacher(nn.Module):
    """It counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.net = nn.Linear(WIDTH, CLASSES)

    def forward(self, inputs):
        self.calls += 1
        return self.net(inputs)


def numbered(model, inputs, labels, config):
    """Return the loss, and figures whose means over an epoch are known."""
    loss = F.cross_entropy(model(inputs), labels)
    return loss, {"number": inputs[:, 0].mean(), "one": 1.0, "like_the_loss": loss.detach()}


def distilling(teacher):
    def loss_function(model, inputs, labels, config):
        scores = model(inputs)
        with torch.no_grad():
            soft = teacher(inputs).softmax(1)
        kd = F.kl_div(scores.log_softmax(1), soft, reduction="batchmean")
        return F.cross_entropy(scores, labels) + 50 * kd, {"kd": kd.detach()}

    return loss_function


def run(folder, loss_function, model=Net, **settings):
    config = train.Config(**{**SETTINGS, **settings, "output_dir": str(folder)})
    AcceleratorState._reset_state(True)
    with pytest.MonkeyPatch.context() as patch:
        own(patch, numbers(), model, loss_function)
        train.main(config)


def check_means(folder):
    """Each sample once: the mean number is known, whatever the workers' batches were."""
    for row in rows(folder, "times"):
        assert row["number"] == pytest.approx((SAMPLES - 1) / 2)
        assert row["one"] == pytest.approx(1)
        own = [r for r in rows(folder, "round") if r["epoch"] == row["epoch"]]
        assert sum(r["samples"] for r in own) == SAMPLES
        loss = sum(r["loss"] * r["samples"] for r in own) / SAMPLES
        assert row["like_the_loss"] == pytest.approx(loss)
    for row in [*rows(folder, "round"), *rows(folder, "step")]:
        assert row["like_the_loss"] == pytest.approx(row["loss"])
        assert row["one"] == pytest.approx(1)


TWO = {"local_batch_sizes": (2, 5)}
IN_RANKS = {
    "bsp": {"large_batch_size": (6,), "rounds_per_epoch": 2},
    "step": {"sync": "step", **TWO},
    "asp": {"sync": "asp", "large_batch_size": (6,)},
    "gradients": {"push": "gradients:2", **TWO},
    "served": {"large_batch_size": (6,), "dedicated_server": True},
}


@pytest.mark.parametrize("mode", short(IN_RANKS, "bsp", "step"))
def test_figures_of_other_processes_come_with_their_reports(tmp_path, mode):
    settings = {**IN_RANKS[mode], "workers": None, "log_every": 2}
    call = partial(run, tmp_path / "run", numbered, **settings)
    end_ranks(start_ranks(call, 2 + (mode == "served")))
    check_means(tmp_path / "run")
    assert {row["worker"] for row in rows(tmp_path / "run", "step")} == {0, 1}


@pytest.mark.parametrize("mode", short(MODES, "bsp", "step", "gradients"))
def test_figures_are_means_over_the_samples_of_all_workers_and_batches(tmp_path, mode, capsys):
    run(tmp_path / "run", numbered, **MODES[mode], log_every=2)
    check_means(tmp_path / "run")
    assert rows(tmp_path / "run", "step")
    line = capsys.readouterr().out.split("epoch 1/2")[1].splitlines()[0]
    loss, told = line.split("  number ")
    assert loss.split("loss ")[1] == told.split("like_the_loss ")[1].split()[0]
    assert told.startswith("21.500  one 1.000  ")


@pytest.mark.parametrize("mode", short(["step", "asp"], "step"))
def test_a_run_resumed_inside_a_round_has_the_figures_of_an_unbroken_one(tmp_path, mode):
    settings = {**MODES[mode], "log_every": 3}
    run(tmp_path / "whole", numbered, **settings)
    with stopped_at_step(3):
        run(tmp_path / "broken", numbered, **settings)
    message = r"must get the same figures each time, number, one, like"
    with pytest.raises(SettingError, match=message):
        run(tmp_path / "broken", distilling(Teacher()), **settings, resume=str(tmp_path / "broken"))
    run(tmp_path / "broken", numbered, **settings, resume=str(tmp_path / "broken"))
    check_means(tmp_path / "broken")
    whole, broken = (rows(tmp_path / name, "round", "step") for name in ("whole", "broken"))
    for ours, theirs in zip(broken, whole, strict=True):
        for name in ("event", "worker", "loss", "number", "one"):
            assert ours[name] == theirs[name]


def plain(model, inputs, labels, config):
    return F.cross_entropy(model(inputs), labels), {}


def test_figures_are_counted_without_a_wait_for_the_device(tmp_path, monkeypatch):
    item, waits, seen = torch.Tensor.item, [], []

    def counted(tensor):
        waits.append(1)
        return item(tensor)

    monkeypatch.setattr(torch.Tensor, "item", counted)
    monkeypatch.setattr(torch.Tensor, "__float__", counted)
    for loss_function in (plain, numbered):
        waits.clear()
        run(tmp_path / loss_function.__name__, loss_function, **MODES["bsp"])
        seen.append(len(waits))
    assert seen[0] == seen[1]


# --- what is refused


def gives(second):
    """Return a loss function that gives what is made of the loss."""
    return lambda *arguments: second(plain(*arguments)[0])


@pytest.mark.parametrize(
    ("named", "message"), [({"first": 1.0}, "first, got first, late"), ({}, "none, got late")]
)
def test_figures_that_change_their_names_are_refused(tmp_path, named, message):
    calls = itertools.count()

    def loss_function(*arguments):
        loss, _ = plain(*arguments)
        return loss, named | ({"late": 2.0} if next(calls) > 5 else {})

    message = f"step.add must get the same figures each time, {message}"
    with pytest.raises(SettingError, match=message):
        run(tmp_path / "run", loss_function, **MODES["bsp"])


def without_a_graph(model, inputs, labels, config):
    loss = F.cross_entropy(model(inputs.requires_grad_()), labels)
    torch.autograd.grad(loss, inputs)  # without create_graph
    return loss, {}


TAKEN = "must have a unique name, got"
NO_LOSS = "must return a pair, the mean loss .* got"


@pytest.mark.parametrize(
    ("loss_function", "kind", "message"),
    [
        *(
            (gives(lambda loss, n=name: (loss, {n: 1.0})), SettingError, f"{TAKEN} '{name}', which")
            for name in ("loss", "epoch", "workers_wait_time_s", "event", "share")
        ),
        (gives(lambda loss: loss), SettingError, rf"{NO_LOSS} a tensor \[\]$"),
        (gives(lambda loss: (loss.expand(2), {})), SettingError, rf"{NO_LOSS} a tensor \[2\]"),
        (gives(lambda loss: (loss, {}, 3)), SettingError, f"{NO_LOSS} tuple"),
        (gives(lambda loss: (loss, loss)), SettingError, f"{NO_LOSS} tuple"),
        (gives(lambda loss: (loss, {"a": loss.expand(2)})), SettingError, r"'a' .* mean, .* \[2\]"),
        (gives(lambda loss: (loss, {"a": "high"})), SettingError, "'a' must be a mean, .* got str"),
        (gives(lambda loss: (loss, {3: 1.0})), SettingError, f"a figure {TAKEN} 3"),
        (lambda *_: 1 / 0, ZeroDivisionError, "division"),  # a bug shows itself
        (without_a_graph, RuntimeError, "backward"),
        (gives(lambda loss: (loss.detach(), {})), RuntimeError, "does not require grad"),
    ],
)
def test_what_is_no_loss_with_figures_is_refused_before_anything_is_written(
    tmp_path, loss_function, kind, message
):
    with pytest.raises(kind, match=message):
        run(tmp_path / "run", loss_function)
    assert not (tmp_path / "run").exists()


def test_settling_the_names_leaves_weights_statistics_and_random_streams(tmp_path, monkeypatch):
    def noisy(model, inputs, labels, config):
        torch.rand(3), np.random.rand(3)  # noqa: NPY002
        return plain(model, inputs, labels, config)

    model, drawn = Net(), []
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def noted(*_):
        drawn.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))  # noqa: NPY002
        return 1 / 0 if len(drawn) == 2 else model

    monkeypatch.setattr("dbsl.run.times.profile_workers", noted)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", noisy, noted)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert drawn[0] == drawn[1]


# --- one function for all that trains and measures


def test_step_times_are_measured_with_the_whole_loss_and_kept_by_its_text(tmp_path, monkeypatch):
    teacher, students, timed, forward = Teacher(), [], [], Net.forward

    def profiled(step, sizes, **_):
        before, own = teacher.calls, len(students)
        for size in sizes:
            step(size)
        timed.append((teacher.calls - before, len(students) - own))
        times = [1e-6 * (10 + size) for size in sizes]  # shorter than any step: they are kept
        return fit_profile(step.resolution, sizes, times, [0.0] * len(sizes))

    monkeypatch.setattr(Net, "forward", lambda *given: students.append(given) or forward(*given))
    monkeypatch.setattr("dbsl.profile.cache.profile_steps", profiled)
    settings = {"slope": None, "intercept": None, "plan_only": True, "large_batch_size": (8,)}
    for loss_function in (distilling(teacher), numbered, numbered, distilling(Teacher())):
        run(tmp_path / "run", loss_function, **settings)
    (theirs, own), other = timed
    assert theirs == own > 0
    assert other[0] == 0
