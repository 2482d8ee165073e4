"""What this process measures of its workers, and what all processes have measured."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.words import px
from dbsl.data.sources import TrainingData
from dbsl.loss import LossOf, digest_of
from dbsl.optimizer import BuildOptimizer
from dbsl.plan.types import TimeModel
from dbsl.profile.cache import Profiler
from dbsl.profile.memory import GIB, is_short_of_memory
from dbsl.profile.setup import Setup
from dbsl.profile.step_time import BAD_FIT, NO_OPTIMIZER, StepProfile
from dbsl.run.by_worker import for_workers
from dbsl.run.config import RunConfig, takes_joint_steps

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
    setup = Setup.of(
        _profiled_name(config, model, data),
        model,
        data.num_classes,
        accelerator,
        optimizer=_optimizer_of_worker(config),
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        compiled=config.compile,
        # The server clips what is pushed, and a worker's step does not.
        clip=config.clip_mode if config.clip_grad and config.push == "weights" else None,
        loss=digest_of(loss_of),
    )
    rough = config.profile_seconds is None and config.workers == 1 and not config.small_workers
    seconds = config.profile_seconds or (_SECONDS_OF_ONE if rough else _SECONDS)
    return Profiler(
        setup,
        model,
        accelerator,
        seconds=seconds / len(config.resolutions),
        rough=rough,
        refresh=config.profile_refresh,
        file=Path(config.profile) if config.profile else None,
        loss_of=loss_of,
        optimizer_settings=config.optimizer_settings,
        build_optimizer=build_optimizer,
        example=data.example,
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
        more += [f"layer_decay={config.layer_decay}"] * (config.layer_decay is not None)
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
