"""Joint steps: all workers take every step together, and have the same weights throughout."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist

from dbsl.balance import Planner, Segment
from dbsl.server import EpochEnd, Round, RoundReport
from dbsl.weights import FlatWeights
from dbsl.wire import SharedPlans, exchange_reports


class Lockstep:
    """Turns of all workers together, in one process on a virtual clock or in several on real ones.

    The gradients are exchanged inside a turn, by the stepper; here are the turns, the plans and the
    reports.

    Args:
        weights: This process's model.
        planner: Tells who trains on how much.
        workers: The workers of this process.
        epochs: Epochs to run.
        rounds_per_epoch: Turns that make an epoch.
        duration: In one process: virtual seconds of a worker's part of a round, from (worker,
            epoch, round).
        finish_round: Called at a round's end, before the reports are exchanged.
    """

    def __init__(
        self,
        weights: FlatWeights,
        *,
        planner: Planner,
        workers: Sequence[int],
        epochs: int,
        rounds_per_epoch: int,
        duration: Callable[[int, int, int], float],
        finish_round: Callable[[], object] | None = None,
    ) -> None:
        self.weights = weights
        self.workers = tuple(workers)
        self.server = None
        self._simulated = not dist.is_initialized()
        self.time_s = 0.0 if self._simulated else None
        self._plans = SharedPlans(planner)
        self._epochs = epochs
        self._rounds_per_epoch = rounds_per_epoch
        self._duration = duration
        self._finish_round = finish_round
        self._reports: deque[RoundReport] = deque()

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield rounds and the ends of epochs, the same in every process."""
        for epoch in range(self._epochs):
            for round_ in range(self._rounds_per_epoch):
                self._began = time.perf_counter()
                yield Round(self.workers, epoch, round_)
            yield EpochEnd(epoch, self.weights.vector, time.perf_counter())

    def plan(self, turn: Round) -> Segment:
        """Return the plan in force in a turn (a collective where it may have changed)."""
        return self._plans.at(turn.epoch, turn.round)

    def pull(self, turn: Round) -> None:
        """The weights are here already."""

    def push(self, reports: Sequence[RoundReport]) -> None:
        """End a round: tell every process how long its workers computed and waited."""
        if self._finish_round:
            self._finish_round()
        if self._simulated:
            durations = [self._duration(r.worker, r.epoch, r.round) for r in reports]
            slowest = max(durations)
            self.time_s += slowest
            done = [
                replace(report, compute_time_s=duration, wait_time_s=slowest - duration)
                for report, duration in zip(reports, durations, strict=True)
            ]
        else:
            spent = time.perf_counter() - self._began
            (report,) = reports
            wait_time_s = max(0.0, spent - report.time_s)
            own = replace(report, compute_time_s=report.time_s, wait_time_s=wait_time_s)
            done = exchange_reports([own], self.weights.vector.device)
        for report in done:
            self._plans.planner.observe(report)
        self._reports.extend(done)

    def reports(self) -> Iterator[RoundReport]:
        """Yield the reports of rounds pushed since the last call."""
        while self._reports:
            yield self._reports.popleft()

    def load(self, end: EpochEnd) -> None:
        """The model already holds the weights of an epoch's end."""

    def close(self) -> None:
        """Nothing to release."""
