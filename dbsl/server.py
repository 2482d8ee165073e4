"""The owner of the global weights: merge rules, clocks and staleness. No communication in it.

Merge rules: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092); the bound on clocks is that of
stale synchronous parallel (Ho et al., NIPS 2013).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Merge = Literal["mean", "ratio", "half"]
Sync = Literal["bsp", "ssp", "asp"]


@dataclass(frozen=True)
class RoundReport:
    """What a worker says of a round beside its weights; the server adds the staleness."""

    worker: int
    epoch: int
    round: int
    resolution: int
    local_batch_size: int
    samples: int
    steps: int
    time_s: float  # compute alone: no pull, push or waiting
    loss: float  # mean over the round's samples
    merge_weight: float
    staleness: int = 0


@dataclass(frozen=True)
class Round:
    """A worker's turn: train on its share of one round, from pulled weights to a push."""

    worker: int
    epoch: int
    round: int


@dataclass(frozen=True)
class EpochEnd:
    """Every worker has pushed the epoch's last round: time to evaluate and to save."""

    epoch: int
    weights: Tensor = field(repr=False)  # global weights at that moment
    ended_at: float  # the moment, by time.perf_counter()


@torch.no_grad()
def merge_one(global_: Tensor, pushed: Tensor, weight: float, rule: Merge) -> None:
    """Merge one worker's weights w into the global weights g in place, with factor f in (0, 1].

    ``ratio`` (journal): g <- (g + f*w)/(1 + f). ``half`` (conference): g <- ((2 - f)*g + f*w)/2.
    """
    global_.lerp_(pushed, weight / (1 + weight) if rule == "ratio" else weight / 2)


class Server:
    """Global weights that workers pull and push, one round at a time.

    `mean` collects the pushes of all workers and then sets g <- sum(f_i*w_i)/sum(f_i); `ratio` and
    `half` merge each push as it comes. A worker may start a round while its clock (rounds it has
    pushed) is at most `staleness` ahead of the slowest worker's.

    Args:
        weights: Initial global weights, one vector; the server keeps its own copy.
        workers: Number of workers.
        rule: Merge rule.
        staleness: Clock ticks that the leader may be ahead: 0 is a barrier, None no bound.
        rounds_per_epoch: Rounds that make an epoch.
    """

    def __init__(
        self,
        weights: Tensor,
        workers: int,
        *,
        rule: Merge,
        staleness: int | None,
        rounds_per_epoch: int,
    ) -> None:
        if rule == "mean" and staleness != 0:
            raise ValueError(f"merge 'mean' must have staleness 0 (a barrier), got {staleness}")
        self.rule: Merge = rule
        self.staleness = staleness
        self.rounds_per_epoch = rounds_per_epoch
        self.clocks = [0] * workers
        self.version = 0  # global updates so far
        self.finished: deque[EpochEnd] = deque()
        self.reports: deque[RoundReport] = deque()
        self._weights = weights.detach().clone()
        self._snapshot: Tensor | None = None
        self._pulled_version = [0] * workers
        self._sum: Tensor | None = None
        self._sum_weight = 0.0
        self._collected = 0

    def may_start(self, worker: int) -> bool:
        """Whether the worker may start its next round now."""
        return self.staleness is None or self.clocks[worker] - min(self.clocks) <= self.staleness

    def pull(self, worker: int) -> Tensor:
        """Return the global weights for a worker's next round, not to be written to."""
        self._pulled_version[worker] = self.version
        return self.snapshot()

    def push(self, weights: Tensor, report: RoundReport) -> RoundReport:
        """Merge a worker's weights, advance its clock and return the report with its staleness."""
        worker = report.worker
        report = replace(report, staleness=self.version - self._pulled_version[worker])
        if self.rule == "mean":
            self._collect(weights, report.merge_weight)
        else:
            merge_one(self._writable(), weights, report.merge_weight, self.rule)
            self.version += 1
        self._advance([report])
        return report

    def push_mean(self, mean: Tensor, reports: Sequence[RoundReport]) -> None:
        """Take the weighted mean of all workers' weights, made elsewhere, as one global update."""
        self._writable().copy_(mean)
        self.version += 1
        self._advance(reports)

    def snapshot(self) -> Tensor:
        """Return the current global weights; later merges leave the returned tensor as it is."""
        # Readers share one tensor per version: pulls copy nothing until a merge has to write.
        if self._snapshot is None:
            self._snapshot = self._weights
        return self._snapshot

    def _writable(self) -> Tensor:
        if self._snapshot is not None:
            self._weights, self._snapshot = self._snapshot.clone(), None
        return self._weights

    @torch.no_grad()
    def _collect(self, weights: Tensor, weight: float) -> None:
        if self._sum is None:
            self._sum = torch.zeros_like(self._weights)
        self._sum.add_(weights, alpha=weight)
        self._sum_weight += weight
        self._collected += 1
        if self._collected == len(self.clocks):  # the barrier: everyone has pushed this round
            torch.div(self._sum, self._sum_weight, out=self._writable())
            self._sum.zero_()
            self._sum_weight, self._collected = 0.0, 0
            self.version += 1

    def _advance(self, reports: Sequence[RoundReport]) -> None:
        before = min(self.clocks)
        for report in reports:
            self.clocks[report.worker] += 1
            self.reports.append(report)
        after = min(self.clocks)
        if after > before and after % self.rounds_per_epoch == 0:
            epoch = after // self.rounds_per_epoch - 1
            self.finished.append(EpochEnd(epoch, self.snapshot(), time.perf_counter()))
