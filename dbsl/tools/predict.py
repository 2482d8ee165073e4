"""Evaluate a trained model on labelled images: ``python -m dbsl.predict runs/x --dataset D``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import nn

from dbsl.base.errors import require, short_loss
from dbsl.base.files import check_output, write_table
from dbsl.base.machine import lazy_import
from dbsl.checkpoint.resume import check_trained_on
from dbsl.config.image_settings import Interpolation
from dbsl.config.parse import POSITIONAL, is_checkpoint, parse_flags, read_settings, yaml_to_argv
from dbsl.data.dataset import Data, Statistics, load_data
from dbsl.model import load_model, read_model_config
from dbsl.plan.sampler import evaluation_batches
from dbsl.settings import Settings

timm = lazy_import("timm")

_BATCH = 256  # images


@dataclass(frozen=True)
class _Arguments:
    """Evaluate a trained model on labelled images, and predict their classes."""

    run: tuple[str, ...] = field(metadata=POSITIONAL)  # run folder, checkpoint or downloaded model
    dataset: str | None = None  # images to evaluate on; unset: those that the run evaluated on
    best: bool = False  # use the best evaluation's weights
    ema: bool = False  # use the averaged weights
    json: bool = False  # print JSON
    csv: Path | None = None  # file to write label, class and probability of each image to


def main(argv: Sequence[str] | None = None) -> None:
    """Print a model's accuracy; write the class of each image to a CSV."""
    given = parse_flags(_Arguments, argv, prog="python -m dbsl.predict")
    require(len(given.run) == 1, "run must be one folder", given.run)
    require(not (given.best and given.ema), "best must not be given with ema", "both")
    if given.csv is not None:
        check_output("csv", given.csv)
    run = Path(*given.run)
    about, model = read_model_config(run), load_model(run, best=given.best, ema=given.ema)
    data = open_data(run, given.dataset)
    rows, loss = evaluate(model, about, data, run)
    accuracy = sum(row["label"] == row["class"] for row in rows) / len(rows)
    result = {"accuracy": accuracy, "cross_entropy": loss, "samples": len(rows)}
    text = f"accuracy {accuracy:.2%}, cross-entropy {short_loss(loss)}, {len(rows)} images of "
    text += f"{data.config.dataset} ({data.eval_split})"
    print(json.dumps(result) if given.json else text)
    if given.csv is not None:
        write_table(given.csv, rows)


def open_data(run: Path, dataset: str | None) -> Data:
    """Return data to evaluate a run's model on; without `dataset`, the run's evaluation data.

    The dataset's evaluation split is used. Without one, all images are used, or only the held-out
    ones if the run trained on that dataset.
    """
    run = run.absolute().parents[1] if is_checkpoint(str(run)) else run
    file = run / "config.yaml"
    settings = read_settings(file) if dataset is None or file.is_file() else {}
    own = str(settings.get("dataset", Settings.dataset))
    same = dataset is None or (file.is_file() and Path(dataset).resolve() == Path(own).resolve())
    known = {one.name for one in fields(Settings)} & settings.keys() if same else {}
    settings = {name: settings[name] for name in known}
    if dataset is not None:
        settings |= dict.fromkeys(("train_samples", "eval_samples", "holdout"))
        settings["dataset"] = dataset
    config = parse_flags(Settings, yaml_to_argv(settings))
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    data = load_data(config, config.seed, device, only_evaluate=not same)
    if same:
        check_trained_on(run, data, config.dataset)
    return data


@torch.no_grad()
def evaluate(
    model: nn.Module, about: Mapping[str, Any], data: Data, run: Path
) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each evaluation sample, with its label and class, and the loss."""
    names = about["label_names"]
    odd = [name for name in data.class_names if name not in names]
    require(not odd, f"dataset must have classes of {run}, such as {names[0]}", odd)
    found = timm.data.resolve_data_config(pretrained_cfg=about["pretrained_cfg"])
    known = Statistics(tuple(found["mean"]), tuple(found["std"]), f"of {run}")
    how = {"crop_pct": min(found["crop_pct"], 1.0)}  # above 1: the whole image
    if found["interpolation"] in get_args(Interpolation):
        how["interpolation"] = found["interpolation"]
    data = data.prepared_as(known, **how)
    source, transform = data.evaluation, data.transform(found["input_size"][-1], "none", 0)
    model = model.to(source.device, memory_format=torch.channels_last)
    rows, loss = [], 0.0
    for images, labels in source.batches(evaluation_batches(len(source), _BATCH), transform):
        scores = model(images).float()
        wanted = [names.index(data.class_names[label]) for label in labels.tolist()]
        loss += float(F.cross_entropy(scores, torch.tensor(wanted).to(labels), reduction="sum"))
        columns = (wanted, *(column.tolist() for column in scores.softmax(1).max(1)))
        for label, probability, place in zip(*columns, strict=True):
            rows.append({"label": names[label], "class": names[place], "probability": probability})
    return rows, loss / len(rows)
