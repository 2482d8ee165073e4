"""What a turn came to, worker by worker: the reports that are pushed with its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dbsl.clock import ComputeClock
from dbsl.plan import Plan
from dbsl.server import Round, RoundReport


def read_losses(losses: Mapping[int, Tensor], vector: Tensor) -> tuple[dict[int, float], bool]:
    """Return losses by worker, and whether they and every number of a vector are finite.

    It waits for the device, once.
    """
    # A sum of finite weights does not overflow.
    values = torch.stack([vector.sum(), *(loss.to(vector.dtype) for loss in losses.values())])
    _, *read = values = values.tolist()
    return dict(zip(losses, read, strict=True)), all(map(math.isfinite, values))


def make_reports(
    turn: Round,
    plan: Plan,
    steps: int,
    samples: Mapping[int, int],
    *,
    resolution: int,
    learning_rate: float,
    losses: Mapping[int, float],
    clock: ComputeClock,
    refused: bool = False,
) -> list[RoundReport]:
    """Return one report for each worker of a turn.

    Args:
        turn: The turn.
        plan: The plan in force in it.
        steps: Optimizer steps that it took.
        samples: Images that each worker trained on; none for a worker without any.
        resolution: Image side, pixels.
        learning_rate: Of its last step.
        losses: Training loss by worker, summed over the samples; none for a worker without any.
        clock: Has measured what each worker computed.
        refused: Whether the round is not to be merged, since it is not finite.
    """
    reports = []
    for worker in turn.workers:
        mine, count = plan.workers[worker], samples.get(worker, 0)
        reports.append(
            RoundReport(
                worker,
                turn.epoch,
                turn.round,
                resolution=resolution,
                local_batch_size=mine.local_batch_size,
                samples=count,
                steps=steps,
                time_s=clock.seconds(worker),
                loss=losses.get(worker, 0.0) / max(count, 1),
                merge_weight=mine.merge_weight,
                learning_rate=learning_rate,
                predicted_time_s=mine.predicted_time_s * count / max(mine.samples, 1),
                refused=refused,
            )
        )
    return reports
