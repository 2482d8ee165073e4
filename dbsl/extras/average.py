"""An exponential moving average of the global weights, evaluated like them.

Batch norm's running statistics belong to the weights that they were measured with. Averaged weights
give different activations, so their statistics are measured again before each use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from dbsl.base.errors import RunStopped
from dbsl.base.seeds import generator, stream_seed
from dbsl.cluster.weights import kept_modes, uncompiled
from dbsl.config.fields import Within
from dbsl.config.hooks import Extra, Metrics
from dbsl.config.settings import RunConfig
from dbsl.model import EMA, batch_norms, set_training
from dbsl.plan.sampler import Order
from dbsl.run.workers import Workers

_STATISTICS_SAMPLES = 8192  # at most; running statistics span fewer (19 batches of 128)


@dataclass(frozen=True)
class AverageSettings(RunConfig):
    """Whether the weights are averaged."""

    # --- model
    # decay per epoch of an exponential moving average (EMA) of the weights, such as 0.8; averaged
    # and raw weights are both evaluated; 0: off
    ema_decay: Annotated[float, Within(0, 1, open_high=True)] = 0.0


class Average(Extra):
    """Averages the merged weights at each epoch's end: a <- decay * a + (1 - decay) * g.

    Only merged weights are worth averaging: between merges, each worker has its own. The average is
    one vector; timm's ModelEmaV3 and torch's AveragedModel would keep a second model. With a decay
    of 0.8, the last five epochs have two thirds of the weight.
    """

    Settings = AverageSettings

    def __init__(self, decay: float) -> None:
        self.decay = decay  # in (0, 1), per epoch
        self.vector: Tensor | None = None  # [P], with batch norm's statistics; None: no epoch yet

    @classmethod
    def of(cls, config: AverageSettings) -> Average | None:
        return cls(config.ema_decay) if config.ema_decay else None

    @torch.no_grad()
    def add(self, weights: Tensor) -> None:
        """Add the weights of an epoch's end, [P]."""
        if self.vector is None:
            self.vector = weights.clone()
        else:
            self.vector = self.vector.lerp(weights, 1 - self.decay)

    def begin(self, workers: Workers, state: Mapping[str, Any], *, same: bool) -> None:
        if (vector := state.get("vector")) is not None:
            self.vector = vector.to(workers.cluster.weights.vector.device)

    def evaluated(
        self, run: Any, end: Any, metrics: Metrics, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Metrics:
        """Add the merged weights, and evaluate the average as well."""
        weights, before = run.workers.cluster.weights, self.vector
        self.add(weights.vector)
        if metrics is None:
            return None
        with weights.kept():
            weights.load(self.vector)
            recompute_statistics(run.workers)
            try:
                found = evaluate()
            except RunStopped:  # a resumed run adds the weights again
                self.vector = before
                raise
            run.save_model(EMA)  # the run may end here, which shows only later
        own = found.keys() - {"samples", "top5_accuracy", "time_s"}
        return {**metrics, **{f"ema_{name}": found[name] for name in sorted(own)}}

    def state_dict(self) -> dict[str, Any]:
        return {"vector": self.vector}


def statistics_batches(
    samples: int,
    batch_size: int,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    blocks: Order | None = None,
) -> list[np.ndarray]:
    """Return this rank's index batches of training images for batch norm's statistics.

    The images are the same at every epoch. All batches of all ranks have one size, so their plain
    mean is the mean over the images. The size is at least 2, since one image has no variance. The
    first images fill up the last batches. `blocks` draw the images; None: all are equally likely.
    """
    rng = generator(seed, "batch statistics")
    order = (blocks.order(rng) if blocks else rng.permutation(samples))[:_STATISTICS_SAMPLES]
    size = min(max(batch_size, 2), len(order))
    each = -(-len(order) // (size * world_size))  # batches of each rank, the same on all
    return list(np.resize(order, (each * world_size, size))[rank::world_size])


@torch.no_grad()
def recompute_statistics(workers: Workers) -> None:
    """Set batch norm's running statistics to those of the model's current weights.

    The cost is a forward pass over at most 8,192 training images, transformed as in evaluation,
    with nothing random. A model without running statistics is not changed, and no image is read.
    If processes share the evaluation, all call this: each passes part of the images, and all
    receive the mean. Otherwise, this process passes all images.
    """
    model, images, seed = workers.raw_model, workers.data.train, workers.config.seed
    weights, accelerator = workers.cluster.weights, workers.accelerator
    together, device = workers.shares_evaluation, weights.vector.device
    place = (accelerator.process_index, accelerator.num_processes) if together else (0, 1)
    # Some models drop layers at random in training mode.
    drawn = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with kept_modes(model), drawn:
        set_training(model)  # frozen layers keep their statistics
        norms = [own for own in batch_norms(model) if own.training and own.track_running_stats]
        if not norms:
            return
        torch.manual_seed(stream_seed(seed, "batch statistics"))
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
        size, blocks = workers.plans.statistics_batch, getattr(images, "blocks", None)
        batches = statistics_batches(len(images), size, seed, *place, blocks)
        with accelerator.autocast(), uncompiled(model):
            transform = workers.data.transform(workers.side, "none", seed)
            for inputs, _ in images.batches(batches, transform):
                model(inputs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    if together:
        weights.buffers.copy_(accelerator.reduce(weights.buffers, "mean"))
