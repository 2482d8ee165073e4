"""Which workers are active, their progress, and each round's plan, stored once for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dbsl.plan.types import Plan, plan_from_plain


class Members:
    """Which workers are active, and the progress of each.

    The server changes it, under its lock; planners read it there.
    """

    def __init__(self, workers: int, rounds: int = 1) -> None:
        self.rounds = rounds  # per epoch
        self.clocks = [0] * workers  # rounds that each has pushed, lost workers included
        self.active = set(range(workers))  # workers that are not lost
        self.inside: set[int] = set()  # workers with a round begun, not pushed

    @property
    def lost(self) -> set[int]:
        """Workers that are not active."""
        return set(range(len(self.clocks))) - self.active

    def slowest(self, but: int | None = None) -> int:
        """Return how many rounds all active workers have pushed, `but` excluded."""
        return min(self.clocks[worker] for worker in self.active if worker != but)

    def begun(self, last: int, but: int | None = None) -> int:
        """Return how many of the run's `last` rounds some worker has begun, `but` excluded."""
        there = self.active - {but}
        return min(max(self.clocks[w] + (w in self.inside) for w in there), last)

    def leave(self, worker: int) -> None:
        """Continue without a worker."""
        self.active.discard(worker)
        self.inside.discard(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return the workers' state as plain values."""
        sets = {"active": sorted(self.active), "inside": sorted(self.inside)}
        return {"clocks": list(self.clocks), **sets}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.clocks = list(state["clocks"])
        self.active, self.inside = set(state["active"]), set(state["inside"])


class EpochPlans:
    """The plan in force in each round.

    A round's plan is fixed once it is decided, whatever is measured later. Rounds of other epochs
    have the last plan of their resolution.
    """

    def __init__(self, first: Mapping[int, Plan], resolution_at: Callable[[int], int]) -> None:
        self.first = dict(first)  # by resolution: the plan that the run begins with
        self.last = dict(first)  # by resolution
        self._epochs: dict[int, list[Plan]] = {}  # in the order of their first rounds
        self._decided: dict[int, int] = {}  # by epoch: rounds with a fixed plan
        self._resolution_at = resolution_at

    def of_epoch(self, epoch: int) -> list[Plan]:
        """Return the plans of an epoch's rounds, as far as they are known."""
        return self._epochs.get(epoch) or [self.last[self._resolution_at(epoch)]]

    def at(self, epoch: int, round_: int) -> Plan | None:
        """Return the plan of a round; None: the round ended before the known plans."""
        plans = reversed(self.of_epoch(epoch))
        return next((plan for plan in plans if plan.first_round <= round_), None)

    def stands(self, epoch: int, round_: int) -> bool:
        """Whether the plan of a round is decided."""
        return round_ < self._decided.get(epoch, 0)

    def set(self, epoch: int, rounds: int, *plans: Plan) -> None:
        """Fix the plans of an epoch's first `rounds` rounds: earlier ones, then these."""
        known, first = self._epochs.get(epoch, ()), plans[0].first_round
        earlier = (plan for plan in known if plan.first_round < first)
        self._epochs[epoch] = [*earlier, *plans]
        self._decided[epoch] = max(rounds, self._decided.get(epoch, 0))

    def forget(self, epochs: range) -> None:
        """Forget decisions for these epochs."""
        for epoch in [epoch for epoch in self._epochs if epoch in epochs]:
            del self._epochs[epoch], self._decided[epoch]

    def under_way(self, members: Members, last: int) -> range:
        """Return the epochs, of `last` rounds, that are begun or planned but not complete."""
        stop = -(-members.begun(last) // members.rounds)
        planned = (epoch + 1 for epoch in self._epochs)
        return range(members.slowest() // members.rounds, max(stop, *planned, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return plans, and which are fixed, as plain values."""
        return {
            "last": {resolution: asdict(plan) for resolution, plan in self.last.items()},
            "epochs": {e: [asdict(plan) for plan in plans] for e, plans in self._epochs.items()},
            "decided": dict(self._decided),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.last = {r: plan_from_plain(plan) for r, plan in state["last"].items()}
        self._epochs = {e: [*map(plan_from_plain, own)] for e, own in state["epochs"].items()}
        self._decided = dict(state["decided"])
