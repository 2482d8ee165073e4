"""Images at a stage's resolution: cut, resize, augment, normalise, mix.

A sample's random changes are a function of (seed, epoch, sample number). A sample therefore looks
the same whichever worker trains on it and whichever batch it is in. Only mixing is drawn per batch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from dbsl.base.machine import lazy_import
from dbsl.base.seeds import global_streams, sample_seeds, sample_uniforms, stream_seed
from dbsl.config.image_settings import Augment, Interpolation
from dbsl.plan.sampler import Part

timm = lazy_import("timm")

# Only Pillow does others: torch has them on some devices, with other pixels, or not at all.
_BY_TORCH = ("bilinear", "bicubic")

EVAL_CROP = 0.875  # side of the centre crop over the resized shorter side, as for ImageNet
_ROTATION = 0.05  # largest rotation of "paper", in turns: 18 degrees
_ZOOM = 0.25  # largest change of scale of "paper"
AREA = (0.08, 1.0)  # random crop over image: torchvision's defaults, and timm's
RATIO = (3 / 4, 4 / 3)  # width over height
_LOG_RATIO = np.log(RATIO).tolist()
TRIES = 10
DRAWS = 4 * TRIES  # uniform numbers that a random crop takes

Means = tuple[float, float, float]  # red, green, blue
Box = Sequence[float]  # left, top, right, bottom: the part of an image to use


@dataclass(frozen=True)
class Transform:
    """Turns uint8 images into a model's inputs at one resolution.

    A batch is transformed in one or two places. Small images of one size remain on the device and
    pass only `__call__`. A loader process crops and resizes large or uneven images, and `__call__`
    does the rest, which is cheap on a whole batch.

    | augment | small images, on the device | others, on the host | then, on the device |
    | --- | --- | --- | --- |
    | none | centre crop, resize | centre crop, resize | |
    | crop | from 16 px, zero-pad by side/8, crop; flip, resize | random resized crop, flip | |
    | paper | resize, flip, rotate, zoom | resize | flip, rotate, zoom |
    | timm | | timm's pipeline | |

    Evaluation uses "none". "paper" is the augmentation of the ImageNet runs of dual-batch
    learning (arXiv:2509.26092): rotation within 18 degrees, zoom within 25 % with the aspect kept,
    bilinear, borders filled by reflection.
    """

    resolution: int  # side R of the images that come out, pixels
    augment: Augment
    mirror: bool  # whether a mirrored image keeps its meaning and may be flipped
    mean: Means  # subtracted from channels in [0, 1]
    std: Means  # then divides
    seed: int
    crop_pct: float = 1.0  # side of the centre crop of "none" over the image's shorter side
    interpolation: Interpolation = "bilinear"  # how "none" resizes
    aa: str | None = None  # timm's policy, for "timm"

    def __call__(
        self, images: Tensor, samples: np.ndarray, epoch: int, *, prepared: bool = False
    ) -> Tensor:
        """Return normalised float32 images, [B, 3, R, R] in channels_last, on the images' device.

        Never waits for the device, except with an interpolation that only Pillow has. `images` are
        uint8 [B, H, W, 3]: from loader processes if `prepared`, else square with "crop". `samples`
        are int64 [B].
        """
        augment = "none" if self.augment != "paper" and prepared else self.augment
        assert augment != "timm", "loader processes augment"
        if augment == "none" and not prepared:  # the central square, in whole pixels
            side = images.shape[1]
            cut = max(1, round(side * self.crop_pct))
            first = (side - cut) // 2
            images = images[:, first : first + cut, first : first + cut]
        elif augment == "crop":
            side, padded = images.shape[1], padded_images(images).view(-1, 3)
            rows, columns = self.windows(side, samples, epoch, np.arange(len(samples)))
            rows, columns = to_device(np.stack([rows, columns]), images.device)
            images = padded[rows[:, :, None] + columns[:, None, :]]
        images = self._normalise(self._resize(images))
        return _warp(images, *self._changes(samples, epoch)) if augment == "paper" else images

    def _changes(self, samples: np.ndarray, epoch: int) -> tuple[np.ndarray, ...]:
        """Return which samples are mirrored, and two uniform numbers for each, [B]."""
        stream = stream_seed(self.seed, "augment", epoch)
        chance, first, second = sample_uniforms(stream, samples, 3).T
        return (chance < 0.5) & self.mirror, first, second

    def windows(
        self, side: int, samples: np.ndarray, epoch: int, places: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels of `padded_images` of one side that "crop" shows, as rows and columns.

        Their sums are the pixels' numbers: int64 [B, S] each. The images are at `places`, [B].
        """
        flipped, down, right = self._changes(samples, epoch)
        pad = _padding(side)
        wide = side + 2 * pad
        across = np.where(flipped[:, None], np.arange(side)[::-1], np.arange(side))
        columns = np.floor(right * (2 * pad + 1)).astype(np.int64)[:, None] + across
        rows = np.floor(down * (2 * pad + 1)).astype(np.int64)[:, None] + np.arange(side)
        return (rows + wide * places[:, None]) * wide, columns

    def drawn(self, samples: np.ndarray, epoch: int) -> np.ndarray:
        """Return what `taken` needs for each sample, float64 [B, DRAWS + 1]."""
        crops = sample_uniforms(stream_seed(self.seed, "crop", epoch), samples, DRAWS)
        return np.column_stack([crops, self._changes(samples, epoch)[0]])

    def box(self, size: tuple[int, int], uniforms: np.ndarray) -> Box:
        """Return the part to use of an image of (width, height)."""
        if self.augment == "crop":
            return random_box(*size, uniforms)
        (width, height), part = size, self.crop_pct * min(size)
        wide, tall = size if self.augment == "paper" else (part, part)
        return (width - wide) / 2, (height - tall) / 2, (width + wide) / 2, (height + tall) / 2

    def taken(self, image: Image.Image, drawn: np.ndarray, bits: int = 16) -> Image.Image:
        """Return the part to use of an opened image, RGB [R, R]; for timm's pipeline, the whole.

        It is resized directly from the image, without an intermediate copy. A JPEG that is at least
        twice as large as needed is decoded at a half, a quarter or an eighth of its size.
        """
        if self.augment == "timm":
            return as_rgb(image, bits)
        side, (width, height) = self.resolution, image.size
        box = self.box(image.size, drawn[:-1])
        spare = min(box[2] - box[0], box[3] - box[1]) / side
        if spare >= 2 and hasattr(image, "draft"):
            scale = min(8, 2 ** int(math.log2(spare)))
            drafted = image.draft(None, (width // scale, height // scale))
            if drafted is not None:  # only JPEG can
                box = [edge * (drafted[1][2] / width) for edge in box]
        image = as_rgb(image, bits).resize((side, side), self.resampling, box)
        mirrored = self.augment == "crop" and drawn[-1]
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else image

    def augmented(self, image: Image.Image, sample: int, epoch: int) -> np.ndarray:
        """Return a decoded RGB image augmented by timm's pipeline, uint8 [R, R, 3]."""
        with global_streams(image_seed(self.seed, epoch, sample)):
            transform = timm_transform(self.aa, self.resolution, self.mean, self.mirror)
            return transform(image).permute(1, 2, 0).numpy()

    @property
    def resampling(self) -> Image.Resampling:
        """How Pillow resizes."""
        return Image.Resampling[self._mode.upper()]

    @property
    def _mode(self) -> Interpolation:
        return self.interpolation if self.augment == "none" else "bilinear"

    def _resize(self, images: Tensor) -> Tensor:
        side, mode = self.resolution, self._mode
        if images.shape[1:3] == (side, side):
            return images
        if mode not in _BY_TORCH:
            pixels = images.cpu().numpy()
            pixels = [Image.fromarray(p).resize((side, side), self.resampling) for p in pixels]
            return to_device(np.stack(pixels), images.device)
        from torchvision.transforms.v2 import functional as TF

        images, mode = images.permute(0, 3, 1, 2), TF.InterpolationMode(mode)
        images = TF.resize(images, [side, side], interpolation=mode, antialias=True)
        return images.permute(0, 2, 3, 1)

    def _normalise(self, images: Tensor) -> Tensor:
        batch, height, width, _ = images.shape
        scale, offset = _affine(self.mean, self.std, width, images.device)
        # Rows of whole pixels: the innermost loop is then a row long, not three channels.
        rows = images.reshape(batch * height, width * 3)
        rows = torch.mul(rows, scale).add_(offset)  # from uint8 to float32 on the way
        return rows.view(batch, height, width, 3).permute(0, 3, 1, 2)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return the array as a tensor on the device, without waiting for the device's pending work.

    On the CPU the tensor may share the array's memory.
    """
    # A read-only array, such as a sampler's permutation, is copied: torch would warn about it.
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from pageable memory the copy would not be asynchronous
    return tensor.to(device, non_blocking=True)


@functools.lru_cache(maxsize=16)  # without the cache each batch would copy it to the device
def _affine(mean: Means, std: Means, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return scale and offset, [width * 3], that turn 0..255 into (x / 255 - mean) / std."""
    scale = 1 / (255 * np.asarray(std))
    offset = -np.asarray(mean) / np.asarray(std)
    scale, offset = np.tile(np.stack([scale, offset]).astype(np.float32), width)
    return to_device(scale, device), to_device(offset, device)


def _padding(side: int) -> int:
    return side // 8 if side >= 16 else 0  # a pixel of a smaller image can be a whole stroke


def padded_images(images: Tensor) -> Tensor:
    """Return images [B, S, S, 3], zero-padded at each edge by an eighth of S, from 16 px on.

    One gather of their pixels, as [P, 3], then crops and mirrors. On the CPU it is four times as
    fast as indexing batch, row and column separately.
    """
    pad = _padding(images.shape[1])
    return F.pad(images, (0, 0, pad, pad, pad, pad))


def _warp(images: Tensor, flipped: np.ndarray, turn: np.ndarray, zoom: np.ndarray) -> Tensor:
    """Mirror where `flipped`, then rotate and scale; `turn` and `zoom` in [0, 1) say how much."""
    angle = (2 * turn - 1) * _ROTATION * 2 * math.pi
    scale = 1 + (2 * zoom - 1) * _ZOOM  # above 1 the image shrinks: the grid reaches further out
    sign = np.where(flipped, -1.0, 1.0)
    cosine, sine = scale * np.cos(angle), scale * np.sin(angle)
    terms = np.stack([sign * cosine, -sign * sine, sine, cosine]).astype(np.float32)
    a, b, c, d = to_device(terms, images.device).view(4, -1, 1, 1)
    # Not F.affine_grid: its matrix product runs in TF32 or bf16 where the trainer allows them.
    # That moves pixels, and its bits may depend on the batch.
    side = images.shape[-1]
    centres = (2 * torch.arange(side, device=images.device) + 1) / side - 1
    x, y = centres[None, None, :], centres[None, :, None]
    grid = torch.stack([a * x + b * y, c * x + d * y], dim=-1)  # [B, R, R, 2]
    warped = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return warped.contiguous(memory_format=torch.channels_last)


def random_box(width: int, height: int, uniforms: np.ndarray) -> Box:
    """Return a random crop of an image, in whole pixels.

    Area and logarithm of the aspect ratio are uniform, as in torchvision's RandomResizedCrop. If
    ten tries do not fit, the crop is the central part with the nearest allowed ratio. `uniforms`
    lie in [0, 1), float64 [DRAWS].
    """
    low, high = _LOG_RATIO
    for area, ratio, right, down in uniforms.reshape(TRIES, 4).tolist():
        area = (AREA[0] + (AREA[1] - AREA[0]) * area) * width * height
        ratio = float(np.exp(low + (high - low) * ratio))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            left, top = int(right * (width - wide + 1)), int(down * (height - tall + 1))
            return left, top, left + wide, top + tall
    wide, tall = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - wide) // 2, (height - tall) // 2
    return left, top, left + wide, top + tall


def as_rgb(image: Image.Image, bits: int = 16) -> Image.Image:
    """Return an image as decoded RGB; `bits` are those of a value, if it has more than 8.

    Pillow would turn most such values white.

    Raises:
        ValueError: If it has values beyond 16 bits, or floats, which have no known range.
    """
    if image.mode[0] in "IF":
        values = np.asarray(image)
        if image.mode == "F" or not 0 <= values.min() <= values.max() < 2**16:
            raise ValueError(f"mode {image.mode}, values of no known range")
        image = Image.fromarray((values >> (bits - 8)).clip(max=255).astype(np.uint8))
    image.load()  # else a damaged image fails where its pixels are first read
    return image if image.mode == "RGB" else image.convert("RGB")


# --- timm's draws from global random numbers


@functools.lru_cache(maxsize=16)
def timm_transform(aa: str | None, resolution: int, mean: Means, mirror: bool) -> Any:
    """Return timm's training transform, from a PIL image to uint8 [3, R, R].

    It draws from the global generators. Operations that leave a gap fill it with the channel
    means, in [0, 1]; without `mirror` nothing is flipped.
    """
    flips = {} if mirror else {"hflip": 0.0}
    built = timm.data.transforms_factory.transforms_imagenet_train(
        resolution, mean=mean, auto_augment=aa, use_prefetcher=True, **flips
    )
    for step in built.transforms:
        policies = getattr(step, "policy", [getattr(step, "ops", [])])
        for operation in itertools.chain.from_iterable(policies):
            if operation.aug_fn is timm.data.auto_augment.posterize:
                operation.aug_fn = _posterize
    return built


def _posterize(image: Image.Image, bits: int, **more: Any) -> Image.Image:
    """Keep `bits` bits of each channel; timm may draw 0, which Pillow 13 refuses."""
    if bits < 1:
        return Image.new(image.mode, image.size)  # black, as from older Pillow
    return timm.data.auto_augment.posterize(image, bits, **more)


def image_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the seed of timm's draws for a sample, in [0, 2**63)."""
    (own,) = sample_seeds(stream_seed(seed, "timm", epoch), np.array([sample]))
    return int(own >> np.uint64(1))


@dataclass(frozen=True)
class Mixing:
    """Mixes each image and label of a batch with another of it.

    Each batch draws one mixing, from (seed, epoch, the batch's first sample), so a resumed run
    draws as an unbroken one. Partners are in the same batch: unlike without mixing, the split of an
    epoch into batches matters.

    With both alphas, each batch uses one of the two.
    """

    mixup_alpha: float  # of mixup's Beta distribution (arXiv 1710.09412); 0: off
    cutmix_alpha: float  # of CutMix's areas (arXiv 1905.04899); 0: off
    num_classes: int
    seed: int

    def mixed(
        self, batches: Iterable[tuple[Tensor, Tensor]], parts: Iterable[Part], epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of these parts, mixed: images [B, 3, R, R], shares of classes [B, C].

        The last image of an odd batch is not mixed: timm mixes pairs. Images change in place.
        """
        classes = self.num_classes
        mix = timm.data.Mixup(
            self.mixup_alpha, self.cutmix_alpha, label_smoothing=0.0, num_classes=classes
        )
        for (images, labels), part in zip(batches, parts, strict=True):
            whole = len(labels) // 2 * 2
            shares = F.one_hot(labels, classes).to(images.dtype)
            if whole:
                first = int(part.indices[0])
                with global_streams(stream_seed(self.seed, "mixing", epoch, first)):
                    _, shares[:whole] = mix(images[:whole], labels[:whole])
            yield images, shares
