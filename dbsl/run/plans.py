"""Each worker's batch size and share of the samples, by epoch and round."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import require
from dbsl.cluster.formats import numbers_of, trained_shapes
from dbsl.config.complete import check_lengths, says_unlike
from dbsl.config.fields import word_of
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.config.settings import RunConfig, steps_of_push, wire_of, workers_of
from dbsl.plan.batches import TurnSampler
from dbsl.plan.follow import Planner
from dbsl.plan.islands import Islands
from dbsl.plan.machines import split_batch
from dbsl.plan.members import Members
from dbsl.plan.sampler import evaluation_batch_size
from dbsl.plan.solve import round_half_up
from dbsl.plan.spec import make_plan, specs_of
from dbsl.plan.stages import Stage, Stages
from dbsl.plan.text import with_notes
from dbsl.plan.types import Plan
from dbsl.run.accelerator import nodes_of
from dbsl.run.times import Times

ConfigT = TypeVar("ConfigT", bound=RunConfig)  # a script's own config


class Plans:
    """The plan of each resolution, and later plans as step times change.

    `first` has the plans with which a run begins; `planner` decides the later ones.
    """

    def __init__(self, times: Times, stages: Stages, accelerator: Accelerator) -> None:
        # All found or measured values are filled in, so that it repeats the run.
        self.config, self.known, self.stages = times.config, times.known, stages
        config, known, least = times.config, times.known, times.least
        fewest = min(itertools.chain(*(known.micro_batch_sizes or {}).values()), default=least)
        why = "since batch norm sees one value a channel of a single sample"
        require(fewest >= least, f"micro_batch_size must be at least {least}, {why}", fewest)
        self.nodes = nodes_of(accelerator)  # the node of each process, from 0
        self.islands = Islands.of(config)  # the processes of each worker
        specs = specs_of(config, known, times.samples, least)
        self.first = {
            r: with_notes(make_plan(spec, known.models[r]), known, r) for r, spec in specs.items()
        }
        rounds = _rounds_of_epoch(self.first, config)

        def resolution_at(epoch: int) -> int:
            return stages.at(epoch).resolution

        draws = {"blocks": times.blocks, "known": known, "resolution_at": resolution_at}
        draws["place"] = _place(config, accelerator)
        self.sampler = TurnSampler(config, times.samples, rounds, least, **draws)
        self.planner = Planner(
            *(self.first, resolution_at, known.models),
            members=Members(config.workers, rounds),
            balance=word_of(config.balance),
            every=config.balance_every or rounds,
            specs=specs,
            sampler=self.sampler,
        )
        self.extras = Extras.of(config)
        # How the workers' machines and network differ from the plan.
        self.machine = self.extras.first(Extra.machine, config, accelerator) or Machine()
        self._device = accelerator.device

    @property
    def place(self) -> int | None:
        """This process's index within its worker; None: it takes the whole batch."""
        return self.sampler.place

    @property
    def rounds(self) -> int:
        """Rounds per epoch; pushes, if gradients are pushed."""
        return self.sampler.rounds

    @property
    def largest_batch(self) -> int:
        """Most images of a worker on the device at once, at the start."""
        several = self.place is not None
        return max(
            min(
                -(-worker.local_batch_size // (self.islands.sizes[number] if several else 1)),
                self.sampler.at_once(resolution, number) or math.inf,
            )
            for resolution, plan in self.first.items()
            for number, worker in enumerate(plan.workers)
        )

    @property
    def evaluation_batch(self) -> int:
        """Images on the device at once in an evaluation."""
        given, device = self.config.eval_batch_size, self._device.type
        return evaluation_batch_size(given, device, self.largest_batch)

    @property
    def statistics_batch(self) -> int:
        """Batch size for batch norm's statistics, which depend on it: the same on any device."""
        return self.config.eval_batch_size or 256

    def stage_at(self, epoch: int) -> Stage:
        """Return the stage of an epoch."""
        return self.stages.at(epoch)

    def batch_sizes(self, workers: Sequence[int]) -> dict[int, set[int]]:
        """Return the sizes of these workers' batches at the start, by resolution."""
        sizes: dict[int, set[int]] = {}
        for stage in self.stages:
            if stage.resolution in sizes:
                continue
            plan = self.first[stage.resolution]
            groups = [(w,) for w in workers] if plan.global_batch_size is None else [tuple(workers)]
            turns = itertools.product(groups, [stage.first_epoch], range(self.rounds))
            steps = (step for turn in turns for step in self.sampler.batches_of(plan, *turn))
            batches = (batch for step in steps for batch in step.batches)
            sizes[stage.resolution] = {len(batch.indices) for batch in batches}
        return sizes


class SimulatedTimes:
    """How long simulated rounds take under their plan."""

    def __init__(self, plans: Plans, model: nn.Module) -> None:
        self.plans = plans
        self.numbers = numbers_of(model)  # what rounds send
        self.shapes = trained_shapes(model)  # of the gradients that joint steps send

    def __call__(self, worker: int, epoch: int, round_: int) -> tuple[float, float]:
        """Return a worker's seconds of computing and of network time in a round."""
        plans, machine = self.plans, self.plans.machine
        plan = plans.planner.at(epoch, round_)
        steps = plans.sampler.steps(plan, (worker,), epoch, round_)
        counts = [len(part.indices) for step in steps for part in step.parts]
        if plans.known.processes is None:
            model = plans.known.models[plans.stage_at(epoch).resolution][worker]
            seconds = model.time(sum(counts), len(steps))
        else:  # the time of its slowest process in each step
            sizes, models = plans.sampler.inside(plan, worker, epoch)
            parts = (split_batch(count, sizes, plans.sampler.least) for count in counts)
            seconds = sum(float(models.time(own, np.sign(own)).max()) for own in parts)
        seconds *= machine.factor(worker, epoch)
        seconds *= machine.noise_factor(worker, epoch, round_)
        return seconds, machine.exchange_s(self, len(steps), worker)


def settle_islands(config: ConfigT, processes: int, nodes: Sequence[int]) -> ConfigT:
    """Return the config with each worker's number of processes; None: each has one.

    `nodes` has each process's node number.
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
    several, workers = max(sizes, default=1) > 1, len(sizes)
    must = "worker_processes must be numbers in one process"
    require(not alone or given != "node", must, given)
    must = f"worker_processes must add up to the {total} processes{less}"
    require(alone or sum(sizes) == total, must, given)
    must = f"workers must equal those of worker_processes ({workers})"
    require(config.workers in (None, workers), must, config.workers)
    if several:
        one = " with several processes a worker"
        require(config.sync == "bsp", f"sync must be bsp{one}", config.sync)
        require(config.push == "weights", f"push must be weights{one}", config.push)
        for name in ("large_batch_size", "micro_batch_size"):
            require(getattr(config, name) != "auto", f"{name} must not be auto{one}", "auto")
    return replace(config, worker_processes=sizes if several else None, workers=workers)


def _place(config: RunConfig, accelerator: Accelerator) -> int | None:
    """Return this process's index within its worker; None: it takes the whole batch."""
    islands = Islands.of(config)
    if not islands.several or accelerator.num_processes == 1:
        return None
    return islands.place(accelerator.process_index - config.dedicated_server)


def count_workers(config: ConfigT, processes: int) -> ConfigT:
    """Return the config with its number of workers and of small workers.

    One process simulates all workers. With several, each process except a dedicated server is a
    worker or part of one. By default, one process has 4 workers if a setting makes workers differ,
    else 1: on equal samples, several workers cost accuracy. A ratio above 0 makes at least one
    small worker.
    """
    alone, small_workers, ratio = processes == 1, config.small_workers, config.small_ratio
    total = workers_of(config, processes) or _simulated_workers(config)
    if small_workers is None:
        small_workers = max(1, round_half_up(ratio * total)) if ratio > 0 else 0
    less = " less the dedicated server" * config.dedicated_server
    must = f"workers must equal the number of processes{less} ({total})"
    require(config.workers in (None, total), must, config.workers)
    must = "dedicated_server must have at least 2 processes"
    require(not (alone and config.dedicated_server), must, processes)
    must = f"small_workers must be at most the workers ({total})"
    require(small_workers <= total, must, small_workers)
    if alone:
        must = "wire must be float32 with one worker, which sends nothing"
        require(total > 1 or config.wire == "float32", must, config.wire)
        must = "wire must not be powersgd with simulated workers: it needs real processes"
        require(not wire_of(config).rank, must, config.wire)
    complete = replace(config, workers=total, small_workers=small_workers)
    if config.resolutions:
        check_lengths(complete)  # before opening the data
    return complete


def _simulated_workers(config: RunConfig) -> int:
    return config.workers or (4 if says_unlike(config) else 1)


def _rounds_of_epoch(plans: Mapping[int, Plan], config: RunConfig) -> int:
    """Return the rounds per epoch: as configured, or one for each push of gradients."""
    joint = [plan for plan in plans.values() if plan.global_batch_size is not None]
    steps, rounds = {plan.workers[0].steps for plan in joint}, config.rounds_per_epoch
    fewest, sizes = min(steps, default=rounds), ", ".join(str(p.global_batch_size) for p in joint)
    if pushes := steps_of_push(config.push):
        text = "global_batch_size must be one for all resolutions with push gradients"
        require(len(steps) == 1, text, sizes)
        return -(-fewest // pushes)
    text = f"rounds_per_epoch must be at most the {fewest} joint steps of an epoch"
    require(rounds <= fewest, text, rounds)
    return rounds
