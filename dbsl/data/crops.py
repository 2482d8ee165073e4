"""Which part of a large image is used, and how it is cut out of the file: what loaders run.

A crop is resized straight from the image, without a copy of it in between, and a JPEG that is at
least twice as large as needed is decoded at a half, a quarter or an eighth of its size.
"""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageOps

AREA = (0.08, 1.0)  # random crop over image: torchvision's defaults, and timm's
RATIO = (3 / 4, 4 / 3)  # width over height
TRIES = 10
DRAWS = 4 * TRIES  # uniform numbers that a random crop takes

_ORIENTATION = 0x0112  # the EXIF tag


def random_boxes(sizes: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return a random crop of each image: left, top, right, bottom, int64 [B, 4].

    Area and logarithm of the aspect ratio are uniform, as with torchvision's RandomResizedCrop; an
    image in which ten tries do not fit gives its central part of the nearest allowed ratio.

    Args:
        sizes: Width and height of each image, int [B, 2].
        uniforms: In [0, 1), float64 [B, DRAWS].
    """
    width, height = (side[:, None] for side in np.asarray(sizes, dtype=np.int64).T)
    area, ratio, right, down = np.moveaxis(uniforms.reshape(-1, TRIES, 4), 2, 0)
    low, high = np.log(RATIO)
    area = (AREA[0] + (AREA[1] - AREA[0]) * area) * width * height
    ratio = np.exp(low + (high - low) * ratio)
    wide = np.rint(np.sqrt(area * ratio)).astype(np.int64)  # [B, TRIES]
    tall = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (wide > 0) & (wide <= width) & (tall > 0) & (tall <= height)
    left = np.floor(right * (width - wide + 1)).astype(np.int64)
    top = np.floor(down * (height - tall + 1)).astype(np.int64)
    tries = np.stack([left, top, left + wide, top + tall], axis=2)  # [B, TRIES, 4]
    boxes = tries[np.arange(len(tries)), fits.argmax(1)]
    none = ~fits.any(1)
    boxes[none] = _central_boxes(np.asarray(sizes)[none])
    return boxes


def centre_boxes(sizes: np.ndarray, share: float) -> np.ndarray:
    """Return the central square of each image, of `share` of its shorter side, float64 [B, 4]."""
    sizes = np.asarray(sizes, dtype=np.float64)
    side = share * sizes.min(1, keepdims=True)
    return np.hstack([(sizes - side) / 2, (sizes + side) / 2])


def whole_boxes(sizes: np.ndarray) -> np.ndarray:
    """Return all of each image, float64 [B, 4]."""
    sizes = np.asarray(sizes, dtype=np.float64)
    return np.hstack([np.zeros_like(sizes), sizes])


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF orientation says; one without it is not decoded yet."""
    turned = image.getexif().get(_ORIENTATION, 1) != 1
    return ImageOps.exif_transpose(image) if turned else image


def cut(
    image: Image.Image,
    box: np.ndarray,
    side: int,
    mirror: bool = False,
    resampling: Image.Resampling = Image.Resampling.BILINEAR,
) -> Image.Image:
    """Return a part of an image as RGB, [side, side], resized with antialiasing.

    Args:
        image: The image, which may be not decoded yet.
        box: Left, top, right, bottom in its pixels.
        side: Pixels.
        mirror: Whether left and right change places.
        resampling: How pixels are computed.
    """
    before, spare = image.size, min(box[2] - box[0], box[3] - box[1]) / side
    if spare >= 2 and hasattr(image, "draft"):
        scale = min(8, 2 ** int(math.log2(spare)))
        drafted = image.draft(None, (before[0] // scale, before[1] // scale))
        if drafted is not None:  # JPEG alone can
            box = np.asarray(box) * (drafted[1][2] / before[0])
    if image.mode != "RGB":
        image = image.convert("RGB")
    image = image.resize((side, side), resampling, box=tuple(map(float, box)))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirror else image


def _central_boxes(sizes: np.ndarray) -> np.ndarray:
    width, height = np.asarray(sizes, dtype=np.int64).T
    wide = np.minimum(width, np.rint(height * RATIO[1]).astype(np.int64))
    tall = np.minimum(height, np.rint(width / RATIO[0]).astype(np.int64))
    left, top = (width - wide) // 2, (height - tall) // 2
    return np.stack([left, top, left + wide, top + tall], axis=1)
