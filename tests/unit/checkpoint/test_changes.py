"""What a resumed run may change: freely, because something else changed, or with consent."""

import re
import tempfile
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dbsl.base.errors import SettingError
from dbsl.checkpoint.disk import UNKNOWN, Found, Manifest
from dbsl.checkpoint.resume import (
    _drops_remainders,
    check_changes,
    check_held_out,
    without_effect,
)
from train import Config

BEFORE = Config(
    workers=4, epochs=6, lr_milestones=(3, 5), large_batch_size=(24,), slope=(0.1,), intercept=(1,)
)
CONSENT = "allow_config_change must be given for a change of what is trained, got "


def changes(now, *, before=BEFORE, processes=1, epoch=2):
    """Check a change; return the lines that were said."""
    counts = {"sequence": 1, "epoch": epoch, "processes": 1, "workers": before.workers}
    of_data = {"classes": 10, "samples": 100}
    manifest = Manifest(files={}, config=asdict(before), **counts, **of_data)
    said = []
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "config.yaml").touch()
        check_changes(Found(run, run / "save", manifest), now, processes, said.append)
    return said


@pytest.mark.parametrize(
    ("saved", "now", "refused"),
    [("a", "a", False), ("a", "b", True), ("a", "", False), ("", "b", True), (UNKNOWN, "b", False)],
)
def test_images_are_held_out_as_they_were_or_none_is(saved, now, refused):
    """Of a run with an evaluation split (empty) all other images were trained on."""
    expected = pytest.raises(SettingError, match="dataset, seed and holdout must be those that")
    with expected if refused else nullcontext():
        check_held_out(saved, SimpleNamespace(held_out=now), "photos")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"epochs": 8}, "epochs 6 -> 8"),
        ({"keep_checkpoints": 7}, "keep_checkpoints 3 -> 7"),
        ({"report_to": "none"}, "report_to "),
    ],
)
def test_what_no_weight_depends_on_changes_freely_and_is_said(change, line):
    before = replace(BEFORE, keep_checkpoints=3, report_to="wandb")
    said = changes(replace(before, **change), before=before)
    begun = [s.startswith(f"changed since the checkpoint: {line}") for s in said]
    assert begun == [True] * bool(line)


@pytest.mark.parametrize(
    ("change", "listed"),
    [
        ({"lr": 0.7}, "lr unset -> 0.7"),
        ({"large_batch_size": (24, 32)}, "large_batch_size 24 -> 24,32"),
        ({"lr_milestones": ()}, "lr_milestones 3,5 -> empty"),
        ({"epochs": 4}, "epochs 6 -> 4"),  # shorter: its end is annealed elsewhere
        ({"log_every": 9, "seed": 3}, "seed 0 -> 3"),
        # A free setting is no source: other batches are trained with, whoever chose them.
        ({"eval_samples": 2, "large_batch_size": (48,)}, "large_batch_size 24 -> 48"),
        ({"slope": (0.2,)}, "slope 0.1 -> 0.2"),
    ],
)
def test_what_weights_depend_on_needs_consent_given_or_measured_anew(change, listed):
    before = replace(BEFORE, lr=None, resolved=("large_batch_size", "slope"))
    now = replace(before, **change)
    with pytest.raises(ValueError, match=f"^{re.escape(CONSENT)}.*{re.escape(listed)}"):
        changes(now, before=before)
    said = changes(replace(now, allow_config_change=True), before=before)
    assert any(listed in line for line in said)


def test_a_run_is_not_made_shorter_than_it_is():
    with pytest.raises(ValueError, match=r"^epochs must be above the 2 that are complete, got 2$"):
        changes(replace(BEFORE, epochs=2, allow_config_change=True))


def test_batches_and_times_follow_the_number_of_workers():
    said = changes(replace(BEFORE, workers=3, large_batch_size=(32,), slope=(0.2,)))
    assert len(said) == 3


@pytest.mark.parametrize(
    ("old", "new", "sync", "kept", "dropped"),
    [
        ("int4", "int4", "bsp", True, False),
        ("int4", "int8", "bsp", True, False),
        ("int4", "float32", "bsp", True, True),
        ("int4", "int4", "bsp", False, True),
        ("bf16", "bf16", "bsp", False, True),
        ("bf16", "bf16", "step", False, False),
        ("float32", "int4", "bsp", False, False),
        ("powersgd:4:9", "powersgd:4", "step", True, False),
        ("powersgd:4", "powersgd:2", "step", True, True),
        ("powersgd:4", "fp16", "step", True, True),
        ("powersgd:4", "powersgd:4", "step", False, True),
    ],
)
def test_remainders_that_a_resumed_run_drops_are_said(old, new, sync, kept, dropped):
    before, now = {"wire": old, "sync": sync}, replace(BEFORE, wire=new, sync=sync)
    assert _drops_remainders(before, now, kept=kept) == dropped


def test_what_was_found_follows_its_source_and_what_was_given_does_not():
    """Milestones that follow from the epochs change with them; those that were given stay."""
    found = replace(BEFORE, resolved=("lr_milestones",))
    now = replace(found, epochs=8, lr_milestones=(4, 7))
    assert any("(not given: found anew)" in line for line in changes(now, before=found))
    with pytest.raises(ValueError, match=r"lr_milestones 3,5 -> 4,7$"):
        changes(replace(now, resolved=()), before=found)


def test_settings_that_come_too_late_are_named(tmp_path):
    (tmp_path / "config.yaml").write_text("lr: 0.3\nlog_every: 9\n")
    assert without_effect(tmp_path, Config(lr=0.5)) == "lr 0.3 -> 0.5"
    assert without_effect(tmp_path, Config(lr=0.3)) == ""
