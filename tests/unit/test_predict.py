import csv
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


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The model of a run on digits, untrained."""
    folder = tmp_path_factory.mktemp("run")
    data = load_data(ImageConfig("digits"))
    save_model(build_model("test_resnet", 10, (16,)), folder, 16, data)
    return folder


@pytest.fixture
def photographs(tmp_path):
    folder = tmp_path / "photographs" / "deeper"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("b.png", "a.png"):
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder.parent


def test_each_image_gets_the_classes_that_the_model_finds_likeliest(
    run_folder, photographs, tmp_path, capsys
):
    flags = [str(run_folder), str(photographs), "--top", "3", "--json"]
    assert predict.main([*flags, "--csv", str(tmp_path / "out.csv")]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["file"].rpartition("/")[2] for row in rows] == ["a.png", "b.png"]
    data = load_data(ImageConfig("digits"))
    pixels = torch.from_numpy(np.asarray(Image.open(photographs / "deeper/a.png")).copy())
    transform = Transform(16, "none", False, data.mean, data.std, 0)
    with torch.no_grad():
        images = transform(pixels.permute(2, 0, 1)[None], np.array([0]), 0)
        scores = load_model(run_folder)(images).softmax(1)[0]
    values, classes = scores.topk(3)
    expected = dict(zip([data.class_names[c] for c in classes], values.tolist(), strict=True))
    assert rows[0]["classes"] == pytest.approx(expected, abs=1e-5)
    with (tmp_path / "out.csv").open(newline="") as file:
        table = [(r["file"], r["class"], float(r["probability"])) for r in csv.DictReader(file)]
    assert table == [(row["file"], name, p) for row in rows for name, p in row["classes"].items()]


def test_what_cannot_be_read_is_named_and_the_other_images_are_classified(
    run_folder, photographs, tmp_path, capsys
):
    (photographs / "bad.png").touch()
    assert predict.main([str(run_folder), str(photographs)]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err.startswith(f"warning: {photographs}/bad.png cannot be read (cannot identify image")
    (tmp_path / "empty").mkdir()
    places = [tmp_path / "nowhere.png", photographs, tmp_path / "empty"]
    assert predict.main([str(run_folder), *map(str, places)]) == 1
    out, err = capsys.readouterr()
    names = [line.partition("  ")[0].rpartition("/")[2] for line in out.splitlines()]
    assert names == ["a.png", "b.png"]
    whys = "it does not exist", "cannot identify image file", "the folder has no image"
    for name, why, line in zip(("nowhere", "bad", "empty"), whys, err.splitlines(), strict=True):
        assert re.search(rf"{name}\S* cannot be read \({why}", line)
    (tmp_path / "all-bad").mkdir()
    (tmp_path / "all-bad/bad.png").touch()
    assert predict.main([str(run_folder), str(tmp_path / "all-bad")]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["{empty}", "{images}"], "folder must hold config.json, got"),
        (["{run}", "{images}", "--top", "11"], "top must be in [1, 10], the classes, got 11"),
        (["{run}", "{images}", "--best"], "folder must hold model_best.safetensors, got"),
        (["{cut}", "{images}"], "folder must hold model.safetensors, got"),
        (["{run}", "{images}", "--best", "--ema"], "best must not be given with ema"),
        *(
            (["{run}", "{images}", "--csv", path], "csv must be a file in a folder that")
            for path in ("{run}/config.json/x.csv", "{empty}", "{pipe}", "/proc/x.csv", "")
        ),
        (["{few}", "{images}"], "folder must hold config.json, got {few} ({few}/config.json must"),
    ],
)
def test_bad_input_is_one_line(run_folder, photographs, tmp_path, flags, message):
    (tmp_path / "empty").mkdir()
    places = {"run": run_folder, "images": photographs, "empty": tmp_path / "empty"}
    os.mkfifo(tmp_path / "pipe")
    places["pipe"] = tmp_path / "pipe"
    places["cut"] = shutil.copytree(run_folder, tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    places["few"] = shutil.copytree(run_folder, tmp_path / "few")
    config = json.loads((tmp_path / "few/config.json").read_text())
    (tmp_path / "few/config.json").write_text(json.dumps(config | {"label_names": ["a"]}))
    with pytest.raises(ValueError, match="^" + re.escape(message.format(**places))):
        predict.main([flag.format(**places) for flag in flags])
