"""The arms of benchmarks/speed compute, and are timed, on the device that train.py would have."""

import io
import json
from types import SimpleNamespace

import pytest
import torch

from experiments.benchmarks.speed import arms, steps
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


@pytest.mark.parametrize("arm", ["bare", "forward", "evaluation"])
def test_data_and_model_of_an_arm_are_on_the_device(monkeypatch, arm):
    device, found = torch.device("meta"), {}
    monkeypatch.setattr(arms, "start_accelerator", lambda *_, **__: SimpleNamespace(device=device))

    class Enough(Exception):
        pass

    def load(config, *, device="cpu"):
        found["data"] = device
        return SimpleNamespace(num_classes=10, mirror=False, mean=(0.0,) * 3, std=(1.0,) * 3)

    def stop(images):
        raise Enough

    model = arms._model

    def watched(*given):
        built = model(*given)
        found["model"] = {p.device for p in built.parameters()}
        return built

    monkeypatch.setattr(arms, "load_data", load)
    monkeypatch.setattr(arms, "_model", watched)
    monkeypatch.setattr(arms, "_batch", lambda *_: (None, None))
    with pytest.raises(Enough):
        arms.ARMS[arm](SETTINGS, stop)
    assert found == {"data": device, "model": {device}}


@pytest.mark.parametrize("arm", ["bare", "plain", "forward", "evaluation"])
def test_each_arm_computes(monkeypatch, arm):
    done = []

    class Enough(Exception):
        pass

    def stop(images):
        done.append(images)
        if sum(done):
            raise Enough

    with pytest.raises(Enough):
        arms.ARMS[arm](SETTINGS, stop)
    assert done[-1] > 0


@pytest.mark.parametrize(("cuda", "device"), [(True, "cuda"), (False, "cpu")])
def test_timms_script_gets_the_device_that_there_is(monkeypatch, cuda, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    flags = steps.timm_flags(SETTINGS, "out")
    assert flags[flags.index("--device") + 1] == device
