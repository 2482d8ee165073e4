from types import SimpleNamespace

import numpy as np
import pytest
import timm.data
import torch

import train
from dbsl.base.seeds import stream_seed
from dbsl.data.transforms import Mixing


def batch(size, side=8):
    images = torch.arange(size, dtype=torch.float32)[:, None, None, None].expand(-1, 3, side, side)
    return images.clone(), torch.arange(size) % 5


def part(first, size):
    return SimpleNamespace(indices=np.arange(first, first + size))


def mixed(mixing, size, first=0, epoch=0):
    ((images, shares),) = mixing.mixed([batch(size)], [part(first, size)], epoch)
    return images, shares


@pytest.mark.parametrize("size", [1, 2, 7, 8])
@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
def test_labels_are_mixed_as_the_images_are_and_an_odd_last_image_stays(size, mixup, cutmix):
    mixing = Mixing(mixup, cutmix, num_classes=5, seed=3)
    plain, labels = batch(size)
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


def test_the_loss_of_shares_is_that_of_labels_where_nothing_is_mixed():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 5))
    images, labels = batch(4)
    shares = torch.nn.functional.one_hot(labels, 5).float()
    for smoothing in (0.0, 0.1):
        of = [
            train.loss_function(model, images / 4, target, train.Config(label_smoothing=smoothing))
            for target in (labels, shares)
        ]
        torch.testing.assert_close(*of)


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_mixing_is_timms_with_its_modes_and_probabilities(mode):
    more = {"mode": mode, "prob": 0.7, "switch_prob": 0.3, "cutmix_minmax": (0.2, 0.8)}
    mixing = Mixing(0.8, 0.0, num_classes=5, seed=3, **more)
    theirs = timm.data.Mixup(0.8, 0.0, label_smoothing=0.0, num_classes=5, **more)
    for first in range(0, 24, 6):
        images, shares = mixed(mixing, 6, first)
        np.random.seed(stream_seed(3, "mixing", 0, first) % 2**32)  # noqa: NPY002
        wanted = theirs(*batch(6))
        assert torch.equal(images, wanted[0])
        assert torch.equal(shares, wanted[1])


def test_mixing_ends_with_an_epoch():
    mixing = Mixing(1.0, 0.0, num_classes=5, seed=3, off_epoch=2)
    plain, labels = batch(6)
    for epoch in range(4):
        images, shares = mixed(mixing, 6, epoch=epoch)
        assert torch.equal(images, plain) == (epoch >= 2)
        assert torch.equal(shares.argmax(1), labels) or epoch < 2
