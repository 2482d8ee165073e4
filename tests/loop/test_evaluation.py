"""python -m dbsl.predict RUN: a run's model on labelled data, and never on what it trained on."""

import itertools
import json
import shutil

import pytest
from PIL import Image

from dbsl.tools import predict
from tests.helpers import run, summary_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a part of the training images held out."""
    folder = tmp_path_factory.mktemp("runs") / "first"
    how = {"epochs": 2, "checkpoint_every": 1, "mixed_precision": "no"}
    run(folder, holdout=0.2, train_samples=40, **how)
    return folder


def contents(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def evaluated(capsys, *flags):
    capsys.readouterr()
    predict.main([*map(str, flags), "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_run_or_its_checkpoint_gives_the_runs_result_and_nothing_is_written(
    finished, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    before, summary = contents(finished), summary_of(finished)
    last = finished / "checkpoints/epoch-0002"
    for flags in ([finished], [last], [finished, "--best"]):
        result = evaluated(capsys, *flags)
        name = "best" if "--best" in flags else "final"
        assert result["accuracy"] == summary[f"{name}_accuracy"]
        if name == "final":
            assert result["cross_entropy"] == pytest.approx(summary["final_loss"])
        assert result["samples"] == 20
    assert contents(finished) == before
    assert list(tmp_path.iterdir()) == []
    predict.main([str(finished), "--csv", "out.csv"])
    accuracy = f"{summary['final_accuracy']:.2%}, cross-entropy {summary['final_loss']:.3f}"
    line = f"accuracy {accuracy}, 20 images of digits (0.2 of train, held out)\n"
    assert capsys.readouterr().out == line
    rows = [row.split(",") for row in (tmp_path / "out.csv").read_text().splitlines()]
    assert rows[0] == ["label", "class", "probability"]
    right = [label == found for label, found, _ in rows[1:]]
    assert sum(right) / 20 == summary["final_accuracy"]


def test_images_are_prepared_as_for_the_run(tmp_path, capsys):
    how = {"preprocess": ("crop_pct=0.5", "interpolation=nearest"), "mixed_precision": "no"}
    run(tmp_path, epochs=2, **how)
    summary, loss = summary_of(tmp_path), evaluated(capsys, tmp_path)["cross_entropy"]
    assert loss == pytest.approx(summary["final_loss"])
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"nearest"', '"random"'))
    (tmp_path / "config.yaml").unlink()
    other = evaluated(capsys, tmp_path, "--dataset", "digits")["cross_entropy"]
    assert other != pytest.approx(loss)


def draw(folder, classes, numbers):
    for (label, name), n in itertools.product(enumerate(classes), numbers):
        path = folder / name / f"{n:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (16, 16), 5 * n + 100 * label).save(path)
    return folder


def test_classes_are_matched_by_name_and_all_images_of_other_data_count(tmp_path, capsys):
    images, folder = draw(tmp_path / "images", "abc", range(10)), tmp_path / "run"
    settings = {"train_samples": None, "eval_samples": None, "epochs": 1, "workers": 1}
    run(folder, **settings, dataset=str(images))
    whole = evaluated(capsys, folder)
    assert whole["samples"] == 6  # a fifth
    some = draw(tmp_path / "some", "cb", range(4))
    assert evaluated(capsys, folder, "--dataset", some, "--csv", tmp_path / "x.csv")["samples"] == 8
    labels = [line.split(",")[0] for line in (tmp_path / "x.csv").read_text().splitlines()[1:]]
    assert labels == [*"bbbbcccc"]
    other = draw(tmp_path / "other", "bd", range(4))
    with pytest.raises(ValueError, match=r"^dataset must have classes of .*, such as a, got d$"):
        predict.main([str(folder), "--dataset", str(other)])


def test_images_that_were_trained_on_are_never_evaluated_as_held_out(tmp_path, capsys):
    images, folder = draw(tmp_path / "images", "ab", range(20)), tmp_path / "run"
    settings = {"train_samples": None, "eval_samples": None, "epochs": 1, "workers": 2}
    run(folder, **settings, dataset=str(images), large_batch_size=(4,), checkpoint_every=1)
    kept = shutil.copytree(folder, tmp_path / "kept", ignore=shutil.ignore_patterns("checkpoints"))
    for path in (folder, folder / "checkpoints/epoch-0001", kept):
        assert evaluated(capsys, path)["samples"] == 8
        assert evaluated(capsys, path, "--dataset", images)["samples"] == 8
    refused = r"^dataset, seed and holdout must be those that drew the run's evaluation images, "
    for text in ("seed: 1", "holdout: 0.5"):
        config = (folder / "config.yaml").read_text()
        left = [x for x in config.splitlines() if not x.startswith(text.partition(":")[0])]
        for path in (folder, kept):
            (path / "config.yaml").write_text("\n".join([text, *left]))
            with pytest.raises(ValueError, match=refused):
                predict.main([str(path)])
            (path / "config.yaml").write_text(config)
    part = tmp_path / "part"  # held out by another share than the dataset's own
    run(part, **settings, dataset=str(images), large_batch_size=(4,), holdout=0.5)
    assert evaluated(capsys, part)["samples"] == 20
    with pytest.raises(ValueError, match=refused):
        predict.main([str(part), "--dataset", str(images)])
    draw(images, "ab", range(20, 25))
    with pytest.raises(ValueError, match=refused):
        predict.main([str(folder)])
