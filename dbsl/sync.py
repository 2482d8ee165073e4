"""How real processes meet: a barrier on Accelerate's process group, or a server on rank 0.

Each carrier offers what `cluster.SimulatedCluster` offers in one process: `turns` (whose round is
next, when an epoch ends), `pull`, `push` and `load`. Every wait ends, by an answer or by a timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.balance import Planner, Segment
from dbsl.server import EpochEnd, Round, RoundReport, Server
from dbsl.weights import FlatWeights
from dbsl.wire import (
    CPU,
    DONE,
    PLAN,
    PULL,
    PUSH,
    SERVER_RANK,
    SharedPlans,
    decode,
    decode_plan,
    encode_plan,
    exchange_reports,
    message,
    plan_tensor,
)

_GRACE_S = 5.0


class SyncError(RuntimeError):
    """A worker or the server was lost, or stayed silent for longer than the timeout."""


class BarrierSync:
    """Bulk synchronous rounds: one weighted reduce to the server rank and one broadcast back.

    Args:
        weights: This process's model.
        server: On the server rank the server, elsewhere None.
        planner: Tells who trains on how much; on the server rank it may change its mind.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        outgoing: Weighted gradients, which are summed; None for weights, which are averaged.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        planner: Planner,
        worker: int | None,
        epochs: int,
        rounds_per_epoch: int,
        outgoing: Tensor | None = None,
    ) -> None:
        self.weights = weights
        self.server = server
        self.worker = worker
        self.workers = [] if worker is None else [worker]
        self._plans = SharedPlans(planner)
        self._outgoing = outgoing
        self._epochs = epochs
        self._rounds_per_epoch = rounds_per_epoch
        self._has_global = False
        self._waited_s = 0.0

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this worker's rounds in order and, on every rank, the end of each epoch."""
        for epoch in range(self._epochs):
            for round_ in range(self._rounds_per_epoch):
                if self.worker is None:  # a dedicated server takes part in every collective
                    self._plans.at(epoch, round_)
                    self._receive()
                    self._meet(epoch, round_, None)
                else:
                    yield Round((self.worker,), epoch, round_)
            self._receive()
            yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

    def plan(self, turn: Round) -> Segment:
        """Return the plan in force in a turn (a collective where it may have changed)."""
        return self._plans.at(turn.epoch, turn.round)

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model (a collective: every rank is in it)."""
        self._receive()

    def push(self, reports: Sequence[RoundReport]) -> None:
        """Add the model's weights to the weighted mean, which becomes the global weights."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        self._waited_s = 0.0
        self._meet(report.epoch, report.round, report)

    def reports(self) -> Iterator[RoundReport]:
        """Yield the reports of rounds pushed since the last call (on the server rank)."""
        while self.server is not None and self.server.reports:
            yield self.server.reports.popleft()

    def load(self, end: EpochEnd) -> None:
        """The model already holds the global weights when an epoch ends."""

    def close(self) -> None:
        """Nothing to release: the process group is Accelerate's."""

    @torch.no_grad()
    def _meet(self, epoch: int, round_: int, report: RoundReport | None) -> None:
        began = time.perf_counter()
        vector = self.weights.vector
        if self._outgoing is not None:
            vector = self._outgoing
            if report is None:
                vector.zero_()
        else:
            total = sum(w.merge_weight for w in self._plans.at(epoch, round_).plan.workers)
            vector.mul_(report.merge_weight / total if report else 0.0)
        dist.reduce(vector, dst=SERVER_RANK)
        reports = exchange_reports([report] if report else [], vector.device)
        if self.server is not None:
            self.server.push_joined(vector, reports)
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike
        self._has_global = False
        self._waited_s += time.perf_counter() - began

    @torch.no_grad()
    def _receive(self) -> None:
        if self._has_global:
            return
        began = time.perf_counter()
        if self.server is not None:
            self.weights.load(self.server.snapshot())
        dist.broadcast(self.weights.vector, src=SERVER_RANK)
        self._has_global = True
        self._waited_s += time.perf_counter() - began


class ServerSync:
    """Stale synchronous or asynchronous rounds through a server on rank 0.

    Every other rank shares a gloo group of two with rank 0, where a thread of its own serves it: a
    push is merged under a lock, a pull is answered as soon as the clocks allow. A lost pair leaves
    the other pairs as they are; the run then ends with the name of the rank that is missing.

    Args:
        weights: This process's model.
        server: On rank 0 the server (its weights in host memory), elsewhere None.
        planner: Tells who trains on how much; that of rank 0 is asked where plans may change.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        timeout_s: Longest silence of a peer before the run gives up.
        outgoing: What a push hands over; None for the weights.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        planner: Planner,
        worker: int | None,
        epochs: int,
        rounds_per_epoch: int,
        timeout_s: float,
        outgoing: Tensor | None = None,
    ) -> None:
        self.weights = weights
        self._planner = planner
        self._outgoing = weights.vector if outgoing is None else outgoing
        self._segment: tuple[int, Segment] | None = None  # the epoch's, as the server gave it
        self._waited_s = 0.0
        self.server = server
        self.worker = worker
        self.workers = [] if worker is None else [worker]
        self._epochs = epochs
        self._rounds_per_epoch = rounds_per_epoch
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        # new_group is a collective, so that every rank makes every pair, in the same order.
        pairs = {
            rank: dist.new_group(
                [SERVER_RANK, rank], backend="gloo", timeout=timedelta(seconds=timeout_s)
            )
            for rank in range(1, dist.get_world_size())
        }
        self._changed = threading.Condition()  # guards the server
        self._failure: SyncError | None = None
        self._threads: list[threading.Thread] = []
        if server is None:
            self._pair = pairs[self._rank]
            self._staging = _host_like(weights.vector)
        else:
            for rank, pair in pairs.items():
                thread = threading.Thread(
                    target=self._serve, args=(rank, pair), name=f"serve-{rank}", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this worker's rounds in order; on rank 0 also each epoch's end, as it comes."""
        if self.worker is not None:
            for clock in range(self._epochs * self._rounds_per_epoch):
                yield Round((self.worker,), *divmod(clock, self._rounds_per_epoch))
                yield from self._finished(wait=False)
        yield from self._finished(wait=True)

    def plan(self, turn: Round) -> Segment:
        """Return the plan in force in a turn, asking the server where it may have changed."""
        if self._planner.balance == "none":
            return self._planner.at(turn.epoch)
        if self.server is not None:
            with self._changed:
                return self._planner.at(turn.epoch)
        if self._segment is None or self._segment[0] != turn.epoch:
            rows = plan_tensor(len(self._planner.current_at(turn.epoch).workers), CPU)
            with _exchange():
                dist.send(message(PLAN, epoch=turn.epoch), SERVER_RANK, group=self._pair)
                dist.recv(rows, SERVER_RANK, group=self._pair)
            self._segment = turn.epoch, decode_plan(rows, self._planner.current_at(turn.epoch))
        return self._segment[1]

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        (worker,) = turn.workers
        began = time.perf_counter()
        if self.server is not None:
            with self._changed:
                self._wait_for(lambda: self.server.may_start(worker), f"worker {worker}'s turn")
                weights = self.server.pull(worker)
            self.weights.load(weights)
        else:
            with _exchange():
                dist.send(message(PULL), SERVER_RANK, group=self._pair)
                dist.recv(self._staging, SERVER_RANK, group=self._pair)
            self.weights.load(self._staging)
        self._waited_s += time.perf_counter() - began

    def push(self, reports: Sequence[RoundReport]) -> None:
        """Give the worker's weights, or gradients, to the server."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        began = time.perf_counter()
        if self.server is not None:
            self._merge(self._outgoing.to("cpu"), report)
        else:
            self._staging.copy_(self._outgoing)
            with _exchange():
                dist.send(message(PUSH, report), SERVER_RANK, group=self._pair)
                dist.send(self._staging, SERVER_RANK, group=self._pair)
        self._waited_s = time.perf_counter() - began

    def reports(self) -> Iterator[RoundReport]:
        """Yield the reports of rounds pushed since the last call (on the server rank)."""
        while self.server is not None and self.server.reports:
            yield self.server.reports.popleft()  # a deque's ends are safe between threads

    def load(self, end: EpochEnd) -> None:
        """Load the global weights of an epoch's end into the model."""
        self.weights.load(end.weights)

    def close(self) -> None:
        """Tell the server that this worker is done; on rank 0 wait for the serving threads."""
        if self.server is None:
            with _exchange():
                dist.send(message(DONE), SERVER_RANK, group=self._pair)
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _finished(self, *, wait: bool) -> Iterator[EpochEnd]:
        if self.server is None:
            return
        while True:
            with self._changed:
                if wait and not self.server.finished and not self._all_done():
                    self._wait_for(lambda: self.server.finished, "the other workers' last rounds")
                self._raise_failure()
                if not self.server.finished:
                    return
                end = self.server.finished.popleft()
            yield end

    def _all_done(self) -> bool:
        return min(self.server.clocks) >= self._epochs * self._rounds_per_epoch

    def _merge(self, weights: Tensor, report: RoundReport) -> None:
        with self._changed:
            self.server.push(weights, report)
            self._changed.notify_all()

    def _wait_for(self, predicate: Callable[[], object], what: str) -> None:
        # A pair's own timeout comes first: it knows which rank is missing.
        patience = self._timeout_s + _GRACE_S
        done = self._changed.wait_for(lambda: self._failure or predicate(), patience)
        self._raise_failure()
        if not done:
            clocks = ", ".join(f"{w}: {c}" for w, c in enumerate(self.server.clocks))
            raise SyncError(
                f"worker_timeout of {self._timeout_s:g} s passed while waiting for {what} "
                f"(rounds pushed per worker: {clocks})"
            )

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _serve(self, rank: int, pair: dist.ProcessGroup) -> None:
        """Answer one rank's messages until it is done (runs in a thread on rank 0)."""
        head, buffer = message(DONE), _host_like(self.weights.vector)
        worker = rank - (1 if self.worker is None else 0)
        try:
            while True:
                dist.recv(head, rank, group=pair)
                if head[0] == DONE:
                    return
                if head[0] == PUSH:
                    dist.recv(buffer, rank, group=pair)
                    self._merge(buffer, decode(head[1:]))
                elif head[0] == PLAN:
                    with self._changed:
                        segment = self._planner.at(int(head[1]))
                    dist.send(encode_plan(segment, CPU), rank, group=pair)
                else:
                    with self._changed:
                        self._wait_for(lambda: self.server.may_start(worker), "a slower worker")
                        weights = self.server.pull(worker)
                    dist.send(weights, rank, group=pair)
        except Exception as error:
            with self._changed:
                reason = str(error).splitlines()[0]
                self._failure = self._failure or SyncError(f"rank {rank} was lost: {reason}")
                self._changed.notify_all()


@contextmanager
def _exchange() -> Iterator[None]:
    """Turn a failed exchange with rank 0 into a `SyncError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise SyncError(f"the server (rank {SERVER_RANK}) was lost: {reason}") from error


def _host_like(vector: Tensor) -> Tensor:
    """Return host memory for a copy of the vector, pinned where it comes from a CUDA device."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
