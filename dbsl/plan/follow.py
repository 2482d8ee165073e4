"""A run's plans: how each is made from the workers' speeds, and when each is in force.

`dbs` is the rule of Ye, Zhou, Shi, Sun, Lv (arXiv 2007.11831): parts in proportion to part over
time. `dynamic` estimates both coefficients of a*x + b for each worker (`SpeedEstimate`), and
changes plans only if the predicted gain exceeds a dead band. A noisy first measurement may have
made a plan wrong by less than that. Each doubling of the measurements therefore gives one chance
with a narrow band.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.config.settings import Balance
from dbsl.plan.batches import TurnSampler
from dbsl.plan.machines import SpeedEstimate
from dbsl.plan.members import EpochPlans, Members
from dbsl.plan.spec import PlanSpec, make_plan, resize_plan
from dbsl.plan.types import Plan, RoundReport, TimeModel

DEAD_BAND = 0.05  # a plan is kept below this relative gain in time
REFINE = 0.01  # the sufficient gain whenever the number of measurements has doubled


class Planner:
    """The plan of each epoch: one for each resolution, or one that follows the workers' times.

    A round's plan is decided when it is first requested, so that workers in different rounds still
    share an epoch's samples by one plan. Call it under the server's lock.

    It begins with each resolution's `plans` and planned time `models`, and may change plans each
    `every` rounds. Without `members`, all workers are active, in epochs of one round. `specs` are
    needed if plans or workers change, a `sampler` if they change inside an epoch.
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
        specs: Mapping[int, PlanSpec] | None = None,
        sampler: TurnSampler | None = None,
    ) -> None:
        workers = len(next(iter(plans.values())).workers)
        self.members = members or Members(workers)
        self.plans = EpochPlans(plans, resolution_at)
        self.balance: Balance = balance
        self.changes = 0  # since this process began
        self._resolution_at, self._models = resolution_at, models
        self._every, self._rounds = every, self.members.rounds
        self._sampler = sampler
        # For later plans, which use measured times.
        again = {"by_hand": (), "measured": True}
        self._specs = {r: replace(spec, **again) for r, spec in (specs or {}).items()}
        self._begun = 0  # the run's rounds that keep their plan since a worker was lost
        self._epochs = [0] * workers  # epoch of each worker's last report
        self._speeds = [SpeedEstimate() for _ in range(workers)]
        self._refine_at = 2  # measurements of each worker
        # By worker: samples and compute time since the last change, for dbs.
        self._since: defaultdict[int, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def at(self, epoch: int, round_: int = 0) -> Plan | None:
        """Return the decided plan of a round, if it is still known.

        It needs no lock.
        """
        known = self.balance == "none" or self.plans.stands(epoch, round_)
        return self.plans.at(epoch, round_) if known else None

    def decide(self, epoch: int, round_: int = 0) -> Plan:
        """Return the plan of a round, which is fixed from now on."""
        plans = self.plans
        if (plan := self.at(epoch, round_)) is None:
            before = plans.at(epoch, round_)
            plan = self._renewed(epoch, round_, before)
            if round_ and plan is not before:
                taken = self._sampler.taken_before(before, round_)
                plan = replace(plan, first_round=round_, taken=taken)
            plans.set(epoch, round_ + 1, plan)
            # Forget plans of epochs that every worker has passed.
            plans.forget(range(min(self._epochs[worker] for worker in self.members.active)))
        return plan

    def adopt(self, epoch: int, round_: int, plan: Plan) -> None:
        """Fix this plan, decided by another process, for a round that all workers are in."""
        self.plans.set(epoch, round_ + 1, plan)
        self.plans.forget(range(epoch))

    def is_boundary(self, epoch: int, round_: int) -> bool:
        """Whether the plan may change when this round begins."""
        clock = epoch * self._rounds + round_
        return self.balance != "none" and (round_ == 0 or clock % self._every == 0)

    def observe(self, report: RoundReport) -> None:
        """Record the compute time of a worker's round."""
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
        """Include the lost workers in plans from the first epoch that nobody has begun.

        Earlier epochs keep their plans to the end. The run has `last` rounds.

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
        """Plan without a worker, still in the active set, from the first round not begun.

        Returns the number of samples that nobody will train on due to its loss: its part of those
        of the run's `last` rounds that it had not pushed and that keep their plan.
        """
        members, plans, rounds = self.members, self.plans, self._rounds
        there, clock, lost = members.active - {worker}, members.clocks[worker], 0
        others = self._plans_of(there)
        # This includes rounds in which the lost worker was ahead, or that an earlier loss kept.
        self._begun = max(self._begun, members.begun(last, but=worker), min(clock, last))
        stop = -(-self._begun // rounds)
        for epoch in range(min(clock, members.slowest(but=worker)) // rounds, stop):
            before = epoch * rounds
            kept = min(self._begun - before, rounds)  # rounds that keep their plan
            for round_ in range(max(clock - before, 0), kept):
                lost += self._sampler.count(plans.at(epoch, round_), worker, epoch, round_)
            plans.set(epoch, rounds, *plans.of_epoch(epoch))
            if kept < rounds:
                taken = self._sampler.taken_before(plans.at(epoch, kept), kept)
                plan = others[self._resolution_at(epoch)]
                plans.set(epoch, rounds, replace(plan, first_round=kept, taken=taken))
        self._begin_with(stop, others)
        return lost

    def state_dict(self) -> dict[str, Any]:
        """Return plans and estimates as plain values."""
        return {
            **self.plans.state_dict(),
            "rounds": self._rounds,
            "begun": self._begun,
            "speeds": [speed.state_dict() for speed in self._speeds],
            "refine_at": self._refine_at,
            "since": {worker: sums.tolist() for worker, sums in self._since.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, for as many workers."""
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
        return {r: make_plan(spec, self._models[r], active) for r, spec in self._specs.items()}

    def _begin_with(self, epoch: int, plans: Mapping[int, Plan]) -> None:
        """Use these plans from an epoch that nobody has begun."""
        self.plans.forget(range(epoch, sys.maxsize))
        self.plans.last = dict(plans)
        self._since.clear()

    def _renewed(self, epoch: int, round_: int, plan: Plan) -> Plan:
        """Return a plan, or the one that replaces it from this round on."""
        measured = min(self._speeds[worker].measured for worker in self.members.active)
        if (epoch * self._rounds + round_) % self._every or measured == 0:
            return plan
        resolution = self._resolution_at(epoch)
        try:
            if self.balance == "dbs":
                candidate = self._proportional(resolution, plan)
            else:
                candidate = self._faster(resolution, plan, measured)
        except SettingError:  # the estimates allow no plan
            return plan
        if candidate is not plan:
            self.changes += 1
            self.plans.last[resolution] = candidate
        return candidate

    def _faster(self, resolution: int, plan: Plan, measured: int) -> Plan:
        """Return the plan for the estimated speeds if it gains enough, else this one."""
        models = self.estimates(resolution)
        candidate = make_plan(self._specs[resolution], models, self.members.active)
        rows = (np.array([(w.samples, w.steps) for w in p.workers]).T for p in (plan, candidate))
        now, then = (models.time(*row).max() for row in rows)
        band = DEAD_BAND
        if measured >= self._refine_at:
            band, self._refine_at = REFINE, 2 * measured
        return candidate if now > (1 + band) * then else plan

    def _proportional(self, resolution: int, plan: Plan) -> Plan:
        """Return the plan by the published rule, p_i <- (p_i/t_i) / sum_j(p_j/t_j).

        It assumes that a step costs only its samples, and trusts each measurement.
        """
        active = sorted(self.members.active)
        if not self._since.keys() >= set(active):  # since the last change
            return plan
        samples, times_s = np.array([self._since[worker] for worker in active]).T
        self._since.clear()
        speeds = samples / times_s
        spec, models = self._specs[resolution], self._models[resolution]
        lost = self.members.lost
        planned = make_plan(spec, models, active) if lost else self.plans.first[resolution]
        candidate = resize_plan(spec, planned, models, speeds / speeds.sum(), active)
        return plan if candidate.workers == plan.workers else candidate
