"""How real processes exchange without a barrier: through a server on rank 0.

Rank 0 has the server, and may also train (`ServingCluster`). Each worker in another process
(`ServedCluster`) is answered in its own thread. One lock guards the server. A push is merged
under it; a pull is answered as soon as the clocks allow.

Every wait ends: with an answer, or because the other process was silent for too long. A process
that is heard may take any time. In the middle of a vector, gloo does not end a wait when the other
process dies: the waiting thread is abandoned, and the keepalive acts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import NothingLeft, RunStopped, SyncError, is_lost_peer
from dbsl.cluster.alive import Keepalive, end_later
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import (
    CPU,
    SERVER_RANK,
    Answer,
    Channel,
    Kind,
    encode,
    hear,
    pairs_with_server,
    read_plan,
    read_report,
    tell,
)
from dbsl.plan.types import EpochEnd, LostWorker, Plan, RoundReport, Turn

_START_S = 60.0  # minimum time allowed between processes' starts
_LOOK_S = 0.5  # interval at which a rank 0 that only serves checks for a due save
_STOP_PATIENCE_S = 20.0  # launchers kill processes 30 s after they ask them to end


def through_server(
    weights: FlatWeights, server: Server | None, *, timeout_s: float, **common: Any
) -> Cluster:
    """Return this process's side of stale synchronous or asynchronous rounds (a collective).

    Every other rank shares a gloo group of two with rank 0, which has the `server`, with weights in
    host memory. A lost pair does not affect the other pairs: its worker is dropped, and the others
    share its samples. A worker is lost after `timeout_s` of silence, even while it computes; the
    server, after 5 s more. A worker that is too far ahead waits for plan and weights.
    """
    pairs = pairs_with_server(timedelta(seconds=max(timeout_s, _START_S)))
    if server is not None:
        return ServingCluster(weights, server, pairs, timeout_s, **common)
    return ServedCluster(weights, pairs[SERVER_RANK], timeout_s, **common)


class MemberCluster(Cluster):
    """A worker's process, which waits for other workers only if it is too far ahead.

    A checkpoint is the server's state. A resumed run restarts the rounds that were not pushed.
    """

    saves_workers = False

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._waited_s = 0.0  # for a round that begins again
        for worker in self.workers:
            self._clock = state["server"]["clocks"][worker]

    def _end(self, answer: Answer) -> None:
        """End the run, or stop it, if the server gives no more weights."""
        if answer == Answer.FINISHED:
            self.finish()
            raise NothingLeft
        if answer == Answer.STOPPED:
            self.interrupted = True
            raise RunStopped


class ServedCluster(MemberCluster):
    """A worker's process: it asks rank 0 for plans and weights, and pushes to it."""

    def __init__(
        self, weights: FlatWeights, pair: dist.ProcessGroup, timeout_s: float, **common: Any
    ) -> None:
        super().__init__(weights, **common)
        self._timeout_s = timeout_s
        self._asks_to_stop = False
        self._leaves = threading.Event()  # the main thread is leaving
        self._link = Channel(pair, weights.vector)
        self._keepalive = Keepalive(
            *(SERVER_RANK, pair, timeout_s),
            asks=True,
            wants_stop=lambda: self._asks_to_stop,
            on_lost=self._on_lost,
        )

    def __enter__(self) -> Cluster:
        self._exits.callback(self._leaves.set)
        return super().__enter__()

    def turns(self) -> Iterator[Turn]:
        while self._clock < self._rounds:
            yield Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1

    def plan(self, turn: Turn) -> Plan:
        with self._waiting(), self._exchange():
            answer, text = self._link.ask(Kind.PULL)
        self._end(answer)
        return read_plan(text)

    def pull(self, turn: Turn) -> None:
        with self._waiting(), self._exchange():
            self._link.receive()

    def _hand_over(self, report: RoundReport) -> bool:
        with self._exchange():
            tell(self._link.pair, Kind.PUSH, encode(report))
            self._link.send(self.outgoing)  # arrives before the next pull ends
        return report.refused

    def leave(self) -> None:
        with self._exchange():
            self._link.ask(Kind.LEAVE)
        self._leaves.set()  # rank 0 may end before this process does

    def interrupt(self) -> None:
        """Stop after this step, and make rank 0 stop the run: this process may wait for others."""
        super().interrupt()
        self._asks_to_stop = True

    def close(self) -> None:
        with self._exchange():
            self._link.wait()  # for the last push, while both still notice a death
        self._keepalive.end()
        self._keepalive.thread.join(self._timeout_s)
        with self._exchange():
            tell(self._link.pair, Kind.DONE)
            self._link.wait()

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Turn a failed exchange with rank 0 into a `SyncError`."""
        try:
            yield
        except RuntimeError as error:
            self._leaves.set()
            if not is_lost_peer(error) and self._keepalive.thread.is_alive():
                raise  # a fault of this process
            raise SyncError(self._loss(self._keepalive.reason(error))) from error

    def _loss(self, reason: str) -> str:
        lost = f"rank {SERVER_RANK}, the server, was lost or goes on without this process"
        return f"{lost} ({reason}); it is back when the run is resumed"

    def _on_lost(self, keepalive: Keepalive) -> None:
        """End this process, even while it waits for a vector."""
        end_later(self._loss(keepalive.failure), self._leaves)


class ServingCluster(MemberCluster):
    """The server's process; its own worker uses the server as the others do.

    `pairs` are its connections with the other ranks; for the rest see `through_server`.
    """

    server: Server

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        pairs: Mapping[int, dist.ProcessGroup],
        timeout_s: float,
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self._owners = {rank: rank - (not self.workers) for rank in pairs}
        self._timeout_s = timeout_s
        self._stopping = False
        self._changed = threading.Condition()  # guards the server; a thread may hold it twice
        self._failure: Exception | None = None
        self._served = set(pairs)  # ranks that have neither left nor been lost
        self._threads = [self._thread_for(rank, pair) for rank, pair in pairs.items()]

    # --- this process's turns

    def turns(self) -> Iterator[Turn | EpochEnd]:
        for thread in self._threads:  # not before a resumed run's state is loaded
            thread.start()
        while self.workers and self._clock < self._rounds:
            yield Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1
            yield from self._ends()
        while True:
            yield from self._ends()
            with self._changed:
                if not self._untold and self.server.members.slowest() >= self._rounds:
                    return
                self._wait_for(lambda: self.interrupted or self._untold, _LOOK_S)
                waits = not self._untold
                last = min(self.server.members.slowest(), self._rounds - 1)
            if waits and self.interrupted:
                raise RunStopped
            if waits:
                yield Turn((), *divmod(last, self._rounds_per_epoch))

    def _ends(self) -> Iterator[EpochEnd]:
        while True:
            with self._changed:
                self._raise_failure()
                if not self._untold:
                    return
                end = self._untold.popleft()
            yield end

    def plan(self, turn: Turn) -> Plan:
        if not turn.workers:
            return self.planner.plans.of_epoch(turn.epoch)[-1]
        with self._waiting():
            begun = self._begin(*turn.workers)
        if begun is None:
            self._end(self._ending)
        plan, self._pulled = begun
        return plan

    def pull(self, turn: Turn) -> None:
        if turn.workers:
            with self._waiting():
                self.weights.load(self._pulled)  # slow to a GPU: others need not wait

    def _hand_over(self, report: RoundReport | None) -> bool:
        if report is None:
            return False
        self._merge(self.outgoing.cpu(), report)  # where the server has its weights
        return report.refused

    @property
    def _ending(self) -> Answer:
        """Why no more weights are given."""
        return Answer.FINISHED if self.finished_early else Answer.STOPPED

    # --- what any worker asks of the server

    def _begin(self, worker: int) -> tuple[Plan, Tensor] | None:
        """Wait until a worker's next round may begin; return its plan and weights.

        Until then both may change. None: the run must stop.
        """
        with self._changed:
            self._wait_for(
                lambda: (
                    self.interrupted
                    or worker not in self.server.members.active
                    or self.server.clocks[worker] <= self.server.latest_start()
                )
            )
            self._check_there(worker)
            if self.interrupted:
                return None
            weights = self.server.pull(worker)
            return self.planner.decide(*self._round_of(worker)), weights

    def _check_there(self, worker: int) -> None:
        """Refuse anything from a lost worker."""
        if worker not in self.server.members.active:
            raise SyncError(f"worker {worker} was lost")

    def _merge(self, weights: Tensor, report: RoundReport) -> None:
        with self._changed:
            self._check_there(report.worker)
            try:
                self.server.push(weights, report)
            except Exception as error:  # such as a merge rule's: the worker is not at fault
                self._failure = error
                raise
            finally:
                self._changed.notify_all()

    def _wait_for(self, predicate: Callable[[], object], limit_s: float | None = None) -> None:
        # Every worker ends its round, or is lost.
        self._changed.wait_for(lambda: self._failure or predicate(), limit_s)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def interrupt(self) -> None:
        """End this process's waits: the run must stop."""
        with self._changed:
            self.interrupted = True
            self._changed.notify_all()

    # --- workers of other processes

    def _thread_for(self, rank: int, pair: dist.ProcessGroup) -> threading.Thread:
        """Return the thread that serves a rank."""
        vector = torch.empty_like(self.weights.vector, device=CPU)
        link = Channel(pair, vector)
        keepalive = Keepalive(
            *(rank, pair, self._timeout_s),
            asks=False,
            on_stop=lambda: self._heed(rank),
            on_lost=lambda keepalive: self._give_up(rank, keepalive, keepalive.failure),
        )
        own, name = (rank, link, keepalive), f"serve-{rank}"
        return threading.Thread(target=self._serve, args=own, name=name, daemon=True)

    def _heed(self, rank: int) -> None:
        """Stop the run at a process's request, unless its worker was lost."""
        if self._owners[rank] in self.server.members.active:
            self.interrupt()

    def _serve(self, rank: int, link: Channel, keepalive: Keepalive) -> None:
        """Answer one rank's messages until it is done (runs in a thread)."""
        try:
            while self._answer(rank, link):
                pass
            with self._changed:
                self._served.discard(rank)
                self._changed.notify_all()
        except Exception as error:
            self._give_up(rank, keepalive, keepalive.reason(error))

    def _give_up(self, rank: int, keepalive: Keepalive, reason: str) -> None:
        """Stop serving a rank; its thread and its keepalive call this, and the first acts."""
        with self._changed:
            self._changed.notify_all()
            if rank not in self._served:
                return
            self._served.discard(rank)  # nobody waits for it any longer
            self._lose(rank, reason)
        keepalive.end()  # it may still be there

    def _answer(self, rank: int, link: Channel) -> bool:
        """Receive a message and act on it; False: it was the last."""
        worker = self._owners[rank]
        kind, text = hear(link.pair, Kind)
        if kind == Kind.PUSH:
            link.receive()  # finite, or its worker has refused it
            self._merge(link.vector, read_report(text))
        elif kind == Kind.PULL:
            if (begun := self._begin(worker)) is None:
                tell(link.pair, self._ending)
            else:
                plan, weights = begun
                tell(link.pair, Answer.GOES_ON, encode(plan))
                link.send(weights)
                link.wait()
        elif kind == Kind.LEAVE:  # this process must stop as well
            with self._changed:
                if not self._stopping:
                    self.interrupt()
                    self._wait_for(lambda: self._stopping)
            tell(link.pair, Answer.STOPPED)
        return kind not in (Kind.LEAVE, Kind.DONE)

    # --- who is lost

    def _lose(self, rank: int, reason: str) -> None:
        """Continue without a worker (lock held), if it has rounds left and others remain."""
        worker, active = self._owners[rank], self.server.members.active
        over = self.server.clocks[worker] >= self._rounds or worker not in active
        if self._failure or self._stopping or over:
            return
        if active == {worker}:
            self._failure = SyncError(f"rank {rank}, the last worker, was lost: {reason}")
            return
        try:
            samples = self.planner.drop(worker, self._rounds)
        except Exception as error:  # the others cannot take its share: nothing has changed
            self._failure = SyncError(
                f"rank {rank} was lost ({reason}), and no plan is possible without it: {error}"
            )
            return
        clock = self.server.clocks[worker]
        self.server.drop(worker)
        self._losses.append(LostWorker(rank, worker, clock, samples, reason))

    # --- saves

    def held(self) -> AbstractContextManager:
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        # No state can be resumed if something has failed in a thread, such as a merge rule.
        with self._changed:
            self._raise_failure()
            state = super().state_dict()
        state["server"]["inside"] = []  # rounds that were not pushed begin again
        return state

    # --- the end

    def leave(self) -> None:
        """Stop serving.

        The others have a limited time to leave too: they learn of it after a step or at a pull.
        """
        self._stop_serving()
        patience_s = min(self._timeout_s, _STOP_PATIENCE_S)
        with self._changed:
            if all(thread.ident is not None for thread in self._threads):
                self._changed.wait_for(lambda: not self._served, patience_s)

    def finish(self) -> None:
        """End the run once every worker has learned of it, at its pull."""
        self.finished_early = True
        self._stop_serving()
        self.close()
        super().finish()
        self.interrupted = False

    def _stop_serving(self) -> None:
        with self._changed:
            self._stopping = self.interrupted = True
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._served)  # silent workers are dropped
