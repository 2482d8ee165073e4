"""A finished run's model is pushed by timm's own function; a failure is a line, and no more."""

import inspect
from types import SimpleNamespace

import timm
import torch

from dbsl.model import load_model
from tests.helpers import run

SMALL = {"epochs": 1, "workers": 1, "local_batch_sizes": (8,), "push_to_hub": "someone/model"}


def test_the_model_of_a_finished_run_is_pushed(tmp_path, monkeypatch, capsys):
    takes, pushed = inspect.signature(timm.models.push_to_hf_hub), []

    def push(*given, **named):
        pushed.append(takes.bind(*given, **named).arguments)
        return SimpleNamespace(commit_url="hub/someone/model/commit/111")

    monkeypatch.setattr(timm.models, "push_to_hf_hub", push)
    run(tmp_path / "run", **SMALL)
    (call,) = pushed
    assert call["repo_id"] == "someone/model"
    own, kept = call["model"].state_dict(), load_model(tmp_path / "run").state_dict()
    assert all(torch.equal(own[name], kept[name]) for name in kept)
    assert "pushed: hub/someone/model/commit/111\n" in capsys.readouterr().out
    run(tmp_path / "plan", **SMALL | {"plan_only": True})
    assert len(pushed) == 1


def test_a_push_that_fails_leaves_the_run_whole_and_says_how_to_push_later(
    tmp_path, monkeypatch, capsys
):
    def refuse(*_, **__):
        raise OSError("403 Forbidden")

    monkeypatch.setattr(timm.models, "push_to_hf_hub", refuse)
    run(tmp_path / "run", **SMALL)
    said = capsys.readouterr().out
    assert "warning: push_to_hub failed (403 Forbidden); later: from dbsl.model import" in said
    assert (tmp_path / "run/summary.json").exists()
