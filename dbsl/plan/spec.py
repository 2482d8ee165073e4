"""Plan a resolution from a run's settings and its workers' step times.

A batch size is *asked* for in a `PlanSpec`, *planned* in a `Plan`, and *drawn* in the batches of a
turn (`dbsl.plan.batches`), where the last batches of a round have a sample more or less.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dbsl.base.errors import SettingError, require
from dbsl.config.settings import RunConfig, shares_global_batch
from dbsl.plan.machines import (
    WorkerProfiles,
    balanced_sizes,
    bounded_split,
    check_global_batch,
    steps_in_shares,
)
from dbsl.plan.solve import PlanRules, merge_weights, plan_dual_batch, plan_steps, rows_of
from dbsl.plan.types import NoPlanError, Plan, TimeModel, WorkerPlan

_NO_PART = WorkerPlan(0, 0, 0, 0.0, 0.0, 0.0, small=False)


@dataclass(frozen=True)
class PlanSpec:
    """What a run asks of one resolution's plans, and what its workers can hold."""

    samples: int  # of an epoch
    limits: tuple[int, ...]  # most samples of each worker's step; in rounds, its large batch
    rules: PlanRules
    small_workers: int = 0
    global_batch_size: int | None = None  # B of joint steps; None: workers have rounds
    by_hand: tuple[int, ...] = ()  # each worker's part of the joint steps
    measured: bool = False  # step times were measured: they may admit no plan, but one is needed

    def lowest(self, limits: np.ndarray) -> int:
        """Return the fewest samples of a worker in a joint step; no limit is lower."""
        lowest = self.rules.lowest(self.global_batch_size, len(limits))
        return max(self.rules.least, min(lowest, int(limits.min())))


def specs_of(
    config: RunConfig, known: WorkerProfiles, samples: int, least: int
) -> dict[int, PlanSpec]:
    """Return what a run asks of its plans, by resolution.

    `least` is the fewest samples a worker takes in a step, unless it takes none.
    """
    small, by_hand = config.small_batch_size or (None,), config.local_batch_sizes or ()
    workers = config.workers
    rules = PlanRules(
        min_batch_size=config.min_batch_size,
        rounds=config.rounds_per_epoch,
        factor=config.update_factor,
        rounding=config.rounding,
        least=least,
        drop_last=config.drop_last,
    )
    specs = {}
    for number, resolution in enumerate(config.resolutions):
        own = by_hand[workers * number : workers * (number + 1)] or by_hand
        limits, total = own or known.large_batch_sizes[resolution], None
        if shares_global_batch(config):
            total = sum(own) or config.global_batch_size or sum(limits)
            held = (known.limits or {}).get(resolution, [total] * workers)
            limits = np.minimum(held, total).tolist()
            if not own:
                check_global_batch(total, np.array(limits), least)
            name = "local_batch_sizes must sum to" if own else "global_batch_size must be"
            require(total <= samples, f"{name} at most the {samples} training samples", total)
        lowest, most = config.min_batch_size, total // workers if total else max(limits)
        if not own and lowest != type(config).min_batch_size:  # its default gives way
            what = f"{total} samples of a step over {workers} workers" if total else "a large batch"
            require(lowest <= most, f"min_batch_size must be at most {most}, {what}", lowest)
        size = small[number % len(small)]
        specs[resolution] = PlanSpec(
            samples,
            tuple(limits),
            replace(rules, small_batch_size=size, time_ratio=None if size else config.time_ratio),
            config.small_workers,
            total,
            own if total else (),
            # A run that repeats another is given the times that the other measured.
            measured=known.measured or "slope" in config.found,
        )
    return specs


def make_plan(spec: PlanSpec, models: TimeModel, active: Collection[int] | None = None) -> Plan:
    """Plan an epoch with these step times of all workers, arrays [n].

    It is for all workers, or the `active` ones: others get nothing.
    """
    active = sorted(range(len(spec.limits)) if active is None else active)
    models, limits = models[active], np.array(spec.limits)[active]
    if spec.global_batch_size is None:
        return _of_all(_plan_rounds(spec, models, limits, active), spec, active)
    if not (sizes := spec.by_hand):
        sizes = balanced_sizes(spec.global_batch_size, models, limits, spec.lowest(limits))
    return _of_all(plan_steps(spec.samples, sizes, models, spec.rules), spec, active)


def resize_plan(
    spec: PlanSpec, plan: Plan, models: TimeModel, proportions: np.ndarray, active: Sequence[int]
) -> Plan:
    """Return a plan with new `proportions` of its active workers' parts, [a].

    Parts are of the global batch, within the workers' limits, or of the epoch, and sum to it
    exactly. In a plan of rounds, each worker keeps its planned batch size, unless it has fewer
    samples in a round; merge weights follow the shares.
    """
    rules, samples, models = spec.rules, spec.samples, models[active]
    limits = np.array(spec.limits)[active]
    if (total := spec.global_batch_size) is not None:
        sizes = bounded_split(total, proportions, spec.lowest(limits), limits)
        return _of_all(plan_steps(samples, sizes, models, rules), spec, active)
    planned = [plan.workers[worker] for worker in active]
    lowest = np.minimum(rules.lowest_shares(samples, limits), samples // len(active))
    shares = bounded_split(samples, proportions, lowest, samples)
    sizes = np.minimum([w.local_batch_size for w in planned], shares // rules.rounds)
    steps = steps_in_shares(shares, sizes, rules.rounds)
    weights = merge_weights(shares / shares.max(), rules.factor)
    times, simplified_s = models.time(shares, steps), shares * models.sample_time(sizes)
    small = np.array([worker.small for worker in planned])
    rows = rows_of(sizes, shares, steps, weights, times, simplified_s, small)
    return _of_all(replace(plan, workers=rows), spec, active)


def _of_all(plan: Plan, spec: PlanSpec, active: Sequence[int]) -> Plan:
    rows = dict(zip(active, plan.workers, strict=True))
    every = (rows.get(worker, _NO_PART) for worker in range(len(spec.limits)))
    return replace(plan, workers=tuple(every))


def _plan_rounds(
    spec: PlanSpec, models: TimeModel, limits: np.ndarray, active: Sequence[int]
) -> Plan:
    """Return a plan of rounds.

    Noisy measurements may admit no small batch. B_S is then max(min_batch_size, B_L/8),
    and the workers' samples still balance the measured times.
    """
    small_workers = sum(worker < spec.small_workers for worker in active)
    counts = (spec.samples, len(active), small_workers, limits, models)
    try:
        return plan_dual_batch(*counts, replace(spec.rules, clamp=not spec.measured))
    except SettingError as error:
        # Settings are for all workers: those left may not reach the goal.
        everyone = len(active) == len(spec.limits)
        if not spec.measured or (everyone and not isinstance(error, NoPlanError)):
            raise
        smallest = int(limits.min())
        batch = min(max(spec.rules.min_batch_size, smallest // 8), smallest)
        goal = {"time_ratio": None, "small_batch_size": batch, "min_batch_size": 1}
        plan = plan_dual_batch(*counts, replace(spec.rules, **goal))
        note = (
            f"the measured step times admit no plan: {error}; going on with small batches of "
            f"{batch}, which makes the time ratio {plan.time_ratio:.3f}"
        )
        return replace(plan, notes=(note, *plan.notes))
