import base64
import hashlib
import http.server
import json

import huggingface_hub
import pytest
import yaml
from accelerate.state import AcceleratorState
from huggingface_hub import constants

import train
from dbsl.base.errors import SettingError
from dbsl.config.parse import parse_config
from dbsl.model import load_model
from tests.helpers import run, serving

# huggingface_hub 2.4 with httpx2 2.16
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


class FakeHub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as an upload takes; files end up in `server.files`."""

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        server.calls.append(self.path)
        if self.headers.get("Authorization") != "Bearer secret" or server.broken in self.path:
            return self.answer({"error": "no"}, status=403)
        if self.path == "/api/repos/create":
            server.repos.add(json.loads(body)["name"])
            return self.answer({"url": f"{server.url}/someone/model"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            kinds = {True: "lfs", False: "regular"}
            modes = {name: kinds[name.endswith(".safetensors")] for name in names}
            usual = {"shouldIgnore": False}
            files = [{"path": n, "uploadMode": mode} | usual for n, mode in modes.items()]
            return self.answer({"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                one | {"actions": {"upload": {"href": f"{server.url}/store/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        assert "/commit/main" in self.path, self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                server.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                server.files[value["path"]] = server.store[value["oid"]]
        return self.answer(
            {"commitUrl": f"{server.url}/someone/model/commit/{'1' * 40}", "commitOid": "1" * 40}
        )

    def do_PUT(self):
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.store[hashlib.sha256(content).hexdigest()] = content
        self.answer({})

    def do_GET(self):
        if self.headers.get("Authorization") != "Bearer secret":
            return self.answer({"error": "no"}, status=401)
        if self.path == "/api/whoami-v2":
            return self.answer({"name": "someone", "orgs": [{"name": "us"}]})
        return self.answer({"sha": "0" * 40, "id": "someone/model", "siblings": []})

    def answer(self, value, status=200):
        text = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    with serving(FakeHub) as server:
        server.repos, server.files, server.store, server.calls = set(), {}, {}, []
        server.broken = "nothing"
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "secret")
        yield server


WANTED = {"train_samples": 64, "eval_samples": 40, "epochs": 1, "mixed_precision": "no"}
WANTED |= {"large_batch_size": (8,), "small_batch_size": (4,), "small_workers": 1}


def push(tmp_path, **settings):
    run(tmp_path / "run", **WANTED | {"push_to_hub": "someone/model"} | settings)


def push_again(hub, tmp_path):
    """Resume a finished run to push it, and see it pushed."""
    AcceleratorState._reset_state(True)
    again = ["--resume", str(tmp_path / "run"), "--push-to-hub", "someone/model"]
    train.main(parse_config(train.Config, again))
    assert hub.files["model.safetensors"] == (tmp_path / "run/model.safetensors").read_bytes()


def test_a_finished_run_is_pushed_with_a_card_that_has_its_numbers(hub, tmp_path, capsys):
    push(tmp_path, ema_decay=0.5, checkpoint_every=1)
    folder = tmp_path / "run"
    assert hub.repos == {"model"}
    assert f"pushed: {hub.url}/someone/model/commit/111" in capsys.readouterr().out
    pushed = {name: content for name, content in hub.files.items() if "/" not in name}
    assert set(pushed) == {
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
    ("token", "name", "why"),
    [
        ("wrong", "someone/model", r"that can be made, got someone/model \("),
        ("secret", "google/vit", r".*, got google/vit \(this user writes to someone, us\)"),
    ],
)
def test_a_hub_that_refuses_is_met_before_training(hub, tmp_path, monkeypatch, token, name, why):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(SettingError, match=f"^push_to_hub must be a repository {why}"):
        push(tmp_path, push_to_hub=name)
    assert not (tmp_path / "run").exists()
    assert not hub.repos


def test_a_push_that_fails_leaves_the_run_whole_and_says_how_to_go_on(hub, tmp_path):
    hub.broken = "/commit/"
    line = r"push_to_hub failed for someone/model .* --resume .*run --push-to-hub some"
    with pytest.raises(ValueError, match=line):
        push(tmp_path)
    assert (tmp_path / "run/summary.json").exists()
    assert load_model(tmp_path / "run") is not None
    hub.broken = "nothing"
    push_again(hub, tmp_path)


def test_a_run_that_finished_without_a_push_is_pushed_to_a_new_repository(hub, tmp_path):
    push(tmp_path, push_to_hub=None)
    assert not hub.calls
    push_again(hub, tmp_path)
    assert hub.repos == {"model"}


def test_a_plan_alone_makes_no_repository(hub, tmp_path):
    push(tmp_path, plan_only=True)
    assert not hub.calls
