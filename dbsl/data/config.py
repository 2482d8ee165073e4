"""Settings of the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError
from dbsl.base.flags import PAIRS
from dbsl.base.kwargs import read_kwargs
from dbsl.data.augment import Erasing, Pipeline
from dbsl.data.mixing import MixupKwargs
from dbsl.data.transforms import Augment, Interpolation

SHUFFLE_BLOCK = 8192  # images: 82 row groups of the 100 that `datasets` writes

_OF_ERASING = ("remode", "recount")


@dataclass(frozen=True)
class ImageConfig:
    """Which images, and how each is augmented."""

    # --- data
    dataset: str = "digits"  # digits, a folder, a .parquet file or a Hugging Face hub id
    image_column: str | None = None  # column of the images; unset: the only one
    # column of the classes; unset: label, or the class column with most classes
    label_column: str | None = None
    # images to train on, a stratified and seeded subset; unset: all
    train_samples: Annotated[int | None, Within(1)] = None
    # images to evaluate on, a stratified and seeded subset; unset: all
    eval_samples: Annotated[int | None, Within(1)] = None
    # share of the training images to evaluate on instead of the test split, in (0, 1)
    holdout: Annotated[float | None, Within(0, 1, open_low=True, open_high=True)] = None
    # crop: random crop and flip; paper: flip, rotation and zoom; timm: timm's pipeline, with the
    # settings below; none: nothing; unset: timm with one of those settings, else crop
    augment: Augment | None = None
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: Annotated[int | None, Within(0)] = None
    # GiB of disk for data that may be larger: parquet shards (a folder, a URL or a hub id) are read
    # by row group into a cache of that size; unset: the whole data set is on the disk
    cache_gib: Annotated[float | None, Within(0, open_low=True)] = None
    # images that are shuffled together, with --cache-gib; more are shuffled better, and need a
    # larger cache
    shuffle_block: Annotated[int, Within(1)] = SHUFFLE_BLOCK
    # images of each split that may be left out because they cannot be decoded
    max_bad_images: Annotated[int, Within(0)] = 16
    # --- timm's augmentation
    # policy of timm: rand-m9-mstd0.5-inc1 (RandAugment), augmix-m5-w4 (AugMix), original or v0
    # (AutoAugment), 3a (DeiT III's); unset: none
    aa: str | None = None
    # more options of timm's augmentation as name=value: scale=0.08,1 ratio=0.75,1.33 hflip=0.5
    # vflip=0 color_jitter=0.4 (three values, or four with hue) color_jitter_prob grayscale_prob
    # gaussian_blur_prob train_crop_mode (rrc, rkrc, rkrr) train_interpolation=random; with --reprob
    # remode=const (rand, pixel) recount=1
    augment_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # --- random erasing and evaluation
    # probability that a rectangle of a training image is erased; with --augment crop, paper or timm
    reprob: Annotated[float, Within(0, 1)] = 0.0
    # side of the centre crop of evaluation images over their shorter side, in (0, 1]; unset: 0.875,
    # and 1 where images stay on the device: squares of one size up to 64 px, at most 2 GiB
    crop_pct: Annotated[float | None, Within(0, 1, open_low=True)] = None
    # how evaluation images are resized; unset: bilinear
    interpolation: Interpolation | None = None
    # means of red, green and blue in [0, 1], or one for all; unset: those of the weights that are
    # started from; else the training images' own where they stay on the device (see --crop-pct);
    # else ImageNet's
    mean: Annotated[tuple[float, ...] | None, Within(0, 1)] = None
    # standard deviations of red, green and blue in (0, 1], or one for all; unset: as with --mean
    std: Annotated[tuple[float, ...] | None, Within(0, 1, open_low=True)] = None

    @property
    def augmentation(self) -> Augment:
        """The augmentation that is meant."""
        given = any(value is not None for value in vars(self.pipeline).values())
        return self.augment or ("timm" if given else "crop")

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of timm."""
        own = {n: v for n, v in self.given_to_augment.items() if n not in _OF_ERASING}
        return Pipeline(self.aa, **own)

    @property
    def erasing(self) -> Erasing | None:
        """The random erasing of timm; None: off."""
        own = {n: v for n, v in self.given_to_augment.items() if n in _OF_ERASING}
        return Erasing(self.reprob, **own) if self.reprob else None

    @property
    def given_to_augment(self) -> Mapping[str, Any]:
        """What ``augment_kwargs`` has."""
        but = ("aa", "reprob")
        return read_kwargs("augment_kwargs", self.augment_kwargs, Pipeline, Erasing, but=but)


def check_mixing(config: DataConfig) -> None:
    """Raise ``SettingError`` for the first argument of mixing that does not fit."""
    given = config.mixing
    ends = given.get("cutmix_minmax")
    if ends is not None and (len(ends) != 2 or ends[0] >= ends[1]):
        shown = ",".join(f"{end:g}" for end in ends)
        raise SettingError(f"mixup_kwargs cutmix_minmax must be two values, ascending, got {shown}")
    if "switch_prob" in given and not (config.mixup and (config.cutmix or ends)):
        raise SettingError(
            "mixup_kwargs must leave out switch_prob except with mixup and CutMix, "
            f"got {given['switch_prob']:g}"
        )


def check_images(config: ImageConfig) -> None:
    """Raise ``SettingError`` for the first setting of augmentation that does not fit the others."""
    pipeline = config.pipeline
    given = next((name for name, value in vars(pipeline).items() if value is not None), None)
    if given and config.augment not in (None, "timm"):
        raise SettingError(
            f"{'aa' if given == 'aa' else f'augment_kwargs {given}'} must go with augment timm, "
            f"whose setting it is, got augment {config.augment}"
        )
    pipeline.check()
    if config.cache_gib is None and config.shuffle_block != SHUFFLE_BLOCK:
        raise SettingError(
            f"shuffle_block must go with cache_gib, got {config.shuffle_block} alone"
        )
    if config.reprob and config.augment == "none":
        raise SettingError(f"reprob must be 0 with augment none, got {config.reprob:g}")
    for name in _OF_ERASING if not config.reprob else ():
        if name in config.given_to_augment:
            raise SettingError(f"augment_kwargs {name} must go with reprob, got reprob 0")
    for name in ("mean", "std"):
        values = getattr(config, name)
        if values is not None and len(values) not in (1, 3):
            raise SettingError(f"{name} must be 1 or 3 values, got {len(values)}")


@dataclass(frozen=True)
class DataConfig(ImageConfig):
    """Which images, and what training makes of them."""

    # times that an epoch has an image, in a row and each time augmented anew; an epoch has as many
    # samples as ever, of fewer images
    aug_repeats: Annotated[int, Within(1)] = 1
    # --- mixing
    mixup: Annotated[float, Within(0)] = 0.0  # alpha of mixup, say 0.2; 0: off
    # alpha of CutMix, say 1.0; 0: off; with --mixup, each batch gets one of the two
    cutmix: Annotated[float, Within(0)] = 0.0
    # more arguments of timm's Mixup as name=value: prob=1 switch_prob=0.5 (of CutMix where both are
    # on) mode=batch (pair, elem: what one mixing is drawn for) cutmix_minmax=0.2,0.8 (sides of
    # CutMix's area over the image's; it replaces --cutmix); off_epoch=90: none from there on
    mixup_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed."""
        return bool(self.mixup or self.cutmix or self.mixing.get("cutmix_minmax"))

    @property
    def mixing(self) -> Mapping[str, Any]:
        """What `dbsl.data.mixing.Mixing` takes of ``mixup_kwargs``."""
        return read_kwargs("mixup_kwargs", self.mixup_kwargs, MixupKwargs)
