"""How real processes meet: a barrier on Accelerate's process group, or a server on rank 0.

Each carrier offers what `cluster.SimulatedCluster` offers in one process: `turns` (whose round is
next, when an epoch ends), `pull`, `push` and `load`. Every wait ends, by an answer or by a timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, fields
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.cluster import SimulatedCluster
from dbsl.plan import Plan
from dbsl.server import EpochEnd, Merge, Round, RoundReport, Server, Sync
from dbsl.weights import FlatWeights

SERVER_RANK = 0
_GRACE_S = 5.0


class SyncError(RuntimeError):
    """A worker or the server was lost, or stayed silent for longer than the timeout."""


def connect(
    weights: FlatWeights,
    *,
    sync: Sync,
    merge: Merge | None,
    staleness: int,
    epochs: int,
    rounds_per_epoch: int,
    plan_of: Callable[[int], Plan],
    timeout_s: float,
    dedicated_server: bool = False,
) -> SimulatedCluster | BarrierSync | ServerSync:
    """Return the carrier that a run's processes and `sync` ask for, with the server where it lives.

    Args:
        weights: This process's model.
        sync: How workers meet.
        merge: Merge rule; None for `mean` with a barrier and `ratio` without.
        staleness: Rounds that the leader may be ahead with `ssp`.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        plan_of: Plan of an epoch.
        timeout_s: Longest silence of a peer.
        dedicated_server: Rank 0 has no worker.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    server = None
    if rank == SERVER_RANK:
        server = Server(
            weights.vector if world_size == 1 or sync == "bsp" else weights.vector.cpu(),
            len(plan_of(0).workers),
            rule=merge or ("mean" if sync == "bsp" else "ratio"),
            staleness={"bsp": 0, "ssp": staleness, "asp": None}[sync],
            rounds_per_epoch=rounds_per_epoch,
        )
    if world_size == 1:
        return SimulatedCluster(
            weights,
            server,
            epochs=epochs,
            duration=lambda worker, epoch, _: (
                plan_of(epoch).workers[worker].predicted_time_s / rounds_per_epoch
            ),
        )
    worker = rank - dedicated_server
    common = {
        "worker": worker if worker >= 0 else None,
        "epochs": epochs,
        "rounds_per_epoch": rounds_per_epoch,
    }
    if sync == "bsp":
        return BarrierSync(
            weights,
            server,
            total_weight=lambda epoch: sum(w.merge_weight for w in plan_of(epoch).workers),
            **common,
        )
    return ServerSync(weights, server, timeout_s=timeout_s, **common)


class BarrierSync:
    """Bulk synchronous rounds: one weighted reduce to the server rank and one broadcast back.

    Args:
        weights: This process's model.
        server: On the server rank the server, elsewhere None.
        total_weight: Sum of all workers' merge weights in an epoch; a push is divided by it.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        total_weight: Callable[[int], float],
        worker: int | None,
        epochs: int,
        rounds_per_epoch: int,
    ) -> None:
        self.weights = weights
        self.server = server
        self.worker = worker
        self.workers = [] if worker is None else [worker]
        self._total_weight = total_weight
        self._epochs = epochs
        self._rounds_per_epoch = rounds_per_epoch
        self._has_global = False

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this worker's rounds in order and, on every rank, the end of each epoch."""
        for epoch in range(self._epochs):
            for round_ in range(self._rounds_per_epoch):
                if self.worker is None:  # a dedicated server takes part in every collective
                    self._receive()
                    self._meet(epoch, None)
                else:
                    yield Round(self.worker, epoch, round_)
            self._receive()
            yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

    def pull(self, worker: int) -> None:
        """Bring the global weights into the model (a collective: every rank is in it)."""
        self._receive()

    def push(self, report: RoundReport) -> None:
        """Add the model's weights to the weighted mean, which becomes the global weights."""
        self._meet(report.epoch, report)

    def reports(self) -> Iterator[RoundReport]:
        """Yield the reports of rounds pushed since the last call (on the server rank)."""
        while self.server is not None and self.server.reports:
            yield self.server.reports.popleft()

    def load(self, end: EpochEnd) -> None:
        """The model already holds the global weights when an epoch ends."""

    def close(self) -> None:
        """Nothing to release: the process group is Accelerate's."""

    @torch.no_grad()
    def _meet(self, epoch: int, report: RoundReport | None) -> None:
        vector = self.weights.vector
        vector.mul_(report.merge_weight / self._total_weight(epoch) if report else 0.0)
        dist.reduce(vector, dst=SERVER_RANK)
        row = _encode(report, vector.device) if report else _empty_row(vector.device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        if self.server is not None:
            self.server.push_mean(vector, [_decode(r) for r in rows if r[0] >= 0])
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike
        self._has_global = False

    @torch.no_grad()
    def _receive(self) -> None:
        if self._has_global:
            return
        if self.server is not None:
            self.weights.load(self.server.snapshot())
        dist.broadcast(self.weights.vector, src=SERVER_RANK)
        self._has_global = True


class ServerSync:
    """Stale synchronous or asynchronous rounds through a server on rank 0.

    Every other rank shares a gloo group of two with rank 0, where a thread of its own serves it: a
    push is merged under a lock, a pull is answered as soon as the clocks allow. A lost pair leaves
    the other pairs as they are; the run then ends with the name of the rank that is missing.

    Args:
        weights: This process's model.
        server: On rank 0 the server (its weights in host memory), elsewhere None.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        timeout_s: Longest silence of a peer before the run gives up.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        worker: int | None,
        epochs: int,
        rounds_per_epoch: int,
        timeout_s: float,
    ) -> None:
        self.weights = weights
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
                yield Round(self.worker, *divmod(clock, self._rounds_per_epoch))
                yield from self._finished(wait=False)
        yield from self._finished(wait=True)

    def pull(self, worker: int) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        if self.server is not None:
            with self._changed:
                self._wait_for(lambda: self.server.may_start(worker), f"worker {worker}'s turn")
                weights = self.server.pull(worker)
            self.weights.load(weights)
            return
        with _exchange():
            dist.send(_message(_PULL), SERVER_RANK, group=self._pair)
            dist.recv(self._staging, SERVER_RANK, group=self._pair)
        self.weights.load(self._staging)

    def push(self, report: RoundReport) -> None:
        """Give the model's weights to the server."""
        if self.server is not None:
            self._merge(self.weights.vector.to("cpu"), report)
            return
        self._staging.copy_(self.weights.vector)
        with _exchange():
            dist.send(_message(_PUSH, report), SERVER_RANK, group=self._pair)
            dist.send(self._staging, SERVER_RANK, group=self._pair)

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
                dist.send(_message(_DONE), SERVER_RANK, group=self._pair)
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
        head, buffer = _message(_DONE), _host_like(self.weights.vector)
        worker = rank - (1 if self.worker is None else 0)
        try:
            while True:
                dist.recv(head, rank, group=pair)
                if head[0] == _DONE:
                    return
                if head[0] == _PUSH:
                    dist.recv(buffer, rank, group=pair)
                    self._merge(buffer, _decode(head[1:]))
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


_DONE, _PUSH, _PULL = 0.0, 1.0, 2.0
_FIELDS = fields(RoundReport)


def _encode(report: RoundReport, device: torch.device) -> Tensor:
    return torch.tensor(astuple(report), dtype=torch.float64, device=device)


def _empty_row(device: torch.device) -> Tensor:
    return torch.full((len(_FIELDS),), -1.0, dtype=torch.float64, device=device)


def _decode(row: Tensor) -> RoundReport:
    kinds = {"int": int, "float": float}
    values = row.tolist()
    return RoundReport(*(kinds[f.type](v) for f, v in zip(_FIELDS, values, strict=True)))


def _message(kind: float, report: RoundReport | None = None) -> Tensor:
    head = torch.zeros(1 + len(_FIELDS), dtype=torch.float64)
    head[0] = kind
    if report is not None:
        head[1:] = _encode(report, torch.device("cpu"))
    return head


def _host_like(vector: Tensor) -> Tensor:
    """Return host memory for a copy of the vector, pinned where it comes from a CUDA device."""
    return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=vector.is_cuda)
