"""Plans of joint steps, and plans moved to other shares: who takes how much of each global batch.

Pure functions. A worker's weight is its part of the global batch, b_i/B, so that the weighted
gradients sum to that of the joined batch (Ye, Zhou, Shi, Sun, Lv, arXiv 2007.11831).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.plan.machines import (
    Machines,
    balanced_sizes,
    bounded_split,
    largest_remainder,
    split_batch,
)
from dbsl.plan.sampler import steps_of_epoch
from dbsl.plan.solve import PlanRules, merge_weights, plans_of_rounds, worker_plans
from dbsl.plan.types import Plan, TimeModel


def plan_steps(
    samples: int,
    sizes: Sequence[int] | np.ndarray,
    time_models: TimeModel | Sequence[TimeModel],
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
    """
    sizes = np.asarray(sizes, dtype=np.int64)
    global_batch_size = int(sizes.sum())
    _check_sizes(sizes, len(time_models), samples, least)
    steps = steps_of_epoch(samples, global_batch_size, drop_last=drop_last, least=least)
    trained = steps * global_batch_size if drop_last else samples
    size, larger = divmod(trained, steps)  # steps of one sample more
    shares = (steps - larger) * split_batch(size, sizes, least)
    shares += larger * split_batch(size + 1, sizes, least) if larger else 0
    model = TimeModel.of(time_models, len(sizes))
    times = model.time(shares, steps)
    equal = largest_remainder(np.ones(len(sizes)), int(shares.sum()))
    equal_s = float(model.time(equal, steps).max())
    columns = (
        sizes,
        shares,
        np.full(len(sizes), steps),
        sizes / global_batch_size,
        times,
        times,
        np.zeros(len(sizes), dtype=bool),
    )
    return Plan(
        samples=int(shares.sum()),
        time_ratio=float(times.max()) / equal_s,
        all_large_time_s=equal_s,
        equal_batch_time_s=equal_s,
        workers=worker_plans(*columns),
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
    """Raise ``SettingError`` if a worker may have fewer than `least` samples in a joint step.

    Batch norm over all workers is an exchange inside the forward pass, which each must take.
    """
    size = samples // steps_of_epoch(samples, global_batch_size)
    if not drop_last and size < workers * least:
        raise SettingError(
            f"drop_last must be true with sync_batch_norm where a joint step has {size} samples "
            f"for {workers} workers, which need {least} each, got false"
        )


def balanced_steps(
    samples: int,
    global_batch_size: int,
    time_models: TimeModel | Sequence[TimeModel],
    limits: np.ndarray,
    rules: PlanRules,
) -> Plan:
    """Return a plan of joint steps split so that workers of these speeds end together.

    No worker gets fewer than `min_batch_size` samples a step, if there are enough.
    """
    model = TimeModel.of(time_models, len(limits))
    floor = _lowest(global_batch_size, len(limits), rules)
    sizes = balanced_sizes(global_batch_size, model, limits, floor)
    return plan_steps(samples, sizes, model, drop_last=rules.drop_last, least=rules.least)


def _lowest(global_batch_size: int, workers: int, rules: PlanRules) -> int:
    """Return the least samples of a step that a worker gets where shares move."""
    return max(rules.least, min(rules.min_batch_size, global_batch_size // workers))


def with_proportions(
    samples: int,
    plan: Plan,
    proportions: np.ndarray,
    time_models: TimeModel | Sequence[TimeModel],
    limits: np.ndarray,
    rules: PlanRules,
) -> Plan:
    """Return a planned plan with parts in other proportions: of the global batch, or of the epoch.

    Parts sum exactly to what they are of, stay within `limits` and above 0, parts of a global
    batch at `min_batch_size` or above. In a plan of rounds each worker keeps its planned batch
    size, unless it has fewer samples in a round; merge weights follow the shares.
    """
    workers = len(limits)
    if plan.global_batch_size is not None:
        floor = _lowest(plan.global_batch_size, workers, rules)
        lowest = np.minimum(np.full(workers, floor), limits)
        sizes = bounded_split(plan.global_batch_size, proportions, lowest, limits)
        return plan_steps(samples, sizes, time_models, drop_last=rules.drop_last, least=rules.least)
    rounds = rules.rounds
    each = min(rounds * rules.least, plan.samples // workers)
    lowest, most = np.full(workers, each), np.full(workers, plan.samples)
    shares = bounded_split(plan.samples, proportions, lowest, most)
    sizes = np.minimum([w.local_batch_size for w in plan.workers], shares // rounds)
    machines = Machines.of(workers, sizes, time_models)
    small = np.array([worker.small for worker in plan.workers])
    weights = merge_weights(shares, rules.factor)
    times = shares * machines.model.sample_time(sizes)
    return replace(
        plan, workers=plans_of_rounds(machines, shares, sizes, weights, times, small, rounds)
    )
