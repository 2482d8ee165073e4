"""Each worker's batch size and share of the samples, by epoch and round."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from accelerate import Accelerator
from torch import nn

from dbsl.cluster.formats import numbers_of, trained_shapes
from dbsl.config.complete import says_unlike
from dbsl.config.fields import refuse, word_of
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.config.settings import RunConfig, steps_of_push, wire_of, workers_of
from dbsl.plan.follow import PlanMaker, Planner
from dbsl.plan.islands import Islands, parts_of_process, split_inside
from dbsl.plan.machines import KnownWorkers, split_batch
from dbsl.plan.members import Members
from dbsl.plan.sampler import (
    Order,
    Part,
    Step,
    TurnSampler,
    evaluation_batch_size,
    micro_parts,
)
from dbsl.plan.solve import round_half_up
from dbsl.plan.stages import Stage, Stages
from dbsl.plan.text import with_notes
from dbsl.plan.types import Plan, TimeModel, Turn
from dbsl.run.accelerator import nodes_of
from dbsl.run.times import Times

ConfigT = TypeVar("ConfigT", bound=RunConfig)  # a script's own config


class Plans:
    """The plan of each resolution, and what follows it as step times change.

    `first` has the plans that a run begins with; `planner` decides on those that come later.
    """

    def __init__(self, times: Times, stages: Stages, accelerator: Accelerator) -> None:
        self.stages, self.known = stages, times.known
        self.nodes = nodes_of(accelerator)  # the node of each process, from 0
        how = {"blocks": times.blocks, "say": accelerator.print}
        # Complete: all that was found or measured is filled in, so that it repeats the run.
        self.config, self.first, self.planner, self.sampler = plan_run(
            times.config, times.known, stages, times.samples, times.least, **how
        )
        self.islands = Islands.of(self.config)  # the processes of each worker
        self.place = _place(self.config, accelerator)
        self.extras = Extras.of(self.config)
        # How the workers' machines and network differ from what is planned.
        self.machine = self.extras.first(Extra.machine, self.config, accelerator) or Machine()
        self._device = accelerator.device

    @property
    def rounds(self) -> int:
        """Rounds per epoch; where gradients are pushed, pushes."""
        return self.sampler.rounds

    @property
    def largest_batch(self) -> int:
        """Images of a worker that are on the device at once, at the start."""
        several = self.place is not None
        return max(
            min(
                -(-worker.local_batch_size // (self.islands.sizes[number] if several else 1)),
                self._at_once(resolution, number) or math.inf,
            )
            for resolution, plan in self.first.items()
            for number, worker in enumerate(plan.workers)
        )

    @property
    def evaluation_batch(self) -> int:
        """Images of an evaluation that are on the device at once."""
        given, device = self.config.eval_batch_size, self._device.type
        return evaluation_batch_size(given, device, self.largest_batch)

    @property
    def statistics_batch(self) -> int:
        """Images of a batch for batch norm's statistics, which depend on it: on any device one."""
        return self.config.eval_batch_size or 256

    def stage_at(self, epoch: int) -> Stage:
        """Return the stage of an epoch."""
        return self.stages.at(epoch)

    def steps(self, plan: Plan, turn: Turn) -> list[Step]:
        """Return the steps of a turn; of a worker that has several processes, this one's parts."""
        steps = self.sampler.steps(plan, turn.workers, turn.epoch, turn.round)
        if self.place is None or not steps:
            return steps
        sizes, _ = self.inside(plan, *turn.workers, turn.epoch)
        return parts_of_process(steps, sizes, self.place, self.sampler.least)

    def inside(self, plan: Plan, worker: int, epoch: int) -> tuple[tuple[int, ...], TimeModel]:
        """Return what each process takes of its worker's whole batch, and their time models."""
        models = self.known.processes[self.stage_at(epoch).resolution]
        models = models[list(self.islands.processes[worker])]
        batch = plan.workers[worker].local_batch_size
        return split_inside(batch, models, self.sampler.least), models

    def micro_parts(self, step: Step, resolution: int) -> Iterator[Part]:
        """Yield what is computed at once of a step: its parts, or their micro-batches."""
        for part in step.parts:
            if len(part.indices):
                most = self._at_once(resolution, part.worker)
                yield from micro_parts(part, most, self.sampler.least)

    def _at_once(self, resolution: int, worker: int) -> int | None:
        sizes = self.known.micro_batch_sizes
        return None if sizes is None else sizes[resolution][worker]

    def batch_sizes(self, workers: Sequence[int]) -> dict[int, set[int]]:
        """Return the sizes of these workers' batches at the start, by resolution."""
        sizes: dict[int, set[int]] = {}
        for stage in self.stages:
            if stage.resolution in sizes:
                continue
            plan = self.first[stage.resolution]
            groups = [(w,) for w in workers] if plan.global_batch_size is None else [tuple(workers)]
            turns = (Turn(g, stage.first_epoch, r) for g in groups for r in range(self.rounds))
            steps = (s for turn in turns for s in self.steps(plan, turn))
            parts = (part for step in steps for part in self.micro_parts(step, stage.resolution))
            sizes[stage.resolution] = {len(part.indices) for part in parts}
        return sizes


class SimulatedTimes:
    """How long simulated rounds take, by the plan that is decided."""

    def __init__(self, plans: Plans, model: nn.Module) -> None:
        self.plans = plans
        self.numbers = numbers_of(model)  # what rounds send
        self.shapes = trained_shapes(model)  # shapes of the gradients that joint steps send

    def __call__(self, worker: int, epoch: int, round_: int) -> tuple[float, float]:
        """Return the seconds that a worker's round takes to compute, and on the network."""
        plans, machine = self.plans, self.plans.machine
        plan = plans.planner.at(epoch, round_)
        steps = plans.sampler.steps(plan, (worker,), epoch, round_)
        counts = [len(part.indices) for step in steps for part in step.parts]
        if plans.known.processes is None:
            model = plans.known.models[plans.stage_at(epoch).resolution][worker]
            seconds = model.time(sum(counts), len(steps))
        else:  # those of its slowest process, in each step
            sizes, models = plans.inside(plan, worker, epoch)
            parts = (split_batch(count, sizes, plans.sampler.least) for count in counts)
            seconds = sum(float(models.time(own, np.sign(own)).max()) for own in parts)
        seconds *= machine.factor(worker, epoch)
        seconds *= machine.noise_factor(worker, epoch, round_)
        return seconds, machine.exchange_s(self, len(steps), worker)


def settle_islands(config: ConfigT, processes: int, nodes: Sequence[int]) -> ConfigT:
    """Return the config with the processes of each worker by number; None: each has one.

    `nodes` has the node of each process.
    """
    given, served = config.worker_processes, config.dedicated_server
    if given is None:
        return config
    alone, total, less = processes == 1, processes - served, " less the dedicated server" * served
    if given == "node":
        sizes = tuple(Counter(nodes[served:]).values())
    elif len(given) == 1:
        sizes = given * (_simulated_workers(config) if alone else max(1, total // given[0]))
    else:
        sizes = given
    several, workers, unlike = max(sizes, default=1) > 1, len(sizes), sum(sizes) != total
    numbers = "worker_processes must be numbers in one process"
    added = f"worker_processes must add up to the {total} processes{less}"
    number = f"workers must equal those of worker_processes ({workers})"
    one = " with several processes a worker"
    refuse(
        [
            (alone and given == "node", numbers, given),
            (not alone and unlike, added, given),
            (config.workers not in (None, workers), number, config.workers),
            (several and config.sync != "bsp", f"sync must be bsp{one}", config.sync),
            (several and config.push != "weights", f"push must be weights{one}", config.push),
            *(
                (several and getattr(config, n) == "auto", f"{n} must not be auto{one}", "auto")
                for n in ("large_batch_size", "micro_batch_size")
            ),
        ]
    )
    return replace(config, worker_processes=sizes if several else None, workers=workers)


def _place(config: RunConfig, accelerator: Accelerator) -> int | None:
    """Return this process's place among those of its worker; None: it takes the whole batch."""
    islands = Islands.of(config)
    if not islands.several or accelerator.num_processes == 1:
        return None
    return islands.place(accelerator.process_index - config.dedicated_server)


def count_workers(config: ConfigT, processes: int) -> ConfigT:
    """Return the config with its number of workers and of small workers among them.

    One process holds all workers; of several, each is one, but for a dedicated server, or a part of
    one. Unless told otherwise one process has 4 workers where something is said of unlike ones,
    else 1: on equal samples several workers cost accuracy. A ratio above 0 makes at least one small
    worker.
    """
    alone, small_workers, ratio = processes == 1, config.small_workers, config.small_ratio
    total = workers_of(config, processes) or _simulated_workers(config)
    if small_workers is None:
        small_workers = max(1, round_half_up(ratio * total)) if ratio > 0 else 0
    other, less = config.workers not in (None, total), " less the dedicated server"
    number = f"workers must equal the number of processes{less * config.dedicated_server} ({total})"
    served = "dedicated_server must have at least 2 processes"
    most = f"small_workers must be at most the workers ({total})"
    sent = "wire must be float32 with one worker, which sends nothing"
    wired = config.wire != "float32"
    real = "wire must not be powersgd with simulated workers: it needs real processes"
    refuse(
        [
            (other, number, config.workers),
            (alone and config.dedicated_server, served, processes),
            (small_workers > total, most, small_workers),
            (alone and total == 1 and wired, sent, config.wire),
            (alone and wire_of(config).rank, real, config.wire),
        ]
    )
    return replace(config, workers=total, small_workers=small_workers)


def _simulated_workers(config: RunConfig) -> int:
    return config.workers or (4 if says_unlike(config) else 1)


def plan_run(
    config: ConfigT,
    known: KnownWorkers,
    stages: Stages,
    samples: int,
    least: int,
    *,
    blocks: Order | None,
    say: Callable[[str], object],
) -> tuple[ConfigT, dict[int, Plan], Planner, TurnSampler]:
    """Return the config with its small batches, the first plan by resolution, and what follows it.

    `least` is the fewest samples that the model trains on, `blocks` draws the order of epochs.
    """
    fewest = min(itertools.chain(*(known.micro_batch_sizes or {}).values()), default=least)
    why = "since batch norm sees one value a channel of a single sample"
    refuse([(fewest < least, f"micro_batch_size must be at least {least}, {why}", fewest)])
    maker = PlanMaker(config, known, samples, least)
    plans = {r: with_notes(maker.first(r, say), known, r) for r in config.resolutions}
    rounds = _rounds_of_epoch(plans, config)
    config = replace(config, small_batch_size=maker.small_batch_size())
    sampler = TurnSampler(config, samples, rounds, least, blocks)
    planner = Planner(
        plans,
        lambda epoch: stages.at(epoch).resolution,
        known.models,
        members=Members(config.workers, rounds),
        balance=word_of(config.balance),
        every=config.balance_every or rounds,
        maker=maker,
        sampler=sampler,
    )
    return config, plans, planner, sampler


def _rounds_of_epoch(plans: Mapping[int, Plan], config: RunConfig) -> int:
    """Return the rounds of an epoch: as configured, or a round for each push of gradients."""
    steps = {p.workers[0].steps for p in plans.values() if p.global_batch_size is not None}
    pushes, rounds = steps_of_push(config.push), config.rounds_per_epoch
    fewest, sizes = min(steps, default=rounds), (str(p.global_batch_size) for p in plans.values())
    most = f"rounds_per_epoch must be at most the {fewest} joint steps of an epoch"
    unlike = "global_batch_size must be one for all resolutions with push gradients"
    refuse(
        [
            (not pushes and rounds > fewest, most, rounds),
            (pushes and len(steps) > 1, unlike, ", ".join(sizes)),
        ]
    )
    return -(-fewest // pushes) if pushes else rounds
