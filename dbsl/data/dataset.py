"""Labelled images as training and evaluation data: splits, subsets, statistics, sources."""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image

from dbsl.base.errors import require
from dbsl.base.machine import cores_of_process, lazy_import
from dbsl.base.seeds import generator
from dbsl.config.hooks import Extra, Extras
from dbsl.config.image_settings import Augment, ImageConfig, Interpolation
from dbsl.data.images import ImageLoader, ImageSplit, decode_cached
from dbsl.data.sources import Batch, PixelStore, image_batch
from dbsl.data.tables import listed, open_labelled
from dbsl.data.transforms import EVAL_CROP, Means, Transform
from dbsl.plan.solve import largest_remainder
from dbsl.plan.stages import default_resolutions

datasets, timm = lazy_import("datasets"), lazy_import("timm")
logger = logging.getLogger(__name__)

_STORE_UP_TO = 64  # pixels; larger images are cheaper to decode when needed than to keep
_CHUNK = 1024  # images summed at a time
STORE_BYTES = 2 * 2**30  # most bytes of decoded pixels to keep
_PROBES = 64  # images per split checked for their size before any are stored


class Statistics(NamedTuple):
    """Channel means and standard deviations of images in [0, 1], and their source in words."""

    mean: Means
    std: Means
    source: str


@dataclass(frozen=True)
class Data:
    """The images that `load_data` found."""

    config: ImageConfig
    train: PixelStore | ImageLoader
    evaluation: PixelStore | ImageLoader
    class_names: tuple[str, ...]
    mean: Means  # images are normalised by these
    std: Means
    source: str  # of mean and std, in words
    mirror: bool  # whether a mirrored image keeps its class
    # Side of the images in pixels if all are squares of one size, else None. If images are not
    # stored, 64 of each split were checked.
    image_side: int | None
    eval_split: str  # name of the split that `evaluation` comes from, or how it was split off
    held_out: str  # digest of the training images that the seed drew for it; empty: none
    crop_pct: float  # side of the centre crop of evaluation images over their shorter side
    interpolation: Interpolation  # how evaluation images are resized
    unit: ClassVar[str] = "image"

    @property
    def num_classes(self) -> int:
        """Labels lie in [0, num_classes)."""
        return len(self.class_names)

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Resolutions of the stages if none are given."""
        return default_resolutions(self.image_side)

    def transform(self, resolution: int, augment: Augment, seed: int) -> Transform:
        """Return the transform for images at a resolution."""
        if augment == "crop" and isinstance(self.train, PixelStore):
            self.train.pad()  # now, before the rest of the device's memory is planned
        look = (self.mirror, self.mean, self.std, seed, self.crop_pct, self.interpolation)
        return Transform(resolution, augment, *look, self.config.aa)

    def normalised_for(self, model: Any) -> Data:
        """Return the data normalised as a model's pretrained weights expect, if it has any."""
        statistics = getattr(model, "input_statistics", None)
        return self.prepared_as(statistics) if statistics else self

    def prepared_as(self, statistics: Statistics, **how: Any) -> Data:
        """Return the data prepared as weights expect, except where the settings decide.

        `how` may have `crop_pct` and `interpolation`.
        """
        given = self.config.preprocessing
        how = {name: value for name, value in how.items() if name not in given}
        return replace(self, **_but_for(given, statistics)._asdict(), **how)

    @property
    def normalisation(self) -> str:
        """How images are normalised, in words."""
        shown = ([f"{value:.3f}" for value in values] for values in (self.mean, self.std))
        mean, std = (", ".join(v[:1] if len({*v}) == 1 else v) for v in shown)
        return f"images normalised by mean {mean} and std {std}, {self.source}"

    def example(self, size: int, resolution: int) -> Batch:
        """Return a batch of random images on the device."""
        return image_batch(size, resolution, self.num_classes, self.train.device)


def _but_for(given: Mapping[str, Any], statistics: Statistics) -> Statistics:
    """Return statistics, replaced where the settings give a mean or std."""
    own = {name: given[name] for name in ("mean", "std") if name in given}
    if not own:
        return statistics
    rest = f", the rest {statistics.source}" if len(own) == 1 else ""
    return statistics._replace(source=f"by --preprocess {' and '.join(own)}{rest}", **own)


def load_data(
    config: ImageConfig,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    only_evaluate: bool = False,
) -> Data:
    """Open a dataset and make its training and evaluation samples readable by number.

    Images that are squares of one size up to 64 px are decoded up front and kept on the device; the
    decoded pixels are cached in `datasets.config.HF_DATASETS_CACHE`. Loader processes decode other
    images as needed. The seed draws subsets and held-out images. With `only_evaluate`, data without
    an evaluation split are evaluated whole.
    """
    device = torch.device(device)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    streams = Extras.of(config).first(Extra.data, config)
    train, evaluation, class_names = (streams.open if streams else open_labelled)(config)
    if only_evaluate and evaluation is None:
        evaluation = train
    *splits, eval_split, held_out = _cut(train, evaluation, config, seed)
    if unmet := {class_names[label] for label in np.setdiff1d(*(s.labels for s in splits))}:
        logger.warning("classes without an evaluation image: %s", listed(unmet))
    side, bits = _look(splits)
    splits = [replace(split, bits=bits) for split in splits]
    pixels = [None, None]  # of each split, if kept
    size = 3 * (side or 0) ** 2 * sum(map(len, splits))  # bytes
    if not streams and 0 < size <= STORE_BYTES and side <= _STORE_UP_TO:
        found = [decode_cached(split, side, config.max_bad_images) for split in splits]
        if None not in found:
            pixels, splits = zip(*found, strict=True)
    workers = config.loader_workers
    workers = min(8, cores_of_process()) if workers is None else workers
    load = streams.source if streams else ImageLoader

    def source(split: ImageSplit, pixels: np.ndarray | None) -> PixelStore | ImageLoader:
        if pixels is None:
            return load(split, device, workers, config.max_bad_images)
        tensors = (torch.from_numpy(array).to(device) for array in (pixels, split.labels))
        return PixelStore(*tensors, split.bad)

    # timm's pipeline runs in loader processes.
    kept = pixels if config.augmentation != "timm" else (None, pixels[1])
    is_small = pixels[0] is not None or (streams and (side or 99) <= _STORE_UP_TO)
    given = config.preprocessing
    return Data(
        config,
        *map(source, splits, kept),
        class_names,
        *_but_for(given, _channel_statistics(pixels[0])),
        mirror=config.dataset != "digits",  # a mirrored digit is another character
        image_side=side,
        eval_split=eval_split,
        held_out=held_out,
        crop_pct=given.get("crop_pct", 1.0 if is_small else EVAL_CROP),
        interpolation=given.get("interpolation", "bilinear"),
    )


def stratified_subset(labels: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` sample numbers, ascending int64, that keep the classes' shares.

    Each class gets its share rounded down; the rest goes to the largest remainders, and in a tie to
    the smaller label.
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
    """Return the training and evaluation splits, the latter's origin, and `Data.held_out`."""
    eval_split, drawn = evaluation.name if evaluation else "a fifth of train", ""
    if config.holdout is not None:
        evaluation, eval_split = None, f"{config.holdout:.3g} of train, held out"
    if evaluation is None:
        require(len(train) > 1, "dataset must have 2 images or more to hold some out", len(train))
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
        require(1 <= size <= len(split), f"{kind}_samples must be in [1, {len(split)}]", size)
        rng = generator(seed, f"{kind} samples")
        return split.select(stratified_subset(split.labels, size, rng))

    return subset(train, "train"), subset(evaluation, "eval"), eval_split, drawn


def _look(splits: Iterable[ImageSplit]) -> tuple[int | None, int]:
    """Return the side that all images share (None: they are not such squares) and bits of a value.

    Values of 16 bits may use only 12, or 8 if they come from NumPy's integers.
    """

    def seen(image: Image.Image, _: int) -> tuple[tuple[int, int], int]:
        return image.size, int(np.max(image)) if image.mode[0] == "I" else 0

    found = [look for split in splits for _, look in split.read(split.spread(_PROBES), seen, {})]
    sizes, most = {size for size, _ in found}, max((most for _, most in found), default=0)
    width, height = sizes.pop() if len(sizes) == 1 else (None, 0)
    bits = next((bits for bits in (8, 12) if 0 < most < 2**bits), 16)
    return width if width == height else None, bits


def _channel_statistics(pixels: np.ndarray | None) -> Statistics:
    """Return the statistics of pixels [N, S, S, 3]; without pixels, ImageNet's."""
    if pixels is None:
        constants = timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD
        return Statistics(*constants, "ImageNet's")
    total, squares = np.zeros((2, 3))  # sums of integers, hence exact
    for start in range(0, len(pixels), _CHUNK):
        values = pixels[start : start + _CHUNK].astype(np.float64)
        total += values.sum((0, 1, 2))
        squares += np.square(values).sum((0, 1, 2))
    mean, of_squares = total / (pixels.size // 3), squares / (pixels.size // 3)
    std = np.sqrt(np.maximum(of_squares - mean**2, 0)) / 255
    means, deviations = (mean / 255).tolist(), np.maximum(std, 1e-3).tolist()
    return Statistics(tuple(means), tuple(deviations), "of the training images")
