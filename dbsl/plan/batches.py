"""The batches of a turn: each worker's samples, and the part a process computes at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dbsl.config.settings import RunConfig, steps_of_push
from dbsl.plan.islands import Islands, split_inside
from dbsl.plan.machines import WorkerProfiles, bounded_split
from dbsl.plan.sampler import (
    EpochSampler,
    Order,
    Step,
    StepSampler,
    micro_parts,
    parts_of,
)
from dbsl.plan.types import Plan, TimeModel


@dataclass(frozen=True)
class TurnSampler:
    """The samples of a turn, by worker and batch, under the plan in force.

    `known` has what a process computes at once, and the speeds of one worker's processes; `place`
    is this process's place among them. None: it takes its worker's whole batches.
    """

    config: RunConfig
    samples: int  # per epoch
    rounds: int  # per epoch; pushes, if gradients are pushed
    least: int  # samples of a worker in a shorter global batch, unless it has none
    blocks: Order | None = None  # draws an epoch's order if data are read in groups
    known: WorkerProfiles | None = None
    resolution_at: Callable[[int], int] = lambda epoch: 0
    place: int | None = None

    def batches_of(self, plan: Plan, workers: Sequence[int], epoch: int, round_: int) -> list[Step]:
        """Return the steps of these workers' turn for this process, with their batches.

        There are none if a remainder has too few samples for all workers and rounds.
        """
        steps, resolution = self.steps(plan, workers, epoch, round_), self.resolution_at(epoch)
        if self.place is not None and steps:
            sizes, _ = self.inside(plan, *workers, epoch)
            steps = _steps_of_process(steps, sizes, self.place, self.least)
        found = []
        for step in steps:
            at_once = (
                micro_parts(part, self.at_once(resolution, part.worker), self.least)
                for part in step.parts
            )
            found.append(replace(step, batches=tuple(itertools.chain(*at_once))))
        return found

    def at_once(self, resolution: int, worker: int) -> int | None:
        """Return the most samples that a worker computes at once; None: its whole batch."""
        sizes = self.known and self.known.micro_batch_sizes
        return None if sizes is None else sizes[resolution][worker]

    def inside(self, plan: Plan, worker: int, epoch: int) -> tuple[tuple[int, ...], TimeModel]:
        """Return each process's part of its worker's whole batch, and the processes' models."""
        models = self.known.processes[self.resolution_at(epoch)]
        models = models[list(Islands.of(self.config).processes[worker])]
        return split_inside(plan.workers[worker].local_batch_size, models, self.least), models

    def steps(self, plan: Plan, workers: Sequence[int], epoch: int, round_: int) -> list[Step]:
        """Return the steps of these workers' turn: the parts of all their processes."""
        config, every = self.config, steps_of_push(self.config.push)
        sizes = [worker.local_batch_size for worker in plan.workers]
        if plan.global_batch_size is None:
            (worker,) = workers
            return self.sampler(plan).steps(worker, epoch, round_, sizes[worker])
        how = {"seed": config.seed, "drop_last": config.drop_last}
        how |= {"least": self.least, "blocks": self.blocks}
        sampler = StepSampler(self.samples, plan.global_batch_size, **how)
        count = sampler.steps_per_epoch
        rounds = (round_, round_ + 1)
        first, last = (every * r if every else count * r // self.rounds for r in rounds)
        return [sampler.step(epoch, n, sizes, workers) for n in range(first, min(last, count))]

    def sampler(self, plan: Plan) -> EpochSampler:
        """Return the sampler of a plan of rounds, from the round in which it took effect."""
        shares = np.array([worker.samples for worker in plan.workers])
        rounds, remaining = self.rounds - plan.first_round, self.samples - plan.taken
        if plan.taken or plan.first_round:  # an epoch's shares, scaled to what remains of it
            there = np.flatnonzero(shares)  # a lost worker gets none
            each = rounds * self.least
            there = there[: max(1, remaining // each)]  # few samples go to the first workers
            weights, shares = shares[there], np.zeros_like(shares)
            shares[there] = bounded_split(remaining, weights, min(each, remaining), remaining)
        return EpochSampler(
            shares,
            rounds=rounds,
            seed=self.config.seed,
            first_round=plan.first_round,
            start=plan.taken,
            least=self.least,
            blocks=self.blocks,
        )

    def taken_before(self, plan: Plan, round_: int) -> int:
        """Return how many of the epoch's samples are taken before a round of this plan."""
        if plan.global_batch_size is not None:
            return 0  # a joint step has the same samples with any plan
        return self.sampler(plan).start_of(round_)

    def count(self, plan: Plan, worker: int, epoch: int, round_: int) -> int:
        """Return how many samples a worker's round has."""
        steps = self.steps(plan, (worker,), epoch, round_)
        return sum(len(part.indices) for step in steps for part in step.parts)


def _steps_of_process(
    steps: Sequence[Step], sizes: tuple[int, ...], place: int, least: int
) -> list[Step]:
    """Return one process's parts of a worker's steps; each sample belongs to one process.

    Parts are in proportion to `sizes`, as are their weights in the step's loss.
    """
    found, before = [], 0
    for step in steps:
        (whole,) = step.parts
        parts, odd = parts_of(whole.indices, sizes, {place: whole.worker}, least)
        reweighted = before not in (0, len(whole.indices))
        found.append(replace(step, parts=parts, odd=odd, reweighted=reweighted))
        before = len(whole.indices)
    return found
