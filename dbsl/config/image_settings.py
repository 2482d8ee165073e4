"""Settings of the data: which images, how each is augmented, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Literal, get_args

from dbsl.base.errors import SettingError, require
from dbsl.base.machine import lazy_import
from dbsl.config.fields import (
    PAIRS,
    Count,
    Number,
    Role,
    Within,
    check_names,
    in_words,
    parse_kwargs,
)

timm = lazy_import("timm")

Augment = Literal["none", "crop", "paper", "timm"]
Interpolation = Literal["bilinear", "bicubic", "lanczos", "nearest", "box", "hamming"]
_PREPROCESS = {
    "crop_pct": Within(0, 1, open_low=True),
    "mean": Within(0, 1, lengths=(1, 3)),
    "std": Within(0, 1, open_low=True, lengths=(1, 3)),
}


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
    # how pixels are prepared, by timm's names. crop_pct=0.95: side of the centre crop of evaluation
    # images over the shorter side; else 0.875, and 1 where images stay on the device (squares of
    # one size up to 64 px, at most 2 GiB). interpolation=bicubic: how they are resized; else
    # bilinear. mean=0.5,0.5,0.5 std=0.2: of red, green and blue in [0, 1], or one for all; else
    # those of the initial weights, or the training images' own where they stay on the device, or
    # ImageNet's
    preprocess: tuple[str, ...] = field(default=(), metadata=PAIRS)

    @property
    def augmentation(self) -> Augment:
        """The augmentation that is meant."""
        return self.augment or ("crop" if self.aa is None else "timm")

    @property
    def preprocessing(self) -> dict[str, Any]:
        """What is given of crop_pct, interpolation, and mean and std of three channels."""
        found = parse_kwargs("preprocess", self.preprocess, bounds=_PREPROCESS)
        check_names("preprocess", found, {"interpolation", *_PREPROCESS})
        for name in found.keys() & {"mean", "std"}:
            value = found[name] if isinstance(found[name], tuple) else (found[name],)
            found[name] = value * (3 // len(value))
        kinds, kind = get_args(Interpolation), found.get("interpolation", "bilinear")
        require(kind in kinds, f"preprocess interpolation must be {in_words(kinds)}", kind)
        return found


def check_images(config: ImageConfig) -> None:
    """Refuse settings of images that say nothing, or other than timm would do."""
    _ = config.preprocessing  # it refuses
    if config.aa is None:
        return
    of_timm = config.augment in (None, "timm")
    require(
        of_timm, "aa must go with augment timm, whose setting it is", f"augment {config.augment}"
    )
    _check_policy(config.aa)


@lru_cache
def _check_policy(policy: str) -> None:
    """Raise ``SettingError`` unless timm takes a policy."""
    try:
        timm.data.transforms_factory.transforms_imagenet_train(32, auto_augment=policy)
    except Exception as error:  # assertions, ValueError and KeyError, by what is wrong
        reason = " ".join(str(error).split())[:200]
        must = "aa must be a policy of timm such as rand-m9-mstd0.5-inc1, augmix-m5-w4 or 3a"
        why = f" ({reason})" if reason else ""
        raise SettingError(f"{must}, got {policy!r}{why}") from None
