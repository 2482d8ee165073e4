import io
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import timm.data
import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as TF

from dbsl.base.seeds import sample_uniforms, stream_seed
from dbsl.config.image_settings import Interpolation
from dbsl.data import transforms
from dbsl.data.transforms import (
    Mixing,
    Transform,
    as_rgb,
    random_box,
    to_device,
)

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


def make_transform(resolution=32, augment="crop", *, mirror=True, seed=0, plain=False):
    mean, std = ((0.0,) * 3, (1 / 255,) * 3) if plain else (MEAN, STD)
    return Transform(resolution, augment, mirror, mean, std, seed)


def random_images(count=16, side=32):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    return torch.from_numpy(pixels)


@pytest.mark.parametrize("resolution", [24, 32, 40])
def test_transform_none_equals_torchvision_resize_and_normalise(resolution):
    images = random_images()
    out = make_transform(resolution, "none")(images, np.arange(16), 0)
    resized = TF.resize(images.permute(0, 3, 1, 2), [resolution, resolution], antialias=True)
    expected = TF.normalize(TF.to_dtype(resized, torch.float32, scale=True), MEAN, STD)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("interpolation", get_args(Interpolation))
@pytest.mark.parametrize(("resolution", "crop_pct"), [(24, 1.0), (40, 0.75)])
def test_transform_none_resizes_small_images_as_pillow_does(interpolation, resolution, crop_pct):
    transform = make_transform(resolution, "none", plain=True)
    transform = replace(transform, interpolation=interpolation, crop_pct=crop_pct)
    images, cut = random_images(), round(32 * (1 - crop_pct) / 2)
    out = transform(images, np.arange(16), 0).permute(0, 2, 3, 1)
    for image, found in zip(images[:, cut : 32 - cut, cut : 32 - cut], out, strict=True):
        image = Image.fromarray(image.contiguous().numpy())
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


@pytest.mark.parametrize(("side", "pad"), [(16, 2), (20, 2), (17, 2), (15, 0), (8, 0), (4, 0)])
def test_transform_crop_is_a_window_of_the_padded_image(side, pad):
    image = random_images(1, side)
    padded = F.pad(image.permute(0, 3, 1, 2), (pad,) * 4).float()[0]
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
    plain = image[0].permute(2, 0, 1).float()
    mirrored = plain.flip(2)
    out = make_transform(8, "crop", plain=True)(images, samples, 0)
    assert (out == plain).flatten(1).all(1).any()
    assert (out == mirrored).flatten(1).all(1).any()

    # What loader processes cut and mirror only has to be normalised.
    out = make_transform(8, "crop", plain=True)(images, samples, 0, prepared=True)
    assert (out == plain).all()
    flips = make_transform(8, "crop").drawn(samples, 0)[:, -1]
    assert 420 < flips.sum() < 580
    assert not make_transform(8, "crop", mirror=False).drawn(samples, 0)[:, -1].any()


def warp_of_ramps(transform, count):
    """Return, per sample, the 2x2 matrix that the warp applied, read off two linear images."""
    side = 64
    ramp = torch.arange(side, dtype=torch.float32) * 2 + 64
    image = torch.stack([ramp.expand(side, side), ramp[:, None].expand(side, side)])
    image = torch.cat([image, image[:1]]).to(torch.uint8).permute(1, 2, 0)
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
    image = torch.full((64, 32, 32, 3), 200, dtype=torch.uint8)
    out = make_transform(32, "paper", plain=True)(image, np.arange(64), 0)
    torch.testing.assert_close(out, torch.full_like(out, 200.0))


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
        transforms._affine(*((0.5,) * 3, (0.25,) * 3), width, torch.device("cpu"))
        for width in (24, 24, 32)
    )
    assert again is first is not other


# --- large images, which loader processes cut


def photograph(width, height):
    """Return a smooth picture as a JPEG file's content."""
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 120 * np.sin(x / 37 + c) * np.cos(y / 29 - c) for c in range(3)]
    file = io.BytesIO()
    Image.fromarray(np.stack(waves, 2).astype(np.uint8)).save(file, "JPEG", quality=95)
    return file.getvalue()


def taken_by(transform, image, sample=3):
    (drawn,) = transform.drawn(np.array([sample]), 0)
    box = transform.box(image.size, drawn[:-1])
    return np.asarray(transform.taken(image, drawn)), box


def test_large_images_are_cut_to_their_centre_or_stay_whole():
    for augment, box in (("none", [24, 8, 136, 120]), ("paper", [0, 0, 160, 128])):
        transform = replace(make_transform(56, augment), crop_pct=0.875)
        assert transform.box((160, 128), None) == tuple(box)


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "RGBA", "CMYK"])
@pytest.mark.parametrize("augment", ["none", "crop", "paper"])
@pytest.mark.parametrize("size", [(96, 60), (17, 300), (1, 1)])
def test_any_image_gives_a_square(augment, size, mode):
    image = Image.new("RGB", size, (10, 20, 30))
    image = image.quantize(4) if mode == "P" else image.convert(mode)
    out, _ = taken_by(make_transform(48, augment), image)
    assert out.shape == (48, 48, 3)
    wanted = np.asarray(image.convert("RGB"))[0, 0].tolist()
    assert np.unique(out.reshape(-1, 3), axis=0).tolist() == [wanted]


def test_values_of_no_known_range_are_refused():
    values = np.arange(256, dtype=np.int32).reshape(16, 16)
    for bad in (values.astype(np.float32), values * 1000):
        with pytest.raises(ValueError, match="values of no known range"):
            as_rgb(Image.fromarray(bad))


@pytest.mark.parametrize("size", [(500, 375), (300, 40), (40, 300), (224, 224)])
def test_random_boxes_are_distributed_as_those_of_torchvision(size):
    count = 4000
    uniforms = sample_uniforms(5, np.arange(count), transforms.DRAWS)
    found = np.array([random_box(*size, row) for row in uniforms])
    left, top, right, bottom = found.T
    for first, last, side in ((left, right, size[0]), (top, bottom, size[1])):
        assert ((first >= 0) & (first < last) & (last <= side)).all()
    crop = v2.RandomResizedCrop(8, transforms.AREA, transforms.RATIO)
    image = torch.zeros(3, size[1], size[0])
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


@pytest.mark.parametrize("side", [32, 100, 160])
@pytest.mark.parametrize("augment", ["paper", "none"])
def test_a_large_jpeg_is_decoded_at_reduced_size_and_looks_the_same(side, augment):
    content = photograph(1013, 758)
    image = Image.open(io.BytesIO(content))
    found, box = taken_by(replace(make_transform(side, augment), crop_pct=0.6), image)
    fewest = min(box[2] - box[0], box[3] - box[1]) / side
    assert image.size[0] <= -(-1013 // min(8, 2 ** int(np.log2(fewest)))) + 1
    whole = Image.open(io.BytesIO(content)).convert("RGB").crop(tuple(np.rint(box).astype(int)))
    wanted = np.asarray(whole.resize((side, side), Image.Resampling.BILINEAR)).astype(float)
    assert np.abs(found.astype(float) - wanted).mean() < 2.5


def test_half_of_large_images_are_mirrored_with_crop_and_the_others_on_the_device():
    image = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    for augment, mirrors in (("crop", True), ("paper", False), ("none", False)):
        transform = make_transform(4, augment)
        whole = np.tile([0.999, 0.5, 0, 0], 10)
        plain, mirrored = (
            np.asarray(transform.taken(image, np.append(whole, m))) for m in (False, True)
        )
        assert np.array_equal(plain[:, ::-1] if mirrors else plain, mirrored)


# --- mixing


def batch_of(size, side=8):
    images = torch.arange(size, dtype=torch.float32)[:, None, None, None].expand(-1, 3, side, side)
    return images.clone(), torch.arange(size) % 5


def part(first, size):
    return SimpleNamespace(indices=np.arange(first, first + size))


def mixed(mixing, size, first=0, epoch=0):
    ((images, shares),) = mixing.mixed([batch_of(size)], [part(first, size)], epoch)
    return images, shares


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_labels_are_mixed_as_the_images_are_and_an_odd_last_image_stays(size, mixup, cutmix):
    mixing = Mixing(mixup, cutmix, num_classes=5, seed=3)
    plain, labels = batch_of(size)
    for epoch in range(6):
        images, shares = mixed(mixing, size, epoch=epoch)
        torch.testing.assert_close(shares.sum(1), torch.ones(size))
        if size % 2:
            assert torch.equal(images[-1], plain[-1])
            assert shares[-1].argmax() == labels[-1]
        for number in range(size // 2 * 2):
            partner = size // 2 * 2 - 1 - number
            # Images have their own number everywhere, so that their mean tells the shares.
            own = (images[number].mean() - partner) / (number - partner)
            expected = torch.zeros(5)
            expected[labels[number]] += own
            expected[labels[partner]] += 1 - own
            torch.testing.assert_close(shares[number], expected, atol=1e-4, rtol=0)


def test_draws_depend_on_seed_epoch_and_batch_alone():
    def drawn(seed=0, first=0, epoch=0, before=1):
        np.random.seed(before)  # noqa: NPY002 - what else the process has drawn
        state = np.random.get_state()[1].tolist()  # noqa: NPY002
        shares = mixed(Mixing(1.0, 0.0, num_classes=5, seed=seed), 6, first, epoch)[1]
        assert np.random.get_state()[1].tolist() == state  # noqa: NPY002
        return shares.tolist()

    assert drawn() == drawn(before=2)
    others = [drawn(seed=1), drawn(first=6), drawn(epoch=1)]
    assert all(other != drawn() for other in others)


@pytest.mark.parametrize("alphas", [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixing_is_timms(alphas):
    mixing = Mixing(*alphas, num_classes=5, seed=3)
    theirs = timm.data.Mixup(*alphas, label_smoothing=0.0, num_classes=5)
    for first in range(0, 24, 6):
        images, shares = mixed(mixing, 6, first)
        np.random.seed(stream_seed(3, "mixing", 0, first) % 2**32)  # noqa: NPY002
        wanted = theirs(*batch_of(6))
        assert torch.equal(images, wanted[0])
        assert torch.equal(shares, wanted[1])
