"""From a config to what its run trains with: plans by resolution, on times given or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.config import per_resolution
from dbsl.data import Data
from dbsl.plan import Plan, TimeModel, format_plan, plan_with_fallback
from dbsl.profile import measure_time_model
from dbsl.stages import Stage

if TYPE_CHECKING:
    from train import Config  # for readers and type checkers alone: dbsl never imports train


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
    """Plan every worker's batches at each resolution, on step times given or measured here.

    Returns the plans by resolution, and the config with what was found filled in, so that it
    repeats the run.
    """
    share = len(data.train) // workers // config.rounds_per_epoch
    large = per_resolution("large_batch_size", config.large_batch_size, resolutions)
    large = [default_large_batch_size(share) if size is None else size for size in large]
    small = per_resolution("small_batch_size", config.small_batch_size, resolutions)
    slopes = per_resolution("slope", config.slope, resolutions)
    intercepts = per_resolution("intercept", config.intercept, resolutions)
    plans, time_models, measured = {}, [], config.slope is None
    for i, resolution in enumerate(resolutions):
        if measured:
            seconds = config.profile_seconds / len(resolutions)
            accelerator.print(f"measuring step times at {resolution} px, {seconds:g} s at most")
            time_model = measure_time_model(
                model, resolution, large[i], data.num_classes, accelerator, seconds=seconds
            )
        else:
            time_model = TimeModel(slopes[i], intercepts[i])
        time_models.append(time_model)
        plans[resolution], fell_back = plan_with_fallback(
            len(data.train),
            workers,
            small_workers,
            large[i],
            time_model,
            measured=measured,
            time_ratio=config.time_ratio,
            small_batch_size=small[i] or None,
            min_batch_size=config.min_batch_size,
            rounds=config.rounds_per_epoch,
            factor=config.update_factor,
            rounding=config.rounding,
        )
        if fell_back:
            small[i] = plans[resolution].small_batch_size
            accelerator.print(f"at {resolution} px {fell_back}")
    return plans, replace(
        config,
        workers=workers,
        small_workers=small_workers,
        resolutions=tuple(resolutions),
        large_batch_size=tuple(large),
        small_batch_size=tuple(size or 0 for size in small) if any(small) else None,
        slope=tuple(m.slope for m in time_models),
        intercept=tuple(m.intercept for m in time_models),
    )


def print_run(
    accelerator: Accelerator,
    config: Config,
    data: Data,
    stages: Sequence[Stage],
    plans: Mapping[int, Plan],
    folder: Path,
) -> None:
    """Print what the run will do: the device, the data, each stage and each resolution's plan."""
    processes = accelerator.num_processes
    where = "simulated in one process" if processes == 1 else f"in {processes} processes"
    lines = [
        f"{config.model} on {config.dataset}: {len(data.train)} training images, "
        f"{len(data.evaluation)} for evaluation ({data.eval_split}), {data.num_classes} classes",
        f"{config.workers} workers {where}, {config.small_workers} on small batches, "
        f"sync {config.sync}; {accelerator.device}, torch {torch.__version__}, "
        f"precision {accelerator.mixed_precision}",
        f"run folder {folder}",
    ]
    for resolution, plan in plans.items():
        epochs = [
            f"{_span(s)} at lr {s.learning_rate:g}" for s in stages if s.resolution == resolution
        ]
        if epochs:
            lines += [
                f"\n{resolution} px, epochs {', '.join(epochs)}; time ratio {plan.time_ratio:.3f}",
                format_plan(plan),
            ]
    accelerator.print("\n".join(lines) + "\n")


def _span(stage: Stage) -> str:
    first, last = stage.first_epoch + 1, stage.end_epoch
    return str(last) if first == last else f"{first}-{last}"
