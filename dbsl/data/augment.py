"""timm's training augmentation, random erasing, mixup and CutMix, from seeded random numbers.

What is drawn for a sample, or to mix a batch, is a function of (seed, epoch, sample number).
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dbsl.base.machine import lazy_import
from dbsl.base.seeds import sample_seeds, stream_seed
from dbsl.config.image_settings import AugmentKwargs, EraseKwargs
from dbsl.plan.sampler import Part

timm = lazy_import("timm")


@contextmanager
def global_streams(seed: int | None = None) -> Iterator[None]:
    """Leave Python's, NumPy's and torch's own random numbers as they were; inside, seed them.

    timm and torchvision draw from these. What they draw for a sample then depends on its seed
    alone, not on the process or on what was drawn before. The generators of devices are left out.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    state = torch.default_generator.get_state()
    try:
        if seed is not None:
            seed_streams(seed)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(state)


def seed_streams(seed: int) -> None:
    """Start all of them from a seed in [0, 2**63)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)


@functools.lru_cache(maxsize=16)
def timm_transform(
    kwargs: AugmentKwargs, resolution: int, mean: tuple[float, float, float], mirror: bool
) -> Any:
    """Return timm's training transform, from a PIL image to uint8 [3, R, R].

    It draws from the global random numbers. Operations that leave a gap fill it with the channel
    means, in [0, 1]; without `mirror` an unset `hflip` is 0.
    """
    given = {name: value for name, value in asdict(kwargs).items() if value is not None}
    for ours, timms in (("aa", "auto_augment"), ("train_interpolation", "interpolation")):
        if ours in given:
            given[timms] = given.pop(ours)
    if not mirror:
        given.setdefault("hflip", 0.0)
    if len(jitter := given.get("color_jitter", ())) == 1:
        (given["color_jitter"],) = jitter
    built = timm.data.transforms_factory.transforms_imagenet_train(
        resolution, mean=mean, use_prefetcher=True, **given
    )
    for step in built.transforms:
        policies = getattr(step, "policy", [getattr(step, "ops", [])])
        for operation in itertools.chain.from_iterable(policies):
            if operation.aug_fn is timm.data.auto_augment.posterize:
                operation.aug_fn = _posterize
    return built


def _posterize(image: Image.Image, bits: int, **more: Any) -> Image.Image:
    """Keep so many bits of each channel; Pillow 13 refuses none of them, which timm may draw."""
    if bits < 1:
        return Image.new(image.mode, image.size)  # black, as from older Pillow
    return timm.data.auto_augment.posterize(image, bits, **more)


def erase(
    images: Tensor, kwargs: EraseKwargs, samples: np.ndarray, seed: int, epoch: int
) -> Tensor:
    """Return images [B, 3, R, R] with parts erased by (seed, epoch, sample).

    On the CPU they are written to. Another device gets all rectangles of a batch at once: one by
    one each would take launches.
    """
    canvas = images
    if images.device.type != "cpu":
        canvas = torch.full_like(images, math.nan, device="cpu", pin_memory=images.is_cuda)
    erasing = timm.data.random_erasing.RandomErasing(
        kwargs.reprob, mode=kwargs.remode, max_count=kwargs.recount, device="cpu"
    )
    seeds = image_seeds(seed, "erasing", epoch, samples)
    with global_streams():
        for image, its_seed in zip(canvas, seeds, strict=True):
            seed_streams(its_seed)
            erasing(image)
    if canvas is images:
        return images
    canvas = canvas.to(images.device, non_blocking=True)
    return torch.where(canvas.isnan(), images, canvas)


def image_seeds(seed: int, purpose: str, epoch: int, samples: np.ndarray) -> list[int]:
    """Return a seed for each sample, in [0, 2**63)."""
    return (sample_seeds(stream_seed(seed, purpose, epoch), samples) >> np.uint64(1)).tolist()


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
                first = int(part.indices[0])
                with global_streams(stream_seed(self._seed, "mixing", epoch, first)):
                    _, shares[:whole] = self._mix(images[:whole], labels[:whole])
            yield images, shares
