import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from dbsl.base.seeds import sample_uniforms
from dbsl.data.transforms import (
    AREA,
    DRAWS,
    EVAL_CROP,
    RATIO,
    Transform,
    cut,
    random_boxes,
    upright,
)

BILINEAR = Image.Resampling.BILINEAR


def framed(width, height):
    """Return a black image: a red frame, 6 px wide, and the pixels from 8 to 12 px green."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = 255
    pixels[6:-6, 6:-6] = 0
    pixels[8:-8, 8:-8, 1] = 255
    pixels[12:-12, 12:-12] = 0
    return Image.fromarray(pixels)


def photograph(width, height):
    """Return a smooth picture as a JPEG file's content."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / 37 + c) * np.cos(y / 29 - c) for c in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(waves, 2).astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def transform(augment, resolution=48):
    return Transform(resolution, augment, True, (0.5,) * 3, (0.2,) * 3, 0, EVAL_CROP)


def one_cut(image, augment, side):
    (box,) = transform(augment, side).boxes(np.array([image.size]), np.array([3]), 0)
    return np.asarray(cut(image, box, side, False, BILINEAR))


def test_none_cuts_the_central_seven_eighths():
    out = one_cut(framed(128, 128), "none", 56)  # 8 of 128 px off each side
    assert out.shape == (56, 56, 3)
    assert out[4:-4, 4:-4, 0].max() == 0
    assert out[0, :, 1].min() > 150
    assert out[:, -1, 1].min() > 150


def test_paper_keeps_the_whole_image():
    out = one_cut(framed(128, 96), "paper", 64)
    assert out[0, :, 0].min() == 255
    assert out[-1, :, 0].min() == 255


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("augment", ["none", "crop", "paper"])
@pytest.mark.parametrize("size", [(96, 60), (17, 300), (1, 1)])
def test_any_image_gives_a_square(augment, size, mode):
    image = Image.new("RGB", size, (10, 20, 30))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    out = one_cut(image, augment, 48)
    assert out.shape == (48, 48, 3)
    wanted = np.asarray(image.convert("RGB"))[0, 0].tolist()
    assert np.unique(out.reshape(-1, 3), axis=0).tolist() == [wanted]


@pytest.mark.parametrize("size", [(500, 375), (300, 40), (40, 300), (224, 224)])
def test_random_boxes_are_distributed_as_those_of_torchvision(size):
    count = 4000
    uniforms = sample_uniforms(5, np.arange(count), DRAWS)
    found = random_boxes(np.tile(size, (count, 1)), uniforms)
    left, top, right, bottom = found.T
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= size[0]).all()
    assert (bottom <= size[1]).all()
    assert (right > left).all()
    assert (bottom > top).all()
    crop, image = v2.RandomResizedCrop(8, AREA, RATIO), torch.zeros(3, size[1], size[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drawn = [crop.make_params([image]) for _ in range(count)]
    theirs = np.array([[p["left"], p["top"], p["width"], p["height"]] for p in drawn])
    ours = np.stack([left, top, right - left, bottom - top], 1)
    for column in range(4):
        a, b = np.sort(ours[:, column]), np.sort(theirs[:, column])
        grid = np.unique(np.concatenate([a, b]))
        gap = np.searchsorted(a, grid, "right") - np.searchsorted(b, grid, "right")
        assert np.abs(gap).max() / count < 1.95 * (2 / count) ** 0.5  # Kolmogorov-Smirnov, 0.001


def test_a_box_depends_on_its_own_sample_alone():
    sizes, samples = np.array([[100, 80], [60, 60], [90, 200]]), np.array([7, 1, 4])
    whole = transform("crop").boxes(sizes, samples, 2)
    for k in range(3):
        assert transform("crop").boxes(sizes[[k]], samples[[k]], 2).tolist() == [whole[k].tolist()]
    assert (transform("crop").boxes(sizes, samples, 3) != whole).any()


@pytest.mark.parametrize("side", [32, 100, 160])
@pytest.mark.parametrize("augment", ["paper", "none"])
def test_a_large_jpeg_is_decoded_at_reduced_size_and_looks_the_same(side, augment):
    content = photograph(1013, 758)
    way = replace(transform(augment), crop_pct=0.6)
    (box,) = way.boxes(np.array([[1013, 758]]), np.array([3]), 0)
    image = Image.open(io.BytesIO(content))
    found = np.asarray(cut(image, box, side, False, BILINEAR)).astype(float)
    fewest = min(box[2] - box[0], box[3] - box[1]) / side
    assert image.size[0] <= -(-1013 // min(8, 2 ** int(np.log2(fewest)))) + 1
    whole = Image.open(io.BytesIO(content)).convert("RGB").crop(tuple(np.rint(box).astype(int)))
    wanted = np.asarray(whole.resize((side, side), BILINEAR)).astype(float)
    assert np.abs(found - wanted).mean() < 2.5


def test_cut_mirrors_left_and_right():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    box = np.array([0, 0, 4, 4])
    plain, mirrored = (np.asarray(cut(image, box, 4, mirror, BILINEAR)) for mirror in (False, True))
    assert (plain[:, ::-1] == mirrored).all()


def test_exif_orientation_is_applied_before_sizes_are_asked_for():
    image, exif = Image.new("RGB", (40, 20)), Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif)
    assert upright(Image.open(file)).size == (20, 40)
