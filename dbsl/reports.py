"""What a turn came to, worker by worker: the reports that are pushed with its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dbsl.clock import ComputeClock
from dbsl.plan import Plan
from dbsl.sampler import Step
from dbsl.server import Round, RoundReport


def make_reports(
    turn: Round,
    plan: Plan,
    steps: Sequence[Step],
    *,
    resolution: int,
    learning_rate: float,
    losses: Mapping[int, float],
    clock: ComputeClock,
) -> list[RoundReport]:
    """Return one report for each worker of a turn.

    Args:
        turn: The turn.
        plan: The plan in force in it.
        steps: Its steps.
        resolution: Image side, pixels.
        learning_rate: Of its last step.
        losses: Training loss by worker, summed over the samples; none for a worker without any.
        clock: Has measured what each worker computed.
    """
    reports = []
    for position, worker in enumerate(turn.workers):
        mine = plan.workers[worker]
        samples = sum(len(step.parts[position].indices) for step in steps)
        reports.append(
            RoundReport(
                worker,
                turn.epoch,
                turn.round,
                resolution=resolution,
                local_batch_size=mine.local_batch_size,
                samples=samples,
                steps=len(steps),
                time_s=clock.seconds(worker),
                loss=losses.get(worker, 0.0) / max(samples, 1),
                merge_weight=mine.merge_weight,
                learning_rate=learning_rate,
                predicted_time_s=mine.predicted_time_s * samples / mine.samples,
            )
        )
    return reports
