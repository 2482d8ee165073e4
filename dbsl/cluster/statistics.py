"""Batch norm's running statistics over a step that is computed in several passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dbsl.plan.sampler import Part


class RunningStatistics:
    """A model's running statistics, which several passes move once, by the mean of what each makes.

    Each pass starts from the same statistics, as the joined batch would, and normalises by its own.

    Args:
        buffers: The model's floating-point buffers, [S].
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers = buffers
        self._start, self._mean = torch.empty_like(buffers), torch.empty_like(buffers)

    def begin(self) -> None:
        """Note what all passes start from."""
        self._start.copy_(self._buffers)
        self._mean.zero_()

    @contextmanager
    def passing(self, share: float) -> Iterator[None]:
        """Enclose a pass; `share` is its weight in the mean."""
        self._buffers.copy_(self._start)
        yield
        self._mean.add_(self._buffers, alpha=share)

    def end(self) -> None:
        """Give the model the mean of all passes."""
        self._buffers.copy_(self._mean)

    @contextmanager
    def of_micro_batch(self, part: Part) -> Iterator[None]:
        """Enclose the pass of a worker's batch, or of a micro-batch of it."""
        if part.begins and part.ends:
            yield
            return
        if part.begins:
            self.begin()
        with self.passing(part.share):
            yield
        if part.ends:
            self.end()
