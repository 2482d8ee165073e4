"""The arms of benchmarks/speed compute, and wait for the device before they are timed."""

import io
import json

import pytest
import torch

from experiments.benchmarks.speed import arms
from experiments.benchmarks.speed.arms import Pace, Settings

SETTINGS = Settings("digits", "test_resnet", 16, 4, "no")


def test_an_arm_waits_for_the_device_before_it_answers(monkeypatch):
    order, answers = [], io.StringIO()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: order.append("waited"))
    monkeypatch.setattr(arms.sys, "stdin", io.StringIO("8\n8\n"))
    monkeypatch.setattr(arms, "_peak_mib", lambda: order.append("answered") or 0)
    pace = Pace(answers)
    pace(0)
    pace(4)  # not all of its images yet: nobody waits
    assert order == ["waited"]
    pace(4)
    assert order == ["waited", "waited", "answered"]
    lines = answers.getvalue().splitlines()
    assert lines[0] == "ready"
    assert json.loads(lines[1])["images"] == 8


class Enough(Exception):
    pass


@pytest.mark.parametrize("arm", ["bare", "plain"])
def test_each_arm_computes(arm):
    def stop(images):
        if images:
            raise Enough

    with pytest.raises(Enough):
        arms.ARMS[arm](SETTINGS, stop)
