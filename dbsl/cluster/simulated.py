"""The simulated cluster: any number of workers in one process, in simulated time.

A discrete-event queue says whose round ends next. That worker trains from the weights it pulled
when its round began, pushes, and pulls again, so that asynchronous and stale synchronous runs are
exact and come out the same every time, whatever this machine is doing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dbsl.base.errors import SettingError, SyncError
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.types import EpochEnd, Handover, RoundReport, Turn


class SimulatedCluster(Cluster):
    """Workers that take turns on one model; `Server` decides as it does for real processes.

    A turn's worker has the weights to itself until it pushes. `times` gives the simulated seconds
    that a worker's round takes to compute, and those of its push and pull, from (worker, epoch,
    round).
    """

    holds_weights = False  # the next turn pulls others
    # Is called before a round ends, with that time; True: workers have come or gone before.
    changes_before: Callable[[float], bool] = staticmethod(lambda time_s: False)

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        *,
        times: Callable[[int, int, int], tuple[float, float]],
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self.time_s, self._times = 0.0, times
        self._pulled: dict[int, Tensor] = {}
        # A worker's present round: seconds of computing, exchanging, and waiting before it, which
        # do not count at a barrier.
        self._spent: dict[int, tuple[float, float, float]] = {}
        self._ended = [0.0] * len(server.clocks)  # each worker's last round
        self._queue: list[tuple[float, int]] = []  # ends of rounds
        self._turn: int | None = None  # the worker whose turn it is

    def turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield rounds in the order in which they end, and each epoch's end when it comes."""
        while True:
            while self.server.finished:
                yield self.server.finished.popleft()
            if self._turn is None:
                self._start_rounds()
                if not self._queue:
                    return
                if self.changes_before(self._queue[0][0]):
                    continue  # others may start, or wait
                self.time_s, self._turn = heapq.heappop(self._queue)
            yield Turn((self._turn,), *self._place(self._turn))
            self._turn = None

    def finish(self) -> None:
        """See `Cluster.finish`."""
        super().finish()
        self._queue.clear()
        self.server.finished.clear()

    def lose(self, worker: int) -> None:
        """Go on without a worker, if there is another and it has something left to do."""
        members = self.server.members
        over = members.clocks[worker] >= self._rounds
        if worker not in members.active or members.active == {worker} or over:
            return
        self._queue = [entry for entry in self._queue if entry[1] != worker]  # its round is lost
        heapq.heapify(self._queue)
        self._pulled.pop(worker, None)
        try:
            self._drop(worker, worker, "simulated")
        except SettingError as error:
            raise SyncError(f"worker {worker} was lost, without it is no plan: {error}") from error

    def join(self, worker: int) -> None:
        """Go on with one more worker, unless it is there or the run has nothing left for it."""
        if worker in self.server.members.active:
            return
        if self._take_in(worker, worker) < self._rounds:
            self._ended[worker] = self.time_s

    def pull(self, turn: Turn) -> None:
        """Load the weights that the worker's round started from into the model."""
        (worker,) = turn.workers
        self.weights.load(self._pulled.pop(worker))

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Hand the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        worker = report.worker
        self._ended[worker] = self.time_s
        compute_s, exchange_s, wait_s = self._spent[worker]
        if self.server.staleness == 0:  # it is known when the others come: the round's own waiting
            ends_s = [end_s for end_s, w in self._queue if w in self.server.members.active]
            wait_s = max(ends_s, default=self.time_s) - self.time_s
        report = replace(report, compute_time_s=compute_s, wait_time_s=wait_s + exchange_s)
        self.server.push(self.outgoing, report)
        return report.refused

    def state_dict(self) -> dict[str, Any]:
        """See `Cluster.state_dict`; in a turn its worker's weights are the model's."""
        return super().state_dict() | {
            "turn": self._turn,
            "pulled": dict(self._pulled),
            "spent": dict(self._spent),
            "ended": list(self._ended),
            "queue": list(self._queue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Cluster.load_state_dict`."""
        super().load_state_dict(state)
        device = self.weights.vector.device
        self._turn = state["turn"]
        self._pulled = {worker: w.to(device) for worker, w in state["pulled"].items()}
        self._spent, self._ended = dict(state["spent"]), list(state["ended"])
        self._queue = [(time_s, worker) for time_s, worker in state["queue"]]

    def take_over(self, start: Handover) -> None:
        """See `Cluster.take_over`."""
        super().take_over(start)
        self._ended = [start.time_s] * len(self._ended)

    def _start_rounds(self) -> None:
        """Begin the rounds of all workers that are in none and may start one, in order."""
        server, latest = self.server, self.server.latest_start()
        free = server.members.active - server.members.inside
        waiting = [
            worker
            for worker, clock in enumerate(server.clocks)
            if clock < self._rounds
            and clock <= latest
            and worker in free
            and server.may_start(worker)
        ]
        for worker in waiting:
            self._pulled[worker] = server.pull(worker)  # which a newcomer begins with
            compute_s, exchange_s = self._times(worker, *self._place(worker))
            self._spent[worker] = compute_s, exchange_s, self.time_s - self._ended[worker]
            heapq.heappush(self._queue, (self.time_s + compute_s + exchange_s, worker))
