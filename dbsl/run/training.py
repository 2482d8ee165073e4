"""What a run trains with, complete: its data, model, stages and plans; nothing is built here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dbsl.cluster.formats import numbers_of, trained_shapes
from dbsl.config.hooks import Extras, Machine
from dbsl.config.settings import RunConfig
from dbsl.data.sources import Source, TrainingData
from dbsl.data.transforms import Mixing
from dbsl.loss import LossOf
from dbsl.plan.follow import Planner
from dbsl.plan.islands import Islands, parts_of_process, split_inside
from dbsl.plan.ledger import TurnSampler
from dbsl.plan.machines import KnownWorkers, split_batch
from dbsl.plan.sampler import Part, Step, evaluation_batch_size, micro_parts
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.types import Plan, Segment, TimeModel, Turn

ConfigT = TypeVar("ConfigT", bound=RunConfig)  # a script's own config


@dataclass(frozen=True)
class Run(Generic[ConfigT]):
    """What a run trains with: its config, complete, and what the config describes."""

    config: ConfigT  # with all that was found or measured filled in, so that it repeats the run
    data: TrainingData
    stages: tuple[Stage, ...]
    model: nn.Module  # on its device; nothing is wrapped around it
    plans: dict[int, Plan]  # at the start, by resolution
    planner: Planner
    known: KnownWorkers  # what the workers can do
    sampler: TurnSampler
    islands: Islands  # the processes of each worker
    machine: Machine  # how the workers' machines and network differ from that
    mixing: Mixing | None  # mixes images and labels of a batch
    loss_of: LossOf  # mean loss of a model on images [B, 3, R, R] and labels
    # Builds what steps on a model; each group's rate is in ``lr_scale``.
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    default_workers: bool = False  # nobody has said how many workers there are
    nodes: tuple[int, ...] = (0,)  # the node of each process, from 0
    # This process's, among those of its worker; None: it takes the whole batch.
    place: int | None = None
    figures: tuple[str, ...] = ()  # names of what the loss function gives besides the loss
    also: Mapping[str, Source] = field(default_factory=dict)  # further evaluation sets, by name
    extras: Extras = field(default_factory=Extras)  # what its settings ask for of dbsl/extras

    @property
    def rounds(self) -> int:
        """Rounds per epoch; where gradients are pushed, pushes."""
        return self.sampler.rounds

    @cached_property
    def transforms(self) -> dict[int, Any]:
        """Augmentation, by resolution."""
        config = self.config
        how = config.augmentation, config.seed
        return {r: self.data.transform(r, *how) for r in config.resolutions}

    @property
    def largest_batch(self) -> int:
        """Images of a worker that are on the device at once, at the start."""
        several = self.place is not None
        return max(
            min(
                -(-worker.local_batch_size // (self.islands.sizes[number] if several else 1)),
                self._at_once(resolution, number) or math.inf,
            )
            for resolution, plan in self.plans.items()
            for number, worker in enumerate(plan.workers)
        )

    @property
    def evaluation_batch(self) -> int:
        """Images of an evaluation that are on the device at once."""
        device = next(self.model.parameters()).device.type
        return evaluation_batch_size(self.config.eval_batch_size, device, self.largest_batch)

    @property
    def statistics_batch(self) -> int:
        """Images of a batch for batch norm's statistics, which depend on it: on any device one."""
        return self.config.eval_batch_size or 256

    def stage_at(self, epoch: int) -> Stage:
        """Return the stage of an epoch."""
        return stage_at(self.stages, epoch)

    def steps(self, segment: Segment, turn: Turn) -> list[Step]:
        """Return the steps of a turn; of a worker that has several processes, this one's parts."""
        steps, least = self.sampler.steps(segment, turn), self.sampler.least
        if self.place is None or not steps:
            return steps
        sizes, _ = self.inside(segment, turn)
        return parts_of_process(steps, sizes, self.place, least)

    def inside(self, segment: Segment, turn: Turn) -> tuple[tuple[int, ...], TimeModel]:
        """Return what each process takes of its worker's whole batch, and their time models."""
        (worker,) = turn.workers
        models = self.known.processes[self.stage_at(turn.epoch).resolution]
        models = models[list(self.islands.processes[worker])]
        batch = segment.plan.workers[worker].local_batch_size
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

    def batches(
        self, parts: Sequence[Part], resolution: int, epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of parts of an epoch: images [B, 3, R, R] and labels [B].

        With mixing the labels are shares of the classes, [B, C]. Loader processes, if there are
        any, begin here.
        """
        indices = [part.indices for part in parts]
        batches = self.data.train.batches(indices, self.transforms[resolution], epoch)
        return self.mixing.mixed(batches, parts, epoch) if self.mixing else batches

    def batch_sizes(self, workers: Sequence[int]) -> dict[int, set[int]]:
        """Return the sizes of these workers' batches at the start, by resolution."""
        sizes: dict[int, set[int]] = {}
        for stage in self.stages:
            if stage.resolution in sizes:
                continue
            plan = self.plans[stage.resolution]  # the planner decides when it is asked
            groups = [(w,) for w in workers] if plan.global_batch_size is None else [tuple(workers)]
            turns = (Turn(g, stage.first_epoch, r) for g in groups for r in range(self.rounds))
            steps = (s for turn in turns for s in self.steps(Segment(plan), turn))
            parts = (part for step in steps for part in self.micro_parts(step, stage.resolution))
            sizes[stage.resolution] = {len(part.indices) for part in parts}
        return sizes


class SimulatedTimes:
    """How long simulated rounds take. The planner is asked for the plan, and may decide it."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.numbers = numbers_of(run.model)  # what rounds send
        self.shapes = trained_shapes(run.model)  # shapes of the gradients that joint steps send

    def __call__(self, worker: int, epoch: int, round_: int) -> tuple[float, float]:
        """Return the seconds that a worker's round takes to compute, and on the network."""
        run, machine = self.run, self.run.machine
        turn, segment = Turn((worker,), epoch, round_), run.planner.at(epoch, round_)
        steps = run.sampler.steps(segment, turn)
        counts = [len(part.indices) for step in steps for part in step.parts]
        if run.known.processes is None:
            model = run.known.models[run.stage_at(epoch).resolution][worker]
            seconds = model.time(sum(counts), len(steps))
        else:  # those of its slowest process, in each step
            sizes, models = run.inside(segment, turn)
            parts = (split_batch(count, sizes, run.sampler.least) for count in counts)
            seconds = sum(float(models.time(own, np.sign(own)).max()) for own in parts)
        seconds *= machine.factor(worker, epoch)
        seconds *= machine.noise_factor(worker, epoch, round_)
        return seconds, machine.exchange_s(self, len(steps), worker)
