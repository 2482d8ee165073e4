"""From a config to what its run trains with: data, stages, model and a plan per resolution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.config import for_workers, from_workers
from dbsl.data import Data, load_data
from dbsl.forecast import format_run
from dbsl.machines import TimeModel
from dbsl.memory import GIB
from dbsl.model import build_model
from dbsl.plan import Plan, count_workers, plan_with_fallback
from dbsl.profile_cache import Profiler, Setup
from dbsl.sampler import EpochSampler
from dbsl.stages import (
    Stage,
    default_milestones,
    default_resolutions,
    default_warmup,
    make_stages,
    stage_at,
)
from dbsl.transforms import Transform

Config = Any  # train.py's; users edit that file, and nothing in dbsl imports it


SAME_MACHINE = 0.10  # relative difference of step times up to which workers count as equal


@dataclass(frozen=True)
class Setting:
    """What a run trains with: its config, complete, and what the config describes.

    Attributes:
        config: The config with everything that was found or measured filled in, so that it repeats
            the run.
        data: Training and evaluation images.
        stages: Which epochs have which resolution and learning rate.
        model: The model, on its device; nothing is wrapped around it.
        plans: Every worker's batches and share, by resolution.
        samplers: Which samples each worker takes, by resolution.
        transforms: Augmentation, by resolution.
    """

    config: Config
    data: Data
    stages: tuple[Stage, ...]
    model: nn.Module
    plans: dict[int, Plan]
    samplers: dict[int, EpochSampler]
    transforms: dict[int, Transform]

    def plan_at(self, epoch: int) -> Plan:
        """Return the plan of an epoch."""
        return self.plans[stage_at(self.stages, epoch).resolution]


def prepare(config: Config, accelerator: Accelerator) -> Setting:
    """Load the data, build the model, measure step times unless given, and plan the run."""
    workers, small_workers = count_workers(
        accelerator.num_processes,
        workers=config.workers,
        small_ratio=config.small_ratio,
        small_workers=config.small_workers,
        dedicated_server=config.dedicated_server,
    )
    with accelerator.local_main_process_first():  # one process decodes, the others read its cache
        data = load_data(
            config.dataset,
            image_column=config.image_column,
            label_column=config.label_column,
            train_samples=config.train_samples,
            eval_samples=config.eval_samples,
            seed=config.seed,
            loader_workers=config.loader_workers,
            device=accelerator.device,
        )
    resolutions = config.resolutions or default_resolutions(data.image_side)
    milestones, warmup = config.lr_milestones, config.warmup_epochs
    milestones = default_milestones(config.epochs) if milestones is None else milestones
    config = replace(
        config,
        resolutions=tuple(resolutions),
        lr_milestones=tuple(
            default_milestones(config.epochs) if milestones is None else milestones
        ),
        warmup_epochs=default_warmup(config.epochs) if warmup is None else warmup,
    )
    stages = make_stages(
        config.epochs,
        resolutions,
        schedule=config.schedule,
        dropout=config.dropout,
        learning_rate=config.lr,
        milestones=config.lr_milestones,
        gamma=config.lr_gamma,
    )
    model = build_model(
        config.model,
        data.num_classes,
        final_resolution=resolutions[-1],
        pretrained=config.pretrained,
        seed=config.seed,
    ).to(accelerator.device, memory_format=torch.channels_last)
    plans, config = make_plans(
        config, model, data, resolutions, workers, small_workers, accelerator
    )
    samplers = {
        resolution: EpochSampler(
            [worker.samples for worker in plan.workers],
            rounds=config.rounds_per_epoch,
            seed=config.seed,
        )
        for resolution, plan in plans.items()
    }
    transforms = {
        resolution: Transform(
            resolution, config.augment, data.mirror, data.mean, data.std, config.seed
        )
        for resolution in resolutions
    }
    return Setting(config, data, tuple(stages), model, plans, samplers, transforms)


def default_large_batch_size(round_samples: int) -> int:
    """Return the power of two in [16, 128] nearest to a tenth of a round, at most all of it.

    Many fewer than ten steps a round would leave a small data set with next to no updates.
    """
    power = 2 ** round(math.log2(max(1, round_samples / 10)))
    return max(1, min(max(16, power), 128, round_samples))


def make_plans(
    config: Config,
    model: nn.Module,
    data: Data,
    resolutions: Sequence[int],
    workers: int,
    small_workers: int,
    accelerator: Accelerator,
) -> tuple[dict[int, Plan], Config]:
    """Plan every worker's batches at each resolution, on step times given or measured.

    Returns the plans by resolution, and the config with what was found filled in, so that it
    repeats the run.
    """
    samples, rounds = len(data.train), config.rounds_per_epoch
    share = max(1, samples // workers // rounds)
    auto, measured = config.large_batch_size == "auto", config.slope is None
    large, slopes, intercepts, small = (
        for_workers(name, values, resolutions, workers)
        for name, values in (
            ("large_batch_size", None if auto else config.large_batch_size),
            ("slope", config.slope),
            ("intercept", config.intercept),
            ("small_batch_size", config.small_batch_size),
        )
    )
    large = [[size or default_large_batch_size(share) for size in row] for row in large]
    if measured or auto:
        profiler = Profiler(
            Setup.of(config.model, model, data.num_classes, accelerator),
            model,
            accelerator,
            seconds=config.profile_seconds / len(resolutions),
            refresh=config.profile_refresh,
            file=Path(config.profile) if config.profile else None,
            reserve_bytes=_reserve_bytes(model, workers, accelerator.num_processes),
        )
    if auto:
        limit = config.memory_limit and config.memory_limit * GIB
        found = [profiler.largest_batch(r, limit_bytes=limit, at_most=share) for r in resolutions]
        large = _gather(found, workers, accelerator)
        large = [[int(size) for size in row] for row in large]
    if measured:
        profiles = [
            profiler.profile(r, max(row)) for r, row in zip(resolutions, large, strict=True)
        ]
        for profile in profiles:
            accelerator.print(profile.describe())
        slopes = _gather([p.slope for p in profiles], workers, accelerator)
        intercepts = _gather([p.intercept for p in profiles], workers, accelerator)
        for i, row in enumerate(large):
            slopes[i], intercepts[i] = _equal_but_for_noise(slopes[i], intercepts[i], min(row))

    plans = {}
    for i, resolution in enumerate(resolutions):
        models = [TimeModel(a, b) for a, b in zip(slopes[i], intercepts[i], strict=True)]
        given = small[i][0] or None
        share_goal = config.small_share if small_workers and not given else None
        plans[resolution], fell_back = plan_with_fallback(
            samples,
            workers,
            small_workers,
            large[i],
            models,
            measured=measured,
            time_ratio=config.time_ratio if not given and share_goal is None else None,
            small_batch_size=given if small_workers else None,
            small_share=share_goal,
            min_batch_size=config.min_batch_size,
            rounds=rounds,
            factor=config.update_factor,
            rounding=config.rounding,
        )
        if fell_back:
            small[i] = [plans[resolution].small_batch_size] * workers
            accelerator.print(f"at {resolution} px {fell_back}")
    return plans, replace(
        config,
        workers=workers,
        small_workers=small_workers,
        large_batch_size=from_workers(large),
        small_batch_size=(
            from_workers([[size or 0 for size in row] for row in small])
            if any(row[0] for row in small)
            else None
        ),
        slope=from_workers(slopes),
        intercept=from_workers(intercepts),
        profile=None,
        profile_refresh=False,
    )


def _gather(values: Sequence[float], workers: int, accelerator: Accelerator) -> list[list[float]]:
    """Return this process's values, one per resolution, as [resolution][worker] of all workers."""
    if accelerator.num_processes == 1:  # all workers are simulated on this device
        return [[value] * workers for value in values]
    own = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    rows = accelerator.gather(own[None])[-workers:]  # a dedicated server, rank 0, has no worker
    return rows.T.tolist()


def _equal_but_for_noise(
    slopes: list[float], intercepts: list[float], batch: int
) -> tuple[list[float], list[float]]:
    """Return the mean for all where step times at `batch` differ by no more than noise does."""
    times = [a * batch + b for a, b in zip(slopes, intercepts, strict=True)]
    if max(times) > (1 + SAME_MACHINE) * min(times):
        return slopes, intercepts
    workers = len(slopes)
    return [sum(slopes) / workers] * workers, [sum(intercepts) / workers] * workers


def _reserve_bytes(model: nn.Module, workers: int, processes: int) -> float:
    """Return what a run holds on the device beside one worker's step: weights and momentum."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    here = workers if processes == 1 else 1
    return float(weights * (2 * here + 1))  # pulled weights and momentum of each, global weights


def profile_command(run: Setting, processes: int) -> str:
    """Return the command that measures a run's step times anew."""
    config = run.config
    launch = "python" if processes == 1 else "accelerate launch (as this run)"
    return (
        f"{launch} -m dbsl.profile --model {config.model} --num-classes {run.data.num_classes} "
        f"--resolutions {','.join(map(str, config.resolutions))} "
        f"--large-batch-size {max(config.large_batch_size)} "
        f"--mixed-precision {config.mixed_precision} --profile-refresh"
    )


def print_run(run: Setting, folder: Path | None, accelerator: Accelerator) -> None:
    """Print what the run will do: the device, the data, each stage and each resolution's plan.

    Without a folder it is the plan alone that was asked for: then with timelines.
    """
    config, data, processes = run.config, run.data, accelerator.num_processes
    where = "simulated in one process" if processes == 1 else f"in {processes} processes"
    plans = format_run(run.stages, run.plans, config.rounds_per_epoch, timelines=folder is None)
    lines = [
        f"{config.model} on {config.dataset}: {len(data.train)} training images, "
        f"{len(data.evaluation)} for evaluation ({data.eval_split}), {data.num_classes} classes",
        f"{config.workers} workers {where}, {config.small_workers} on small batches, "
        f"sync {config.sync}; {accelerator.device}, torch {torch.__version__}, "
        f"precision {accelerator.mixed_precision}",
        f"run folder {folder}" if folder else "plan only: nothing is trained or written",
        "",
        plans,
        "",
    ]
    accelerator.print("\n".join(lines))
