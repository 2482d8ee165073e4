"""A run's plans: how each is made from what the workers can do, and which is in force when.

`dbs` is the rule of Ye, Zhou, Shi, Sun, Lv (arXiv 2007.11831): parts in proportion to part over
time. `dynamic` estimates both coefficients of a*x + b for each worker (`SpeedEstimate`), and moves
only where the prediction gains more than a dead band. A first, noisy measurement may have put a
plan wrong by less than that; so each doubling of the measurements gets one chance with a narrow
band.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError, px
from dbsl.config.fields import refuse
from dbsl.config.settings import Balance, RunConfig, takes_joint_steps
from dbsl.plan import machines
from dbsl.plan.machines import KnownWorkers, SpeedEstimate
from dbsl.plan.members import EpochPlans, Members
from dbsl.plan.sampler import TurnSampler
from dbsl.plan.solve import PlanRules, merge_weights, plan_dual_batch, plan_steps, rows_of
from dbsl.plan.types import (
    Handover,
    NoPlanError,
    Plan,
    RoundReport,
    TimeModel,
    WorkerPlan,
)

DEAD_BAND = 0.05  # relative gain in time below which a plan stays
REFINE = 0.01  # the gain that is enough whenever the number of measurements has doubled


class Planner:
    """The plan of each epoch: one for each resolution, or one that follows the workers' times.

    The plan of a round is decided when it is first asked for, so that workers that are not in step
    with each other still share an epoch's samples by one plan. Call it under the server's lock.

    It begins with each resolution's `plans` and planned time `models`, and may change plans `every`
    so many rounds. Without `members` all workers are there, in epochs of one round. A `maker` is
    needed where plans or workers change, a `sampler` where they do inside an epoch.
    """

    def __init__(
        self,
        plans: Mapping[int, Plan],
        resolution_at: Callable[[int], int],
        models: Mapping[int, TimeModel | Sequence[TimeModel]],
        *,
        members: Members | None = None,
        balance: Balance = "none",
        every: int = 1,
        maker: PlanMaker | None = None,
        sampler: TurnSampler | None = None,
    ) -> None:
        workers = len(next(iter(plans.values())).workers)
        self.members = members or Members(workers)
        self.plans = EpochPlans(plans, resolution_at)
        self.balance: Balance = balance
        self.changes = 0  # since this process began
        self._resolution_at, self._models = resolution_at, models
        self._every, self._rounds = every, self.members.rounds
        self._maker, self._sampler = maker, sampler
        self._begun = 0  # rounds of the run that a loss left as they were planned
        self._epochs = [0] * workers  # epoch of each worker's last report
        self._speeds = [SpeedEstimate() for _ in range(workers)]
        self._refine_at = 2  # measurements of each worker
        # By worker: samples and compute time since the last change, for dbs.
        self._since: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def at(self, epoch: int, round_: int = 0) -> Plan | None:
        """Return the plan of a round that is decided, if it is still known.

        It needs no lock.
        """
        known = self.balance == "none" or self.plans.stands(epoch, round_)
        return self.plans.at(epoch, round_) if known else None

    def decide(self, epoch: int, round_: int = 0) -> Plan:
        """Return the plan of a round, which stands from now on."""
        plans = self.plans
        if (plan := self.at(epoch, round_)) is None:
            before = plans.at(epoch, round_)
            plan = self._renewed(epoch, round_, before)
            if round_ and plan is not before:
                taken = self._sampler.taken_before(before, round_)
                plan = replace(plan, first_round=round_, taken=taken)
            plans.set(epoch, round_ + 1, plan)
            # Plans of epochs that every worker has left behind are forgotten.
            plans.forget(range(min(self._epochs[worker] for worker in self.members.active)))
        return plan

    def adopt(self, epoch: int, round_: int, plan: Plan) -> None:
        """Have this plan stand in a round that all workers are in, as another process decided."""
        self.plans.set(epoch, round_ + 1, plan)
        self.plans.forget(range(epoch))

    def is_boundary(self, epoch: int, round_: int) -> bool:
        """Whether the plan may change where this round begins."""
        clock = epoch * self._rounds + round_
        return self.balance != "none" and (round_ == 0 or clock % self._every == 0)

    def observe(self, report: RoundReport) -> None:
        """Take in the compute time of a worker's round."""
        self._epochs[report.worker] = max(self._epochs[report.worker], report.epoch)
        if self.balance == "none" or not report.samples or report.compute_time_s <= 0:
            return
        if self.balance == "dbs":
            self._since[report.worker] += report.samples, report.compute_time_s
        self._speeds[report.worker].observe(
            self._models[report.resolution][report.worker],
            report.samples / report.steps,
            report.compute_time_s / report.steps,
        )

    def bring_back(self, last: int) -> int:
        """Plan with the lost workers, too, from the first epoch on that nobody has begun.

        The epochs before keep theirs to their end. Of the run's rounds, `last` in all.

        Returns the first epoch.
        """
        self._begun = max(self._begun, self.members.begun(last))
        first = -(-self._begun // self._rounds)
        for epoch in range(self.members.slowest() // self._rounds, first):
            self.plans.set(epoch, self._rounds, *self.plans.of_epoch(epoch))
        for worker in self.members.lost:
            self._epochs[worker] = first
        self._begin_with(first, self._plans_of(range(len(self._epochs))))
        return first

    def drop(self, worker: int, last: int) -> int:
        """Plan without a worker, who still counts as there, from the first round not begun.

        Returns the samples that nobody will train on because it was lost: its part of the rounds,
        of `last` in the run, that it had not pushed and that keep their plan.
        """
        members, plans, rounds = self.members, self.plans, self._rounds
        there, clock, lost = members.active - {worker}, members.clocks[worker], 0
        # Newcomers have no part in the epochs before theirs, and have begun nothing.
        newcomers = members.newcomers & there if there - members.newcomers else set()
        others = self._plans_of(there)
        # Begun, too: rounds that the lost worker was ahead, or that an earlier loss left alone.
        ahead = 0 if worker in members.newcomers else min(clock, last)
        self._begun = max(self._begun, members.begun(last, but={worker, *newcomers}), ahead)
        stop = -(-self._begun // rounds)
        for epoch in range(min(clock, members.slowest(but=worker)) // rounds, stop):
            before = epoch * rounds
            kept = min(self._begun - before, rounds)  # rounds that keep their plan
            for round_ in range(max(clock - before, 0), kept):
                lost += self._sampler.count(plans.at(epoch, round_), worker, epoch, round_)
            plans.set(epoch, rounds, *plans.of_epoch(epoch))
            if kept < rounds:
                late = {own for own in newcomers if members.clocks[own] > before}
                left = self._plans_of(there - late) if late else others
                taken = self._sampler.taken_before(plans.at(epoch, kept), kept)
                rest = replace(left[self._resolution_at(epoch)], first_round=kept, taken=taken)
                plans.set(epoch, rounds, rest)
        self._begin_with(stop, others)
        return lost

    def take_over(self, start: Handover) -> None:
        """Keep the first plan for what other workers' rounds have left of the epoch under way.

        A joint step has the same samples with any plan.
        """
        epoch, round_ = divmod(start.clock, self._rounds)
        plan = self.plans.first[self._resolution_at(epoch)]
        if round_ and plan.global_batch_size is None:
            rest = replace(plan, first_round=round_, taken=start.taken)
            self.plans.set(epoch, self._rounds, rest)

    def state_dict(self) -> dict[str, Any]:
        """Return plans and estimates in plain values."""
        return {
            **self.plans.state_dict(),
            "begun": self._begun,
            "speeds": [speed.state_dict() for speed in self._speeds],
            "refine_at": self._refine_at,
            "since": {worker: sums.tolist() for worker, sums in self._since.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, for as many workers."""
        self.plans.load_state_dict(state)
        self._begun, self._refine_at = state["begun"], state["refine_at"]
        for speed, saved in zip(self._speeds, state["speeds"], strict=True):
            speed.load_state_dict(saved)
        self._since.clear()
        self._since.update({worker: np.array(sums) for worker, sums in state["since"].items()})

    def estimates(self, resolution: int) -> TimeModel:
        """Return the workers' time models at a resolution, as estimated so far."""
        pairs = zip(self._speeds, self._models[resolution], strict=True)
        return TimeModel.of([speed.model(planned) for speed, planned in pairs], len(self._speeds))

    def _plans_of(self, active: Collection[int]) -> dict[int, Plan]:
        if len(active) == len(self._speeds):
            return self.plans.first
        return {r: self._maker.replan(r, self._models[r], active) for r in self.plans.first}

    def _begin_with(self, epoch: int, plans: Mapping[int, Plan]) -> None:
        """Use these plans from an epoch on that nobody has begun."""
        self.plans.forget(range(epoch, sys.maxsize))
        self.plans.last = dict(plans)
        self._since.clear()

    def _renewed(self, epoch: int, round_: int, plan: Plan) -> Plan:
        """Return a plan, or the one that takes its place from this round on."""
        measured = min(self._speeds[worker].measured for worker in self.members.active)
        if (epoch * self._rounds + round_) % self._every or measured == 0:
            return plan
        resolution = self._resolution_at(epoch)
        try:
            if self.balance == "dbs":
                candidate = self._proportional(resolution, plan)
            else:
                candidate = self._faster(resolution, plan, measured)
        except SettingError:  # the estimates leave no plan
            return plan
        if candidate is not plan:
            self.changes += 1
            self.plans.last[resolution] = candidate
        return candidate

    def _faster(self, resolution: int, plan: Plan, measured: int) -> Plan:
        """Return the plan for the speeds as estimated, if it gains enough over this one."""
        models = self.estimates(resolution)
        candidate = self._maker.replan(resolution, models, self.members.active)
        rows = (np.array([(w.samples, w.steps) for w in p.workers]).T for p in (plan, candidate))
        now, then = (models.time(*row).max() for row in rows)
        band = DEAD_BAND
        if measured >= self._refine_at:
            band, self._refine_at = REFINE, 2 * measured
        return candidate if now > (1 + band) * then else plan

    def _proportional(self, resolution: int, plan: Plan) -> Plan:
        """Return the plan by the published rule, p_i <- (p_i/t_i) / sum_j(p_j/t_j).

        It takes a step to cost nothing but its samples, and believes each measurement.
        """
        active = sorted(self.members.active)
        if not self._since.keys() >= set(active):  # since the last change
            return plan
        samples, times_s = np.array([self._since[worker] for worker in active]).T
        self._since.clear()
        speeds = samples / times_s
        planned = self.plans.first[resolution]
        if self.members.lost:
            planned = self._maker.replan(resolution, self._models[resolution], active)
        candidate = self._maker.resize(resolution, planned, speeds / speeds.sum(), active)
        return plan if candidate.workers == plan.workers else candidate


_NO_PART = WorkerPlan(0, 0, 0, 0.0, 0.0, 0.0, small=False)


class PlanMaker:
    """Makes a run's plans by its config: of rounds or of joint steps, for all workers or for some.

    Workers that are not active get nothing. `least` is the least that a worker takes in a step,
    unless it takes nothing.
    """

    def __init__(self, config: RunConfig, known: KnownWorkers, samples: int, least: int) -> None:
        self._config, self._known, self._samples, self._least = config, known, samples, least
        self._rules = PlanRules(
            min_batch_size=config.min_batch_size,
            rounds=config.rounds_per_epoch,
            factor=config.update_factor,
            rounding=config.rounding,
            least=least,
            drop_last=config.drop_last,
        )
        resolutions, workers = config.resolutions, config.workers
        small = config.small_batch_size or (None,)
        text = f"small_batch_size must have one value, or one per resolution ({len(resolutions)})"
        refuse([(len(small) not in (1, len(resolutions)), text, len(small))])
        self._small = dict(zip(resolutions, small * (len(resolutions) // len(small)), strict=True))
        by_hand = config.local_batch_sizes or ()
        unlike = len(by_hand) not in (0, workers, workers * len(resolutions))
        text = f"local_batch_sizes must have one value per worker ({workers})"
        refuse([(unlike, text, len(by_hand))])
        rows = [by_hand[i : i + workers] for i in range(0, len(by_hand), workers)]
        rows *= len(resolutions) if len(rows) == 1 else 1
        self._by_hand = dict(zip(resolutions, rows, strict=False))  # empty if none are given

    def first(self, resolution: int, say: Callable[[str], object]) -> Plan:
        """Return the plan that a resolution starts with, on the planned time models."""
        models, everyone = self._known.models[resolution], range(self._config.workers)
        if takes_joint_steps(self._config):
            return plan_steps(self._samples, self._first_sizes(resolution), models, self._rules)
        plan, fell_back = self._rounds(resolution, models, everyone, self._known.measured)
        if fell_back:
            self._small[resolution] = plan.small_batch_size
            say(f"{px(resolution, 'at ', ' ')}{fell_back}")
        return plan

    def replan(self, resolution: int, models: TimeModel, active: Collection[int]) -> Plan:
        """Return a resolution's plan for the workers that are there, with these time models."""
        active = sorted(active)
        models = models[active]
        if takes_joint_steps(self._config):
            total = self._total(resolution)
            limits = self._limits(resolution)[active]
            lowest = self._lowest(total, limits)
            sizes = machines.balanced_sizes(total, models, limits, lowest)
            plan = plan_steps(self._samples, sizes, models, self._rules)
        else:
            plan, _ = self._rounds(resolution, models, active, measured=True)
        return self._of_all(plan, active)

    def resize(
        self, resolution: int, plan: Plan, proportions: np.ndarray, active: Sequence[int]
    ) -> Plan:
        """Return a resolution's plan with other `proportions` of its active workers' parts, [a].

        They are parts of the global batch, within the workers' limits, or of the epoch: they sum to
        it exactly. In a plan of rounds each worker keeps its planned batch size, unless it has
        fewer samples in a round; merge weights follow the shares.
        """
        rules, models, workers = self._rules, self._known.models[resolution][active], len(active)
        limits = self._limits(resolution)[active]
        if (total := plan.global_batch_size) is not None:
            lowest = np.minimum(rules.lowest(total, workers), limits)
            sizes = machines.bounded_split(total, proportions, lowest, limits)
            return self._of_all(plan_steps(self._samples, sizes, models, rules), active)
        planned = [plan.workers[worker] for worker in active]
        lowest = np.minimum(rules.lowest_shares(plan.samples, limits), plan.samples // workers)
        shares = machines.bounded_split(plan.samples, proportions, lowest, plan.samples)
        sizes = np.minimum([w.local_batch_size for w in planned], shares // rules.rounds)
        steps = machines.steps_in_shares(shares, sizes, rules.rounds)
        weights = merge_weights(shares / shares.max(), rules.factor)
        times, simplified_s = models.time(shares, steps), shares * models.sample_time(sizes)
        small = np.array([worker.small for worker in planned])
        rows = rows_of(sizes, shares, steps, weights, times, simplified_s, small)
        return self._of_all(replace(plan, workers=rows), active)

    def small_batch_size(self) -> tuple[int, ...] | None:
        """Return the setting that repeats the small batches where they were not solved for."""
        sizes = tuple(size or 0 for size in self._small.values())
        return sizes if any(sizes) else None

    def _of_all(self, plan: Plan, active: Sequence[int]) -> Plan:
        rows = [_NO_PART] * self._config.workers
        for worker, row in zip(active, plan.workers, strict=True):
            rows[worker] = row
        return replace(plan, workers=tuple(rows))

    def _rounds(
        self, resolution: int, models: TimeModel, active: Sequence[int], measured: bool
    ) -> tuple[Plan, str | None]:
        """Return a plan of rounds, and what is to be said where measured times admit none.

        Noise may leave a measurement without a small batch. B_S is then max(min_batch_size, B_L/8),
        and the workers' samples still balance the measured times.
        """
        config, given = self._config, self._small[resolution]
        small_workers = sum(worker < config.small_workers for worker in active)
        large = self._by_hand.get(resolution) or self._known.large_batch_sizes[resolution]
        if given:
            goal = {"small_batch_size": given if small_workers else None}
        else:
            goal = {"time_ratio": config.time_ratio}
        counts = (self._samples, len(active), small_workers, [large[w] for w in active], models)
        try:
            return plan_dual_batch(*counts, replace(self._rules, clamp=not measured, **goal)), None
        except SettingError as error:
            # Settings are of all workers: what is left of them may not reach the goal.
            everyone = len(active) == config.workers
            if not measured or (everyone and not isinstance(error, NoPlanError)):
                raise
            smallest = min(counts[3])
            batch = min(max(config.min_batch_size, smallest // 8), smallest)
            rules = replace(self._rules, min_batch_size=1, small_batch_size=batch)
            plan = plan_dual_batch(*counts, rules)
            return plan, (
                f"the measured step times admit no plan: {error}; going on with small batches of "
                f"{batch}, which makes the time ratio {plan.time_ratio:.3f}"
            )

    def _first_sizes(self, resolution: int) -> np.ndarray:
        """Return the sizes of joint steps: by hand, or such that planned workers end together."""
        workers, model = self._config.workers, self._known.models[resolution]
        if resolution in self._by_hand:
            return np.array(self._by_hand[resolution])
        total, limits = self._total(resolution), self._limits(resolution)
        machines.check_global_batch(total, limits, self._least)
        text = f"global_batch_size must be at most the {self._samples} training samples"
        refuse([(total > self._samples, text, total)])
        if model.equal and total <= int(limits.min()) * workers:
            return machines.largest_remainder(np.ones(workers), total)
        return machines.balanced_sizes(total, model, limits, self._lowest(total, limits))

    def _lowest(self, total: int, limits: np.ndarray) -> int:
        """Return the fewest samples of a worker in a joint step, which no limit is below."""
        return max(self._least, min(self._rules.lowest(total, len(limits)), int(limits.min())))

    def _total(self, resolution: int) -> int:
        by_hand = sum(self._by_hand.get(resolution, ()))
        large = self._known.large_batch_sizes[resolution]
        return by_hand or self._config.global_batch_size or sum(large)

    def _limits(self, resolution: int) -> np.ndarray:
        """Return the most that each worker may take of a joint step, int64 [n]."""
        total, limits = self._total(resolution), self._known.limits or {}
        return np.minimum(limits.get(resolution, [total] * self._config.workers), total)
