"""What people do to gradients in their loops: the joint batch's gradients all the same."""

import contextlib
import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dbsl
from tests.helpers import place_of

SAMPLES = 43


def dataset():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).tanh())


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1)).double()


def loop(rank, sizes, accumulate, clip, scaled, workers):
    """Train two epochs and return the weights."""
    model = network()
    parallel = DistributedDataParallel(model)
    sampler = dbsl.UnevenBatchSampler(SAMPLES, local_batch_sizes=sizes, accumulate=accumulate)
    loader = DataLoader(dataset(), batch_sampler=sampler, num_workers=workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, start=1):
            ends = number % accumulate == 0 or number == len(loader)
            with contextlib.nullcontext() if ends else parallel.no_sync():
                loss = (parallel(x) - y).square().mean()
                scaler.scale(loss * sampler.scale(len(y))).backward()
            if ends:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy()


@pytest.mark.parametrize(
    ("accumulate", "clip", "scaled", "workers"),
    [(1, 0.2, False, 2), (3, 1e9, False, 0), (3, 0.2, True, 0)],
    ids=["clipped, loader workers", "accumulated", "accumulated, clipped, scaled"],
)
@pytest.mark.parametrize("sizes", [[3, 5], pytest.param([2, 2, 4], marks=pytest.mark.slow)])
def test_accumulation_clipping_and_scaling_see_the_joint_gradient(
    run_ranks, sizes, accumulate, clip, scaled, workers
):
    rest = (accumulate, clip, scaled, workers)
    (joined,) = run_ranks(loop, [sum(sizes)], *rest, world_size=1)
    split = run_ranks(loop, sizes, *rest, world_size=len(sizes))
    assert all(abs(weights - joined).max() < 1e-12 for weights in split)


def skipping(rank, interleave, samples=0):
    """Train an epoch whose first batch Accelerate leaves out; return what scale says.

    With `samples` a state inside the epoch was loaded.
    """
    os.environ.update(place_of(rank, 2))
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    sampler = dbsl.UnevenBatchSampler(19, local_batch_sizes=[3, 5], interleave=interleave)
    loader = DataLoader(range(19), batch_sampler=sampler)
    loader = accelerator.prepare(loader) if interleave else loader
    sampler.load_state_dict(sampler.state_dict() | {"samples": samples})
    sampler.skip(1)
    return [sampler.scale(len(batch)) for batch in skip_first_batches(loader, 1)]


@pytest.mark.parametrize("interleave", [True, False])
def test_batches_that_accelerate_skips_are_left_out_of_the_scales(run_ranks, interleave):
    # 19 = 8 + 8 + 3: the last joint batch is split 1 and 2.
    assert run_ranks(skipping, interleave) == [[2 * 3 / 8, 2 * 1 / 3], [2 * 5 / 8, 2 * 2 / 3]]
    for error in run_ranks(skipping, interleave, 8, expect_errors=True):
        assert "skip must be left out inside the epoch of a loaded state" in error


def skipping_later(rank, accumulate):
    """Skip the first batch of a later epoch, of which the new loader alone is told."""
    os.environ.update(place_of(rank, 2))
    from accelerate import Accelerator, skip_first_batches

    accelerator = Accelerator(cpu=True)
    options = {"local_batch_sizes": [3, 5], "accumulate": accumulate, "interleave": True}
    sampler = dbsl.UnevenBatchSampler(19, **options)
    loader = skip_first_batches(
        accelerator.prepare(DataLoader(range(19), batch_sampler=sampler)), 1
    )
    sampler.set_epoch(2)
    sampler.skip(1)
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore:scale was not called")
def test_the_order_of_an_epoch_whose_first_batches_are_skipped_is_its_own(run_ranks):
    found = run_ranks(skipping_later, 1)
    for rank, batches in enumerate(found):
        alone = dbsl.UnevenBatchSampler(19, local_batch_sizes=[3, 5], rank=rank, num_replicas=2)
        alone.set_epoch(2)
        assert batches == [*alone][1:]
    for error in run_ranks(skipping_later, 2, expect_errors=True):
        assert "skip must be a multiple of accumulate (2), got 1" in error


def sharded(rank):
    """Watch a model that FSDP shards."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Linear(40, 1)
    fully_shard(model)
    dbsl.UnevenBatchSampler(40, 10, balance="dynamic").watch(model)


def test_a_model_that_fsdp_shards_is_not_watched(run_ranks):
    for error in run_ranks(sharded, expect_errors=True):
        assert "model must have its parameters whole, got one that FSDP shards" in error
