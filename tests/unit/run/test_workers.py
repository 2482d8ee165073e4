"""What workers can do is asked for only where a plan can be had."""

from types import SimpleNamespace

import pytest
import torch

from dbsl.config.settings import RunConfig
from dbsl.run.times import Measurements, largest_auto_batch, profile_workers
from tests.helpers import run

CPU, GPU = (SimpleNamespace(num_processes=1, device=torch.device(d)) for d in ("cpu", "cuda"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "large_batch_size must come to at most 200, the training images of a round, got 4096"),
        ({"workers": 4, "small_workers": 1, "rounds_per_epoch": 2}, "at most 100, the training im"),
        (
            {"workers": 2, "sync": "step"},
            "must come to at most 200, the training images of a joint step, got 8192",
        ),
        (
            {"workers": 2, "worker_processes": (2, 70), "large_batch_size": None},
            "large_batch_size must be at least 140 for a worker of 70 processes, got 16",
        ),
        (
            {"workers": 1, "worker_processes": (8,), "large_batch_size": None}
            | {"local_batch_sizes": (15,)},
            "local_batch_sizes must be at least 16 for a worker of 8 processes, got 15",
        ),
    ],
)
def test_a_batch_that_cannot_be_is_refused_before_anything_is_measured(settings, message):
    settings = {"workers": 1, "small_workers": 0, "resolutions": (16,)} | settings
    config = RunConfig(**{"large_batch_size": (4096,)} | settings)
    data = SimpleNamespace(train=range(200), unit="image")
    with pytest.raises(ValueError, match=message):  # without a model nothing can be measured
        profile_workers(config, None, data, CPU, None, None, least=2)


def test_a_joint_batch_is_held_to_memory_and_not_to_the_steps_that_a_round_should_have(monkeypatch):
    asked = []

    def found(_, most):
        asked.extend(most)
        return [[min(100, *most)] * 2]

    monkeypatch.setattr(Measurements, "__init__", lambda *_: None)
    monkeypatch.setattr(Measurements, "largest_batches", found)
    monkeypatch.setattr("dbsl.run.times.make_profiler", lambda *_: None)
    given = {"resolutions": (16,), "workers": 2, "small_workers": 0, "sync": "step"}
    given |= {"large_batch_size": "auto", "slope": (0.001,), "intercept": (0.01,)}
    data, most = SimpleNamespace(train=range(400), unit="image"), largest_auto_batch(200)
    for more, at_most in (
        ({"global_batch_size": 60}, 400),
        ({}, most),
        ({"sync": "bsp"}, most),
        # Of a worker that may be lost the others get its part, too.
        ({"sync": "asp", "push": "gradients"}, 400),
        ({"large_batch_size": None, "micro_batch_size": "auto"}, 32),
    ):
        config = RunConfig(**given | more)
        known, config = profile_workers(config, None, data, GPU, None, None)
        assert asked.pop() == at_most
        if more.get("micro_batch_size"):
            assert (known.micro_batch_sizes, config.micro_batch_size) == ({16: [32, 32]}, (32,))
        else:
            assert known.limits == {16: [min(100, at_most)] * 2}
            assert known.large_batch_sizes == {16: [most] * 2}
    assert not asked


def test_a_resolution_without_an_epoch_is_told_and_measured_for_a_later_resume(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("dbsl.run.times.profile_workers", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", resolutions=(8, 16), epochs=1, slope=None, intercept=None)
    told = "no epoch is at 8 px: every learning-rate stage is shorter than 2 epochs"
    assert f"warning: {told}" in capsys.readouterr().out
