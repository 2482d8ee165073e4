"""A vector that many read while it is merged into, and the rules that merge one push into it.

Merge rules: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dbsl.plan.turns import Merge


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
