"""Training that diverges is said to, and is no success."""

import json
from dataclasses import replace

import pytest

from dbsl.base.errors import EXIT_DIVERGED, one_line_errors
from dbsl.log.divergence import DivergenceWarning, no_result
from dbsl.optimizer import default_learning_rate
from dbsl.plan.types import RoundReport
from dbsl.run.evaluation import Evaluation
from tests.helpers import run
from train import Config


def told_of(losses, **settings):
    """Return what is said of epochs with these training losses, none of which is evaluated."""
    said = []
    warning = DivergenceWarning(Config(lr=0.1, optimizer="adamw", **settings), 10, said.append)
    for epoch, loss in enumerate(losses):
        warning.look_at_epoch(epoch, loss, None, steps=100, batch_size=16)
    return said


@pytest.mark.parametrize("loss", [74.0, 8.0])
def test_a_training_loss_that_has_risen_far_is_said_once_with_what_to_lower(loss):
    (line,) = told_of([2.3, 3.0, 5.5, loss, loss])
    assert line.startswith(f"warning: the training loss of epoch 4 is {loss:g}, and was 2.3 in ")
    assert "lower lr (0.1 with adamw)" in line


@pytest.mark.parametrize(
    ("fault", "precision", "settings", "said"),
    [
        (1, "no", {}, "worker 2 is refused: its loss is not finite; lower lr (0.1 with sgd)"),
        (1, "bf16", {}, "lower lr (0.1 with sgd) or try --mixed-precision no instead of bf16"),
        (
            4,
            "bf16",
            {},
            "worker 2 is refused: conv.bias is not finite, though its loss is; lower lr (0.1",
        ),
        (4, "no", {}, "(0.1 with sgd), or see whether all gradients of the loss are finite"),
        (
            2,
            "fp16",
            {},
            "a weight on its way to rank 0 is not finite, though its loss is; lower lr (0.1",
        ),
        (3, "no", {"sync": "step"}, "of all workers is refused: conv.weight is not finite"),
        (3, "no", {"push": "gradients"}, "the gradient of conv.weight is not finite"),
    ],
)
def test_each_refused_round_says_what_was_not_finite_and_what_to_try(
    fault, precision, settings, said
):
    lines, names = [], ("conv.weight", "conv.bias")
    config = Config(lr=0.1, optimizer="sgd", workers=4, **settings)
    warning = DivergenceWarning(config, 10, lines.append, precision=precision, weights=names)
    report = RoundReport(2, 4, 1, 16, 8, 40, 5, 1.0, 2.3, 0.5, refused=True, fault=fault)
    for each in (report, replace(report, refused=False, fault=0)):
        warning.look(each)
    (line,) = lines
    assert line.startswith("warning: round 2 of epoch 5 of ")
    assert said in line
    assert line.endswith(said) or not said.endswith(")")


@pytest.mark.parametrize("losses", [[693.0, 7.7], [51.2, 60.0, 40.0], [-3.0, -50.0], [0.01, 0.9]])
def test_a_training_loss_of_any_size_is_no_alarm_as_long_as_it_does_not_rise_far(losses):
    """Distillation, penalties and sums over classes know nothing of the logarithm of classes."""
    assert told_of(losses) == []


def told(losses, evaluations=None, steps=8, classes=3, accuracy=0.33, **settings):
    """Return the epoch after which a warning is said, and the warning.

    Losses are those of training, by epoch, and so are the evaluations' unless they are given.
    """
    said = []
    config = Config(**{"lr": 0.1, "epochs": 10, "warmup_epochs": 1.0, **settings})
    warning = DivergenceWarning(config, classes, said.append)
    for epoch, loss in enumerate(losses):
        found = (evaluations or losses)[epoch]
        evaluation = None if found is None else Evaluation(accuracy, found, 100, 16)
        warning.look_at_epoch(epoch, loss, evaluation, steps=steps, batch_size=16)
        if said:
            return epoch + 1, said[0]
    return None


def test_a_run_that_learns_nothing_after_its_warm_up_is_told_the_setting_and_what_to_try():
    """Losses of a ResNet-18 at lr 0.1 in batches of 16: far from diverging, and useless."""
    epoch, line = told([1.124, 1.910, 1.468, 1.415])
    assert epoch == 4
    assert line == (
        "warning: the evaluation's cross-entropy is 1.42 after epoch 4, no better than guessing "
        "among 3 classes (1.10): nothing is learnt with lr 0.1 (sgd, 16 samples a step); try "
        "another, 0.01 first"
    )
    assert told([1.124, 1.910, 1.468], steps=16) is None
    assert told([1.124, 1.910, 1.468], steps=100)[0] == 2  # an epoch is enough
    assert told([1.2], steps=16, epochs=1)[0] == 1  # the run is over, be it all warm-up
    assert told([1.2] * 2, steps=4, epochs=2) is None  # too few steps to tell
    assert told([1.124, 1.3, 0.7, 1.2, 1.1, 0.9]) is None
    assert told([1.2] * 6, [None, None, None, None, 1.2, 1.2])[0] == 5  # where it is evaluated


def test_only_the_evaluation_is_held_against_guessing():
    assert told([52.0] * 6, [0.9] * 6) is None  # a training loss that is 50 times something
    assert told([0.2] * 6, [1.2] * 6)[0] == 4
    assert told([0.001] * 6, [1.5] * 6, accuracy=0.7) is None  # confident, and wrong at times
    assert told([9.0, 8.0, 7.0, 6.0, 5.0], [1.2] * 5) is None  # it falls clearly
    assert told([-9.0, -8.0, -10.0, -12.0, -14.0], [1.2] * 5) is None
    assert told([1.0] * 6, [0.0] * 6, classes=1) is None


def test_a_diverged_run_ends_with_a_status_and_without_a_model_card(tmp_path, capsys):
    settings = {"workers": 4, "lr": 1e15, "epochs": 1, "warmup_epochs": 0, "mixed_precision": "no"}
    folder = tmp_path / "run"
    for resume in (None, "auto"):  # finished, and no better for it
        with pytest.raises(SystemExit) as ended, one_line_errors():
            run(folder, **settings, resume=resume)
        assert ended.value.code == EXIT_DIVERGED == 3
        said = capsys.readouterr()
        assert "error: the loss of the final evaluation is not finite" in said.err
        assert "lower lr (1e+15 with sgd)" in said.err
    assert json.loads((folder / "summary.json").read_text())["final_loss"] is None
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("loss", "classes", "diverged"),
    [
        *((0.01, 10, False), (74.0, 10, False), (2300.0, 10, False), (2310.0, 10, True)),
        *((2310.0, 1000, False), (6e35, 1000, True)),
    ],
)
def test_a_loss_a_thousand_times_that_of_guessing_is_no_result(loss, classes, diverged):
    assert bool(no_result({"final_loss": loss, "classes": classes})) == diverged


@pytest.mark.parametrize(
    ("optimizer", "rate"),
    [
        *(("sgd", 0.1), ("momentum", 0.1), ("sgdw", 0.1), ("sgdp", 0.1)),
        *(("adam", 0.001), ("adamw", 0.001), ("lion", 0.0001), ("adafactor", 0.001)),
    ],
)
def test_each_optimizer_has_a_learning_rate_of_its_own(optimizer, rate):
    assert default_learning_rate(optimizer) == rate


def test_a_run_whose_rounds_were_all_refused_is_no_success(tmp_path, capsys):
    """The weights are the initial ones, whose loss is finite."""
    settings = {"lr": 1e15, "epochs": 1, "warmup_epochs": 0, "mixed_precision": "no"}
    with pytest.raises(SystemExit) as ended, one_line_errors():
        run(tmp_path / "run", **settings, workers=2)
    assert ended.value.code == EXIT_DIVERGED
    assert "error: every round of the last epoch was refused" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/summary.json").read_text())["last_epoch_refused"]
    assert not (tmp_path / "run/README.md").exists()
