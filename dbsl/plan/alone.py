"""Whether joint training pays: equal batches, balanced ones, or the fastest worker alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dbsl.base.errors import duration
from dbsl.plan.machines import balanced_sizes, largest_remainder
from dbsl.plan.types import Plan, TimeModel


@dataclass(frozen=True)
class EpochTimes:
    """Predicted seconds of an epoch in three ways of training on the same workers."""

    equal_s: float  # all have the same batch and the same share
    balanced_s: float  # all end together; in rounds, with large batches
    alone_s: float  # the fastest worker takes all samples and waits for nobody
    fastest: int  # that worker

    def describe(self) -> str:
        """Return the three times and the best of them, in one line."""
        alone = f"worker {self.fastest} alone"
        times = {"equal batches": self.equal_s, "balanced": self.balanced_s, alone: self.alone_s}
        best, second = sorted(times, key=times.__getitem__)[:2]
        told = ", ".join(f"{name} {duration(time_s)}" for name, time_s in times.items())
        gain = times[second] / times[best]
        verdict = f"{best} is best, {gain:.2f} times as fast as {second}"
        if gain < 1.005:
            verdict = f"{best} and {second} take the same time"
        return f"an epoch with {told}: {verdict}"


def epoch_times(
    plan: Plan,
    model: TimeModel,
    most: Sequence[int | None],
    rounds: int = 1,
    least: int = 1,
    exchange_s: float = 0.0,
) -> EpochTimes:
    """Predict an epoch of the plan's samples in the three ways.

    Args:
        plan: Joint steps, each of the plan's global batch, are split again. In rounds, the balanced
            way uses large batches.
        model: Time of a step of each worker, arrays [n].
        most: Largest batch of each worker, [n]. In joint steps None is no bound, and a worker alone
            takes a larger global batch in several passes.
        rounds: Rounds per epoch; joint steps exchange in each step.
        least: Fewest samples of a worker in a joint step.
        exchange_s: Seconds of a sum over all workers, which the first two ways need.
    """
    samples, joint = plan.samples, plan.global_batch_size is not None
    limits = np.array([plan.global_batch_size if size is None else size for size in most])
    if joint:
        steps = exchanges = plan.workers[0].steps
        passes = steps * -(-plan.global_batch_size // limits)
        held = np.minimum(limits, plan.global_batch_size)
        sizes = np.array([worker.local_batch_size for worker in plan.workers])
        if held.sum() >= plan.global_batch_size >= least * len(held):
            sizes = balanced_sizes(plan.global_batch_size, model, held, least)
        balanced_s = float(model.time(largest_remainder(sizes, samples), steps).max())
    else:
        passes, exchanges, balanced_s = -(-samples // limits), rounds, plan.all_large_time_s
    alone_s = model.time(np.full(len(limits), samples), passes)
    fastest = int(alone_s.argmin())
    more = exchange_s * exchanges
    together = (plan.equal_batch_time_s + more, balanced_s + more)
    return EpochTimes(*together, float(alone_s[fastest]), fastest)
