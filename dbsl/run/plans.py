"""A run's plans, made from what its workers can do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.words import px
from dbsl.plan.dual_batch import plan_with_fallback
from dbsl.plan.joint_steps import balanced_steps, plan_steps, with_proportions
from dbsl.plan.machines import Machines, largest_remainder
from dbsl.plan.split import balanced_sizes, check_global_batch
from dbsl.plan.types import Plan, TimeModel, WorkerPlan
from dbsl.run.by_worker import for_workers, from_workers
from dbsl.run.config import RunConfig, takes_joint_steps
from dbsl.run.workers import Workers

_NO_PART = WorkerPlan(0, 0, 0, 0.0, 0.0, 0.0, small=False)


class PlanMaker:
    """Makes a run's plans by its config: of rounds or of joint steps, first and anew.

    `least` is the least that a worker takes in a step, unless it takes nothing.
    """

    def __init__(self, config: RunConfig, known: Workers, samples: int, least: int) -> None:
        self._config = config
        self._known = known
        self._samples = samples
        self.least = least
        self._active = list(range(config.workers))  # all workers that were not lost
        resolutions, workers = config.resolutions, config.workers
        small = for_workers("small_batch_size", config.small_batch_size, resolutions, workers)
        self._small = {
            r: [size or 0 for size in row] for r, row in zip(resolutions, small, strict=True)
        }
        by_hand = config.local_batch_sizes
        if by_hand and len(by_hand) not in (workers, workers * len(resolutions)):
            raise SettingError(
                f"local_batch_sizes must have one value per worker ({workers}), got {len(by_hand)}"
            )
        self._by_hand: dict[int, list[int]] = {}
        for i, resolution in enumerate(resolutions if by_hand else ()):
            first = 0 if len(by_hand) == workers else i * workers
            self._by_hand[resolution] = list(by_hand[first : first + workers])

    def first(self, resolution: int, say: Callable[[str], object]) -> Plan:
        """Return the plan that a resolution starts with, on the planned time models."""
        models = self._known.models[resolution]
        if takes_joint_steps(self._config):
            return plan_steps(
                self._samples,
                self._first_sizes(resolution),
                models,
                drop_last=self._config.drop_last,
                least=self.least,
            )
        plan, fell_back = self._rounds(resolution, models, measured=self._known.measured)
        if fell_back:
            self._small[resolution] = [plan.small_batch_size] * self._config.workers
            say(f"{px(resolution, 'at ', ' ')}{fell_back}")
        return plan

    def replan(self, resolution: int, models: Sequence[TimeModel]) -> Plan:
        """Return a resolution's plan for workers with other time models."""
        models = [models[worker] for worker in self._active]
        if takes_joint_steps(self._config):
            plan = balanced_steps(
                int(self._first_sizes(resolution).sum()),
                models,
                self._limits(resolution)[self._active],
                samples=self._samples,
                drop_last=self._config.drop_last,
                least=self.least,
                floor=self._config.min_batch_size,
            )
        else:
            plan = self._rounds(resolution, models, measured=True)[0]
        return self._of_all(plan)

    def without(self, resolution: int, active: Collection[int]) -> Plan:
        """Return a resolution's plan for the workers that are left; the others get nothing.

        Raises:
            SettingError: If there is none.
        """
        self._active = sorted(active)
        return self.replan(resolution, self._known.models[resolution])

    def resize(self, resolution: int, plan: Plan, proportions: np.ndarray) -> Plan:
        """Return a resolution's planned plan with its workers' parts in other proportions."""
        active = self._active
        moved = with_proportions(
            replace(plan, workers=tuple(plan.workers[worker] for worker in active)),
            proportions[active],
            [self._known.models[resolution][worker] for worker in active],
            self._limits(resolution)[active],
            samples=self._samples,
            rounds=self._config.rounds_per_epoch,
            drop_last=self._config.drop_last,
            least=self.least,
            floor=self._config.min_batch_size,
            factor=self._config.update_factor,
        )
        return self._of_all(moved)

    def small_batch_size(self) -> tuple[int, ...] | None:
        """Return the setting that repeats the small batches where they were not solved for."""
        rows = list(self._small.values())
        return from_workers(rows) if any(row[0] for row in rows) else None

    def _of_all(self, plan: Plan) -> Plan:
        """Return a plan of the workers that are left as one of all; the others get nothing."""
        rows = [_NO_PART] * self._config.workers
        for worker, row in zip(self._active, plan.workers, strict=True):
            rows[worker] = row
        return replace(plan, workers=tuple(rows))

    def _rounds(
        self, resolution: int, models: Sequence[TimeModel], *, measured: bool
    ) -> tuple[Plan, str | None]:
        config, active = self._config, self._active
        small_workers = sum(worker < config.small_workers for worker in active)
        given = self._small[resolution][0] or None
        large = self._by_hand.get(resolution) or self._known.large_batch_sizes[resolution]
        share_goal = config.small_share if small_workers and not given else None
        return plan_with_fallback(
            self._samples,
            len(active),
            small_workers,
            [large[worker] for worker in active],
            models,
            measured=measured,
            time_ratio=config.time_ratio if not given and share_goal is None else None,
            small_batch_size=given if small_workers else None,
            small_share=share_goal,
            min_batch_size=config.min_batch_size,
            rounds=config.rounds_per_epoch,
            factor=config.update_factor,
            rounding=config.rounding,
            least=self.least,
        )

    def _first_sizes(self, resolution: int) -> np.ndarray:
        """Return the sizes of joint steps: by hand, or such that planned workers end together."""
        config, workers = self._config, self._config.workers
        if self._by_hand:
            return np.array(self._by_hand[resolution])
        models = self._known.models[resolution]
        total = config.global_batch_size or sum(self._known.large_batch_sizes[resolution])
        limits = self._limits(resolution, total)
        check_global_batch(total, workers, limits, self.least)
        if total > self._samples:
            raise SettingError(
                f"global_batch_size must be at most the {self._samples} training samples, "
                f"got {total}"
            )
        if len(set(models)) == 1 and total <= int(limits.min()) * workers:
            return largest_remainder(np.ones(workers), total)
        return balanced_sizes(total, Machines.of(workers, limits, models), limits, self.least)

    def _limits(self, resolution: int, total: int | None = None) -> np.ndarray:
        """Return the most that each worker may take of a global batch, int64 [n]."""
        total = total or int(self._first_sizes(resolution).sum())
        limits = self._known.limits[resolution]
        return np.full(self._config.workers, total) if limits is None else np.minimum(limits, total)
