"""What this process measures of its workers, and what all processes have measured.

What a run's workers can do: their step times and batches, given or measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.words import plural, px
from dbsl.config.complete import for_workers, from_workers
from dbsl.config.settings import RunConfig, takes_joint_steps
from dbsl.data.sources import TrainingData
from dbsl.loss import LossOf, digest_of
from dbsl.optimizer import BuildOptimizer
from dbsl.plan.machines import Workers
from dbsl.plan.types import TimeModel
from dbsl.profile.cache import Profiler
from dbsl.profile.memory import GIB, is_short_of_memory
from dbsl.profile.timing import BAD_FIT, NO_OPTIMIZER, Setup, StepProfile, StepSpec

_SAME_MACHINE = 0.10  # relative difference of step times up to which workers count as equal
_SECONDS, _SECONDS_OF_ONE = 30.0, 3.0  # to measure for; what one worker alone predicts is rough


def _optimizer_of_worker(config: RunConfig) -> str:
    """Return the name of the optimizer that a worker's step includes."""
    return NO_OPTIMIZER if config.push == "gradients" else config.optimizer


def largest_of(config: RunConfig, row: Sequence[int], number: int) -> int:
    """Return the most that a worker may have in a step at a resolution.

    Args:
        config: The run's settings.
        row: Large batches of the workers at the resolution.
        number: Of the resolution.
    """
    if config.local_batch_sizes:
        sizes = for_workers(
            "local_batch_sizes",
            config.local_batch_sizes * (len(config.resolutions) if _for_all(config) else 1),
            config.resolutions,
            config.workers,
        )
        row = sizes[number]
    if takes_joint_steps(config):
        return config.global_batch_size or sum(row)
    return max(row)


def _for_all(config: RunConfig) -> bool:
    """Whether batches by hand hold for all resolutions."""
    return len(config.local_batch_sizes or ()) == config.workers


def largest_micro_batches(
    config: RunConfig, profiler: Profiler, large: list[list[int]], accelerator: Accelerator
) -> list[list[int]]:
    """Return the most samples at once that fit into memory, [resolution][worker]."""
    limit = config.memory_limit and config.memory_limit * GIB
    found = [
        profiler.largest_batch(
            resolution,
            limit_bytes=limit,
            at_most=largest_of(config, row, number),
            what="micro-batch",
            why_most="whole batches fit",
        )
        for number, (resolution, row) in enumerate(zip(config.resolutions, large, strict=True))
    ]
    return [[int(size) for size in row] for row in _gather(found, config.workers, accelerator)]


def time_models(*columns: Sequence[Sequence[float]]) -> list[list[TimeModel]]:
    """Return time models of slopes, intercepts and floors, each [resolution][worker]."""
    return [
        [TimeModel(*values) for values in zip(*own, strict=True)]
        for own in zip(*columns, strict=True)
    ]


def make_profiler(
    config: RunConfig,
    model: nn.Module,
    data: TrainingData,
    accelerator: Accelerator,
    loss_of: LossOf,
    build_optimizer: BuildOptimizer | None = None,
) -> Profiler:
    """Return the profiler of this process's workers, for the step that they will take."""
    setup = replace(
        Setup.of(_profiled_name(config, model, data), model, data.num_classes, accelerator),
        optimizer=_optimizer_of_worker(config),
        momentum=config.momentum > 0,
        weight_decay=config.weight_decay > 0,
        compile=config.compile,
        # The server clips what is pushed, and a worker's step does not.
        clip=config.clip_mode if config.clip_grad and config.push == "weights" else None,
        loss=digest_of(loss_of),
    )
    rough = config.profile_seconds is None and config.workers == 1 and not config.small_workers
    seconds = config.profile_seconds or (_SECONDS_OF_ONE if rough else _SECONDS)
    settings = config.optimizer_settings
    return Profiler(
        StepSpec(setup, model, accelerator, loss_of, data.example, settings, build_optimizer),
        seconds=seconds / len(config.resolutions),
        rough=rough,
        refresh=config.profile_refresh,
        file=Path(config.profile) if config.profile else None,
        reserve=partial(_reserve_bytes, config, model, accelerator.num_processes),
    )


def largest_batches(
    config: RunConfig, profiler: Profiler, most: int, accelerator: Accelerator
) -> list[list[int]]:
    """Return the largest batches that fit into memory, [resolution][worker]."""
    limit = config.memory_limit and config.memory_limit * GIB
    found = [profiler.largest_batch(r, limit_bytes=limit, at_most=most) for r in config.resolutions]
    return [[int(size) for size in row] for row in _gather(found, config.workers, accelerator)]


def measured_models(
    config: RunConfig,
    profiler: Profiler,
    large: list[list[int]],
    micro: list[list[int]] | None,
    accelerator: Accelerator,
) -> tuple[list[list[TimeModel]], list[list[int | None]]]:
    """Return what is measured, both [resolution][worker]: time models, and the batches that fit.

    The batches are None where the memory of whole batches was not measured.
    """
    limit = config.memory_limit and config.memory_limit * GIB
    measured, fits = [], []  # profiles of this process's workers, by resolution
    for number, resolution in enumerate(config.resolutions):
        largest, profiles = max(large[number]), {}
        own = [None] * len(large[number])
        if micro is not None:
            largest = max(largest, largest_of(config, large[number], number))
            own = [most if most < largest else None for most in micro[number]]
        own = [own[worker] for worker in _own_workers(config, accelerator)]
        for most in dict.fromkeys(own):
            profiles[most] = _measure(profiler.in_micro_batches(most), resolution, largest)
            warning = _on_bad_fit(profiles[most], profiler, accelerator)
            accelerator.print(profiles[most].describe(note=warning))
        measured.append([profiles[most] for most in own])
        memory = profiles[None].memory if None in profiles else None
        fits.append(memory.fits(limit) if memory else -1)
    columns = (
        _of_all([[getattr(p, name) for p in row] for row in measured], config.workers, accelerator)
        for name in ("slope", "intercept", "floor")
    )
    models = [
        _equal_but_for_noise(own, min(row))
        for own, row in zip(time_models(*columns), large, strict=True)
    ]
    return models, [
        [None if count < 0 else int(count) for count in row]
        for row in _gather(fits, config.workers, accelerator)
    ]


def _measure(profiler: Profiler, resolution: int, largest: int) -> StepProfile:
    """Return the profile of a resolution; where a batch does not fit, say what to set."""
    try:
        return profiler.profile(resolution, largest)
    except RuntimeError as error:
        if not is_short_of_memory(error):
            raise
    raise SettingError(
        f"large_batch_size must fit into memory{px(resolution, ' at ')}, got {largest}: set "
        "--micro-batch-size auto"
    )


def _on_bad_fit(profile: StepProfile, profiler: Profiler, accelerator: Accelerator) -> str:
    """Return what to say of a line, here or in another process, that misses measured times."""
    own = torch.tensor([profile.largest_error], device=accelerator.device)
    worst = accelerator.gather(own).max().item()
    if worst <= BAD_FIT:
        return ""
    where = "" if profile.misses else f" in another process (largest error {worst:.1%})"
    return f"; a bad fit{where}: predictions may be far off, {profiler.again}"


def _own_workers(config: RunConfig, accelerator: Accelerator) -> Sequence[int]:
    """Return the workers of this process; a dedicated server measures as the first does."""
    if accelerator.num_processes == 1:
        return range(config.workers)
    return (max(0, accelerator.process_index - config.dedicated_server),)


def _of_all(
    values: Sequence[Sequence[float]], workers: int, accelerator: Accelerator
) -> Sequence[Sequence[float]]:
    """Return values of this process's workers, [resolution][own], as those of all workers."""
    if accelerator.num_processes == 1:
        return values
    return _gather([row[0] for row in values], workers, accelerator)


def _profiled_name(config: RunConfig, model: nn.Module, data: TrainingData) -> str:
    """Return what step times are kept by: a model of one's own by its inputs, too."""
    if model.created_with is not None:
        more = [f"{name}={value}" for name, value in model.settings.items()]
        more += ["grad_checkpointing"] * config.grad_checkpointing
        return " ".join([config.model, *more, *config.opt_kwargs])
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
    if len(rows) < workers:  # there is nobody to gather from
        raise SettingError(
            "a process that joins a running job must find all that the job has measured in "
            "config.yaml, got settings that ask for measurements"
        )
    return rows.T.tolist()


def _equal_but_for_noise(models: list[TimeModel], batch: int) -> list[TimeModel]:
    """Return the mean for all where step times at `batch` differ by no more than noise does."""
    times = [model.time(batch, 1) for model in models]
    if max(times) > (1 + _SAME_MACHINE) * min(times):
        return models
    columns = zip(*((m.slope, m.intercept, m.floor) for m in models), strict=True)
    return [TimeModel(*(sum(column) / len(models) for column in columns))] * len(models)


def _reserve_bytes(
    config: RunConfig, model: nn.Module, processes: int, state_bytes: float
) -> float:
    """Return the most that a run holds on the device beside one worker's step.

    These are the weights that each worker here has pulled, the state of their optimizers, and the
    global weights. Joint steps share one optimizer, and pull only where gradients are pushed.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    here = config.workers if processes == 1 else 1
    pulled = 0 if config.sync == "step" else here
    optimizers = 1 if takes_joint_steps(config) else here
    return float(weights * (pulled + 1) + state_bytes * optimizers)


STEPS_A_ROUND = 10  # a worker takes as many at least with the batch that `auto` chooses
_SMALLEST_AUTO = 16  # samples: below them fewer steps do


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
