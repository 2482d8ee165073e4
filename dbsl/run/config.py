"""Flags and YAML into a checked configuration, and bad input into one line."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Literal, NoReturn, TypeVar

import yaml

from dbsl.base.bounds import Within, check_bounds, in_range
from dbsl.base.flags import parse_flags
from dbsl.cluster.config import SyncConfig
from dbsl.cluster.liveness import recall
from dbsl.data.config import DataConfig
from dbsl.model import ModelConfig
from dbsl.plan.config import BatchConfig, EmulationConfig, StageConfig
from dbsl.plan.stages import check_resolutions
from dbsl.run.accelerator import Precision
from dbsl.run.resolved import PROCESSES, RESOLVED, Found, check_names, still_true

ReportTo = Literal["wandb", "tensorboard", "trackio", "none"]


CHECKPOINTS = "checkpoints"


T = TypeVar("T")

# Optimizers of which a push that is part of a global batch can take that part of a step.
_STEP_IN_PARTS = ("sgd", "nesterov", "momentum", "adam", "adamw")
# What most people need first.
COMMON = (
    *("dataset", "model", "epochs", "lr", "workers", "small_ratio", "large_batch_size"),
    *("sync", "output_dir", "resume"),
)
_CONFIG_HELP = {"--config": "YAML file of settings; flags win over it"}

RUN_FOLDER = "run folder"  # what a launch remembers of the run that it may have to restart


class _OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are raised, without the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise the message."""
        raise ValueError(message)


def parse_config(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Build the dataclass `cls` from an optional ``--config FILE.yaml`` and flags; flags win.

    File and flags meet the same checks, since the file is read as flags. Lists may be separated by
    commas or spaces.

    A run that is resumed keeps its settings: its own ``config.yaml`` is read before the rest. A
    process that torchrun or accelerate has restarted resumes what it was doing. What a run found
    out, and its file says, is taken over unless a setting has changed that it came from.

    Raises:
        ValueError: If a flag is unknown or its value has the wrong type, the file cannot be read
            or is no mapping of settings, or there is no such run to resume.
    """
    file_flags = _OneLineParser(add_help=False, allow_abbrev=False)
    for name in ("--config", "--resume", "--output-dir", "--output_dir"):
        file_flags.add_argument(name)
    known, flags = file_flags.parse_known_args(argv)
    sources = [_read_files(Path(known.config))] if known.config else []
    settings = _merged(sources[0]) if sources else {}
    resume = known.resume or settings.get("resume")
    output_dir = known.output_dir or settings.get("output_dir")
    if resume is None and (unfinished := recall(RUN_FOLDER)):
        resume, output_dir = "auto", unfinished
    for name, value in (("resume", resume), ("output_dir", output_dir)):
        if value is not None:
            flags += yaml_to_argv({name: value})
    if resume is not None:
        folder = run_folder_of(str(resume), output_dir)
        if (folder / "config.yaml").is_file():
            sources.insert(0, _read_files(folder / "config.yaml"))
    given = [flag for files in sources for flag in yaml_to_argv(_merged(files))]
    config = parse_flags(cls, given + flags, common=COMMON, others=_CONFIG_HELP)
    for files in sources:  # what the run itself found out comes first
        for number in range(len(files), 0, -1):
            if RESOLVED in files[number - 1]:
                return _take_over(config, files[:number])
    return config


def _take_over(config: T, files: Sequence[Mapping[str, Any]]) -> T:
    """Return the config with what the last of these files found out, as far as it still holds."""
    given, resolved = yaml_to_argv(_merged(files)), files[-1][RESOLVED]
    check_names(resolved)
    before = parse_flags(type(config), given, check=False)
    found = {name: value for name, value in resolved.items() if name != PROCESSES}
    typed = parse_flags(type(config), given + yaml_to_argv(found), check=False)
    values = dict(resolved) | {
        n: None if v is None else getattr(typed, n) for n, v in found.items()
    }
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return replace(config, resolved=still_true(values, before, config, processes))


def read_settings(path: Path) -> dict[str, Any]:
    """Return a YAML file's settings, on top of those of the file that its ``base`` names.

    ``base`` is relative to the file that it stands in; a base may have a base of its own. What a
    run found out (``resolved``) is no setting, and left out.

    Raises:
        ValueError: If a file cannot be read or is no mapping of settings, or files name each other.
    """
    return _merged(_read_files(path))


def _read_files(path: Path) -> list[dict[str, Any]]:
    """Return what a YAML file and its bases have, the deepest base first."""
    files, seen = [_read_yaml(path)], [path.resolve()]
    while "base" in files[0]:
        base = seen[-1].parent / str(files[0].pop("base"))
        if base.resolve() in seen:
            raise ValueError(f"base must not lead back to its own file, got {base} in {path}")
        seen.append(base.resolve())
        files.insert(0, _read_yaml(base))
    return files


def _merged(files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of files, the later ones' on top."""
    return {name: v for file in files for name, v in file.items() if name != RESOLVED}


def yaml_to_argv(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags: ``{lr: 0.1, nesterov: false}`` is ``--lr 0.1 --no-nesterov``."""
    flags: list[str] = []
    for name, value in settings.items():
        flag = str(name).replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", str(value)]
    return flags


def config_to_yaml(settings: Mapping[str, Any], resolved: Mapping[str, Any] | None = None) -> str:
    """Return settings as YAML that `parse_config` reads back to equal ones; unset is left out.

    What a run found out goes under ``resolved``.
    """
    lines = [_line(name, value) for name, value in settings.items() if value is not None]
    if resolved:
        lines += ["\n# Found out by the run; dropped where a setting changes that it came from.\n"]
        lines += [f"{RESOLVED}:\n"]
        lines += [indent(_line(name, value), "  ") for name, value in resolved.items()]
    return "".join(lines)


def _line(name: str, value: Any) -> str:
    """Return one setting as YAML, a list in brackets."""
    is_list = isinstance(value, list | tuple)
    plain = {name: list(value) if is_list else value}
    return yaml.safe_dump(plain, default_flow_style=None if is_list else False)


def run_folder_of(resume: str, output_dir: str | None) -> Path:
    """Return the run folder that `--resume` means.

    Raises:
        ValueError: If it means no folder, or another one than `output_dir`.
    """
    if resume == "auto":
        if output_dir is None:
            raise ValueError("resume auto must go with output_dir, the run folder to look into")
        return Path(output_dir)
    folder = Path(resume)
    if folder.parent.name == CHECKPOINTS:
        folder = folder.parent.parent
    if not (folder / "config.yaml").is_file():
        raise ValueError(f"resume must be auto, a run folder or a checkpoint in one, got {resume}")
    if output_dir is not None and Path(output_dir).resolve() != folder.resolve():
        raise ValueError(
            f"output_dir must be left out or {folder}, where the run goes on, got {output_dir}"
        )
    return folder


@dataclass(frozen=True)
class RunConfig(DataConfig, ModelConfig, BatchConfig, SyncConfig, EmulationConfig, StageConfig):
    """Everything that `dbsl` reads; train.py adds what it alone reads."""

    # --- run
    # samples per step of evaluation; unset: 256, on CUDA four times the largest batch, up to 2,000
    eval_batch_size: Annotated[int | None, Within(1)] = None
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
    # minutes after which the run saves and stops with status 75, as after SIGTERM
    max_minutes: Annotated[float | None, Within(0, open_low=True)] = None
    # rounds that may be refused because loss or weights are not finite
    max_bad_rounds: Annotated[int, Within(0)] = 10
    # threads of torch; unset: this process's part of the cores, at most OMP_NUM_THREADS; a 1 there
    # counts only if the launcher was started with it, because launchers set 1 themselves
    cpu_threads: Annotated[int | None, Within(1)] = None
    # precision of forward passes; auto: bf16 where the device computes it natively, else no; no:
    # float32, where PyTorch lets convolutions on CUDA use TF32, but not matrix products
    mixed_precision: Precision = "auto"
    compile: bool = False  # use torch.compile; graphs for all batch sizes are made before training
    noise_scale: bool = True  # estimate the batch size worth having; costs below 2 % of the time
    # seed of everything random: split, shuffling, augmentation, weights, dropout
    seed: Annotated[int, Within(0)] = 0
    output_dir: str | None = None  # run folder, a new one; unset: runs/<dataset>-<model>-<time>
    # tracker of the run; wandb works offline without a login or a network
    report_to: ReportTo = "wandb"
    # repository user/name on the hub for model, card and figures of the finished run
    push_to_hub: str | None = None
    # what a run found out, as its config.yaml has it; no flag
    resolved: Found = field(default_factory=dict, metadata={"flag": False})

    def __post_init__(self) -> None:
        check_bounds(self)
        check_run(self)


def check_run(config: Any) -> None:
    """Raise ``ValueError`` for the first setting of train.py's ``Config`` outside its bound."""
    if config.warmup_epochs is not None:
        in_range("warmup_epochs", config.warmup_epochs, 0, config.epochs)
    parse_interval(config.checkpoint_every)
    if config.batch_limit == "useful" and config.large_batch_size != "auto":
        raise ValueError("batch_limit must be memory but with large_batch_size auto, got useful")
    if config.batch_evidence is not None and config.batch_limit != "useful":
        raise ValueError(
            f"batch_evidence must go with batch_limit useful, got {config.batch_evidence}"
        )
    if config.profile is not None and config.slope is not None:
        raise ValueError(f"profile must not be given with slope, got {config.profile}")
    if (config.slope is None) != (config.intercept is None):
        given, other = ("slope", "intercept") if config.slope else ("intercept", "slope")
        raise ValueError(f"{other} must be given with {given}, got {given} alone")
    if config.floor is not None and config.slope is None:
        raise ValueError("slope must be given with floor, got floor alone")
    if config.resolutions is not None:
        check_resolutions(config.resolutions)
    _check_joint_steps(config)
    rules = ("mean", "delta") if config.sync == "bsp" else ("ratio", "half")
    if config.push == "gradients" and config.merge == "delta":
        raise ValueError("merge must not be delta with push gradients, got delta")
    if config.merge is not None and config.merge not in rules:
        raise ValueError(
            f"merge must be {' or '.join(rules)} with sync {config.sync}, got {config.merge}"
        )


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
    only_step, only_gradients = ["sync_batch_norm"], ["damp_stale"]
    for names, fits, where in (
        (only_joint, joint, "sync step or push gradients"),
        (only_step, config.sync == "step", "sync step"),
        (only_gradients, config.push == "gradients", "push gradients"),
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
        if config.damp_stale and config.optimizer.startswith("adam"):
            raise ValueError(
                f"damp_stale must be false with optimizer {config.optimizer}, whose steps are as "
                "long for smaller gradients, got true"
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


def in_todays_words(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings of an older file or checkpoint as they are given today."""
    settings = dict(settings)
    if isinstance(settings.get("reset_momentum"), bool):
        settings["reset_momentum"] = "stage" if settings["reset_momentum"] else "never"
    return settings


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"config must be a readable YAML file, got {path} ({reason})") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(
            f"config must map settings to values, got {path} with a bare value or list"
        )
    return in_todays_words(settings)
