"""Plan an epoch from the shell: ``python -m dbsl.plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsl.base.errors import require
from dbsl.config.fields import Count, check_fields
from dbsl.config.parse import parse_flags
from dbsl.config.settings import Rounding, UpdateFactor
from dbsl.plan.alone import epoch_times
from dbsl.plan.solve import PlanRules, plan_dual_batch
from dbsl.plan.text import format_plan, timeline
from dbsl.plan.types import TimeModel, plan_of_epochs


@dataclass(frozen=True)
class _Arguments:
    """Plan an epoch of dual-batch training and print it; lists take commas or spaces."""

    samples: int  # training samples per epoch, d
    workers: Count  # number of workers, n
    # samples per step of a large worker, B_L; one value, or one per worker
    large_batch_size: tuple[int, ...]
    slope: tuple[float, ...]  # seconds per sample, a; one value, or one per worker
    intercept: tuple[float, ...]  # seconds per step, b; one value, or one per worker
    # least seconds that a step takes; one value, or one per worker
    floor: tuple[float, ...] = (0.0,)
    small_workers: int = 0  # number of workers on the small batch, n_S; they come first
    # time that dual batch may take over all-large, k > 1; unset: 1.05
    time_ratio: float | None = None
    # samples per step of a small worker, B_S; replaces --time-ratio
    small_batch_size: int | None = None
    min_batch_size: int = 1  # smallest batch that the planner may solve for
    rounds_per_epoch: int = 1  # pushes per worker and epoch
    # merge weight of small workers: d_S/d_L (data), its square root (sqrt) or 1 (none)
    update_factor: UpdateFactor = "data"
    # rounding of plans: to the nearest, as the journal; truncate: as the conference paper
    rounding: Rounding = "round"
    json: bool = False  # print JSON instead of a table


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``python -m dbsl.plan``."""
    arguments = parse_flags(_Arguments, argv, prog="python -m dbsl.plan")
    check_fields(arguments)
    rounds, count = arguments.rounds_per_epoch, arguments.workers
    times = {name: getattr(arguments, name) for name in ("slope", "intercept", "floor")}
    for name, values in times.items():
        text = f"{name} must have 1 value or one per worker ({count})"
        require(len(values) in (1, count), text, len(values))
    model = TimeModel.of(TimeModel(*map(np.array, times.values())), count)
    plan = plan_dual_batch(
        arguments.samples,
        count,
        arguments.small_workers,
        arguments.large_batch_size,
        model,
        PlanRules(
            time_ratio=arguments.time_ratio,
            small_batch_size=arguments.small_batch_size,
            min_batch_size=arguments.min_batch_size,
            rounds=rounds,
            factor=arguments.update_factor,
            rounding=arguments.rounding,
        ),
    )
    if arguments.json:
        print(json.dumps(plan_of_epochs(plan), indent=2))
        return
    print(f"{format_plan(plan)}\n\n{timeline(plan, rounds)}")
    if count > 1:
        most = np.broadcast_to(arguments.large_batch_size, count)
        print(epoch_times(plan, model, most, rounds).describe())
