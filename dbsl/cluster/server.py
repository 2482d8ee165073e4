"""The owner of the global weights: merge rules, clocks and staleness. No communication in it.

Workers push weights, which are merged here; `dbsl.cluster.gradients` takes gradients.

Merge rules: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092); the bound on clocks is that of
stale synchronous parallel (Ho et al., NIPS 2013).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.cluster.merges import GlobalWeights, OuterOptimizer, merge_one
from dbsl.config.settings import Merge
from dbsl.plan.ledger import Members
from dbsl.plan.types import EpochEnd, Restart, RoundReport, report_from_plain

MergeRule = Callable[[Tensor, Tensor, Tensor], Tensor]
_AT_BARRIER = ("mean", "delta")  # rules that take all workers' pushes together


class Server(GlobalWeights):
    """Global weights that workers pull and push, one round at a time.

    `mean` collects the pushes of all workers and then sets g <- sum(f_i*w_i)/sum(f_i); `delta` does
    so too, but hands g minus that mean to an outer optimizer as a gradient; `ratio` and `half`
    merge each push as it comes. A worker may start a round while its clock (rounds it has
    pushed) is at most `staleness` ahead of the slowest worker's.

    A rule of one's own, ``own(global_ [P], pushed [n, P], factors [n]) -> [P]``, stands in for all
    of them: with a barrier it gets the pushes of all n workers that were not refused, in the order
    of the workers, else each push alone.

    Args:
        weights: Initial global weights, one vector; the server keeps its own copy.
        workers: Number of workers.
        rule: Merge rule.
        staleness: Clock ticks that the leader may be ahead: 0 is a barrier, None no bound.
        rounds_per_epoch: Rounds that make an epoch.
        observe: Called with each report, before anyone can ask for what follows from it.
        outer: The optimizer of `delta`.
        own: A merge rule of one's own, in place of `rule`.
        members: The workers, which the run's planner knows, too; None: nobody else does.
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
        outer: OuterOptimizer | None = None,
        own: MergeRule | None = None,
        members: Members | None = None,
    ) -> None:
        if rule in _AT_BARRIER and staleness != 0:
            raise SettingError(f"merge {rule!r} must have staleness 0 (a barrier), got {staleness}")
        assert (rule == "delta") == (outer is not None)
        super().__init__(weights)
        self.rule: Merge = rule
        self._outer = outer
        self._own = own
        self._pushed: dict[int, tuple[Tensor, float]] = {}  # for a rule of one's own, at a barrier
        self.staleness = staleness
        self.rounds_per_epoch = rounds_per_epoch
        self._observe = observe
        self.members = members or Members(workers)
        self.refused = 0  # rounds that were not merged, since they were not finite
        self.version = 0  # global updates so far
        self.finished: deque[EpochEnd] = deque()
        self.reports: deque[RoundReport] = deque()
        self._pulled_version = [0] * workers
        self._sum: Tensor | None = None
        self._sum_weight = 0.0
        self._collected = 0
        self._epochs_ended = 0

    @property
    def clocks(self) -> list[int]:
        """Rounds that each worker has pushed."""
        return self.members.clocks

    @property
    def active(self) -> set[int]:
        """Workers that are there."""
        return self.members.active

    def may_start(self, worker: int) -> bool:
        """Whether the worker may start its next round now.

        A newcomer waits until another worker has come as far: it would else lead from its first
        round on.
        """
        if worker in self.members.newcomers and self.clocks[worker] > self._newcomers_start():
            return False
        return self.staleness is None or self.clocks[worker] <= self.latest_start()

    def latest_start(self) -> float:
        """Return the clock up to which workers may start a round now."""
        return float("inf") if self.staleness is None else self.slowest() + self.staleness

    def _newcomers_start(self) -> int:
        """Return the clock up to which newcomers may begin: the leader's, who is none of them."""
        others = self.active - self.members.newcomers
        return max(self.clocks[w] for w in others) if others else self.slowest()

    def slowest(self) -> int:
        """Return the clock of the slowest worker that is still there."""
        return self.members.slowest()

    def drop(self, worker: int) -> None:
        """Go on without a worker: nobody waits for it any more."""
        round_ = self.slowest()
        self.members.leave(worker)
        if self._collected and self.slowest() > round_:  # the barrier waited for it alone
            self._merge_collected()
        self._end_epochs()

    def pull(self, worker: int) -> Tensor:
        """Return the global weights for a worker's next round, not to be written to."""
        self.members.begin(worker)
        self._pulled_version[worker] = self.version
        return self.snapshot()

    def push(self, weights: Tensor, report: RoundReport) -> RoundReport:
        """Merge a worker's weights, advance its clock and return the report with its staleness."""
        self.members.inside.pop(report.worker, None)
        staleness = self.version - self._pulled_version[report.worker]
        report = replace(report, staleness=staleness)
        if self.rule in _AT_BARRIER:
            self._collect(weights, report)
            if self._is_last(report.worker):
                self._merge_collected()
        elif not report.refused:
            self._merge(weights, report)
        self._advance([report])
        return report

    def push_each(self, pushed: Sequence[Tensor], reports: Sequence[RoundReport]) -> None:
        """Take what all workers pushed from the present weights, one after the other."""
        for report in reports:
            self._pulled_version[report.worker] = self.version
        for weights, report in zip(pushed, reports, strict=True):
            self.push(weights, report)

    def push_joined(self, joined: Tensor | None, reports: Sequence[RoundReport]) -> None:
        """Take the weighted mean of what all workers pushed, made elsewhere, as one update.

        None: all of it was refused.
        """
        if joined is not None:
            self._take_mean(joined)
        self.version += 1
        self._advance(reports)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that a later `load_state_dict` needs to go on alike."""
        return {
            "weights": self.snapshot(),
            "version": self.version,
            **self.members.state_dict(),
            "pulled_version": list(self._pulled_version),
            "sum": self._sum,
            "sum_weight": self._sum_weight,
            "collected": self._collected,
            "epochs_ended": self._epochs_ended,
            "refused": self.refused,
            "finished": [asdict(end) for end in self.finished],
            "reports": [asdict(report) for report in self.reports],
            "outer": self._outer and self._outer.state_dict(),
            "pushed": dict(self._pushed),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.version, self.refused = state["version"], state["refused"]
        self._collected, self._epochs_ended = state["collected"], state["epochs_ended"]
        self.members.load_state_dict(state)
        self._pulled_version = list(state["pulled_version"])
        self._writable().copy_(state["weights"])
        device = self._weights.device
        self._sum = None if state["sum"] is None else state["sum"].to(device)
        self._sum_weight = state["sum_weight"]
        now = {"ended_at": time.perf_counter()}  # that clock is of a process
        self.finished = deque(EpochEnd(**end | now) for end in state["finished"])
        self.reports = deque(map(report_from_plain, state["reports"]))
        self._load_outer(state["outer"])
        pushed = state["pushed"].items()
        self._pushed = {worker: (w.to(device), factor) for worker, (w, factor) in pushed}

    def restart(self, start: Restart) -> None:
        """Go on with the weights of other workers, all workers at the same clock."""
        self._writable().copy_(start.weights)
        self.version, self.refused = start.version, start.refused
        self.members.clocks = [start.clock] * len(self.clocks)
        self._pulled_version = [start.version] * len(self.clocks)
        self._epochs_ended = start.clock // self.rounds_per_epoch
        now = time.perf_counter()
        self.finished.extend(replace(end, ended_at=now) for end in start.finished)
        self._load_outer(start.outer)

    def _merge(self, weights: Tensor, report: RoundReport) -> None:
        """Merge a push by itself."""
        current, merged = self._weights, None
        if self._own is not None:  # it may fail: the weights are then as they were
            merged = self._merged(current, {report.worker: (weights, report.merge_weight)})
        out = self._writable()  # another tensor where `current` is still read
        if merged is None:
            merge_one(current, weights, report.merge_weight, self.rule, out)
        else:
            out.copy_(merged)
        self.version += 1

    @torch.no_grad()
    def _collect(self, weights: Tensor, report: RoundReport) -> None:
        """Keep a push until all workers have pushed."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._weights)
        if self._own is not None and not report.refused:
            self._pushed[report.worker] = (weights.clone(), report.merge_weight)
        elif not report.refused:
            self._sum.add_(weights, alpha=report.merge_weight)
            self._sum_weight += report.merge_weight
        self._collected += 1

    def _is_last(self, worker: int) -> bool:
        """Whether everyone else has pushed the round that this worker pushes."""
        clock = self.clocks[worker]
        return all(self.clocks[other] > clock for other in self.active if other != worker)

    def _merge_collected(self) -> None:
        """Make one update of the pushes that a barrier has collected."""
        if self._pushed:
            merged = self._merged(self._weights, self._pushed)
            self._writable().copy_(merged)
            self._pushed.clear()
        elif self._sum_weight and self._outer is None:
            torch.div(self._sum, self._sum_weight, out=self._writable())
        elif self._sum_weight:  # else all were refused, and the weights stay
            self._take_mean(self._sum / self._sum_weight)
        self._sum.zero_()
        self._sum_weight, self._collected = 0.0, 0
        self.version += 1

    def _merged(self, current: Tensor, pushed: Mapping[int, tuple[Tensor, float]]) -> Tensor:
        """Return what a rule of one's own makes of the weights and of pushes, by worker."""
        ordered = [pushed[worker] for worker in sorted(pushed)]
        factors = torch.tensor([factor for _, factor in ordered], device=current.device)
        merged = self._own(current, torch.stack([weights for weights, _ in ordered]), factors)
        if getattr(merged, "shape", None) != current.shape:
            got = list(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
            raise SettingError(f"a merge rule must return weights [{len(current)}], got {got}")
        return merged

    def _load_outer(self, state: Mapping[str, Any] | None) -> None:
        if self._outer is not None and state is not None:
            self._outer.load_state_dict(state, self._weights.device)

    def _take_mean(self, mean: Tensor) -> None:
        if self._outer is not None:
            mean = self._outer.step(self._weights, mean)
        self._writable().copy_(mean)

    def _advance(self, reports: Sequence[RoundReport]) -> None:
        for report in reports:
            self.clocks[report.worker] += 1
            self.refused += report.refused
            if not report.refused:
                self._observe(report)
            self.reports.append(report)
        self._end_epochs()

    def _end_epochs(self) -> None:
        """Note the ends of epochs that all active workers have come to."""
        while self.slowest() // self.rounds_per_epoch > self._epochs_ended:
            end = EpochEnd(self._epochs_ended, self.snapshot(), time.perf_counter())
            self.finished.append(end)
            self._epochs_ended += 1
