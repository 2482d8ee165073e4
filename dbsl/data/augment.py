"""timm's training augmentation, random erasing, mixup and CutMix, from seeded random numbers.

What is drawn for a sample, or to mix a batch, is a function of (seed, epoch, sample number).
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.base.machine import lazy_import
from dbsl.base.seeds import sample_seeds, stream_seed
from dbsl.config.fields import Within
from dbsl.plan.sampler import Part

timm = lazy_import("timm")

RGB = tuple[float, float, float]
CropMode = Literal["rrc", "rkrc", "rkrr"]
TrainInterpolation = Literal[
    "random", "bilinear", "bicubic", "lanczos", "nearest", "box", "hamming"
]
EraseMode = Literal["const", "rand", "pixel"]

_RAND_TRANSFORMS = ("weights", "3a", "3aw")  # names that timm's RandAugment knows
_LEAST_BLURRED = 12  # pixels: timm's kernel of 23 pads images by 11, which must be less than all


class GlobalStreams:
    """Python's, NumPy's and torch's own random numbers: seeded inside, untouched outside.

    timm and torchvision draw from these. What they draw for a sample then depends on its seed
    alone, not on the process or on what was drawn before. The generators of devices are left out.
    """

    def __enter__(self) -> GlobalStreams:
        self._before: Any = (
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002
            torch.default_generator.get_state(),
        )
        return self

    def seed(self, seed: int) -> None:
        """Start all of them from a seed in [0, 2**63)."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)

    def __exit__(self, *_: object) -> None:
        python, numpy, state = self._before
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(state)


@dataclass(frozen=True)
class Pipeline:
    """timm's `transforms_imagenet_train` of PIL images, with its own defaults where unset.

    Fields are the flags of timm's train.py: all but `aa` are of ``augment_kwargs``.

    Attributes:
        aa: Policy.
        scale: Area of the random crop over the image's, smallest and largest.
        ratio: Width of the random crop over its height, smallest and largest.
        hflip, vflip: Probability of a flip from left to right, and upside down.
        color_jitter: Strength for brightness, contrast and saturation, one or three, then for hue.
        color_jitter_prob, grayscale_prob, gaussian_blur_prob: Probabilities.
        train_crop_mode: ``rrc``: random resized crop; ``rkrc`` and ``rkrr``: resize with the ratio
            kept, then crop the centre, or a random part.
        train_interpolation: How images are resized; ``random``: bilinear or bicubic.
    """

    aa: str | None = None
    scale: Annotated[tuple[float, ...] | None, Within(0, open_low=True)] = None
    ratio: Annotated[tuple[float, ...] | None, Within(0, open_low=True)] = None
    hflip: Annotated[float | None, Within(0, 1)] = None
    vflip: Annotated[float | None, Within(0, 1)] = None
    color_jitter: Annotated[tuple[float, ...] | None, Within(0)] = None
    color_jitter_prob: Annotated[float | None, Within(0, 1)] = None
    grayscale_prob: Annotated[float | None, Within(0, 1)] = None
    gaussian_blur_prob: Annotated[float | None, Within(0, 1)] = None
    train_crop_mode: CropMode | None = None
    train_interpolation: TrainInterpolation | None = None

    def check(self) -> None:
        """Raise ``SettingError`` for the first field that timm cannot take."""
        for name in ("scale", "ratio"):
            values = getattr(self, name)
            if values is not None and (len(values) != 2 or values[0] > values[1]):
                raise SettingError(
                    f"augment_kwargs {name} must be two values, ascending, got {_join(values)}"
                )
        jitter = self.color_jitter
        if jitter is not None and len(jitter) not in (1, 3, 4):
            raise SettingError(
                "augment_kwargs color_jitter must be one value, or one each for brightness, "
                f"contrast, saturation and, if it is to change, hue, got {len(jitter)} values"
            )
        if jitter is not None and len(jitter) == 4 and jitter[3] > 0.5:
            raise SettingError(
                f"augment_kwargs color_jitter of hue must be in [0, 0.5], got {jitter[3]:g}"
            )
        for name in ("color_jitter", "color_jitter_prob"):
            value = getattr(self, name)
            if value is not None and self.aa is not None and "3a" not in self.aa:
                raise SettingError(
                    f"augment_kwargs {name} must be left out with aa {self.aa}, which takes its "
                    f"place, got {_join(value) if name == 'color_jitter' else value}"
                )
        if self.aa is not None:
            try:
                _check_sections(self.aa)
                _built(self, 32, (0.5, 0.5, 0.5), True)
            except Exception as error:  # assertions, ValueError and KeyError, by what is wrong
                reason = " ".join(str(error).split())[:200]
                raise SettingError(
                    "aa must be a policy of timm such as rand-m9-mstd0.5-inc1, augmix-m5-w4, "
                    f"v0, original or 3a, got {self.aa!r}{f' ({reason})' if reason else ''}"
                ) from None

    def check_resolution(self, resolution: int) -> None:
        """Raise ``SettingError`` if timm's blur, 23 pixels wide, is wider than the images."""
        if self.gaussian_blur_prob and resolution < _LEAST_BLURRED:
            raise SettingError(
                f"augment_kwargs gaussian_blur_prob must be 0 below {_LEAST_BLURRED} px, "
                f"got {self.gaussian_blur_prob:g} at {resolution} px"
            )

    def __call__(self, image: Image.Image, resolution: int, mean: RGB, mirror: bool) -> np.ndarray:
        """Return an augmented image, uint8 [R, R, 3], drawn from the global random numbers.

        Args:
            image: RGB.
            resolution: R, pixels.
            mean: Channel means in [0, 1]; operations that leave a gap fill it with them.
            mirror: Whether images may be flipped where `hflip` is unset.
        """
        tensor = _built(self, resolution, tuple(mean), mirror)(image)  # uint8 [3, R, R]
        return tensor.permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class Erasing:
    """timm's random erasing (arXiv 1708.04896) of normalised images.

    Attributes:
        reprob: Probability for an image.
        remode: Fill: ``const`` (0), ``rand`` (one random colour) or ``pixel`` (random pixels).
        recount: Rectangles of an image at most; each is smaller the more there are.
    """

    reprob: float
    remode: EraseMode = "const"
    recount: Annotated[int, Within(1, 100)] = 1

    def __call__(self, images: Tensor, samples: np.ndarray, seed: int, epoch: int) -> Tensor:
        """Return images [B, 3, R, R] with parts erased by (seed, epoch, sample).

        On the CPU they are written to. Another device gets all rectangles of a batch at once: one
        by one each would take launches.
        """
        drawn = (samples, seed, epoch)
        if images.device.type == "cpu":
            return self._erased(images, *drawn)
        canvas = torch.full_like(images, math.nan, device="cpu", pin_memory=images.is_cuda)
        canvas = self._erased(canvas, *drawn).to(images.device, non_blocking=True)
        return torch.where(canvas.isnan(), images, canvas)

    def _erased(self, images: Tensor, samples: np.ndarray, seed: int, epoch: int) -> Tensor:
        erase = timm.data.random_erasing.RandomErasing(
            self.reprob, mode=self.remode, max_count=self.recount, device="cpu"
        )
        seeds = image_seeds(seed, "erasing", epoch, samples)
        with GlobalStreams() as streams:
            for image, own in zip(images, seeds, strict=True):
                streams.seed(own)
                erase(image)
        return images


def image_seeds(seed: int, purpose: str, epoch: int, samples: np.ndarray) -> list[int]:
    """Return a seed for each sample, in [0, 2**63)."""
    return (sample_seeds(stream_seed(seed, purpose, epoch), samples) >> np.uint64(1)).tolist()


def _check_sections(policy: str) -> None:
    """Refuse the first section of a policy that timm would pass over in silence.

    It does so where a section has no digit, and takes any other name of transforms for its default.
    What else is wrong with a section, timm says itself.
    """
    name, *sections = policy.split("-")
    for section in sections:
        if name == "rand" and section.startswith("t"):
            if section[1:] not in _RAND_TRANSFORMS:
                known = ", ".join(f"t{own}" for own in _RAND_TRANSFORMS)
                raise SettingError(f"transforms must be one of {known}, got section {section!r}")
        elif not any(character.isdecimal() for character in section):
            raise SettingError(f"a section must be a name and a number, got section {section!r}")


@functools.lru_cache(maxsize=16)
def _built(pipeline: Pipeline, resolution: int, mean: RGB, mirror: bool) -> Any:
    """Return timm's transform for one resolution, from a PIL image to uint8 [3, R, R]."""
    given = {f.name: getattr(pipeline, f.name) for f in fields(pipeline)}
    given["auto_augment"] = given.pop("aa")
    given["interpolation"] = given.pop("train_interpolation")
    if given["hflip"] is None and not mirror:
        given["hflip"] = 0.0
    jitter = given["color_jitter"]
    if jitter is not None and len(jitter) == 1:
        given["color_jitter"] = jitter[0]
    given = {name: value for name, value in given.items() if value is not None}
    built = timm.data.transforms_factory.transforms_imagenet_train(
        resolution, mean=mean, use_prefetcher=True, **given
    )
    for step in built.transforms:
        policies = getattr(step, "policy", [getattr(step, "ops", [])])
        for operation in (own for policy in policies for own in policy):
            if operation.aug_fn is timm.data.auto_augment.posterize:
                operation.aug_fn = _posterize
    return built


def _posterize(image: Image.Image, bits: int, **more: Any) -> Image.Image:
    """Keep so many bits of each channel; Pillow 13 refuses none of them, which timm may draw."""
    if bits < 1:
        return Image.new(image.mode, image.size)  # black, as from older Pillow
    return timm.data.auto_augment.posterize(image, bits, **more)


def _join(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


class Mixing:
    """Mixes each image of a batch with another of it, and their labels likewise.

    One mixing is drawn for a batch, from (seed, epoch, the batch's first sample), so that
    a resumed run draws as an unbroken one. Partners are of the same batch: how an epoch is split
    into batches matters, as it does not without mixing.

    `mixup_alpha` is of mixup's Beta distribution (arXiv 1710.09412), `cutmix_alpha` of CutMix's
    areas (arXiv 1905.04899); 0: off. With both, each batch gets one of the two.
    """

    def __init__(
        self,
        mixup_alpha: float,
        cutmix_alpha: float,
        *,
        num_classes: int,
        seed: int,
        off_epoch: int = 0,
        **more: Any,
    ) -> None:
        """Take more arguments of timm's Mixup; from `off_epoch` on, if it is not 0, mix nothing."""
        self._classes, self._seed, self._off_epoch = num_classes, seed, off_epoch
        self._mix = timm.data.Mixup(
            mixup_alpha, cutmix_alpha, label_smoothing=0.0, num_classes=num_classes, **more
        )

    def mixed(
        self, batches: Iterable[tuple[Tensor, Tensor]], parts: Iterable[Part], epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of these parts mixed: images [B, 3, R, R], shares of classes [B, C].

        The last image of an odd batch stays as it is: timm mixes pairs. Images are written to.
        """
        for (images, labels), part in zip(batches, parts, strict=True):
            whole = len(labels) // 2 * 2
            shares = torch.nn.functional.one_hot(labels, self._classes).to(images.dtype)
            if whole and not (self._off_epoch and epoch >= self._off_epoch):
                with GlobalStreams() as streams:
                    first = int(part.indices[0])
                    streams.seed(stream_seed(self._seed, "mixing", epoch, first))
                    _, shares[:whole] = self._mix(images[:whole], labels[:whole])
            yield images, shares
