"""Workers of several processes: each process's worker, and its part of that worker's batch.

A worker's processes have consecutive ranks. They take joint steps, so a worker has their combined
speed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from dbsl.config.settings import RunConfig
from dbsl.plan.machines import balanced_sizes, split_batch
from dbsl.plan.types import TimeModel


@dataclass(frozen=True)
class Islands:
    """How many processes each worker has."""

    sizes: tuple[int, ...]

    @staticmethod
    def of(config: RunConfig) -> Islands:
        """Return the islands of a run's workers, by default one process each."""
        return Islands(config.worker_processes or (1,) * config.workers)

    @property
    def several(self) -> bool:
        """Whether a worker has more than one process."""
        return max(self.sizes) > 1

    @property
    def processes(self) -> list[range]:
        """Return the processes of each worker, counted from 0 without a dedicated server."""
        ends = itertools.accumulate(self.sizes)
        return [range(end - size, end) for size, end in zip(self.sizes, ends, strict=True)]

    @property
    def owners(self) -> list[int]:
        """Return the worker of each process."""
        return [worker for worker, size in enumerate(self.sizes) for _ in range(size)]

    def place(self, process: int) -> int:
        """Return a process's place in its worker; 0 for a dedicated server (-1)."""
        return process - self.processes[self.owners[process]].start if process >= 0 else 0

    def join(self, models: TimeModel) -> TimeModel:
        """Return workers' time models from those of their processes, which end a step together."""
        if not self.several:
            return models
        joined = []
        for own in (models[list(processes)] for processes in self.processes):
            slope = 1 / (1 / own.slope).sum()
            intercept = slope * (own.intercept / own.slope).sum()
            joined.append(TimeModel(float(slope), float(intercept), float(own.floor.max())))
        return TimeModel.of(joined, len(joined))


def split_inside(batch: int, model: TimeModel, least: int) -> tuple[int, ...]:
    """Return each process's part of its worker's batch, such that all end a step together.

    `model` has their times. A process has at least `least` samples, or none if the batch is too
    small for all.
    """
    count = len(model)
    if batch < count * least:
        return tuple(split_batch(batch, np.full(count, batch), least).tolist())
    return tuple(balanced_sizes(batch, model, np.full(count, batch), least).tolist())
