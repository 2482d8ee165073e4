"""What a run's workers can do: their step times and batches, given or measured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.words import plural
from dbsl.data.sources import TrainingData
from dbsl.loss import LossOf
from dbsl.optimizer import BuildOptimizer
from dbsl.plan.types import TimeModel
from dbsl.run.by_worker import for_workers, from_workers
from dbsl.run.config import RunConfig, takes_joint_steps
from dbsl.run.measured import (
    largest_batches,
    largest_micro_batches,
    make_profiler,
    measured_models,
    time_models,
)

STEPS_A_ROUND = 10  # a worker takes as many at least with the batch that `auto` chooses
_SMALLEST_AUTO = 16  # samples: below them fewer steps do


@dataclass(frozen=True)
class Workers:
    """What the workers can do, by resolution, one entry per worker.

    Attributes:
        models: Time models.
        large_batch_sizes: Samples of a large step.
        limits: Most samples a step, [n]; None: no bound.
        measured: Whether the time models were measured, not given.
        micro_batch_sizes: Most samples at once; None: whole batches.
        fits: Most samples of a batch that fit into memory; None: it was not measured.
    """

    models: dict[int, list[TimeModel]]
    large_batch_sizes: dict[int, list[int]]
    limits: dict[int, np.ndarray | None]
    measured: bool
    micro_batch_sizes: dict[int, list[int]] | None = None
    fits: dict[int, list[int | None]] | None = None


def default_large_batch_size(round_samples: int) -> int:
    """Return the power of two in [16, 128] nearest to a tenth of a round, at most all of it.

    Many fewer than ten steps a round would leave a small data set with next to no updates.
    """
    power = 2 ** round(math.log2(max(1, round_samples / 10)))
    return max(1, min(max(_SMALLEST_AUTO, power), 128, round_samples))


def largest_auto_batch(round_samples: int) -> int:
    """Return the most samples a step that `auto` gives a worker with so many in a round.

    A large card may hold all of a small data set; one step a round would not train.
    """
    return max(1, min(round_samples, max(_SMALLEST_AUTO, round_samples // STEPS_A_ROUND)))


def know_workers(
    config: RunConfig,
    model: nn.Module,
    data: TrainingData,
    accelerator: Accelerator,
    loss_of: LossOf,
    build_optimizer: BuildOptimizer | None = None,
) -> tuple[Workers, RunConfig]:
    """Return what the workers can do, measuring what is not given, and the config with it."""
    resolutions, joint = config.resolutions, takes_joint_steps(config)
    share = max(1, len(data.train) // config.workers // config.rounds_per_epoch)
    auto, measured = config.large_batch_size == "auto", config.slope is None
    large = _given_batches(config, share)
    _check_large_batches(config, large, data, alike=accelerator.num_processes == 1 and measured)
    models = None if measured else _given_models(config)
    # Joint steps shift samples between workers, and none may be given more than it can hold.
    # With micro-batches any batch fits.
    shifting = joint and config.balance != "none" and config.micro_batch_size is None
    on_card = accelerator.device.type == "cuda" or config.memory_limit is not None
    find_limits = auto or (shifting and on_card)
    limits: list[list[int] | None] = [None] * len(resolutions)
    micro_auto = config.micro_batch_size == "auto"
    if measured or find_limits or micro_auto:
        profiler = make_profiler(config, model, data, accelerator, loss_of, build_optimizer)
    if find_limits:
        most = len(data.train) if shifting else largest_auto_batch(share)
        limits = largest_batches(config, profiler, most, accelerator)
    if auto:
        most = largest_auto_batch(share)
        large = [[min(size, most) for size in row] for row in limits]
    elif joint and config.large_batch_size and config.global_batch_size is not None:
        limits = large
    if micro_auto:
        micro = largest_micro_batches(config, profiler, large, accelerator)
    else:
        micro = _given_micro_batches(config)
    fits = None
    if models is None:
        models, fits = measured_models(config, profiler, large, micro, accelerator)
    known = Workers(
        models=dict(zip(resolutions, models, strict=True)),
        large_batch_sizes=dict(zip(resolutions, large, strict=True)),
        limits={
            r: None if row is None else np.array(row)
            for r, row in zip(resolutions, limits, strict=True)
        },
        measured=measured,
        micro_batch_sizes=micro and dict(zip(resolutions, micro, strict=True)),
        fits=fits and dict(zip(resolutions, fits, strict=True)),
    )
    return known, _with_known(config, models, large, micro)


def _given_batches(config: RunConfig, share: int) -> list[list[int]]:
    """Return large batches as they are given, or by default, [resolution][worker]."""
    given = None if config.large_batch_size == "auto" else config.large_batch_size
    rows = for_workers("large_batch_size", given, config.resolutions, config.workers)
    return [[size or default_large_batch_size(share) for size in row] for row in rows]


def _check_large_batches(
    config: RunConfig, large: list[list[int]], data: TrainingData, *, alike: bool
) -> None:
    """Refuse batches that no plan can have, before anything is measured with them.

    Args:
        config: The settings.
        large: Large batches, [resolution][worker].
        data: The training samples.
        alike: Whether all workers have the same step times.
    """
    if config.large_batch_size in (None, "auto") or config.local_batch_sizes:
        return
    samples, rounds = len(data.train), config.rounds_per_epoch
    if takes_joint_steps(config):
        total = max(sum(row) for row in large)
        if config.global_batch_size is None and total > samples:
            raise SettingError(
                f"large_batch_size must come to at most the {samples} training {data.unit}s over "
                f"{plural(config.workers, 'worker')} that share each step, got {total}"
            )
        return
    equal = alike and not config.small_workers and all(len(set(row)) == 1 for row in large)
    most, size = samples // rounds // (config.workers if equal else 1), max(map(max, large))
    if size > most:
        whose = " of each worker" if equal and config.workers > 1 else ""
        raise SettingError(
            f"large_batch_size must be at most {most}, the training {data.unit}s of a "
            f"round{whose}, got {size}"
        )


def _given_micro_batches(config: RunConfig) -> list[list[int]] | None:
    """Return micro-batches as they are given, [resolution][worker]; None: batches are whole."""
    given = config.micro_batch_size
    if given is None:
        return None
    return for_workers("micro_batch_size", given, config.resolutions, config.workers)


def _given_models(config: RunConfig) -> list[list[TimeModel]]:
    """Return time models as they are given, [resolution][worker]."""
    columns = (
        for_workers(name, values, config.resolutions, config.workers)
        for name, values in (
            ("slope", config.slope),
            ("intercept", config.intercept),
            ("floor", config.floor or (0.0,)),
        )
    )
    return time_models(*columns)


def _with_known(
    config: RunConfig,
    models: list[list[TimeModel]],
    large: list[list[int]],
    micro: list[list[int]] | None,
) -> RunConfig:
    """Return the config with what the workers can do; what said how to find it is unset."""
    # For joint steps a large batch would be a limit that nobody set.
    keeps_large = config.large_batch_size is not None or not takes_joint_steps(config)
    slope, intercept, floor = (
        from_workers([[getattr(m, name) for m in own] for own in models])
        for name in ("slope", "intercept", "floor")
    )
    return replace(
        config,
        large_batch_size=from_workers(large) if keeps_large else None,
        micro_batch_size=micro and from_workers(micro),
        slope=slope,
        intercept=intercept,
        floor=floor if any(floor) else config.floor,
        profile=None,
        profile_refresh=False,
    )
