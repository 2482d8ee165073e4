"""Flags and YAML into a checked configuration, and bad input into one line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

from dbsl.base.bounds import Within, check_bounds
from dbsl.base.errors import SettingError
from dbsl.base.words import as_given
from dbsl.cluster.config import SyncConfig
from dbsl.data.config import DataConfig, check_images, check_mixing
from dbsl.model_config import ModelConfig
from dbsl.optimizer import OptimizerConfig, without_rates
from dbsl.plan.config import BatchConfig, EmulationConfig, StageConfig, check_curve
from dbsl.plan.stages import check_resolutions
from dbsl.run.accelerator import Precision

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class MachineConfig:
    """How a run or a study computes on its machine, and for how long."""

    # --- machine
    seed: Annotated[int, Within(0)] = 0  # seed of everything random: split, order, weights, dropout
    # threads of torch; unset: this process's part of the cores, at most OMP_NUM_THREADS; a 1 there
    # counts only if the launcher was started with it, because launchers set 1 themselves
    cpu_threads: Annotated[int | None, Within(1, 1024)] = None
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
    MachineConfig,
    StageConfig,
    EmulationConfig,
    SyncConfig,
    BatchConfig,
    OptimizerConfig,
    ModelConfig,
    DataConfig,
):
    """Everything that `dbsl` reads; train.py adds what it alone reads."""

    # --- run
    # steps of a worker between its lines of loss, speed and gradient norm in metrics.jsonl; 0: none
    log_every: Annotated[int, Within(0)] = 50
    # epochs (2) or minutes (10m) between checkpoints; 0: only at the end, or when stopped
    checkpoint_every: int | str = "10m"
    # number of newest checkpoints to keep; 0: one while the run lasts, none after it
    keep_checkpoints: Annotated[int, Within(0)] = 2
    # run folder or checkpoint to go on from, or the URL of a mirror, which is pulled into a new run
    # folder; auto: --output-dir, if it has a run, else --mirror, if that has one
    resume: str | None = None
    # URL (s3://bucket/runs/x, gs://, hf://, file:///) that gets a copy of the run folder while the
    # run goes on; a run that is resumed keeps it; none: not this time
    mirror: str | None = None
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
        if self.warmup_epochs is not None and self.warmup_epochs > self.epochs:
            raise SettingError(
                f"warmup_epochs must be at most the {self.epochs} epochs of the run, "
                f"got {self.warmup_epochs:g}"
            )
        parse_interval(self.checkpoint_every)
        if self.resolutions is not None:
            check_resolutions(self.resolutions)
        check_images(self)
        check_mixing(self)
        check_curve(self)
        _check_together(self)


def is_url(text: str | None) -> bool:
    """Whether a setting names something by URL, not by path."""
    return text is not None and "://" in text


def _check_together(config: RunConfig) -> None:
    """Raise ``SettingError`` for the first setting that does not go with another."""
    for holds, name, must, where in _rules(config):
        value = getattr(config, name)
        if holds and value not in (must, None):
            raise SettingError(f"{name} must be {as_given(must)} {where}, got {as_given(value)}")
    if config.micro_batch_size is not None and config.large_batch_size == "auto":
        raise SettingError(
            "large_batch_size must not be auto with micro_batch_size, with which any batch fits, "
            "got auto"
        )
    if config.micro_batch_size is not None and config.sync_batch_norm:
        raise SettingError(
            "sync_batch_norm must be false with micro_batch_size, where processes differ in how "
            "many they take, got true"
        )
    if (config.slope is None) != (config.intercept is None):
        given, other = ("slope", "intercept") if config.slope else ("intercept", "slope")
        raise SettingError(f"{other} must be given with {given}, got {given} alone")
    if config.floor is not None and config.slope is None:
        raise SettingError("slope must be given with floor, got floor alone")
    if config.clip_mode != "norm" and config.clip_grad is None:
        raise SettingError(f"clip_grad must be given with clip_mode, got {config.clip_mode} alone")
    _check_rounds(config)
    _check_pushes(config)
    _check_places(config)


def _check_rounds(config: RunConfig) -> None:
    """Raise ``SettingError`` for a setting of when workers meet that does not go with another."""
    parts = (config.balance_every or 0) % config.rounds_per_epoch
    if parts and config.sync in ("ssp", "asp"):
        raise SettingError(
            f"balance_every must be whole epochs of {config.rounds_per_epoch} rounds with sync "
            f"{config.sync}, got {config.balance_every}"
        )


def _check_pushes(config: RunConfig) -> None:
    """Raise ``SettingError`` for a setting of what is merged that does not go with another."""
    rules = ("mean", "delta") if config.sync == "bsp" else ("ratio", "half")
    if config.push == "gradients" and config.merge == "delta":
        raise SettingError("merge must not be delta with push gradients, got delta")
    if config.merge is not None and config.merge not in rules:
        raise SettingError(
            f"merge must be {' or '.join(rules)} with sync {config.sync}, got {config.merge}"
        )
    if config.push == "gradients" and config.mixed_precision == "fp16":
        raise SettingError(
            "mixed_precision must be no or bf16 with push gradients, got fp16, whose "
            "loss scale each worker would choose for itself"
        )


def _check_places(config: RunConfig) -> None:
    """Raise ``SettingError`` for a place to read from or write to that does not go with another."""
    if config.eval_only and config.output_dir and config.resume != "auto":
        raise SettingError(f"output_dir must be left out with eval_only, got {config.output_dir}")
    for name in ("mirror", "resume"):
        if not is_url(url := getattr(config, name)):
            continue
        parts = urlsplit(url)
        if parts.password is not None:
            raise SettingError(f"{name} must have no password in it, which fsspec has settings for")
        if not (parts.netloc + parts.path).strip("/"):
            raise SettingError(f"{name} must name a folder at the URL, got {url}")
    if config.mirror not in (None, "none") and not is_url(config.mirror):
        raise SettingError(
            f"mirror must be a URL such as s3://bucket/runs/x, or none, got {config.mirror}"
        )
    if is_url(config.resume) and (config.eval_only or config.plan_only):
        what = "eval_only" if config.eval_only else "plan_only"
        raise SettingError(f"resume must be a run folder with {what}, got {config.resume}")


def check_effects(config: RunConfig, processes: int = 1) -> None:
    """Raise ``SettingError`` for a setting that would change nothing in a run that begins.

    A run that goes on may have been begun with it.
    """
    bounded, outer = config.sync == "ssp", config.merge == "delta"
    for holds, name, where in (
        (bounded, "staleness", "except with sync ssp"),
        (outer, "outer_lr", "except with merge delta"),
        (outer, "outer_momentum", "except with merge delta"),
        (config.balance != "none", "balance_every", "with balance none"),
    ):
        value = getattr(config, name)
        if not holds and value != getattr(RunConfig, name):
            raise SettingError(f"{name} must be left out {where}, got {value:g}")
    workers = config.workers if processes == 1 else processes - config.dedicated_server
    name = "small_ratio" if config.small_workers is None else "small_workers"
    if workers == 1 and getattr(config, name):
        raise SettingError(
            f"{name} must be 0 with one worker, beside which none is large (see "
            f"large_batch_size), got {getattr(config, name):g}"
        )
    if config.lr_schedule == "step":
        return
    where = f"with lr_schedule {config.lr_schedule}"
    if config.lr_gamma != RunConfig.lr_gamma:
        raise SettingError(
            f"lr_gamma must be left out {where}, which does not fall at milestones, "
            f"got {config.lr_gamma:g}"
        )
    climbs = config.schedule == "cyclic" and len(config.resolutions or (0, 0)) > 1
    given = config.lr_milestones and "lr_milestones" not in config.resolved
    if given and not climbs and config.reset_momentum != "stage":
        raise SettingError(
            f"lr_milestones must be left out {where}, unless resolutions climb between them "
            f"(schedule cyclic) or reset_momentum is stage, got {as_given(config.lr_milestones)}"
        )


def _rules(config: RunConfig) -> Iterator[tuple[bool, str, Any, str]]:
    """Yield settings that others leave one value: whether they do, name, value, and where."""
    step, gradients = config.sync == "step", config.push == "gradients"
    joint, where = step or gradients, "with sync step or push gradients"
    shared = f"{where}, where all workers share each global batch (see local_batch_sizes)"
    yield step, "push", "weights", "with sync step, which averages gradients itself"
    yield joint, "lr_scaling", "none", f"{where}, where the batch is one for all workers"
    yield joint, "small_workers", 0, shared
    yield joint, "small_ratio", 0, shared
    yield not joint, "global_batch_size", None, f"except {where}"
    yield not joint, "drop_last", False, f"except {where}"
    yield not step, "sync_batch_norm", False, "except with sync step"
    waits = "with sync_batch_norm: processes would wait while each compiles for its own batches"
    yield config.sync_batch_norm, "compile", False, waits
    resized = "with balance, which changes batch sizes as it trains: each would be compiled"
    yield config.balance != "none", "compile", False, resized
    by_hand = config.local_batch_sizes is not None
    yield by_hand, "global_batch_size", None, "with local_batch_sizes, whose sum it is"
    small = "small_ratio" if config.small_ratio else "small_workers"
    share = getattr(config, small) or 0
    yield share > 0, "local_batch_sizes", None, f"with {small} {share:g}"
    yield step, "dedicated_server", False, "with sync step, which has no server"
    yield gradients, "reset_momentum", "never", "with push gradients"
    yield gradients, "rounds_per_epoch", 1, "with push gradients (see push_every)"
    yield not gradients, "push_every", 1, "with push weights"
    yield config.slope is not None, "profile", None, "with slope"
    parts = f"with push gradients and sync {config.sync}, where each push is part of a step"
    yield steps_in_parts(config), "clip_grad", None, parts
    yield steps_in_parts(config) and bool(without_rates(config.opt_kwargs)), "opt_kwargs", (), parts
    weights = config.pretrained or ":" in config.model
    yield weights, "initial_checkpoint", None, "with other weights, pretrained or of a folder"
    yield not config.mixes, "mixup_kwargs", (), "except with mixup, cutmix or cutmix_minmax"
    yield config.augmentation == "none", "aug_repeats", 1, "with augment none: copies are equal"
    yield config.lr_schedule == "step", "min_lr", 0, "except with lr_schedule cosine or poly"
    for name, without in (("plan_only", False), ("push_to_hub", None), ("mirror", None)):
        yield config.eval_only, name, without, "with eval_only"
    yield config.link_gbps is None, "link_ms", 0.0, "except with link_gbps"
    linked = config.link_gbps is not None and step
    yield not linked, "link_overlap", 0.0, "except with link_gbps and sync step"


@dataclass(frozen=True)
class Interval:
    """How often to save: every so many epochs, or minutes; 0 of both is never."""

    epochs: int = 0
    minutes: float = 0.0


def parse_interval(value: int | str) -> Interval:
    """Return the interval of ``2`` (epochs) or ``10m`` (minutes).

    Raises:
        SettingError: If it is neither.
    """
    text, minutes = str(value).strip(), math.nan
    with suppress(ValueError):
        if text.isdecimal():
            return Interval(epochs=int(text))
        minutes = float(text.removesuffix("m")) if text.endswith("m") else math.nan
    if not 0 < minutes < math.inf:
        raise SettingError(
            f"checkpoint_every must be epochs (2) or minutes (10m), at least 0, got {value}"
        )
    return Interval(minutes=minutes)


def takes_joint_steps(config: RunConfig) -> bool:
    """Whether all workers share one global batch a step, instead of rounds of their own."""
    return config.sync == "step" or config.push == "gradients"


def steps_in_parts(config: RunConfig) -> bool:
    """Whether each push of gradients is a part of an optimizer step, taken as it comes."""
    return config.push == "gradients" and config.sync != "bsp"
