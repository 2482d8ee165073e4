import random
from dataclasses import replace

import datasets
import numpy as np
import pytest
import timm.data
import torch
from PIL import Image

from dbsl.config.settings import RunConfig, TrainingConfig
from dbsl.data.dataset import load_data
from dbsl.data.images import ImageLoader
from dbsl.data.sources import PixelStore
from dbsl.data.transforms import Transform, global_streams, image_seed, timm_transform
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
    data = load(photos, aa=aa)
    transform = data.transform(16, "timm", 7)
    whole = images_of(data.train, transform)
    there = load(photos, aa=aa, loader_workers=int(aa == RAND))
    assert torch.equal(whole, images_of(there.train, transform, [range(5), range(5, 24)]))
    assert torch.equal(whole.flip(0), images_of(data.train, transform, [range(23, -1, -1)]))
    assert not torch.equal(whole, images_of(data.train, transform, epoch=1))
    assert not torch.equal(whole, images_of(data.train, replace(transform, seed=8)))


def test_the_images_are_those_of_timms_own_pipeline(photos):
    data = load(photos, augment="timm")
    transform = replace(data.transform(16, "timm", 3), mean=(0.0,) * 3, std=(1 / 255,) * 3)
    how = {"is_training": True, "use_prefetcher": True, "interpolation": "random"}
    theirs = timm.data.create_transform(16, mean=(0.0,) * 3, **how)
    images = images_of(data.train, transform).permute(0, 2, 3, 1)
    for number, image in enumerate(images):
        # Anything may have been drawn before: the seed of the sample is what counts.
        with global_streams(image_seed(3, 0, number)):
            expected = theirs(Image.fromarray(PIXELS[number])).permute(1, 2, 0)
        assert torch.equal(expected, image.round().byte())


def test_other_random_numbers_are_left_as_they_were():
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    expected = random.random(), np.random.rand(), torch.rand(1)  # noqa: NPY002
    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    image = Image.new("RGB", (20, 20))
    Transform(16, "timm", True, *GREY, 0, aa=RAND).augmented(image, 0, 0)
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


RAW = ("mean=0", f"std={1 / 255}")


def test_evaluation_crops_and_resizes_as_asked(photos):
    wide = load(photos, preprocess=("crop_pct=1", "interpolation=bicubic", *RAW))
    image = images_of(wide.train, wide.transform(20, "none", 0), [[3]])[0].permute(1, 2, 0)
    middle = Image.fromarray(PIXELS[3]).resize((20, 20), Image.Resampling.BICUBIC, (4, 0, 44, 40))
    assert np.array_equal(image.round().byte().numpy(), np.asarray(middle))
    half = load({"loader_workers": 0}, preprocess=("crop_pct=0.5", *RAW))
    whole = load({"loader_workers": 0}, preprocess=RAW)
    found, plain = (
        images_of(d.train, d.transform(s, "none", 0), [[0]]) for d, s in ((half, 4), (whole, 8))
    )
    assert torch.equal(found, plain[:, :, 2:6, 2:6])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": "crop", "aa": RAND}, "aa must go with augment timm"),
        ({"aa": "rand-foo3"}, "aa must be a policy of timm"),
        ({"aa": "rand-m9.5"}, "aa must be a policy of timm"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_one_line(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


def test_a_policy_chooses_timms_pipeline():
    assert TrainingConfig().augmentation == "crop"
    assert TrainingConfig(augment="none").augmentation == "none"
    assert TrainingConfig(augment="timm").augmentation == "timm"
    assert TrainingConfig(aa="3a").augmentation == "timm"


@pytest.mark.parametrize("policy", ["rand-m10-inc1", "original", "augmix-m10"])
def test_an_operation_may_keep_no_bit_of_an_image(policy):
    built = timm_transform(policy, 16, (0.5,) * 3, True)
    (step,) = [s for s in built.transforms if hasattr(s, "ops") or hasattr(s, "policy")]
    policies = getattr(step, "policy", [getattr(step, "ops", [])])
    functions = {op.aug_fn for own in policies for op in own if "Posterize" in op.name}
    image = Image.new("RGB", (4, 4), "white")
    for function in functions:
        assert function(image, 0).getextrema() == ((0, 0),) * 3
        assert function(image, 4).getextrema() == ((240, 240),) * 3
    assert len(functions) == 1
