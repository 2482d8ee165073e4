"""Read settings from flags and YAML files, and write them as YAML."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import inspect
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import yaml

from dbsl.base.errors import SettingError, as_given, require, such_as
from dbsl.base.machine import launched_precision, recall
from dbsl.config.complete import FOUND, PROCESSES, still_true
from dbsl.config.fields import (
    PAIRS,
    UNSET,
    Choice,
    described,
    is_readable,
    markers,
    read_text,
)
from dbsl.config.settings import CHECKPOINT, CHECKPOINTS, RunConfig

T = TypeVar("T")

# Metadata of a field of texts that keep their commas.
POSITIONAL = {"flag": "positional"}  # the values that follow no flag
REPEATED = {"flag": "repeated"}  # one value after each flag, which may be repeated

# What most people need first.
COMMON = (
    *("dataset", "model", "pretrained", "epochs", "optimizer", "lr", "resolutions", "augment"),
    *("label_smoothing", "mixed_precision", "workers", "small_ratio", "large_batch_size"),
    *("sync", "balance", "seed", "eval_every", "eval_train", "save_best", "output_dir", "resume"),
    *("plan_only", "report_to", "config"),
)
_CONFIG_HELP = "YAML file of settings; flags win over it"
_GROUP = re.compile(r"\s*# --- (.+)")
_COMMENT = re.compile(r"\s*# (?!--- )(.+)")
_BETWEEN_PAIRS = re.compile(r",\s*(?=[^,=]*=)")
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.+))?")
_HELP_FROM = 32  # column where a flag's help begins
# What common names in timm, transformers and earlier versions are called here.
_ELSEWHERE = {
    "--mixed-precision": ("amp", "bf16", "fp16"),
    "--large-batch-size or --local-batch-sizes": ("batch-size", "per-device-train-batch-size"),
    "--micro-batch-size": ("grad-accum-steps", "gradient-accumulation-steps"),
    "--resolutions": ("img-size", "input-size"),
    "--model-kwargs drop_path_rate=": ("drop-connect", "drop-path"),
    "a line of loss_function in train.py": ("class-weights",),
    "--lr": ("learning-rate",),
    "--ema-decay": ("model-ema",),
    "--loader-workers": ("num-workers",),
    "--optimizer": ("opt",),
    "--opt-kwargs": ("opt-eps", "opt-betas", "layer-decay"),
    "--lr-schedule": ("sched",),
    "--merge delta:LR,MOMENTUM": ("outer-lr", "outer-momentum"),
    "--balance dynamic:ROUNDS": ("balance-every",),
    "--lr-schedule cosine:LAST": ("min-lr",),
    "--emulate disturb=": ("disturb",),
    "--emulate noise=": ("time-noise",),
    "--emulate gbps=": ("link-gbps",),
    "--emulate ms=": ("link-ms",),
    "--preprocess crop_pct=": ("crop-pct",),
    "--preprocess interpolation=": ("interpolation",),
    "--preprocess mean=": ("mean",),
    "--preprocess std=": ("std",),
    "found:": ("resolved",),
}
RUN_FOLDER = "run folder"  # the launch's key for the run that it may have to restart


def parse_config(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Build the dataclass `cls` from an optional ``--config FILE.yaml`` and flags; flags win.

    The file is read as flags and passes the same checks; lists take commas or spaces. A resumed run
    keeps its settings: its own ``config.yaml`` is read before the rest. A process that torchrun or
    accelerate has restarted resumes its run. Settings that a run found, and that its file has, are
    kept unless a setting that they depend on has changed.
    """
    said = _read_flags(cls, sys.argv[1:] if argv is None else argv, "accelerate launch train.py")
    path = said.pop("config", None)
    named = {path: _read_files(path, cls)} if path else {}
    settings = _merged(named.get(path, ())) | said
    # In YAML a folder's name may be a number or a date.
    texts = (settings.get(name) for name in ("resume", "output_dir"))
    resume, output_dir = (None if text is None else str(text) for text in texts)
    # A run named by its folder continues from its newest checkpoint by itself.
    by_folder = resume is not None and not is_checkpoint(resume)
    if not by_folder and (unfinished := recall(RUN_FOLDER)):
        resume, output_dir = "auto", unfinished
        said |= {"resume": resume, "output_dir": output_dir}
    read = {}  # files and their bases, by path; a resumed run's own come first
    if resume is not None:
        own = run_folder_of(resume, output_dir) / "config.yaml"
        read = {own: _read_files(own, cls)} if own.is_file() else {}
    read |= named
    given = yaml_to_argv(_merged(chain(*read.values())))  # null undoes earlier values
    try:
        config = _build(cls, _read_flags(cls, given) | said)
    except SettingError as error:  # its first word is the setting, or its flag
        name = _name(str(error).partition(" ")[0].removeprefix("--"))
        paths = [p for p, files in read.items() if name in _merged(files)]
        if not paths or name in said:
            raise
        raise SettingError(f"{error} ({paths[-1]} sets {name})") from None
    for files in read.values():
        for number in range(len(files), 0, -1):
            if FOUND in files[number - 1]:
                return _keep_found(config, files[:number])
    return config


def _keep_found(config: T, files: Sequence[Mapping[str, Any]]) -> T:
    """Return the config with the last file's found settings that still hold."""
    cls, found = type(config), files[-1][FOUND]
    require(isinstance(found, Mapping), f"{FOUND} must map settings to values", found)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name in found.keys() - defaults.keys() - {PROCESSES}:
        raise SettingError(f"{FOUND} must name settings, got {name}")
    before = SimpleNamespace(**defaults | _read_flags(cls, yaml_to_argv(_merged(files))))
    found = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    found = still_true(found, before, config, processes, launched_precision())
    return dataclasses.replace(config, found=found)


def parse_flags(cls: type[T], flags: Sequence[str] | None = None, prog: str = "") -> T:
    """Build the dataclass `cls` from flags, the last of which wins; None: this process's."""
    return _build(cls, _read_flags(cls, sys.argv[1:] if flags is None else flags, prog))


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    for field in dataclasses.fields(cls):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise SettingError(f"{_flag(field.name)} must be given")
    return cls(**values)


@cache
def _flags_of(cls: type) -> tuple[dict[str, dataclasses.Field], dict[str, Any]]:
    """Return the fields that are flags, and their types, by name."""
    known = {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("flag", True)}
    hints = typing.get_type_hints(cls)
    for name in known if issubclass(cls, RunConfig) else ():  # its values go into YAML files
        if not is_readable(hints[name]):
            types_ = "bool, int, float, str, a Literal or None, or a tuple of one"
            raise TypeError(f"{cls.__name__}.{name} must be of {types_}, got {hints[name]}")
    more = {"config": dataclasses.field(default=None)} if issubclass(cls, RunConfig) else {}
    return known | more, hints | dict.fromkeys(more, Path)


def _read_flags(cls: type, flags: Sequence[str], prog: str = "") -> dict[str, Any]:
    known, hints = _flags_of(cls)
    if not {"-h", "--help"}.isdisjoint(flags):
        if os.environ.get("RANK", "0") == "0":
            print(_help(cls, prog), flush=True)
        raise SystemExit(0)
    positional = next((name for name, f in known.items() if f.metadata == POSITIONAL), None)
    found: dict[str, list[Any]] = {positional: [[]]} if positional else {}  # by flag, for each use
    taker, last = positional, ""  # the next value's field, and the flag before it
    for flag in flags:
        if not flag.startswith("--"):
            if taker is None:
                got = f"{flag!r} after {last}" if last else repr(flag)
                raise SettingError(f"values must follow a flag that takes them, got {got}")
            found[taker][-1].append(flag)
        else:
            given, equals, value = flag[2:].partition("=")
            name = _name(given)
            on = name in known or not _is_switch(hints.get(name.removeprefix("no_")))
            name = name if on else name.removeprefix("no_")
            if name not in known or name == positional:
                raise _unknown(cls, "flag must be one that --help lists", _flag(_name(given)))
            switch = hints[name] is bool or not on
            if switch and equals:
                off = _flag(f"no_{name}")
                raise SettingError(f"{_flag(name)} must have no value ({off}: off), got {value!r}")
            found.setdefault(name, []).append(on if switch else [value] * bool(equals))
            taker, last = (positional if switch else name), flag
        # With positional values, a flag takes one value, or all up to the next flag.
        if positional and taker != positional and found[taker][-1]:
            one = known[taker].metadata == REPEATED or not _is_list(hints[taker])
            taker = positional if one else taker
    return {name: _value(name, known[name], hints[name], given) for name, given in found.items()}


def _value(name: str, field: dataclasses.Field, hint: Any, given: list[Any]) -> Any:
    """Return the values given for a field, converted to its type."""
    last = given[-1]
    if isinstance(last, bool) or (not last and _is_switch(hint)):
        return last is not False
    if field.metadata == POSITIONAL:
        return tuple(last)
    text = (",".join if _is_list(hint) else " ".join)(last)
    takes_none = types.NoneType in (hint, *typing.get_args(hint))
    if text == UNSET and field.default is not dataclasses.MISSING and not takes_none:
        return field.default
    if field.metadata == PAIRS:
        return tuple(pair for pair in _BETWEEN_PAIRS.split(text) if pair)
    try:
        if field.metadata == REPEATED:
            return tuple(value for (value,) in given)
        if len(last) != 1 and not _is_list(hint):
            raise ValueError
        return read_text(hint, text)
    except (KeyError, ValueError):
        shown = repr(text) if last else "nothing"
        raise SettingError(f"{_flag(name)} must be {described(hint)[0]}, got {shown}") from None


def _is_switch(hint: Any) -> bool:
    """Whether a flag may have no value, and the prefix no_."""
    return bool in (hint, *typing.get_args(hint))


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(arm) is tuple for arm in (hint, *typing.get_args(hint)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(flag: object) -> str:
    return str(flag).replace("-", "_")


def _unknown(cls: type, must: str, got: str, where: str = "") -> SettingError:
    """Return the error for an unknown name, with what may be meant."""
    name = _name(got.removeprefix("--"))
    for here, names in _ELSEWHERE.items() if issubclass(cls, RunConfig) else ():
        if name in map(_name, names):
            return SettingError(f"{must}, got {got}{where}, which is {here} here")
    flags = _flags_of(cls)[0]
    known = map(_flag, flags) if got.startswith("--") else flags
    return SettingError(f"{must}{such_as(got, known)}, got {got}{where}")


def _help(cls: type, prog: str) -> str:
    """Return the help of the flags by group, for a run with the common ones first."""
    known, hints = _flags_of(cls)
    choices, (groups, words) = dict(markers(cls, Choice)), read_source(cls)
    if issubclass(cls, RunConfig):
        groups, words = {"common": COMMON} | groups, words | {"config": _CONFIG_HELP}
    form = partial(argparse.RawDescriptionHelpFormatter, max_help_position=_HELP_FROM)
    about = inspect.cleandoc(cls.__doc__ or "")
    how = {"usage": f"{prog} [--flag VALUE ...]", "description": about, "formatter_class": form}
    parser, told = argparse.ArgumentParser(add_help=False, **how), set()
    for title, names in groups.items():
        group = parser.add_argument_group(title)
        for name in [name for name in names if name in known.keys() - told]:
            default, text = known[name].default, words[name].replace("%", "%%")
            if default is not False and default not in (None, (), "", dataclasses.MISSING):
                text += f" (default: {'on' if default is True else as_given(default)})"
            shown = "|".join(choices[name].forms) if name in choices else described(hints[name])[1]
            flag = name if known[name].metadata == POSITIONAL else _flag(name)
            kind = {"metavar": shown if flag != name else name}
            kind = {"action": "store_true"} if hints[name] is bool else kind
            group.add_argument(flag, help=text, **kind)
            told.add(name)
        if title == next(iter(groups)):
            group.add_argument("-h", "--help", action="store_true", help="show this and exit")
    return parser.format_help()


def read_source(cls: type) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names of fields by group, inherited ones first, and their help, from the source.

    A comment ``# --- title`` begins a group; help is behind a field, or else right above it.
    """
    title, groups = "options", {"options": []}  # if a class has no groups
    words: dict[str, str] = {}
    above: list[str] = []
    sources = [inspect.getsource(c) for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]
    for line in "\n".join(sources).splitlines():
        if found := _GROUP.fullmatch(line):
            title = found[1]
            groups.setdefault(title, [])
        elif found := _FIELD.fullmatch(line):
            name, behind = found.groups()
            groups[title].append(name)
            words[name] = behind or " ".join(above)
        comment = _COMMENT.fullmatch(line)
        above = [*above, comment[1]] if comment else []
    return {title: names for title, names in groups.items() if names}, words


def read_settings(path: Path) -> dict[str, Any]:
    """Return a YAML file's settings, over those of the file that its ``base`` names.

    A ``base`` is relative to its file. Settings that a run found (``found``) are omitted.
    """
    return _merged(_read_files(path, None))


def _read_files(path: Path, cls: type | None) -> list[dict[str, Any]]:
    """Return a YAML file's and its bases' settings, deepest base first; None: any names."""
    files, seen = [_read_yaml(path, cls)], [path.resolve()]
    while "base" in files[0]:
        base = seen[-1].parent / str(files[0].pop("base"))
        if base.resolve() in seen:
            raise SettingError(f"base must not lead back to its own file, got {base} in {path}")
        seen.append(base.resolve())
        files.insert(0, _read_yaml(base, cls))
    return files


def _merged(files: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in (pair for file in files for pair in file.items()):
        found.pop(name, None)  # the last given comes last: of `x` and `no_x` it wins
        found[name] = value
    found.pop(FOUND, None)
    return found


def yaml_to_argv(settings: Mapping[str, Any]) -> list[str]:
    """Return settings as flags: ``{lr: 0.1, nesterov: false}`` is ``--lr 0.1 --no-nesterov``."""
    flags: list[str] = []
    for name, value in settings.items():
        if isinstance(value, bool):
            on, name = value != name.startswith("no_"), name.removeprefix("no_")
            flags.append(_flag(name if on else f"no_{name}"))
        elif isinstance(value, (list, tuple)):
            flags += [_flag(str(name)), *map(str, value)]
        elif value is not None:
            flags += [_flag(str(name)), str(value)]
    return flags


def config_to_yaml(settings: Mapping[str, Any], found: Mapping[str, Any] | None = None) -> str:
    """Return settings as YAML that `parse_config` reads back as equal; unset ones are left out."""
    text = _as_yaml({name: value for name, value in settings.items() if value is not None})
    if found:
        text += "\n# By the run itself; dropped where another setting or the processes change.\n"
        text += f"{FOUND}:\n{textwrap.indent(_as_yaml(found), '  ')}"
    return text


def _as_yaml(settings: Mapping[str, Any]) -> str:
    text = ""
    for name, value in settings.items():
        is_list = isinstance(value, list | tuple)
        plain = {name: [*value] if is_list else value}
        text += yaml.safe_dump(plain, default_flow_style=None if is_list else False)
    return text


def run_folder_of(resume: str, output_dir: str | None) -> Path:
    """Return the run folder that `--resume` means."""
    if resume == "auto":
        if output_dir is None:
            raise SettingError("resume auto must go with output_dir, the run folder to look into")
        return Path(output_dir)
    folder = Path(resume)
    if is_checkpoint(resume):
        folder = (folder if len(folder.parts) > 1 else folder.absolute()).parent.parent
    if not os.path.isfile(folder / "config.yaml"):  # also for too long a name
        got = as_given(resume) + ", which does not exist" * (not os.path.exists(resume))
        raise SettingError(f"resume must be auto, a run folder or a checkpoint in one, got {got}")
    if output_dir is not None and Path(output_dir).resolve() != folder.resolve():
        must = f"output_dir must be left out or {folder}, where the run continues"
        raise SettingError(f"{must}, got {output_dir}")
    return folder


def is_checkpoint(resume: str) -> bool:
    """Whether `--resume` means a checkpoint in a run folder, not a run."""
    folder = Path(resume).absolute()
    return folder.parent.name == CHECKPOINTS and CHECKPOINT.fullmatch(folder.name) is not None


def _read_yaml(path: Path, cls: type | None) -> dict[str, Any]:
    """Read a YAML file; refuse unknown names, and values that no flag has, such as mappings."""
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: an endless number, say
        reason, shown = " ".join(str(error).split()), as_given(path)
        raise SettingError(f"config must be a readable YAML file, got {shown} ({reason})") from None
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise SettingError(f"config must map settings to values, got a value or a list in {path}")
    settings = {_name(key): value for key, value in settings.items()}
    known, hints = _flags_of(cls) if cls else ((), {})
    for name, value in settings.items() if cls else ():
        own = name if name in known else name.removeprefix("no_")
        if own not in {*known, "base", FOUND} - {"config"}:
            raise _unknown(cls, "config must set what --help lists", name, f" in {path}")
        hint = hints.get(own)
        each = value if isinstance(value, list) and _is_list(hint) else [value]
        kinds = {str, int, float, datetime.date, datetime.datetime} if hint is not bool else set()
        kinds |= {bool} if _is_switch(hint) else set()
        if value is not None and own != FOUND and not {*map(type, each)} <= kinds:
            why = "YAML's yes, no, on or off without quotes; " * isinstance(value, bool)
            got = as_given(value) if isinstance(value, bool) else repr(value)
            must = f"{name} must be {described(hint)[0]}"
            raise SettingError(f"{must}, got {got} ({why}{path} sets {name})")
    return settings
