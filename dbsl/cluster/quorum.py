"""A round at a barrier that goes on with those who came: quorum, grace, and who is late.

Once `min_workers` have pushed a round, the others have the grace to push it, too. Then the round is
merged from what came. A push that comes later is dropped, as torchft does: a worker that fell
behind takes the others' weights and goes on with them. Decoupled DiLoCo (Douillard et al., arXiv
2604.21428) has the quorum and the grace, too, but merges late work with the next round. Here `ssp`
and `asp` do that; at a barrier all that is merged has begun with the same weights.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from dbsl.plan.turns import MissedRound


class Quorum:
    """Says when a server's round is over, and what workers do that it went on without.

    A late worker is no longer waited for: its clock goes on with the others', and its samples of
    each round that is merged without it are counted. When it has handed in what it was at, it
    begins the round that is open, if that was begun no longer ago than the grace. Otherwise it
    rests until the next one: it would be late again. Where a round lacks workers, nobody rests.

    Args:
        min_workers: Workers that have pushed a round before it is merged; refused pushes count.
        grace_s: Seconds that the others have after these.
        rounds_per_epoch: Rounds that make an epoch.
        samples_of: Samples of a worker in a round, from (worker, epoch, round).

    Attributes:
        round: The open round, counted over the run.
        clock: Returns the present moment, seconds; virtual where workers are.
        behind: Workers that a round went on without and that have not begun another one since.
        missed: Rounds that were merged without a worker, until they are told of.
        late_pushes: Pushes that were dropped.
    """

    def __init__(
        self,
        min_workers: int,
        grace_s: float,
        *,
        rounds_per_epoch: int,
        samples_of: Callable[[int, int, int], int],
    ) -> None:
        self.min_workers = min_workers
        self.round = 0
        self.clock: Callable[[], float] = time.monotonic
        self.behind: set[int] = set()
        self.missed: deque[MissedRound] = deque()
        self.late_pushes = 0
        self._grace_s = grace_s
        self._rounds_per_epoch = rounds_per_epoch
        self._samples_of = samples_of
        self._resting: set[int] = set()  # who is behind and waits for the next round
        self._came: set[int] = set()  # have pushed the open round
        self._deadline_s: float | None = None  # the grace's end, once enough have come
        self._opened_s: float | None = None  # when the open round's first worker began it

    def begin(self, worker: int, clock: int) -> bool:
        """Note that a worker begins a round; False: it has meanwhile gone on without it."""
        if worker in self.behind:
            return False
        if self._opened_s is None and clock == self.round:
            self._opened_s = self.clock()
        return True

    def come(self, worker: int) -> bool:
        """Note a worker's push; return whether it is in time."""
        if worker in self.behind:
            self.late_pushes += 1
            return False
        self._came.add(worker)
        return True

    def enter(self, worker: int, clocks: Sequence[int], active: Collection[int]) -> None:
        """Have a worker that is in no round take part again: now, or with the next round."""
        if worker not in self.behind:
            return
        new = self._opened_s is None or self.clock() <= self._opened_s + self._grace_s
        if new or len(self._came) + self._awaited(clocks, active) < self.min_workers:
            self.behind.discard(worker)
            self._resting.discard(worker)
        else:
            self._resting.add(worker)

    def rests(self, worker: int) -> bool:
        """Whether a worker waits for the next round."""
        return worker in self._resting

    def forget(self, worker: int) -> None:
        """Go on without a worker that was lost; what it has pushed counts."""
        self.behind.discard(worker)
        self._resting.discard(worker)

    def able(self, clocks: Sequence[int], active: Collection[int], new: Collection[int]) -> int:
        """Return how many workers can push the open round, or have; `new` have begun none yet."""
        came = self._came - set(new)
        return sum(clocks[worker] <= self.round or worker in came for worker in active)

    def is_over(
        self, clocks: Sequence[int], active: Collection[int], *, timer: bool = False
    ) -> bool:
        """Whether the open round is to be merged now.

        With `timer` the grace's last moment is over, too: nobody comes in it any more.
        """
        awaited = self._awaited(clocks, active)
        if len(self._came) + awaited < self.min_workers:  # it cannot do without those that rest
            self.behind -= self._resting
            self._resting.clear()
        if len(self._came) < self.min_workers:
            return False
        now = self.clock()
        if self._deadline_s is None:
            self._deadline_s = now + self._grace_s
        return not awaited or now > self._deadline_s or (timer and now == self._deadline_s)

    def close(self, clocks: Sequence[int], active: Collection[int]) -> list[int]:
        """End the open round; return the workers that it is merged without."""
        absent = sorted(worker for worker in active if clocks[worker] <= self.round)
        place = divmod(self.round, self._rounds_per_epoch)
        for worker in absent:
            self.missed.append(MissedRound(worker, *place, self._samples_of(worker, *place)))
        self.behind |= set(absent)
        self.behind -= self._resting
        self._resting.clear()
        self._came.clear()
        self._deadline_s = self._opened_s = None
        self.round += 1
        return absent

    def left_s(self) -> float | None:
        """Return the seconds that are left of the grace; None: not enough have come."""
        if self._deadline_s is None:
            return None
        return min(max(0.0, self._deadline_s - self.clock()), threading.TIMEOUT_MAX)

    def deadline_s(self) -> float | None:
        """Return the moment at which the grace ends; None: not enough have come."""
        return self._deadline_s

    def close_at_s(self, ends_s: Sequence[float]) -> float:
        """Return when a round closes, if those that are awaited push it at these moments.

        Called where a worker is about to push, now.
        """
        coming, now = sorted(ends_s), self.clock()
        if not coming:
            return now
        lacking = self.min_workers - len(self._came) - 1
        if lacking > len(coming):
            return coming[-1]  # others, that rest or are late, are needed, too: it is not known
        enough_s = now if lacking <= 0 else coming[lacking - 1]
        deadline_s = self._deadline_s if self._deadline_s is not None else enough_s + self._grace_s
        return min(coming[-1], max(deadline_s, now))

    def restart(self, round_: int, came: Collection[int] = ()) -> None:
        """Begin with a round, which these workers have pushed."""
        self.round, self._came = round_, set(came)

    def take_over(self, missed: Collection[MissedRound], late_pushes: int) -> None:
        """Go on counting where other workers stopped."""
        self.missed.extend(missed)
        self.late_pushes = late_pushes

    def restart_clock(self) -> None:
        """Measure anew: this is another process than before, with another clock."""
        self._deadline_s = self._opened_s = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later `load_state_dict` needs to go on alike."""
        return {
            "round": self.round,
            "behind": sorted(self.behind),
            "resting": sorted(self._resting),
            "came": sorted(self._came),
            "deadline_s": self._deadline_s,
            "opened_s": self._opened_s,
            "missed": [asdict(row) for row in self.missed],
            "late_pushes": self.late_pushes,
        }

    def load_state_dict(self, state: Mapping[str, Any], workers: int) -> None:
        """Go on from what `state_dict` returned."""
        self.behind, self._resting = set(state["behind"]), set(state["resting"])
        self._came = set(state["came"])
        self._deadline_s, self._opened_s = state["deadline_s"], state["opened_s"]
        self.missed = deque(MissedRound(**row) for row in state["missed"])
        self.round, self.late_pushes = state["round"], state["late_pushes"]

    def _awaited(self, clocks: Sequence[int], active: Collection[int]) -> int:
        """Return how many workers that are not behind have not pushed the open round yet."""
        return sum(clocks[w] <= self.round and w not in self.behind for w in active)
