import pickle
import warnings
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2 import functional as TF

from dbsl.config.image_settings import Interpolation
from dbsl.data.transforms import Transform, _affine, to_device

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def make_transform(resolution=32, augment="crop", *, mirror=True, seed=0, plain=False):
    mean, std = ((0.0,) * 3, (1 / 255,) * 3) if plain else (MEAN, STD)
    return Transform(resolution, augment, mirror, mean, std, seed)


def random_images(count=16, side=32):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


@pytest.mark.parametrize("resolution", [24, 32, 40])
def test_transform_none_equals_torchvision_resize_and_normalise(resolution):
    images = random_images()
    out = make_transform(resolution, "none")(images, np.arange(16), 0)
    resized = TF.resize(images, [resolution, resolution], antialias=True)
    expected = TF.normalize(TF.to_dtype(resized, torch.float32, scale=True), MEAN, STD)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
@pytest.mark.parametrize(("resolution", "crop_pct"), [(24, 1.0), (40, 0.75)])
def test_transform_none_resizes_small_images_as_pillow_does(interpolation, resolution, crop_pct):
    transform = make_transform(resolution, "none", plain=True)
    transform = replace(transform, interpolation=interpolation, crop_pct=crop_pct)
    images, cut = random_images(), round(32 * (1 - crop_pct) / 2)
    out = transform(images, np.arange(16), 0).permute(0, 2, 3, 1)
    for image, found in zip(images[:, :, cut : 32 - cut, cut : 32 - cut], out, strict=True):
        image = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        wanted = np.asarray(image.resize((resolution, resolution), transform.resampling))
        assert np.abs(found.numpy() - wanted).max() < 2.01  # bicubic of torch rounds otherwise


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("augment", ["none", "crop", "paper"])
@pytest.mark.parametrize("resolution", [24, 32, 40])
def test_transform_sample_is_the_same_bits_in_any_batch(resolution, augment, prepared):
    transform, samples = make_transform(resolution, augment), np.arange(100, 116)
    images = random_images(side=resolution if prepared else 32)
    whole = transform(images, samples, 3, prepared=prepared)
    assert whole.shape == (16, 3, resolution, resolution)
    assert whole.dtype == torch.float32
    assert whole.is_contiguous(memory_format=torch.channels_last)
    for part in ([5], [9, 2, 14], list(range(15, -1, -1))):
        out = transform(images[part], samples[part], 3, prepared=prepared)
        assert torch.equal(out, whole[part])


@pytest.mark.parametrize("augment", ["crop", "paper"])
def test_transform_other_epoch_sample_or_seed_gives_another_image(augment):
    image = random_images(1).expand(64, -1, -1, -1)
    samples = np.arange(64)
    out = make_transform(32, augment)(image, samples, 0)
    assert len(torch.unique(out, dim=0)) > 50  # of 162 crops, some come twice
    assert not torch.equal(out, make_transform(32, augment)(image, samples, 1))
    assert not torch.equal(out, make_transform(32, augment, seed=1)(image, samples, 0))
    assert torch.equal(out, make_transform(32, augment)(image, samples, 0))


@pytest.mark.parametrize(("side", "pad"), [(8, 1), (20, 2), (4, 1)])
def test_transform_crop_is_a_window_of_the_padded_image(side, pad):
    image = random_images(1, side)
    padded = F.pad(image, (pad,) * 4).float()[0]
    windows = {
        (down, right): padded[:, down : down + side, right : right + side]
        for down in range(2 * pad + 1)
        for right in range(2 * pad + 1)
    }
    transform = make_transform(side, "crop", mirror=False, plain=True)
    out = transform(image.expand(2000, -1, -1, -1), np.arange(2000), 0)
    # Each place must be found and equally often: 2000 draws over up to 81 places.
    counts = {
        place: (out == window).flatten(1).all(1).sum().item() for place, window in windows.items()
    }
    assert sum(counts.values()) == 2000
    expected = 2000 / len(windows)
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values()), counts


def test_transform_crop_mirrors_half_of_the_images_where_allowed():
    image = random_images(1, 8)
    # One window in nine is the image itself.
    images, samples = image.expand(1000, -1, -1, -1), np.arange(1000)
    plain, mirrored = image.float()[0], image.float()[0].flip(2)
    out = make_transform(8, "crop", plain=True)(images, samples, 0)
    assert (out == plain).flatten(1).all(1).any()
    assert (out == mirrored).flatten(1).all(1).any()

    # What loader processes cut and mirror only has to be normalised.
    out = make_transform(8, "crop", plain=True)(images, samples, 0, prepared=True)
    assert (out == plain).all()
    flips = make_transform(8, "crop").mirrored(samples, 0)
    assert 420 < flips.sum() < 580
    assert not make_transform(8, "crop", mirror=False).mirrored(samples, 0).any()
    assert not make_transform(8, "paper").mirrored(samples, 0).any()  # the device does it


def warp_of_ramps(transform, count):
    """Return, per sample, the 2x2 matrix that the warp applied, read off two linear images."""
    side = 64
    ramp = torch.arange(side, dtype=torch.float32) * 2 + 64
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])
    image = torch.cat([image, image[:1]]).to(torch.uint8)
    out = transform(image.expand(count, -1, -1, -1), np.arange(count), 0)[:, :2]
    centre = out[:, :, 24:40, 24:40] / 2  # far from the borders, where reflection bends the ramp
    along_x = (centre[:, :, :, 1:] - centre[:, :, :, :-1]).mean((2, 3))
    along_y = (centre[:, :, 1:] - centre[:, :, :-1]).mean((2, 3))
    return torch.stack([along_x, along_y], dim=2).double()  # [N, channel x|y, direction]


@pytest.mark.parametrize("mirror", [False, True])
def test_transform_paper_rotates_and_zooms_within_its_bounds(mirror):
    transform = make_transform(64, "paper", mirror=mirror, plain=True)
    matrix = warp_of_ramps(transform, 300)
    determinant = torch.linalg.det(matrix)
    assert ((determinant < 0).any() and (determinant > 0).any()) == mirror
    scale = determinant.abs().sqrt()
    assert 0.749 < scale.min() < 0.77
    assert 1.23 < scale.max() < 1.251
    degrees = torch.rad2deg(torch.atan2(matrix[:, 1, 0], matrix[:, 1, 1]))
    assert degrees.abs().max() < 18.05
    assert degrees.min() < -17
    assert degrees.max() > 17
    # Aspect kept: a rotation, a scale and at most a mirror, so the matrix is orthogonal.
    product = matrix @ matrix.mT / scale.square()[:, None, None]
    torch.testing.assert_close(product, torch.eye(2).double().expand_as(product), rtol=0, atol=5e-3)


def test_transform_paper_fills_borders_by_reflection():
    image = torch.full((64, 3, 32, 32), 200, dtype=torch.uint8)
    out = make_transform(32, "paper", plain=True)(image, np.arange(64), 0)
    torch.testing.assert_close(out, torch.full_like(out, 200.0))


def test_transform_survives_pickling():  # loader processes get it that way
    transform = make_transform(32, "paper")
    assert pickle.loads(pickle.dumps(transform)) == transform


def test_to_device_read_only_array_is_copied():
    array = np.arange(4)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_device(array[1:], torch.device("cpu"))
    tensor += 1
    assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("augment", ["none", "crop", "paper"])
def test_transform_on_cuda_never_waits_and_equals_the_cpu(augment):
    images, samples = random_images(), np.arange(16)
    transform = make_transform(24, augment)
    expected = transform(images, samples, 0)
    on_cuda = images.cuda()
    transform(on_cuda, samples, 0)  # the first call sets kernels and memory up
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = transform(on_cuda, samples, 0)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    # One grey level of difference: the CPU resizes in fixed point.
    assert (out.cpu() - expected).abs().max() < 1.5 / 255 / min(STD)


def test_what_normalises_is_copied_to_the_device_once():
    first, again, other = (
        _affine(*((0.5,) * 3, (0.25,) * 3), width, torch.device("cpu")) for width in (24, 24, 32)
    )
    assert again is first is not other
