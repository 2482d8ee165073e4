"""The simulated cluster: any number of workers in one process, on a virtual clock.

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

from dbsl.base.numbers import as_counts, as_numbers
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.follow import Planner
from dbsl.plan.turns import EpochEnd, Restart, Round, RoundReport


class SimulatedCluster(Cluster):
    """Workers that take turns on one model; `Server` decides as it does for real processes.

    Args:
        weights: The model's weights; a turn's worker has them to itself until it pushes.
        server: The server, with the clocks of all workers.
        planner: As for `Cluster`.
        epochs: Epochs that each worker runs.
        duration: Virtual seconds that a worker computes in a round, from (worker, epoch, round).
        exchange: Virtual seconds that its push and pull then take, from the same.
        outgoing: As for `Cluster`.
    """

    holds_weights = False  # the next turn pulls others

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        *,
        planner: Planner,
        epochs: int,
        duration: Callable[[int, int, int], float],
        exchange: Callable[[int, int, int], float] = lambda *_: 0.0,
        outgoing: Tensor | None = None,
    ) -> None:
        super().__init__(
            weights,
            server,
            planner=planner,
            workers=range(len(server.clocks)),
            epochs=epochs,
            rounds_per_epoch=server.rounds_per_epoch,
            outgoing=outgoing,
        )
        self.time_s = 0.0  # the virtual clock
        self._duration, self._exchange = duration, exchange
        self._pulled: dict[int, Tensor] = {}
        self._durations: dict[int, float] = {}  # a worker's present round
        self._waits: dict[int, float] = {}  # before that round; unused at a barrier
        self._ended = [0.0] * len(server.clocks)  # each worker's last round
        self._queue: list[tuple[float, int]] = []
        self._turn: int | None = None  # the worker whose turn it is

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield rounds in the order in which they end, and each epoch's end when it comes."""
        while True:
            while self.server.finished:
                yield self.server.finished.popleft()
            if self._turn is None:
                for worker in self._waiting():
                    self._start(worker)
                if not self._queue:
                    return
                self.time_s, self._turn = heapq.heappop(self._queue)
                if self._turn not in self.server.active:  # it was lost inside its round
                    self._turn = None
                    continue
            yield Round((self._turn,), *self._place(self._turn))
            self._turn = None

    def pull(self, turn: Round) -> None:
        """Load the weights that the worker's round started from into the model."""
        (worker,) = turn.workers
        pulled = self._pulled.pop(worker)
        self.weights.load(pulled)
        self.server.release(pulled)

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Hand the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        worker = report.worker
        self._ended[worker] = self.time_s
        wait_s = self._waits[worker]
        if self.server.staleness == 0:  # it is known when the others come: the round's own waiting
            others = [end_s for end_s, other in self._queue if other in self.server.active]
            wait_s = max(others, default=self.time_s) - self.time_s
        wait_s += self._exchange(worker, report.epoch, report.round)
        report = replace(report, compute_time_s=self._durations[worker], wait_time_s=wait_s)
        self.server.push(self.outgoing, report)
        return report.refused

    def state_dict(self) -> dict[str, Any]:
        """Return where every worker is, to go on from in `load_state_dict`.

        In the middle of a turn its worker's weights are the model's; they are not in here.
        """
        return {
            "server": self.server.state_dict(),
            "time_s": self.time_s,
            "turn": self._turn,
            "pulled": dict(self._pulled),
            "durations": dict(self._durations),
            "waits": dict(self._waits),
            "ended": list(self._ended),
            "queue": list(self._queue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.server.load_state_dict(state["server"])
        workers, device = len(self._ended), self.weights.vector.device
        (self.time_s,) = as_numbers([state["time_s"]], 1)
        turn = state["turn"]
        self._turn = None if turn is None else as_counts([turn], 1, workers - 1)[0]
        self._pulled = {worker: w.to(device) for worker, w in state["pulled"].items()}
        self._durations, self._waits = dict(state["durations"]), dict(state["waits"])
        self._ended = as_numbers(state["ended"], workers)
        queue = list(state["queue"])
        times = as_numbers([time_s for time_s, _ in queue], len(queue))
        inside = as_counts([worker for _, worker in queue], len(queue), workers - 1)
        if not set(inside) <= self._pulled.keys() & self._durations.keys() & self._waits.keys():
            raise ValueError(f"state must have what the workers {inside} have pulled")
        self._queue = list(zip(times, inside, strict=True))

    def restart(self, start: Restart) -> None:
        """Go on where workers of another number stopped."""
        super().restart(start)
        self.time_s = start.time_s
        self._ended = [start.time_s] * len(self._ended)

    def _waiting(self) -> list[int]:
        """Return the workers that are in no round and may start one, in order."""
        inside, latest = {worker for _, worker in self._queue}, self.server.latest_start()
        return [
            worker
            for worker, clock in enumerate(self.server.clocks)
            if clock < self._rounds
            and clock <= latest
            and worker not in inside
            and worker in self.server.active
        ]

    def _place(self, worker: int) -> tuple[int, int]:
        """Return the epoch and the round that a worker is in."""
        return divmod(self.server.clocks[worker], self.server.rounds_per_epoch)

    def _start(self, worker: int) -> None:
        self._pulled[worker] = self.server.pull(worker)
        duration = self._duration(worker, *self._place(worker))
        self._durations[worker] = duration
        self._waits[worker] = self.time_s - self._ended[worker]
        end_s = self.time_s + duration + self._exchange(worker, *self._place(worker))
        heapq.heappush(self._queue, (end_s, worker))
