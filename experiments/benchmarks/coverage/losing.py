"""A simulated cluster that loses workers at given times; the server goes on as with real ones."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from dbsl.base.errors import SettingError, SyncError
from dbsl.cluster.meeting import SimulatedCluster
from dbsl.plan.types import EpochEnd, LostWorker, Turn
from experiments.benchmarks.coverage.cases import Loss


class LosingCluster(SimulatedCluster):
    """Loses the workers that `to_come` names."""

    to_come: list[Loss]

    def turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield turns; before a round ends workers may be lost."""
        while True:
            yield from self._ends()
            if self._turn is None:
                self._start_rounds()
                if not self._queue:
                    return
                if self._loses():
                    continue  # others may start, or wait
                self.time_s, self._turn = heapq.heappop(self._queue)
            yield Turn((self._turn,), *self._round_of(self._turn))
            self._turn = None

    def _loses(self) -> bool:
        """Lose the next worker, if that comes before a round ends; say whether it did."""
        loss = min(self.to_come, default=None)
        if loss is None or loss.time_s >= self._queue[0][0]:
            return False
        self.to_come.remove(loss)
        self.time_s = max(self.time_s, loss.time_s)
        members, worker = self.server.members, loss.worker
        over = members.clocks[worker] >= self._rounds
        if worker not in members.active or members.active == {worker} or over:
            return True
        self._queue = [entry for entry in self._queue if entry[1] != worker]  # its round is lost
        heapq.heapify(self._queue)
        self._pulled.pop(worker, None)
        try:
            samples = self.planner.drop(worker, self._rounds)
        except SettingError as error:
            raise SyncError(f"no plan is possible without worker {worker}: {error}") from error
        clock = members.clocks[worker]
        self.server.drop(worker)
        self._losses.append(LostWorker(worker, worker, clock, samples, "simulated"))
        return True
