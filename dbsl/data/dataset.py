"""A Hugging Face dataset as training and evaluation images: columns, classes, splits, subsets."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.base.machine import cores_of_process, lazy_import
from dbsl.base.seeds import generator
from dbsl.config.settings import (
    SHUFFLE_BLOCK,
    Augment,
    AugmentKwargs,
    EraseKwargs,
    ImageConfig,
    Interpolation,
)
from dbsl.data.images import (
    Decoded,
    ImageLoader,
    ImageSource,
    ImageSplit,
    PixelStore,
    decode_cached,
)
from dbsl.data.sources import Batch, image_batch
from dbsl.data.tables import listed, open_labelled
from dbsl.data.transforms import EVAL_CROP, Transform
from dbsl.extras.streaming.streaming import Streams
from dbsl.plan.solve import largest_remainder
from dbsl.plan.stages import default_resolutions

datasets, timm = lazy_import("datasets"), lazy_import("timm")
logger = logging.getLogger(__name__)

_STORE_UP_TO = 64  # pixels; larger images are cheaper to decode when needed than to keep
_CHUNK = 1024  # images decoded or summed at a time
_PROBES = 64  # images per split whose size is looked at before any are decoded

RGB = tuple[float, float, float]


class Statistics(NamedTuple):
    """Means and deviations of the channels of images in [0, 1], and in words whose they are."""

    mean: RGB
    std: RGB
    source: str


@dataclass(frozen=True)
class Data:
    """The data that `load_data` found.

    Attributes:
        train: Training samples.
        evaluation: Evaluation samples.
        num_classes: Number of classes; labels lie in [0, num_classes).
        class_names: Their names.
        mean: Channel means of images in [0, 1], for `Transform`.
        std: Channel standard deviations of images in [0, 1].
        statistics_source: Whose means and deviations these are, in words.
        mirror: Whether a mirrored image keeps its class.
        image_side: Side of the images in pixels if all are squares of one size, else None. Where
            images are not stored, 64 of each split were looked at.
        image_column: Column that the images come from.
        label_column: Column that the labels come from.
        eval_split: Name of the split that `evaluation` comes from, or how it was cut off.
        crop_pct: Side of the centre crop of evaluation images over their shorter side.
        interpolation: How evaluation images are resized.
        pipeline: How timm augments training images, with augment "timm".
        erasing: Erases parts of training images; None: does not.
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
    crop_pct: float = EVAL_CROP
    interpolation: Interpolation = "bilinear"
    pipeline: AugmentKwargs = field(default_factory=AugmentKwargs)
    erasing: EraseKwargs | None = None
    statistics_source: str = "given"
    unit: ClassVar[str] = "image"

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Resolutions of the stages where none are given."""
        return default_resolutions(self.image_side)

    def transform(self, resolution: int, augment: Augment, seed: int) -> Transform:
        """Return what images pass at a resolution."""
        return Transform(
            resolution,
            augment,
            self.mirror,
            self.mean,
            self.std,
            seed,
            crop_pct=self.crop_pct,
            interpolation=self.interpolation,
            pipeline=self.pipeline,
            erasing=self.erasing,
        )

    def normalised_by(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> Data:
        """Return the data with other channel means and deviations, one or three; None: its own."""
        own = {"mean": mean, "std": std}
        given = {n: tuple(v) * (3 // len(v)) for n, v in own.items() if v is not None}
        rest = f", the rest {self.statistics_source}" if len(given) == 1 else ""
        if given:
            given["statistics_source"] = f"by {' and '.join('--' + name for name in given)}{rest}"
        return replace(self, **given)

    def normalised_as(self, statistics: Statistics) -> Data:
        """Return the data with the channel means and deviations of weights, say."""
        return replace(
            self,
            mean=statistics.mean,
            std=statistics.std,
            statistics_source=statistics.source,
        )

    @property
    def normalisation(self) -> str:
        """By what images are normalised, in words."""
        own = ([f"{value:.3f}" for value in values] for values in (self.mean, self.std))
        mean, std = (", ".join(v[:1] if len({*v}) == 1 else v) for v in own)
        return f"images normalised by mean {mean} and std {std}, {self.statistics_source}"

    def example(self, size: int, resolution: int) -> Batch:
        """Return a batch of random images on the device."""
        return image_batch(size, resolution, self.num_classes, self.train.device)


def load_configured(config: ImageConfig, seed: int, device: torch.device) -> Data:
    """Return the data of a run's or a study's settings; see `load_data`."""
    data = load_data(
        config.dataset,
        image_column=config.image_column,
        label_column=config.label_column,
        train_samples=config.train_samples,
        eval_samples=config.eval_samples,
        holdout=config.holdout,
        seed=seed,
        loader_workers=config.loader_workers,
        device=device,
        max_bad_images=config.max_bad_images,
        augment_on_host=config.augmentation == "timm",
        cache_gib=config.cache_gib,
        shuffle_block=config.shuffle_block,
    )
    given = {"crop_pct": config.crop_pct, "interpolation": config.interpolation}
    return replace(
        data,
        pipeline=config.pipeline,
        erasing=config.erasing,
        **{name: value for name, value in given.items() if value is not None},
    ).normalised_by(config.mean, config.std)


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
    augment_on_host: bool = False,
    max_store_bytes: int = 2 * 2**30,
    cache_gib: float | None = None,
    shuffle_block: int = SHUFFLE_BLOCK,
) -> Data:
    """Open a dataset and make its training and evaluation samples readable by number.

    Images that are squares of one size up to 64 px are decoded at once and kept on the device; the
    decoded pixels are cached beside the dataset in `datasets.config.HF_DATASETS_CACHE`. Others are
    decoded by loader processes as they are needed. The settings are those of `DataConfig`.

    Args:
        dataset: ``digits`` (scikit-learn's, no network), a folder (parquet files, one folder of
            images per class, or written by `save_to_disk`), a parquet file or a hub id.
        image_column: Column of images; may be left out where there is one.
        label_column: Column of classes; unset: ``label``, or the ClassLabel with most classes.
        train_samples: Size of a stratified subset; with `holdout`, of what that leaves.
        eval_samples: Size of a stratified subset.
        holdout: Share of the training images to evaluate on in place of the evaluation split;
            unset: a fifth, where there is no such split.
        seed: Seed of the subsets and of the held-out images.
        loader_workers: Loader processes per split; unset: by the cores, at most 8.
        device: Where batches are made.
        max_bad_images: Most images of a split that may be left out since they cannot be decoded.
        augment_on_host: Whether training images are augmented in loader processes.
        max_store_bytes: Most bytes of decoded pixels to keep.
        cache_gib: GiB of disk for images that come by row group; None: all lie on the disk.
        shuffle_block: Images that are then shuffled together.

    Raises:
        SettingError: If the dataset, a column, a label or a number of samples is not to be had.
    """
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    streams = None if cache_gib is None else Streams(cache_gib, shuffle_block)
    open_ = streams.open if streams else open_labelled
    train, evaluation, class_names = open_(dataset, image_column, label_column)
    sizes = train_samples, eval_samples
    train, evaluation, eval_split = _cut(train, evaluation, *sizes, holdout, seed)
    if unmet := {class_names[label] for label in np.setdiff1d(train.labels, evaluation.labels)}:
        logger.warning("classes without an evaluation image: %s", listed(unmet))
    splits = (train, evaluation)
    look = streams.first_images if streams else _spaced_images
    side, decoded = _common_side(look(split, _PROBES) for split in splits), None
    if not streams:
        decoded = _decode_splits(splits, side, max_store_bytes, max_bad_images)
    statistics = _channel_statistics(decoded[0][0] if decoded else None)
    workers = min(8, cores_of_process()) if loader_workers is None else loader_workers
    open_source = partial(
        _open_source,
        device=torch.device(device),
        workers=workers,
        max_bad=max_bad_images,
        loader=streams.source if streams else ImageLoader,
    )
    return Data(
        *map(open_source, splits, decoded or (None, None), (not augment_on_host, True)),
        num_classes=len(class_names),
        class_names=class_names,
        mean=statistics.mean,
        std=statistics.std,
        statistics_source=statistics.source,
        mirror=dataset != "digits",  # a mirrored digit is another character
        image_side=side,
        image_column=train.image_column,
        label_column=train.label_column,
        eval_split=eval_split,
        crop_pct=1.0 if decoded or (streams and (side or 99) <= _STORE_UP_TO) else EVAL_CROP,
    )


def _open_source(
    split: ImageSplit,
    decoded: Decoded | None,
    keeps: bool,
    *,
    device: torch.device,
    workers: int,
    max_bad: int,
    loader: Callable[..., ImageSource],
) -> ImageSource:
    """Return what reads a split: its pixels, if they are decoded and to be kept, or loaders."""
    if decoded is None:
        return loader(split, device, workers, max_bad)
    pixels, good, bad = decoded
    if keeps:
        return PixelStore(pixels, split.labels[good], device, bad)
    return ImageLoader(split.select(good), device, workers, max_bad, bad)


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
    train: ImageSplit,
    evaluation: ImageSplit | None,
    train_samples: int | None,
    eval_samples: int | None,
    holdout: float | None,
    seed: int,
) -> tuple[ImageSplit, ImageSplit, str]:
    """Return what to train on, what to evaluate on, and in words where that comes from."""
    eval_split = evaluation.name if evaluation else "a fifth of train"
    if holdout is not None:
        evaluation, eval_split = None, f"{holdout:.3g} of train, held out"
    if evaluation is None:
        share = 0.2 if holdout is None else holdout
        train, evaluation = _hold_out(train, share, generator(seed, "evaluation split"))
    train = _subset(train, "train_samples", train_samples, generator(seed, "train samples"))
    evaluation = _subset(evaluation, "eval_samples", eval_samples, generator(seed, "eval samples"))
    return train, evaluation, eval_split


def _hold_out(
    train: ImageSplit, share: float, rng: np.random.Generator
) -> tuple[ImageSplit, ImageSplit]:
    """Cut a stratified share, rounded up, off train; return both."""
    if len(train) < 2:
        raise SettingError(f"dataset must have 2 images or more to hold some out, got {len(train)}")
    size = min(math.ceil(round(share * len(train), 6)), len(train) - 1)
    held_out = stratified_subset(train.labels, size, rng)
    return train.select(np.delete(np.arange(len(train)), held_out)), train.select(held_out)


def _subset(
    split: ImageSplit, setting: str, size: int | None, rng: np.random.Generator
) -> ImageSplit:
    if size is None:
        return split
    if not 1 <= size <= len(split):
        raise SettingError(f"{setting} must be in [1, {len(split)}], got {size}")
    return split.select(stratified_subset(split.labels, size, rng))


def _spaced_images(split: ImageSplit, most: int) -> Iterator[Image.Image | str]:
    """Yield images of a split, evenly spaced, or why one cannot be decoded."""
    return split.decode(np.unique(np.linspace(0, len(split) - 1, most).astype(np.int64)))


def _common_side(splits: Iterable[Iterable[Image.Image | str]]) -> int | None:
    """Return the side that images of the splits have in common, if they are squares."""
    sizes = set()
    for images in splits:
        sizes.update(image.size for image in images if not isinstance(image, str))
    if len(sizes) != 1:
        return None
    ((width, height),) = sizes
    return width if width == height else None


def _decode_splits(
    splits: Sequence[ImageSplit], side: int | None, max_bytes: int, max_bad: int
) -> list[Decoded] | None:
    """Return each split's pixels, uint8 [N, S, S, 3], or None if they are not for a store."""
    if side is None or side > _STORE_UP_TO:
        return None
    if sum(len(split) for split in splits) * side * side * 3 > max_bytes:
        return None
    found = []
    for split in splits:
        decoded = decode_cached(split, side, max_bad)
        if decoded is None:
            return None
        found.append(decoded)
    return found


def _channel_statistics(pixels: np.ndarray | None) -> Statistics:
    """Return mean and standard deviation of each channel, of pixels scaled to [0, 1].

    None, for images that are not at hand: ImageNet's.
    """
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
