"""Which workers are there, and how far each of them is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dbsl.plan.types import CurrentPlan


@dataclass(frozen=True)
class Members:
    """The workers at a moment.

    Attributes:
        clocks: Rounds that each worker has pushed, those that are not there included.
        active: Workers that are there.
        last: Rounds of the whole run.
        inside: By worker that has begun a round and not pushed it: which.
        newcomers: Workers of `active` that have joined and have not begun a round.
    """

    clocks: Mapping[int, int]
    active: Collection[int]
    last: int
    inside: Mapping[int, int]
    newcomers: Collection[int] = ()

    @property
    def slowest(self) -> int:
        """Rounds that every worker that is there has pushed."""
        return min(self.clocks[worker] for worker in self.active)

    @property
    def begun(self) -> int:
        """Rounds of the run that any worker that is there has begun."""
        begun = [max(self.clocks[w], self.inside.get(w, -1) + 1) for w in self.active]
        return min(max(begun), self.last)

    def next_epoch(
        self, begun: int, rounds: int, fixed: Mapping[int, Sequence[CurrentPlan]]
    ) -> int:
        """Return the first epoch whose plan may change: nobody has begun it.

        Nor did other workers, before a resume: they left a part of it, which keeps its plan.

        Args:
            begun: Rounds of the run that a loss left as they were planned.
            rounds: Rounds per epoch.
            fixed: Plans by epoch that measured times no longer change.
        """
        left = [epoch for epoch, rows in fixed.items() if any(row.left for row in rows)]
        return max(-(-max(begun, self.begun) // rounds), max(left, default=-1) + 1)

    def without(self, worker: int) -> Members:
        """Return the others."""
        return Members(
            self.clocks,
            set(self.active) - {worker},
            self.last,
            self.inside,
            set(self.newcomers) - {worker},
        )
