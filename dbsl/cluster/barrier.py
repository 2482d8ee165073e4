"""How real processes meet at a barrier each round, on Accelerate's process group."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.numbers import as_counts
from dbsl.cluster.messages import SERVER_RANK, ControlGroup, FusedSum, SharedPlans
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.follow import Planner
from dbsl.plan.turns import Action, EpochEnd, Restart, Round, RoundReport
from dbsl.plan.types import CurrentPlan


class BarrierCluster(Cluster):
    """Bulk synchronous rounds: one weighted sum over all ranks, with their reports in it.

    The server's optimizer, where gradients are pushed, is on one rank: weights then come back in a
    broadcast, as they do before the first round and where a whole round was refused.

    Args:
        weights: This process's model.
        server: On the server rank the server, elsewhere None.
        planner: Tells who trains on how much; on the server rank it may change its mind.
        worker: The worker of this process; None on a dedicated server.
        epochs: Epochs to run.
        rounds_per_epoch: Rounds that make an epoch.
        outgoing: Weighted gradients, which are summed; None for weights, which are averaged.
        control: How processes agree on what to do.
        wire: Weights travel as their change since the pull where that is less than their dtype.
        at_server: Whether the server makes other weights of the mean, which come back in a
            broadcast, too.
        gathers: Whether the server gets every worker's weights, for a merge rule of one's own.
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
        control: ControlGroup,
        wire: torch.dtype | None = None,
        at_server: bool = False,
        gathers: bool = False,
    ) -> None:
        self.weights = weights
        self.server = server
        self.worker = worker
        self.workers = [] if worker is None else [worker]
        self._plans = SharedPlans(planner)
        self.outgoing = weights.vector if outgoing is None else outgoing
        self._averages = outgoing is None
        self._at_server = at_server
        self._gathers = gathers
        self._epochs = epochs
        self._rounds_per_epoch = rounds_per_epoch
        self.control = control
        self._clock = 0  # rounds that are over
        self._has_global = False
        self._waited_s = 0.0
        summed = self.outgoing[:0] if gathers else self.outgoing  # then their reports alone
        self._sum = FusedSum(summed, wire or self.outgoing.dtype)
        # What the workers' changes count from; only where changes are what travels.
        changes = self._averages and self._sum.vector.dtype != self.outgoing.dtype
        self._pulled = weights.vector.clone() if changes else None
        self.refused = 0  # rounds that were not finite

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this worker's rounds in order and, on every rank, the end of each epoch."""
        while self._clock < self._epochs * self._rounds_per_epoch:
            epoch, round_ = divmod(self._clock, self._rounds_per_epoch)
            if self.worker is None:  # a dedicated server takes part in every collective
                self._plans.at(epoch, round_)
                self._receive()
                self.idle()
                self._meet(epoch, round_, None)
            else:
                yield Round((self.worker,), epoch, round_)
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                self._receive()
                yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

    def plan(self, turn: Round) -> CurrentPlan:
        """Return the plan in force in a turn (a collective where it may have changed)."""
        return self._plans.at(turn.epoch, turn.round)

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model (a collective: every rank is in it)."""
        self._receive()

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Add the model's weights to the weighted mean, which becomes the global weights.

        True: they were refused.
        """
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        self._waited_s = 0.0
        self._meet(report.epoch, report.round, report)
        return report.refused

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return what all processes do after this step: the strongest of their wishes.

        They ask each other where a round's steps are over, or where one of them is to stop: the
        others are in the same round, and hear of it when they come to its end.
        """
        if not round_over and action != Action.STOP:
            return Action.GO_ON
        return Action(*self.control.highest(action))

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is and, on the server rank, the server's state.

        This process's weights are the model's; they are not in here.
        """
        return {
            "clock": self._clock,
            "has_global": self._has_global,
            "refused": self.refused,
            "waited_s": self._waited_s,
            "pulled": self._pulled,
            "server": self.server and self.server.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._clock, self.refused = as_counts([state["clock"], state["refused"]], 2)
        self._has_global = bool(state["has_global"])
        self._waited_s = state["waited_s"]
        if self._pulled is not None:
            if state.get("pulled") is None:
                raise ValueError("wire must be as it was when the checkpoint was made, got bf16")
            self._pulled.copy_(state["pulled"])
        if self.server is not None:
            self.server.load_state_dict(state["server"])

    @torch.no_grad()
    def _gather(self, report: RoundReport | None) -> None:
        began = time.perf_counter()
        self.control.enter()
        reports = self.control.with_lines(self._sum.exchange(report), report)
        self.refused += sum(r.refused for r in reports)
        ranks = range(dist.get_world_size())
        pushed = None if self.server is None else [torch.empty_like(self.outgoing) for _ in ranks]
        self.control.enter()
        dist.gather(self.outgoing, pushed, dst=SERVER_RANK)
        self._has_global = False
        if self.server is not None:
            workers = pushed[len(pushed) - len(reports) :]  # a dedicated server comes first
            self.server.push_each(workers, reports)
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike
        self._waited_s += time.perf_counter() - began

    @torch.no_grad()
    def _meet(self, epoch: int, round_: int, report: RoundReport | None) -> None:
        if self._gathers:
            self._gather(report)
            return
        began = time.perf_counter()
        total = sum(w.merge_weight for w in self._plans.at(epoch, round_).plan.workers)
        summed = self._sum.vector
        if report is None or report.refused:
            summed.zero_()  # zero times what is not finite would not be
        elif not self._averages:
            summed.copy_(self.outgoing)
        elif self._pulled is None:
            torch.mul(self.outgoing, report.merge_weight / total, out=summed)
        else:
            change = self.outgoing - self._pulled
            summed.copy_(change.mul_(report.merge_weight / total))
        self.control.enter()
        reports = self.control.with_lines(self._sum.exchange(report), report)
        self.refused += sum(r.refused for r in reports)
        taken = [r.merge_weight for r in reports if not r.refused]
        if self._averages and len(taken) < len(reports) and taken:
            summed.mul_(total / sum(taken))
        if self._averages and taken and self._pulled is not None:
            summed = self._pulled.add_(summed)
        self._has_global = self._averages and bool(taken) and not self._at_server
        if self._has_global:
            self.weights.load(summed)
        if self.server is not None:
            joined = summed.to(self.outgoing.dtype)
            self.server.push_joined(joined if taken else None, reports)
            self.server.finished.clear()  # turns() says when an epoch ends, on every rank alike
        self._waited_s += time.perf_counter() - began

    @torch.no_grad()
    def _receive(self) -> None:
        if self._has_global:
            return
        began = time.perf_counter()
        if self.server is not None:
            snapshot = self.server.snapshot()
            self.weights.load(snapshot)
            self.server.release(snapshot)
        self.control.enter()
        dist.broadcast(self.weights.vector, src=SERVER_RANK)
        if self._pulled is not None:
            self._pulled.copy_(self.weights.vector)
        self._has_global = True
        self._waited_s += time.perf_counter() - began

    def restart(self, start: Restart) -> None:
        """Go on where workers of another number stopped."""
        self._clock = start.clock
        if self.server is not None:
            self.server.restart(start)
