"""How workers exchange: in each step, in turns in one process, or once a round at a barrier.

With joint steps, all workers always have the same weights. In simulated time, any number of workers
take turns. At a barrier, real processes exchange over Accelerate's process group.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.cluster.cluster import Cluster, WorkerGroup
from dbsl.cluster.formats import WorkerSum
from dbsl.cluster.merges import Delta, share_of_mean
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import SERVER_RANK
from dbsl.plan.types import (
    BAD_WEIGHTS,
    NO_FAULT,
    Action,
    EpochEnd,
    RoundReport,
    Turn,
    join_reports,
)


class JointCluster(Cluster):
    """Turns of all workers together, in one process in simulated time or in several in real time.

    The stepper exchanges gradients inside a turn; this class handles turns, plans and reports.
    """

    def __init__(self, weights: FlatWeights, **common: Any) -> None:
        super().__init__(weights, **common)
        self._start: Tensor | None = None  # weights at the start of the current round
        self._spent_s = 0.0  # on the round in which a run was stopped
        self._inherited = 0  # steps of that round taken by an earlier set of workers

    def turns(self) -> Iterator[Turn | EpochEnd]:
        for turn in super().turns():
            if not turn.ends_epoch:
                self._began, self._spent_s = time.perf_counter() - self._spent_s, 0.0
            yield turn

    def pull(self, turn: Turn) -> None:
        """Keep a copy of the weights, already here, in case the round is not finite."""
        self._start = self.weights.vector.clone()

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """End a round: tell every process how long its workers computed and waited.

        True: it was refused, and its starting weights are restored.
        """
        self._finish_round()
        done = self._simulated(reports) if self._times else self._gathered(*reports)
        refused = any(report.refused for report in done)
        if refused:
            self.weights.load(self._start)
            self._refused += 1
            # All have these weights: one report names the fault, a loss rather than its effect.
            first = min((r for r in done if r.fault), key=lambda r: r.fault, default=None)
            done = [
                replace(report, refused=True, fault=report.fault if report is first else NO_FAULT)
                for report in done
            ]
        else:
            for report in done:
                self.planner.observe(report)
        self._reports.extend(done)
        self._start, self._inherited = None, 0
        return refused

    def _simulated(self, reports: Sequence[RoundReport]) -> list[RoundReport]:
        """Advance simulated time by the slowest worker's round."""
        times = [self._times(r.worker, r.epoch, r.round) for r in reports]
        slowest = max(map(sum, times))
        self.time_s += slowest
        done = []
        for report, (compute_s, _) in zip(reports, times, strict=True):
            share = report.steps / max(report.steps + self._inherited, 1)  # of the round's steps
            wait_s = (slowest - compute_s) * share
            done.append(replace(report, compute_time_s=compute_s * share, wait_time_s=wait_s))
        return done

    def _gathered(self, report: RoundReport) -> list[RoundReport]:
        wait_s = max(0.0, time.perf_counter() - self._began - report.time_s)
        report = replace(report, compute_time_s=report.time_s, wait_time_s=wait_s)
        return self.control.gather_reports(report)

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return the strongest action requested; processes agree once a second, at one step."""
        return action if self.control is None else self.control.agree(action)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "spent_s": 0.0 if self._start is None else time.perf_counter() - self._began,
            "start": self._start,
            "inherited": self._inherited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._spent_s, self._inherited = state["spent_s"], state["inherited"]
        start = state["start"]
        self._start = None if start is None else start.to(self.weights.vector.device)


class SimulatedCluster(Cluster):
    """Workers that take turns on one model; `Server` decides as it does for real processes.

    A queue of events gives the next worker to end its round. It trains from the weights it pulled
    when its round began, pushes, and pulls again. Asynchronous and stale synchronous runs are
    therefore exact and reproducible, whatever the load on this machine.
    """

    holds_weights = False  # the next turn pulls others

    def __init__(self, weights: FlatWeights, server: Server, **common: Any) -> None:
        super().__init__(weights, server, **common)
        self._pulled: dict[int, Tensor] = {}
        # Each worker's current round: seconds of computing, exchanging, and waiting before it.
        # At a barrier this waiting is not used.
        self._spent: dict[int, tuple[float, float, float]] = {}
        self._ended = [0.0] * len(server.clocks)  # end of each worker's last round
        self._queue: list[tuple[float, int]] = []  # ends of rounds
        self._turn: int | None = None  # the worker whose turn it is

    def turns(self) -> Iterator[Turn | EpochEnd]:
        while True:
            yield from self._ends()
            if self._turn is None:
                self._start_rounds()
                if not self._queue:
                    return
                self.time_s, self._turn = heapq.heappop(self._queue)
            yield Turn((self._turn,), *self._round_of(self._turn))
            self._turn = None

    def finish(self) -> None:
        super().finish()
        self._queue.clear()

    def pull(self, turn: Turn) -> None:
        (worker,) = turn.workers
        self.weights.load(self._pulled[worker])  # kept: the run may stop before a step

    def push(self, reports: Sequence[RoundReport]) -> bool:
        (report,) = reports
        worker = report.worker
        self._pulled.pop(worker, None)
        self._ended[worker] = self.time_s
        compute_s, exchange_s, wait_s = self._spent[worker]
        if self.server.staleness == 0:  # arrivals are known: the round's own waiting
            ends_s = [end_s for end_s, w in self._queue if w in self.server.members.active]
            wait_s = max(ends_s, default=self.time_s) - self.time_s
        report = replace(report, compute_time_s=compute_s, wait_time_s=wait_s + exchange_s)
        self.server.push(self.outgoing, report)
        return report.refused

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "turn": self._turn,
            "pulled": dict(self._pulled),
            "spent": dict(self._spent),
            "ended": list(self._ended),
            "queue": list(self._queue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        device = self.weights.vector.device
        self._turn = state["turn"]
        self._pulled = {worker: w.to(device) for worker, w in state["pulled"].items()}
        self._spent, self._ended = dict(state["spent"]), list(state["ended"])
        self._queue = [(time_s, worker) for time_s, worker in state["queue"]]

    def _start_rounds(self) -> None:
        """Begin a round for each worker that is in none and may start one, in order."""
        server, latest = self.server, self.server.latest_start()
        for worker in sorted(server.members.active - server.members.inside):
            if server.clocks[worker] >= self._rounds or server.clocks[worker] > latest:
                continue
            self._pulled[worker] = server.pull(worker)
            self.planner.decide(*self._round_of(worker))
            compute_s, exchange_s = self._times(worker, *self._round_of(worker))
            self._spent[worker] = compute_s, exchange_s, self.time_s - self._ended[worker]
            heapq.heappush(self._queue, (self.time_s + compute_s + exchange_s, worker))


class BarrierCluster(Cluster):
    """Bulk synchronous rounds: a weighted sum over all ranks, which computes `mean` here.

    If gradients are pushed, the server's optimizer is on one rank and the new weights are
    broadcast, as before the first round and after a round refused as a whole. With `gathers`, the
    server receives every worker's weights, for a fork's own merge rule, and broadcasts the result.
    A rank without the server takes the step of `delta` as the server does.

    If `wire`, a format of rounds, is not float32, the weights' change since the pull is rounded.

    A worker may be an `island` of several processes. Its first process sums with those of other
    workers, and the others receive the sum from it. If workers are `served`, rank 0 has none.
    """

    def __init__(
        self,
        *both: Any,
        wire: str = "float32",
        island: WorkerGroup | None = None,
        delta: Delta | None = None,
        gathers: bool = False,
        served: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(*both, **common)
        self._island, self._sends_change = island or WorkerGroup(), wire != "float32"
        self._pushes_weights = self.outgoing is self.weights.vector
        self._gathers, self._served, self._has_global = gathers, served, False
        self._at_server = delta is not None and self.server is not None
        self._delta = None if self._at_server else delta
        self._sum = WorkerSum(wire, self.weights, self._island.between)
        # The pulled weights, if changes are relative to them.
        changes = self._pushes_weights and (self._sends_change or delta is not None)
        self._pulled = self.weights.vector.clone() if changes else None

    def pull(self, turn: Turn) -> None:
        """Load the global weights into the model (a collective over all ranks)."""
        self._receive()

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return the strongest action that any process requests.

        They agree at the end of a round's steps, or when one of them must stop: the others are in
        the same round, and learn of it at its end. Processes of one worker wait for each other in
        each step, and stop at the same step.
        """
        if self._island.control is not None and not round_over:
            action = self._island.control.agree(action)
        if not round_over and action != Action.STOP:
            return Action.GO_ON
        if self._served:  # a round may exceed the timeout between processes
            self.control.let_first_wait(1)
        return Action(*self.control.highest(action))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "has_global": self._has_global,
            "pulled": self._pulled,
            "rounded": self._sum.state_dict(),
            "delta": self._delta and self._delta.state_dict(),  # the server has its own, the same
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._has_global = state["has_global"]
        if self._pulled is not None:
            self._pulled.copy_(state["pulled"])
        self._sum.load_state_dict(state["rounded"])
        if self._delta is not None:
            self._delta.load_state_dict(state["delta"])

    @torch.no_grad()
    def _hand_over(self, report: RoundReport | None) -> bool:
        """Merge what all workers push; `report` is None on a dedicated server."""
        reports = join_reports(self.control.gather_reports(report))
        own = next((r for r in reports if r.worker in self.workers), None)
        refused = own is not None and own.refused
        if self._gathers:
            count = 0 if self.server is None else dist.get_world_size(self._island.between)
            pushed = [torch.empty_like(self.outgoing) for _ in range(count)]
            if not self._island.place:
                group = self._island.between
                dist.gather(self.outgoing, pushed or None, dst=SERVER_RANK, group=group)
            self._has_global = False
            self._refused += sum(r.refused for r in reports)
            # All began with the same weights. A dedicated server's row is first.
            for weights, each in zip(pushed[-len(reports) :], reports, strict=False):
                self.server.pull(each.worker)
                self.server.push(weights, each)
        else:
            taken = [r for r in reports if not r.refused]
            summed = self._summed(own, taken) if taken else None
            self._take(summed, reports)
            refused |= own is not None and summed is None
        if self.server is not None:
            self.server.finished.clear()  # turns() yields epoch ends, on every rank
        return refused

    def _summed(self, report: RoundReport | None, taken: Sequence[RoundReport]) -> Tensor | None:
        """Return the new weights, or the sum of gradients, the same on every rank.

        None: changes are too large to round, and rounding errors are discarded.
        """
        own, island = self.outgoing, self._island
        factor = 0.0 if report is None or report.refused else report.merge_weight
        total = sum(r.merge_weight for r in taken) if self._pushes_weights else factor
        summed = share_of_mean(own - self._pulled if self._sends_change else own, factor, total)
        if not island.place:
            summed = self._sum(summed)
        if island.inside is not None:
            dist.broadcast(summed, group=island.inside, group_src=0)
        if not self._sends_change:
            return summed.to(own.dtype)
        if not summed.isfinite().all():
            self._sum.forget()
            return None
        return summed.add_(self._pulled).to(own.dtype)

    def _take(self, summed: Tensor | None, reports: list[RoundReport]) -> None:
        """Apply the result of `_summed`, through `delta` if set; None: the round is refused."""
        if summed is None:
            bad = {"refused": True, "fault": BAD_WEIGHTS}
            reports = [report if report.refused else replace(report, **bad) for report in reports]
        self._refused += sum(r.refused for r in reports)
        if self.server is not None:
            self.server.push_joined(summed, reports)
        self._has_global = self._pushes_weights and summed is not None
        if not self._has_global:
            return
        if self._at_server:
            summed = self.server.snapshot()
        elif self._delta is not None:
            summed = self._delta(self._pulled, summed[None], torch.ones(1))
        if self._pulled is not None:
            self._pulled.copy_(summed)
        self.weights.load(summed)

    @torch.no_grad()
    def _receive(self) -> None:
        if self._has_global:
            return
        with self._waiting():
            if self.server is not None:
                self.weights.load(self.server.snapshot())
            dist.broadcast(self.weights.vector, src=SERVER_RANK)
            if self._pulled is not None:
                self._pulled.copy_(self.weights.vector)
            self._has_global = True
