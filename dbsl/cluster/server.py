"""The owner of the global weights: clocks, staleness and merging, without communication.

Workers push weights, which a rule of `dbsl.cluster.merges` merges, or gradients, for a step of the
server's optimizer. The clocks have the bound of stale synchronous parallel (Ho et al., NIPS 2013).
"""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.cluster.formats import WorkerSum
from dbsl.cluster.merges import MergeRule, share_of_mean
from dbsl.cluster.steps import begin_thawed, take_step
from dbsl.cluster.weights import FlatWeights
from dbsl.optimizer import BuildOptimizer, Clip, keep_whole, load_optimizer
from dbsl.plan.members import Members
from dbsl.plan.types import EpochEnd, RoundReport, report_from_plain


class Server:
    """Global weights that workers pull and push, one round at a time.

    A worker may start a round while its clock (rounds it has pushed) is at most `staleness` ahead
    of the slowest worker's. Pulled weights do not change: a merge creates another tensor.

    The server keeps its own copy of `weights`, [P]. `rule` merges pushes that were not refused: one
    at a time, or `together` those of all workers in a round, in order of arrival. A `staleness` of
    0 is a barrier, None no bound. `observe` is called with each report, before anyone can ask for
    its consequences. In a simulated cluster, `rounded` sums the changes of pushes that are merged
    `together` and sent in a smaller format. The run's planner shares the `members`.
    """

    def __init__(
        self,
        weights: Tensor,
        members: Members,
        rule: MergeRule | None,
        *,
        together: bool = False,
        staleness: int | None,
        rounded: WorkerSum | None = None,
        observe: Callable[[RoundReport], object] = lambda report: None,
    ) -> None:
        assert not together or staleness == 0, staleness
        self._weights = weights.detach().clone()
        self._rule, self._together, self._observe = rule, together, observe
        self.staleness, self.members, self.rounded = staleness, members, rounded
        self.refused = 0  # rounds not merged because they were not finite
        self.version = 0  # global updates so far
        self.finished: deque[EpochEnd] = deque()  # epoch ends that a cluster must report
        self.reports: deque[RoundReport] = deque()
        self._pulled_version = [0] * len(self.clocks)
        # Received in a barrier's current round: pushes [workers, P], and their reports.
        self._kept: Tensor | None = None
        self._kept_reports: list[RoundReport] = []

    @property
    def clocks(self) -> list[int]:
        """Rounds that each worker has pushed."""
        return self.members.clocks

    def snapshot(self) -> Tensor:
        """Return the current global weights, not to be written to."""
        return self._weights

    def latest_start(self) -> float:
        """Return the clock up to which workers may start a round now."""
        return float("inf") if self.staleness is None else self.members.slowest() + self.staleness

    def pull(self, worker: int) -> Tensor:
        """Return the global weights for a worker's next round, not to be written to."""
        self.members.inside.add(worker)
        self._pulled_version[worker] = self.version
        return self.snapshot()

    def push(self, pushed: Tensor, report: RoundReport) -> None:
        """Merge what a worker pushes and advance its clock."""
        self.members.inside.discard(report.worker)
        staleness = self.version - self._pulled_version[report.worker]
        report = replace(report, staleness=staleness)
        if not report.refused:
            if self._together:
                self._keep(pushed)
                self._kept_reports.append(report)
            else:
                self._merge(pushed[None], [report])
        self._advance([report])

    def push_joined(self, joined: Tensor | None, reports: Sequence[RoundReport]) -> None:
        """Take the weighted mean of all workers' pushes, computed elsewhere, as one update.

        None: all were refused.
        """
        if joined is not None:
            self._merge(joined[None], [replace(reports[0], merge_weight=1.0)])
        self._advance(reports)

    def drop(self, worker: int) -> None:
        """Continue without a worker: nobody waits for it any more."""
        before = self.members.slowest()
        self.members.leave(worker)
        self._end_rounds(before)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that `load_state_dict` needs to continue identically."""
        kept = self._kept_reports
        return {
            "weights": self.snapshot(),
            "version": self.version,
            **self.members.state_dict(),
            "pulled_version": list(self._pulled_version),
            "kept": self._kept[: len(kept)] if kept else None,
            "kept_reports": [asdict(report) for report in kept],
            "refused": self.refused,
            "reports": [asdict(report) for report in self.reports],
            "rounded": self.rounded and self.rounded.state_dict(),
            "outer": self._rule.state_dict() if hasattr(self._rule, "state_dict") else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._replace_weights(state["weights"])
        self.version, self.refused = state["version"], state["refused"]
        self.members.load_state_dict(state)
        self._pulled_version = list(state["pulled_version"])
        self._kept_reports = [report_from_plain(report) for report in state["kept_reports"]]
        if self._kept_reports:
            self._kept = self._rows()
            self._kept[: len(state["kept"])] = state["kept"]
        self.reports = deque(map(report_from_plain, state["reports"]))
        if self.rounded is not None and state["rounded"] is not None:
            self.rounded.load_state_dict(state["rounded"])
        if hasattr(self._rule, "load_state_dict") and state["outer"] is not None:
            self._rule.load_state_dict(state["outer"])

    def _replace_weights(self, weights: Tensor) -> None:
        self._weights = weights.to(self._weights, copy=True)

    def _keep(self, pushed: Tensor) -> None:
        if self._kept is None:
            self._kept = self._rows()
        self._kept[len(self._kept_reports)].copy_(pushed)

    def _rows(self) -> Tensor:
        return self._weights.new_empty(len(self.clocks), len(self._weights))

    def _merge(self, pushed: Tensor, reports: Sequence[RoundReport]) -> None:
        """Make one update from pushes [n, P]."""
        factors = torch.tensor([report.merge_weight for report in reports], dtype=torch.float64)
        self._weights = self._rule(self._weights, pushed, factors)
        self.version += 1

    def _join(
        self, pushed: Tensor, reports: Sequence[RoundReport]
    ) -> tuple[Tensor, Sequence[RoundReport]]:
        """Return the weighted mean of pushes [n, P], with rounded changes, as one push."""
        total = sum(report.merge_weight for report in reports)
        changes = [share_of_mean(self._weights, 0.0, total)] * len(self.clocks)
        for weights, report in zip(pushed, reports, strict=True):
            change = weights - self._weights
            changes[report.worker] = share_of_mean(change, report.merge_weight, total)
        joined = self.rounded(*changes) + self._weights
        return joined[None], [replace(reports[0], merge_weight=1.0)]

    def _advance(self, reports: Sequence[RoundReport]) -> None:
        before = self.members.slowest()
        for report in reports:
            self.clocks[report.worker] += 1
            self.refused += report.refused
            if not report.refused:
                self._observe(report)
            self.reports.append(report)
        self._end_rounds(before)

    def _end_rounds(self, before: int) -> None:
        """Merge a barrier's pushes and end epochs, if the slowest was at `before` until now."""
        slowest, rounds = self.members.slowest(), self.members.rounds
        if slowest > before and self._kept_reports:  # else all were refused
            pushed, reports = self._kept[: len(self._kept_reports)], self._kept_reports
            if self.rounded is not None:
                pushed, reports = self._join(pushed, reports)
            self._merge(pushed, reports)
            self._kept_reports = []
        for epoch in range(before // rounds, slowest // rounds):
            self.finished.append(EpochEnd(epoch, self.snapshot(), time.perf_counter()))


class GradientServer(Server):
    """The owner of the run's only optimizer, to which workers push weighted gradients.

    A push is the sum of a worker's gradients over some steps, each weighted b_i/B, followed by the
    change of its floating-point buffers, weighted alike. With a barrier, the pushes of all workers
    are summed for one step, as for the joint batch. Without one, each push makes a step on arrival,
    on the mean of its gradients, with b_i/B of the learning rate.

    Build it before `FlatWeights` or a stepper is built on the model; it steps on a copy. Parameters
    that are frozen in the model at a step do not move. Gradients are clipped before each step.
    `staleness` and the rest are as for `Server`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        build_optimizer: BuildOptimizer,
        members: Members,
        *,
        staleness: int | None,
        build_clip: Callable[[nn.Module], Clip] = lambda model: keep_whole,
        **common: Any,
    ) -> None:
        own = copy.deepcopy(model).to(device)
        self._own = FlatWeights(own)
        self._optimizer, self._clip = build_optimizer(own), build_clip(own)
        self._pairs = list(zip(own.parameters(), model.parameters(), strict=True))
        common |= {"together": staleness == 0, "staleness": staleness}
        super().__init__(self._own.vector, members, None, **common)
        self._weights = self._own.vector  # not a copy: the optimizer's parameters are views of it
        self._snapshot: Tensor | None = None  # a copy, until the next step

    def snapshot(self) -> Tensor:
        """Return a copy of the global weights, shared by all callers until the next step."""
        if self._snapshot is None:
            self._snapshot = self._weights.clone()
        return self._snapshot

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        load_optimizer(self._optimizer, state["optimizer"])

    def _replace_weights(self, weights: Tensor) -> None:
        self._weights.copy_(weights)
        self._snapshot = None

    def _keep(self, pushed: Tensor) -> None:
        """Add to the round's sum, one row for all workers, of at least float32."""
        if not self._kept_reports:
            self._kept = self._rows()
        self._kept[0].add_(pushed)

    def _rows(self) -> Tensor:
        exact = torch.promote_types(self._weights.dtype, torch.float32)
        return torch.zeros_like(self._weights, dtype=exact)[None]

    def _merge(self, pushed: Tensor, reports: Sequence[RoundReport]) -> None:
        report = reports[-1]  # all reports of a step have the same learning rate
        weight = 1.0 if self._together else report.merge_weight
        self._step(pushed[0].to(self._weights.dtype), report.learning_rate, weight)
        self._snapshot = None
        self.version += 1

    @torch.no_grad()
    def _step(self, gradients: Tensor, learning_rate: float, weight: float) -> None:
        """Take a step on gradients [P] of this weight, in (0, 1], which also scales the rate."""
        changed = [own for own, its in self._pairs if own.requires_grad != its.requires_grad]
        for parameter in changed:  # parameters frozen by the loop do not move
            parameter.requires_grad_(not parameter.requires_grad)
        if changed:
            begin_thawed(self._optimizer)
        self._own.attach_gradients(gradients / weight)
        self._clip(self._optimizer)
        take_step(self._optimizer, learning_rate * weight)
        self._optimizer.zero_grad(set_to_none=True)
        buffers = self._own.buffers
        buffers.add_(gradients[len(gradients) - len(buffers) :])
