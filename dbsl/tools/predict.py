"""Classify images with a trained model: ``python -m dbsl.predict runs/x photo.jpg folder/``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

import torch
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.files import check_output, write_table
from dbsl.base.machine import lazy_import
from dbsl.data.transforms import as_rgb, upright
from dbsl.model import load_model, read_model_config

timm = lazy_import("timm")

_BATCH = 64  # images


def image_files(places: Sequence[Path]) -> list[Path]:
    """Return files as they are given, and the images of folders, however deep, in order.

    A place that does not exist and a folder without an image are returned as they are given:
    `predict` says why they cannot be read.
    """
    endings = Image.registered_extensions()
    files: list[Path] = []
    for place in places:
        if place.is_dir():
            found = sorted(path for path in place.rglob("*") if path.suffix.lower() in endings)
            files += found or [place]
        else:
            files.append(place)
    return files


@torch.no_grad()
def predict(
    run: Path, files: Sequence[Path], *, best: bool = False, ema: bool = False
) -> Iterator[tuple[Path, torch.Tensor | str]]:
    """Yield each file with the probabilities of the classes, [C], or why it cannot be read.

    `run` is a run folder, a checkpoint, or a downloaded model of ``--push-to-hub``. Its
    ``config.json`` says how images are prepared, by timm's evaluation transform.
    """
    config = read_model_config(run)
    there = torch.accelerator.is_available()
    device = torch.accelerator.current_accelerator() if there else torch.device("cpu")
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
                    images[file] = transform(as_rgb(upright(image)))
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


class Parser(argparse.ArgumentParser):
    """A parser of a command's own flags."""

    def error(self, message: str) -> NoReturn:
        """Refuse in one line, as settings do."""
        raise SettingError(message.removeprefix("argument "))


def main(argv: Sequence[str] | None = None) -> int:
    """Print each image's likeliest classes, and write them to a CSV file if one is named."""
    parser = Parser(
        "python -m dbsl.predict",
        description=f"{__doc__.split(':')[0]}. An image that cannot be read is named in a warning "
        "and left out. The exit status is 1 if you named that image itself, not its folder, or if "
        "no image is left.",
    )
    parser.add_argument("run", type=Path, help="run folder, checkpoint or downloaded model")
    parser.add_argument("images", type=Path, nargs="+", help="image files, or folders of them")
    parser.add_argument("--top", type=int, default=1, help="classes to print (default: 1)")
    parser.add_argument("--best", action="store_true", help="use the best evaluation's weights")
    parser.add_argument("--ema", action="store_true", help="use the averaged weights")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each image")
    parser.add_argument("--csv", type=Path, help="also write file,class,probability to this file")
    arguments = parser.parse_args(argv)
    names = read_model_config(arguments.run)["label_names"]
    if not 1 <= arguments.top <= len(names):
        raise SettingError(f"top must be in [1, {len(names)}], the classes, got {arguments.top}")
    if arguments.best and arguments.ema:
        raise SettingError("best must not be given with ema, got both")
    if arguments.csv is not None:
        check_output("csv", arguments.csv)
    files, status, rows = image_files(arguments.images), 0, []
    for file, found in predict(arguments.run, files, best=arguments.best, ema=arguments.ema):
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
