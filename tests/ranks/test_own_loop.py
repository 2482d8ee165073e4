"""Examples of foreign loops give gradients and weights of one process on the joined batch."""

import importlib
import os
import warnings

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

import dbsl
from dbsl.library.loader import UnevenLoader
from tests.helpers import place_of, short

OF_TRANSFORMERS = ("accelerate_bert", "plain_lm", "trainer_lm", "trainer_classifier")
NEEDS = dict.fromkeys(OF_TRANSFORMERS, "transformers") | {"lightning_module": "lightning"}
NEEDS |= {"fsdp2": None, "plain_ddp": None}
SCALED = {*NEEDS} - {"trainer_lm"}


class TenSteps(Exception):
    """Ends a loop after ten steps."""


def whole(tensor):
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def ten_steps(rank, file, example, sizes, scaled):
    """Save the gradients of the first three steps and the weights after ten, as vectors."""
    warnings.simplefilter("ignore")
    os.environ.update(place_of(rank, len(sizes), TORCHELASTIC_RUN_ID="one", GROUP_RANK=0))
    torch.set_default_dtype(torch.float64)
    if not scaled:
        for kind in (dbsl.UnevenBatchSampler, UnevenLoader):
            kind.scale = lambda loader, count: 1.0
    gradients = []

    def look(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.append(torch.cat([whole(p.grad).flatten() for p in parameters]))
        if len(gradients) == 10:
            gradients.append(torch.cat([whole(p).flatten() for p in parameters]))
            raise TenSteps

    register_optimizer_step_post_hook(look)
    module = importlib.import_module(f"examples.own_loop.{example}")
    if not scaled and example == "plain_lm":
        module.dbsl.mean_scale = lambda *args, **kwargs: 1.0
    with pytest.raises(TenSteps):
        module.train(sizes)
    if rank == 0:
        torch.save([*gradients[:3], gradients[-1]], file)


@pytest.fixture
def run(run_ranks, tmp_path):
    def run(example, sizes, scaled=True):
        file = tmp_path / "steps.pt"  # more than a pipe holds
        run_ranks(ten_steps, file, example, sizes, scaled, world_size=len(sizes))
        return torch.load(file)

    return run


def distance(one, other):
    pairs = zip(one, other, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


@pytest.fixture(scope="module")
def joined():
    return {}


@pytest.mark.parametrize("sizes", short([[3, 5], [1, 7], [2, 2, 12]], [3, 5]))
@pytest.mark.parametrize("example", short(NEEDS, "plain_ddp", "fsdp2"))
def test_uneven_batches_train_as_one_process_on_all(run, joined, example, sizes):
    if NEEDS[example]:
        pytest.importorskip(NEEDS[example])
    importlib.import_module(f"examples.own_loop.{example}")  # once, before the forks
    total = sum(sizes)
    if (example, total) not in joined:
        joined[example, total] = run(example, [total])
    # Language models compute their loss in float32.
    bound = 1e-6 if "lm" in example else 1e-9
    assert distance(run(example, sizes), joined[example, total]) < bound
    if example in SCALED and sizes == [3, 5]:
        unscaled = run(example, sizes, scaled=False)
        assert distance(unscaled[:3], joined[example, total][:3]) > 1e-3


def in_rounds(rank):
    torch.set_num_threads(1)
    from examples.own_loop import rounds_ddp

    model = rounds_ddp.train([4, 12])
    return [value.tolist() for value in model.state_dict().values()]


def test_the_example_of_rounds_ends_with_the_same_weights(run_ranks):
    one, other = run_ranks(in_rounds)
    assert one == other
