"""`python -m dbsl.report RUN --push-to-hub`: timm's own function, and one line where it fails."""

import inspect
from types import SimpleNamespace

import pytest
import timm
import torch

from dbsl.model import load_model
from dbsl.tools.report import main
from tests.helpers import run


def test_the_model_of_a_finished_run_is_pushed_or_one_line_says_why_not(
    tmp_path, monkeypatch, capsys
):
    run(tmp_path, epochs=1, workers=1, local_batch_sizes=(8,))
    takes, pushed = inspect.signature(timm.models.push_to_hf_hub), []

    def push(*given, **named):
        pushed.append(takes.bind(*given, **named).arguments)
        return SimpleNamespace(commit_url="hub/someone/model/commit/111")

    monkeypatch.setattr(timm.models, "push_to_hf_hub", push)
    main([str(tmp_path), "--push-to-hub", "someone/model"])
    (call,) = pushed
    assert call["repo_id"] == "someone/model"
    own, kept = call["model"].state_dict(), load_model(tmp_path).state_dict()
    assert all(torch.equal(own[name], kept[name]) for name in kept)
    assert "pushed: hub/someone/model/commit/111\n" in capsys.readouterr().out

    def refuse(*_, **__):
        raise OSError("403 Forbidden")

    monkeypatch.setattr(timm.models, "push_to_hf_hub", refuse)
    must = r"^push_to_hub must be a repository that can be written, got a/b \(403 Forbidden\)$"
    with pytest.raises(ValueError, match=must):
        main([str(tmp_path), "--push-to-hub", "a/b"])
