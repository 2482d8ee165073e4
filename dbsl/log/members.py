"""Workers that come, go, or are late: what is recorded and said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dbsl.base.words import plural
from dbsl.cluster.protocol import Cluster
from dbsl.plan.turns import JoinedWorker, LostWorker, MissedRound, RoundReport


@dataclass
class _Late:
    """A worker that rounds go on without."""

    last: tuple[int, int]  # epoch and round that it has missed last
    rounds: int = 0
    samples: int = 0

    def in_words(self) -> str:
        return f"{plural(self.rounds, 'round')} and {plural(self.samples, 'sample')} of it left out"


class MemberLog:
    """Records lost, late and new workers, on the main process.

    Attributes:
        lost: Workers that were lost.
        joined: Workers that have joined while the others trained.
        lost_samples: Samples of epochs under way that nobody trained on: their worker was lost.
        missed_samples: Samples of rounds that were merged without their worker.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.joined: list[int] = []
        self.lost_samples = self.missed_samples = 0
        self._came: dict[int, tuple[int, int]] = {}  # by worker: its last epoch and round in time
        self._late: dict[int, _Late] = {}  # by worker, as it was told; a resumed run tells again

    def record(
        self, write: Callable[[str, Mapping[str, Any]], object], say: Callable[[str], object]
    ) -> None:
        """Record from now on: events by `write`, lines by `say`."""
        self._write, self._say = write, say

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; summary.json has it, too."""
        return {
            "lost_workers": list(self.lost),
            "joined_workers": list(self.joined),
            "lost_samples": self.lost_samples,
            "missed_samples": self.missed_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.lost = list(state["lost_workers"])
        self.joined = list(state["joined_workers"])
        self.lost_samples = state["lost_samples"]
        self.missed_samples = state["missed_samples"]

    def came(self, report: RoundReport) -> None:
        """Note that a worker has pushed a round in time."""
        self._came[report.worker] = report.epoch, report.round

    def hear(self, cluster: Cluster) -> None:
        """Record what the cluster has to tell of workers; elsewhere than on rank 0 it has none."""
        for missed in cluster.missed():  # merged without a worker that is late (--min-workers)
            self._missed(missed)
        for worker, late in list(self._late.items()):
            if self._came.get(worker, (-1, -1)) > late.last:
                del self._late[worker]
                self._say(f"worker {worker} is back in time: {late.in_words()}")
        for change in cluster.membership():
            if isinstance(change, LostWorker):  # its process died, and the others go on
                self._lost(change)
            else:  # its process was launched again
                self._joined(change)

    def end(self) -> None:
        """Tell of workers that were late to the end."""
        for worker, late in self._late.items():
            self._say(f"warning: worker {worker} was late to the end: {late.in_words()}")
        self._late.clear()

    def _lost(self, loss: LostWorker) -> None:
        """Record that a worker was lost, and that the others go on."""
        self.lost.append(loss.worker)
        self.lost_samples += loss.samples
        self._late.pop(loss.worker, None)
        self._write("lost", asdict(loss))
        out = f"; {loss.samples} samples of epochs under way are left out" if loss.samples else ""
        self._say(
            f"warning: rank {loss.rank} (worker {loss.worker}) was lost after "
            f"{plural(loss.rounds, 'round')} ({loss.reason}); the others share its "
            f"samples from their next round on{out}"
        )

    def _missed(self, missed: MissedRound) -> None:
        """Record that a round was merged without a worker; say so when it begins to be late."""
        self.missed_samples += missed.samples
        self._write("missed", asdict(missed))
        place = missed.epoch, missed.round
        if missed.worker not in self._late:
            self._late[missed.worker] = _Late(place)
            self._say(
                f"warning: worker {missed.worker} is late; rounds go on without it, from round "
                f"{missed.round + 1} of epoch {missed.epoch + 1} on"
            )
        late = self._late[missed.worker]
        late.last = place
        late.rounds += 1
        late.samples += missed.samples

    def _joined(self, new: JoinedWorker) -> None:
        """Record that a worker has come, and that the others share with it."""
        self._write("joined", asdict(new))
        self.joined.append(new.worker)
        self._say(f"rank {new.rank} has joined, its share begins in epoch {new.epoch + 1}")
