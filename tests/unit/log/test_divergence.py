"""Training that diverges is said to, and is no success."""

import json
import math

import pytest

from dbsl.base.errors import EXIT_DIVERGED, one_line_errors
from dbsl.log.divergence import DivergenceWarning, no_result
from dbsl.optimizer import default_learning_rate
from tests.helpers import run
from train import Config


@pytest.mark.parametrize("loss", [math.nan, math.inf, 74.0, 5.7])
def test_a_loss_far_above_guessing_is_said_once_with_what_to_lower(loss):
    said = []
    warning = DivergenceWarning(Config(lr=0.1, optimizer="adamw"), 10, said.append)
    for usual in (0.0, 2.3, 3.0, 5.5):
        warning.look(usual, "the training loss of epoch 1")
    assert not said
    warning.look(loss, "the training loss of epoch 2")
    warning.look(loss, "the training loss of epoch 3")
    (line,) = said
    assert line.startswith("warning: the training loss of epoch 2 is ")
    assert "guessing among 10 classes has 2.30" in line
    assert "lower lr (0.1 with adamw)" in line


def told(losses, steps=8, samples=120, classes=3, **settings):
    """Return the epoch after which a warning is said, and the warning, of epochs with losses."""
    said = []
    config = Config(**{"lr": 0.1, "epochs": 10, "warmup_epochs": 1.0, **settings})
    warning = DivergenceWarning(config, classes, said.append)
    for epoch, loss in enumerate(losses):
        warning.look(loss, f"the training loss of epoch {epoch + 1}")
        warning.look_at_epoch(epoch, loss, samples=samples, steps=steps, batch_size=16)
        if said:
            return epoch + 1, said[0]
    return None


def test_a_run_that_learns_nothing_after_its_warm_up_is_told_the_setting_and_what_to_try():
    """Losses of a ResNet-18 at lr 0.1 in batches of 16: far from diverging, and useless."""
    epoch, line = told([1.124, 1.910, 1.468, 1.415])
    assert epoch == 4  # after epoch 3 it still fell
    assert line == (
        "warning: the training loss of epochs 2 to 4 is 1.6, no better than guessing among 3 "
        "classes (1.10): nothing is learnt with lr 0.1 (sgd, 16 samples a step); try another, "
        "0.01 first"
    )
    assert told([1.124, 1.910, 1.468], steps=16) is None
    assert told([1.124, 1.910, 1.468], steps=100)[0] == 2  # an epoch is enough
    assert told([1.2], steps=16, epochs=1)[0] == 1  # the run is over, be it all warm-up
    assert told([1.2] * 2, steps=4, epochs=2) is None  # too few steps to tell
    assert told([1.124, 1.3, 0.7, 1.2, 0.9, 1.1]) is None
    assert told([1.124, 1.5, 0.9, 1.2]) is None  # it has learnt something


@pytest.mark.parametrize("steps", [4, 8, 16, 36])
@pytest.mark.parametrize("warmup", [0.0, 0.5, 1.0, 2.0])
def test_a_loss_that_falls_clearly_is_no_alarm(steps, warmup):
    """Losses of a run that learns: a mean over epochs hides that the newest is better."""
    losses = [2.44, 2.94, 2.89, 1.93, 1.31]
    assert warmup < 1 or told(losses, steps, classes=10, warmup_epochs=warmup) is None
    assert told([3.9, 3.0, 2.5, 2.2], steps, classes=10, warmup_epochs=warmup) is None
    assert told([3.0, 2.5], steps, classes=10, epochs=2, warmup_epochs=warmup) is None


def test_binary_cross_entropy_is_held_against_guessing_by_its_own_loss():
    """It begins at ln 2 a class, which sums to 693 for 1,000 classes, and is no divergence."""
    bce = {"bce_loss": True, "classes": 1000, "steps": 100}
    assert told([693.0, 7.7, 7.5], bce_sum=True, **bce) is None
    assert told([693.0, 7.7, 8.5], bce_sum=True, **bce)[0] == 3
    assert told([0.69, 0.007], **bce) is None
    assert told([0.69, 0.009], **bce) is None  # it fell
    assert told([0.69, 0.009, 0.009], **bce)[0] == 3
    mixed = {"mixup": 0.1, "cutmix": 1.0, "bce_target_thresh": 0.2}
    assert told([0.69, 0.009], **bce, **mixed) is None  # two classes in an image


def test_a_diverged_run_ends_with_a_status_and_without_a_model_card(tmp_path, capsys):
    settings = {"workers": 4, "lr": 1e18, "epochs": 1, "warmup_epochs": 0, "mixed_precision": "no"}
    folder = tmp_path / "run"
    for resume in (None, "auto"):  # finished, and no better for it
        with pytest.raises(SystemExit) as ended, one_line_errors():
            run(folder, **settings, resume=resume)
        assert ended.value.code == EXIT_DIVERGED == 3
        said = capsys.readouterr()
        assert "error: the loss of the final evaluation is not finite" in said.err
        assert "lower lr (1e+18 with sgd)" in said.err
    assert json.loads((folder / "summary.json").read_text())["final_loss"] is None
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize(
    ("loss", "classes", "diverged"),
    [
        *((0.01, 10, False), (74.0, 10, False), (2300.0, 10, False), (2310.0, 10, True)),
        *((2310.0, 1000, False), (6e35, 1000, True), (2310.0, None, False)),
    ],
)
def test_a_loss_a_thousand_times_that_of_guessing_is_no_result(loss, classes, diverged):
    summary = {"final_loss": loss} | ({"classes": classes} if classes else {})
    assert bool(no_result(summary)) == diverged


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
    settings = {"lr": 1e30, "epochs": 1, "warmup_epochs": 0, "mixed_precision": "no"}
    with pytest.raises(SystemExit) as ended, one_line_errors():
        run(tmp_path / "run", **settings, workers=2)
    assert ended.value.code == EXIT_DIVERGED
    assert "error: every round of the last epoch was refused" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/summary.json").read_text())["last_epoch_refused"]
    assert not (tmp_path / "run/README.md").exists()
