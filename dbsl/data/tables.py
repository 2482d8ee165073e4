"""Labelled images as tables: from the hub, a folder, parquet files, or scikit-learn's digits."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import
from dbsl.base.network import hub_or_cache
from dbsl.data.folders import (
    check_metadata,
    hint_on_tables,
    is_image_folder,
    listed,
    read_class_folders,
    warn_of_rows,
)
from dbsl.data.images import ImageSplit

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
logger = logging.getLogger(__name__)

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_COLUMNS = ("labels", "target", "class")  # names to try once there is no "label"
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # a name or user/name; all else is a path


def open_labelled(
    dataset: str, image_column: str | None, label_column: str | None
) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]:
    """Return train, the evaluation split if one has labels, and the names of the classes."""
    tables = _open_tables(dataset)
    train_name = next(iter(tables)) if len(tables) == 1 else "train"
    if train_name not in tables:
        raise SettingError(f"dataset must have a split 'train' or only one, got {list(tables)}")
    if is_image_folder(dataset, tables):
        tables = read_class_folders(dataset, tables, train_name)
    image_column, label_column = choose_columns(
        dataset, tables[train_name].features, image_column, label_column
    )

    def split(name: str, labels: np.ndarray) -> ImageSplit:
        table = tables[name].select_columns([image_column])
        table = table.cast_column(image_column, datasets.Image(decode=False))
        rows = np.arange(len(table))
        return ImageSplit(table, rows, labels, image_column, label_column, dataset, name)

    return label_splits(dataset, tables, train_name, label_column, split)


def choose_columns(
    dataset: str, features: datasets.Features, image_column: str | None, label_column: str | None
) -> tuple[str, str]:
    """Return the columns of the images and of the labels."""
    if not any(map(_is_image, features.values())):
        raise SettingError(
            f"dataset must have a column of images, got columns {_columns(features)}"
            f"{hint_on_tables(dataset)}"
        )
    return _choose_image_column(features, image_column), _choose_label_column(
        features, label_column
    )


def label_splits(
    dataset: str,
    tables: Mapping[str, datasets.Dataset],
    train_name: str,
    label_column: str,
    split: Callable[[str, np.ndarray], ImageSplit],
) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]:
    """Return train, the evaluation split if one has labels, and the names of the classes.

    Args:
        dataset: Its name, for messages.
        tables: The splits; of these, their label column is read.
        train_name: Name of the training split.
        label_column: The column.
        split: Makes a split of its name and the class of each row, int64 [N].
    """
    values = _read_labels(tables[train_name], label_column)
    if values is None:
        raise SettingError(
            f"label_column must have a label in every row, got {label_column!r} with null or -1 "
            f"in split {train_name!r}"
        )
    feature = tables[train_name].features[label_column]
    is_encoded = isinstance(feature, datasets.ClassLabel)
    classes = np.arange(feature.num_classes) if is_encoded else np.unique(values)
    class_names = feature.names if is_encoded else [str(value) for value in classes]
    if len(class_names) < 2:
        raise SettingError(
            f"dataset must have two classes or more, got {class_names[0]!r} alone in column "
            f"{label_column!r}"
        )
    train = split(train_name, encode_labels(values, classes, train_name))
    if unused := set(class_names) - {class_names[label] for label in np.unique(train.labels)}:
        logger.warning("classes of %r without a training image: %s", dataset, listed(unused))
    for name in EVAL_SPLITS:
        if name == train_name or name not in tables:
            continue
        values = _read_labels(tables[name], label_column)
        if values is None:
            logger.warning("split %r of %r has no labels and is left out", name, dataset)
            continue
        own = tables[name].features[label_column]
        if own != feature:
            if not is_encoded or {*getattr(own, "names", ())} != {*class_names}:
                raise SettingError(
                    f"label_column must be of one type in all splits, got {label_column!r}, whose "
                    f"type or classes in split {name!r} are not those in {train_name!r}"
                )
            values = encode_labels(values, np.arange(own.num_classes), name)
            values = np.array(feature.str2int(own.names))[values]  # the same in another order
        if is_encoded and not np.isin(values, train.labels).any():  # test/unknown/*.jpg, say
            logger.warning("split %r of %r has no training class and is left out", name, dataset)
            continue
        return train, split(name, encode_labels(values, classes, name)), tuple(class_names)
    return train, None, tuple(class_names)


def _open_tables(dataset: str) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    kind = "file" if path.suffix == ".parquet" else "folder"
    try:
        if not path.exists() and (kind == "file" or not HUB_ID.fullmatch(dataset)):
            raise FileNotFoundError(f"the {kind} does not exist")
        if kind == "folder" and path.is_file():  # `datasets` would take it for a hub id
            raise SettingError("it is a file whose name does not end in .parquet")
        if kind == "file":
            found = _read_local(datasets.load_dataset_builder("parquet", data_files=str(path)))
        elif any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            _check_saved(path)
            found = datasets.load_from_disk(path)
        elif path.exists():
            found = _read_local(datasets.load_dataset_builder(str(path)))
        else:
            found = _load_from_hub(dataset)
        if isinstance(found, datasets.Dataset):
            found = {"train": found}
        tables = {name: table.with_format(None) for name, table in found.items() if len(table)}
        if not tables:
            raise SettingError("it has no rows")
    except Exception as error:  # no network, no such name, a broken file: datasets raises all kinds
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise SettingError(
            "dataset must be 'digits', a folder, a parquet file or a hub id that can be reached, "
            f"got {dataset!r} ({reason})"
        ) from error
    return tables


def _read_local(builder: datasets.DatasetBuilder) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows, each with the classes that its own parquet files name.

    `datasets` would take those of the first split for all: in another order, their names change.
    """
    files = {name: list(found) for name, found in builder.config.data_files.items()}
    own = {name: same_classes(_read_columns(found)) for name, found in files.items()}
    if builder.name == "imagefolder":
        check_metadata(Path(file) for found in files.values() for file in found)
    builder.download_and_prepare()
    rows = {name: split.num_examples for name, split in builder.info.splits.items()}
    if builder.name == "imagefolder":
        warn_of_rows(files, rows, builder.EXTENSIONS)
    tables = {}
    for name in filter(rows.get, rows):
        table = builder.as_dataset(name)
        for column, feature in own[name].items():
            if hasattr(feature, "names") and hasattr(table.features.get(column), "names"):
                table.info.features[column] = feature
        tables[name] = table
    return tables


def _read_columns(files: Iterable[str]) -> Iterator[tuple[str, datasets.Features]]:
    """Yield each parquet file, and its columns as it describes them."""
    for file in files:
        if Path(file).suffix != ".parquet":
            continue
        try:
            schema = parquet.read_schema(file)
        except Exception as error:  # pyarrow raises several kinds
            raise SettingError(f"{file}: {error}") from None
        yield file, datasets.Features.from_arrow_schema(schema)


def same_classes(found: Iterable[tuple[str, datasets.Features]]) -> datasets.Features:
    """Return the columns of the first of a split's files; of no file, none.

    Raises:
        SettingError: If another file names other classes, or the same in another order.
    """
    first = datasets.Features()
    for file, features in found:
        first = first or features
        for column, feature in features.items():
            names, those = (getattr(f, "names", None) for f in (feature, first.get(column)))
            if names and those and names != those:
                raise SettingError(
                    "all files of a split must have the same classes in the same order, got others "
                    f"in column {column!r} of {file}"
                )
    return first


def _load_from_hub(name: str) -> datasets.DatasetDict:
    with hub_or_cache() as answers:
        try:
            return datasets.load_dataset(name)
        except Exception:
            if answers:
                raise
            raise OSError(
                "there is no such folder, the hub cannot be reached and its cache has none"
            ) from None


def _check_saved(folder: Path) -> None:
    """Refuse a folder of `save_to_disk` whose files name data outside of it."""
    splits = [folder]
    if (folder / "dataset_dict.json").exists():
        names = json.loads((folder / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
        splits = [folder / name for name in names]
    inside = os.path.join(os.path.abspath(folder), "")
    for split in splits:
        state = json.loads((split / "state.json").read_text(encoding="utf-8"))
        for file in [split / entry["filename"] for entry in state["_data_files"]]:
            if not os.path.abspath(file).startswith(inside):
                raise SettingError(f"its data files must lie inside the folder, got {file}")


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


def _choose_image_column(features: datasets.Features, chosen: str | None) -> str:
    images = [name for name, feature in features.items() if _is_image(feature)]
    if chosen is None and len(images) == 1:
        return images[0]
    if chosen not in images:
        raise SettingError(f"image_column must be one of {images}, got {chosen!r}")
    return chosen


def _choose_label_column(features: datasets.Features, chosen: str | None) -> str:
    sizes = {}  # classes of each column that may hold labels; 0: not known from its type
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            sizes[name] = feature.num_classes
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(_LABEL_TYPES):
            sizes[name] = 0
    if not sizes:
        raise SettingError(
            f"dataset must have a column of labels, whole numbers or text, got columns "
            f"{_columns(features)}"
        )
    if chosen is None and "label" in sizes:
        return "label"
    if chosen is None and any(sizes.values()):
        return max(sizes, key=sizes.get)
    if chosen is None:
        chosen = next((name for name in _LABEL_COLUMNS if name in sizes), None)
    if chosen not in sizes:
        kind = f" of {_kind(features[chosen])}" if chosen in features else ""
        raise SettingError(f"label_column must be one of {list(sizes)}, got {chosen!r}{kind}")
    return chosen


def _is_image(feature: Any) -> bool:
    """Whether a column has images: said by `datasets`, or as it stores them."""
    stored = isinstance(feature, dict) and {*feature} == {"bytes", "path"}
    return stored or isinstance(feature, datasets.Image)


def _columns(features: datasets.Features) -> str:
    return ", ".join(f"{name!r} ({_kind(feature)})" for name, feature in features.items())


def _kind(feature: Any) -> str:
    return getattr(feature, "dtype", type(feature).__name__.lower())


def _read_labels(table: datasets.Dataset, column: str) -> np.ndarray | None:
    """Return the labels as they are written, or None if any is missing."""
    if column not in table.features:
        return None
    labels = table.select_columns([column]).with_format("arrow")[:][column]
    if labels.null_count:
        return None
    values = labels.to_numpy()
    # The hub's test splits without labels hold -1.
    is_encoded = isinstance(table.features[column], datasets.ClassLabel)
    return None if is_encoded and values.min() < 0 else values


def encode_labels(values: np.ndarray, classes: np.ndarray, split: str) -> np.ndarray:
    """Return the place of each value among the sorted classes, int64."""
    labels = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    unknown = values[classes[labels] != values]
    if len(unknown):
        raise SettingError(
            f"labels of split {split!r} must be among the {len(classes)} classes of the training "
            f"split, got {unknown.tolist()[0]!r}"
        )
    return labels.astype(np.int64)
