"""What rank 0 and the workers that it serves say to each other: a thread a worker, one lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError, SyncError
from dbsl.cluster.heartbeats import Pulse
from dbsl.cluster.joining import Door
from dbsl.cluster.membership import lose_worker
from dbsl.cluster.messages import (
    CPU,
    Ending,
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
from dbsl.plan.turns import LostWorker, RoundReport
from dbsl.plan.types import CurrentPlan


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


class Conversing(Cluster):
    """Answers workers of other processes, each in a thread of its own.

    Args:
        weights: As for `Cluster`, like all that is not named here.
        server: The server, its weights in host memory.
        timeout_s: Longest silence of a worker before it counts as lost.
        narrow: Dtype of pushes, if it is not the weights'.
        sends_changes: Whether a push is the weights' change since the pull.
        door: Where processes that are launched again ask to join; None: there is no launcher.
    """

    server: Server

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        *,
        timeout_s: float,
        narrow: torch.dtype | None,
        sends_changes: bool,
        door: Door | None = None,
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self._door = door
        self._timeout_s = timeout_s
        self._narrow_dtype = narrow
        self._sends_changes = sends_changes
        self._stopping = False
        self._changed = threading.Condition()  # guards the server
        self._failure: Exception | None = None
        self._heard: dict[int, int] = {}  # by rank that is served: the last save it was told of
        self._saving: dict[int, set[int]] = {}  # by save: ranks that were told of it

    def saving(self, sequence: int) -> set[int]:
        """Return the ranks to wait for: their shard of a save has come or may still come.

        A worker hears of a save when it pulls. Those that finish before do not save it, nor does
        one that came later, or that heard of a newer save first. Nobody waits for a lost worker.
        """
        with self._changed:
            ranks = set(self._saving.get(sequence, ()))
            if sequence == self._announced[0]:
                ranks |= {rank for rank, heard in self._heard.items() if heard < sequence}
            return ranks

    def _told(self, rank: int) -> None:
        """Note that a rank has been told of the last save, with the lock held."""
        sequence = self._announced[0]
        if self._heard[rank] < sequence:
            self._heard[rank] = sequence
            self._saving.setdefault(sequence, set()).add(rank)

    def _worker_of(self, rank: int) -> int:
        return rank - (not self.workers)

    def _thread_for(
        self, rank: int, pair: dist.ProcessGroup, first: Tensor | None = None
    ) -> threading.Thread:
        """Return what serves a rank; `first` is what it is told before it asks."""
        pulse = Pulse(
            rank, pair, self._timeout_s, asks=False, on_lost=self._wake, on_stop=self.interrupt
        )
        self._heard[rank] = self._announced[0]  # one that joins takes no part in what was before
        arguments = (rank, pair, pulse, first)
        return threading.Thread(
            target=self._serve, args=arguments, name=f"serve-{rank}", daemon=True
        )

    def _merge(self, weights: Tensor, report: RoundReport) -> None:
        with self._changed:
            try:
                self.server.push(weights, report)
            except Exception as error:  # a merge rule's, for one: the worker is not at fault
                self._failure = error
                raise
            finally:
                self._changed.notify_all()

    def _wait_for(self, predicate: Callable[[], object], limit_s: float | None = None) -> None:
        # Every worker comes to the end of its round, or is lost.
        self._changed.wait_for(lambda: self._failure or predicate(), limit_s)
        self._raise_failure()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(
        self, rank: int, pair: dist.ProcessGroup, pulse: Pulse, first: Tensor | None
    ) -> None:
        """Answer one rank's messages until it is done (runs in a thread)."""
        worker = self._worker_of(rank)
        try:
            if first is not None:
                send(first, pair)
            buffer = torch.empty_like(self.weights.vector, device=CPU)
            whole, narrow = (Transfer(buffer, pair, d) for d in (None, self._narrow_dtype))
            pulled = torch.empty_like(buffer) if self._sends_changes else None
            self._converse(_Peer(rank, worker, pair, pulse, buffer, whole, narrow, pulled))
            with self._changed:
                del self._heard[rank]
        except Exception as error:
            reason = pulse.reason(error)
            with self._changed:
                del self._heard[rank]
                for ranks in self._saving.values():
                    ranks.discard(rank)
                left_out = self._lose(rank, worker, reason) and self._door is not None
                number = self._door.number_of(rank) if left_out else 0
                self._changed.notify_all()
            pulse.give_up()
            if left_out:
                self._door.leave_word(rank, number, reason)

    def _converse(self, peer: _Peer) -> None:
        head = message(Kind.DONE, figures=len(self._figures))
        while True:
            receive(head, peer.pair)
            kind = message_kind(head)
            if kind == Kind.DONE:
                return
            if kind == Kind.LEAVE:
                self._let_go(peer)
                return
            if kind in (Kind.PUSH, Kind.PUSH_CHANGE):
                self._take_push(peer, head, is_change=kind == Kind.PUSH_CHANGE)
            elif kind == Kind.PLAN:
                moment = message_numbers(head, self._rounds // self._rounds_per_epoch)
                send(encode_plan(self._plan_to_begin(peer, *moment), CPU), peer.pair)
            else:
                self._answer_pull(peer)

    def _let_go(self, peer: _Peer) -> None:
        """Answer a worker that is to stop: this process is to, and says as what it saves."""
        with self._changed:
            if not self._stopping:
                self._interrupted = True
                self._changed.notify_all()
                self._wait_for(lambda: self._stopping)
            self._told(peer.rank)
        send(answer(stop=Ending.STOPPED, announced=self._announced), peer.pair)

    def _take_push(self, peer: _Peer, head: Tensor, *, is_change: bool) -> None:
        report = decode(head[1:], self._figures)
        rows = line_rows(report)
        if len(rows):
            receive(rows, peer.pair)
            report = with_lines(report, rows)
        if is_change:
            if not peer.has_pulled:
                raise SettingError("a change of weights must follow a pull")
            finite = peer.narrow.receive(peer.buffer, plus=peer.pulled, check=True)
        else:
            transfer = peer.whole if self._sends_changes else peer.narrow
            finite = transfer.receive(peer.buffer, check=True)
        with self._changed:
            clock = divmod(self.server.clocks[peer.worker], self._rounds_per_epoch)
        check_report(report, peer.worker, *clock)
        self._merge(peer.buffer, replace(report, refused=report.refused or not finite))

    def _plan_to_begin(self, peer: _Peer, epoch: int, round_: int) -> CurrentPlan:
        """Return a round's plan to a worker that may begin it: until then a loss may change it."""
        with self._changed:
            self._wait_to_start(peer)
            if not self._interrupted:
                self.server.begin(peer.worker)
            return self._plans.planner.at(epoch, round_)

    def _wait_to_start(self, peer: _Peer) -> None:
        """Wait until a worker may start its next round, or the run is to stop; with the lock."""
        self._wait_for(
            lambda: self._interrupted or peer.pulse.failure or self.server.may_start(peer.worker)
        )
        if peer.pulse.failure:
            raise SyncError(peer.pulse.failure)

    def _answer_pull(self, peer: _Peer) -> None:
        with self._changed:
            self._wait_to_start(peer)
            stop = self._interrupted
            weights = None if stop else self.server.pull(peer.worker)
            self._told(peer.rank)
        ending = Ending(stop + (stop and self.finished_early))
        send(answer(stop=ending, announced=self._announced), peer.pair)
        if not stop:
            peer.whole.send(weights, copy=peer.pulled)
            peer.whole.wait()
            peer.has_pulled = peer.pulled is not None
            with self._changed:
                self.server.release(weights)

    def _lose(self, rank: int, worker: int, reason: str) -> bool:
        """Go on without a worker, with the lock held; return whether others do."""
        if self._failure or self._stopping or self.server.clocks[worker] >= self._rounds:
            return False  # it has nothing more to give
        if self.server.active == {worker}:
            self._failure = SyncError(f"rank {rank}, the last worker, was lost: {reason}")
            return False
        clock = self.server.clocks[worker]
        try:
            samples = lose_worker(self.server, self._plans.planner, worker, self._rounds)
        except Exception as error:  # the others cannot carry its share
            self._failure = SyncError(
                f"rank {rank} was lost ({reason}), and without it there is no plan: {error}"
            )
            return False
        self._membership.append(LostWorker(rank, worker, clock, samples, reason))
        return True
