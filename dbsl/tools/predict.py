"""Classify images with a trained model, or evaluate it where none are named.

``python -m dbsl.predict runs/x photo.jpg folder/``, ``python -m dbsl.predict runs/x --dataset D``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields, make_dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from PIL import Image

from dbsl.base.errors import SettingError, short_loss
from dbsl.base.files import check_output, write_table
from dbsl.base.machine import lazy_import
from dbsl.checkpoint.resume import check_trained_on
from dbsl.config.fields import refuse
from dbsl.config.hooks import settings_of_extras
from dbsl.config.image_settings import ImageConfig
from dbsl.config.parse import is_checkpoint, parse_flags, read_settings, yaml_to_argv
from dbsl.config.settings import MachineConfig, RunConfig
from dbsl.data.dataset import Data, Statistics, load_data
from dbsl.data.folders import endings
from dbsl.data.transforms import as_rgb, upright
from dbsl.model import load_model, read_model_config
from dbsl.plan.sampler import evaluation_batches

timm = lazy_import("timm")

_BATCH = 64  # images


def image_files(places: Sequence[Path]) -> list[Path]:
    """Return files as they are given, and the images of folders, however deep, in order.

    A place that does not exist and a folder without an image are returned as they are given:
    `predict` says why they cannot be read.
    """
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            found = sorted(path for path in place.rglob("*") if path.suffix.lower() in endings())
            files += found or [place]
        else:
            files.append(place)
    return files


@torch.no_grad()
def predict(
    run: Path, files: Sequence[Path], *, best: bool = False, ema: bool = False
) -> Iterator[tuple[Path, torch.Tensor | str]]:
    """Yield each file with the probabilities of the classes, [C], or why it cannot be read.

    `run` is a run folder, a checkpoint, or a downloaded model. Its ``config.json`` says how images
    are prepared, by timm's evaluation transform.
    """
    config, device = read_model_config(run), _device()
    model = load_model(run, best=best, ema=ema).to(device)
    settings = timm.data.resolve_data_config(pretrained_cfg=config["pretrained_cfg"])
    transform = timm.data.create_transform(**settings)
    rest = iter(files)
    while batch := list(islice(rest, _BATCH)):
        images: dict[Path, torch.Tensor] = {}
        failed: dict[Path, str] = {}
        for file in batch:
            try:
                with Image.open(file) as image:
                    images[file] = transform(as_rgb(upright(image), config.get("bits", 16)))
            except FileNotFoundError:
                failed[file] = "it does not exist"
            except IsADirectoryError:
                failed[file] = "the folder has no image"
            except Exception as error:  # Pillow raises OSError, SyntaxError and more
                failed[file] = " ".join(str(error).split()) or type(error).__name__
        if images:
            scores = model(torch.stack(list(images.values())).to(device)).float()
            images = dict(zip(images, scores.softmax(1).cpu(), strict=True))
        for file in batch:
            yield file, failed.get(file, images.get(file))


def _device() -> torch.device:
    there = torch.accelerator.is_available()
    return torch.accelerator.current_accelerator() if there else torch.device("cpu")


def open_data(run: Path, dataset: str | None = None) -> Data:
    """Return data to evaluate a run's model on; without `dataset` those that the run evaluated on.

    Of a dataset the evaluation split counts. Where there is none, all images count, but of the
    dataset that the run trained on only those that it held out.
    """
    run = run.absolute().parents[1] if is_checkpoint(str(run)) else run
    file, same = run / "config.yaml", False
    settings = read_settings(file) if dataset is None or file.is_file() else {}
    if file.is_file():
        own = str(settings.get("dataset", RunConfig.dataset))
        same = dataset is None or Path(dataset).resolve() == Path(own).resolve()
    if dataset is not None:  # which parts and columns, the settings say of the run's own
        parts = ("train_samples", "eval_samples", "holdout")
        parts += () if same else ("image_column", "label_column")
        settings |= {**dict.fromkeys(parts), "dataset": dataset}
    of_data = [one for one in settings_of_extras() if not issubclass(one, RunConfig)]
    cls = make_dataclass("_", [], bases=(*of_data, MachineConfig, ImageConfig), frozen=True)
    known = settings.keys() & {field.name for field in fields(cls)}
    config = parse_flags(cls, yaml_to_argv({name: settings[name] for name in known}))
    data = load_data(config, config.seed, _device(), only_evaluate=not same)
    if same:
        check_trained_on(run, data, config.dataset)
    return data


@torch.no_grad()
def evaluate(run: Path, data: Data, *, best: bool, ema: bool) -> tuple[list[dict[str, Any]], float]:
    """Return a row for each evaluation sample of data, its label and its class, and the loss."""
    config = read_model_config(run)
    names = config["label_names"]
    found = timm.data.resolve_data_config(pretrained_cfg=config["pretrained_cfg"])
    odd = [name for name in data.class_names if name not in names]
    refuse([(odd, f"dataset must have classes of {run}, such as {names[0]}", odd)])
    known = Statistics(tuple(found["mean"]), tuple(found["std"]), f"of {run}")
    data = data.normalised_as(known).resized_as(found["crop_pct"], found["interpolation"])
    source, transform = data.evaluation, data.transform(found["input_size"][-1], "none", 0)
    model = load_model(run, best=best, ema=ema)
    model = model.to(source.device, memory_format=torch.channels_last)
    rows, loss = [], 0.0
    for images, labels in source.batches(evaluation_batches(len(source), 4 * _BATCH), transform):
        scores = model(images).float()
        wanted = [names.index(data.class_names[label]) for label in labels.tolist()]
        loss += float(F.cross_entropy(scores, torch.tensor(wanted).to(labels), reduction="sum"))
        columns = (wanted, *(x.tolist() for x in scores.softmax(1).max(1)[::-1]))
        rows += [
            {"label": names[label], "class": names[place], "probability": probability}
            for label, place, probability in zip(*columns, strict=True)
        ]
    return rows, loss / len(rows)


class Parser(argparse.ArgumentParser):
    """A parser of a command's own flags."""

    def error(self, message: str) -> NoReturn:
        """Refuse in one line, as settings do."""
        raise SettingError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Print each image's likeliest classes, or a model's accuracy, and write them to a CSV."""
    parser = Parser(
        "python -m dbsl.predict",
        description=f"{__doc__.partition('.')[0]}. An image that cannot be read is named in a "
        "warning and left out. The exit status is 1 if you named that image itself, not its "
        "folder, or if no image is left.",
    )
    parser.add_argument("run", type=Path, help="run folder, checkpoint or downloaded model")
    parser.add_argument("images", type=Path, nargs="*", help="image files, or folders of them")
    parser.add_argument("--dataset", help="labelled data to evaluate on; default: the run's own")
    parser.add_argument("--top", type=int, default=1, help="classes to print (default: 1)")
    parser.add_argument("--best", action="store_true", help="use the best evaluation's weights")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights")
    parser.add_argument("--json", action="store_true", help="print JSON: a line for each image")
    parser.add_argument("--csv", type=Path, help="write class and probability of each, too")
    arguments = parser.parse_args(argv)
    names = read_model_config(arguments.run)["label_names"]
    if not 1 <= arguments.top <= len(names):
        raise SettingError(f"top must be in [1, {len(names)}], the classes, got {arguments.top}")
    if arguments.best and arguments.ema:
        raise SettingError("best must not be given with ema, got both")
    both = bool(arguments.images) and arguments.dataset is not None
    refuse([(both, "dataset must not be given with images", arguments.dataset)])
    if arguments.csv is not None:
        check_output("csv", arguments.csv)
    files, status = image_files(arguments.images), 0
    which = {"best": arguments.best, "ema": arguments.ema}
    rows = [] if files else _evaluated(arguments, which)
    for file, found in predict(arguments.run, files, **which) if files else ():
        if isinstance(found, str):
            print(f"warning: {file} cannot be read ({found})", file=sys.stderr)
            status |= file in arguments.images
            continue
        values, places = found.topk(arguments.top)
        top = [(names[place], p) for place, p in zip(places, values.tolist(), strict=True)]
        shown = os.fsencode(file).decode(errors="replace")  # not every file's name is text
        rows += [{"file": shown, "class": name, "probability": p} for name, p in top]
        text = f"{shown}  " + ", ".join(f"{name} {100 * p:.1f} %" for name, p in top)
        row = json.dumps({"file": shown, "classes": dict(top)}) if arguments.json else text
        print(row, flush=True)
    if arguments.csv and rows:
        write_table(arguments.csv, rows)
    return status if rows else 1


def _evaluated(flags: argparse.Namespace, which: dict[str, bool]) -> list[dict[str, Any]]:
    """Evaluate as the flags say, and print the result."""
    data = open_data(flags.run, flags.dataset)
    rows, loss = evaluate(flags.run, data, **which)
    accuracy = sum(row["label"] == row["class"] for row in rows) / len(rows)
    result = {"accuracy": accuracy, "cross_entropy": loss, "samples": len(rows)}
    text = f"accuracy {accuracy:.2%}, cross-entropy {short_loss(loss)}, {len(rows)} images of "
    print(json.dumps(result) if flags.json else f"{text}{data.config.dataset} ({data.eval_split})")
    return rows
