"""Settings of the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dbsl.base.bounds import Within
from dbsl.data.transforms import Augment


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
    # crop: random crop and flip; paper: flip, rotation and zoom; none: nothing
    augment: Augment = "crop"
    # processes that decode large images; unset: by the cores; 0: none
    loader_workers: Annotated[int | None, Within(0)] = None
    # images of each split that may be left out because they cannot be decoded
    max_bad_images: Annotated[int, Within(0)] = 16


@dataclass(frozen=True)
class DataConfig(ImageConfig):
    """Which images, and what training makes of them."""

    mixup: Annotated[float, Within(0)] = 0.0  # alpha of mixup, say 0.2; 0: off
    # alpha of CutMix, say 1.0; 0: off; with --mixup, each batch gets one of the two
    cutmix: Annotated[float, Within(0)] = 0.0
