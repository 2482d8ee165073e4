"""Settings of the data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError
from dbsl.data.augment import CropMode, EraseMode, Erasing, Pipeline, TrainInterpolation
from dbsl.data.mixing import MixupMode
from dbsl.data.transforms import Augment, Interpolation

SHUFFLE_BLOCK = 8192  # images: 82 row groups of the 100 that `datasets` writes


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
    # area of the random crop over the image's, smallest and largest; unset: 0.08 1
    scale: Annotated[tuple[float, ...] | None, Within(0, open_low=True)] = None
    # width of the random crop over its height, smallest and largest; unset: 0.75 1.3333
    ratio: Annotated[tuple[float, ...] | None, Within(0, open_low=True)] = None
    # probability of a flip from left to right; unset: 0.5, and 0 for digits
    hflip: Annotated[float | None, Within(0, 1)] = None
    # probability of a flip upside down; unset: 0
    vflip: Annotated[float | None, Within(0, 1)] = None
    # strength of random brightness, contrast and saturation; one value, three, or four with hue;
    # unset: 0.4, and 0 with another --aa than 3a
    color_jitter: Annotated[tuple[float, ...] | None, Within(0)] = None
    # probability of --color-jitter; unset: 1
    color_jitter_prob: Annotated[float | None, Within(0, 1)] = None
    # probability that an image loses its colours; unset: 0
    grayscale_prob: Annotated[float | None, Within(0, 1)] = None
    # probability that an image is blurred; unset: 0
    gaussian_blur_prob: Annotated[float | None, Within(0, 1)] = None
    # rrc: random resized crop; rkrc, rkrr: resize with the ratio kept, then crop the centre (rkrc)
    # or a random part (rkrr); unset: rrc
    train_crop_mode: CropMode | None = None
    # how training images are resized; random: bilinear or bicubic; unset: random
    train_interpolation: TrainInterpolation | None = None
    # --- random erasing and evaluation
    # probability that a rectangle of a training image is erased; with --augment crop, paper or timm
    reprob: Annotated[float, Within(0, 1)] = 0.0
    remode: EraseMode = "const"  # what is in its place: zeros, a random colour, or random pixels
    recount: Annotated[int, Within(1, 100)] = 1  # rectangles of an image at most; more are smaller
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
        return Pipeline(**{f.name: getattr(self, f.name) for f in fields(Pipeline)})

    @property
    def erasing(self) -> Erasing | None:
        """The random erasing of timm; None: off."""
        return Erasing(self.reprob, self.remode, self.recount) if self.reprob else None


def check_mixing(config: DataConfig) -> None:
    """Raise ``SettingError`` unless the area of CutMix has two ends."""
    ends = config.cutmix_minmax
    if ends is not None and (len(ends) != 2 or ends[0] >= ends[1]):
        shown = ",".join(f"{end:g}" for end in ends)
        raise SettingError(f"cutmix_minmax must be two values, ascending, got {shown}")


def check_images(config: ImageConfig) -> None:
    """Raise ``SettingError`` for the first setting of augmentation that does not fit the others."""
    pipeline = config.pipeline
    given = next((name for name, value in vars(pipeline).items() if value is not None), None)
    if given and config.augment not in (None, "timm"):
        raise SettingError(
            f"{given} must go with augment timm, whose setting it is, got augment {config.augment}"
        )
    pipeline.check()
    if config.cache_gib is None and config.shuffle_block != SHUFFLE_BLOCK:
        raise SettingError(
            f"shuffle_block must go with cache_gib, got {config.shuffle_block} alone"
        )
    if config.reprob and config.augment == "none":
        raise SettingError(f"reprob must be 0 with augment none, got {config.reprob:g}")
    if not config.reprob and (config.remode != "const" or config.recount != 1):
        name = "remode" if config.remode != "const" else "recount"
        raise SettingError(f"{name} must go with reprob, got {getattr(config, name)} with reprob 0")
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
    # sides of the area that CutMix takes over the image's, smallest and largest, say 0.2 0.8; it
    # replaces --cutmix; unset: by --cutmix
    cutmix_minmax: Annotated[tuple[float, ...] | None, Within(0, 1, open_low=True)] = None
    # probability that a batch, pair or image is mixed
    mixup_prob: Annotated[float, Within(0, 1)] = 1.0
    # probability of CutMix where both are on
    mixup_switch_prob: Annotated[float, Within(0, 1)] = 0.5
    # what one mixing is drawn for: a batch, a pair of images, or each image (elem)
    mixup_mode: MixupMode = "batch"
    # epochs after which images are mixed no more; 0: they always are
    mixup_off_epoch: Annotated[int, Within(0)] = 0

    @property
    def mixes(self) -> bool:
        """Whether images are mixed."""
        return bool(self.mixup or self.cutmix or self.cutmix_minmax)
