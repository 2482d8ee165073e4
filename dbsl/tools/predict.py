"""Evaluate a trained model on labelled data, or classify images with it.

``python -m dbsl.predict runs/x --dataset D``, ``python -m dbsl.predict runs/x photo.jpg folder/``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

from dbsl.base.errors import require, short_loss, words_of
from dbsl.base.files import check_output, write_table
from dbsl.base.machine import lazy_import
from dbsl.checkpoint.resume import check_trained_on
from dbsl.config.parse import POSITIONAL, is_checkpoint, parse_flags, read_settings, yaml_to_argv
from dbsl.data.dataset import Data, Statistics, load_data
from dbsl.data.folders import endings
from dbsl.data.transforms import as_rgb, upright
from dbsl.model import load_model, read_model_config
from dbsl.plan.sampler import evaluation_batches
from dbsl.settings import Settings

timm = lazy_import("timm")

_BATCH = 256  # images


@dataclass(frozen=True)
class _Arguments:
    """Evaluate a model on labelled data, or print the likeliest class of each of some images.

    An image that cannot be read is named in a warning and left out; status 1: none is left.
    """

    # run folder, checkpoint or downloaded model; behind it images to classify, or folders of them
    places: tuple[str, ...] = field(metadata=POSITIONAL)
    dataset: str | None = None  # labelled data to evaluate on; unset: the run's own
    best: bool = False  # use the best evaluation's weights
    ema: bool = False  # use the averaged weights
    json: bool = False  # print JSON, of images a line for each
    csv: Path | None = None  # file to write class and probability of each image to


def main(argv: Sequence[str] | None = None) -> int:
    """Print a model's accuracy, or each image's class; write all classes to a CSV."""
    given = parse_flags(_Arguments, argv, prog="python -m dbsl.predict")
    require(given.places, "run must be given", "none")
    run, *images = map(Path, given.places)
    require(not (given.best and given.ema), "best must not be given with ema", "both")
    text = "dataset must not be given with images"
    require(not images or given.dataset is None, text, given.dataset)
    if given.csv is not None:
        check_output("csv", given.csv)
    about, model = read_model_config(run), load_model(run, best=given.best, ema=given.ema)
    model = model.to(_device(), memory_format=torch.channels_last)
    rows = []
    if images:
        for row in classify(model, about, images):
            text = f"{row['file']}  {row['class']} {100 * row['probability']:.1f} %"
            print(json.dumps(row) if given.json else text, flush=True)
            rows.append(row)
    else:
        data = open_data(run, given.dataset)
        rows, loss = evaluate(model, about, data, run)
        accuracy = sum(row["label"] == row["class"] for row in rows) / len(rows)
        result = {"accuracy": accuracy, "cross_entropy": loss, "samples": len(rows)}
        text = f"accuracy {accuracy:.2%}, cross-entropy {short_loss(loss)}, {len(rows)} images of "
        text += f"{data.config.dataset} ({data.eval_split})"
        print(json.dumps(result) if given.json else text)
    if given.csv is not None and rows:
        write_table(given.csv, rows)
    return int(not rows)


def _device() -> torch.device:
    there = torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if there else torch.device("cpu")


@torch.no_grad()
def classify(
    model: nn.Module, about: Mapping[str, Any], places: Sequence[Path]
) -> Iterator[dict[str, Any]]:
    """Yield the likeliest class of each image, those of folders too, with its probability.

    Images are prepared by timm's evaluation transform, as ``config.json`` says.
    """
    settings = timm.data.resolve_data_config(pretrained_cfg=about["pretrained_cfg"])
    transform = timm.data.create_transform(**settings)
    for place in places:
        found = sorted(path for path in place.rglob("*") if path.suffix.lower() in endings())
        for file in found or [place]:
            shown = os.fsencode(file).decode(errors="replace")  # not every file's name is text
            try:
                with Image.open(file) as image:
                    pixels = transform(as_rgb(upright(image), about.get("bits", 16))).to(_device())
            except Exception as error:  # Pillow raises OSError, SyntaxError and more
                print(f"warning: {shown} cannot be read ({words_of(error)})", file=sys.stderr)
                continue
            probability, label = model(pixels[None]).float().softmax(1)[0].max(0)
            name = about["label_names"][label]
            yield {"file": shown, "class": name, "probability": probability.item()}


def open_data(run: Path, dataset: str | None) -> Data:
    """Return data to evaluate a run's model on; without `dataset` those that the run evaluated on.

    Of a dataset the evaluation split counts. Where there is none, all images count, but of the
    dataset that the run trained on only those that it held out.
    """
    run = run.absolute().parents[1] if is_checkpoint(str(run)) else run
    file = run / "config.yaml"
    settings = read_settings(file) if dataset is None or file.is_file() else {}
    own = str(settings.get("dataset", Settings.dataset))
    same = dataset is None or (file.is_file() and Path(dataset).resolve() == Path(own).resolve())
    known = {field.name for field in fields(Settings)} & settings.keys() if same else {}
    settings = {name: settings[name] for name in known}
    if dataset is not None:
        parts = ("train_samples", "eval_samples", "holdout")
        settings |= {**dict.fromkeys(parts), "dataset": dataset}
    config = parse_flags(Settings, yaml_to_argv(settings))
    data = load_data(config, config.seed, _device(), only_evaluate=not same)
    if same:
        check_trained_on(run, data, config.dataset)
    return data


@torch.no_grad()
def evaluate(
    model: nn.Module, about: Mapping[str, Any], data: Data, run: Path
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each evaluation sample of data, its label and its class, and the loss."""
    names = about["label_names"]
    odd = [name for name in data.class_names if name not in names]
    require(not odd, f"dataset must have classes of {run}, such as {names[0]}", odd)
    found = timm.data.resolve_data_config(pretrained_cfg=about["pretrained_cfg"])
    known = Statistics(tuple(found["mean"]), tuple(found["std"]), f"of {run}")
    data = data.normalised_as(known).resized_as(found["crop_pct"], found["interpolation"])
    source, transform = data.evaluation, data.transform(found["input_size"][-1], "none", 0)
    rows, loss = [], 0.0
    for images, labels in source.batches(evaluation_batches(len(source), _BATCH), transform):
        scores = model(images).float()
        wanted = [names.index(data.class_names[label]) for label in labels.tolist()]
        loss += float(F.cross_entropy(scores, torch.tensor(wanted).to(labels), reduction="sum"))
        columns = (wanted, *(x.tolist() for x in scores.softmax(1).max(1)[::-1]))
        rows += [
            {"label": names[label], "class": names[place], "probability": probability}
            for label, place, probability in zip(*columns, strict=True)
        ]
    return rows, loss / len(rows)
