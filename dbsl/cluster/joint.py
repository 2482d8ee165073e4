"""Joint steps: all workers take every step together, and have the same weights throughout."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from dbsl.cluster.cluster import Cluster
from dbsl.cluster.weights import FlatWeights
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
            epoch, round_ = divmod(self._clock, self._rounds_per_epoch)
            self._began = time.perf_counter() - self._spent_s
            self._spent_s = 0.0
            yield Turn(self.workers, epoch, round_)
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

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
