"""What a fork of train.py does wrong is told in one line, in every process, and never hangs."""

import os
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import train
from dbsl.config.parse import parse_config
from dbsl.data.sources import TensorData
from tests.helpers import ROOT, TINY, own, refused, short, start_ranks, table, to_flags, wait_all

SHORT = {"epochs": 1, "lr_milestones": (), "mixed_precision": "no"}
ROUNDS = {"workers": 2, "local_batch_sizes": (8, 8), "rounds_per_epoch": 2}
JOINT = {"workers": 2, "local_batch_sizes": (8, 8), "sync": "step"}
ADD = "            step.add(part, loss, figures)"
AFTER = "call checkpoint.after_step(turn) after each step"
DONE = "        step.done(lr)"
TURN, EPOCH = "    train_turn(turn, training)", "    checkpoint.after_epoch(turn)"
MUST = "the training loop must"


def edited(old, new):
    """Return train.py with one place of it changed, as a module."""
    text = (ROOT / "train.py").read_text()
    assert text.count(old) == 1, old
    module = ModuleType("edited")
    sys.modules["edited"] = module
    exec(compile(text.replace(old, new), str(ROOT / "train.py"), "exec"), module.__dict__)
    return module


def go(module, folder, **settings):
    module.main(module.Config(**{**TINY, **SHORT, **settings, "output_dir": str(folder)}))


@pytest.mark.parametrize(
    ("old", "new", "said", "settings"),
    [
        ("    workers.pull(turn)", "    pass", "call workers.pull(turn) before a step", ROUNDS),
        (ADD, "            pass", "call step.add for each batch", ROUNDS),
        (ADD, f"{ADD}\n{ADD}", "call step.add once for each batch, got it twice", ROUNDS),
        (DONE, "        pass", "call step.done(lr) after each step", ROUNDS),
        ("    workers.push(turn)", "    pass", "call workers.push(turn) after its last", ROUNDS),
        (DONE, f"{DONE}; break", "take all steps of a turn", ROUNDS),
        (ADD, f"{ADD}\n            break", "let its loop over a step's batches come to", JOINT),
        ("        checkpoint.after_step(turn)\n    # dbsl", "    # dbsl", AFTER, ROUNDS),
        ("        run.begin(workers, checkpoint)", "        pass", "call run.begin before", ROUNDS),
        (TURN, f"{TURN}; return", "take all turns", ROUNDS),
        (EPOCH, f"{EPOCH}; return", "take all turns", ROUNDS | {"epochs": 2, "eval_every": 2}),
    ],
)
def test_calls_that_are_out_of_order_are_told_and_leave_no_result(
    tmp_path, capsys, old, new, said, settings
):
    line = refused(capsys, lambda: go(edited(old, new), tmp_path / "run", **settings))
    assert f"loop must {said}" in line
    assert not (tmp_path / "run/summary.json").exists()


def in_ranks(folder, act, ranks=2, **settings):
    """Return the statuses of processes that train as `act` has changed it, and what they said."""
    flags = to_flags(folder, **{**SHORT, "workers": None, **settings})

    def call():
        act(pytest.MonkeyPatch())
        train.main(parse_config(train.Config, flags))

    processes = start_ranks(call, ranks)
    return wait_all(processes), [process.stderr for process in processes]


def past_ddp(patch):
    whole = train.loss_function
    raw = lambda model, *rest: whole(getattr(model, "module", model), *rest)  # noqa: E731
    patch.setattr(train, "loss_function", raw)


def unlike_data(patch):
    own(patch, data(int(os.environ["RANK"])), Net)


def data(seed):
    split = table(40, classes=2, seed=seed)
    return TensorData(split, split, 2)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


OF_IMAGES = dict.fromkeys(("train_samples", "eval_samples", "resolutions"))


@pytest.mark.parametrize(
    ("act", "settings", "said"),
    [
        (past_ddp, {"sync": "step"}, f"{MUST} call workers.model"),
        (unlike_data, OF_IMAGES, "data must be the same in all processes, got others on rank 1"),
    ],
)
def test_what_only_several_processes_can_do_wrong_ends_all_of_them(tmp_path, act, settings, said):
    statuses, texts = in_ranks(tmp_path / "run", act, **settings)
    assert statuses == [2, 2]
    assert any(said in text for text in texts), texts


def on_table(folder, data, loss=train.loss_function, **settings):
    with pytest.MonkeyPatch.context() as patch:
        own(patch, data, Net, loss)
        go(train, folder, **{**OF_IMAGES, "lr": 0.1, **settings})


def test_a_run_goes_on_with_the_data_that_it_began_with_alone(tmp_path, capsys):
    folder = tmp_path / "run"
    on_table(folder, data(0))
    again = {"epochs": 2, "resume": str(folder)}
    line = refused(capsys, lambda: on_table(folder, data(1), **again))
    assert line == "data must be those that the run has trained on, got other samples"
    on_table(folder, data(0), **again)


def test_a_sample_that_is_drawn_at_random_is_refused():
    class Noisy(TensorDataset):
        def __getitem__(self, number):
            return torch.randn(4), number % 2

    data = Noisy(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError, match="train must give the same tensor each time, since each"):
        TensorData(data, data, 2)


@pytest.mark.parametrize(
    ("loss", "warned"),
    short(
        [
            (lambda scores, labels: F.cross_entropy(scores, labels), False),
            (lambda scores, labels: F.cross_entropy(scores, labels, reduction="sum"), True),
            (lambda scores, labels: F.cross_entropy(scores, labels, torch.tensor([1.0, 9])), True),
        ]
    ),
)
def test_a_loss_that_is_no_mean_over_the_samples_is_warned_of(tmp_path, capsys, loss, warned):
    def loss_function(model, images, labels, config):
        return loss(model(images), labels), {}

    on_table(tmp_path / "run", data(0), loss_function, plan_only=True)
    assert (
        "loss_function should return a mean over the samples" in capsys.readouterr().out
    ) == warned
