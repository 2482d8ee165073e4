import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import timm.data
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode

from dbsl.config.image_settings import AugmentKwargs, EraseKwargs, check_images
from dbsl.config.settings import RunConfig, TrainingConfig
from dbsl.data.dataset import load_data
from dbsl.data.images import ImageLoader, PixelStore
from dbsl.data.transforms import Transform, erase, global_streams, image_seeds, timm_transform
from tests.helpers import make_table, read

RAND = "rand-m9-mstd0.5-inc1"
GREY = ((0.5,) * 3, (0.25,) * 3)
NINE = [range(9)]
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 40, 48, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Return the settings of a data set of 24 colourful images, 40x48 px, in 2 classes."""
    folder = tmp_path_factory.mktemp("photos")
    table = make_table([Image.fromarray(each) for each in PIXELS])
    for split in ("train", "test"):
        table.to_parquet(folder / f"{split}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        yield {"dataset": str(folder), "loader_workers": 0}


def images_of(*given, **more):
    return read(*given, **more)[0]


def load(settings, **more):
    return load_data(TrainingConfig(**settings | more))


@pytest.mark.parametrize("aa", [RAND, "augmix-m5-w3", "original", "3a"])
def test_an_image_looks_the_same_in_whichever_batch_worker_or_process(photos, aa):
    settings = {"aa": aa, "reprob": 0.5, "augment_kwargs": ("remode=pixel", "recount=2")}
    data = load(photos, **settings)
    transform = data.transform(16, "timm", 7)
    whole = images_of(data.train, transform)
    there = load(photos, **settings, loader_workers=int(aa == RAND))
    assert torch.equal(whole, images_of(there.train, transform, [range(5), range(5, 24)]))
    assert torch.equal(whole.flip(0), images_of(data.train, transform, [range(23, -1, -1)]))
    assert not torch.equal(whole, images_of(data.train, transform, epoch=1))
    assert not torch.equal(whole, images_of(data.train, replace(transform, seed=8)))


def test_the_images_are_those_of_timms_own_pipeline(photos):
    kwargs = ("color_jitter=0.3", "scale=0.3,0.9", "vflip=0.5", "grayscale_prob=0.3")
    given = {"scale": (0.3, 0.9), "vflip": 0.5, "grayscale_prob": 0.3}
    data = load(photos, augment_kwargs=(*kwargs, "train_interpolation=bicubic"))
    transform = replace(data.transform(16, "timm", 3), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    how = {"is_training": True, "use_prefetcher": True, "interpolation": "bicubic"}
    theirs = timm.data.create_transform(16, **given, **how, color_jitter=0.3)
    images = images_of(data.train, transform).permute(0, 2, 3, 1)
    for number, image in enumerate(images):
        # Anything may have been drawn before: the seed of the sample is what counts.
        with global_streams(image_seeds(3, "timm", 0, np.array([number]))[0]):
            expected = theirs(Image.fromarray(PIXELS[number])).permute(1, 2, 0)
        assert torch.equal(expected, image.round().byte())


def test_other_random_numbers_are_left_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    erase(torch.zeros(4, 3, 16, 16), EraseKwargs(1.0, "pixel"), np.arange(4), 0, 0)
    image = Image.new("RGB", (20, 20))
    Transform(16, "timm", True, *GREY, 0, pipeline=AugmentKwargs(aa=RAND)).augmented(image, 0, 0)
    with global_streams(3):
        torch.rand(1)
    assert expected == (random.random(), np.random.rand(), torch.rand(1))  # noqa: NPY002


def test_small_images_are_augmented_by_loaders_and_evaluated_as_before():
    small, plain = (load({"loader_workers": 0}, **more) for more in ({"aa": RAND}, {}))
    assert (type(small.train), type(plain.train)) == (ImageLoader, PixelStore)
    assert (small.mean, small.std, small.crop_pct) == (plain.mean, plain.std, 1.0)
    for source in ("train", "evaluation"):  # evaluated: whole, not cropped to 87.5 %
        found = [
            images_of(getattr(d, source), d.transform(8, "none", 0), NINE) for d in (small, plain)
        ]
        assert torch.equal(*found)


def test_digits_are_not_mirrored_unless_asked():
    given = ("scale=1,1", "ratio=1,1", "color_jitter=0", "train_interpolation=bilinear")
    kept, turned = (
        load({"loader_workers": 0}, augment_kwargs=given + more) for more in ((), ("hflip=1",))
    )
    plain = images_of(kept.train, kept.transform(8, "none", 0), NINE)
    assert torch.equal(plain, images_of(kept.train, kept.transform(8, "timm", 0), NINE))
    assert torch.equal(plain.flip(3), images_of(turned.train, turned.transform(8, "timm", 0), NINE))


@pytest.mark.parametrize("augment", ["crop", "paper", "timm"])
def test_erasing_sets_a_share_of_the_images_to_the_mean(augment, photos):
    data = load(photos, augment=augment, reprob=0.5)
    erased = images_of(data.train, data.transform(32, augment, 0))
    whole = images_of(data.train, replace(data.transform(32, augment, 0), erasing=None))
    changed = (erased != whole).flatten(1).any(1)
    assert 4 < changed.sum() < 20
    assert (erased[erased != whole] == 0).all()
    assert not images_of(data.train, data.transform(32, "none", 0)).eq(0).any()


class OnDevice(TorchDispatchMode):
    """Counts operators with a tensor on the device `meta`."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        self.count += getattr(found, "is_meta", False)
        return found


def test_a_device_erases_all_images_of_a_batch_at_once():
    counts = []
    for batch in (4, 40):
        images = torch.empty(batch, 3, 16, 16, device="meta")
        with OnDevice() as device:
            erase(images, EraseKwargs(1.0, "pixel", 2), np.arange(batch), 0, 0)
        counts.append(device.count)
    assert counts[0] == counts[1] <= 4


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_what_a_device_gets_is_what_the_cpu_erases_in_place(mode):
    images, drawn = torch.randn(20, 3, 16, 16), (np.arange(20), 3, 1)
    kwargs = EraseKwargs(0.5, mode, 2)
    canvas = erase(torch.full_like(images, torch.nan), kwargs, *drawn)
    expected = torch.where(canvas.isnan(), images, canvas)
    assert not torch.equal(expected, images)
    assert torch.equal(erase(images, kwargs, *drawn), expected)


def test_evaluation_crops_and_resizes_as_asked(photos):
    wide = load(photos, crop_pct=1.0, interpolation="bicubic", mean=(0.0,), std=(1 / 255,))
    image = images_of(wide.train, wide.transform(20, "none", 0), [[3]])[0].permute(1, 2, 0)
    middle = Image.fromarray(PIXELS[3]).resize((20, 20), Image.Resampling.BICUBIC, (4, 0, 44, 40))
    assert np.array_equal(image.round().byte().numpy(), np.asarray(middle))
    half = load({"loader_workers": 0}, crop_pct=0.5, mean=(0.0,), std=(1 / 255,))
    whole = load({"loader_workers": 0}, mean=(0.0,), std=(1 / 255,))
    found, plain = (
        images_of(d.train, d.transform(s, "none", 0), [[0]]) for d, s in ((half, 4), (whole, 8))
    )
    assert torch.equal(found, plain[:, :, 2:6, 2:6])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": "crop", "aa": RAND}, "aa must go with augment timm"),
        ({"aa": "rand-foo3"}, "aa must be a policy of timm"),
        ({"aa": "rand-m9-foo"}, "aa must be a policy of timm .*section 'foo' is not known"),
        ({"aa": "rand-m9-"}, "section '' is not known"),
        ({"aa": "rand-m9-t0"}, "section 't0' is not known"),
        ({"aa": "rand-m9.5"}, "aa must be a policy of timm"),
        ({"augment_kwargs": ("color_jitter=0.1,0.2,0.1,0.9",)}, "color_jitter of hue must be in"),
        ({"aa": RAND, "augment_kwargs": ("color_jitter=0.4",)}, "be left out with aa rand"),
        ({"augment_kwargs": ("recount=3",)}, "recount must go with reprob, got reprob 0"),
        ({"augment_kwargs": ("hflip=1.5",)}, r"augment_kwargs hflip must be in \[0, 1\], got 1.5"),
        ({"augment_kwargs": ("hflp=1",)}, "augment_kwargs must name arguments such as hflip, "),
        ({"augment_kwargs": ("aa=3a",)}, "augment_kwargs must leave aa to aa"),
        ({"augment_kwargs": ("remode=x",)}, "must have const, rand or pixel as remode, got 'x'"),
        ({"mixup_kwargs": ("prob=0.5",)}, "be empty except with mixup, cutmix or cutmix_minmax"),
        ({"mixup": 0.2, "mixup_kwargs": ("switch_prob=0.1",)}, "leave out switch_prob except with"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(
    "aa",
    [
        *("rand-m9-n3-p0.5-mstd0.5-mmax15-inc1", "rand-mstd1-tweights", "rand-t3aw", "rand"),
        *("augmix-m5-w4-d2-b1-a1.5-mstd1", "original-mstd0.5", "v0r", "3a"),
    ],
)
def test_every_section_that_timm_reads_is_taken(aa):
    assert RunConfig(aa=aa).augmentation == "timm"


def test_one_of_timms_settings_chooses_its_pipeline():
    assert TrainingConfig().augmentation == "crop"
    assert TrainingConfig(augment="none").augmentation == "none"
    assert TrainingConfig(augment_kwargs=("hflip=0.5",)).augmentation == "timm"
    check_images(TrainingConfig(augment="timm"))
    with pytest.raises(ValueError, match="gaussian_blur_prob must be 0 below 12 px"):
        Transform(8, "timm", True, *GREY, 0, pipeline=AugmentKwargs(gaussian_blur_prob=0.1))


def test_copies_of_an_image_are_augmented_each_on_its_own(photos):
    data = load(photos, aa=RAND, reprob=0.2)
    transform = data.transform(16, "timm", 7)
    (images, labels), *_ = data.train.batches([np.array([5, 5 + 24, 5 + 48])], transform, 0)
    assert labels.tolist() == [data.train.labels[5]] * 3
    assert not torch.equal(images[0], images[1])
    assert torch.equal(images[0], images_of(data.train, transform, [[5]])[0])
    small = load({"loader_workers": 0}, augment="crop")
    crop, n = small.transform(8, "crop", 0), len(small.train)
    (images, labels), *_ = small.train.batches([np.array([2 + n * c for c in range(4)])], crop, 0)
    assert labels.unique().numel() == 1 < images.unique(dim=0).shape[0]


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "original", "augmix-m10"])
def test_an_operation_may_keep_no_bit_of_an_image(policy):
    built = timm_transform(AugmentKwargs(aa=policy), 16, (0.5,) * 3, True)
    (step,) = [s for s in built.transforms if hasattr(s, "ops") or hasattr(s, "policy")]
    policies = getattr(step, "policy", [getattr(step, "ops", [])])
    functions = {op.aug_fn for own in policies for op in own if "Posterize" in op.name}
    image = Image.new("RGB", (4, 4), "white")
    for function in functions:
        assert function(image, 0).getextrema() == ((0, 0),) * 3
        assert function(image, 4).getextrema() == ((240, 240),) * 3
    assert len(functions) == 1
