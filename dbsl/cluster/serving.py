"""The process of rank 0 where workers meet without a barrier: its server, and a thread a worker."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SyncError
from dbsl.base.numbers import as_counts
from dbsl.cluster.heartbeats import Pulse
from dbsl.cluster.membership import lose_worker
from dbsl.cluster.messages import (
    CPU,
    Kind,
    answer,
    check_report,
    decode,
    encode_plan,
    line_rows,
    message,
    message_kind,
    message_numbers,
    with_lines,
)
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.transfer import Transfer, receive, send
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.turns import EpochEnd, LostWorker, Round, RoundReport
from dbsl.plan.types import CurrentPlan

_STOP_PATIENCE_S = 20.0  # launchers kill what has not ended 30 s after they asked it to


@dataclass
class _Peer:
    """A worker that a thread serves, and its connection."""

    rank: int
    worker: int
    pair: dist.ProcessGroup
    pulse: Pulse
    buffer: Tensor  # what it pushes
    whole: Transfer
    narrow: Transfer
    pulled: Tensor | None  # what it pulled, if it pushes the change since then
    has_pulled: bool = False


class ServingCluster(Cluster):
    """Rank 0: it has the server, and perhaps a worker of its own.

    A push is merged under a lock, a pull is answered as soon as the clocks allow.

    Args:
        weights: As for `Cluster`, like all that is not named here.
        server: The server, its weights in host memory.
        pairs: Connections with the other ranks.
        timeout_s: Longest silence of a worker before it counts as lost.
        narrow: Dtype of pushes, if it is not the weights'.
        sends_changes: Whether a push is the weights' change since the pull.
    """

    server: Server

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        *,
        pairs: Mapping[int, dist.ProcessGroup],
        timeout_s: float,
        narrow: torch.dtype | None,
        sends_changes: bool,
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self._timeout_s = timeout_s
        self._narrow_dtype = narrow
        self._sends_changes = sends_changes
        self._lost: deque[LostWorker] = deque()  # until they are told of
        self._stopping = False
        self._changed = threading.Condition()  # guards the server
        self._failure: Exception | None = None
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(rank, pair, Pulse(rank, pair, timeout_s, asks=False, on_lost=self._wake)),
                name=f"serve-{rank}",
                daemon=True,
            )
            for rank, pair in pairs.items()
        ]

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this process's rounds in order, and each epoch's end as it comes."""
        for thread in self._threads:  # not before a resumed run's state is here
            thread.start()
        while self.workers and self._clock < self._rounds:
            yield Round(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1
            yield from self._finished(wait=False)
        yield from self._finished(wait=True)

    def plan(self, turn: Round) -> CurrentPlan:
        """Return the plan in force in a turn."""
        return self._plan_at(turn.epoch, turn.round)

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        (worker,) = turn.workers
        began = time.perf_counter()
        with self._changed:
            self._wait_for(lambda: self._interrupted or self.server.may_start(worker))
            stop = self._interrupted
            if not stop:
                weights = self.server.pull(worker)
                self.weights.load(weights)
                self.server.release(weights)
        if stop:
            self.on_stop()
        self._waited_s += time.perf_counter() - began

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Give the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        began = time.perf_counter()
        self._merge(self.outgoing.to("cpu"), report)
        self._waited_s = time.perf_counter() - began
        return report.refused

    def lost(self) -> Iterator[LostWorker]:
        """Yield the workers that were lost since the last call."""
        while self._lost:
            yield self._lost.popleft()

    def announce(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Return the save to take part in; every worker is asked to when it pulls next."""
        self._announced = (sequence, epoch)
        return self._announced

    def interrupt(self) -> None:
        """End this process's waits: the run is to stop."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def leave(self, sequence: int) -> int:
        """Stop serving; return the number of the save to take part in, which is `sequence`.

        The others have until a time to leave as well: they do when they have heard of it, after a
        step or where they pull.
        """
        with self._changed:
            self._stopping = self._interrupted = True
            self._announced = (sequence, -1)
            self._changed.notify_all()
        patience = time.monotonic() + min(self._timeout_s, _STOP_PATIENCE_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, patience - time.monotonic()))
        return sequence

    def close(self) -> None:
        """Wait for the serving threads."""
        for thread in self._threads:
            thread.join(self._timeout_s)

    def held(self) -> AbstractContextManager:
        """Hold pushes up for as long as this is open."""
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is, and the server's state.

        This process's weights are the model's; they are not in here.
        """
        with self._changed:
            server = self.server.state_dict()
            return {"clock": self._clock, "waited_s": self._waited_s, "server": server}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the server's clock is this worker's, too."""
        (self._clock,) = as_counts([state["clock"]], 1)
        self._waited_s = state["waited_s"]
        self.server.load_state_dict(state["server"])

    def _plan_at(self, epoch: int, round_: int) -> CurrentPlan:
        with self._changed:
            return self._plans.planner.at(epoch, round_)

    def _finished(self, *, wait: bool) -> Iterator[EpochEnd]:
        """Yield the epochs' ends that have come; `wait`: all that are to come."""
        while True:
            with self._changed:
                if wait and not self.server.finished and not self._all_done():
                    self._wait_for(lambda: self._interrupted or self.server.finished)
                self._raise_failure()
                end = self.server.finished.popleft() if self.server.finished else None
            if end is None:
                if not (wait and self._interrupted) or self._all_done():
                    return
                self.on_stop()
            else:
                yield end

    def _all_done(self) -> bool:
        return self.server.slowest() >= self._rounds

    def _merge(self, weights: Tensor, report: RoundReport) -> None:
        with self._changed:
            try:
                self.server.push(weights, report)
            except Exception as error:  # a merge rule's, for one: the worker is not at fault
                self._failure = error
                raise
            finally:
                self._changed.notify_all()

    def _wait_for(self, predicate: Callable[[], object]) -> None:
        # Every worker comes to the end of its round, or is lost.
        self._changed.wait_for(lambda: self._failure or predicate())
        self._raise_failure()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self, rank: int, pair: dist.ProcessGroup, pulse: Pulse) -> None:
        """Answer one rank's messages until it is done (runs in a thread)."""
        worker = rank - (not self.workers)
        try:
            buffer = torch.empty_like(self.weights.vector, device=CPU)
            whole, narrow = (Transfer(buffer, rank, pair, d) for d in (None, self._narrow_dtype))
            pulled = torch.empty_like(buffer) if self._sends_changes else None
            self._converse(_Peer(rank, worker, pair, pulse, buffer, whole, narrow, pulled))
        except Exception as error:
            reason = pulse.reason(error)
            with self._changed:
                self._lose(rank, worker, reason)
                self._changed.notify_all()
            pulse.give_up()

    def _converse(self, peer: _Peer) -> None:
        head = message(Kind.DONE)
        while True:
            receive(head, peer.rank, peer.pair)
            kind = message_kind(head)
            if kind == Kind.DONE:
                return
            if kind == Kind.LEAVE:
                self._let_go(peer)
                return
            if kind in (Kind.PUSH, Kind.PUSH_CHANGE):
                self._take_push(peer, head, is_change=kind == Kind.PUSH_CHANGE)
            elif kind == Kind.PLAN:
                place = message_numbers(head, self._rounds // self._rounds_per_epoch)
                send(encode_plan(self._plan_at(*place), CPU), peer.rank, peer.pair)
            else:
                self._answer_pull(peer)

    def _let_go(self, peer: _Peer) -> None:
        """Answer a worker that is to stop: this process is to, and says as what it saves."""
        with self._changed:
            if not self._stopping:
                self._interrupted = True
                self._changed.notify_all()
                self._wait_for(lambda: self._stopping)
        send(answer(stop=True, announced=self._announced), peer.rank, peer.pair)

    def _take_push(self, peer: _Peer, head: Tensor, *, is_change: bool) -> None:
        report = decode(head[1:])
        rows = line_rows(report)
        if len(rows):
            receive(rows, peer.rank, peer.pair)
            report = with_lines(report, rows)
        if is_change:
            if not peer.has_pulled:
                raise ValueError("a change of weights must follow a pull")
            finite = peer.narrow.receive(peer.buffer, plus=peer.pulled, check=True)
        else:
            transfer = peer.whole if self._sends_changes else peer.narrow
            finite = transfer.receive(peer.buffer, check=True)
        with self._changed:
            clock = divmod(self.server.clocks[peer.worker], self._rounds_per_epoch)
        check_report(report, peer.worker, *clock)
        self._merge(peer.buffer, replace(report, refused=report.refused or not finite))

    def _answer_pull(self, peer: _Peer) -> None:
        with self._changed:
            self._wait_for(
                lambda: (
                    self._interrupted or peer.pulse.failure or self.server.may_start(peer.worker)
                )
            )
            if peer.pulse.failure:
                raise SyncError(peer.pulse.failure)
            stop = self._interrupted
            weights = None if stop else self.server.pull(peer.worker)
        send(answer(stop=stop, announced=self._announced), peer.rank, peer.pair)
        if not stop:
            peer.whole.send(weights, copy=peer.pulled)
            peer.whole.wait()
            peer.has_pulled = peer.pulled is not None
            with self._changed:
                self.server.release(weights)

    def _lose(self, rank: int, worker: int, reason: str) -> None:
        """Go on without a worker, if there is another; called with the lock held."""
        if self._failure or self._stopping or self.server.clocks[worker] >= self._rounds:
            return  # it has nothing more to give
        if self.server.active == {worker}:
            self._failure = SyncError(f"rank {rank}, the last worker, was lost: {reason}")
            return
        clock = self.server.clocks[worker]
        try:
            samples = lose_worker(self.server, self._plans.planner, worker, self._rounds)
        except Exception as error:  # the others cannot carry its share
            self._failure = SyncError(
                f"rank {rank} was lost ({reason}), and without it there is no plan: {error}"
            )
            return
        self._lost.append(LostWorker(rank, worker, clock, samples, reason))
