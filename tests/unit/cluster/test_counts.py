"""What a round costs, as counts: waits for the device, copies of the weights, operators a step.

Times cannot be tested on a shared machine; what makes them grow can.
"""

import sys
from collections import deque
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import train
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.data.sources import PixelStore
from dbsl.data.transforms import Transform
from dbsl.model import build_model
from dbsl.optimizer import create_optimizer
from dbsl.run.turns import WorkerTurn
from experiments.benchmarks import operators
from tests.helpers import run, short

WORKERS, BATCH = 4, 4
# What waits for a device's queue where the tensor is on one: these methods, and these operators.
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
WAITS = {"nonzero", "equal", "masked_select"}
COPIES = {"copy_", "_to_copy", "clone"}


class Count(operators.Operators):
    """Counts operators, and apart those that wait, and those that copy as much as the weights."""

    def __init__(self, weights=None):
        super().__init__()
        self.waits = self.weight_copies = 0
        self._weights = weights

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(function, types, args, kwargs)
        name = function.name().removeprefix("aten::").partition(".")[0]
        self.waits += name in WAITS
        self.weight_copies += name in COPIES and found.numel() == self._weights
        return found

    def total(self):
        return self.computing.total() + self.others.total()


def waiting(read, count):
    def counted(tensor, *args, **kwargs):
        by = sys._getframe(1).f_globals["__name__"]
        count.waits += by != "dbsl.cluster.merges"  # whose factors are in host memory
        return read(tensor, *args, **kwargs)

    return counted


def count_rounds(folder, monkeypatch, steps, **settings):
    """Train two epochs of rounds with so many steps each; return the last epoch's counts."""
    train_turn, found = train.train_turn, []

    def counted(turn, training):
        weights = training.workers.cluster.weights
        with Count(weights.vector.numel()) as count, monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name), count))
            train_turn(turn, training)
        if turn.epoch == 1:
            found.append(count)

    with monkeypatch.context() as patch:
        patch.setattr(train, "train_turn", counted)
        settings |= {"train_samples": WORKERS * BATCH * steps, "epochs": 2, "eval_every": 9}
        settings |= {"local_batch_sizes": (BATCH,) * WORKERS, "checkpoint_every": 0}
        run(folder / f"{steps}", mixed_precision="no", **settings)
    return found


def bare_steps(model=None, batch=BATCH, side=16):
    """Take steps of a model alone, one for each that is asked for."""
    model = model or build_model("test_resnet", 10, (16,))
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = create_optimizer("sgd", model, 0.1, 0.9, 5e-4)
    images = torch.zeros(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64)
    while True:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def bare_step():
    """Return the operators of the model's step alone; the first makes the optimizer's state."""
    steps = bare_steps()
    next(steps)
    with Count() as count:
        next(steps)
    return count


def counting(steps, found):
    """Yield the steps; note outermost operators and Python calls of ten each, after the first 3."""

    def calling(frame, event, argument):
        found[1] += (event == "call") / 10

    yield from islice(steps, 3)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield from islice(steps, 10)
    operators = [event for event in seen.events() if event.name.startswith("aten::")]
    parents = [event.cpu_parent for event in operators]
    found[0] = sum(not (p and p.name.startswith("aten::")) for p in parents) / 10
    sys.setprofile(calling)
    yield from islice(steps, 10)
    sys.setprofile(None)
    yield from steps


MODES = {
    "bsp": {},
    "ssp": {"sync": "ssp"},
    "asp": {"sync": "asp", "slowdown": ("0:1.5",)},
    "step": {"sync": "step"},
    "gradients": {"push": "gradients:100"},
}


@pytest.mark.parametrize("mode", short(MODES, "bsp"))
def test_a_round_waits_once_copies_the_weights_seldom_and_adds_few_operators_to_a_step(
    tmp_path, monkeypatch, mode
):
    few, many = (count_rounds(tmp_path, monkeypatch, n, **MODES[mode], log_every=0) for n in (3, 6))
    assert len(few) == len(many) == (1 if mode == "step" else WORKERS)
    for count in few + many:
        assert count.waits == 1
    # The pull; a barrier keeps pushed weights; of gradients its last makes the next snapshot.
    copies = sum(count.weight_copies for count in many)
    assert copies <= len(many) * (1 + (mode == "bsp")) + (mode == "gradients")
    parts = WORKERS if mode == "step" else 1  # of a step, each with a forward and backward pass
    bare = bare_step().total()
    for one, other in zip(few, many, strict=True):
        a_step = (other.total() - one.total()) / 3
        assert a_step <= parts * (bare + 25)


def test_a_step_has_few_operators_and_calls_beyond_the_bare_one(tmp_path, monkeypatch):
    found, bare, steps_of = [0, 0], [0, 0], WorkerTurn.steps
    monkeypatch.setattr(
        WorkerTurn, "steps", lambda turn, *given: counting(steps_of(turn, *given), found)
    )
    settings = {"train_samples": 25 * BATCH, "local_batch_sizes": (BATCH,), "epochs": 1}
    settings |= {"workers": 1, "resolutions": (8,)}  # as the digits are
    run(tmp_path, mixed_precision="no", log_every=0, checkpoint_every=0, **settings)
    deque(islice(counting(bare_steps(), bare), 25), maxlen=0)
    assert found[0] - bare[0] <= 12
    assert found[1] - bare[1] <= 150


def test_each_step_line_waits_once_more(tmp_path, monkeypatch):
    found = count_rounds(tmp_path, monkeypatch, 2, log_every=1)
    assert [count.waits for count in found] == [1 + 2] * WORKERS


def test_the_operators_of_a_batch_do_not_depend_on_its_size():
    data = load_data(ImageConfig("digits"))
    for augment, most in (("none", 12), ("crop", 14), ("paper", 34)):
        transform = Transform(16, augment, True, data.mean, data.std, 0)
        found = set()
        for size in (2, 64):
            batches = data.train.batches([np.arange(size)] * 2, transform)
            next(batches)  # the first call sets up
            with Count() as count:
                next(batches)
            found.add(count.total())
        assert max(found) <= most
        assert len(found) == 1


def test_a_store_is_padded_before_memory_is_planned_and_gives_the_same_images_uncropped():
    images = torch.randint(256, (9, 16, 16, 3), dtype=torch.uint8)  # smaller ones are not shifted
    data = load_data(ImageConfig("digits"))
    data = replace(data, train=PixelStore(images, torch.arange(9)))
    plain, batches = data.transform(16, "none", 0), [np.arange(5)]
    ((before, _),) = data.train.batches(batches, plain)
    store = data.train.inputs.untyped_storage().nbytes()
    data.transform(16, "crop", 0)
    padded = data.train.inputs.untyped_storage().nbytes()
    assert padded * 16**2 == store * 20**2  # in place of them: nothing is kept twice
    ((after, _),) = data.train.batches(batches, plain)
    assert torch.equal(before, after)
