"""What a resumed run may change."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

from dbsl.base.errors import SettingError
from dbsl.checkpoint.resume import changed_settings, check_held_out
from train import Config

BEFORE = Config(
    workers=4, lr_milestones=(3, 5), large_batch_size=(24,), slope=(0.1,), intercept=(1,)
)


@pytest.mark.parametrize(
    ("saved", "now", "refused"),
    [("a", "a", False), ("a", "b", True), ("a", "", False), ("", "b", True)],
)
def test_images_are_held_out_as_they_were_or_none_is(saved, now, refused):
    """Of a run with an evaluation split (empty) all other images were trained on."""
    expected = pytest.raises(SettingError, match="dataset, seed and holdout must be those that")
    with expected if refused else nullcontext():
        check_held_out(saved, SimpleNamespace(held_out=now), "photos")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        ({}, set()),
        ({"lr": 0.7, "keep_checkpoints": 7}, {"lr", "keep_checkpoints"}),
        ({"lr_milestones": ()}, {"lr_milestones"}),
        ({"slope": (0.1, 0.1), "found": {"slope": (0.1,)}}, set()),  # the same, at greater length
        ({"large_batch_size": (24, 32)}, {"large_batch_size"}),
    ],
)
def test_settings_are_held_against_those_of_the_checkpoint(change, changed):
    before = json.loads(json.dumps(asdict(BEFORE)))
    assert changed_settings(before, replace(BEFORE, **change)).keys() == changed
    del before["mixup"]  # a setting that was not there yet had its default
    assert changed_settings(before, replace(BEFORE, mixup=0.2)) == {"mixup": (0.0, 0.2)}
