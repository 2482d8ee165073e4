"""A local folder of image files: the classes that its folders name, and what it lacks."""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import

datasets = lazy_import("datasets")
logger = logging.getLogger(__name__)

_COLUMNS = "file_name,label"
_TABLE = f"a metadata.csv beside the images, with the columns {_COLUMNS}"


def is_image_folder(dataset: str, tables: Mapping[str, datasets.Dataset]) -> bool:
    """Whether the splits are image files of a folder, whose class folders would be their labels."""
    return Path(dataset).expanduser().is_dir() and all(
        set(table.features) <= {"image", "label"}
        and isinstance(table.features.get("label"), datasets.ClassLabel | None)
        and _files(table.select([0]))
        for table in tables.values()
    )


def read_class_folders(
    dataset: str, tables: dict[str, datasets.Dataset], train: str
) -> dict[str, datasets.Dataset]:
    """Return the splits of a folder of images; some splits may have no class folders.

    `datasets` gives no split a label where one lies less deep than the others, as the unlabelled
    ``test/`` of a competition does. The splits as deep as `train` are then read by themselves.

    Raises:
        SettingError: If the training images do not lie in two class folders or more.
    """
    path = Path(dataset).expanduser()
    depth = {name: len(_files(table.select([0]))[0].parts) for name, table in tables.items()}
    labelled = [name for name in tables if depth[name] == depth[train]]
    if "label" not in tables[train].features and len(labelled) < len(tables):
        patterns = datasets.data_files.get_data_patterns(str(path))
        found = datasets.load_dataset(str(path), data_files={n: patterns[n] for n in labelled})
        tables = tables | {name: table.with_format(None) for name, table in found.items()}
    if "label" not in tables[train].features or None in tables[train].unique("label"):
        raise SettingError(
            f"dataset must have a folder of images for each of two classes or more, or {_TABLE}; "
            f"got {_place(_files(tables[train]))}{hint_on_tables(dataset)}"
        )
    for name in labelled:
        folder = _files(tables[name].select([0]))[0].parent.parent
        labels = tables[name].features["label"]
        used = {labels.int2str(label) for label in tables[name].unique("label")}
        there = {entry.name for entry in folder.iterdir() if entry.is_dir()}
        if empty := {class_ for class_ in there - used if class_[0] not in "._"}:
            logger.warning("class folders of %s without an image: %s", folder, listed(empty))
    return tables


def check_metadata(files: Iterable[Path]) -> None:
    """Raise ``SettingError`` for a metadata.csv whose first row names no image beside it."""
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


def warn_of_rows(
    files: Mapping[str, Iterable[str]], rows: Mapping[str, int], endings: Sequence[str]
) -> None:
    """Warn of images that no metadata.csv names, which `datasets` leaves out.

    Args:
        files: Those of each split.
        rows: How many rows `datasets` has found for each split.
        endings: Those of images.
    """
    for split, count in rows.items():
        images = sum(file.lower().endswith(tuple(endings)) for file in files[split])
        if images > count:
            logger.warning(
                "images of split %r without a row in a metadata.csv are left out: %d of %d",
                str(split),
                images - count,
                images,
            )


def hint_on_tables(dataset: str) -> str:
    """Return which CSV file of a local folder was not read as labels, and how it would be."""
    folder = Path(dataset).expanduser()
    files = sorted(folder.rglob("*")) if folder.is_dir() else []
    # Others, such as sample_submission.csv and test/, have no labels.
    files.sort(key=lambda file: not re.search("train|label", str(file.relative_to(folder))))
    endings = Image.registered_extensions()
    image = next((file for file in files if file.suffix.lower() in endings), None)
    target = image and image.with_name("metadata.csv")
    table = next((file for file in files if file.suffix == ".csv" and file != target), None)
    if not (image and table):
        return ""
    return (
        f"; {table} is not read: move it to {target}, with the first line {_COLUMNS} and rows such "
        f"as {image.name},cat"
    )


def listed(names: Iterable[str]) -> str:
    """Return names for a message, the first five of them."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _files(table: datasets.Dataset) -> list[Path]:
    """Return the files of a table of images; none, where it has the images themselves."""
    if "image" not in table.features:
        return []
    rows = table.select_columns(["image"]).cast_column("image", datasets.Image(decode=False))
    return [
        Path(row["path"]) for row in rows[:]["image"] if row and row["path"] and not row["bytes"]
    ]


def _place(files: list[Path]) -> str:
    folders = sorted({file.parent for file in files})
    if len(folders) == 1:
        return f"all training images in {folders[0]}"
    return f"training images in {folders[0]} and {folders[-1]}"
