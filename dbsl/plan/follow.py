"""Batch sizes and shares that follow the machines: measured times -> smoothed speeds -> new plans.

Pure. `dbs` is the rule of Ye, Zhou, Shi, Sun, Lv (arXiv 2007.11831): parts in proportion to part
over time. `dynamic` estimates both coefficients of a*x + b for each worker (`SpeedEstimate`), and
moves only where the prediction gains more than a dead band. A first, noisy measurement may have put
a plan wrong by less than that; so each doubling of the measurements gets one chance with a narrow
band.

A run's plans, made from what its workers can do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.words import px
from dbsl.config.complete import for_workers, from_workers
from dbsl.config.settings import Balance, RunConfig, takes_joint_steps
from dbsl.plan.joint_steps import balanced_steps, plan_steps, with_proportions
from dbsl.plan.ledger import Members
from dbsl.plan.machines import (
    Machines,
    SpeedEstimate,
    Workers,
    balanced_sizes,
    check_global_batch,
    largest_remainder,
    predicted_time_s,
    proportional_parts,
)
from dbsl.plan.solve import plan_with_fallback
from dbsl.plan.types import (
    CurrentPlan,
    Plan,
    RoundReport,
    TimeModel,
    WorkerPlan,
    plan_from_plain,
    report_from_plain,
    segment_at,
    segments_from_plain,
    segments_to_plain,
)

DEAD_BAND = 0.05  # relative gain in time below which a plan stays
REFINE = 0.01  # the gain that is enough whenever the number of measurements has doubled


class Planner:
    """The plan of each epoch: one for each resolution, or one that follows the workers' times.

    The plan of a round is decided when it is first asked for, so that workers that are not in step
    with each other still share an epoch's samples by one plan. Call it under the server's lock.

    Args:
        plans: The first plan of each resolution.
        resolution_at: Resolution of an epoch.
        models: Planned time models, one per worker, by resolution.
        balance: How plans follow measured times.
        every: Rounds from one chance to change to the next.
        rounds_per_epoch: Rounds per epoch.
        replan: A resolution's plan for other time models.
        resize: A resolution's planned plan with parts in other proportions, for `dbs`.
        split_at: Samples of the epoch that rounds of a segment take before a round.
        without: A resolution's plan for the workers that are left.
        samples_of: Samples of a worker in a round of a segment, from (segment, epoch, worker,
            round).
    """

    def __init__(
        self,
        plans: Mapping[int, Plan],
        resolution_at: Callable[[int], int],
        models: Mapping[int, Sequence[TimeModel]],
        *,
        balance: Balance = "none",
        every: int = 1,
        rounds_per_epoch: int = 1,
        replan: Callable[[int, Sequence[TimeModel]], Plan] | None = None,
        resize: Callable[[int, Plan, np.ndarray], Plan] | None = None,
        split_at: Callable[[CurrentPlan, int], int] | None = None,
        without: Callable[[int, Collection[int]], Plan] | None = None,
        samples_of: Callable[[CurrentPlan, int, int, int], int] | None = None,
    ) -> None:
        self.balance: Balance = balance
        self.current = dict(plans)
        self.changes = 0
        self._resolution_at = resolution_at
        self._models = models
        self._every = every
        self._rounds = rounds_per_epoch
        self._replan = replan
        self._resize = resize
        self._split_at = split_at
        self._without = without
        self._samples_of = samples_of
        self.fixed: dict[
            int, list[CurrentPlan]
        ] = {}  # by epoch; measured times change them no more
        self._segments: dict[int, list[CurrentPlan]] = {}  # by epoch; they may grow
        self._asked: dict[int, int] = {}  # by epoch: the last round whose plan is decided
        self._first = dict(plans)
        self._planned = dict(plans)  # for the planned time models, without lost workers
        self._active = set(range(len(next(iter(plans.values())).workers)))  # but for lost workers
        self._begun = 0  # rounds of the run that a loss left as they were planned
        self._epochs = [0] * len(self._active)  # epoch of each worker's last report
        self._speeds = [SpeedEstimate() for _ in next(iter(plans.values())).workers]
        self._measured = [0] * len(self._speeds)  # rounds of each worker
        self._refine_at = 2  # measurements of each worker
        self._since: defaultdict[int, list[RoundReport]] = defaultdict(list)  # last change, dbs

    def at(self, epoch: int, round_: int = 0) -> CurrentPlan:
        """Return the plan in force in a round of an epoch."""
        resolution = self._resolution_at(epoch)
        if epoch in self.fixed:
            return segment_at(self.fixed[epoch], round_)
        if self.balance == "none":
            return CurrentPlan(self.current[resolution])
        clock = epoch * self._rounds + round_
        if epoch not in self._segments:
            first = self._renewed(resolution, epoch * self._rounds, self.current[resolution])
            self._segments[epoch], self._asked[epoch] = [CurrentPlan(first)], 0
            self._forget_epochs()
        segments = self._segments[epoch]
        if round_ > self._asked[epoch]:  # a round that somebody has begun keeps its plan
            self._asked[epoch] = round_
            plan = self._renewed(resolution, clock, segments[-1].plan)
            if plan is not segments[-1].plan:
                segments.append(CurrentPlan(plan, round_, self._split_at(segments[-1], round_)))
        return segment_at(segments, round_)

    def takes_over(self, epoch: int) -> bool:
        """Whether it is the rest of an epoch that other workers or plans had begun.

        Every process has read it from the checkpoint.
        """
        return any(segment.left for segment in self.fixed.get(epoch, ()))

    def decided(self, epoch: int, round_: int) -> Plan | None:
        """Return the plan in force in a round that a worker has begun, if it is still known.

        It decides nothing and needs no lock.
        """
        if segments := self.fixed.get(epoch) or self._segments.get(epoch):
            segment = segment_at(segments, round_)
            return segment and segment.plan
        return self.current_at(epoch) if self.balance == "none" else None

    def current_at(self, epoch: int) -> Plan:
        """Return the last plan of an epoch's resolution, without asking for a new one."""
        return self.current[self._resolution_at(epoch)]

    def is_boundary(self, epoch: int, round_: int) -> bool:
        """Whether the plan may change where this round begins."""
        clock = epoch * self._rounds + round_
        return self.balance != "none" and (round_ == 0 or clock % self._every == 0)

    def observe(self, report: RoundReport) -> None:
        """Take in the compute time of a worker's round."""
        self._epochs[report.worker] = max(self._epochs[report.worker], report.epoch)
        if self.balance == "none" or not report.steps or report.compute_time_s <= 0:
            return
        self._measured[report.worker] += 1
        if self.balance == "dbs":
            # The log keeps the lines: a checkpoint need not have them, too.
            self._since[report.worker].append(replace(report, logged=0, lines=()))
        self._speeds[report.worker].observe(
            self._models[report.resolution][report.worker],
            report.samples / report.steps,
            report.compute_time_s / report.steps,
        )

    def leave_out(self, workers: Collection[int]) -> None:
        """Plan without workers that are not there when the run begins.

        Raises:
            SettingError: If there is no plan without them.
        """
        active = self._active - set(workers)
        self._plan_for(active, self._plans_of(active))

    def join(self, worker: int, members: Members) -> int:
        """Plan with one more worker from the first epoch on that nobody has begun.

        Epochs before that one keep their plans to their end.

        Args:
            worker: The one that joins. It was lost, or was not there when the run began.
            members: The workers without it.

        Returns:
            The rounds that it has behind it. At `members.last` no epoch is left for it, and nothing
            has changed.

        Raises:
            SettingError: If there is no plan with it; then nothing has changed.
        """
        if not 0 <= worker < len(self._speeds) or worker in members.active:
            raise SettingError(
                f"a worker that joins must be one of {len(self._speeds)} and not there, "
                f"got worker {worker}"
            )
        rounds = self._rounds
        first = members.next_epoch(self._begun, rounds, self.fixed)
        if first * rounds >= members.last:
            return members.last
        active = {*members.active, worker}
        plans = self._plans_of(active)
        under_way = range(members.slowest // rounds, first)
        whole = {e: [CurrentPlan(self.current[self._resolution_at(e)])] for e in under_way}
        known = whole | self._segments | self.fixed
        self.fixed = {epoch: known[epoch] for epoch in under_way}
        self._epochs[worker] = first
        self._plan_for(active, plans)
        return first * rounds

    def drop(self, worker: int, members: Members) -> int:
        """Plan without a worker from the first round on that nobody has begun.

        An epoch that other workers had begun before this run's keeps its plan to its end.

        Args:
            worker: The one that was lost.
            members: The workers as they were, the lost one included.

        Returns:
            The samples, counted once in each epoch, that nobody will train on because it was lost:
            its part of the rounds that it had not pushed and that keep their plan.

        Raises:
            SettingError: If there is no plan without it.
        """
        left, clock = members.without(worker), members.clocks[worker]
        others = self._plans_of(left.active)
        rounds, lost = self._rounds, 0
        # Begun, too: rounds that the lost worker was ahead, or that an earlier loss left alone.
        ahead = 0 if worker in members.newcomers else min(clock, members.last)
        begun = self._begun = max(self._begun, left.begun, ahead)
        first_epoch = min(clock, left.slowest) // rounds
        epochs = range(first_epoch, -(-begun // rounds))
        later = [epoch for epoch in self.fixed if epoch >= epochs.stop]  # left by other workers
        for epoch in (*epochs, *later):
            whole = [CurrentPlan(self.current[self._resolution_at(epoch)])]
            segments = list(self.fixed.get(epoch) or self._segments.get(epoch) or whole)
            *before, end = segments
            first = rounds if end.left else min(max(begun - epoch * rounds, 0), rounds)
            for round_ in range(max(clock - epoch * rounds, 0), first):
                segment = segment_at(segments, round_)
                lost += self._samples_of(segment, epoch, worker, round_)
            if first < rounds:
                plan = others[self._resolution_at(epoch)]
                kept = segments if end.first_round < first else before
                segments = [*kept, CurrentPlan(plan, first, self._split_at(end, first))]
            self.fixed[epoch] = segments
        self._plan_for(left.active, others)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Return plans and estimates in plain values."""
        return {
            "current": {resolution: asdict(plan) for resolution, plan in self.current.items()},
            "changes": self.changes,
            "fixed": segments_to_plain(self.fixed),
            "segments": segments_to_plain(self._segments),
            "asked": dict(self._asked),
            "active": sorted(self._active),
            "begun": self._begun,
            "speeds": [speed.state_dict() for speed in self._speeds],
            "measured": list(self._measured),
            "refine_at": self._refine_at,
            "since": {w: [asdict(r) for r in reports] for w, reports in self._since.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, for as many workers."""
        current = {r: plan_from_plain(plan) for r, plan in state["current"].items()}
        fixed, segments = (segments_from_plain(state[name]) for name in ("fixed", "segments"))
        plans = [*current.values()]
        plans += [row.plan for rows in (*fixed.values(), *segments.values()) for row in rows]
        if current.keys() != self.current.keys() or any(
            len(plan.workers) != len(self._speeds) for plan in plans
        ):
            raise SettingError(f"plans must be of {len(self._speeds)} workers at each resolution")
        self.current, self.fixed, self._segments = current, fixed, segments
        self._asked = dict(state["asked"])
        self._active, self._begun = set(state["active"]), state["begun"]
        if len(self._active) < len(self._speeds):
            self._planned = {r: self._without(r, self._active) for r in current}
        self.changes = state["changes"]
        for speed, saved in zip(self._speeds, state["speeds"], strict=True):
            speed.load_state_dict(saved)
        self._measured = list(state["measured"])
        self._refine_at = state["refine_at"]
        self._since.clear()
        for worker, reports in state["since"].items():
            self._since[worker] = [report_from_plain(report) for report in reports]

    def estimates(self, resolution: int) -> list[TimeModel]:
        """Return the workers' time models at a resolution, as estimated so far."""
        planned = self._models[resolution]
        return [s.model(m) for s, m in zip(self._speeds, planned, strict=True)]

    def _plans_of(self, active: Collection[int]) -> dict[int, Plan]:
        """Return each resolution's plan for these workers and the planned time models."""
        try:
            plans = {r: self._without(r, active) for r in self.current}
        except SettingError:
            for resolution in self.current:  # what makes plans remembers for whom
                self._without(resolution, self._active)
            raise
        return dict(self._first) if len(active) == len(self._speeds) else plans

    def _plan_for(self, active: Collection[int], plans: Mapping[int, Plan]) -> None:
        """Use these plans from the first epoch on that is not fixed; nobody has begun it."""
        self._segments.clear()
        self._asked.clear()
        self.current, self._planned = dict(plans), dict(plans)
        self._active = set(active)
        self._since.clear()

    def _renewed(self, resolution: int, clock: int, plan: Plan) -> Plan:
        """Return a plan, or the one that takes its place from this round of the run on."""
        if clock % self._every or self._least_measured() == 0:
            return plan
        candidate = self._candidate(resolution, plan)
        if candidate is not plan:
            self.changes += 1
            self.current[resolution] = candidate
        return candidate

    def _candidate(self, resolution: int, plan: Plan) -> Plan:
        try:
            if self.balance == "dbs":
                return self._proportional(resolution, plan)
            models = self.estimates(resolution)
            candidate = self._replan(resolution, models)
        except SettingError:  # the estimates leave no plan
            return plan
        now, then = (predicted_time_s(p, models) for p in (plan, candidate))
        band = DEAD_BAND
        if self._least_measured() >= self._refine_at:
            band, self._refine_at = REFINE, 2 * self._least_measured()
        return candidate if now > (1 + band) * then else plan

    def _proportional(self, resolution: int, plan: Plan) -> Plan:
        if not self._active <= self._since.keys():  # since the last change
            return plan
        parts = np.zeros(len(self._speeds))  # a lost worker has none
        active = sorted(self._active)
        reports = [self._since[worker] for worker in active]
        self._since.clear()
        samples = [sum(r.samples for r in own) for own in reports]
        times = [sum(r.compute_time_s for r in own) for own in reports]
        parts[active] = proportional_parts(samples, times)
        candidate = self._resize(resolution, self._planned[resolution], parts)
        return plan if candidate.workers == plan.workers else candidate

    def _least_measured(self) -> int:
        return min(self._measured[worker] for worker in self._active)

    def _forget_epochs(self) -> None:
        """Forget the plans of epochs that every worker has left behind."""
        slowest = min(self._epochs[worker] for worker in self._active)
        for epoch in [e for e in self._segments if e < slowest]:
            del self._segments[epoch], self._asked[epoch]


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
