"""A folder of images as tables: classes from folders, or from label lists beside the images."""

from __future__ import annotations

import csv
import json
import logging
import os
import posixpath
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from pathlib import Path

from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.machine import lazy_import

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
logger = logging.getLogger(__name__)

LABEL_COLUMNS = ("label", "labels", "target", "class", "cls")  # usual names of label columns
_LISTS = ("metadata.csv", "metadata.tsv", "metadata.jsonl", "metadata.parquet")
_COLUMNS = "file_name,label"  # the first line of a metadata.csv
_TABLES = {".parquet", ".arrow", ".tar"}  # `datasets` reads them and their images
_TEXTS = {".csv", ".tsv", ".json", ".jsonl"}
_ARCHIVES = {".zip", ".rar", ".7z", ".tgz", ".gz", ".bz2", ".xz"}
_HINTS = dict.fromkeys((".heic", ".heif"), " (pip install pillow-heif reads them)")
_HIDDEN = re.compile(r"\.|__MACOSX$|@eaDir$")  # what systems add beside users' files
_NO_UTF8 = re.compile("[\ud800-\udfff]")  # how Python represents such bytes of names
_NO_PIXELS = {"BUFR", "GRIB", "HDF5", "MPEG", "PDF"}  # Pillow knows these and decodes none
_INTEGER, _NUMBER = re.compile(r"-?(0|[1-9]\d*)"), re.compile(r"-?\d*\.?\d+([eE]-?\d+)?")
_WORDS = {  # of each split, with no letter beside them
    split: re.compile(rf"(?<![^\W\d_])({words})(set|data|images)?(?![^\W\d_])", re.IGNORECASE)
    for split, words in (
        ("train", r"train(ing)?|fold\d+"),
        ("validation", "val|valid|validation|dev"),
        ("test", "test|testing|eval|evaluation"),
    )
}
_NO_CLASS = "images without a class"
Left = list[tuple[str, str]]  # left out: the kind, and the file, relative to the folder
Row = tuple[str, str | None]  # label of an image, '': none; its split, None: not given, '': unknown


@cache
def split_of(name: str) -> str | None:
    """Return the split that one of a name's words means, in any case."""
    return next((split for split, words in _WORDS.items() if words.search(name)), None)


@cache
def _endings() -> frozenset[str]:
    """Return the endings of files that Pillow decodes."""
    Image.preinit()  # common formats are loaded first, and tried first on each file
    known = Image.registered_extensions()  # this loads all of Pillow's formats, too
    return frozenset(e for e, kind in known.items() if kind in {*Image.OPEN} - _NO_PIXELS)


def files_below(folder: str, left: Left) -> list[str]:
    """Return the files at any depth in a folder, relative to it, sorted.

    Links are followed, but not in circles. Hidden and system files are skipped.
    """
    found, folders = [], [(folder, os.path.realpath(folder))]
    while folders:
        path, real = folders.pop()
        entries = [entry for entry in os.scandir(path) if not _HIDDEN.match(entry.name)]
        if not entries:
            left.append(("empty folders", path[len(folder) + 1 :] + "/"))
        for entry in entries:
            name = entry.path[len(folder) + 1 :].replace(os.sep, "/")
            if os.path.isdir(entry.path):
                inner = os.path.realpath(entry.path)
                if not os.path.join(real, "").startswith(os.path.join(inner, "")):
                    folders.append((entry.path, inner))
            elif not os.path.isfile(entry.path):  # also a link to itself, for which `entry` raises
                left.append(("links to nothing", name))
            elif _NO_UTF8.search(name):
                left.append(("files whose names are not UTF-8", name))
            else:
                found.append(name)
    return sorted(found)


def read_folder(dataset: Path, label_column: str | None) -> dict[str, datasets.Dataset] | None:
    """Return the splits of a folder of images, or None if it is a folder of another kind.

    The class of an image is the path of its folder below the split, without the part that all
    classes share. Labels from a list beside or above the images win. One line counts files left
    out.
    """
    folder, left = os.path.abspath(dataset), []
    files = files_below(folder, left)
    images = dict.fromkeys(file for file in files if _is_image(f"{folder}/{file}"))
    others = [file for file in files if file not in images]
    lists = [file for file in others if images and posixpath.basename(file).lower() in _LISTS]
    for file in others:
        ending = _ending(file)
        kind = f"{ending} files" if ending else "files without an ending"
        left += [] if file in lists else [(kind + _HINTS.get(ending, ""), file)]
    columns, column, rows = _read_lists(folder, lists, label_column, images, left)
    used = lists if column else []
    listed = tuple(file[: -len(posixpath.basename(file))] for file in used)  # their folders
    places = _places(folder, {posixpath.dirname(file) for file in images}, used)
    found: dict[str, dict[str, str]] = {"train": {}}  # class of each file of a split
    for file in images:
        label, place = places[posixpath.dirname(file)]
        if file.startswith(listed) and file not in rows:
            left.append(("images without a row in a list", file))
            continue
        label, split = rows.get(file, (label, None))
        split = place if split is None else split
        if label and split:
            # Systems write ä as one character or two.
            label = unicodedata.normalize("NFC", label).strip()
            found.setdefault(split, {})[file] = label
        else:
            left.append(("images in no split" if label else _NO_CLASS, file))
    classes = {*found["train"].values()}
    if len(classes) < 2:
        return _other_kind(folder, images, others, left, columns)
    for split in [split for split, labels in found.items() if classes.isdisjoint(labels.values())]:
        left += [("images of no training class", file) for file in found.pop(split)]
    if left:
        logger.warning("%s: left out are %s", dataset, _counted(left))
    names = sorted({label for labels in found.values() for label in labels.values()})
    if column and all(map(_INTEGER.fullmatch, names)):
        names.sort(key=int)
    column = column or "label"
    features = {"image": datasets.Image(), column: datasets.ClassLabel(names=names)}
    return {
        split: datasets.Dataset.from_dict(
            {"image": [f"{folder}/{file}" for file in labels], column: [*labels.values()]},
            features=datasets.Features(features),
        )
        for split, labels in found.items()
    }


def _other_kind(
    folder: str, images: Iterable[str], others: Iterable[str], left: Left, columns: Sequence[str]
) -> None:
    """Refuse a folder without classes, unless its files are for `datasets` to read."""
    kinds = {_ending(file): file for file in others}
    if kinds.keys() & _TABLES:
        return
    if packed := kinds.keys() & _ARCHIVES:
        raise SettingError(f"{folder}/{kinds[packed.pop()]} is an archive: unpack it")
    if images or not kinds.keys() & _TEXTS:
        lie = sorted({posixpath.dirname(file) or "its top folder" for file in images})
        where = f"its images lie in {' and '.join({lie[0]: 0, lie[-1]: 0})}" if lie else "no image"
        left = [(kind, file) for kind, file in left if kind != _NO_CLASS]  # these are all of them
        where += f"; left out are {_counted(left)}" if left else ""
        where += f"; its lists have the columns {', '.join(columns)}" if columns else ""
        raise SettingError(
            f"{folder} has no two classes to train on ({where}): put the images of each class into "
            f"a folder of its own, or write a metadata.csv with the columns {_COLUMNS} beside them"
        )


def _places(root: str, folders: Iterable[str], lists: Iterable[str]) -> dict[str, Row]:
    """Return the class and split of each folder's images.

    Folders are splits if all of one level have split names, or if one of the first level is for
    training and some contain folders or a list. Otherwise all images are for training.
    """
    paths, first = [tuple(filter(None, folder.split("/"))) for folder in folders], 0
    while len({path[first] for path in paths if path[first:]}) == 1:
        first += 1
    named = {
        level: {split_of(path[level]) for path in paths if path[level:]}
        for level in range(first, max(map(len, paths), default=0))
    }
    if not {None, "train"} & named.get(first, {None}):
        text = f"{root} has only folders for {' and '.join(sorted(named[first]))}"
        raise SettingError(f"{text}: name the folder to train on train")
    whole = [level for level, words in named.items() if None not in words and "train" in words]
    level = next((level for level in whole if level == first or len(named[level]) > 1), None)
    inside = [path for path in paths if path[first + 1 :]] + [file.split("/") for file in lists]
    parted = any(split_of(path[first]) for path in inside if path[first:])
    if level is None and parted and "train" in named.get(first, ()):
        level = first
    found = {path: ("train", path[first:]) for path in paths}
    if level is not None:
        for path in paths:
            split = split_of(path[level]) if path[level:] else None
            found[path] = split, path[first:level] + path[level + 1 :]
    trained = [own[:-1] for split, own in found.values() if split == "train" and own]
    shared = len(os.path.commonprefix(trained))  # noqa: RUF071 tuples
    return {
        "/".join(path): ("/".join(own[shared:] or own[-1:]), split)
        for path, (split, own) in found.items()
    }


def _read_lists(
    folder: str, lists: Iterable[str], label_column: str | None, images: Collection[str], left: Left
) -> tuple[list[str], str | None, dict[str, Row]]:
    """Return the columns, the label column (None: none), and each image's label and split."""
    tables = {name: _rows_of(f"{folder}/{name}") for name in lists}
    columns = list(dict.fromkeys(c for rows in tables.values() for row in rows for c in row))
    wanted = LABEL_COLUMNS if label_column is None else (label_column,)
    column = next((name for name in wanted if name in columns), None)
    if column is None and tables and label_column not in (None, "label"):
        where = f"{folder}/{next(iter(tables))}"
        text = f"{where} has no column {label_column!r}, but {', '.join(columns)}"
        raise SettingError(f"{text}: name one of them by --label-column")
    names = {unicodedata.normalize("NFC", file): file for file in images}
    found: dict[str, Row] = {}
    for name, rows in tables.items() if column else ():
        named = False
        for row in rows:
            file = posixpath.join(posixpath.dirname(name), row.get("file_name", ""))
            file, split = posixpath.normpath(file.replace("\\", "/")), row.get("split", "")
            file = names.get(unicodedata.normalize("NFC", file))
            value = row.get(column, ""), split_of(split) or ("" if split else None)
            named |= file is not None
            if file is None:
                left.append(("rows that name no image", name))
            elif file not in found:
                found[file] = value
            elif found[file] == value:
                left.append(("rows that repeat another", name))
            else:
                both = " and ".join(",".join(filter(None, v)) for v in (found[file], value))
                text = f"{folder}/{name} has {row['file_name']} as {both}"
                raise SettingError(f"{text}: leave one of these rows in it")
        if not named:
            row = next(iter(rows), {})
            raise SettingError(
                f"{folder}/{name} names no image of its folder ({','.join(row)} and "
                f"{','.join(row.values())}): begin with the line {_COLUMNS} and name a file in "
                "each row, such as 1.jpg,cat"
            )
    labels = {label for label, _ in found.values() if label}
    odd = [label for label in labels if label.startswith("[")]
    if all(map(_NUMBER.fullmatch, labels)):
        odd = [label for label in labels if not float(label).is_integer()]
    if odd:
        raise SettingError(
            f"{folder} has lists or fractions for labels, such as {min(odd)} in column {column!r}: "
            "make one whole number or text of each, or name another column by --label-column"
        )
    return columns, column, found


def _rows_of(path: str) -> list[dict[str, str]]:
    """Return the rows of a list, each value as written, without blanks around it."""
    try:
        if path.endswith(".parquet"):
            rows = parquet.read_table(path).to_pylist()
        else:
            lines = Path(path).read_text("utf-8-sig").split("\n")
            delimiter = max(",;\t", key=lines[0].count)
            rows = csv.DictReader(lines, delimiter=delimiter, restval="")
            if path.endswith(".jsonl"):
                rows = [dict(json.loads(line)) for line in lines if line.strip()]
        return [{c.strip(): _text(value) for c, value in row.items() if c} for row in rows]
    except (TypeError, ValueError, csv.Error) as error:
        text = f"{path} cannot be read ({error}): save it as UTF-8, a row a line"
        raise SettingError(text) from None


def _text(value: object) -> str:
    if value is None:
        return ""
    return value.strip() if isinstance(value, str) else json.dumps(value)


def _is_image(path: str) -> bool:
    """Whether a file is an image, by its ending or, without one, its first bytes."""
    if ending := _ending(path):
        return ending in _endings()
    try:
        with Image.open(path) as image:
            return image.format not in _NO_PIXELS
    except Exception:  # Pillow raises OSError, SyntaxError and more
        return False


def _ending(path: str) -> str:
    return posixpath.splitext(path)[1].lower()


def _counted(left: Left) -> str:
    """Return how many of each kind are left out, most first, each with its most common folder."""
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for kind, file in sorted(left):
        kinds[kind][posixpath.dirname(file) or "the top folder"] += 1
    texts = []
    for kind, folders in sorted(kinds.items(), key=lambda item: -item[1].total()):
        ((folder, most),) = folders.most_common(1)
        texts.append(f"{folders.total()} {kind}, {most} in {folder}")
    return "; ".join(texts)
