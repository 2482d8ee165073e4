"""How real processes meet without a barrier: through a server on rank 0.

It offers what `cluster.SimulatedCluster` offers in one process: `turns` (whose round is next, when
an epoch ends), `pull`, `push` and `load`. Every wait ends: by an answer, or because the other
process was silent for too long. A process that is heard may take as long as it takes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SyncError
from dbsl.base.numbers import as_counts
from dbsl.cluster.liveness import Pulse
from dbsl.cluster.messages import (
    CPU,
    DONE,
    LEAVE,
    NOTHING_ANNOUNCED,
    PLAN,
    PULL,
    PUSH,
    PUSH_CHANGE,
    SERVER_RANK,
    answer,
    check_report,
    decode,
    decode_plan,
    encode_lines,
    encode_plan,
    line_rows,
    message,
    message_kind,
    message_numbers,
    pairs_with_server,
    plan_tensor,
    read_answer,
    with_lines,
)
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.transfer import Transfer, receive, send
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.follow import Planner
from dbsl.plan.turns import Action, EpochEnd, LostWorker, Restart, Round, RoundReport
from dbsl.plan.types import CurrentPlan

_GRACE_S = 5.0
_START_S = 60.0  # that processes may come to their start apart, at least
_STOP_PATIENCE_S = 20.0  # launchers kill what has not ended 30 s after they asked it to


class ServerCluster(Cluster):
    """Stale synchronous or asynchronous rounds through a server on rank 0.

    Every other rank shares a gloo group of two with rank 0, where a thread of its own serves it: a
    push is merged under a lock, a pull is answered as soon as the clocks allow. A lost pair leaves
    the other pairs as they are: its worker is dropped, and the others share its samples.

    Args:
        weights: This process's model.
        server: On rank 0 the server (its weights in host memory), elsewhere None.
        planner: Tells who trains on how much; that of rank 0 is asked.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        timeout_s: Longest silence of a worker before it counts as lost, while it computes, too; of
            the server 5 s more.
        outgoing: What a push hands over; None for the weights.
        wire: What pushes travel as. Where that is less than the weights' dtype, gradients are
            rounded to it, and of weights their change since the pull.
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
        wire: torch.dtype | None = None,
    ) -> None:
        self.weights = weights
        self._planner = planner
        self.outgoing = weights.vector if outgoing is None else outgoing
        self._waited_s = 0.0
        self.server = server
        self.worker = worker
        self.workers = [] if worker is None else [worker]
        self._clock = 0  # rounds of this process's worker that are over
        self._rounds = epochs * rounds_per_epoch
        self._rounds_per_epoch = rounds_per_epoch
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        patience = timedelta(seconds=max(timeout_s, _START_S))
        pairs = pairs_with_server(patience)
        self._announced = NOTHING_ANNOUNCED  # the save that every process is to take part in
        self._lost: deque[LostWorker] = deque()  # workers, until they are told of
        self._stopping = False
        self._interrupted = False
        self._changed = threading.Condition()  # guards the server
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []
        narrow = wire if wire != weights.vector.dtype else None
        # Weights lose less as their change, which both sides then count from what was pulled.
        self._sends_changes = narrow is not None and outgoing is None
        self._pulled = torch.empty_like(weights.vector) if self._sends_changes else None
        self._can_change = False  # `_pulled` is what the round began with
        if server is None:
            self._pair = pairs[SERVER_RANK]
            # Later than the server would: where the network is at fault, that says who was lost.
            self._pulse = Pulse(SERVER_RANK, self._pair, timeout_s + _GRACE_S, asks=True)
            self._whole = Transfer(weights.vector, SERVER_RANK, self._pair)
            self._narrow = Transfer(weights.vector, SERVER_RANK, self._pair, narrow)
        else:
            self._narrow_dtype = narrow
            for rank, pair in pairs.items():
                pulse = Pulse(rank, pair, timeout_s, asks=False, on_lost=self._wake)
                thread = threading.Thread(
                    target=self._serve, args=(rank, pair, pulse), name=f"serve-{rank}", daemon=True
                )
                self._threads.append(thread)

    @property
    def refused(self) -> int:
        """Rounds that were not finite, so far; known on rank 0."""
        return self.server.refused if self.server is not None else 0

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this worker's rounds in order; on rank 0 also each epoch's end, as it comes."""
        for thread in self._threads:  # not before a resumed run's state is here
            thread.start()
        if self.worker is not None:
            while self._clock < self._rounds:
                yield Round((self.worker,), *divmod(self._clock, self._rounds_per_epoch))
                self._clock += 1
                yield from self._finished(wait=False)
        yield from self._finished(wait=True)

    def plan(self, turn: Round) -> CurrentPlan:
        """Return the plan in force in a turn, asking the server, which may have changed it."""
        if self.server is not None:
            with self._changed:
                return self._planner.at(turn.epoch, turn.round)
        if turn.epoch in self._planner.fixed:  # from a checkpoint that every rank has read
            return self._planner.at(turn.epoch, turn.round)
        plan = self._planner.current_at(turn.epoch)
        rows = plan_tensor(len(plan.workers), CPU)
        with self._exchange():
            send(message(PLAN, epoch=turn.epoch, round_=turn.round), SERVER_RANK, self._pair)
            receive(rows, SERVER_RANK, self._pair)
        return decode_plan(rows, plan)

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        (worker,) = turn.workers
        began = time.perf_counter()
        if self.server is not None:
            with self._changed:
                self._wait_for(lambda: self._interrupted or self.server.may_start(worker))
                stop = self._interrupted
                if not stop:
                    weights = self.server.pull(worker)
                    self.weights.load(weights)
                    self.server.release(weights)
        else:
            head = answer()
            with self._exchange():
                send(message(PULL), SERVER_RANK, self._pair)
                receive(head, SERVER_RANK, self._pair)
                self._sent()
                stop, self._announced = read_answer(head)
                if not stop:
                    self._whole.receive(self.weights.vector, copy=self._pulled)
                    self._can_change = self._pulled is not None
        if stop:
            self._interrupted = True
            self.on_stop()
        self._waited_s += time.perf_counter() - began

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Give the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        began = time.perf_counter()
        if self.server is not None:
            self._merge(self.outgoing.to("cpu"), report)
        else:
            with self._exchange():
                # It is on its way while the next round is prepared, and there before the pull ends.
                if self._can_change:
                    send(message(PUSH_CHANGE, report), SERVER_RANK, self._pair)
                    self._send_lines(report)
                    self._narrow.send(self.outgoing, minus=self._pulled)
                else:  # where changes are sent: a run was resumed inside this round
                    send(message(PUSH, report), SERVER_RANK, self._pair)
                    self._send_lines(report)
                    (self._whole if self._sends_changes else self._narrow).send(self.outgoing)
        self._waited_s = time.perf_counter() - began
        return report.refused

    def lost(self) -> Iterator[LostWorker]:
        """Yield the workers that were lost since the last call (on rank 0)."""
        while self._lost:
            yield self._lost.popleft()

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return what this process does: what it would, or what the server has asked for."""
        return Action.STOP if self._interrupted else action

    def announce(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Return the save to take part in; rank 0 asks every worker to, when it pulls next."""
        if self.server is not None:
            self._announced = (sequence, epoch)
        return self._announced

    @property
    def announced(self) -> int:
        """Number of the last save that every process is to take part in."""
        return self._announced[0]

    def interrupt(self) -> None:
        """End this process's waits: the run is to stop."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def leave(self, sequence: int) -> int:
        """Stop serving, or being served; return the number of the save to take part in.

        On rank 0 that is `sequence`, and the others have until a time to leave as well: they do
        when they have heard of it, after a step or where they pull.
        """
        if self.server is None:
            head = answer()
            with self._exchange():
                send(message(LEAVE), SERVER_RANK, self._pair)
                receive(head, SERVER_RANK, self._pair)
                self._sent()
            return read_answer(head)[1][0]
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
        """Tell the server that this worker is done; on rank 0 wait for the serving threads."""
        if self.server is None:
            self._pulse.close()
            with self._exchange():
                send(message(DONE), SERVER_RANK, self._pair)
                self._sent()
        for thread in self._threads:
            thread.join(self._timeout_s)

    def held(self) -> AbstractContextManager:
        """Hold pushes up for as long as this is open."""
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is and, on rank 0, the server's state.

        This process's weights are the model's; they are not in here.
        """
        if self.server is None:
            return {"clock": self._clock, "waited_s": self._waited_s, "server": None}
        with self._changed:
            return {
                "clock": self._clock,
                "waited_s": self._waited_s,
                "server": self.server.state_dict(),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the server's clock is this worker's, too."""
        (self._clock,) = as_counts([state["clock"]], 1)
        self._waited_s = state["waited_s"]
        if self.server is not None:
            self.server.load_state_dict(state["server"])

    def restart(self, start: Restart) -> None:
        """Go on where workers of another number stopped."""
        self._clock = start.clock
        if self.server is not None:
            self.server.restart(start)

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Turn a failed exchange with rank 0 into a `SyncError`."""
        try:
            yield
        except RuntimeError as error:
            reason = self._pulse.reason(error)
            raise SyncError(f"the server (rank {SERVER_RANK}) was lost: {reason}") from error

    def _send_lines(self, report: RoundReport) -> None:
        if report.lines:
            send(encode_lines(report.lines), SERVER_RANK, self._pair)

    def _sent(self) -> None:
        """Wait until the last push has left this process."""
        self._whole.wait()
        self._narrow.wait()

    def _finished(self, *, wait: bool) -> Iterator[EpochEnd]:
        if self.server is None:
            return
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
            except Exception as error:  # of a merge rule, say: no fault of the worker's
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
        """Answer one rank's messages until it is done (runs in a thread on rank 0)."""
        worker = rank - (1 if self.worker is None else 0)
        try:
            self._converse(rank, worker, pair, pulse)
        except Exception as error:
            reason = pulse.reason(error)
            with self._changed:
                self._lose(rank, worker, reason)
                self._changed.notify_all()
            pulse.give_up()

    def _converse(self, rank: int, worker: int, pair: dist.ProcessGroup, pulse: Pulse) -> None:
        head, buffer = message(DONE), torch.empty_like(self.weights.vector, device=CPU)
        whole = Transfer(buffer, rank, pair)
        narrow = Transfer(buffer, rank, pair, self._narrow_dtype)
        pulled = torch.empty_like(buffer) if self._sends_changes else None
        has_pulled = False
        while True:
            receive(head, rank, pair)
            kind = message_kind(head)
            if kind == DONE:
                return
            if kind == LEAVE:
                with self._changed:
                    if not self._stopping:  # this process is to stop, too, and says as what
                        self._interrupted = True
                        self._changed.notify_all()
                        self._wait_for(lambda: self._stopping)
                send(answer(stop=True, announced=self._announced), rank, pair)
                return
            if kind in (PUSH, PUSH_CHANGE):
                report = decode(head[1:])
                rows = line_rows(report)
                if len(rows):
                    receive(rows, rank, pair)
                    report = with_lines(report, rows)
                if kind == PUSH_CHANGE:
                    if not has_pulled:
                        raise ValueError("a change of weights must follow a pull")
                    finite = narrow.receive(buffer, plus=pulled, check=True)
                else:
                    is_whole = self._sends_changes
                    finite = (whole if is_whole else narrow).receive(buffer, check=True)
                with self._changed:
                    clock = divmod(self.server.clocks[worker], self._rounds_per_epoch)
                check_report(report, worker, *clock)
                if not report.refused and not finite:
                    report = replace(report, refused=True)
                self._merge(buffer, report)
            elif kind == PLAN:
                epoch, round_ = message_numbers(head, self._rounds // self._rounds_per_epoch)
                with self._changed:
                    segment = self._planner.at(epoch, round_)
                send(encode_plan(segment, CPU), rank, pair)
            else:
                with self._changed:
                    self._wait_for(
                        lambda: self._interrupted or pulse.failure or self.server.may_start(worker)
                    )
                    if pulse.failure:
                        raise SyncError(pulse.failure)
                    stop = self._interrupted
                    weights = None if stop else self.server.pull(worker)
                send(answer(stop=stop, announced=self._announced), rank, pair)
                if not stop:
                    whole.send(weights, copy=pulled)
                    whole.wait()
                    has_pulled = pulled is not None
                    with self._changed:
                        self.server.release(weights)

    def _lose(self, rank: int, worker: int, reason: str) -> None:
        """Go on without a worker, if there is another; called with the lock held."""
        if self._failure or self._stopping or self.server.clocks[worker] >= self._rounds:
            return  # it has nothing more to give
        if self.server.active == {worker}:
            self._failure = SyncError(f"rank {rank}, the last worker, was lost: {reason}")
            return
        clocks = dict(enumerate(self.server.clocks))
        self.server.drop(worker)
        try:
            samples = self._planner.drop(worker, clocks, self.server.active, self._rounds)
        except Exception as error:  # the others cannot carry its share
            self._failure = SyncError(
                f"rank {rank} was lost ({reason}), and without it there is no plan: {error}"
            )
            return
        self._lost.append(LostWorker(rank, worker, clocks[worker], samples, reason))
