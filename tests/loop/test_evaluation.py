"""train.py --eval-only: one line, nothing trained, nothing written."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from torch.utils.data import TensorDataset

from dbsl.checkpoint.disk import read_manifest, write_manifest
from dbsl.data.sources import TensorData
from dbsl.open import open_session
from tests.helpers import TINY, run, start_ranks, summary_of, wait_all
from train import Config, evaluate, loss_function, main, train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a part of the training images held out."""
    folder = tmp_path_factory.mktemp("runs") / "checkpoints/first"  # a run of that folder, too
    run(folder, holdout=0.2, train_samples=40, epochs=2, checkpoint_every=1)
    summary = summary_of(folder)
    accuracy, loss = 100 * summary["final_accuracy"], summary["final_loss"]
    top5 = 100 * summary["final_top5_accuracy"]
    line = f"accuracy {accuracy:.2f} %, top-5 {top5:.2f} %, loss {loss:.3f}, 20 images"
    return SimpleNamespace(folder=folder, line=line)


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def evaluated(capsys, **settings):
    AcceleratorState._reset_state(True)
    main(Config(**{**TINY, **settings, "eval_only": True}))
    return capsys.readouterr().out


def test_the_weights_of_a_run_or_a_folder_give_the_runs_result_and_nothing_is_written(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before = contents(finished.folder)
    same = {"holdout": 0.2, "train_samples": 40}
    by_name = evaluated(capsys, model=f"local-dir:{finished.folder}", resolutions=None, **same)
    assert by_name == f"{finished.line} (0.2 of train, held out) at 16 px\n"
    last = finished.folder / "checkpoints/epoch-0002"
    for resume in (finished.folder, last):
        assert evaluated(capsys, resume=str(resume), **same) == by_name
    monkeypatch.chdir(last.parent)
    assert evaluated(capsys, resume=last.name, **same) == by_name
    assert contents(finished.folder) == before
    assert list(tmp_path.iterdir()) == []


def test_weights_want_images_as_they_were_trained_with(tmp_path, capsys):
    run(tmp_path, crop_pct=0.5, interpolation="nearest", epochs=2)
    weights = f"local-dir:{tmp_path}"
    loss = summary_of(tmp_path)["final_loss"]
    capsys.readouterr()
    assert f"loss {loss:.3f}" in evaluated(capsys, model=weights, resolutions=None)
    assert f"loss {loss:.3f}" not in evaluated(capsys, model=weights, crop_pct=1.0)
    text = (tmp_path / "config.json").read_text()
    assert '"crop_pct": 0.5' in text
    assert '"interpolation": "nearest"' in text
    text = text.replace('crop_pct": 0.5', 'crop_pct": 1.15').replace('"nearest"', '"random"')
    (tmp_path / "config.json").write_text(text)
    odd = evaluated(capsys, model=weights)  # the whole image, resized as by default
    assert odd == evaluated(capsys, model=weights, crop_pct=1.0, interpolation="bilinear")


def test_a_stopped_run_has_the_weights_of_its_last_whole_epoch(finished, tmp_path, capsys):
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    for name in ("model.safetensors", "summary.json"):
        (folder / name).unlink()
    last = folder / "checkpoints/epoch-0002"
    stopped = last.rename(folder / "checkpoints/save-000002")  # as if it were inside an epoch
    manifest = read_manifest(stopped)
    for name in ("model.safetensors", "config.json"):
        (stopped / name).unlink()
        del manifest.files[name]
    write_manifest(stopped, manifest)
    of_first = evaluated(capsys, resume=str(finished.folder / "checkpoints/epoch-0001"))
    assert evaluated(capsys, resume=str(folder)) == of_first
    damaged = folder / "checkpoints/epoch-0001"
    content = (damaged / "model.safetensors").read_bytes()
    (damaged / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=r"model.safetensors"):
        evaluated(capsys, resume=str(damaged))
    shutil.rmtree(damaged)
    for resume in (folder, stopped):
        with pytest.raises(ValueError, match=r"a checkpoint of an epoch.s end.* eval_only, got"):
            evaluated(capsys, resume=str(resume))


def test_several_processes_share_the_images_and_print_one_line(finished, capfd):
    flags = ["--eval-only", "--resume", str(finished.folder)]
    processes = start_ranks(flags, 3)
    assert wait_all(processes) == [0] * 3, [process.stderr for process in processes]
    assert processes[0].stdout.startswith(finished.line)
    assert [process.stdout for process in processes[1:]] == ["", ""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"model must have weights with eval_only .* got test_resnet"),
        ({"plan_only": True}, "plan_only must be false with eval_only, got true"),
        ({"output_dir": "runs/x"}, "output_dir must be left out with eval_only, got runs/x"),
        ({"resume": "", "model": "local-dir:x"}, "model must be left out with resume and eval_on"),
    ],
)
def test_an_evaluation_that_makes_no_sense_is_refused(finished, settings, message, capsys):
    if "resume" in settings:
        settings = {**settings, "resume": str(finished.folder)}
    with pytest.raises(ValueError, match=message):
        evaluated(capsys, **settings)


def test_data_of_other_classes_than_the_weights_are_refused(finished, tmp_path, capsys):
    path = tmp_path / "model"
    path.mkdir()
    config = json.loads((finished.folder / "config.json").read_text())
    config["num_classes"] = config["model_args"]["num_classes"] = 3
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(finished.folder / "model.safetensors")
    weights |= {name: weights[name][:3] for name in ("fc.weight", "fc.bias")}
    save_file(weights, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"dataset must have the 3 classes of local-dir:.* got 10"):
        evaluated(capsys, model=f"local-dir:{path}")


@pytest.mark.parametrize("renamed", [True, False])
def test_other_names_of_classes_are_told_and_another_order_refused(
    finished, tmp_path, capsys, renamed
):
    path = shutil.copytree(finished.folder, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    names = config["label_names"]
    assert names == list("0123456789")
    config["label_names"] = [*names[:8], "eight", "nine"] if renamed else names[::-1]
    (path / "config.json").write_text(json.dumps(config))
    given = {"model": f"local-dir:{path}", "holdout": 0.2, "train_samples": 40}
    if renamed:
        warning, result = evaluated(capsys, **given).splitlines()
        assert warning.startswith("warning: 2 of 10 classes have other names in the data than in")
        assert "such as '8' for 'eight'" in warning
        assert result.startswith(finished.line)
    else:
        with pytest.raises(ValueError, match=r"order with eval_only, got '0' as class 0, .* '9' t"):
            evaluated(capsys, **given)


def test_a_model_and_data_of_ones_own_are_evaluated_with_the_weights_of_their_run(tmp_path):
    torch.manual_seed(0)
    sets = [TensorDataset(torch.randn(n, 4), torch.arange(n) % 2) for n in (30, 10)]
    own = {"data": TensorData(*sets, num_classes=2), "model": lambda: torch.nn.Linear(4, 2)}
    settings = {"epochs": 1, "slope": (0.001,), "intercept": (0.01,), "report_to": "none"}
    folder = str(tmp_path / "run")
    config = Config(output_dir=folder, cpu_threads=1, **settings)
    with open_session(config, loss_function, **own) as session:
        train(session)
    found = summary_of(tmp_path / "run")
    AcceleratorState._reset_state(True)
    config = Config(resume=folder, eval_only=True, **settings)
    with open_session(config, loss_function, **own) as session:
        result = evaluate(session)
    assert (result.accuracy, result.samples) == (found["final_accuracy"], 10)
    assert result.loss == pytest.approx(found["final_loss"])
