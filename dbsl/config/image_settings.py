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
    # images: digits (built in), a folder of images by class, a .parquet file or a hub id of Hugging
    # Face
    dataset: str = "digits"
    image_column: str | None = None  # table column that has the images; unset: the only one
    # table column that has the classes; unset: label, or the class column with most classes
    label_column: str | None = None
    train_samples: Count | None = None  # images to train on, drawn within each class; unset: all
    # images to evaluate on, drawn within each class; unset: all
    eval_samples: Annotated[Count | None, Role.FREE] = None
    # share of the training images, in (0, 1), to evaluate on instead of the test split
    holdout: Annotated[float | None, Within(0, 1, open_low=True, open_high=True)] = None
    # random changes of training images. crop: random crop (from 16 px on) and flip; paper: flip,
    # rotation and zoom; timm: timm's pipeline; none: no change; unset: timm with --aa, else crop
    augment: Augment | None = None
    # AutoAugment policy of timm: rand-m9-mstd0.5-inc1 (RandAugment), augmix-m5-w4 (AugMix),
    # original or v0 (AutoAugment), 3a (DeiT III's); unset: none
    aa: str | None = None
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: Annotated[Number | None, Role.FREE | Role.NODE] = None
    # unreadable images that are left out of each split before the run is refused
    max_bad_images: Annotated[Number, Role.FREE] = 16
    # how pixels are prepared, as name=value by timm's names. crop_pct=0.95: evaluation uses the
    # centre square with this share of the image's shorter side; else 0.875, or 1 if images stay on
    # the device (squares of one size up to 64 px, at most 2 GiB). interpolation=bicubic: how images
    # are resized; else bilinear. mean=0.5,0.5,0.5 std=0.2: of red, green and blue in [0, 1], or one
    # for all; else those of the initial weights, or of the training images if they stay on the
    # device, or ImageNet's
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
