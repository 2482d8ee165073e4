"""Plans of joint steps, and plans moved to other shares: who takes how much of each global batch.

Pure functions. A worker's weight is its part of the global batch, b_i/B, so that the weighted
gradients sum to that of the joined batch (Ye, Zhou, Shi, Sun, Lv, arXiv 2007.11831).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.config.settings import UpdateFactor
from dbsl.plan.machines import (
    Machines,
    balanced_sizes,
    bounded_split,
    largest_remainder,
    split_batch,
    steps_in_shares,
)
from dbsl.plan.sampler import steps_of_epoch
from dbsl.plan.solve import merge_weights
from dbsl.plan.types import Plan, TimeModel, WorkerPlan


def plan_steps(
    samples: int,
    sizes: Sequence[int] | np.ndarray,
    time_models: Sequence[TimeModel],
    *,
    drop_last: bool = False,
    least: int = 1,
) -> Plan:
    """Plan an epoch of joint steps in which worker i takes `sizes[i]` samples of each.

    All workers take the same number of steps, the fewest that an epoch needs. Sizes of steps differ
    by at most one and are split in the same proportions (see `StepSampler`).

    Args:
        samples: Training samples per epoch, d.
        sizes: Samples per step of each worker, b_i, at least 1; their sum is the global batch B.
        time_models: Step time of each worker.
        drop_last: Whether only whole global batches are trained on.
        least: Least samples of a part, unless it is empty.

    Raises:
        SettingError: If sizes and workers do not match, a size is below `least` or the samples do
            not make one global batch.
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    global_batch_size = int(sizes.sum())
    _check_sizes(sizes, len(time_models), samples, least)
    steps = steps_of_epoch(samples, global_batch_size, drop_last=drop_last, least=least)
    trained = steps * global_batch_size if drop_last else samples
    size, larger = divmod(trained, steps)  # steps of one sample more
    shares = (steps - larger) * split_batch(size, sizes, least)
    shares += larger * split_batch(size + 1, sizes, least) if larger else 0
    machines = Machines.of(len(sizes), sizes, list(time_models))
    times = machines.step_times(shares, steps)
    equal = largest_remainder(np.ones(len(sizes)), int(shares.sum()))
    equal_s = float(machines.step_times(equal, steps).max())
    columns = (
        sizes,
        shares,
        np.full(len(sizes), steps),
        sizes / global_batch_size,
        times,
        times,
        np.zeros(len(sizes), dtype=bool),
    )
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return Plan(
        samples=int(shares.sum()),
        time_ratio=float(times.max()) / equal_s,
        all_large_time_s=equal_s,
        equal_batch_time_s=equal_s,
        workers=tuple(WorkerPlan(*row) for row in rows),
        global_batch_size=global_batch_size,
    )


def _check_sizes(sizes: np.ndarray, workers: int, samples: int, least: int) -> None:
    if len(sizes) != workers:
        raise SettingError(
            f"local_batch_sizes must have one value per worker ({workers}), got {len(sizes)} values"
        )
    if sizes.min() < least:
        why = ": batch norm at this resolution sees one value a channel" if least > 1 else ""
        raise SettingError(f"local_batch_sizes must be at least {least}, got {sizes.min()}{why}")
    if sizes.sum() > samples:
        raise SettingError(
            f"local_batch_sizes must sum to at most the {samples} training samples, "
            f"got {sizes.sum()} in all"
        )


def check_parts(
    samples: int, global_batch_size: int, workers: int, *, least: int, drop_last: bool
) -> None:
    """Raise ``SettingError`` if a worker may have no samples in a joint step.

    Batch norm over all workers is an exchange inside the forward pass, which each must take.

    Args:
        samples: Training samples per epoch.
        global_batch_size: Samples of a step at most.
        workers: How many share it, with `least` samples of a whole batch each.
        least: Least samples of a part.
        drop_last: Whether only whole global batches are trained on.
    """
    size = samples // steps_of_epoch(samples, global_batch_size)
    if not drop_last and size < workers * least:
        raise SettingError(
            f"drop_last must be true with sync_batch_norm where a joint step has {size} samples "
            f"for {workers} workers, which need {least} each, got false"
        )


def balanced_steps(
    global_batch_size: int,
    time_models: Sequence[TimeModel],
    limits: np.ndarray,
    *,
    samples: int,
    drop_last: bool,
    least: int,
    floor: int = 1,
) -> Plan:
    """Return a plan of joint steps split anew, so that workers of these speeds end together.

    No worker gets fewer than `floor` samples a step, if there are enough.
    """
    machines = Machines.of(len(limits), limits, list(time_models))
    floor = max(least, min(floor, global_batch_size // len(limits)))
    sizes = balanced_sizes(global_batch_size, machines, limits, floor)
    return plan_steps(samples, sizes, time_models, drop_last=drop_last, least=least)


def with_proportions(
    plan: Plan,
    proportions: np.ndarray,
    time_models: Sequence[TimeModel],
    limits: np.ndarray,
    *,
    samples: int,
    rounds: int,
    drop_last: bool,
    least: int,
    floor: int = 1,
    factor: UpdateFactor = "data",
) -> Plan:
    """Return a planned plan with parts in other proportions: of the global batch, or of the epoch.

    Parts sum exactly to what they are of, stay within `limits` and above 0, parts of a global
    batch at `floor` or above. In a plan of rounds each worker keeps its planned batch size, unless
    it has fewer samples in a round; merge weights follow the shares by the rule `factor`.
    """
    if plan.global_batch_size is not None:
        floor = max(least, min(floor, plan.global_batch_size // len(limits)))
        lowest = np.minimum(np.full(len(limits), floor), limits)
        sizes = bounded_split(plan.global_batch_size, proportions, lowest, limits)
        return plan_steps(samples, sizes, time_models, drop_last=drop_last, least=least)
    each = min(rounds * least, plan.samples // len(limits))
    lowest = np.full(len(limits), each, dtype=np.int64)
    most = np.full(len(limits), plan.samples, dtype=np.int64)
    shares = bounded_split(plan.samples, proportions, lowest, most)
    sizes = np.minimum([w.local_batch_size for w in plan.workers], shares // rounds)
    machines = Machines.of(len(sizes), sizes, list(time_models))
    columns = (
        sizes,
        shares,
        steps_in_shares(shares, sizes, rounds),
        merge_weights(shares, factor),
        machines.times(shares, sizes, rounds),
        shares * machines.sample_times(sizes),
        [worker.small for worker in plan.workers],
    )
    rows = zip(*(np.asarray(column).tolist() for column in columns), strict=True)
    return replace(plan, workers=tuple(WorkerPlan(*row) for row in rows))
