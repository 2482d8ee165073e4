"""How workers meet in each step or each round, on Accelerate's process group or in one process.

Joint steps have the same weights in all workers throughout. At a barrier all meet once a round.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import SERVER_RANK
from dbsl.plan.types import (
    NO_FAULT,
    Action,
    EpochEnd,
    Handover,
    RoundReport,
    Turn,
    report_from_plain,
)

_ASK_EVERY_S = 1.0  # that processes tell each other whether to stop or to save


class JointCluster(Cluster):
    """Turns of all workers together, in one process in simulated time or in several in real time.

    The gradients are exchanged inside a turn, by the stepper; here are the turns, the plans and the
    reports. In one process `times` gives the simulated seconds that a worker's round takes to
    compute and to exchange gradients, from (worker, epoch, round). `finish_round` is called before
    the reports are exchanged.
    """

    def __init__(
        self,
        weights: FlatWeights,
        *,
        times: Callable[[int, int, int], tuple[float, float]] | None = None,
        finish_round: Callable[[], object] = lambda: None,
        **common: Any,
    ) -> None:
        super().__init__(weights, **common)
        self._times, self._finish_round = times, finish_round
        self.time_s = 0.0 if times else None
        self._start: Tensor | None = None  # weights at the start of the round, inside one
        self._spent_s = 0.0  # on the round that a stopped run was in
        self._before = 0  # steps of it that other workers took
        self._steps, self._ask_at, self._asked_s = 0, 1, time.monotonic()

    def turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield rounds and the ends of epochs, the same in every process."""
        while self._clock < self._rounds:
            turn = Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._began, self._spent_s = time.perf_counter() - self._spent_s, 0.0
            yield turn
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                yield EpochEnd(turn.epoch, self.weights.vector, time.perf_counter())

    def pull(self, turn: Turn) -> None:
        """Keep the weights, which are here already, in case that the round is not finite."""
        self._start = self.weights.vector.clone()

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """End a round: tell every process how long its workers computed and waited.

        True: it was refused, and the weights are those of its start.
        """
        self._finish_round()
        done = self._simulated(reports) if self._times else self._gathered(*reports)
        refused = any(report.refused for report in done)
        if refused:
            self.weights.load(self._start)
            self._refused += 1
            # All have these weights: one report says what is wrong, a loss rather than its effect.
            first = min((r for r in done if r.fault), key=lambda r: r.fault, default=None)
            done = [
                replace(report, refused=True, fault=report.fault if report is first else NO_FAULT)
                for report in done
            ]
        else:
            for report in done:
                self.planner.observe(report)
        self._reports.extend(done)
        self._start, self._before = None, 0
        return refused

    def _simulated(self, reports: Sequence[RoundReport]) -> list[RoundReport]:
        """Let simulated time pass, as long as the slowest worker's round takes."""
        times = [self._times(r.worker, r.epoch, r.round) for r in reports]
        slowest = max(map(sum, times))
        self.time_s += slowest
        done = []
        for report, (compute_s, _) in zip(reports, times, strict=True):
            share = report.steps / max(report.steps + self._before, 1)  # own steps of the round
            wait_s = (slowest - compute_s) * share
            done.append(replace(report, compute_time_s=compute_s * share, wait_time_s=wait_s))
        return done

    def _gathered(self, report: RoundReport) -> list[RoundReport]:
        wait_s = max(0.0, time.perf_counter() - self._began - report.time_s)
        report = replace(report, compute_time_s=report.time_s, wait_time_s=wait_s)
        return self.control.gather_reports(report)

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return what all processes do after this step: the strongest of their wishes.

        They ask each other about once a second, at the same step.
        """
        if self.control is None:
            return action
        self._steps += 1
        if self._steps < self._ask_at:
            return Action.GO_ON
        now = time.monotonic()
        step_s = max(now - self._asked_s, 1e-6) / self._steps
        # Rank 0's steps decide when they ask again.
        own = round(min(max(_ASK_EVERY_S / step_s, 1.0), 1000.0)) if dist.get_rank() == 0 else 0
        strongest, self._ask_at = self.control.highest(action, own)
        self._steps, self._asked_s = 0, now
        return Action(strongest)

    def state_dict(self) -> dict[str, Any]:
        """See `Cluster.state_dict`."""
        return super().state_dict() | {
            "spent_s": 0.0 if self._start is None else time.perf_counter() - self._began,
            "start": self._start,
            "before": self._before,
            "reports": [asdict(report) for report in self._reports],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Cluster.load_state_dict`."""
        super().load_state_dict(state)
        self._spent_s, self._before = state["spent_s"], state["before"]
        start = state["start"]
        self._start = None if start is None else start.to(self.weights.vector.device)
        self._reports = deque(map(report_from_plain, state["reports"]))

    def take_over(self, start: Handover) -> None:
        """See `Cluster.take_over`."""
        super().take_over(start)
        self._before = start.steps
        self._start = start.weights.to(self.weights.vector.device) if start.steps else None


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
            turn = Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            if self.workers:
                yield turn
            else:  # a dedicated server takes part in every collective
                self.segment(turn)
                self._receive()
                self.idle()
                self._hand_over(None)
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                self._receive()
                yield EpochEnd(turn.epoch, self.weights.vector, time.perf_counter())

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
