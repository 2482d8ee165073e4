"""Who is there and how far, and what of each epoch is planned: known once, read by all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dbsl.plan.types import Plan, Segment, segment_at


class Members:
    """Which workers are there, and how far each of them is.

    The server changes it, under its lock; planners read it there.
    """

    def __init__(self, workers: int, rounds: int = 1) -> None:
        self.rounds = rounds  # per epoch
        self.clocks = [0] * workers  # rounds that each has pushed, lost workers included
        self.active = set(range(workers))  # those that are there
        self.newcomers: set[int] = set()  # have joined, and have not begun a round
        self.inside: dict[int, int] = {}  # by worker that has begun a round: which

    @property
    def lost(self) -> set[int]:
        """Workers that are not there."""
        return set(range(len(self.clocks))) - self.active

    def slowest(self, but: int | None = None) -> int:
        """Return the rounds that every worker that is there, but for one, has pushed."""
        return min(self.clocks[worker] for worker in self.active if worker != but)

    def begun(self, last: int, but: int | None = None) -> int:
        """Return the rounds, of `last` in all, that any worker, but for one, has begun."""
        there = (worker for worker in self.active if worker != but)
        return min(max(max(self.clocks[w], self.inside.get(w, -1) + 1) for w in there), last)

    def begin(self, worker: int) -> None:
        """Note that a worker has begun its next round."""
        self.newcomers.discard(worker)
        self.inside[worker] = self.clocks[worker]

    def leave(self, worker: int) -> None:
        """Go on without a worker."""
        self.active.discard(worker)
        self.newcomers.discard(worker)
        self.inside.pop(worker, None)

    def join(self, worker: int, clock: int) -> None:
        """Go on with one more worker, which has so many rounds behind it as any other or more."""
        self.clocks[worker] = clock
        self.active.add(worker)
        self.newcomers.add(worker)

    def state_dict(self) -> dict[str, Any]:
        """Return who is there, in plain values."""
        return {
            "clocks": list(self.clocks),
            "active": sorted(self.active),
            "newcomers": sorted(self.newcomers),
            "inside": dict(self.inside),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.clocks, self.inside = list(state["clocks"]), dict(state["inside"])
        self.active, self.newcomers = set(state["active"]), set(state["newcomers"])


class Ledger:
    """By epoch: the plans that its rounds have, whatever is measured later.

    A round's plan stands from the moment it is asked for. Where workers come or go, or a run goes
    on from others' state, an epoch's plans are kept for all of its rounds. Other epochs have the
    last plan of their resolution.
    """

    def __init__(self) -> None:
        self.segments: dict[int, list[Segment]] = {}
        self.decided: dict[int, int] = {}  # by epoch: rounds whose plan stands
        self.kept: set[int] = set()  # epochs of which all rounds keep their plans

    def at(self, epoch: int, round_: int) -> Segment | None:
        """Return the plan that stands for a round; None: none does yet."""
        if epoch not in self.segments:
            return None
        return segment_at(self.segments[epoch], round_)

    def keep(self, epoch: int, segments: list[Segment]) -> None:
        """Have all rounds of an epoch keep these plans."""
        self.segments[epoch] = segments
        self.kept.add(epoch)

    def left_by_others(self, epoch: int) -> bool:
        """Whether the epoch is the rest of one that other workers or plans had begun."""
        return any(segment.left for segment in self.segments.get(epoch, ()))

    def forget(self, epochs: Collection[int]) -> None:
        """Forget the plans of epochs."""
        for epoch in epochs:
            del self.segments[epoch]
            self.decided.pop(epoch, None)
            self.kept.discard(epoch)

    def state_dict(self, numbers: Mapping[Plan, int]) -> dict[str, Any]:
        """Return what stands in plain values, each plan as its number."""
        segments = {
            epoch: [{**vars(row), "plan": numbers[row.plan]} for row in rows]
            for epoch, rows in self.segments.items()
        }
        kept = sorted(self.kept)
        return {"segments": segments, "decided": dict(self.decided), "kept": kept}

    def load_state_dict(self, state: Mapping[str, Any], plans: Sequence[Plan]) -> None:
        """Take back what `state_dict` returned."""
        self.decided, self.kept = dict(state["decided"]), set(state["kept"])
        self.segments = {
            epoch: [Segment(**{**row, "plan": plans[row["plan"]]}) for row in rows]
            for epoch, rows in state["segments"].items()
        }
