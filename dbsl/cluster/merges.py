"""A vector that many read while it is merged into, and the rules that merge one push into it.

Merge rules: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092).

The outer optimizer of the `delta` merge: a step of the server on what its workers changed.

With the mean of the workers' weights as its end, the change since the last merge is taken for a
gradient and handed to SGD with Nesterov momentum (Douillard et al., DiLoCo, arXiv 2311.08105, and
local SGD before it). A learning rate of 1 without momentum is the mean itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.config.settings import Merge


@torch.no_grad()
def merge_one(
    global_: Tensor, pushed: Tensor, weight: float, rule: Merge, out: Tensor | None = None
) -> None:
    """Merge one worker's weights w into the global weights g with factor f in (0, 1].

    ``ratio`` (journal): g <- (g + f*w)/(1 + f). ``half`` (conference): g <- ((2 - f)*g + f*w)/2.
    In place, or into `out`.
    """
    part = weight / (1 + weight) if rule == "ratio" else weight / 2
    torch.lerp(global_, pushed, part, out=global_ if out is None else out)


class GlobalWeights:
    """The global weights of a server, of which readers keep what they have read.

    Args:
        weights: Initial weights, one vector; a copy of it is kept.
    """

    def __init__(self, weights: Tensor) -> None:
        self._weights = weights.detach().clone()
        self._snapshot: Tensor | None = None
        self._readers = 0  # that may still read the snapshot

    def snapshot(self) -> Tensor:
        """Return the current global weights; later merges leave the returned tensor as it is.

        That lasts until it is given back with `release`, if it is.
        """
        # Readers share one tensor per version: pulls copy nothing until a merge has to write.
        if self._snapshot is None:
            self._snapshot, self._readers = self._weights, 0
        self._readers += 1
        return self._snapshot

    def release(self, snapshot: Tensor) -> None:
        """Note that a reader of a snapshot is done: without readers, merges write in place."""
        if snapshot is self._snapshot:
            self._readers -= 1
            if self._readers == 0:
                self._snapshot = None

    def _writable(self) -> Tensor:
        """Return the tensor that the next global weights are to be written to, all of them."""
        if self._snapshot is not None:  # somebody reads it
            self._weights, self._snapshot = torch.empty_like(self._snapshot), None
        return self._weights


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
