"""The outer optimizer of the `delta` merge: a step of the server on what its workers changed.

With the mean of the workers' weights as its end, the change since the last merge is taken for a
gradient and handed to SGD with Nesterov momentum (Douillard et al., DiLoCo, arXiv 2311.08105, and
local SGD before it). A learning rate of 1 without momentum is the mean itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


class OuterOptimizer:
    """Steps of SGD on the global parameters; batch norm's statistics become the mean's.

    Args:
        parameters: Numbers in the weights' vector that are trained; buffers follow them.
        learning_rate: Of the outer step.
        momentum: Of the outer step, in [0, 1).
    """

    def __init__(self, parameters: int, learning_rate: float, momentum: float) -> None:
        self._parameters = parameters
        self._settings = {"lr": learning_rate, "momentum": momentum, "nesterov": momentum > 0}
        self._momentum: Tensor | None = None

    @torch.no_grad()
    def step(self, weights: Tensor, mean: Tensor) -> Tensor:
        """Return the next global weights.

        Args:
            weights: The global weights that the workers pulled, one vector.
            mean: The weighted mean of theirs now, in the same layout.
        """
        before, after = (vector[: self._parameters] for vector in (weights, mean))
        parameter = nn.Parameter(before.clone())
        parameter.grad = before - after
        optimizer = torch.optim.SGD([parameter], **self._settings)
        if self._momentum is not None:
            optimizer.state[parameter]["momentum_buffer"] = self._momentum
        optimizer.step()
        self._momentum = optimizer.state[parameter].get("momentum_buffer")
        return torch.cat([parameter, mean[self._parameters :]])

    def state_dict(self) -> dict[str, Any]:
        """Return the momentum."""
        return {"momentum": self._momentum}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` returned."""
        momentum = state["momentum"]
        self._momentum = None if momentum is None else momentum.to(device)
