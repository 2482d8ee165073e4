"""Labelled images as tables: from the hub, a folder, parquet files, or scikit-learn's digits."""

from __future__ import annotations

import glob
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dbsl.base.errors import SettingError, require
from dbsl.base.machine import hub_or_cache, lazy_import
from dbsl.config.image_settings import ImageConfig
from dbsl.data.folders import LABEL_COLUMNS, files_below, read_folder, split_of
from dbsl.data.images import ImageSplit

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
logger = logging.getLogger(__name__)

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # a name or user/name; all else is a path
Splits = tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]  # train, evaluation, class names


def open_labelled(config: ImageConfig) -> Splits:
    """Return train, the evaluation split if one has labels, and the names of the classes."""
    dataset = config.dataset
    tables = _open_tables(dataset, config.label_column)
    train_name = next(iter(tables)) if len(tables) == 1 else "train"
    require(train_name in tables, "dataset must have a split 'train' or only one", [*tables])
    image_column, label_column = choose_columns(config, tables[train_name].features)
    for name in EVAL_SPLITS:
        if name in tables and image_column not in tables[name].features:
            say_lacks(dataset, name, f"column {image_column!r}")
            del tables[name]

    def split(name: str, rows: np.ndarray, labels: np.ndarray) -> ImageSplit:
        table = tables[name].select_columns([image_column])
        table = table.cast_column(image_column, datasets.Image(decode=False))
        return ImageSplit(table, rows, labels, image_column, dataset, name)

    return label_splits(dataset, tables, train_name, label_column, split)


def choose_columns(config: ImageConfig, features: datasets.Features) -> tuple[str, str]:
    """Return the columns of the images and of the labels."""
    image_column, label_column = config.image_column, config.label_column
    images = [name for name, feature in features.items() if _is_image(feature)]
    if image_column is None and len(images) == 1:
        image_column = images[0]
    sizes = {}  # classes of each column that may hold labels; 0: not known from its type
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            sizes[name] = feature.num_classes
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(_LABEL_TYPES):
            sizes[name] = 0
    if label_column is None and any(sizes.values()) and "label" not in sizes:
        label_column = max(sizes, key=sizes.get)
    if label_column is None:
        label_column = next((name for name in LABEL_COLUMNS if name in sizes), None)
    there = ", ".join(
        f"{n!r} ({getattr(f, 'dtype', type(f).__name__)})" for n, f in features.items()
    )
    tar = "; unpack a tar of class folders" if "__url__" in features else ""
    for setting, column, known, remedy in (
        ("image_column", image_column, images, "Image()) makes images of files' bytes"),
        ("label_column", label_column, [*sizes], f"Value('int64')) makes labels of numbers{tar}"),
    ):
        text = f"{column!r} of the columns {there}; cast_column(name, datasets.{remedy}"
        require(column in known, f"{setting} must be one of {known}", text)
    return image_column, label_column


def label_splits(
    dataset: str,
    tables: Mapping[str, datasets.Dataset],
    train_name: str,
    label_column: str,
    split: Callable[[str, np.ndarray, np.ndarray], ImageSplit],
) -> Splits:
    """Return what `open_labelled` does, of tables of which the label column is read.

    `split` makes a split of its name, the rows that have a label, and their classes, int64 [N].
    """
    rows, labels, classes = _read_labels(dataset, tables, train_name, label_column)
    class_names = tuple(map(str, classes))
    shown = f"{label_column!r} with null or -1 in all rows of split {train_name!r}"
    require(len(rows), "label_column must have labels to train on", shown)
    shown = f"{class_names[0]!r} alone in column {label_column!r}"
    require(len(classes) > 1, "dataset must have two classes or more", shown)
    train = split(train_name, rows, labels)
    if unused := {*class_names} - {class_names[label] for label in np.unique(labels)}:
        logger.warning("classes of %r without a training image: %s", dataset, listed(unused))
    numbers = {value: number for number, value in enumerate(classes)}
    for name in EVAL_SPLITS:
        if name == train_name or name not in tables:
            continue
        rows, codes, values = _read_labels(dataset, tables, name, label_column)
        if not len(rows):
            say_lacks(dataset, name, "labels")
            continue
        labels = np.array([numbers.get(value, -1) for value in values])[codes]
        require(
            labels.min() >= 0,
            f"labels of split {name!r} must be among the {len(classes)} classes of the training "
            "split",
            repr(values[codes[labels.argmin()]]),
        )
        return train, split(name, rows, labels), class_names
    return train, None, class_names


def say_lacks(dataset: str, split: str, what: str) -> None:
    """Warn that a split is left out."""
    logger.warning("split %r of %r has no %s and is left out", split, dataset, what)


def listed(names: Iterable[str]) -> str:
    """Return names for a message, the first five of them."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _read_labels(
    dataset: str, tables: Mapping[str, datasets.Dataset], name: str, column: str
) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Return the rows of a split that have a label, and each one's place in a list of classes.

    The hub's test splits without labels hold -1. Rows without a label are counted, unless none has.
    """
    feature = tables[name].features.get(column)
    if feature is None:
        return np.empty(0, np.int64), np.empty(0, np.int64), []
    found = tables[name].select_columns([column]).with_format("arrow")[:][column]
    rows, values = np.flatnonzero(found.is_valid()), found.drop_null().to_numpy()
    if isinstance(feature, datasets.ClassLabel):
        there = (values >= 0) & (values < feature.num_classes)
        rows, codes, classes = rows[there], values[there], feature.names
    else:
        classes, codes = np.unique(values, return_inverse=True)
        classes = classes.tolist()
    if 0 < len(rows) < len(found):
        text = "split %r of %r: rows without a label are left out, %d of %d"
        logger.warning(text, name, dataset, len(found) - len(rows), len(found))
    return rows, codes.astype(np.int64), classes


def _open_tables(dataset: str, label_column: str | None) -> Mapping[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    with opening(dataset, "'digits', a folder, a parquet file or a hub id that can be reached"):
        if not path.exists():
            if path.suffix == ".parquet" or not HUB_ID.fullmatch(dataset):
                raise FileNotFoundError("it does not exist")
            with hub_or_cache():
                found = datasets.load_dataset(dataset)
        elif path.is_file():
            text = f"{dataset} must be a parquet file or a folder: unpack an archive"
            require(path.suffix == ".parquet", text, f"a file {path.suffix or 'of another kind'}")
            found = _read_parquet({"train": [os.path.abspath(path)]})
        elif any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            found = datasets.load_from_disk(path)
        elif has_card(path):
            found = datasets.load_dataset(str(path))
        else:
            found = read_folder(path, label_column) or _read_parquet(parquet_files(path))
            found = found or datasets.load_dataset(str(path))
        if isinstance(found, datasets.Dataset):
            found = {"train": found}
        tables = {name: table.with_format(None) for name, table in found.items() if len(table)}
        require(tables, f"{dataset} must have rows", "none")
    return tables


@contextmanager
def opening(dataset: str, must: str) -> Iterator[None]:
    """Say in one line why a dataset cannot be opened, and what it must be."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # no network, no such name, a broken file: libraries raise all kinds
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        why = reason or type(error).__name__
        text = f"dataset {dataset!r} cannot be opened ({why}); dataset must be {must}"
        raise SettingError(text) from error


def has_card(folder: Path) -> bool:
    """Whether a card says which of a folder's files are whose."""
    cards = (folder / name for name in ("README.md", ".huggingface.yaml"))
    return any("configs:" in card.read_text("utf-8", "replace") for card in cards if card.is_file())


def parquet_files(folder: Path) -> dict[str, list[str]]:
    """Return the parquet files of each split of a folder: the first word for one in their paths.

    Where no path has a word for training, files without any are for training.
    """
    root = os.path.abspath(folder)
    parts = [file.split("/") for file in files_below(root, []) if file.endswith(".parquet")]
    shared = len(os.path.commonprefix([path[:-1] for path in parts]))  # noqa: RUF071 lists
    splits = [next(filter(None, map(split_of, path[shared:])), None) for path in parts]
    found: dict[str | None, list[str]] = {}
    for path, split in zip(parts, splits, strict=True):
        split = split or (None if "train" in splits else "train")
        found.setdefault(split, []).append("/".join([root, *path]))
    if others := found.pop(None, []):
        text = "%s: left out are %d parquet files that no word in their names puts into a split: %s"
        logger.warning(text, folder, len(others), listed(map(os.path.basename, others)))
    return found


def _read_parquet(files: Mapping[str, Sequence[str]]) -> dict[str, datasets.Dataset]:
    """Return a table of each split's files.

    Each is read alone: `datasets` would take the classes of the first for all, whatever theirs are.
    """
    tables = {}
    for name, paths in files.items():
        same_classes(map(_read_columns, paths))
        data_files = {name: list(map(glob.escape, paths))}
        tables[name] = datasets.load_dataset("parquet", data_files=data_files, split=name)
    return tables


def _read_columns(file: str) -> tuple[str, datasets.Features]:
    try:
        return file, datasets.Features.from_arrow_schema(parquet.read_schema(file))
    except Exception as error:  # pyarrow raises several kinds
        raise SettingError(f"{file} is no parquet file that can be read: {error}") from None


def same_classes(files: Iterable[tuple[str, datasets.Features]]) -> None:
    """Refuse files of one split that name other classes: those of the first are taken for all."""
    first = None
    for file, features in files:
        names = {column: getattr(feature, "names", None) for column, feature in features.items()}
        first = first or names
        text = "all files of a split must have the same classes in the same order"
        require(names == first, text, f"others in {file}")


def _digits() -> datasets.Dataset:
    from sklearn.datasets import load_digits  # slow to import, and only this dataset needs it

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # they come as 0..16
    return datasets.Dataset.from_dict(
        {"image": [Image.fromarray(image) for image in images], "label": digits.target},
        features=datasets.Features(
            image=datasets.Image(), label=datasets.ClassLabel(names=list("0123456789"))
        ),
    )


def _is_image(feature: Any) -> bool:
    """Whether a column has images: said by `datasets`, or as it stores them."""
    stored = isinstance(feature, dict) and {*feature} == {"bytes", "path"}
    return stored or isinstance(feature, datasets.Image)
