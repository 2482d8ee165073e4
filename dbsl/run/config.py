"""Flags and YAML into a checked configuration, and bad input into one line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from dbsl.base.bounds import Within, check_bounds, in_range
from dbsl.cluster.config import SyncConfig
from dbsl.data.config import DataConfig
from dbsl.model import ModelConfig
from dbsl.plan.config import BatchConfig, EmulationConfig, StageConfig
from dbsl.plan.stages import check_resolutions
from dbsl.run.accelerator import Precision

CHECKPOINTS = "checkpoints"


T = TypeVar("T")

# Optimizers of which a push that is part of a global batch can take that part of a step.
_STEP_IN_PARTS = ("sgd", "nesterov", "momentum", "adam", "adamw")


@dataclass(frozen=True)
class MachineConfig:
    """How a run or a study computes on its machine, and for how long."""

    # --- machine
    seed: Annotated[int, Within(0)] = 0  # seed of everything random: split, order, weights, dropout
    # threads of torch; unset: this process's part of the cores, at most OMP_NUM_THREADS; a 1 there
    # counts only if the launcher was started with it, because launchers set 1 themselves
    cpu_threads: Annotated[int | None, Within(1)] = None
    # precision of forward passes; auto: what accelerate launch was asked for, else bf16 where the
    # device computes it natively, else no; no: float32, where PyTorch lets convolutions on CUDA use
    # TF32, but not matrix products
    mixed_precision: Precision = "auto"
    # samples per step of evaluation; unset: 256, on CUDA four times the largest batch, up to 2,000
    eval_batch_size: Annotated[int | None, Within(1)] = None
    # minutes after which it saves and stops with status 75, as after SIGTERM
    max_minutes: Annotated[float | None, Within(0, open_low=True)] = None


@dataclass(frozen=True)
class RunConfig(
    MachineConfig, StageConfig, EmulationConfig, SyncConfig, BatchConfig, ModelConfig, DataConfig
):
    """Everything that `dbsl` reads; train.py adds what it alone reads."""

    # --- run
    # steps of a worker between its lines of loss, speed and gradient norm in metrics.jsonl; 0: none
    log_every: Annotated[int, Within(0)] = 50
    # epochs (2) or minutes (10m) between checkpoints; 0: only at the end, or when stopped
    checkpoint_every: int | str = "10m"
    # number of newest checkpoints to keep; 0: one while the run lasts, none after it
    keep_checkpoints: Annotated[int, Within(0)] = 2
    # run folder or checkpoint to go on from; auto: --output-dir, if it has a run
    resume: str | None = None
    allow_config_change: bool = False  # allow --resume with settings that change what is trained
    plan_only: bool = False  # print the plan and its timeline, then stop
    # evaluate the weights of --model or --resume, print one line, and write nothing
    eval_only: bool = False
    # rounds that may be refused because loss or weights are not finite
    max_bad_rounds: Annotated[int, Within(0)] = 10
    compile: bool = False  # use torch.compile; graphs for all batch sizes are made before training
    noise_scale: bool = True  # estimate the batch size worth having; costs below 2 % of the time
    output_dir: str | None = None  # run folder, a new one; unset: runs/<dataset>-<model>-<time>
    # trackers of the run, with commas between: any that Accelerate knows and that is installed
    # (wandb, tensorboard, trackio, mlflow, comet_ml, aim, clearml, dvclive, swanlab), all of those,
    # or none; wandb works offline without a login or a network
    report_to: str = "wandb"
    # repository user/name on the hub for model, card and figures of the finished run
    push_to_hub: str | None = None
    # what a run found out, as its config.yaml has it; no flag
    resolved: Mapping[str, Any] = field(default_factory=dict, metadata={"flag": False})

    def __post_init__(self) -> None:
        check_bounds(self)
        check_run(self)


def check_run(config: Any) -> None:
    """Raise ``ValueError`` for the first setting of train.py's ``Config`` outside its bound."""
    if config.warmup_epochs is not None:
        in_range("warmup_epochs", config.warmup_epochs, 0, config.epochs)
    parse_interval(config.checkpoint_every)
    if config.batch_evidence is not None and config.large_batch_size != "auto":
        raise ValueError(
            f"batch_evidence must go with large_batch_size auto, got {config.batch_evidence}"
        )
    if config.profile is not None and config.slope is not None:
        raise ValueError(f"profile must not be given with slope, got {config.profile}")
    if (config.slope is None) != (config.intercept is None):
        given, other = ("slope", "intercept") if config.slope else ("intercept", "slope")
        raise ValueError(f"{other} must be given with {given}, got {given} alone")
    if config.floor is not None and config.slope is None:
        raise ValueError("slope must be given with floor, got floor alone")
    if config.clip_mode != "norm" and config.clip_grad is None:
        raise ValueError(f"clip_grad must be given with clip_mode, got {config.clip_mode} alone")
    if config.resolutions is not None:
        check_resolutions(config.resolutions)
    if config.eval_only:
        _check_eval_only(config)
    _check_joint_steps(config)
    rules = ("mean", "delta") if config.sync == "bsp" else ("ratio", "half")
    if config.push == "gradients" and config.merge == "delta":
        raise ValueError("merge must not be delta with push gradients, got delta")
    if config.merge is not None and config.merge not in rules:
        raise ValueError(
            f"merge must be {' or '.join(rules)} with sync {config.sync}, got {config.merge}"
        )


def _check_eval_only(config: Any) -> None:
    """Refuse what speaks of a run, which an evaluation alone does not make."""
    for name in ("plan_only", "push_to_hub", "output_dir"):
        value = getattr(config, name)
        if value and not (name == "output_dir" and config.resume == "auto"):
            raise ValueError(f"{name} must be left out with eval_only, got {value}")


def _check_joint_steps(config: Any) -> None:
    """Check what only joint steps know: sync step, and gradients pushed to the server."""
    joint = config.sync == "step" or config.push == "gradients"
    if config.sync == "step" and config.push == "gradients":
        raise ValueError("push must be weights with sync step, which averages gradients itself")
    small = [name for name in ("small_workers", "small_ratio") if getattr(config, name)]
    if joint and config.lr_scaling != "none":
        raise ValueError(
            f"lr_scaling must be none with sync step or push gradients, where the batch is one for "
            f"all workers, got {config.lr_scaling}"
        )
    if joint and small:
        raise ValueError(
            f"{small[0]} must be 0 with sync step or push gradients, where all workers share each "
            f"global batch (see local_batch_sizes), got {getattr(config, small[0])}"
        )
    only_joint = ["global_batch_size", "drop_last"]
    only_step = ["sync_batch_norm"]
    for names, fits, where in (
        (only_joint, joint, "sync step or push gradients"),
        (only_step, config.sync == "step", "sync step"),
    ):
        for name in names if not fits else ():
            if getattr(config, name):
                raise ValueError(f"{name} must go with {where}, got {getattr(config, name)}")
    if config.sync_batch_norm and config.compile:
        raise ValueError(
            "compile must be false with sync_batch_norm, for which processes would wait while each "
            "compiles for its own batches, got true"
        )
    if config.local_batch_sizes and config.global_batch_size is not None:
        raise ValueError(
            "global_batch_size must not be given with local_batch_sizes, whose sum it is, "
            f"got {config.global_batch_size}"
        )
    if config.local_batch_sizes and not joint and (config.small_workers or config.small_ratio):
        raise ValueError("local_batch_sizes must not be given with small workers, got both")
    if config.sync == "step" and config.dedicated_server:
        raise ValueError("dedicated_server must be false with sync step, which has no server")
    if config.push == "gradients":
        if config.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision must be no or bf16 with push gradients, got fp16, whose "
                "loss scale each worker would choose for itself"
            )
        if config.reset_momentum != "never":
            raise ValueError(
                f"reset_momentum must be never with push gradients, got {config.reset_momentum}"
            )
        if config.sync != "bsp" and config.optimizer not in _STEP_IN_PARTS:
            raise ValueError(
                f"optimizer must be one of {', '.join(_STEP_IN_PARTS)} with push gradients and "
                f"sync {config.sync}, where each push is part of a step, got {config.optimizer}"
            )
        if config.sync != "bsp" and config.clip_grad is not None:
            raise ValueError(
                f"clip_grad must be unset with push gradients and sync {config.sync}, where each "
                f"push is part of a step and nobody has a whole one's gradients, "
                f"got {config.clip_grad:g}"
            )
        if config.rounds_per_epoch != 1:
            raise ValueError(
                f"rounds_per_epoch must be 1 with push gradients (see push_every), "
                f"got {config.rounds_per_epoch}"
            )
    elif config.push_every != 1:
        raise ValueError(f"push_every must be 1 with push weights, got {config.push_every}")
    parts = (config.balance_every or 0) % config.rounds_per_epoch
    if parts and config.sync in ("ssp", "asp"):
        raise ValueError(
            f"balance_every must be whole epochs of {config.rounds_per_epoch} rounds with sync "
            f"{config.sync}, got {config.balance_every}"
        )


@dataclass(frozen=True)
class Interval:
    """How often to save: every so many epochs, or minutes; 0 of both is never."""

    epochs: int = 0
    minutes: float = 0.0


def parse_interval(value: int | str) -> Interval:
    """Return the interval of ``2`` (epochs) or ``10m`` (minutes).

    Raises:
        ValueError: If it is neither.
    """
    text = str(value).strip()
    if text.isdecimal():
        return Interval(epochs=int(text))
    try:
        minutes = float(text.removesuffix("m")) if text.endswith("m") else math.nan
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise ValueError(
            f"checkpoint_every must be epochs (2) or minutes (10m), at least 0, got {value}"
        )
    return Interval(minutes=minutes)


def for_workers(
    name: str, values: Sequence[T] | None, resolutions: Sequence[int], workers: int
) -> list[list[T | None]]:
    """Return a value for each resolution and worker: [resolution][worker].

    From none, one for all, one for each resolution, or one for each resolution and worker (all
    workers of the first resolution, then of the second).

    Raises:
        ValueError: If the number of values is none of these.
    """
    rows = len(resolutions)
    values = [None] if values is None else list(values)
    if len(values) not in (1, rows, rows * workers):
        raise ValueError(
            f"{name} must have 1 value, one per resolution ({rows}) or one per resolution and "
            f"worker ({rows * workers}), got {len(values)} values"
        )
    if len(values) == rows * workers:
        return [values[r * workers : (r + 1) * workers] for r in range(rows)]
    return [[value] * workers for value in (values * rows if len(values) == 1 else values)]


def from_workers(values: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return the shortest setting from which `for_workers` gives [resolution][worker] back."""
    if all(len(set(row)) == 1 for row in values):
        return tuple(row[0] for row in values)
    return tuple(value for row in values for value in row)
