"""Settings of the data: which images, how each is augmented, and how they are mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from operator import le, lt
from typing import Annotated, Any, Literal, TypedDict

from dbsl.base.errors import SettingError
from dbsl.base.machine import lazy_import
from dbsl.config.fields import (
    PAIRS,
    Count,
    Excludes,
    Number,
    Refusal,
    Role,
    Share,
    Within,
    read_kwargs,
    refuse,
)

timm = lazy_import("timm")

Augment = Literal["none", "crop", "paper", "timm"]
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest", "box", "hamming"]

_ENDS = Within(0, open_low=True, lengths=(2,), order=le)


@dataclass(frozen=True)
class AugmentKwargs:
    """What timm's `transforms_imagenet_train` takes, by the flags of its train.py; unset: its own.

    All but `aa`, the policy, are of ``augment_kwargs``.
    """

    aa: str | None = None
    scale: Annotated[tuple[float, ...] | None, _ENDS] = None
    ratio: Annotated[tuple[float, ...] | None, _ENDS] = None
    hflip: Share | None = None
    vflip: Share | None = None
    # one strength for all, or those of brightness, contrast, saturation and (optional) hue
    color_jitter: Annotated[tuple[float, ...] | None, Within(0, lengths=(1, 3, 4))] = None
    color_jitter_prob: Share | None = None
    grayscale_prob: Share | None = None
    gaussian_blur_prob: Share | None = None
    train_crop_mode: Literal["rrc", "rkrc", "rkrr"] | None = None
    train_interpolation: Literal["random"] | Interpolation | None = None


@dataclass(frozen=True)
class EraseKwargs:
    """What timm's random erasing (arXiv 1708.04896) takes; all but `reprob` of ``augment_kwargs``.

    The fill is 0, one random colour or random pixels; `recount` is the most rectangles of an image.
    """

    reprob: float
    remode: Literal["const", "rand", "pixel"] = "const"
    recount: Annotated[int, Within(1, 100)] = 1


class MixupKwargs(TypedDict, total=False):
    """More arguments of `Mixing`, by the names of timm's Mixup."""

    cutmix_minmax: Annotated[
        tuple[float, ...] | None, Within(0, 1, open_low=True, lengths=(2,), order=lt)
    ]
    prob: Share
    switch_prob: Share
    mode: Literal["batch", "pair", "elem"]
    off_epoch: Number


@dataclass(frozen=True)
class ImageConfig:
    """Which images, and how each is augmented."""

    # --- data
    # digits, a folder, a .parquet file or a Hugging Face hub id
    dataset: Annotated[str, Role.ROUND | Role.TIMED] = "digits"
    # column of the images; unset: the only one
    image_column: Annotated[str | None, Role.ROUND] = None
    # column of the classes; unset: label, or the class column with most classes
    label_column: Annotated[str | None, Role.ROUND] = None
    # images to train on, a stratified and seeded subset; unset: all
    train_samples: Annotated[Count | None, Role.ROUND] = None
    # images to evaluate on, a stratified and seeded subset; unset: all
    eval_samples: Annotated[Count | None, Role.FREE] = None
    # share of the training images to evaluate on instead of the test split, in (0, 1)
    holdout: Annotated[float | None, Within(0, 1, open_low=True, open_high=True), Role.ROUND] = None
    # crop: random crop and flip; paper: flip, rotation and zoom; timm: timm's pipeline, with the
    # settings below; none: as in evaluation; unset: timm with one of those settings, else crop
    augment: Augment | None = None
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: Annotated[Number | None, Role.FREE | Role.NODE] = None
    # images of each split that may be left out because they cannot be decoded
    max_bad_images: Annotated[Number, Role.FREE] = 16
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
    reprob: Annotated[Share, Excludes(augment="none")] = 0.0
    # side of the centre crop of evaluation images over their shorter side, in (0, 1]; unset: 0.875,
    # and 1 where images stay on the device: squares of one size up to 64 px, at most 2 GiB;
    # --eval-only takes what the config of a timm model's weights says
    crop_pct: Annotated[float | None, Within(0, 1, open_low=True)] = None
    # how evaluation images are resized; unset: bilinear; --eval-only takes what the config of a
    # timm model's weights says
    interpolation: Interpolation | None = None
    # means of red, green and blue in [0, 1], or one for all; unset: those of the initial weights;
    # else the training images' own where they stay on the device (see --crop-pct); else ImageNet's
    mean: Annotated[tuple[float, ...] | None, Within(0, 1, lengths=(1, 3))] = None
    # standard deviations of red, green and blue in (0, 1], or one for all; unset: as with --mean
    std: Annotated[tuple[float, ...] | None, Within(0, 1, open_low=True, lengths=(1, 3))] = None

    @property
    def augmentation(self) -> Augment:
        """The augmentation that is meant."""
        given = any(value is not None for value in vars(self.pipeline).values())
        return self.augment or ("timm" if given else "crop")

    @property
    def pipeline(self) -> AugmentKwargs:
        """How timm augments, where it does."""
        return AugmentKwargs(self.aa, **self._given_to(AugmentKwargs))

    @property
    def erasing(self) -> EraseKwargs | None:
        """The random erasing of timm; None: off."""
        return EraseKwargs(self.reprob, **self._given_to(EraseKwargs)) if self.reprob else None

    @property
    def given_to_augment(self) -> Mapping[str, Any]:
        """What ``augment_kwargs`` has."""
        takers, but = (AugmentKwargs, EraseKwargs), ("aa", "reprob")
        return read_kwargs("augment_kwargs", self.augment_kwargs, *takers, but=but)

    def _given_to(self, taker: type) -> dict[str, Any]:
        return {n: v for n, v in self.given_to_augment.items() if n in taker.__annotations__}


def check_images(config: ImageConfig) -> None:
    """Raise ``SettingError`` for the first setting of augmentation that does not fit the others."""
    refuse(_of_images(config))
    if config.aa is not None:
        _check_policy(config.aa)


def _of_images(config: ImageConfig) -> Iterator[Refusal]:
    given = {name: value for name, value in vars(config.pipeline).items() if value is not None}
    for name in ("aa" if n == "aa" else f"augment_kwargs {n}" for n in given):
        text = f"{name} must go with augment timm, whose setting it is"
        yield config.augment not in (None, "timm"), text, f"augment {config.augment}"
    for name in (n for n in config.given_to_augment if n in EraseKwargs.__annotations__):
        yield not config.reprob, f"augment_kwargs {name} must go with reprob", "reprob 0"
    hue = given.get("color_jitter", ())[3:]
    yield hue and hue[0] > 0.5, "augment_kwargs color_jitter of hue must be in [0, 0.5]", hue
    if config.aa is not None and "3a" not in config.aa:
        text = f"must be left out with aa {config.aa}, which takes its place"
        for name in ("color_jitter", "color_jitter_prob"):
            yield name in given, f"augment_kwargs {name} {text}", given.get(name)


@lru_cache
def _check_policy(policy: str) -> None:
    """Raise ``SettingError`` unless it is a policy of timm's, each section of which it reads.

    It passes over sections that it does not know in silence. What else is wrong, timm says itself.
    """
    name, *sections = policy.split("-")
    try:
        for section in sections:
            known = any(character.isdecimal() for character in section)
            if name == "rand" and section.startswith("t"):
                known = section in ("tweights", "t3a", "t3aw")
            if not known:
                raise ValueError(f"section {section!r} is not known")
        timm.data.transforms_factory.transforms_imagenet_train(32, auto_augment=policy)
    except Exception as error:  # assertions, ValueError and KeyError, by what is wrong
        reason = " ".join(str(error).split())[:200]
        must = "aa must be a policy of timm such as rand-m9-mstd0.5-inc1, augmix-m5-w4 or 3a"
        why = f" ({reason})" if reason else ""
        raise SettingError(f"{must}, got {policy!r}{why}") from None
