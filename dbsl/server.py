"""The owner of the global weights: merge rules, clocks and staleness. No communication in it.

Workers push weights, which are merged, or weighted gradients, on which the server's own optimizer
takes a step (`GradientServer`).

Merge rules: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092); the bound on clocks is that of
stale synchronous parallel (Ho et al., NIPS 2013).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

Merge = Literal["mean", "ratio", "half"]
Sync = Literal["bsp", "ssp", "asp", "step"]
Push = Literal["weights", "gradients"]


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
    learning_rate: float = 0.0  # of the round's last step
    predicted_time_s: float = 0.0  # of the compute, by the plan
    # On the cluster's clock, which is virtual where the cluster is simulated: the round's compute,
    # and the time since the worker's last round, spent waiting for others and in transfers.
    compute_time_s: float = 0.0
    wait_time_s: float = 0.0


@dataclass(frozen=True)
class Round:
    """A turn: workers of this process train on their parts of one round, from a pull to a push.

    It is one worker's turn, or, where all take joint steps, that of every worker in the process.
    """

    workers: tuple[int, ...]
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
        observe: Called with each report, before anyone can ask for what follows from it.
    """

    def __init__(
        self,
        weights: Tensor,
        workers: int,
        *,
        rule: Merge,
        staleness: int | None,
        rounds_per_epoch: int,
        observe: Callable[[RoundReport], object] = lambda report: None,
    ) -> None:
        if rule == "mean" and staleness != 0:
            raise ValueError(f"merge 'mean' must have staleness 0 (a barrier), got {staleness}")
        self.rule: Merge = rule
        self.staleness = staleness
        self.rounds_per_epoch = rounds_per_epoch
        self._observe = observe
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

    def push_joined(self, joined: Tensor, reports: Sequence[RoundReport]) -> None:
        """Take what all workers pushed, joined elsewhere with their weights, as one update."""
        self._writable().copy_(joined)
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
            self._observe(report)
            self.reports.append(report)
        after = min(self.clocks)
        if after > before and after % self.rounds_per_epoch == 0:
            epoch = after // self.rounds_per_epoch - 1
            self.finished.append(EpochEnd(epoch, self.snapshot(), time.perf_counter()))


class GradientServer(Server):
    """A server that owns the optimizer: workers push weighted gradients and pull weights.

    A push is the sum of a worker's gradients over some steps, each weighted b_i/B, followed by the
    change of its floating-point buffers, weighted alike. With a barrier the pushes of all workers
    are summed and make one step, that of the joined batch; else each makes a step of its own.

    Args:
        weights: The server model's floating-point state; the optimizer's steps change it.
        apply: Takes a step with the gradients [of all parameters, then of buffers] and the
            learning rate.
        workers: Number of workers.
        staleness: As for `Server`.
        rounds_per_epoch: Pushes of a worker per epoch.
        damp: Whether a push is scaled by 1/(1 + staleness).
        observe: As for `Server`.
    """

    def __init__(
        self,
        weights: Tensor,
        workers: int,
        *,
        apply: Callable[[Tensor, float], object],
        staleness: int | None,
        rounds_per_epoch: int,
        damp: bool = False,
        observe: Callable[[RoundReport], object] = lambda report: None,
    ) -> None:
        super().__init__(
            weights,
            workers,
            rule="mean" if staleness == 0 else "ratio",
            staleness=staleness,
            rounds_per_epoch=rounds_per_epoch,
            observe=observe,
        )
        self._weights = weights  # not a copy: the optimizer's parameters are views of it
        self._apply = apply
        self._damp = damp

    def push(self, gradients: Tensor, report: RoundReport) -> RoundReport:
        """Take a worker's gradients in, advance its clock, return the report with its staleness."""
        staleness = self.version - self._pulled_version[report.worker]
        report = replace(report, staleness=staleness)
        if self.staleness == 0:
            if self._sum is None:
                self._sum = torch.zeros_like(gradients)
            self._sum.add_(gradients)
            self._collected += 1
            if self._collected == len(self.clocks):
                self._step(self._sum, report.learning_rate)
                self._sum.zero_()
                self._collected = 0
        else:
            scaled = gradients / (1 + staleness) if self._damp else gradients
            self._step(scaled, report.learning_rate)
        self._advance([report])
        return report

    def push_joined(self, joined: Tensor, reports: Sequence[RoundReport]) -> None:
        """Take the sum of all workers' gradients, made elsewhere, as one step."""
        self._step(joined, reports[0].learning_rate)
        self._advance(reports)

    def snapshot(self) -> Tensor:
        """Return a copy of the current global weights, one for all who ask before the next step."""
        if self._snapshot is None:
            self._snapshot = self._weights.clone()
        return self._snapshot

    def _step(self, gradients: Tensor, learning_rate: float) -> None:
        self._apply(gradients, learning_rate)
        self._snapshot = None
        self.version += 1
