"""Workers that come, go, or are late: what is recorded and said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dbsl.base.words import plural
from dbsl.cluster.protocol import Cluster
from dbsl.plan.turns import JoinedWorker, LostWorker, MissedRound


class Members:
    """Records lost, late and new workers, on the main process.

    Attributes:
        lost: Workers that were lost.
        away: Workers that were lost and have not come back.
        missed_samples: Samples of rounds that were merged without their worker.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.away: set[int] = set()
        self.missed_samples = 0

    def record(
        self, write: Callable[[str, Mapping[str, Any]], object], say: Callable[[str], object]
    ) -> None:
        """Record from now on: events by `write`, lines by `say`."""
        self._write, self._say = write, say

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {"lost_workers": list(self.lost), "missed_samples": self.missed_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.lost = list(state["lost_workers"])
        self.missed_samples = state.get("missed_samples", 0)  # not in checkpoints of before

    def hear(self, cluster: Cluster) -> None:
        """Record what the cluster has to tell of workers; elsewhere than on rank 0 it has none."""
        for loss in cluster.lost():  # its process died, and the others go on
            self._lost(loss)
        for missed in cluster.missed():  # merged without a worker that is late (--min-workers)
            self._late(missed)
        for new in cluster.joined():  # its process was launched again
            self._joined(new)

    def _lost(self, loss: LostWorker) -> None:
        """Record that a worker was lost, and that the others go on."""
        self.lost.append(loss.worker)
        self.away.add(loss.worker)
        self._write("lost", asdict(loss))
        out = f"; {loss.samples} samples of epochs under way are left out" if loss.samples else ""
        self._say(
            f"warning: rank {loss.rank} (worker {loss.worker}) was lost after "
            f"{plural(loss.rounds, 'round')} ({loss.reason}); the others share its "
            f"samples from their next round on{out}"
        )

    def _late(self, missed: MissedRound) -> None:
        """Record that a round was merged without a worker."""
        self.missed_samples += missed.samples
        self._write("missed", asdict(missed))
        self._say(
            f"warning: round {missed.round + 1} of epoch {missed.epoch + 1} was merged without "
            f"worker {missed.worker}, which is late; {plural(missed.samples, 'sample')} left out"
        )

    def _joined(self, new: JoinedWorker) -> None:
        """Record that a worker has come, and that the others share with it."""
        self._write("joined", asdict(new))
        self.away.discard(new.worker)
        self._say(f"rank {new.rank} has joined, its share begins in epoch {new.epoch + 1}")
