"""Flags and YAML files into settings, and settings into a YAML file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any, TypeVar

import yaml

from dbsl.base.errors import SettingError
from dbsl.base.launcher import launched_precision, recall
from dbsl.config.complete import RESOLVED, check_names, still_true
from dbsl.config.fields import PROCESSES, UNSET
from dbsl.config.flags import build, kinds_in_words, read_flags, unknown
from dbsl.config.hooks import found_extras
from dbsl.config.image_settings import AugmentKwargs, MixupKwargs
from dbsl.config.settings import CHECKPOINTS, LrKwargs, is_url

T = TypeVar("T")

# What most people need first.
COMMON = (
    *("dataset", "model", "epochs", "lr", "workers", "small_ratio", "large_batch_size"),
    *("sync", "output_dir", "resume"),
)
_COMMAND = "accelerate launch train.py"
_CONFIG_HELP = {"config": "YAML file of settings; flags win over it"}
# Names in timm and transformers that resemble none here, or another one; all: docs/timm.md.
_LARGE = "--large-batch-size or --local-batch-sizes"
_ELSEWHERE = {
    "amp": "--mixed-precision",
    "batch-size": _LARGE,
    "bf16": "--mixed-precision",
    "class-weights": "a line of loss_function in train.py",
    "fp16": "--mixed-precision",
    "grad-accum-steps": "--micro-batch-size, a number of samples,",
    "gradient-accumulation-steps": "--micro-batch-size, a number of samples,",
    "img-size": "--resolutions",
    "input-size": "--resolutions",
    "learning-rate": "--lr",
    "log-wandb": "--report-to wandb",
    "model-ema": "--ema-decay",
    "num-workers": "--loader-workers",
    "opt": "--optimizer",
    "per-device-train-batch-size": _LARGE,
    "sched": "--lr-schedule",
    "val-split": "--holdout",
    "bce-sum": "--bce-kwargs sum=True",
    "bce-target-thresh": "--bce-kwargs target_thresh=",
    "drop-connect": "--model-kwargs drop_path_rate=",
    "drop-path": "--model-kwargs drop_path_rate=",
    "gp": "--model-kwargs global_pool=",
    "layer-decay": "--opt-kwargs layer_decay=",
    "drop-block": "--model-kwargs drop_block_rate=",
    "opt-eps": "--opt-kwargs eps=",
    "opt-betas": "--opt-kwargs betas=",
    "lr-k-decay": "--lr-kwargs k_decay=",
    **{f"mixup-{n.replace('_', '-')}": f"--mixup-kwargs {n}=" for n in MixupKwargs.__annotations__},
    **{n.replace("_", "-"): f"--lr-kwargs {n}=" for n in LrKwargs.__annotations__},
    **{n.replace("_", "-"): f"--augment-kwargs {n}=" for n in AugmentKwargs.__annotations__},
}
RUN_FOLDER = "run folder"  # what a launch remembers of the run that it may have to restart


def parse_config(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Build the dataclass `cls` from an optional ``--config FILE.yaml`` and flags; flags win.

    File and flags meet the same checks, since the file is read as flags. Lists may be separated by
    commas or spaces.

    A run that is resumed keeps its settings: its own ``config.yaml`` is read before the rest. A
    process that torchrun or accelerate has restarted resumes what it was doing. What a run found
    out, and its file says, is taken over unless a setting has changed that it came from.
    """
    flags = sys.argv[1:] if argv is None else argv
    said = read_flags(cls, flags, _COMMAND, COMMON, _CONFIG_HELP, _ELSEWHERE)
    known = {field.name for field in fields(cls) if field.metadata.get("flag", True)}
    sources = [_Source.read(said.pop("config"), known)] if "config" in said else []
    settings = (sources[0].settings if sources else {}) | said
    resume, output_dir = settings.get("resume"), settings.get("output_dir")
    if (resume is None or is_url(resume)) and (unfinished := recall(RUN_FOLDER)):
        resume, output_dir = "auto", unfinished
        said |= {"resume": resume, "output_dir": output_dir}
    with tempfile.TemporaryDirectory() as scratch:
        where = {"resume": resume, "output_dir": output_dir}
        own = _own_settings(settings | where, Path(scratch))
        if own is not None and own.is_file():
            sources.insert(0, _Source.read(own, known))
    given = [flag for source in sources for flag in yaml_to_argv(source.settings)]
    with _naming_source(sources, said):
        for source in sources:
            _check_switches(cls, source.settings)
        config = build(cls, read_flags(cls, given) | said)
    for source in sources:  # what the run itself found out comes first
        for number in range(len(source.files), 0, -1):
            if RESOLVED in source.files[number - 1]:
                return _keep_found(config, source.files[:number])
    return config


@dataclass(frozen=True)
class _Source:
    """A YAML file: what it and its bases have, the deepest base first."""

    path: Path
    files: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path, known: Collection[str]) -> _Source:
        return cls(path, _read_files(path, known))

    @property
    def settings(self) -> dict[str, Any]:
        return _merged(self.files)


def _check_switches(cls: type, settings: Mapping[str, Any]) -> None:
    """Raise ``SettingError`` for a setting of a file that is true or false and must not be."""
    kinds = kinds_in_words(cls)
    for name, value in settings.items():
        kind = kinds.get(str(name).replace("-", "_"))
        if isinstance(value, bool) and kind is not None:
            words = "yes or on" if value else "no or off"
            raise SettingError(
                f"{name} must be {kind}, got {str(value).lower()}, as which YAML reads an "
                f"unquoted {words}"
            )


@contextmanager
def _naming_source(sources: Sequence[_Source], said: Collection[str]) -> Iterator[None]:
    """Say of a setting that is refused which file has set it, unless a flag has."""
    try:
        yield
    except SettingError as error:  # its first word is the setting, or its flag
        name = str(error).partition(" ")[0].removeprefix("--").replace("-", "_")
        paths = [s.path for s in sources if name in {k.replace("-", "_") for k in s.settings}]
        if not paths or name in said:
            raise
        way = "a flag wins over it"
        if f"{name} must be {UNSET} " in str(error):
            way += f": --{name.replace('_', '-')} {UNSET}"
        raise SettingError(f"{error} ({paths[-1]} sets {name}; {way})") from None


def _own_settings(said: Mapping[str, Any], scratch: Path) -> Path | None:
    """Return where a resumed run's own settings are, if it is one."""
    if said["resume"] is None:
        return None
    for extra in found_extras().values():
        if own := extra.own_settings(said, scratch):
            return own
    resume, output_dir = str(said["resume"]), said["output_dir"]
    return run_folder_of(resume, output_dir) / "config.yaml"


def _keep_found(config: T, files: Sequence[Mapping[str, Any]]) -> T:
    """Return the config with what the last of these files found out, as far as it still holds."""
    given, resolved = yaml_to_argv(_merged(files)), files[-1][RESOLVED]
    check_names(resolved, type(config))
    defaults = {field.name: field.default for field in fields(config)}
    before = SimpleNamespace(**defaults | read_flags(type(config), given))
    found = {name: value for name, value in resolved.items() if name != PROCESSES}
    typed = read_flags(type(config), yaml_to_argv(found))
    values = dict(resolved) | {name: typed.get(name) for name in found}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return replace(
        config, resolved=still_true(values, before, config, processes, launched_precision())
    )


def read_settings(path: Path) -> dict[str, Any]:
    """Return a YAML file's settings, on top of those of the file that its ``base`` names.

    ``base`` is relative to the file that it stands in; a base may have a base of its own. What a
    run found out (``resolved``) is no setting, and left out.
    """
    return _merged(_read_files(path))


def _read_files(path: Path, known: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Return what a YAML file and its bases have, the deepest base first; None: any names."""
    files, seen = [_read_yaml(path, known)], [path.resolve()]
    while "base" in files[0]:
        base = seen[-1].parent / str(files[0].pop("base"))
        if base.resolve() in seen:
            raise SettingError(f"base must not lead back to its own file, got {base} in {path}")
        seen.append(base.resolve())
        files.insert(0, _read_yaml(base, known))
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
    lines = [_yaml_line(name, value) for name, value in settings.items() if value is not None]
    if resolved:
        lines += ["\n# Found out by the run; dropped where a setting changes that it came from.\n"]
        lines += [f"{RESOLVED}:\n"]
        lines += [indent(_yaml_line(name, value), "  ") for name, value in resolved.items()]
    return "".join(lines)


def _yaml_line(name: str, value: Any) -> str:
    """Return one setting as YAML, a list in brackets."""
    is_list = isinstance(value, list | tuple)
    plain = {name: list(value) if is_list else value}
    return yaml.safe_dump(plain, default_flow_style=None if is_list else False)


def run_folder_of(resume: str, output_dir: str | None) -> Path:
    """Return the run folder that `--resume` means."""
    if resume == "auto":
        if output_dir is None:
            raise SettingError("resume auto must go with output_dir, the run folder to look into")
        return Path(output_dir)
    folder = Path(resume)
    if folder.parent.name == CHECKPOINTS:
        folder = folder.parent.parent
    if not (folder / "config.yaml").is_file():
        there = "" if Path(resume).exists() else ", which does not exist"
        raise SettingError(
            f"resume must be auto, a run folder or a checkpoint in one, got {resume}{there}"
        )
    if output_dir is not None and Path(output_dir).resolve() != folder.resolve():
        raise SettingError(
            f"output_dir must be left out or {folder}, where the run goes on, got {output_dir}"
        )
    return folder


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which PyYAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if key.value in lines:
                    raise yaml.YAMLError(
                        f"{key.value} is given twice, in lines {lines[key.value]} and {line}"
                    )
                lines[key.value] = line
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path, known: Collection[str] | None) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a SafeLoader
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: an endless number, say
        reason = " ".join(str(error).split())
        raise SettingError(f"config must be a readable YAML file, got {path} ({reason})") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise SettingError(
            f"config must map settings to values, got {path} with a bare value or list"
        )
    for key in settings if known else ():
        name = str(key).replace("-", "_")
        if {name, name.removeprefix("no_")}.isdisjoint({*known, "base", RESOLVED}):
            must, got = "config must set what --help lists", f"{key} in {path}"
            raise unknown(must, name, got, known, _ELSEWHERE)
    return settings
