"""Labelled images as tables: from the hub, a folder, parquet files, or scikit-learn's digits."""

from __future__ import annotations

import csv
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.machine import hub_or_cache, lazy_import
from dbsl.config.image_settings import ImageConfig
from dbsl.data.images import ImageSplit

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
logger = logging.getLogger(__name__)

EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_COLUMNS = ("label", "labels", "target", "class")  # all but the first: without ClassLabel
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
_COLUMNS = "file_name,label"  # the first line of a metadata.csv
Splits = tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]  # train, evaluation, class names
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # a name or user/name; all else is a path


def open_labelled(config: ImageConfig) -> Splits:
    """Return train, the evaluation split if one has labels, and the names of the classes."""
    dataset = config.dataset
    tables = _open_tables(dataset)
    train_name = next(iter(tables)) if len(tables) == 1 else "train"
    if train_name not in tables:
        raise SettingError(f"dataset must have a split 'train' or only one, got {list(tables)}")
    image_column, label_column = choose_columns(config, tables[train_name].features)

    def split(name: str, labels: np.ndarray) -> ImageSplit:
        table = tables[name].select_columns([image_column])
        table = table.cast_column(image_column, datasets.Image(decode=False))
        rows = np.arange(len(table))
        return ImageSplit(table, rows, labels, image_column, dataset, name)

    return label_splits(dataset, tables, train_name, label_column, split)


def choose_columns(config: ImageConfig, features: datasets.Features) -> tuple[str, str]:
    """Return the columns of the images and of the labels."""
    image_column, label_column = config.image_column, config.label_column
    columns = ", ".join(f"{name!r} ({_kind(feature)})" for name, feature in features.items())
    images = [name for name, feature in features.items() if _is_image(feature)]
    if not images:
        raise SettingError(f"dataset must have a column of images, got columns {columns}")
    if image_column is None and len(images) == 1:
        image_column = images[0]
    if image_column not in images:
        raise SettingError(f"image_column must be one of {images}, got {image_column!r}")
    sizes = {}  # classes of each column that may hold labels; 0: not known from its type
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            sizes[name] = feature.num_classes
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(_LABEL_TYPES):
            sizes[name] = 0
    if not sizes:
        raise SettingError(
            f"dataset must have a column of labels, whole numbers or text, got columns {columns}"
        )
    if label_column is None and any(sizes.values()) and "label" not in sizes:
        label_column = max(sizes, key=sizes.get)
    if label_column is None:
        label_column = next((name for name in _LABEL_COLUMNS if name in sizes), None)
    if label_column not in sizes:
        kind = f" of {_kind(features[label_column])}" if label_column in features else ""
        raise SettingError(f"label_column must be one of {[*sizes]}, got {label_column!r}{kind}")
    return image_column, label_column


def label_splits(
    dataset: str,
    tables: Mapping[str, datasets.Dataset],
    train_name: str,
    label_column: str,
    split: Callable[[str, np.ndarray], ImageSplit],
) -> Splits:
    """Return what `open_labelled` does, of tables of which the label column is read.

    `split` makes a split of its name and the class of each row, int64 [N].
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
    train = split(train_name, _encode_labels(values, classes, train_name))
    if unused := set(class_names) - {class_names[label] for label in np.unique(train.labels)}:
        logger.warning("classes of %r without a training image: %s", dataset, listed(unused))
    for name in EVAL_SPLITS:
        if name == train_name or name not in tables:
            continue
        values = _read_labels(tables[name], label_column)
        if values is None:
            logger.warning("split %r of %r has no labels and is left out", name, dataset)
            continue
        found = tables[name].features[label_column]
        if found != feature:
            if not is_encoded or {*getattr(found, "names", ())} != {*class_names}:
                raise SettingError(
                    f"label_column must be of one type in all splits, got {label_column!r}, whose "
                    f"type or classes in split {name!r} are not those in {train_name!r}"
                )
            values = _encode_labels(values, np.arange(found.num_classes), name)
            values = np.array(feature.str2int(found.names))[values]  # the same in another order
        if is_encoded and not np.isin(values, train.labels).any():  # test/unknown/*.jpg, say
            logger.warning("split %r of %r has no training class and is left out", name, dataset)
            continue
        return train, split(name, _encode_labels(values, classes, name)), tuple(class_names)
    return train, None, tuple(class_names)


def _open_tables(dataset: str) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    is_file = path.suffix == ".parquet"
    try:
        if not path.exists() and (is_file or not HUB_ID.fullmatch(dataset)):
            raise FileNotFoundError(f"the {'file' if is_file else 'folder'} does not exist")
        if path.is_file() and not is_file:  # `datasets` would take it for a hub id
            raise SettingError("it is a file whose name does not end in .parquet")
        if not path.exists():
            with hub_or_cache():
                found = datasets.load_dataset(dataset)
        elif any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            _check_saved(path)
            found = datasets.load_from_disk(path)
        elif is_file:
            found = _read_local("parquet", data_files=str(path))
        else:
            found = _read_local(str(path))
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


def _read_local(path: str, **more: str) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows, each with the classes that its parquet files name.

    `datasets` would take those of the first split for all: in another order, their names change.
    """
    builder = datasets.load_dataset_builder(path, **more)
    files = {name: list(map(Path, found)) for name, found in builder.config.data_files.items()}
    columns = {name: same_classes(_read_columns(found)) for name, found in files.items()}
    endings = builder.EXTENSIONS if builder.name == "imagefolder" else ()
    images = {
        name: [f for f in found if f.suffix.lower() in endings] for name, found in files.items()
    }
    if all(images.values()):
        names = builder.METADATA_FILENAMES
        described = [file for found in files.values() for file in found if file.name in names]
        _check_metadata(described)
        if not described and len(labelled := _with_labels(path, images)) < len(images):
            patterns = datasets.data_files.get_data_patterns(path)
            of_labelled = {name: patterns[name] for name in labelled}
            builder = datasets.load_dataset_builder(path, data_files=of_labelled)
    builder.download_and_prepare()
    tables = {}
    for name, split in builder.info.splits.items():
        count, there = split.num_examples, len(images[name])
        if there > count:  # `datasets` leaves them out
            logger.warning(
                f"images of split {str(name)!r} without a row in a metadata.csv are left out: "
                f"{there - count} of {there}"
            )
        if not count:
            continue
        tables[name] = table = builder.as_dataset(name)
        for column, feature in columns[name].items():
            if hasattr(feature, "names") and hasattr(table.features.get(column), "names"):
                table.info.features[column] = feature
    return tables


def _read_columns(files: Iterable[Path]) -> Iterator[tuple[Path, datasets.Features]]:
    """Yield each parquet file, and its columns as it describes them."""
    for file in (file for file in files if file.suffix == ".parquet"):
        try:
            schema = parquet.read_schema(file)
        except Exception as error:  # pyarrow raises several kinds
            raise SettingError(f"{file}: {error}") from None
        yield file, datasets.Features.from_arrow_schema(schema)


def same_classes(found: Iterable[tuple[Path | str, datasets.Features]]) -> datasets.Features:
    """Return the columns of the first of a split's files; the others must name the same classes."""
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


def _is_image(feature: Any) -> bool:
    """Whether a column has images: said by `datasets`, or as it stores them."""
    stored = isinstance(feature, dict) and {*feature} == {"bytes", "path"}
    return stored or isinstance(feature, datasets.Image)


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


def _encode_labels(values: np.ndarray, classes: np.ndarray, split: str) -> np.ndarray:
    """Return the place of each value among the sorted classes, int64."""
    labels = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    unknown = values[classes[labels] != values]
    if len(unknown):
        raise SettingError(
            f"labels of split {split!r} must be among the {len(classes)} classes of the training "
            f"split, got {unknown.tolist()[0]!r}"
        )
    return labels.astype(np.int64)


# --- a local folder of image files


def _with_labels(path: str, images: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return the splits of image files that have class folders; say what class folders lack.

    `datasets` would give no split a label where one lies less deep than the others, as the
    unlabelled ``test/`` of a competition does.
    """
    train = "train" if "train" in images else next(iter(images))
    depths = {name: {len(file.parts) for file in found} for name, found in images.items()}
    folders = sorted({file.parent for file in images[train]})
    if len(depths[train]) > 1 or len({folder.name for folder in folders}) < 2:
        raise SettingError(
            "it must have a folder of images for each of two classes or more, or a metadata.csv "
            f"beside the images, with the columns {_COLUMNS}, but has training images in "
            f"{' and '.join(map(str, dict.fromkeys((folders[0], folders[-1]))))}"
        )
    labelled = [name for name in images if depths[name] == depths[train]]
    for name in images:
        if name not in labelled:
            logger.warning("split %r of %r has no labels and is left out", str(name), path)
            continue
        folder = images[name][0].parent.parent
        used = {file.parent.name for file in images[name]}
        there = {entry.name for entry in folder.iterdir() if entry.is_dir()}
        if empty := {class_ for class_ in there - used if class_[0] not in "._"}:
            logger.warning("class folders of %s without an image: %s", folder, listed(empty))
    return labelled


def _check_metadata(files: Iterable[Path]) -> None:
    """Raise ``SettingError`` for a metadata.csv whose first row names no image next to it."""
    for file in files:
        if file.name != "metadata.csv":
            continue
        with file.open(newline="", encoding="utf-8-sig", errors="replace") as text:
            row = next(csv.DictReader(text), {})
        names = [value for column, value in row.items() if str(column).endswith("file_name")]
        if not all(name and (file.parent / name).is_file() for name in names or [""]):
            raise SettingError(
                f"{file} must begin with the line {_COLUMNS} and name a file in each row, such as "
                f"1.jpg,cat; got {','.join(map(str, row))} and {','.join(map(str, row.values()))}"
            )


def listed(names: Iterable[str]) -> str:
    """Return names for a message, the first five of them."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
