"""Workers that come and go: what is recorded and said of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from dbsl.base.words import plural
from dbsl.cluster.protocol import Cluster
from dbsl.plan.turns import JoinedWorker, LostWorker


class MemberLog:
    """Records lost and new workers, on the main process.

    Attributes:
        lost: Workers that were lost.
        joined: Workers that have joined while the others trained.
        lost_samples: Samples of epochs under way that nobody trained on: their worker was lost.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.joined: list[int] = []
        self.lost_samples = 0

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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.lost = list(state["lost_workers"])
        self.joined = list(state["joined_workers"])
        self.lost_samples = state["lost_samples"]

    def hear(self, cluster: Cluster) -> None:
        """Record what the cluster has to tell of workers; elsewhere than on rank 0 it has none."""
        for change in cluster.membership():
            if isinstance(change, LostWorker):  # its process died, and the others go on
                self._lost(change)
            else:  # its process was launched again
                self._joined(change)

    def _lost(self, loss: LostWorker) -> None:
        """Record that a worker was lost, and that the others go on."""
        self.lost.append(loss.worker)
        self.lost_samples += loss.samples
        self._write("lost", asdict(loss))
        out = f"; {loss.samples} samples of epochs under way are left out" if loss.samples else ""
        self._say(
            f"warning: rank {loss.rank} (worker {loss.worker}) was lost after "
            f"{plural(loss.rounds, 'round')} ({loss.reason}); the others share its "
            f"samples from their next round on{out}"
        )

    def _joined(self, new: JoinedWorker) -> None:
        """Record that a worker has come, and that the others share with it."""
        self._write("joined", asdict(new))
        self.joined.append(new.worker)
        self._say(f"rank {new.rank} has joined, its share begins in epoch {new.epoch + 1}")
