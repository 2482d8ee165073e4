import inspect
import json
from types import SimpleNamespace

import huggingface_hub
import pytest
import yaml
from huggingface_hub.utils import filter_repo_objects

from dbsl.base.errors import SettingError
from dbsl.model import load_model
from tests.helpers import run, train_by


@pytest.fixture
def hub(monkeypatch):
    """As much of the hub as an upload takes: `files` are those uploaded, by path."""
    hub = SimpleNamespace(repos=set(), files={}, calls=[], broken=None)

    def answers(name, answer):
        takes = inspect.signature(getattr(huggingface_hub.HfApi, name))

        def call(api, *given, **named):
            takes.bind(api, *given, **named)  # as the library's own would
            hub.calls.append(name)
            if name == hub.broken:
                raise OSError("403 Forbidden")
            return answer(*given, **named)

        monkeypatch.setattr(huggingface_hub.HfApi, name, call)

    def upload(repo_id, folder_path, allow_patterns, commit_message):
        names = [str(path.relative_to(folder_path)) for path in folder_path.rglob("*.*")]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            hub.files[name] = (folder_path / name).read_bytes()
        return SimpleNamespace(commit_url=f"hub/{repo_id}/commit/111")

    answers("whoami", lambda: {"name": "someone", "orgs": [{"name": "us"}]})
    answers("create_repo", lambda repo_id, exist_ok: hub.repos.add(repo_id))
    answers("upload_folder", upload)
    return hub


WANTED = {"train_samples": 64, "eval_samples": 40, "epochs": 1, "mixed_precision": "no"}
WANTED |= {"large_batch_size": (8,), "small_batch_size": (4,), "small_workers": 1}


def push(tmp_path, **settings):
    run(tmp_path / "run", **WANTED | {"push_to_hub": "someone/model"} | settings)


def push_again(hub, tmp_path):
    """Resume a finished run to push it, and see it pushed."""
    train_by("--resume", str(tmp_path / "run"), "--push-to-hub", "someone/model")
    assert hub.files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()


def test_a_finished_run_is_pushed_with_a_card_that_has_its_numbers(hub, tmp_path, capsys):
    push(tmp_path, ema_decay=0.5, checkpoint_every=1)
    folder = tmp_path / "run"
    assert hub.repos == {"someone/model"}
    assert "pushed: hub/someone/model/commit/111" in capsys.readouterr().out
    assert {name for name in hub.files if "/" not in name} == {
        *("README.md", "model.safetensors", "model_ema.safetensors", "config.json"),
        "model_best.safetensors",
        *("config.yaml", "plan.json", "summary.json", "metrics.jsonl"),
    }
    assert "plots/accuracy.png" in hub.files
    assert not any("checkpoints" in name for name in hub.files)
    for name, content in hub.files.items():
        assert content == (folder / name).read_bytes(), name

    card = huggingface_hub.ModelCard.load(folder / "README.md")
    summary = json.loads((folder / "summary.json").read_text())
    (result,) = card.data.eval_results
    assert result.metric_value == summary["final_accuracy"]
    assert result.dataset_name == "digits"
    assert f"| accuracy, last epoch | {100 * summary['final_accuracy']:.2f} % |" in card.text
    assert "| 16 px | 1 x 4, 3 x 8 |" in card.text
    assert card.data.library_name == "timm"
    # The config is for anyone to train with again, and not to push to where this was pushed.
    assert "push_to_hub" not in yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.parametrize(
    ("broken", "name", "why"),
    [
        ("create_repo", "someone/model", r"that can be created, got someone/model \("),
        (None, "google/vit", r".*, got google/vit \(this user writes to someone, us\)"),
    ],
)
def test_a_hub_that_refuses_is_met_before_training(hub, tmp_path, broken, name, why):
    hub.broken = broken
    with pytest.raises(SettingError, match=f"^push_to_hub must be a repository {why}"):
        push(tmp_path, push_to_hub=name)
    assert not (tmp_path / "run").exists()
    assert not hub.repos


def test_a_push_that_fails_leaves_the_run_whole_and_says_how_to_go_on(hub, tmp_path):
    hub.broken = "upload_folder"
    line = r"push_to_hub failed for someone/model .* --resume .*run --push-to-hub some"
    with pytest.raises(ValueError, match=line):
        push(tmp_path)
    assert (tmp_path / "run/summary.json").exists()
    assert load_model(tmp_path / "run") is not None
    hub.broken = None
    push_again(hub, tmp_path)


def test_a_plan_alone_makes_no_repository_and_a_run_without_a_push_is_pushed_later(hub, tmp_path):
    push(tmp_path / "plan", plan_only=True)
    push(tmp_path, push_to_hub=None)
    assert not hub.calls
    push_again(hub, tmp_path)
    assert hub.repos == {"someone/model"}
