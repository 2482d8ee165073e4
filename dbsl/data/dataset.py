"""A Hugging Face dataset as training and evaluation images: columns, classes, splits, subsets."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import sys
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dbsl.base.cores import cores_of_process
from dbsl.base.lazy import lazy_import
from dbsl.base.network import hub_or_cache
from dbsl.base.seeds import generator
from dbsl.data.folders import hint_on_tables, is_image_folder, listed, read_class_folders
from dbsl.data.images import ImageLoader, ImageSource, ImageSplit, PixelStore, check_bad
from dbsl.plan.dual_batch import largest_remainder

datasets, timm = lazy_import("datasets"), lazy_import("timm")
logger = logging.getLogger(__name__)

_EVAL_SPLITS = ("validation", "valid", "val", "dev", "test", "eval")
_LABEL_COLUMNS = ("labels", "target", "class")  # names to try once there is no "label"
_LABEL_TYPES = ("int", "uint", "string", "large_string", "bool")
_STORE_UP_TO = 64  # pixels; larger images are cheaper to decode when needed than to keep
_CHUNK = 1024  # images decoded or summed at a time
_PROBES = 64  # images per split whose size is looked at before any are decoded
_CACHE_FORMAT = 1
_HUB_ID = re.compile(r"\w[\w.-]*(/[\w.-]*\w)?")  # name or user/name; all else is a path

RGB = tuple[float, float, float]


@dataclass(frozen=True)
class Data:
    """The data that `load_data` found.

    Attributes:
        train: Training samples.
        evaluation: Evaluation samples.
        num_classes: Number of classes; labels lie in [0, num_classes).
        class_names: Their names.
        mean: Channel means of images in [0, 1], for `Transform`.
        std: Channel standard deviations, likewise.
        mirror: Whether a mirrored image keeps its class.
        image_side: Side of the images in pixels if all are squares of one size, else None. Where
            images are not stored, 64 of each split were looked at.
        image_column: Column that the images come from.
        label_column: Column that the labels come from.
        eval_split: Name of the split that `evaluation` comes from, or how it was cut off.
    """

    train: ImageSource
    evaluation: ImageSource
    num_classes: int
    class_names: tuple[str, ...]
    mean: RGB
    std: RGB
    mirror: bool
    image_side: int | None
    image_column: str
    label_column: str
    eval_split: str


def load_data(
    dataset: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    train_samples: int | None = None,
    eval_samples: int | None = None,
    holdout: float | None = None,
    seed: int = 0,
    loader_workers: int | None = None,
    device: torch.device | str = "cpu",
    max_bad_images: int = 0,
    max_store_bytes: int = 2 * 2**30,
) -> Data:
    """Open a dataset and make its training and evaluation samples readable by number.

    Images that are squares of one size up to 64 px are decoded at once and kept on the device; the
    decoded pixels are cached beside the dataset in `datasets.config.HF_DATASETS_CACHE`. Others are
    decoded by loader processes as they are needed.

    Args:
        dataset: ``digits`` (scikit-learn's, no network), a folder (parquet files, one folder of
            images per class, or written by `save_to_disk`), a parquet file or a hub id.
        image_column: Column of images; may be left out where there is one.
        label_column: Column of classes; unset: ``label``, or the ClassLabel with most classes.
        train_samples: Size of a stratified subset to train on; unset: all.
        eval_samples: Size of a stratified subset to evaluate on; unset: all.
        holdout: Share of the training images, in (0, 1), to evaluate on in place of the evaluation
            split; `train_samples` are chosen from the rest. Unset: a fifth, where there is no
            evaluation split. Settings tuned on held-out images leave the test images unseen.
        seed: Seed of the subsets and of what is held out.
        loader_workers: Loader processes per split; 0 decodes in this process; unset: this
            process's part of the cores, at most 8.
        device: Where batches are made.
        max_bad_images: Most images of a split that may be left out since they cannot be decoded.
        max_store_bytes: Most bytes of decoded pixels to keep.

    Raises:
        ValueError: If the dataset, a column, a label or a number of samples is not to be had.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    device = torch.device(device)
    train, evaluation, class_names = _open_labelled(dataset, image_column, label_column)
    eval_split = evaluation.name if evaluation else "a fifth of train"
    if holdout is not None:
        evaluation, eval_split = None, f"{holdout:.3g} of train, held out"
    if evaluation is None:
        share = 0.2 if holdout is None else holdout
        train, evaluation = _hold_out(train, share, generator(seed, "evaluation split"))
    train = _subset(train, "train_samples", train_samples, generator(seed, "train samples"))
    evaluation = _subset(evaluation, "eval_samples", eval_samples, generator(seed, "eval samples"))

    side = _common_side((train, evaluation))
    decoded = _decode_splits((train, evaluation), side, max_store_bytes, max_bad_images)
    if decoded:
        sources = [
            PixelStore(pixels, split.labels[good], device, bad)
            for (pixels, good, bad), split in zip(decoded, (train, evaluation), strict=True)
        ]
        mean, std = _channel_statistics(decoded[0][0])
    else:
        workers = min(8, cores_of_process()) if loader_workers is None else loader_workers
        sources = [
            ImageLoader(split, device, workers, max_bad_images) for split in (train, evaluation)
        ]
        mean, std = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
    return Data(
        *sources,
        num_classes=len(class_names),
        class_names=class_names,
        mean=mean,
        std=std,
        mirror=dataset != "digits",  # a mirrored digit is another character
        image_side=side,
        image_column=train.image_column,
        label_column=train.label_column,
        eval_split=eval_split,
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


def _open_labelled(
    dataset: str, image_column: str | None, label_column: str | None
) -> tuple[ImageSplit, ImageSplit | None, tuple[str, ...]]:
    """Return train, the evaluation split if one has labels, and the names of the classes."""
    tables = _open_tables(dataset)
    train_name = next(iter(tables)) if len(tables) == 1 else "train"
    if train_name not in tables:
        raise ValueError(f"dataset must have a split 'train' or only one, got {list(tables)}")
    if is_image_folder(dataset, tables):
        tables = read_class_folders(dataset, tables, train_name)
    features = tables[train_name].features
    if not any(isinstance(feature, datasets.Image) for feature in features.values()):
        raise ValueError(
            f"dataset must have a column of images, got columns {_columns(features)}"
            f"{hint_on_tables(dataset)}"
        )
    image_column = _choose_image_column(features, image_column)
    label_column = _choose_label_column(features, label_column)

    def split(name: str, labels: np.ndarray) -> ImageSplit:
        table = tables[name].select_columns([image_column])
        table = table.cast_column(image_column, datasets.Image(decode=False))
        rows = np.arange(len(table))
        return ImageSplit(table, rows, labels, image_column, label_column, dataset, name)

    values = _read_labels(tables[train_name], label_column)
    if values is None:
        raise ValueError(
            f"label_column must have a label in every row, got {label_column!r} with null or -1 "
            f"in split {train_name!r}"
        )
    feature = features[label_column]
    is_encoded = isinstance(feature, datasets.ClassLabel)
    classes = np.arange(feature.num_classes) if is_encoded else np.unique(values)
    class_names = feature.names if is_encoded else [str(value) for value in classes]
    train = split(train_name, _encode(values, classes, train_name))
    if unused := set(class_names) - {class_names[label] for label in np.unique(train.labels)}:
        logger.warning("classes of %r without a training image: %s", dataset, listed(unused))
    for name in _EVAL_SPLITS:
        if name == train_name or name not in tables:
            continue
        values = _read_labels(tables[name], label_column)
        if values is None:
            logger.warning("split %r of %r has no labels and is left out", name, dataset)
            continue
        if is_encoded and not np.isin(values, train.labels).any():  # test/unknown/*.jpg, say
            logger.warning("split %r of %r has no training class and is left out", name, dataset)
            continue
        if tables[name].features[label_column] != feature:
            raise ValueError(
                f"label_column must be of one type in all splits, got {label_column!r}, whose type "
                f"or classes in split {name!r} are not those in {train_name!r}"
            )
        return train, split(name, _encode(values, classes, name)), tuple(class_names)
    return train, None, tuple(class_names)


def _open_tables(dataset: str) -> dict[str, datasets.Dataset]:
    """Return the splits that have rows. Code that comes with a dataset is never run."""
    if dataset == "digits":
        return {"train": _digits()}
    path = Path(dataset).expanduser()
    kind = "file" if path.suffix == ".parquet" else "folder"
    try:
        if not path.exists() and (kind == "file" or not _HUB_ID.fullmatch(dataset)):
            raise FileNotFoundError(f"the {kind} does not exist")
        if kind == "file":
            found = datasets.load_dataset("parquet", data_files=str(path))
        elif any((path / name).exists() for name in ("dataset_dict.json", "state.json")):
            _check_saved(path)
            found = datasets.load_from_disk(path)
        elif path.exists():
            found = datasets.load_dataset(str(path))
        else:
            found = _load_from_hub(dataset)
        if isinstance(found, datasets.Dataset):
            found = {"train": found}
        tables = {name: table.with_format(None) for name, table in found.items() if len(table)}
        if not tables:
            raise ValueError("it has no rows")
    except Exception as error:  # no network, no such name, a broken file: datasets raises all kinds
        reason = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ValueError(
            "dataset must be 'digits', a folder, a parquet file or a hub id that can be reached, "
            f"got {dataset!r} ({reason})"
        ) from error
    return tables


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
                raise ValueError(f"its data files must lie inside the folder, got {file}")


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
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if chosen is None and len(images) == 1:
        return images[0]
    if chosen not in images:
        raise ValueError(f"image_column must be one of {images}, got {chosen!r}")
    return chosen


def _choose_label_column(features: datasets.Features, chosen: str | None) -> str:
    sizes = {}  # classes of each column that may hold labels; 0: not known from its type
    for name, feature in features.items():
        if isinstance(feature, datasets.ClassLabel):
            sizes[name] = feature.num_classes
        elif isinstance(feature, datasets.Value) and feature.dtype.startswith(_LABEL_TYPES):
            sizes[name] = 0
    if not sizes:
        raise ValueError(
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
        kind = f" of {features[chosen].dtype}" if chosen in features else ""
        raise ValueError(f"label_column must be one of {list(sizes)}, got {chosen!r}{kind}")
    return chosen


def _columns(features: datasets.Features) -> str:
    return ", ".join(f"{name!r} ({feature.dtype})" for name, feature in features.items())


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


def _encode(values: np.ndarray, classes: np.ndarray, split: str) -> np.ndarray:
    """Return the place of each value among the sorted classes, int64."""
    labels = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    unknown = values[classes[labels] != values]
    if len(unknown):
        raise ValueError(
            f"labels of split {split!r} must be among the {len(classes)} classes of the training "
            f"split, got {unknown.tolist()[0]!r}"
        )
    return labels.astype(np.int64)


def _hold_out(
    train: ImageSplit, share: float, rng: np.random.Generator
) -> tuple[ImageSplit, ImageSplit]:
    """Cut a stratified share, rounded up, off train; return both."""
    if len(train) < 2:
        raise ValueError(f"dataset must have 2 images or more to hold some out, got {len(train)}")
    size = min(math.ceil(round(share * len(train), 6)), len(train) - 1)
    held_out = stratified_subset(train.labels, size, rng)
    return train.select(np.delete(np.arange(len(train)), held_out)), train.select(held_out)


def _subset(
    split: ImageSplit, setting: str, size: int | None, rng: np.random.Generator
) -> ImageSplit:
    if size is None:
        return split
    if not 1 <= size <= len(split):
        raise ValueError(f"{setting} must be in [1, {len(split)}], got {size}")
    return split.select(stratified_subset(split.labels, size, rng))


def _common_side(splits: Iterable[ImageSplit]) -> int | None:
    """Return the side that the images looked at have in common, if they are squares."""
    sizes = set()
    for split in splits:
        probes = np.unique(np.linspace(0, len(split) - 1, _PROBES).astype(np.int64))
        images = split.decode(probes)
        sizes.update(image.size for image in images if not isinstance(image, str))
    if len(sizes) != 1:
        return None
    ((width, height),) = sizes
    return width if width == height else None


_Decoded = tuple[np.ndarray, np.ndarray, dict[int, str]]  # pixels, their samples, bad rows


def _decode_splits(
    splits: Sequence[ImageSplit], side: int | None, max_bytes: int, max_bad: int
) -> list[_Decoded] | None:
    """Return each split's pixels, uint8 [N, S, S, 3], or None if they are not for a store."""
    if side is None or side > _STORE_UP_TO:
        return None
    if sum(len(split) for split in splits) * side * side * 3 > max_bytes:
        return None
    found = []
    for split in splits:
        decoded = _decode_cached(split, side, max_bad)
        if decoded is None:
            return None
        found.append(decoded)
    return found


def _decode_cached(split: ImageSplit, side: int, max_bad: int) -> _Decoded | None:
    """Return a split's pixels, read from the cache if possible; None if an image has another size.

    On the CPU, processes that read the cache share its memory.
    """
    cache, shape = _cache_file(split), (len(split), side, side, 3)
    everything = np.arange(len(split))
    with contextlib.suppress(Exception):  # no file, or one whose header is damaged in some way
        pixels = np.load(cache, mmap_mode="c", allow_pickle=False)
        if pixels.shape == shape and pixels.dtype == np.uint8:
            return pixels, everything, {}
    pixels, bad = np.empty(shape, np.uint8), {}
    for start in range(0, len(split), _CHUNK):
        samples = np.arange(start, min(start + _CHUNK, len(split)))
        for sample, image in zip(samples, split.decode(samples), strict=True):
            if isinstance(image, str):
                bad[int(sample)] = image
            elif image.size != (side, side):
                return None
            else:
                pixels[sample] = image
    if not bad:
        _write_cache(cache, pixels)
        return pixels, everything, {}
    rows = {int(split.rows[sample]): reason for sample, reason in bad.items()}
    check_bad(rows, max_bad, split)
    for row, reason in rows.items():
        logger.warning("left out: %s", split.describe_bad(row, reason))
    good = np.delete(everything, list(bad))
    return pixels[good], good, rows


def _cache_file(split: ImageSplit) -> Path:
    """Return where a split's pixels belong: the name is a hash of all that they depend on."""
    files = [Path(file["filename"]).stat() for file in split.table.cache_files]
    content = (
        _CACHE_FORMAT,
        split.table._fingerprint,  # changes with the way the rows were made
        [(file.st_size, file.st_mtime_ns) for file in files],  # a folder may be saved anew
        split.image_column,
    )
    digest = hashlib.sha256(repr(content).encode() + split.rows.tobytes()).hexdigest()
    return Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / f"pixels-{digest[:32]}.npy"


def _write_cache(path: Path, pixels: np.ndarray) -> None:
    """Write the pixels, if they can be written; another process may be doing the same."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            np.save(file, pixels, allow_pickle=False)
        temporary.replace(path)
    except OSError as error:
        logger.warning("decoded images are not cached (%s)", error)
        with contextlib.suppress(OSError):
            temporary.unlink()


def _channel_statistics(pixels: np.ndarray) -> tuple[RGB, RGB]:
    """Return mean and standard deviation of each channel, of pixels scaled to [0, 1]."""
    total, squares = torch.zeros(2, 3, dtype=torch.float64)  # sums of integers, hence exact
    for start in range(0, len(pixels), _CHUNK):
        values = torch.from_numpy(pixels[start : start + _CHUNK]).double()
        total += values.sum((0, 1, 2))
        squares += values.square_().sum((0, 1, 2))
    count = pixels.size // 3
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt() / 255
    return tuple((mean / 255).tolist()), tuple(std.clamp(min=1e-3).tolist())
