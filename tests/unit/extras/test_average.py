from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from dbsl.cluster.weights import FlatWeights
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.data.sources import PixelStore
from dbsl.data.transforms import Transform
from dbsl.extras.average import Average, recompute_statistics, statistics_batches
from dbsl.model import load_model
from tests.helpers import rows, run, summary_of


def test_average_is_exponential_and_starts_at_the_first_weights():
    average = Average(0.75)
    for value in (4.0, 8.0, 0.0):
        average.add(torch.full((2,), value))
    assert average.vector.tolist() == [3.75, 3.75]  # 0.75 * (0.75 * 4 + 0.25 * 8) + 0.25 * 0


@pytest.mark.parametrize(
    ("samples", "size", "world_size"), [(60, 16, 3), (5, 8, 2), (20_000, 1, 2)]
)
def test_statistics_are_measured_on_the_same_images_in_batches_of_one_size(
    samples, size, world_size
):
    ranks = [statistics_batches(samples, size, 3, rank, world_size) for rank in range(world_size)]
    assert len({len(batches) for batches in ranks}) == 1
    assert {len(batch) for batches in ranks for batch in batches} == {min(max(size, 2), samples)}
    seen = {*np.concatenate([batch for batches in ranks for batch in batches]).tolist()}
    assert len(seen) == min(samples, 8192)
    alone = np.concatenate(statistics_batches(samples, size, seed=3))
    assert {*alone.tolist()} == seen


def workers_of(model, images, batch_size, accelerator, transform=None, together=True):
    """Return what is asked of workers."""
    return SimpleNamespace(
        raw_model=model,
        cluster=SimpleNamespace(weights=FlatWeights(model)),
        data=SimpleNamespace(train=images, transform=lambda *_: transform),
        config=SimpleNamespace(seed=0),
        plans=SimpleNamespace(statistics_batch=batch_size),
        accelerator=accelerator,
        shares_evaluation=together,
        side=4,
    )


def _recomputed(rank, world_size, model):
    """Return a model's statistics, recomputed from 60 random images of 4 px."""
    pixels = np.random.default_rng(0).integers(256, size=(60, 4, 4, 3), dtype=np.uint8)
    images = PixelStore(torch.from_numpy(pixels), torch.zeros(60, dtype=torch.int64))
    place = {"process_index": rank, "num_processes": world_size}
    accelerator = SimpleNamespace(autocast=nullcontext, reduce=_mean, **place)
    transform = Transform(4, "none", False, (0.5,) * 3, (0.5,) * 3, 0)
    together = world_size > 1
    workers = workers_of(model, images, 10, accelerator, transform, together)
    recompute_statistics(workers)
    return workers.cluster.weights.buffers.tolist()


def _mean(tensor, reduction):
    assert reduction == "mean"
    tensor = tensor.clone()
    dist.all_reduce(tensor)
    return tensor / dist.get_world_size()


def test_processes_share_the_images_and_agree_on_the_statistics(run_ranks):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Dropout())
    state = torch.get_rng_state()
    alone = _recomputed(0, 1, model)
    assert torch.equal(torch.get_rng_state(), state)
    one, other = run_ranks(_recomputed, 2, model)
    assert one == other
    assert one == pytest.approx(alone)  # 3 batches of each instead of 6: sums in another order


def test_without_batch_norm_no_image_is_read_nor_anybody_waited_for():
    images, accelerator = MagicMock(), MagicMock()
    images.__len__.return_value = 8
    recompute_statistics(workers_of(nn.LayerNorm(3), images, 4, accelerator))
    assert not images.batches.called
    assert not accelerator.reduce.called


def test_a_run_that_is_made_longer_without_an_average_has_none(tmp_path):
    run(tmp_path / "run", epochs=1, ema_decay=0.5)
    run(tmp_path / "run", epochs=2, resume=str(tmp_path / "run"))
    left = {path.name for path in (tmp_path / "run").glob("model*.safetensors")}
    assert left == {"model.safetensors", "model_best.safetensors"}


def test_averaged_weights_are_evaluated_beside_the_raw_and_change_no_bit_of_them(tmp_path):
    settings = {"train_samples": 80, "eval_samples": 60, "epochs": 2, "eval_every": 2}
    settings |= {"large_batch_size": (8,), "mixed_precision": "no"}
    for name, decay in (("raw", 0.0), ("both", 0.5)):
        run(tmp_path / name, **settings, ema_decay=decay)
    (without,), (last,) = (rows(tmp_path / name, "eval") for name in ("raw", "both"))
    assert without["loss"] == last["loss"] != last["ema_loss"]
    one, other = (tmp_path / name / "model.safetensors" for name in ("raw", "both"))
    assert one.read_bytes() == other.read_bytes()
    assert not (tmp_path / "raw/model_ema.safetensors").exists()
    raw, averaged = load_model(tmp_path / "both"), load_model(tmp_path / "both", ema=True)
    pairs = zip(raw.parameters(), averaged.parameters(), strict=True)
    assert any(not torch.equal(one, other) for one, other in pairs)
    assert statistics_are_of_the_weights(averaged, settings)
    assert summary_of(tmp_path / "both")["final_ema_accuracy"] == last["ema_accuracy"]
    assert "final_ema_accuracy" not in summary_of(tmp_path / "raw")


def statistics_are_of_the_weights(model, settings):
    """Whether the first batch norm's running mean is that of what its convolution gives."""
    data = load_data(ImageConfig("digits", train_samples=settings["train_samples"]))
    transform = Transform(16, "none", data.mirror, data.mean, data.std, 0)
    images, _ = next(data.train.batches([np.arange(len(data.train))], transform))
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    seen = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].mean((0, 2, 3))))
    with torch.no_grad():
        model(images)
    return torch.allclose(norm.running_mean, seen[0], rtol=1e-3, atol=1e-4)
