"""Settings of the data: which images, how each is augmented, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal

from dbsl.base.errors import SettingError
from dbsl.base.machine import lazy_import
from dbsl.config.fields import Count, Number, Role, Within, refuse

timm = lazy_import("timm")

Augment = Literal["none", "crop", "paper", "timm"]
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest", "box", "hamming"]


@dataclass(frozen=True)
class ImageConfig:
    """Which images, and how each is augmented."""

    # --- data
    # digits, a folder, a .parquet file or a Hugging Face hub id
    dataset: str = "digits"
    # column of the images; unset: the only one
    image_column: str | None = None
    # column of the classes; unset: label, or the class column with most classes
    label_column: str | None = None
    # images to train on, a stratified and seeded subset; unset: all
    train_samples: Count | None = None
    # images to evaluate on, a stratified and seeded subset; unset: all
    eval_samples: Annotated[Count | None, Role.FREE] = None
    # share of the training images to evaluate on instead of the test split, in (0, 1)
    holdout: Annotated[float | None, Within(0, 1, open_low=True, open_high=True)] = None
    # crop: random crop and flip; paper: flip, rotation and zoom; timm: timm's pipeline; none: as in
    # evaluation; unset: timm with --aa, else crop
    augment: Augment | None = None
    # policy of timm: rand-m9-mstd0.5-inc1 (RandAugment), augmix-m5-w4 (AugMix), original or v0
    # (AutoAugment), 3a (DeiT III's); unset: none
    aa: str | None = None
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: Annotated[Number | None, Role.FREE | Role.NODE] = None
    # images of each split that may be left out because they cannot be decoded
    max_bad_images: Annotated[Number, Role.FREE] = 16
    # side of the centre crop of evaluation images over their shorter side, in (0, 1]; unset: 0.875,
    # and 1 where images stay on the device: squares of one size up to 64 px, at most 2 GiB
    crop_pct: Annotated[float | None, Within(0, 1, open_low=True)] = None
    # how evaluation images are resized; unset: bilinear
    interpolation: Interpolation | None = None
    # means of red, green and blue in [0, 1], or one for all; unset: those of the initial weights;
    # else the training images' own where they stay on the device (see --crop-pct); else ImageNet's
    mean: Annotated[tuple[float, ...] | None, Within(0, 1, lengths=(1, 3))] = None
    # standard deviations of red, green and blue in (0, 1], or one for all; unset: as with --mean
    std: Annotated[tuple[float, ...] | None, Within(0, 1, open_low=True, lengths=(1, 3))] = None

    @property
    def augmentation(self) -> Augment:
        """The augmentation that is meant."""
        return self.augment or ("crop" if self.aa is None else "timm")


def check_images(config: ImageConfig) -> None:
    """Raise ``SettingError`` for a policy of timm's that it does not have, or would not draw by."""
    if config.aa is None:
        return
    text = "aa must go with augment timm, whose setting it is"
    refuse([(config.augment not in (None, "timm"), text, f"augment {config.augment}")])
    _check_policy(config.aa)


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
