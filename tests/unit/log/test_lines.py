"""Lines for people: refused rounds, runs without a result, times and losses."""

import json
import math

import pytest

from dbsl.base.errors import EXIT_DIVERGED, one_line_errors, short_loss
from dbsl.log.lines import missed_times, refusal, times_in_words
from dbsl.log.rows import no_result, together
from dbsl.plan.types import RoundReport
from tests.helpers import run
from train import Config


def test_a_refused_round_is_not_in_the_epochs_loss():
    def report(worker, loss, samples, *, refused=False):
        counts = (8, 1, samples, 1, 1.0, loss, 0.5)
        return RoundReport(worker, 0, 0, *counts, refused=refused, figures={"kd": 2 * loss})

    bad, reports = report(1, math.nan, 20, refused=True), [report(0, 1.0, 10), report(2, 4.0, 5)]
    found = together([reports[0], bad, reports[1]])
    assert (found["loss"], found["kd"], found["samples"]) == (2.0, 4.0, 35)
    assert math.isnan(together([bad])["loss"])


@pytest.mark.parametrize(
    ("fault", "precision", "settings", "said"),
    [
        (1, "no", {}, "worker 2 is refused: its loss is not finite; lower lr (0.1 with sgd)$"),
        (1, "bf16", {}, "lower lr (0.1 with sgd) or try --mixed-precision no instead of bf16"),
        (4, "bf16", {}, "worker 2 is refused: conv.bias is not finite, though its loss is; lower"),
        (4, "no", {}, "(0.1 with sgd), or see whether all gradients of the loss are finite"),
        (2, "fp16", {}, "a weight on its way to rank 0 is not finite, though its loss is; lower"),
        (3, "no", {"sync": "step"}, "of all workers is refused: conv.weight is not finite"),
        (3, "no", {"push": "gradients"}, "the gradient of conv.weight is not finite"),
    ],
)
def test_each_refused_round_says_what_was_not_finite_and_what_to_try(
    fault, precision, settings, said
):
    config = Config(lr=0.1, optimizer="sgd", workers=4, **settings)
    report = RoundReport(2, 4, 1, 16, 8, 40, 5, 1.0, 2.3, 0.5, refused=True, fault=fault)
    line = refusal(report, config, precision, ("conv.weight", "conv.bias"))
    assert line.startswith("warning: round 2 of epoch 5 of ")
    assert said in f"{line}$"


@pytest.mark.parametrize(
    ("workers", "lr", "reason"),
    [
        (4, 1e15, "the loss of the final evaluation is not finite"),
        # The weights are the initial ones, whose loss is finite.
        (2, 1e15, "every round of the last epoch was refused"),
    ],
)
def test_a_diverged_run_ends_with_a_status(tmp_path, capsys, workers, lr, reason):
    settings = {"workers": workers, "lr": lr, "epochs": 1, "mixed_precision": "no"}
    folder = tmp_path / "run"
    for resume in (None, "auto")[: workers - 1]:  # finished, and no better for it
        with pytest.raises(SystemExit) as ended, one_line_errors():
            run(folder, **settings, warmup_epochs=0, resume=resume)
        assert ended.value.code == EXIT_DIVERGED == 3
        said = capsys.readouterr().err
        assert f"error: {reason}" in said
        assert "lower lr (1e+15 with sgd)" in said
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["final_loss"] is None) == (workers == 4)
    assert summary.get("last_epoch_refused", False) == (workers == 2)


@pytest.mark.parametrize(
    ("loss", "classes", "diverged"),
    [
        *((0.01, 10, False), (74.0, 10, False), (2300.0, 10, False), (2310.0, 10, True)),
        *((2310.0, 1000, False), (6e35, 1000, True)),
    ],
)
def test_a_loss_a_thousand_times_that_of_guessing_is_no_result(loss, classes, diverged):
    assert bool(no_result({"final_loss": loss, "classes": classes})) == diverged


@pytest.mark.parametrize(("error", "said"), [(0.6, True), (-0.6, True), (0.4, False)])
def test_times_are_warned_of_only_if_half_off_and_a_worker_alone_never(error, said):
    values = {"time_s": 1 + error, "predicted_time_s": 1.0}
    assert bool(missed_times({0: values, 1: {"time_s": 1.0, "predicted_time_s": 0.0}})) == said
    assert missed_times({0: values}) is None


@pytest.mark.parametrize(
    ("times_s", "text"),
    [
        ([], ""),
        ([0.0, 0.0], ""),
        ([0.0123, 0.0234], "  workers 0.012-0.023 s"),
        ([1.23, 1.24], "  workers 1.2 s"),
        ([9.4, 1234.5], "  workers 9.4-1234 s"),
    ],
)
def test_worker_times_have_two_digits_or_are_left_out(times_s, text):
    assert times_in_words(times_s) == text


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        *((0.0012, "0.001"), (2.3026, "2.303"), (99.9994, "99.999"), (123.4, "123.4")),
        *((12345.6, "12346"), (1e6, "1.0e06"), (6.04e35, "6.0e35"), (math.nan, "nan")),
    ],
)
def test_a_loss_is_printed_in_six_characters(loss, text):
    assert short_loss(loss) == text
