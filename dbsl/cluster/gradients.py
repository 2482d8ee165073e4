"""A server that owns the run's only optimizer: workers push gradients and pull weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.cluster.server import Server
from dbsl.cluster.steps import begin_thawed, take_fraction, take_step
from dbsl.cluster.weights import FlatWeights
from dbsl.optimizer import BuildOptimizer, Clip, keep_whole, load_optimizer
from dbsl.plan.ledger import Members
from dbsl.plan.types import Handover, RoundReport


class GradientServer(Server):
    """A server to which workers push weighted gradients.

    A push is the sum of a worker's gradients over some steps, each weighted b_i/B, followed by the
    change of its floating-point buffers, weighted alike. With a barrier the pushes of all workers
    are summed and make one step, as the joined batch would. Without one, each push makes its
    fraction b_i/B of a step as it comes, in learning rate, momentum and weight decay.

    It is made before `FlatWeights` or a stepper is built on the model, and steps on a copy. What is
    frozen in the model from time to time is not stepped on. Gradients are clipped before each whole
    step. `staleness` and the rest are as for `Server`.
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
        observe: Callable[[RoundReport], object] = lambda report: None,
    ) -> None:
        own = copy.deepcopy(model).to(device)
        self._own = FlatWeights(own)
        self._optimizer, self._clip = build_optimizer(own), build_clip(own)
        self._pairs = list(zip(own.parameters(), model.parameters(), strict=True))
        how = {"together": staleness == 0, "staleness": staleness, "observe": observe}
        super().__init__(self._own.vector, members, None, **how)
        self._weights = self._own.vector  # not a copy: the optimizer's parameters are views of it
        self._snapshot: Tensor | None = None  # a copy, until the next step

    def snapshot(self) -> Tensor:
        """Return a copy of the current global weights, one for all who ask before the next step."""
        if self._snapshot is None:
            self._snapshot = self._weights.clone()
        return self._snapshot

    def state_dict(self) -> dict[str, Any]:
        """See `Server.state_dict`; with the optimizer's state."""
        return super().state_dict() | {"optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Server.load_state_dict`."""
        super().load_state_dict(state)
        load_optimizer(self._optimizer, state["optimizer"])

    def take_over(self, start: Handover) -> None:
        """See `Server.take_over`."""
        super().take_over(start)
        if start.server_optimizer is not None:
            load_optimizer(self._optimizer, start.server_optimizer)

    def _replace_weights(self, weights: Tensor) -> None:
        self._weights.copy_(weights)
        self._snapshot = None

    def _keep(self, pushed: Tensor) -> None:
        """Add to the round's sum, which is one row for all."""
        if not self._kept_reports:
            self._kept = torch.zeros_like(pushed)[None]
        self._kept[0].add_(pushed)

    def _merge(self, pushed: Tensor, reports: Sequence[RoundReport]) -> None:
        report = reports[-1]  # all of a step have the same learning rate
        fraction = 1.0 if self._together else report.merge_weight
        self._step(pushed[0], report.learning_rate, fraction)
        self._snapshot = None
        self.version += 1

    @torch.no_grad()
    def _step(self, gradients: Tensor, learning_rate: float, fraction: float) -> None:
        """Take a step, or a fraction of it in (0, 1), on gradients [P] weighted as that."""
        changed = [own for own, its in self._pairs if own.requires_grad != its.requires_grad]
        for parameter in changed:  # what the loop freezes does not move
            parameter.requires_grad_(not parameter.requires_grad)
        if changed:
            begin_thawed(self._optimizer)
        if fraction < 1:
            self._own.attach_gradients(gradients / fraction)
            take_fraction(self._optimizer, learning_rate, fraction)
        else:
            self._own.attach_gradients(gradients)
            self._clip(self._optimizer)
            take_step(self._optimizer, learning_rate)
        self._optimizer.zero_grad(set_to_none=True)
        buffers = self._own.buffers
        buffers.add_(gradients[len(gradients) - len(buffers) :])
