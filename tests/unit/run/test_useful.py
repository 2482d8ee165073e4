import json

import pytest
import yaml

import train
from dbsl.run.evidence import find_evidence
from dbsl.run.parse import parse_config
from dbsl.run.resolved import with_resolved
from tests import helpers
from tests.helpers import TINY, slow

SETTINGS = TINY | {
    "train_samples": 240,
    "eval_samples": 40,
    "epochs": 4,
    "intercept": (0.0001,),
    "lr": 0.01,
    "dropout": (0.1,),
    "mixed_precision": "no",
    "checkpoint_every": 0,
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(folder, **changes):
    helpers.run(folder, **(SETTINGS | changes))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return (folder / "model.safetensors").read_bytes(), records


MODES = {
    "dual batch": {
        "rounds_per_epoch": 2,
        "small_workers": 2,
        "small_batch_size": (4,),
        "large_batch_size": (16,),
    },
    "asp": {
        "sync": "asp",
        "rounds_per_epoch": 2,
        "small_workers": 2,
        "small_batch_size": (4,),
        "large_batch_size": (16,),
    },
    "equal batches": {"local_batch_sizes": (4, 4, 4, 4)},
    "one worker": {"workers": 1, "local_batch_sizes": (8,)},
    "step": {"sync": "step", "local_batch_sizes": (4, 8, 8, 12), "epochs": 20},
    "push": {"push": "gradients", "local_batch_sizes": (8, 8, 8, 8)},
}


SHORT = ("dual batch", "asp")


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[slow] * (mode not in SHORT)) for mode in MODES]
)
def test_noise_is_measured_and_changes_no_bit(mode, tmp_path):
    with_noise, records = run(tmp_path / "with", **MODES[mode])
    without, silent = run(tmp_path / "without", noise_scale=False, **MODES[mode])
    assert with_noise == without
    noise = [row for row in records if row["event"] == "noise"]
    assert noise, "no estimate in the whole run"
    assert {"epoch", "resolution", "b_simple", "low", "high", "pairs"} <= noise[-1].keys()
    summary = json.loads((tmp_path / "with/summary.json").read_text())
    found = [summary[name] for name in ("noise_scale", "noise_scale_low", "noise_scale_high")]
    assert found == [noise[-1][name] for name in ("b_simple", "low", "high")]
    assert not [row for row in silent if row["event"] == "noise"]
    assert "noise_scale" not in json.loads((tmp_path / "without/summary.json").read_text())
    measured = [row for row in records if row["event"] == "round" and "gradient_batch" in row]
    sizes = {row["gradient_batch"] for row in measured}
    micro = {row.get("micro_batch") for row in measured}
    if mode in ("dual batch", "equal batches", "push"):  # all at the same weights
        assert max(sizes) == {"dual batch": 36, "equal batches": 16, "push": 30}[mode]
        assert noise[-1]["pairs"] == {"dual batch": 8, "equal batches": 4, "push": 32}[mode]
    else:
        found = {"step": (30, {3}), "one worker": (8, {2}), "asp": (15, {2, 4})}
        assert (max(sizes), micro) == found[mode]


def write_study(folder, workload, useful):
    folder.mkdir(parents=True)
    report = {workload: {"useful_batch_size": useful}}
    (folder / "report.json").write_text(json.dumps(report))


def write_run(folder, scale, model="test_resnet"):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"noise_scale": scale}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"dataset": "digits", "model": model}))


def evidence(**changes):
    settings = SETTINGS | {"large_batch_size": "auto"} | changes
    return find_evidence(train.Config(**settings))


def test_auto_is_bounded_by_a_studys_useful_maximum(tmp_path):
    write_study(tmp_path / "study", "digits/test_resnet/nesterov", 12)
    given = {"large_batch_size": "auto", "memory_limit": 64.0}
    _, records = run(tmp_path / "run", batch_evidence=str(tmp_path / "study"), epochs=1, **given)
    (plan, *_) = [row for row in records if row["event"] == "plan"]
    assert {worker["local_batch_size"] for worker in plan["workers"]} == {12}
    again = parse_config(train.Config, ["--config", str(tmp_path / "run/config.yaml")])
    assert (again.large_batch_size, again.batch_evidence) == ("auto", str(tmp_path / "study"))
    assert again.resolved["large_batch_size"] == (12,)
    assert with_resolved(again).large_batch_size == (12,)  # and no evidence is asked for
    assert with_resolved(again).batch_evidence is None


def test_auto_of_joint_steps_shares_the_useful_batch(tmp_path):
    write_study(tmp_path / "study", "digits/test_resnet/nesterov", 14)
    given = {"large_batch_size": "auto", "memory_limit": 64.0}
    where = {"batch_evidence": str(tmp_path / "study")}
    _, records = run(tmp_path / "run", sync="step", workers=4, epochs=1, **where, **given)
    (plan, *_) = [row for row in records if row["event"] == "plan"]
    assert [worker["local_batch_size"] for worker in plan["workers"]] == [4] * 4


def test_evidence_is_that_of_the_same_data_model_and_optimizer(tmp_path):
    write_run(tmp_path / "run", 70.4)
    found = evidence(batch_evidence="run")
    assert found == (70, "the gradient noise scale of run/summary.json")
    write_run(tmp_path / "other", 5.0, model="resnet18")
    write_run(tmp_path / "unknown", None)
    write_study(tmp_path / "sgd", "digits/test_resnet/sgd", 16)
    for folder in ("other", "unknown", "sgd", "nowhere"):
        with pytest.raises(ValueError, match=f"digits/test_resnet/nesterov, or of .*got {folder}"):
            evidence(batch_evidence=folder)
    assert evidence(batch_evidence="sgd", momentum=0.0)[0] == 16


def test_a_study_of_a_local_copy_is_evidence_for_the_hubs_data(tmp_path):
    write_study(tmp_path / "study", "digits/test_resnet/nesterov", 24)
    batch, _ = evidence(dataset="someone/digits", batch_evidence=str(tmp_path / "study"))
    assert batch == 24
    with pytest.raises(ValueError, match="folder of a study of someone--other/test_resnet"):
        evidence(dataset="someone/other", batch_evidence=str(tmp_path / "study"))


def test_missing_evidence_is_said_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("dbsl.run.measured.Profiler", None)
    with pytest.raises(ValueError, match="batch_evidence must be the folder of a study"):
        run(tmp_path / "run", large_batch_size="auto", batch_evidence="nowhere")
    assert not (tmp_path / "run").exists()


def test_bounds_that_bound_nothing_are_refused():
    with pytest.raises(ValueError, match="batch_evidence must go with large_batch_size auto, got"):
        train.Config(batch_evidence="x")
