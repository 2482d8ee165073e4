"""How real processes meet at a barrier each round, on Accelerate's process group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import SERVER_RANK
from dbsl.plan.types import Action, EpochEnd, RoundReport, Turn


class BarrierCluster(Cluster):
    """Bulk synchronous rounds: a weighted sum over all ranks, which is how `mean` is taken here.

    The server's optimizer, where gradients are pushed, is on one rank: weights then come back in a
    broadcast, as they do before the first round and where a whole round was refused. With
    `at_server` they always do: the server's rule makes other weights of the mean. With `gathers`
    the server gets every worker's weights, for a fork's own merge rule.

    Pushes travel as `wire`. Where that is less than the weights' dtype, gradients are rounded to
    it, and of weights their change since the pull. All else is as for `Cluster`.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None,
        *,
        outgoing: Tensor | None = None,
        wire: torch.dtype | None = None,
        at_server: bool = False,
        gathers: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(weights, server, outgoing=outgoing, **common)
        self._averages, self._at_server, self._gathers = outgoing is None, at_server, gathers
        self._has_global = False
        dtype = wire or self.outgoing.dtype
        summed = self.outgoing[:0] if gathers else self.outgoing
        self._sum = torch.empty_like(summed, dtype=dtype)  # this rank's share, then all ranks'
        # What the workers' changes count from; only where changes are what travels.
        changes = self._averages and dtype != self.outgoing.dtype
        self._pulled = weights.vector.clone() if changes else None

    def turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield this worker's rounds in order and, on every rank, the end of each epoch."""
        while self._clock < self._rounds:
            epoch, round_ = divmod(self._clock, self._rounds_per_epoch)
            if not self.workers:  # a dedicated server takes part in every collective
                self.segment(Turn((), epoch, round_))
                self._receive()
                self.idle()
                self._hand_over(None)
            else:
                yield Turn(self.workers, epoch, round_)
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                self._receive()
                yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

    def pull(self, turn: Turn) -> None:
        """Bring the global weights into the model (a collective: every rank is in it)."""
        self._receive()

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return what all processes do after this step: the strongest of their wishes.

        They ask each other where a round's steps are over, or where one of them is to stop: the
        others are in the same round, and hear of it when they come to its end.
        """
        if not round_over and action != Action.STOP:
            return Action.GO_ON
        return Action(*self.control.highest(action))

    def state_dict(self) -> dict[str, Any]:
        """See `Cluster.state_dict`."""
        return super().state_dict() | {"has_global": self._has_global, "pulled": self._pulled}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Cluster.load_state_dict`."""
        super().load_state_dict(state)
        self._has_global = state["has_global"]
        if self._pulled is not None:
            if state["pulled"] is None:
                raise SettingError("wire must be as it was when the checkpoint was made, got bf16")
            self._pulled.copy_(state["pulled"])

    @torch.no_grad()
    def _hand_over(self, report: RoundReport | None) -> None:
        """Merge what all workers push; `report` is None on a dedicated server."""
        total = sum(w.merge_weight for w in self._segment.plan.workers)
        if self._gathers:
            count = 0 if self.server is None else dist.get_world_size()
            pushed = [torch.empty_like(self.outgoing) for _ in range(count)]
            self.control.enter()
            dist.gather(self.outgoing, pushed or None, dst=SERVER_RANK)
            self._has_global = False
        else:
            self._weigh(report, total)
            self.control.enter()
            dist.all_reduce(self._sum)
        reports = self.control.gather_reports(report)
        self._refused += sum(r.refused for r in reports)
        if not self._gathers:
            self._take(reports, total)
        elif self.server is not None:
            for each in reports:
                self.server.pull(each.worker)  # all began with these weights
            # A dedicated server comes first.
            for weights, each in zip(pushed[-len(reports) :], reports, strict=True):
                self.server.push(weights, each)
        if self.server is not None:
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike

    def _weigh(self, report: RoundReport | None, total: float) -> None:
        if report is None or report.refused:
            self._sum.zero_()  # zero times what is not finite would not be
        elif not self._averages:
            self._sum.copy_(self.outgoing)
        elif self._pulled is None:
            torch.mul(self.outgoing, report.merge_weight / total, out=self._sum)
        else:
            change = self.outgoing - self._pulled
            self._sum.copy_(change.mul_(report.merge_weight / total))

    def _take(self, reports: Sequence[RoundReport], total: float) -> None:
        """Take the sum of all ranks, to which refused work has added nothing."""
        summed = self._sum
        taken = [r.merge_weight for r in reports if not r.refused]
        if self._averages and taken:
            if len(taken) < len(reports):
                summed.mul_(total / sum(taken))
            if self._pulled is not None:
                summed = self._pulled.add_(summed)
        self._has_global = self._averages and bool(taken) and not self._at_server
        if self._has_global:
            self.weights.load(summed)
        if self.server is not None:
            self.server.push_joined(summed.to(self.outgoing.dtype) if taken else None, reports)

    @torch.no_grad()
    def _receive(self) -> None:
        if self._has_global:
            return
        with self._waiting():
            if self.server is not None:
                self.weights.load(self.server.snapshot())
            self.control.enter()
            dist.broadcast(self.weights.vector, src=SERVER_RANK)
            if self._pulled is not None:
                self._pulled.copy_(self.weights.vector)
            self._has_global = True
