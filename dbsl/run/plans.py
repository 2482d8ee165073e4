"""What a run's workers can do, given or measured, and its plans made from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.words import px
from dbsl.data.sources import TrainingData
from dbsl.plan.dual_batch import plan_with_fallback
from dbsl.plan.joint_steps import balanced_steps, plan_steps, with_proportions
from dbsl.plan.machines import Machines, largest_remainder
from dbsl.plan.split import balanced_sizes, check_global_batch
from dbsl.plan.types import Plan, TimeModel, WorkerPlan
from dbsl.profile.cache import Profiler, Setup
from dbsl.profile.memory import GIB
from dbsl.profile.noise_probe import LossOf
from dbsl.profile.step_time import NO_OPTIMIZER
from dbsl.run.config import RunConfig, for_workers, from_workers
from dbsl.run.evidence import useful_batch_size

_NO_PART = WorkerPlan(0, 0, 0, 0.0, 0.0, 0.0, small=False)

STEPS_A_ROUND = 10  # of a worker, at least, with the batch that `auto` chooses
_SMALLEST_AUTO = 16  # samples: below them fewer steps do

SAME_MACHINE = 0.10  # relative difference of step times up to which workers count as equal


@dataclass(frozen=True)
class Knowledge:
    """What is known of the workers, by resolution, one entry per worker."""

    models: dict[int, list[TimeModel]]
    large_batch_sizes: dict[int, list[int]]
    limits: dict[int, np.ndarray | None]  # most samples a step, [n]; None: no bound
    measured: bool


def takes_joint_steps(config: RunConfig) -> bool:
    """Whether all workers share one global batch a step, instead of rounds of their own."""
    return config.sync == "step" or config.push == "gradients"


def default_large_batch_size(round_samples: int) -> int:
    """Return the power of two in [16, 128] nearest to a tenth of a round, at most all of it.

    Many fewer than ten steps a round would leave a small data set with next to no updates.
    """
    power = 2 ** round(math.log2(max(1, round_samples / 10)))
    return max(1, min(max(_SMALLEST_AUTO, power), 128, round_samples))


def optimizer_of_worker(config: RunConfig) -> str:
    """Return the name of the optimizer that a worker's step includes."""
    return NO_OPTIMIZER if config.push == "gradients" else config.optimizer


def largest_auto_batch(round_samples: int) -> int:
    """Return the most samples a step that `auto` gives a worker with so many in a round.

    A large card may hold all of a small data set; one step a round would not train.
    """
    return max(1, min(round_samples, max(_SMALLEST_AUTO, round_samples // STEPS_A_ROUND)))


def know_machines(
    config: RunConfig,
    model: nn.Module,
    data: TrainingData,
    accelerator: Accelerator,
    loss_of: LossOf,
) -> tuple[Knowledge, RunConfig]:
    """Return what the workers can do, measuring what is not given, and the config with it."""
    resolutions, workers = config.resolutions, config.workers
    share = max(1, len(data.train) // workers // config.rounds_per_epoch)
    auto, measured = config.large_batch_size == "auto", config.slope is None
    joint, given = takes_joint_steps(config), config.large_batch_size is not None
    large, slopes, intercepts, floors = (
        for_workers(name, values, resolutions, workers)
        for name, values in (
            ("large_batch_size", None if auto else config.large_batch_size),
            ("slope", config.slope),
            ("intercept", config.intercept),
            ("floor", config.floor or (0.0,)),
        )
    )
    large = [[size or default_large_batch_size(share) for size in row] for row in large]
    # Joint steps shift samples between workers, and none may be given more than it can hold.
    shifting = joint and config.balance != "none"
    on_card = accelerator.device.type == "cuda" or config.memory_limit is not None
    find_limits = auto or (shifting and on_card)
    limits: list[list[int] | None] = [None] * len(resolutions)
    useful = useful_batch_size(config, accelerator) if config.batch_evidence else None
    if measured or find_limits:
        profiler = Profiler(
            Setup.of(
                _profiled_name(config, model, data),
                model,
                data.num_classes,
                accelerator,
                optimizer=optimizer_of_worker(config),
                momentum=config.momentum,
                weight_decay=config.weight_decay,
                compiled=config.compile,
            ),
            model,
            accelerator,
            seconds=config.profile_seconds / len(resolutions),
            refresh=config.profile_refresh,
            file=Path(config.profile) if config.profile else None,
            loss_of=loss_of,
            example=data.example,
            reserve=partial(_reserve_bytes, config, model, accelerator.num_processes),
        )
    enough_steps = largest_auto_batch(share)
    if find_limits:
        limit = config.memory_limit and config.memory_limit * GIB
        most = len(data.train) if shifting else enough_steps
        found = [profiler.largest_batch(r, limit_bytes=limit, at_most=most) for r in resolutions]
        limits = [[int(size) for size in row] for row in _gather(found, workers, accelerator)]
    if auto:
        most = enough_steps
        if useful is not None:
            most = min(most, -(-useful // workers) if joint else useful)
        large = [[min(size, most) for size in row] for row in limits]
    elif joint and given and config.global_batch_size is not None:
        limits = large
    if measured:
        profiles = [
            profiler.profile(r, max(row)) for r, row in zip(resolutions, large, strict=True)
        ]
        for profile in profiles:
            accelerator.print(profile.describe())
        slopes = _gather([p.slope for p in profiles], workers, accelerator)
        intercepts = _gather([p.intercept for p in profiles], workers, accelerator)
        floors = _gather([p.floor for p in profiles], workers, accelerator)
    models = [
        [TimeModel(*values) for values in zip(*own, strict=True)]
        for own in zip(slopes, intercepts, floors, strict=True)
    ]
    if measured:
        models = [
            _equal_but_for_noise(own, min(row)) for own, row in zip(models, large, strict=True)
        ]
    known = Knowledge(
        models=dict(zip(resolutions, models, strict=True)),
        large_batch_sizes=dict(zip(resolutions, large, strict=True)),
        limits={
            r: None if row is None else np.array(row)
            for r, row in zip(resolutions, limits, strict=True)
        },
        measured=measured,
    )
    return known, replace(
        config,
        # Of joint steps it would be a limit that nobody set.
        large_batch_size=from_workers(large) if given or not joint else None,
        slope=from_workers([[m.slope for m in own] for own in models]),
        intercept=from_workers([[m.intercept for m in own] for own in models]),
        floor=(
            from_workers([[m.floor for m in own] for own in models])
            if any(m.floor for own in models for m in own)
            else config.floor
        ),
        profile=None,
        profile_refresh=False,
        batch_evidence=None,  # it is in large_batch_size
    )


class Planning:
    """Makes a run's plans by its config: of rounds or of joint steps, first and anew.

    Args:
        config: The run's settings, complete but for small batches.
        known: What its workers can do.
        samples: Training samples.
        least: The least that a worker may take in a step, unless it takes nothing.
    """

    def __init__(self, config: RunConfig, known: Knowledge, samples: int, least: int) -> None:
        self._config = config
        self._known = known
        self._samples = samples
        self.least = least
        self._active = list(range(config.workers))  # but for workers that were lost
        resolutions, workers = config.resolutions, config.workers
        small = for_workers("small_batch_size", config.small_batch_size, resolutions, workers)
        self._small = {
            r: [size or 0 for size in row] for r, row in zip(resolutions, small, strict=True)
        }
        by_hand = config.local_batch_sizes
        if by_hand and len(by_hand) not in (workers, workers * len(resolutions)):
            raise ValueError(
                f"local_batch_sizes must have one value per worker ({workers}), got {len(by_hand)}"
            )
        self._by_hand: dict[int, list[int]] = {}
        for i, resolution in enumerate(resolutions if by_hand else ()):
            first = 0 if len(by_hand) == workers else i * workers
            self._by_hand[resolution] = list(by_hand[first : first + workers])

    def first(self, resolution: int, say: Callable[[str], object]) -> Plan:
        """Return the plan that a resolution starts with, on the planned time models."""
        models = self._known.models[resolution]
        if takes_joint_steps(self._config):
            return plan_steps(
                self._samples,
                self._first_sizes(resolution),
                models,
                drop_last=self._config.drop_last,
                least=self.least,
            )
        plan, fell_back = self._rounds(resolution, models, measured=self._known.measured)
        if fell_back:
            self._small[resolution] = [plan.small_batch_size] * self._config.workers
            say(f"{px(resolution, 'at ', ' ')}{fell_back}")
        return plan

    def replan(self, resolution: int, models: Sequence[TimeModel]) -> Plan:
        """Return a resolution's plan for workers with other time models."""
        models = [models[worker] for worker in self._active]
        if takes_joint_steps(self._config):
            plan = balanced_steps(
                int(self._first_sizes(resolution).sum()),
                models,
                self._limits(resolution)[self._active],
                samples=self._samples,
                drop_last=self._config.drop_last,
                least=self.least,
                floor=self._config.min_batch_size,
            )
        else:
            plan = self._rounds(resolution, models, measured=True)[0]
        return self._of_all(plan)

    def without(self, resolution: int, active: Collection[int]) -> Plan:
        """Return a resolution's plan for the workers that are left; the others get nothing.

        Raises:
            ValueError: If there is none.
        """
        self._active = sorted(active)
        return self.replan(resolution, self._known.models[resolution])

    def resize(self, resolution: int, plan: Plan, proportions: np.ndarray) -> Plan:
        """Return a resolution's planned plan with its workers' parts in other proportions."""
        active = self._active
        moved = with_proportions(
            replace(plan, workers=tuple(plan.workers[worker] for worker in active)),
            proportions[active],
            [self._known.models[resolution][worker] for worker in active],
            self._limits(resolution)[active],
            samples=self._samples,
            rounds=self._config.rounds_per_epoch,
            drop_last=self._config.drop_last,
            least=self.least,
            floor=self._config.min_batch_size,
            factor=self._config.update_factor,
        )
        return self._of_all(moved)

    def small_batch_size(self) -> tuple[int, ...] | None:
        """Return the setting that repeats the small batches where they were not solved for."""
        rows = list(self._small.values())
        return from_workers(rows) if any(row[0] for row in rows) else None

    def _of_all(self, plan: Plan) -> Plan:
        """Return a plan of the workers that are left as one of all; the others get nothing."""
        rows = [_NO_PART] * self._config.workers
        for worker, row in zip(self._active, plan.workers, strict=True):
            rows[worker] = row
        return replace(plan, workers=tuple(rows))

    def _rounds(
        self, resolution: int, models: Sequence[TimeModel], *, measured: bool
    ) -> tuple[Plan, str | None]:
        config, active = self._config, self._active
        small_workers = sum(worker < config.small_workers for worker in active)
        given = self._small[resolution][0] or None
        large = self._by_hand.get(resolution) or self._known.large_batch_sizes[resolution]
        share_goal = config.small_share if small_workers and not given else None
        return plan_with_fallback(
            self._samples,
            len(active),
            small_workers,
            [large[worker] for worker in active],
            models,
            measured=measured,
            time_ratio=config.time_ratio if not given and share_goal is None else None,
            small_batch_size=given if small_workers else None,
            small_share=share_goal,
            min_batch_size=config.min_batch_size,
            rounds=config.rounds_per_epoch,
            factor=config.update_factor,
            rounding=config.rounding,
            least=self.least,
        )

    def _first_sizes(self, resolution: int) -> np.ndarray:
        """Return the sizes of joint steps: by hand, or such that planned workers end together."""
        config, workers = self._config, self._config.workers
        if self._by_hand:
            return np.array(self._by_hand[resolution])
        models = self._known.models[resolution]
        total = config.global_batch_size or sum(self._known.large_batch_sizes[resolution])
        limits = self._limits(resolution, total)
        check_global_batch(total, workers, limits, self.least)
        if total > self._samples:
            raise ValueError(
                f"global_batch_size must be at most the {self._samples} training samples, "
                f"got {total}"
            )
        if len(set(models)) == 1 and total <= int(limits.min()) * workers:
            return largest_remainder(np.ones(workers), total)
        return balanced_sizes(total, Machines.of(workers, limits, models), limits, self.least)

    def _limits(self, resolution: int, total: int | None = None) -> np.ndarray:
        """Return the most that each worker may take of a global batch, int64 [n]."""
        total = total or int(self._first_sizes(resolution).sum())
        limits = self._known.limits[resolution]
        return np.full(self._config.workers, total) if limits is None else np.minimum(limits, total)


def _profiled_name(config: RunConfig, model: nn.Module, data: TrainingData) -> str:
    """Return what step times are kept by: a model of one's own by its inputs, too."""
    if model.created_with is not None:
        return config.model
    inputs, _ = data.example(1, config.resolutions[-1])
    sides = () if config.resolutions[-1] else inputs.shape[1:]
    kind = str(inputs.dtype).removeprefix("torch.")
    return "-".join([config.model, kind, *map(str, sides)])


def _gather(values: Sequence[float], workers: int, accelerator: Accelerator) -> list[list[float]]:
    """Return this process's values, one per resolution, as [resolution][worker] of all workers."""
    if accelerator.num_processes == 1:  # all workers are simulated on this device
        return [[value] * workers for value in values]
    own = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    rows = accelerator.gather(own[None])[-workers:]  # a dedicated server, rank 0, has no worker
    return rows.T.tolist()


def _equal_but_for_noise(models: list[TimeModel], batch: int) -> list[TimeModel]:
    """Return the mean for all where step times at `batch` differ by no more than noise does."""
    times = [model.time(batch, 1) for model in models]
    if max(times) > (1 + SAME_MACHINE) * min(times):
        return models
    columns = zip(*((m.slope, m.intercept, m.floor) for m in models), strict=True)
    return [TimeModel(*(sum(column) / len(models) for column in columns))] * len(models)


def _reserve_bytes(
    config: RunConfig, model: nn.Module, processes: int, state_bytes: float
) -> float:
    """Return the most that a run holds on the device beside one worker's step.

    That is the weights that each worker here has pulled, the state of their optimizers, and the
    global weights. Joint steps share one optimizer, and pull only where gradients are pushed.

    Args:
        config: The run's settings.
        model: The model.
        processes: Processes of the run; one simulates all workers.
        state_bytes: Of one optimizer's state.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    here = config.workers if processes == 1 else 1
    pulled = 0 if config.sync == "step" else here
    optimizers = 1 if takes_joint_steps(config) else here
    return float(weights * (pulled + 1) + state_bytes * optimizers)
