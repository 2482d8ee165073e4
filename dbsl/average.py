"""An exponential moving average of the global weights, evaluated beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dbsl.weights import FlatWeights


class WeightAverage:
    """Averages the merged weights over epochs: a <- decay * a + (1 - decay) * g at each one's end.

    Batch norm's statistics are averaged like weights. Only merged weights are worth averaging: in
    between, each worker has its own. timm's ModelEmaV3, which does this to a module, would keep a
    second model; here it is the one vector.

    Args:
        decay: In (0, 1), per epoch: with 0.8 the last five epochs have two thirds of the weight.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.vector: Tensor | None = None  # before the first epoch's end

    @torch.no_grad()
    def add(self, weights: Tensor) -> None:
        """Take the weights of an epoch's end in."""
        if self.vector is None:
            self.vector = weights.clone()
        else:
            self.vector.lerp_(weights, 1 - self._decay)

    @contextmanager
    def inside(self, weights: FlatWeights) -> Iterator[None]:
        """Have the model's weights be the average for a while."""
        before = weights.vector.clone()
        weights.load(self.vector)
        try:
            yield
        finally:
            weights.load(before)

    def state_dict(self) -> dict[str, Any]:
        """Return the average so far."""
        return {"vector": self.vector}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` returned."""
        vector = state["vector"]
        self.vector = None if vector is None else vector.to(device)
