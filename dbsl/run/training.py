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

from dbsl.config.hooks import Extras
from dbsl.config.settings import RunConfig
from dbsl.data.augment import Mixing
from dbsl.data.sources import Source, TrainingData
from dbsl.extras.average import WeightAverage
from dbsl.extras.emulate import Emulation, Link
from dbsl.extras.noise import NoiseProbe
from dbsl.loss import LossOf
from dbsl.plan.follow import Planner
from dbsl.plan.machines import bounded_split
from dbsl.plan.sampler import (
    Blocks,
    EpochSampler,
    Part,
    Step,
    StepSampler,
    evaluation_batch_size,
    micro_parts,
)
from dbsl.plan.stages import Stage, batch_scaling, stage_at
from dbsl.plan.types import CurrentPlan, Plan, Restart, Round, TimeModel

ConfigT = TypeVar("ConfigT", bound=RunConfig)  # a script's own config


@dataclass(frozen=True)
class Run(Generic[ConfigT]):
    """What a run trains with: its config, complete, and what the config describes.

    Attributes:
        config: The config with everything that was found or measured filled in, so that it repeats
            the run.
        data: Training and evaluation images.
        stages: Which epochs have which resolution and learning rate.
        model: The model, on its device; nothing is wrapped around it.
        plans: Every worker's batches and share at the start, by resolution.
        planner: Gives the plan of each epoch; it may follow the machines.
        models: Planned time models, one per worker, by resolution.
        emulation: How much slower than these the workers are made to be.
        transforms: Augmentation, by resolution.
        rounds: Rounds per epoch; where gradients are pushed, pushes.
        least: Samples of a worker in a shorter global batch, unless it has none.
        noise: Measures what the gradient noise scale is estimated from.
        mixing: Mixes images and labels of a batch; None: they stay as they are.
        loss_of: Mean loss of a model on images [B, 3, R, R] and labels.
        build_optimizer: Builds what steps on a model; each group's rate is in ``lr_scale``.
        ema: Average of the global weights over epochs; None: not kept.
        measured: Whether the time models were measured, not given.
        micro_batch_sizes: Most samples that a worker has on the device at once, [worker], by
            resolution; None: its whole batch.
        default_workers: Whether nobody has said how many workers there are.
        default_resolutions: Whether nobody has said at which resolutions it trains.
        nodes: The node of each process, from 0.
        figures: Names of what the loss function gives besides the loss.
        also: Further evaluation sets, by name.
        extras: What its settings ask for of dbsl/extras.
    """

    config: ConfigT
    data: TrainingData
    stages: tuple[Stage, ...]
    model: nn.Module
    plans: dict[int, Plan]
    planner: Planner
    models: dict[int, list[TimeModel]]
    emulation: Emulation
    transforms: dict[int, Any]
    rounds: int
    least: int
    noise: NoiseProbe
    mixing: Mixing | None
    loss_of: LossOf
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    ema: WeightAverage | None
    measured: bool
    micro_batch_sizes: Mapping[int, Sequence[int]] | None = None
    default_workers: bool = False
    default_resolutions: bool = False
    nodes: tuple[int, ...] = (0,)
    figures: tuple[str, ...] = ()
    also: Mapping[str, Source] = field(default_factory=dict)
    extras: Extras = field(default_factory=Extras)

    @property
    def worker_nodes(self) -> tuple[int, ...]:
        """The node of each worker, from 0."""
        several = len(self.nodes) > 1  # processes, of which the last ones have the workers
        workers = self.config.workers
        return self.nodes[-workers:] if several else (0,) * workers

    @property
    def evaluation_transform(self) -> Any:
        """What images pass for an evaluation: the last resolution, nothing at random."""
        return self.data.transform(self.config.resolutions[-1], "none", self.config.seed)

    @property
    def largest_batch(self) -> int:
        """Images of a worker that are on the device at once, at the start."""
        return max(
            min(worker.local_batch_size, self._at_once(resolution, number) or math.inf)
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

    def steps(self, segment: CurrentPlan, turn: Round) -> list[Step]:
        """Return the optimizer steps of a turn: whose samples, in which batches."""
        samples, blocks = len(self.data.train), self.blocks
        return steps_of(segment, turn, self.config, self.rounds, samples, self.least, blocks)

    @property
    def blocks(self) -> Blocks | None:
        """What draws an epoch's order where data are read in groups."""
        return getattr(self.data.train, "blocks", None)  # data of one's own may not know of it

    def micro_parts(self, step: Step, resolution: int) -> Iterator[Part]:
        """Yield what is computed at once of a step: its parts, or their micro-batches."""
        for part in step.parts:
            if len(part.indices):
                yield from micro_parts(part, self._at_once(resolution, part.worker), self.least)

    def _at_once(self, resolution: int, worker: int) -> int | None:
        sizes = self.micro_batch_sizes
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

    def rate_factor(self, segment: CurrentPlan, turn: Round) -> float:
        """Return the factor on the learning rate of a turn's worker, by its batch size."""
        plan = segment.plan
        if plan.global_batch_size is not None:
            return 1.0  # a joint step has one batch for all
        sizes = [worker.local_batch_size for worker in plan.workers]
        large = plan.large_batch_size or max(sizes)
        return batch_scaling(self.config.lr_scaling, sizes[turn.workers[0]] / large)

    def batch_sizes(self, workers: Sequence[int]) -> dict[int, set[int]]:
        """Return the sizes of these workers' batches at the start, by resolution."""
        sizes: dict[int, set[int]] = {}
        joint = next(iter(self.plans.values())).global_batch_size is not None
        for epoch in range(self.config.epochs):
            of_resolution = sizes.setdefault(self.stage_at(epoch).resolution, set())
            if of_resolution:
                continue
            # The planner decides when it is asked; this is the plan at the start.
            segment = CurrentPlan(self.plans[self.stage_at(epoch).resolution])
            for group in [tuple(workers)] if joint else [(worker,) for worker in workers]:
                for round_ in range(self.rounds):
                    turn = Round(group, epoch, round_)
                    steps = self.steps(segment, turn)
                    resolution = self.stage_at(epoch).resolution
                    parts = [p for step in steps for p in self.micro_parts(step, resolution)]
                    of_resolution |= {len(part.indices) for part in parts}
        return sizes

    def fixed_segments(self, start: Restart) -> dict[int, list[CurrentPlan]]:
        """Return the plans of epochs that other workers have begun, by epoch."""
        fixed, samples = {}, len(self.data.train)
        for epoch, left in start.left.items():
            rest = sum(end - begin for begin, end in left)
            first_epoch, first_round = divmod(start.clock, self.rounds)
            if rest < samples:
                plan = self.plans[self.stage_at(epoch).resolution]
                begun = first_round if epoch == first_epoch else 0
                fixed[epoch] = [CurrentPlan(plan, begun, samples - rest, left)]
        return fixed

    def duration(
        self, worker: int, epoch: int, round_: int, segment: CurrentPlan | None = None
    ) -> float:
        """Return the seconds that a simulated worker computes in a round, by the plan in force.

        The planner may decide when it is asked for that; a given `segment` is taken instead.
        """
        turn = Round((worker,), epoch, round_)
        steps = self.steps(segment or self.planner.at(epoch, round_), turn)
        samples = sum(len(part.indices) for step in steps for part in step.parts)
        planned = self.models[self.stage_at(epoch).resolution][worker].time(samples, len(steps))
        return (
            planned
            * self.emulation.factor(worker, epoch)
            * self.emulation.noise_factor(worker, epoch, round_)
        )

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Numbers of a gradient, and of the state that rounds exchange."""
        tensors = self.model.state_dict().values()
        state = sum(t.numel() for t in tensors if t.is_floating_point())
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad), state

    def exchange(
        self, worker: int, epoch: int, round_: int, segment: CurrentPlan | None = None
    ) -> float:
        """Return the seconds that a simulated worker's round takes on the emulated link.

        The planner may decide when it is asked for the plan in force; a given `segment` is taken
        instead.

        The server is with worker 0, unless it has a process of its own.
        """
        config = self.config
        if config.link_gbps is None:
            return 0.0
        link = Link(config.link_gbps, config.link_ms, config.link_overlap)
        parameters, state = self.numbers
        size = 4 * (parameters if config.sync == "step" else state)  # bytes of float32
        if config.sync == "step":
            current = segment or self.planner.at(epoch, round_)
            steps = len(self.steps(current, Round((worker,), epoch, round_)))
            compute_s = self.duration(worker, epoch, round_, current) / max(steps, 1)
            return steps * link.joint_step_s(size, config.workers, compute_s)
        if config.sync == "bsp":
            at_server = config.merge == "delta" or config.push == "gradients"
            return link.barrier_s(size, config.workers, at_server=at_server)
        return 0.0 if worker == 0 and not config.dedicated_server else link.round_trip_s(size)


def steps_of(
    segment: CurrentPlan,
    turn: Round,
    config: RunConfig,
    rounds: int,
    samples: int,
    least: int,
    blocks: Blocks | None = None,
) -> list[Step]:
    """Return the optimizer steps of a turn: whose samples, in which batches."""
    plan, sizes = segment.plan, [w.local_batch_size for w in segment.plan.workers]
    if plan.global_batch_size is None:
        (worker,) = turn.workers
        sampler = round_sampler(
            segment, rounds, samples, config.seed, least, config.aug_repeats, blocks
        )
        return sampler.steps(worker, turn.epoch, turn.round, sizes[worker])
    sampler = StepSampler(
        samples,
        plan.global_batch_size,
        seed=config.seed,
        drop_last=config.drop_last,
        least=least,
        repeats=config.aug_repeats,
        blocks=blocks,
    )
    count = sampler.steps_per_epoch
    if config.push == "gradients":
        first, last = (config.push_every * r for r in (turn.round, turn.round + 1))
    else:
        first, last = (count * r // rounds for r in (turn.round, turn.round + 1))
    return sampler.steps(turn.workers, turn.epoch, first, min(last, count), sizes)


def round_sampler(
    segment: CurrentPlan,
    rounds: int,
    samples: int,
    seed: int,
    least: int = 1,
    repeats: int = 1,
    blocks: Blocks | None = None,
) -> EpochSampler:
    """Return the sampler of a plan of rounds, from the round on in which it came into force."""
    shares = np.array([worker.samples for worker in segment.plan.workers])
    if segment.start or segment.first_round:  # the shares of an epoch, scaled to what is left
        left, rounds_left = samples - segment.start, rounds - segment.first_round
        there = np.flatnonzero(shares)  # a worker that was lost stays without
        each = rounds_left * least
        there = there[: max(1, left // each)]  # where samples are few, the first ones have enough
        weights, shares = shares[there], np.zeros_like(shares)
        shares[there] = bounded_split(
            left, weights, np.full(len(there), min(each, left)), np.full(len(there), left)
        )
    return EpochSampler(
        shares,
        rounds=rounds - segment.first_round,
        seed=seed,
        first_round=segment.first_round,
        start=segment.start,
        least=least,
        left=segment.left,
        repeats=repeats,
        blocks=blocks,
    )
