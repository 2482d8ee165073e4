"""Who is there and how far, and what of each epoch is planned: known once, read by all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dbsl.config.settings import RunConfig, steps_of_push
from dbsl.plan.machines import bounded_split
from dbsl.plan.sampler import EpochSampler, Order, Step, StepSampler
from dbsl.plan.types import Plan, Segment, Turn, plan_from_plain


class Members:
    """Which workers are there, and how far each of them is.

    The server changes it, under its lock; planners read it there.
    """

    def __init__(self, workers: int, rounds: int = 1) -> None:
        self.rounds = rounds  # per epoch
        self.clocks = [0] * workers  # rounds that each has pushed, lost workers included
        self.active = set(range(workers))  # those that are there
        self.newcomers: set[int] = set()  # are back after a loss, and have not begun a round
        self.inside: set[int] = set()  # have begun a round, and not pushed it

    @property
    def lost(self) -> set[int]:
        """Workers that are not there."""
        return set(range(len(self.clocks))) - self.active

    def slowest(self, but: int | None = None) -> int:
        """Return the rounds that every worker that is there, but for one, has pushed."""
        return min(self.clocks[worker] for worker in self.active if worker != but)

    def begun(self, last: int, but: Collection[int] = ()) -> int:
        """Return the rounds, of `last` in all, that any worker, but for some, has begun."""
        there = self.active.difference(but)
        return min(max(self.clocks[w] + (w in self.inside) for w in there), last)

    def begin(self, worker: int) -> None:
        """Note that a worker has begun its next round."""
        self.newcomers.discard(worker)
        self.inside.add(worker)

    def leave(self, worker: int) -> None:
        """Go on without a worker."""
        self.active.discard(worker)
        self.newcomers.discard(worker)
        self.inside.discard(worker)

    def join(self, worker: int, clock: int) -> None:
        """Go on with a lost worker, which begins with as many rounds behind it as any, or more."""
        self.clocks[worker] = clock
        self.active.add(worker)
        self.newcomers.add(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return who is there, in plain values."""
        sets = {name: sorted(getattr(self, name)) for name in ("active", "newcomers", "inside")}
        return {"clocks": list(self.clocks), **sets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.clocks, self.inside = list(state["clocks"]), set(state["inside"])
        self.active, self.newcomers = set(state["active"]), set(state["newcomers"])


@dataclass(frozen=True)
class TurnSampler:
    """Whose samples a turn takes, in which batches, by the plan in force."""

    config: RunConfig
    samples: int  # per epoch
    rounds: int  # per epoch; where gradients are pushed, pushes
    least: int  # samples of a worker in a shorter global batch, unless it has none
    blocks: Order | None = None  # draws an epoch's order where data are read in groups

    def steps(self, segment: Segment, turn: Turn) -> list[Step]:
        """Return the optimizer steps of a turn."""
        config, plan = self.config, segment.plan
        sizes = [worker.local_batch_size for worker in plan.workers]
        if plan.global_batch_size is None:
            (worker,) = turn.workers
            return self.sampler(segment).steps(worker, turn.epoch, turn.round, sizes[worker])
        sampler = StepSampler(
            self.samples,
            plan.global_batch_size,
            seed=config.seed,
            drop_last=config.drop_last,
            least=self.least,
            blocks=self.blocks,
        )
        count = sampler.steps_per_epoch
        if every := steps_of_push(config.push):
            first, last = (every * r for r in (turn.round, turn.round + 1))
        else:
            first, last = (count * r // self.rounds for r in (turn.round, turn.round + 1))
        return sampler.steps(turn.workers, turn.epoch, first, min(last, count), sizes)

    def sampler(self, segment: Segment) -> EpochSampler:
        """Return the sampler of a plan of rounds, from the round on in which it came into force."""
        shares = np.array([worker.samples for worker in segment.plan.workers])
        rounds_left = self.rounds - segment.first_round
        if segment.start or segment.first_round:  # an epoch's shares, scaled to what is left of it
            left = self.samples - segment.start
            there = np.flatnonzero(shares)  # a worker that was lost stays without
            each = rounds_left * self.least
            there = there[: max(1, left // each)]  # few samples go to the first workers
            weights, shares = shares[there], np.zeros_like(shares)
            shares[there] = bounded_split(left, weights, min(each, left), left)
        return EpochSampler(
            shares,
            rounds=rounds_left,
            seed=self.config.seed,
            first_round=segment.first_round,
            start=segment.start,
            least=self.least,
            blocks=self.blocks,
        )

    def start_of(self, segment: Segment, round_: int) -> int:
        """Return the samples of the epoch that rounds of a segment take before a round."""
        if segment.plan.global_batch_size is not None:
            return 0  # a joint step has the same samples with any plan
        return self.sampler(segment).start_of(round_)

    def count(self, segment: Segment, turn: Turn) -> int:
        """Return the samples of a turn."""
        return sum(len(part.indices) for step in self.steps(segment, turn) for part in step.parts)


class Ledger:
    """By epoch: the plans that its rounds have, whatever is measured later.

    A round's plan stands from the moment it is asked for. Where workers come or go, or a run goes
    on from others' state, an epoch's plans are kept for all of its rounds. Other epochs have the
    last plan of their resolution.
    """

    def __init__(self, plans: Mapping[int, Plan], resolution_at: Callable[[int], int]) -> None:
        self.current = dict(plans)  # by resolution: the last plan
        self.segments: dict[int, list[Segment]] = {}
        self.decided: dict[int, int] = {}  # by epoch: rounds whose plan stands
        self.kept: set[int] = set()  # epochs of which all rounds keep their plans
        self._resolution_at = resolution_at

    def planned(self, epoch: int) -> list[Segment]:
        """Return the plans of an epoch's rounds, as far as they are known."""
        return self.segments.get(epoch) or [Segment(self.current[self._resolution_at(epoch)])]

    def at(self, epoch: int, round_: int) -> Segment | None:
        """Return the plan of a round; None: it was over before those that are known."""
        return next((s for s in reversed(self.planned(epoch)) if s.first_round <= round_), None)

    def keep(self, epoch: int, segments: list[Segment]) -> None:
        """Have all rounds of an epoch keep these plans."""
        self.segments[epoch] = segments
        self.kept.add(epoch)

    def forget(self, epochs: Collection[int]) -> None:
        """Forget the plans of epochs."""
        for epoch in epochs:
            del self.segments[epoch]
            self.decided.pop(epoch, None)
            self.kept.discard(epoch)

    def under_way(self, members: Members, last: int) -> range:
        """Return the epochs, of `last` rounds, that are begun or planned, and are not complete."""
        stop = -(-members.begun(last) // members.rounds)
        planned = (epoch + 1 for epoch in self.segments)
        return range(members.slowest() // members.rounds, max(stop, *planned, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return plans, each once, and what stands, in plain values."""
        rows = (row for rows in self.segments.values() for row in rows)
        plans = list(dict.fromkeys([*self.current.values(), *(row.plan for row in rows)]))
        numbers = {plan: number for number, plan in enumerate(plans)}
        return {
            "plans": [asdict(plan) for plan in plans],
            "current": {resolution: numbers[plan] for resolution, plan in self.current.items()},
            "segments": {
                epoch: [{**vars(row), "plan": numbers[row.plan]} for row in rows]
                for epoch, rows in self.segments.items()
            },
            "decided": dict(self.decided),
            "kept": sorted(self.kept),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        plans = [plan_from_plain(plan) for plan in state["plans"]]
        self.current = {r: plans[number] for r, number in state["current"].items()}
        self.decided, self.kept = dict(state["decided"]), set(state["kept"])
        self.segments = {
            epoch: [Segment(**{**row, "plan": plans[row["plan"]]}) for row in rows]
            for epoch, rows in state["segments"].items()
        }
