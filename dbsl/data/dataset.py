"""Labelled images as training and evaluation data: tables, columns, classes, splits, subsets."""

from __future__ import annotations

import csv
import glob
import hashlib
import itertools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

import numpy as np
import torch
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.machine import cores_of_process, hub_or_cache, lazy_import
from dbsl.base.seeds import generator
from dbsl.config.fields import refuse
from dbsl.config.hooks import Extra, Extras
from dbsl.config.image_settings import Augment, ImageConfig, Interpolation
from dbsl.data.images import Decoded, ImageLoader, ImageSplit, PixelStore, decode_cached
from dbsl.data.sources import Batch, image_batch
from dbsl.data.transforms import EVAL_CROP, Means, Transform
from dbsl.plan.solve import largest_remainder
from dbsl.plan.stages import default_resolutions

datasets, parquet = lazy_import("datasets"), lazy_import("pyarrow.parquet")
pandas, timm = lazy_import("pandas"), lazy_import("timm")
logger = logging.getLogger(__name__)

_STORE_UP_TO = 64  # pixels; larger images are cheaper to decode when needed than to keep
_CHUNK = 1024  # images summed at a time
STORE_BYTES = 2 * 2**30  # most bytes of decoded pixels that are kept
_PROBES = 64  # images per split whose size is looked at before any are decoded
EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_COLUMNS = ("label", "labels", "target", "class")  # all but the first: without ClassLabel
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
_COLUMNS = "file_name,label"  # the first line of a metadata.csv
_HIDDEN = re.compile(r"\.|__")  # how names of folders begin that `datasets` leaves out
Splits = tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]  # train, evaluation, class names
HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # a name or user/name; all else is a path


class Statistics(NamedTuple):
    """Means and deviations of the channels of images in [0, 1], and in words whose they are."""

    mean: Means
    std: Means
    source: str

    def unless_given(self, config: ImageConfig) -> Statistics:
        """Return those that the settings give, else these."""
        given = {n: v for n, v in config.preprocessing.items() if n in ("mean", "std")}
        if not given:
            return self
        rest = f", the rest {self.source}" if len(given) == 1 else ""
        return self._replace(source=f"by --preprocess {' and '.join(given)}{rest}", **given)


@dataclass(frozen=True)
class Data:
    """The images that `load_data` found."""

    config: ImageConfig
    train: PixelStore | ImageLoader
    evaluation: PixelStore | ImageLoader
    class_names: tuple[str, ...]
    statistics: Statistics  # what images are normalised by
    mirror: bool  # whether a mirrored image keeps its class
    # Side of the images in pixels if all are squares of one size, else None. Where images are not
    # stored, 64 of each split were looked at.
    image_side: int | None
    eval_split: str  # name of the split that `evaluation` comes from, or how it was cut off
    held_out: str  # what tells which training images the seed drew for it; empty: none
    crop_pct: float  # side of the centre crop of evaluation images over their shorter side
    unit: ClassVar[str] = "image"

    @property
    def num_classes(self) -> int:
        """Labels lie in [0, num_classes)."""
        return len(self.class_names)

    @property
    def mean(self) -> Means:
        """Channel means."""
        return self.statistics.mean

    @property
    def std(self) -> Means:
        """Channel standard deviations."""
        return self.statistics.std

    @property
    def interpolation(self) -> Interpolation:
        """How evaluation images are resized."""
        return self.config.preprocessing.get("interpolation", "bilinear")

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Resolutions of the stages where none are given."""
        return default_resolutions(self.image_side)

    def transform(self, resolution: int, augment: Augment, seed: int) -> Transform:
        """Return what images pass at a resolution."""
        look = (self.mirror, self.mean, self.std, seed, self.crop_pct, self.interpolation)
        return Transform(resolution, augment, *look, self.config.aa)

    def normalised_for(self, model: Any) -> Data:
        """Return the data normalised as a model's pretrained weights want it, if it has some."""
        statistics = getattr(model, "input_statistics", None)
        return self.normalised_as(statistics) if statistics else self

    def normalised_as(self, statistics: Statistics) -> Data:
        """Return the data normalised as weights want it, but for what the settings give."""
        return replace(self, statistics=statistics.unless_given(self.config))

    def resized_as(self, crop_pct: float, interpolation: str) -> Data:
        """Return the data resized as weights want it, but for what the settings give.

        A crop of more than the image is the whole image; what is no interpolation here is left out.
        """
        config, given = self.config, self.config.preprocessing
        if "interpolation" not in given and interpolation in get_args(Interpolation):
            pairs = (*config.preprocess, f"interpolation={interpolation}")
            config = replace(config, preprocess=pairs)
        return replace(self, crop_pct=given.get("crop_pct", min(crop_pct, 1.0)), config=config)

    @property
    def normalisation(self) -> str:
        """By what images are normalised, in words."""
        shown = ([f"{value:.3f}" for value in values] for values in (self.mean, self.std))
        mean, std = (", ".join(v[:1] if len({*v}) == 1 else v) for v in shown)
        return f"images normalised by mean {mean} and std {std}, {self.statistics.source}"

    def example(self, size: int, resolution: int) -> Batch:
        """Return a batch of random images on the device."""
        return image_batch(size, resolution, self.num_classes, self.train.device)


def load_data(
    config: ImageConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    only_evaluate: bool = False,
) -> Data:
    """Open a dataset and make its training and evaluation samples readable by number.

    Images that are squares of one size up to 64 px are decoded at once and kept on the device; the
    decoded pixels are cached in `datasets.config.HF_DATASETS_CACHE`. Others are decoded by loader
    processes as they are needed. The seed is that of subsets and of what is held out. Of data that
    are there `only_evaluate`, without a split for it, all images count.
    """
    device = torch.device(device)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    streams = Extras.of(config).first(Extra.data, config)
    train, evaluation, class_names = (streams.open if streams else open_labelled)(config)
    if only_evaluate and evaluation is None:
        evaluation = train
    train, evaluation, eval_split, held_out = _cut(train, evaluation, config, seed)
    if unmet := {class_names[label] for label in np.setdiff1d(train.labels, evaluation.labels)}:
        logger.warning("classes without an evaluation image: %s", listed(unmet))
    splits = (train, evaluation)
    side = _common_side(splits)
    decoded = None  # each split's pixels, uint8 [N, S, S, 3], where they are for a store
    size = 3 * (side or 0) ** 2 * sum(map(len, splits))  # bytes
    if not streams and 0 < size <= STORE_BYTES and side <= _STORE_UP_TO:
        found = [decode_cached(split, side, config.max_bad_images) for split in splits]
        decoded = None if None in found else found
    workers = config.loader_workers
    workers = min(8, cores_of_process()) if workers is None else workers
    load = streams.source if streams else ImageLoader

    def source(split: ImageSplit, found: Decoded | None, keeps: bool) -> PixelStore | ImageLoader:
        if found is None:
            return load(split, device, workers, config.max_bad_images)
        pixels, split, bad = found
        if keeps:
            tensors = (torch.from_numpy(array).to(device) for array in (pixels, split.labels))
            return PixelStore(*tensors, bad)
        return ImageLoader(split, device, workers, config.max_bad_images, bad)

    keeps = (config.augmentation != "timm", True)  # timm's pipeline runs in loader processes
    crop_pct = 1.0 if decoded or (streams and (side or 99) <= _STORE_UP_TO) else EVAL_CROP
    return Data(
        config,
        *map(source, splits, decoded or (None, None), keeps),
        class_names=class_names,
        statistics=_channel_statistics(decoded and decoded[0][0]).unless_given(config),
        mirror=config.dataset != "digits",  # a mirrored digit is another character
        image_side=side,
        eval_split=eval_split,
        held_out=held_out,
        crop_pct=config.preprocessing.get("crop_pct", crop_pct),
    )


def stratified_subset(labels: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` sample numbers, ascending int64, that keep the classes' shares.

    Each class gets its share rounded down; what is left goes to the largest remainders, of equal
    ones to the smaller label.
    """
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    quotas = largest_remainder(counts, size)
    order = rng.permutation(len(labels))
    order = order[np.argsort(classes[order], kind="stable")]  # by class, shuffled within each
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(order[place < np.repeat(quotas, counts)])


def _cut(
    train: ImageSplit, evaluation: ImageSplit | None, config: ImageConfig, seed: int
) -> tuple[ImageSplit, ImageSplit, str, str]:
    """Return what to train on, what to evaluate on, where that comes from, and `Data.held_out`."""
    eval_split, drawn = evaluation.name if evaluation else "a fifth of train", ""
    if config.holdout is not None:
        evaluation, eval_split = None, f"{config.holdout:.3g} of train, held out"
    if evaluation is None:
        text = "dataset must have 2 images or more to hold some out"
        refuse([(len(train) < 2, text, len(train))])
        share = 0.2 if config.holdout is None else config.holdout
        size = min(math.ceil(round(share * len(train), 6)), len(train) - 1)
        rng = generator(seed, "evaluation split")
        held_out = stratified_subset(train.labels, size, rng)
        drawn = hashlib.sha256(f"{len(train)} {held_out.tolist()}".encode()).hexdigest()[:16]
        evaluation = train.select(held_out)
        train = train.select(np.delete(np.arange(len(train)), held_out))

    def subset(split: ImageSplit, kind: str) -> ImageSplit:
        size = getattr(config, f"{kind}_samples")
        if size is None:
            return split
        if not 1 <= size <= len(split):
            raise SettingError(f"{kind}_samples must be in [1, {len(split)}], got {size}")
        rng = generator(seed, f"{kind} samples")
        return split.select(stratified_subset(split.labels, size, rng))

    return subset(train, "train"), subset(evaluation, "eval"), eval_split, drawn


def _common_side(splits: Iterable[ImageSplit]) -> int | None:
    """Return the side that images of the splits have in common, if they are squares."""
    sizes = set()
    for split in splits:
        seen = split.decode(split.spread(_PROBES))
        sizes |= {image.size for image in seen if not isinstance(image, str)}
    width, height = sizes.pop() if len(sizes) == 1 else (None, 0)
    return width if width == height else None


def _channel_statistics(pixels: np.ndarray | None) -> Statistics:
    """Return those of pixels [N, S, S, 3]; of images that are not at hand ImageNet's."""
    if pixels is None:
        constants = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
        return Statistics(*constants, "ImageNet's")
    total, squares = torch.zeros(2, 3, dtype=torch.float64)  # sums of integers, hence exact
    for start in range(0, len(pixels), _CHUNK):
        values = torch.from_numpy(pixels[start : start + _CHUNK]).double()
        total += values.sum((0, 1, 2))
        squares += values.square_().sum((0, 1, 2))
    count = pixels.size // 3
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt() / 255
    means, deviations = (mean / 255).tolist(), std.clamp(min=1e-3).tolist()
    return Statistics(tuple(means), tuple(deviations), "of the training images")


# --- tables: from the hub, a folder, parquet files, or scikit-learn's digits


def open_labelled(config: ImageConfig) -> Splits:
    """Return train, the evaluation split if one has labels, and the names of the classes."""
    dataset = config.dataset
    tables = _open_tables(dataset, config.label_column)
    train_name = next(iter(tables)) if len(tables) == 1 else "train"
    if train_name not in tables:
        raise SettingError(f"dataset must have a split 'train' or only one, got {list(tables)}")
    image_column, label_column = choose_columns(config, tables[train_name].features)
    for name in EVAL_SPLITS:
        if name in tables and image_column not in tables[name].features:
            say_lacks(dataset, name, f"column {image_column!r}")
            del tables[name]

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
    refuse([(not images, "dataset must have a column of images", f"columns {columns}")])
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
    text = "dataset must have a column of labels, whole numbers or text"
    refuse([(not sizes, text, f"columns {columns}")])
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
    shown = f"{label_column!r} with null or -1 in split {train_name!r}"
    refuse([(values is None, "label_column must have a label in every row", shown)])
    feature = tables[train_name].features[label_column]
    is_encoded = isinstance(feature, datasets.ClassLabel)
    classes = np.arange(feature.num_classes) if is_encoded else np.unique(values)
    class_names = feature.names if is_encoded else [str(value) for value in classes]
    shown = f"{class_names[0]!r} alone in column {label_column!r}"
    refuse([(len(class_names) < 2, "dataset must have two classes or more", shown)])
    train = split(train_name, _encode_labels(values, classes, train_name))
    if unused := set(class_names) - {class_names[label] for label in np.unique(train.labels)}:
        logger.warning("classes of %r without a training image: %s", dataset, listed(unused))
    for name in EVAL_SPLITS:
        if name == train_name or name not in tables:
            continue
        values = _read_labels(tables[name], label_column)
        if values is None:
            say_lacks(dataset, name, "labels")
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


def say_lacks(dataset: str, split: str, what: str) -> None:
    """Warn that a split is left out."""
    logger.warning("split %r of %r has no %s and is left out", split, dataset, what)


def _open_tables(dataset: str, label_column: str | None) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    is_file = path.suffix == ".parquet"
    with opening(dataset, "'digits', a folder, a parquet file or a hub id that can be reached"):
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
            found = _read_local("parquet", label_column, data_files=str(path))
        else:
            found = _read_local(str(path), label_column)
        if isinstance(found, datasets.Dataset):
            found = {"train": found}
        tables = {name: table.with_format(None) for name, table in found.items() if len(table)}
        if not tables:
            raise SettingError("it has no rows")
    return tables


@contextmanager
def opening(dataset: str, must: str) -> Iterator[None]:
    """Say in one line why a dataset cannot be opened: what it must be, and what it is."""
    try:
        yield
    except Exception as error:  # no network, no such name, a broken file: libraries raise all kinds
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        why = reason or type(error).__name__
        raise SettingError(f"dataset must be {must}, got {dataset!r} ({why})") from error


def _read_local(path: str, label_column: str | None, **more: str) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows, each with the classes that its parquet files name.

    `datasets` would take those of the first split for all: in another order, their names change.
    """
    builder = datasets.load_dataset_builder(path, **more)
    endings = builder.EXTENSIONS if builder.name == "imagefolder" else ()
    patterns = None
    if endings and not more and (patterns := _patterns_of_splits(path, builder)):
        builder = datasets.load_dataset_builder(path, data_files=patterns)
    files = {name: list(map(Path, found)) for name, found in builder.config.data_files.items()}
    if not more:
        say_left_out(path, [file for found in files.values() for file in found])
    columns = {name: same_classes(_read_columns(found)) for name, found in files.items()}
    images = {
        name: [f for f in found if f.suffix.lower() in endings] for name, found in files.items()
    }
    if all(images.values()):
        names = builder.METADATA_FILENAMES
        described = [file for found in files.values() for file in found if file.name in names]
        _check_metadata(described, {label_column, *_LABEL_COLUMNS})
        if not described and len(labelled := _with_labels(path, images)) < len(images):
            patterns = patterns or datasets.data_files.get_data_patterns(path)
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


def _patterns_of_splits(path: str, builder: Any) -> dict[str, list[str]] | None:
    """Return patterns of each split's files where `datasets` would lose or mix images, else None.

    It takes any file or folder with a split's name in its own for a part of that split, a class
    ``train`` too, and leaves all others out. Here folders at the top are splits, if one is
    ``train`` and has class folders or a metadata.csv; else all images are for training.
    """
    folder, endings = Path(path).expanduser().resolve(), builder.EXTENSIONS
    theirs = {
        str(name): [file for file in files if Path(file).suffix.lower() in endings]
        for name, files in builder.config.data_files.items()
    }
    if not any(theirs.values()) or _has_card(folder):
        return None
    more = [name for name in builder.METADATA_FILENAMES if (folder / name).exists()]
    if splits := _split_folders(folder, builder):
        own = {
            str(name): sorted(itertools.chain(*files.values())) for name, files in splits.items()
        }
        if own == {name: sorted(files) for name, files in theirs.items() if files}:
            return None
        return {
            name: [f"{glob.escape(str(entry.relative_to(folder)))}/**" for entry in entries] + more
            for name, entries in splits.items()
        }
    if sorted(itertools.chain(*theirs.values())) == sorted(files_below(folder, endings)):
        return None
    logger.warning("names in %s make no split: all its images are for training", path)
    return {"train": ["**", *more]}


def _split_folders(folder: Path, builder: Any) -> dict[str, dict[Path, list[str]]]:
    """Return the folders of each split and their images; none if they do not look like splits."""
    finder = datasets.data_files
    while True:
        folders = [e for e in sorted(folder.iterdir()) if e.is_dir() and not _HIDDEN.match(e.name)]
        found = {}
        for name, words in finder.SPLIT_KEYWORDS.items():  # training first, as `datasets` needs it
            if own := [entry for entry in folders if _has_word(entry.name, words, re.IGNORECASE)]:
                found[name] = {entry: files_below(entry, builder.EXTENSIONS) for entry in own}
        if found or len(folders) != 1:
            break
        folder = folders[0]
    with_images = {
        name: kept
        for name, own in found.items()
        if (kept := {entry: files for entry, files in own.items() if files})
    }
    inside = [path for own in with_images.values() for entry in own for path in entry.iterdir()]
    whole = any(path.is_dir() or path.name in builder.METADATA_FILENAMES for path in inside)
    return with_images if whole and "train" in with_images else {}


def _has_word(name: str, words: Iterable[str], flags: int = 0) -> bool:
    end = f"[{datasets.data_files.NON_WORDS_CHARS}]"
    return re.search(rf"(^|{end})({'|'.join(words)})($|{end})", name, flags) is not None


def _has_card(folder: Path) -> bool:
    """Whether a card says which of a folder's files are whose."""
    cards = (folder / name for name in ("README.md", ".huggingface.yaml"))
    return any("configs:" in card.read_text("utf-8", "replace") for card in cards if card.is_file())


def files_below(folder: Path, endings: Collection[str]) -> list[str]:
    """Return the files in a folder that end so; hidden ones are left out, as by `datasets`."""
    found, left = [], [str(folder)]
    while left:
        with suppress(PermissionError), os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir():
                    left += [] if _HIDDEN.match(entry.name) else [entry.path]
                elif os.path.splitext(entry.name)[1].lower() in endings and entry.is_file():
                    found += [] if entry.name.startswith(".") else [entry.path]
    return found


def say_left_out(path: str, files: Iterable[Path | str]) -> None:
    """Warn of parquet files in a folder that are in no split, by their names, or in another."""
    folder, used = Path(path).expanduser().resolve(), {str(file) for file in files}
    ending = [".parquet"]
    if folder.is_dir() and not _has_card(folder) and any(file.endswith(*ending) for file in used):
        left = {Path(file).name for file in files_below(folder, ending) if file not in used}
        if left:
            logger.warning(
                "parquet files of %s without train, test or the like, in lower case, in their "
                "names are left out, "
                "for others have it: %s",
                *(path, listed(left)),
            )
        named = datasets.data_files.SPLIT_KEYWORDS
        words = [word for split in list(named)[1:] for word in named[split]]  # not of training
        own = (os.path.relpath(file, folder) for file in used if file.endswith(*ending))
        names = {name.replace(os.sep, "-") for name in own}  # of folders, too
        upper = {n for n in names if _has_word(n, words, re.IGNORECASE) and not _has_word(n, words)}
        if upper:
            logger.warning(
                "parquet files of %s are for training, as only names in lower case make splits: %s",
                *(path, listed(upper)),
            )


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
            other = names and those and names != those
            text = "all files of a split must have the same classes in the same order"
            refuse([(other, text, f"others in column {column!r} of {file}")])
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
                raise SettingError(f"its data files must be inside the folder, got {file}")


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
            f"next to the images, with the columns {_COLUMNS}, but has training images in "
            f"{' and '.join(map(str, dict.fromkeys((folders[0], folders[-1]))))}"
        )
    labelled = [name for name in images if depths[name] == depths[train]]
    for name in images:
        if name not in labelled:
            say_lacks(path, str(name), "labels")
            continue
        folder = images[name][0].parent.parent
        used = {file.parent.name for file in images[name]}
        there = {entry.name for entry in folder.iterdir() if entry.is_dir()}
        empty = {class_ for class_ in there - used if class_[0] not in "._"}
        links = {class_ for class_ in empty if (folder / class_).is_symlink()}
        unread = {"without an image": empty - links, "that are links, and not followed": links}
        for why, names in unread.items():
            if names:
                logger.warning("class folders of %s %s: %s", folder, why, listed(names))
    return labelled


def _check_metadata(files: Iterable[Path], names_of_labels: Collection[str | None]) -> None:
    """Raise ``SettingError`` for a metadata.csv whose first row names no image next to it.

    Warn of labels that `datasets` reads otherwise than they are written: ``001`` as 1.
    """
    for file in (file for file in files if file.name == "metadata.csv"):
        with file.open(newline="", encoding="utf-8-sig", errors="replace") as text:
            row = next(csv.DictReader(text), {})
        names = [value for column, value in row.items() if str(column).endswith("file_name")]
        if not all(name and (file.parent / name).is_file() for name in names or [""]):
            raise SettingError(
                f"{file} must begin with the line {_COLUMNS} and name a file in each row, such as "
                f"1.jpg,cat; got {','.join(map(str, row))} and {','.join(map(str, row.values()))}"
            )
        written = pandas.read_csv(file, dtype=str, keep_default_na=False)
        for column, read in pandas.read_csv(file, low_memory=False).items():
            words = written[column].str.strip()
            unlike = (read.astype(str) != words) & (words != "")
            if column in names_of_labels and read.dtype.kind not in "fb" and unlike.any():
                first = unlike.idxmax()
                as_ = "missing" if pandas.isna(read[first]) else read[first]
                logger.warning(
                    "%s: %s %r is taken for %s: names with other letters are read as they are",
                    *(file, column, words[first], as_),
                )


def listed(names: Iterable[str]) -> str:
    """Return names for a message, the first five of them."""
    names = sorted(names)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
