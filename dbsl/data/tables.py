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

from dbsl.base.errors import SettingError, such_as, words_of
from dbsl.base.machine import hub_or_cache, lazy_import
from dbsl.config.image_settings import ImageConfig
from dbsl.data.folders import LABEL_COLUMNS, files_below, read_folder, split_of
from dbsl.data.images import ImageSplit

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
logger = logging.getLogger(__name__)

_EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # a name or user/name; anything else is a path
Splits = tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]  # train, evaluation, class names
# Makes a split from the rows with a label and from their classes, int64 [N].
MakeSplit = Callable[[np.ndarray, np.ndarray], ImageSplit]


def open_labelled(config: ImageConfig) -> Splits:
    """Return the training split, an evaluation split if one has labels, and the class names."""
    tables = _open_tables(config.dataset, config.label_column)

    def read(name: str, image_column: str, label_column: str) -> tuple[Any, MakeSplit]:
        labels = tables[name].select_columns([label_column]).with_format("arrow")[:]
        table = tables[name].select_columns([image_column])
        table = table.cast_column(image_column, datasets.Image(decode=False))

        def split(rows: np.ndarray, classes: np.ndarray) -> ImageSplit:
            return ImageSplit(table, rows, classes, image_column, config.dataset, name)

        return labels[label_column], split

    return open_splits(config, {name: table.features for name, table in tables.items()}, read)


def open_splits(
    config: ImageConfig,
    features: Mapping[str, datasets.Features],
    read: Callable[[str, str, str], tuple[Any, MakeSplit]],
) -> Splits:
    """Return what `open_labelled` does, for splits with these columns.

    `read` takes a split's name and the names of its image and label columns. It returns the labels
    in Arrow's form, and a function that makes the split.
    """
    dataset, train = config.dataset, None
    train_name = str(next(iter(features))) if len(features) == 1 else "train"
    if train_name not in features:
        there = ", ".join(features)
        raise SettingError(f"{dataset} has no split train, but {there}: name one of them train")
    image_column, label_column = choose_columns(config, features[train_name])
    for name in dict.fromkeys([train_name, *_EVAL_SPLITS]):
        columns = features.get(name)
        if columns is None:
            continue
        if lacking := [c for c in (image_column, label_column) if c not in columns]:
            _say_lacks(dataset, name, f"column {lacking[0]!r}")
            continue
        found, make = read(name, image_column, label_column)
        rows, codes, values = _classes_of(found, columns[label_column])
        if 0 < len(rows) < len(found):
            text = "split %r of %r: rows without a label are left out, %d of %d"
            logger.warning(text, name, dataset, len(found) - len(rows), len(found))
        if train is None:
            if len(values) < 2 or not len(rows):
                lack = f"only {values[0]!r}" if len(rows) else "no row with a label"
                raise SettingError(
                    f"split {name!r} of {dataset} has {lack} in column {label_column!r}: it must "
                    "have two classes or more; --label-column names another column"
                )
            train, numbers = make(rows, codes), {value: n for n, value in enumerate(values)}
            unused = np.setdiff1d(np.arange(len(values)), codes)
            if len(unused):
                text = "classes of %r without a training image: %s"
                logger.warning(text, dataset, listed(str(values[label]) for label in unused))
        elif not len(rows):
            _say_lacks(dataset, name, "labels")
        else:
            labels = np.array([numbers.get(value, -1) for value in values])[codes]
            if labels.min() < 0:
                unknown = values[codes[labels.argmin()]]
                raise SettingError(
                    f"split {name!r} of {dataset} has the label {unknown!r}, which is none of the "
                    f"{len(numbers)} classes of split {train_name!r}: leave out its rows, or add "
                    "training images of it"
                )
            return train, make(rows, labels), tuple(map(str, numbers))
    return train, None, tuple(map(str, numbers))


def choose_columns(config: ImageConfig, features: datasets.Features) -> tuple[str, str]:
    """Return the columns of the images and of the labels."""
    image_column, label_column = config.image_column, config.label_column
    images = [name for name, feature in features.items() if _is_image(feature)]
    if image_column is None and len(images) == 1:
        image_column = images[0]
    sizes = {}  # classes of each column that may hold labels; 0: unknown from its type
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            sizes[name] = feature.num_classes
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(_LABEL_TYPES):
            sizes[name] = 0
    most = max(sizes, key=sizes.get) if any(sizes.values()) else None
    guesses = [label_column] if label_column else ["label", most, *LABEL_COLUMNS]
    label_column = next((name for name in guesses if name in sizes), label_column)
    kinds = {name: getattr(f, "dtype", type(f).__name__) for name, f in features.items()}
    there = ", ".join(f"{name!r} ({kind})" for name, kind in kinds.items())
    tar = "; unpack a tar of class folders" if "__url__" in features else ""
    for kind, column, known, remedy in (
        ("image", image_column, images, "Image()) makes images of files' bytes"),
        ("label", label_column, [*sizes], f"Value('int64')) makes labels of numbers{tar}"),
    ):
        if column not in known:
            asked = f"column {column!r}" if column else "column that is known by its name"
            raise SettingError(
                f"{config.dataset} has no {kind} {asked}: its columns are {there}; {kind}_column "
                f"may be one of {known}; cast_column(name, datasets.{remedy}"
            )
    return image_column, label_column


def listed(names: Iterable[str]) -> str:
    """Return the first five names, for a message."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _say_lacks(dataset: str, split: str, what: str) -> None:
    logger.warning("split %r of %r has no %s and is left out", split, dataset, what)


def _classes_of(found: Any, feature: Any) -> tuple[np.ndarray, np.ndarray, list[Any]]:
    """Return the rows with a label, each label's place in a list of classes, and that list.

    Test splits without labels hold -1 on the hub.
    """
    rows, values = np.flatnonzero(found.is_valid()), found.drop_null().to_numpy()
    if isinstance(feature, datasets.ClassLabel):
        there = (values >= 0) & (values < feature.num_classes)
        return rows[there], values[there].astype(np.int64), feature.names
    classes, codes = np.unique(values, return_inverse=True)
    return rows, codes.astype(np.int64), classes.tolist()


def _open_tables(dataset: str, label_column: str | None) -> Mapping[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    with opening(dataset, "'digits', a folder, a parquet file or a hub id that can be reached"):
        if not (dataset and path.exists()):
            missing = _missing(path)
            if path.suffix == ".parquet" or not HUB_ID.fullmatch(dataset):
                raise FileNotFoundError(missing)
            try:
                with hub_or_cache():
                    found = datasets.load_dataset(dataset)
            except Exception as error:  # no network, no such name
                raise FileNotFoundError(f"{missing}; as a hub id: {words_of(error)}") from None
        elif path.is_file():
            if path.suffix != ".parquet":
                what = "is no parquet file and no folder: give its folder; unpack an archive"
                raise SettingError(f"{dataset} {what}")
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
        if not tables:
            raise SettingError(f"{dataset} has no rows: give a dataset that has some")
    return tables


def _missing(path: Path) -> str:
    """Say which folder or file of a path does not exist, and which similar name is beside it."""
    first = next((one for one in reversed(path.parents) if not one.exists()), path)
    beside = {*os.listdir(first.parent)} - {first.name} if first.parent.is_dir() else ()
    return f"{first} does not exist here{such_as(first.name, beside)}"


@contextmanager
def opening(dataset: str, must: str) -> Iterator[None]:
    """Say in one line why a dataset cannot be opened, and what to give instead."""
    try:
        yield
    except SettingError:
        raise
    except Exception as error:  # no network, no such name, a broken file: libraries raise all kinds
        why = words_of(error.__cause__ or error)
        raise SettingError(f"{dataset!r} cannot be opened ({why}): give {must}") from error


def has_card(folder: Path) -> bool:
    """Whether a dataset card assigns a folder's files to splits."""
    cards = (folder / name for name in ("README.md", ".huggingface.yaml"))
    return any("configs:" in card.read_text("utf-8", "replace") for card in cards if card.is_file())


def parquet_files(folder: Path) -> dict[str, list[str]]:
    """Return a folder's parquet files by split, which is the first word for one in a path.

    If no path has a word for training, files without a split are for training.
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
    """Return a table for each split.

    Each is read separately: `datasets` would use the first one's classes for all.
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
    """Refuse files of one split with other classes: those of the first file apply to all."""
    first = None
    for file, features in files:
        names = {column: getattr(feature, "names", None) for column, feature in features.items()}
        first = first or (file, names)
        if names != first[1]:
            text = f"{file} has other columns or classes, or another order of them, than {first[0]}"
            raise SettingError(f"{text}: write all files of a split alike")


def _digits() -> datasets.Dataset:
    from sklearn.datasets import load_digits  # slow to import, and only this dataset needs it

    digits = load_digits()
    images = np.round(digits.images * (255 / 16)).astype(np.uint8)  # they are 0..16
    return datasets.Dataset.from_dict(
        {"image": list(images), "label": digits.target},
        features=datasets.Features(
            image=datasets.Image(), label=datasets.ClassLabel(names=list("0123456789"))
        ),
    )


def _is_image(feature: Any) -> bool:
    """Whether a column has images, by its type or by how `datasets` stores it."""
    stored = isinstance(feature, dict) and {*feature} == {"bytes", "path"}
    return stored or isinstance(feature, datasets.Image)
