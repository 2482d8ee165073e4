"""A server that owns the run's only optimizer: workers push gradients and pull weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.cluster.server import Server
from dbsl.cluster.steps import begin_thawed, take_part, take_step
from dbsl.cluster.weights import FlatWeights
from dbsl.config.settings import ClipMode
from dbsl.optimizer import BuildOptimizer, load_optimizer, make_clip
from dbsl.plan.ledger import Members
from dbsl.plan.types import Restart, RoundReport


class ServerOptimizer:
    """The server's copy of the model, and the optimizer that steps on it.

    It is made before `FlatWeights` or a stepper is built on the model. What is frozen in the model
    from time to time is not stepped on. Gradients are clipped before each whole step.

    Attributes:
        vector: The copy's weights, [P].
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        build_optimizer: BuildOptimizer,
        *,
        clip: float | None = None,
        clip_mode: ClipMode = "norm",
    ) -> None:
        own = copy.deepcopy(model).to(device)
        self._weights = FlatWeights(own)
        self.vector = self._weights.vector
        self._optimizer = build_optimizer(own)
        self._clip = make_clip(own, clip, clip_mode)
        self._pairs = list(zip(own.parameters(), model.parameters(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the optimizer's state back."""
        load_optimizer(self._optimizer, state)

    @torch.no_grad()
    def apply(self, gradients: Tensor, learning_rate: float, part: float = 1.0) -> None:
        """Take a step, or a part of one.

        Args:
            gradients: In the layout of the weights, [P]; the change of the buffers follows the
                parameters' gradients. Those of a part of the global batch are weighted as that.
            learning_rate: Of the whole step.
            part: How much of the step, in (0, 1].
        """
        changed = [own for own, its in self._pairs if own.requires_grad != its.requires_grad]
        for parameter in changed:  # what the loop freezes does not move
            parameter.requires_grad_(not parameter.requires_grad)
        if changed:
            begin_thawed(self._optimizer)
        if part < 1:
            self._weights.attach_gradients(gradients / part)
            take_part(self._optimizer, learning_rate, part)
        else:
            self._weights.attach_gradients(gradients)
            self._clip(self._optimizer)
            take_step(self._optimizer, learning_rate)
        buffers = self._weights.buffers
        buffers.add_(gradients[len(gradients) - len(buffers) :])


class GradientServer(Server):
    """A server to which workers push weighted gradients.

    A push is the sum of a worker's gradients over some steps, each weighted b_i/B, followed by the
    change of its floating-point buffers, weighted alike. With a barrier the pushes of all workers
    are summed and make one step, as the joined batch would. Without one, each push makes its part
    b_i/B of a step as it comes, in learning rate, momentum and weight decay.

    `owner` has the weights and the optimizer; the rest is as for `Server`.
    """

    def __init__(
        self,
        owner: ServerOptimizer,
        workers: int,
        *,
        staleness: int | None,
        rounds_per_epoch: int,
        observe: Callable[[RoundReport], object] = lambda report: None,
        members: Members | None = None,
    ) -> None:
        super().__init__(
            owner.vector,
            workers,
            _no_rule,
            together=staleness == 0,
            staleness=staleness,
            rounds_per_epoch=rounds_per_epoch,
            observe=observe,
            members=members,
        )
        self._weights = owner.vector  # not a copy: the optimizer's parameters are views of it
        self._owner = owner
        self._snapshot: Tensor | None = None  # a copy, until the next step
        self._sum: Tensor | None = None  # of what a barrier has collected
        self._summed = 0  # pushes in it
        self._rate = 0.0  # learning rate of what a barrier has collected

    def push_joined(self, joined: Tensor | None, reports: Sequence[RoundReport]) -> None:
        """Take the sum of all workers' gradients, made elsewhere, as one step."""
        if joined is not None:
            self._step(joined, reports[0].learning_rate)
        self._advance(reports)

    def snapshot(self) -> Tensor:
        """Return a copy of the current global weights, one for all who ask before the next step."""
        if self._snapshot is None:
            self._snapshot = self._weights.clone()
        return self._snapshot

    def state_dict(self) -> dict[str, Any]:
        """See `Server.state_dict`; with the optimizer's state."""
        return super().state_dict() | {
            "optimizer": self._owner.state_dict(),
            "rate": self._rate,
            "sum": self._sum,
            "summed": self._summed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Server.load_state_dict`."""
        super().load_state_dict(state)
        self._rate, self._summed = state["rate"], state["summed"]
        self._sum = None if state["sum"] is None else state["sum"].to(self._weights.device)
        self._owner.load_state_dict(state["optimizer"])

    def restart(self, start: Restart) -> None:
        """See `Server.restart`."""
        super().restart(start)
        if start.server_optimizer is not None:
            self._owner.load_state_dict(start.server_optimizer)

    def _replace_weights(self, weights: Tensor) -> None:
        self._weights.copy_(weights)
        self._snapshot = None

    def _merge(self, gradients: Tensor, report: RoundReport) -> None:
        self._step(gradients, report.learning_rate, report.merge_weight)

    def _keep(self, gradients: Tensor, report: RoundReport) -> None:
        if self._sum is None:
            self._sum = torch.zeros_like(gradients)
        self._sum.add_(gradients)
        self._summed += 1
        self._rate = report.learning_rate

    def _merge_kept(self) -> None:
        if self._summed:  # else all were refused, and no step is taken
            self._step(self._sum, self._rate)
            self._sum.zero_()
        self._summed, self._collected = 0, 0

    def _step(self, gradients: Tensor, learning_rate: float, part: float = 1.0) -> None:
        self._owner.apply(gradients, learning_rate, part)
        self._snapshot = None
        self.version += 1


def _no_rule(global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
    raise AssertionError("gradients are not merged")
