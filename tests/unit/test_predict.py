"""`python -m dbsl.predict RUN`: what it refuses. What it finds: tests/loop/test_evaluation.py."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.data.transforms import Transform
from dbsl.model import build_model, load_model, save_model
from dbsl.tools import predict
from tests.helpers import ROOT


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The model of a run on digits, untrained."""
    folder = tmp_path_factory.mktemp("run")
    data = load_data(ImageConfig("digits"))
    save_model(build_model("test_resnet", 10, (16,)), folder, 16, data)
    return folder


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "run must be one folder, got empty"),
        (["{run}", "photo.jpg"], "run must be one folder, got {run},photo.jpg"),
        (["{empty}"], "folder must hold config.json, got"),
        (["{run}", "--best"], "folder must hold model_best.safetensors, got"),
        (["{cut}"], "folder must hold model.safetensors, got"),
        (["{run}", "--best", "--ema"], "best must not be given with ema"),
        *(
            (["{run}", "--csv", path], "csv must be a file in a folder that")
            for path in ("{run}/config.json/x.csv", "{empty}", "{pipe}", "/proc/x.csv", "")
        ),
        (["{few}"], "folder must hold config.json, got {few} ({few}/config.json must"),
        (["{run}"], "config must be a readable YAML file, got {run}/config.yaml"),
    ],
)
def test_bad_input_is_one_line(run_folder, tmp_path, flags, message):
    (tmp_path / "empty").mkdir()
    places = {"run": run_folder, "empty": tmp_path / "empty", "pipe": tmp_path / "pipe"}
    os.mkfifo(tmp_path / "pipe")
    places["cut"] = shutil.copytree(run_folder, tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    places["few"] = shutil.copytree(run_folder, tmp_path / "few")
    config = json.loads((tmp_path / "few/config.json").read_text())
    (tmp_path / "few/config.json").write_text(json.dumps(config | {"label_names": ["a"]}))
    with pytest.raises(ValueError, match="^" + re.escape(message.format(**places))):
        predict.main([flag.format(**places) for flag in flags])


def test_the_lines_of_the_page_prepare_images_as_training_does(
    run_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/x").symlink_to(run_folder)
    (tmp_path / "photos").mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photos/a.jpg")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/train.md").read_text(), re.S)
    (block,) = (text for text in blocks if "load_model" in text)
    exec(block, {})
    file, name, probability = capsys.readouterr().out.strip().split(",")
    data, pixels = load_data(ImageConfig("digits")), np.asarray(Image.open("photos/a.jpg")).copy()
    transform = Transform(16, "none", False, data.mean, data.std, 0)
    images = transform(torch.from_numpy(pixels)[None], np.array([0]), 0)
    best = load_model(run_folder)(images).softmax(1)[0].max(0)
    assert (file, name) == ("a.jpg", data.class_names[best.indices])
    assert float(probability) == pytest.approx(best.values.item(), abs=1e-5)
