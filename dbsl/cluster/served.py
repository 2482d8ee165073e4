"""How real processes meet without a barrier: through a server on rank 0.

Here are the processes that it serves; `dbsl.cluster.serving` has the server's. Every wait ends: by
an answer, or because the other process was silent for too long. A process that is heard may take as
long as it takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import RunFinished, SyncError
from dbsl.cluster.alive import Pulse
from dbsl.cluster.joining import Admission, Door, why_left_out
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.serving import ServingCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import (
    SERVER_RANK,
    Ending,
    Kind,
    Transfer,
    decode_segment,
    message,
    pairs_with_server,
    read_answer,
    receive,
    report_rows,
    segment_room,
    send,
)
from dbsl.plan.types import RoundReport, Segment, Turn

_GRACE_S = 5.0
_START_S = 60.0  # that processes may come to their start apart, at least


def through_server(
    weights: FlatWeights,
    server: Server | None,
    *,
    timeout_s: float,
    outgoing: Tensor | None = None,
    wire: torch.dtype | None = None,
    door: Door | None = None,
    admission: Admission | None = None,
    **common: Any,
) -> Cluster:
    """Return this process's side of stale synchronous or asynchronous rounds (a collective).

    Every other rank shares a gloo group of two with rank 0. A lost pair leaves the other pairs as
    they are: its worker is dropped, and the others share its samples.

    Args:
        weights: As for `Cluster`.
        server: On rank 0 the server (its weights in host memory), elsewhere None.
        timeout_s: Longest silence of a worker before it counts as lost, while it computes, too; of
            the server 5 s more.
        outgoing: As for `Cluster`.
        wire: What pushes travel as. Where that is less than the weights' dtype, gradients are
            rounded to it, and of weights their change since the pull.
        door: On rank 0, where processes that are launched again ask to join.
        admission: Of a process that joins: then this is no collective.
        **common: The rest of what a `Cluster` takes.
    """
    if admission is None:
        pairs = pairs_with_server(timedelta(seconds=max(timeout_s, _START_S)))
    else:
        pairs = {SERVER_RANK: admission.pair}
    narrow = wire if wire != weights.vector.dtype else None
    # Weights lose less as their change, which both sides then count from what was pulled.
    common |= {"outgoing": outgoing, "narrow": narrow, "timeout_s": timeout_s}
    common["sends_changes"] = narrow is not None and outgoing is None
    if server is not None:
        return ServingCluster(weights, server, pairs=pairs, door=door, **common)
    pair = pairs[SERVER_RANK]
    cluster = ServedCluster(weights, pair=pair, **common)
    if admission is not None:
        cluster.begin_at(admission.clock, admission.sequence, admission.number)
    return cluster


class ServedCluster(Cluster):
    """A worker's process: it asks rank 0 for plans and weights, and pushes to it.

    Args: see `through_server` and `ServingCluster`; `pair` is the connection with rank 0.
    """

    def __init__(
        self,
        weights: FlatWeights,
        *,
        pair: dist.ProcessGroup,
        timeout_s: float,
        narrow: torch.dtype | None,
        sends_changes: bool,
        **common: Any,
    ) -> None:
        super().__init__(weights, **common)
        self._pair = pair
        self._pulled = torch.empty_like(weights.vector) if sends_changes else None
        self._can_change = False  # this round began with `_pulled`
        self._number = 0  # the question's with which this process has joined
        # Later than the server would: where the network is at fault, that says who was lost.
        self._pulse = Pulse(SERVER_RANK, pair, timeout_s + _GRACE_S, asks=True)
        self._whole = Transfer(weights.vector, pair)
        self._narrow = Transfer(weights.vector, pair, narrow)

    def turns(self) -> Iterator[Turn]:
        """Yield this worker's rounds in order."""
        while self._clock < self._rounds:
            yield Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1

    def segment(self, turn: Turn) -> Segment:
        """Return the plan in force in a turn, waiting while the worker is too far ahead.

        The server is asked, which may have changed it.
        """
        planner = self._plans.planner
        if planner.ledger.left_by_others(turn.epoch):
            return planner.at(turn.epoch, turn.round)
        like = planner.ledger.current_at(turn.epoch)
        began, rows = time.perf_counter(), segment_room(len(like.workers))
        with self._exchange():
            send(message(Kind.PLAN), self._pair)
            receive(rows, self._pair)
        self._waited_s += time.perf_counter() - began
        return decode_segment(rows, like)

    def pull(self, turn: Turn) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        began = time.perf_counter()
        with self._exchange():
            stop, self._announced = self._ask(Kind.PULL)
            if not stop:
                self._whole.receive(self.weights.vector, copy=self._pulled)
                self._can_change = self._pulled is not None
        if stop:
            self._end(stop)
        self._waited_s += time.perf_counter() - began

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Give the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        began = time.perf_counter()
        with self._exchange():
            # It is on its way while the next round is prepared, and there before the pull ends.
            kind, rows = Kind.PUSH_CHANGE if self._can_change else Kind.PUSH, report_rows(report)
            send(message(kind, len(rows)), self._pair)
            send(rows, self._pair)
            if self._can_change:
                self._narrow.send(self.outgoing, minus=self._pulled)
            elif self._pulled is None:
                self._narrow.send(self.outgoing)
            else:  # where changes are sent: a run was resumed inside this round
                self._whole.send(self.outgoing)
        self._waited_s = time.perf_counter() - began
        return report.refused

    def begin_at(self, clock: int, sequence: int, number: int) -> None:
        """Begin with so many rounds behind this worker; the save of this number is over.

        `number` is that of the question with which it has joined.
        """
        self._clock, self._announced, self._number = clock, (sequence, -1), number

    def announce(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Return the save that rank 0 has announced."""
        return self._announced

    def leave(self, sequence: int) -> int:
        """Stop being served; return the number of the save to take part in."""
        with self._exchange():
            return self._ask(Kind.LEAVE)[1][0]

    def interrupt(self) -> None:
        """Stop after this step, and have rank 0 stop the run: this process may wait for others."""
        super().interrupt()
        self._pulse.ask_to_stop()

    def close(self) -> None:
        """Tell the server that this worker is done."""
        self._pulse.close()
        with self._exchange():
            send(message(Kind.DONE), self._pair)
            self._sent()

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is; this process's weights are the model's, and not in here."""
        return {"clock": self._clock, "waited_s": self._waited_s, "server": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the server's clock is this worker's, too."""
        self._clock, self._waited_s = state["clock"], state["waited_s"]

    @contextmanager
    def _exchange(self) -> Iterator[None]:
        """Turn a failed exchange with rank 0 into a `SyncError`."""
        try:
            yield
        except RuntimeError as error:
            reason = self._pulse.reason(error)
            if why := why_left_out(self._number):  # a process that was stopped sees no more itself
                said = (
                    f"rank {SERVER_RANK} has left this process out: {why}; launch it again to join"
                )
            elif self._pulse.is_refused:
                said = reason
            else:
                said = f"the server (rank {SERVER_RANK}) was lost: {reason}"
            raise SyncError(said) from error

    def _ask(self, kind: int) -> tuple[Ending, tuple[int, int]]:
        """Send a question; return whether the run ends, and the save to take part in."""
        answer = message(Ending.GOES_ON)
        send(message(kind), self._pair)
        receive(answer, self._pair)
        self._sent()
        return read_answer(answer)

    def _end(self, how: Ending) -> None:
        """Leave the run, which rank 0 has stopped or finished."""
        if how == Ending.FINISHED:
            self.finish()
            raise RunFinished
        self._interrupted = True
        self.on_stop()

    def _sent(self) -> None:
        """Wait until the last push has left this process."""
        self._whole.wait()
        self._narrow.wait()
