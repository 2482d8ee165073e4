"""How real processes meet without a barrier: through a server on rank 0.

Here are the processes that it serves; `dbsl.cluster.serving` has the server's. Every wait ends: by
an answer, or because the other process was silent for too long. A process that is heard may take as
long as it takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import RunFinished, SyncError
from dbsl.cluster.alive import Pulse
from dbsl.cluster.launch import Admission, Door
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.serving import STOP, ServingCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import (
    SERVER_RANK,
    Ending,
    Kind,
    Transfer,
    decode_segment,
    hear,
    pairs_with_server,
    receive,
    report_rows,
    segment_room,
    send,
    tell,
)
from dbsl.plan.types import RoundReport, Segment, Turn

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
        weights: As for `Cluster`, like all that is not named here.
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
    narrow = wire if wire != weights.vector.dtype else None
    # Weights lose less as their change, which both sides then count from what was pulled.
    sends_changes = narrow is not None and outgoing is None
    common |= {"outgoing": outgoing, "timeout_s": timeout_s}
    common |= {"narrow": narrow, "sends_changes": sends_changes}
    if admission is not None:
        cluster = ServedCluster(weights, pair=admission.pair, **common)
        cluster.begin_at(admission.clock, admission.sequence)
        return cluster
    pairs = pairs_with_server(timedelta(seconds=max(timeout_s, _START_S)))
    if server is not None:
        return ServingCluster(weights, server, pairs=pairs, door=door, **common)
    return ServedCluster(weights, pair=pairs[SERVER_RANK], **common)


class ServedCluster(Cluster):
    """A worker's process: it asks rank 0 for plans and weights, and pushes to it.

    `pair` is the connection with rank 0; for the rest see `through_server` and `ServingCluster`.
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
        self._asks_to_stop = False
        self._timeout_s = timeout_s
        says = lambda: STOP if self._asks_to_stop else ""  # noqa: E731
        self._pulse = Pulse(SERVER_RANK, pair, timeout_s, asks=True, says=says)
        self._whole = Transfer(weights.vector, pair)
        self._narrow = Transfer(weights.vector, pair, narrow)

    def begin_at(self, clock: int, sequence: int) -> None:
        """Begin with so many rounds behind this worker; the save of this number is over."""
        self._clock, self._announced = clock, (sequence, -1)

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
        rows = segment_room(len(like.workers))
        with self._waiting(), self._exchange():
            tell(self._pair, Kind.PLAN)
            receive(rows, self._pair)
        return decode_segment(rows, like)

    def pull(self, turn: Turn) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        with self._waiting(), self._exchange():
            ending = self._ask(Kind.PULL)
            if ending == Ending.GOES_ON:
                self._whole.receive(self.weights.vector, copy=self._pulled)
                self._can_change = self._pulled is not None
        if ending == Ending.FINISHED:
            self.finish()
            raise RunFinished
        if ending == Ending.STOPPED:
            self._interrupted = True
            self.on_stop()

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Give the worker's weights, or gradients, to the server; True: they were refused."""
        report = self._timed(*reports)
        with self._waiting(), self._exchange():
            # It is on its way while the next round is prepared, and there before the pull ends.
            kind, rows = Kind.PUSH_CHANGE if self._can_change else Kind.PUSH, report_rows(report)
            tell(self._pair, kind, len(rows))
            send(rows, self._pair)
            if self._can_change:
                self._narrow.send(self.outgoing, minus=self._pulled)
            elif self._pulled is None:
                self._narrow.send(self.outgoing)
            else:  # where changes are sent: a run was resumed inside this round
                self._whole.send(self.outgoing)
        return report.refused

    def announce(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Return the save that rank 0 has announced."""
        return self._announced

    def leave(self, sequence: int) -> int:
        """Stop being served; return the number of the save to take part in."""
        with self._exchange():
            self._ask(Kind.LEAVE)
        return self._announced[0]

    def interrupt(self) -> None:
        """Stop after this step, and have rank 0 stop the run: this process may wait for others."""
        super().interrupt()
        self._asks_to_stop = True

    def close(self) -> None:
        """Tell the server that this worker is done."""
        self._pulse.end()
        self._pulse.wait(self._timeout_s)
        with self._exchange():
            tell(self._pair, Kind.DONE)
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
            reason, rank_0 = self._pulse.reason(error), f"rank {SERVER_RANK}"
            if self._pulse.left_out:
                said = f"{rank_0} has left this process out: {reason}; launch it again to join"
            else:
                said = f"the server ({rank_0}) was lost: {reason}"
            raise SyncError(said) from error

    def _ask(self, kind: Kind) -> Ending:
        """Ask rank 0, which also tells of the save to take part in; return whether the run ends."""
        tell(self._pair, kind)
        ending, sequence, epoch = hear(self._pair, Ending)
        self._announced = sequence, epoch
        self._sent()
        return ending

    def _sent(self) -> None:
        """Wait until the last push has left this process."""
        self._whole.wait()
        self._narrow.wait()
