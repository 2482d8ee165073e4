"""The optimizer of a server to which workers push gradients."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.cluster.part_of_step import take_part, take_step
from dbsl.cluster.steps import BuildOptimizer, load_optimizer
from dbsl.cluster.weights import FlatWeights


class ServerOptimizer:
    """The server's copy of the model and the run's only optimizer (see `GradientServer`).

    Args:
        model: The model, before `FlatWeights` or a stepper is built on it.
        device: Where the server keeps its weights.
        build_optimizer: Builds the optimizer on the copy.
    """

    def __init__(
        self, model: nn.Module, device: torch.device, build_optimizer: BuildOptimizer
    ) -> None:
        model = copy.deepcopy(model).to(device)
        self._weights = FlatWeights(model)
        self.vector = self._weights.vector
        self._optimizer = build_optimizer(model)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the optimizer's state back."""
        load_optimizer(self._optimizer, state)

    @torch.no_grad()
    def apply(self, gradients: Tensor, learning_rate: float, part: float = 1.0) -> None:
        """Step with gradients in the layout of the weights; buffers take their change.

        Where they are of a part of the global batch, weighted as that, it is this part of a step.
        """
        if part < 1:
            self._weights.attach_gradients(gradients / part)
            take_part(self._optimizer, learning_rate, part)
        else:
            self._weights.attach_gradients(gradients)
            take_step(self._optimizer, learning_rate)
        buffers = self._weights.buffers
        buffers.add_(gradients[len(gradients) - len(buffers) :])
