"""Command lines: the fields of a dataclass as flags, and what is wrong with one in one line."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import os
import re
import sys
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dbsl.base.errors import SettingError
from dbsl.config.fields import PAIRS, described, read_text
from dbsl.config.hooks import file_of

T = TypeVar("T")

# Metadata of a field of texts, which keep their commas.
POSITIONAL = {"flag": "positional"}  # the values that stand behind no flag
REPEATED = {"flag": "repeated"}  # one value behind each flag, which may be given again

_VALUE = "\0"  # goes before each value: argparse would take what begins with "-" for a flag
_GROUP = re.compile(r"\s*# --- (.+)")
_COMMENT = re.compile(r"\s*# (?!--- )(.+)")
_BETWEEN_PAIRS = re.compile(r",\s*(?=[^,=]*=)")
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.+))?")


def parse_flags(cls: type[T], flags: Sequence[str] | None = None, prog: str = "") -> T:
    """Build the dataclass `cls` from flags; unset: this process's. See `read_flags`."""
    return build(cls, read_flags(cls, sys.argv[1:] if flags is None else flags, prog))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from the fields that flags set."""
    for field in dataclasses.fields(cls):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in values:
            raise SettingError(f"{_flag(field.name)} must be given")
    return cls(**values)


def read_flags(
    cls: type,
    flags: Sequence[str],
    prog: str = "",
    common: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the fields that flags set. Lists take commas or spaces, and the last flag counts.

    The help, which one process prints, shows the fields in `common` first. `files` are flags that
    are no fields, by name, with their help; `elsewhere` are names that people may bring from
    elsewhere, and what they are here.
    """
    files = files or {}
    fields = {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("flag", True)}
    fields |= {name: dataclasses.field(default=None) for name in files}
    hints = typing.get_type_hints(cls) | dict.fromkeys(files, Path)
    positional = next((name for name, f in fields.items() if f.metadata == POSITIONAL), None)
    helping = not {"-h", "--help"}.isdisjoint(flags)
    groups, words = read_source(cls) if helping else ({"options": list(fields)}, {})
    if common:
        groups = {"common": list(common)} | groups
    parser = Parser(
        usage=f"{prog} [--flag VALUE ...]",
        description=cls.__doc__,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        argument_default=argparse.SUPPRESS,
        add_help=False,
        allow_abbrev=False,
    )
    left = {name: f for name, f in fields.items() if helping or name != positional}
    for number, (title, names) in enumerate(groups.items()):
        group = parser.add_argument_group(title)
        for name in filter(left.__contains__, [*names, *files]):
            # With a value too few or too many `_value` names the flag, which argparse would not;
            # but where values may stand behind no flag, a flag of one value must leave the rest.
            any_number = not helping and (positional is None or _is_list(hints[name]))
            more = {"nargs": "*"} if any_number else {}
            _add(group, name, left.pop(name), hints[name], (words | files).get(name, ""), more)
        if number == 0:
            group.add_argument("-h", "--help", action="help", help="show this and exit")
    if helping:
        if os.environ.get("RANK", "0") == "0":
            parser.print_help()
        parser.exit()
    given, rest = parser.parse_known_args([_token(flag) for flag in flags])
    for name in (token[2:].partition("=")[0] for token in rest if token.startswith("--")):
        flags = [_flag(known)[2:] for known in fields]
        raise unknown("flag must be one that --help lists", name, f"--{name}", flags, elsewhere)
    if rest and not positional:
        raise SettingError(f"values must come behind a flag that takes them, got {rest[0][1:]!r}")
    found = vars(given) | ({positional: rest} if positional else {})
    return {name: _value(name, fields[name], hints[name], v) for name, v in found.items()}


def unknown(
    must: str, name: str, got: str, known: Iterable[str], elsewhere: Mapping[str, str] | None
) -> SettingError:
    """Return the refusal of a name that is not known, with what may be meant."""
    if here := (elsewhere or {}).get(name.replace("_", "-")):
        return SettingError(f"{must}, got {got}, which is {here} here")
    if file := file_of(name.replace("-", "_")):
        return SettingError(f"{must}, got {got}, which needs {file}")
    near = difflib.get_close_matches(name, known, 1)
    dashes = "--" if got.startswith("--") else ""
    such = f", such as {dashes}{near[0]}" if near else ""
    return SettingError(f"{must}{such}, got {got}")


def read_source(cls: type) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names of fields by group, inherited ones first, and what the source says.

    A comment ``# --- title`` begins a group. A field's help is the comment behind it, or the ones
    directly above where there is none behind.
    """
    title, groups = "options", {"options": []}  # where a class has no groups
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


def kinds_in_words(cls: type) -> dict[str, str]:
    """Return what the fields of a dataclass are in words, such as ``a number``, but switches."""
    hints = typing.get_type_hints(cls)
    return {name: described(hint)[0] for name, hint in hints.items() if hint is not bool}


class Parser(argparse.ArgumentParser):
    """Refuses in one line, as settings do."""

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise SettingError(message.removeprefix("argument "))


def _add(
    group: Any, name: str, field: dataclasses.Field, hint: Any, words: str, more: dict[str, Any]
) -> None:
    """Add a field to a group of the parser, with its default in its help."""
    default = field.default
    shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if default is not False and default not in (None, (), dataclasses.MISSING):
        words += f" (default: {'on' if default is True else shown})"
    words = words.replace("%", "%%")
    if field.metadata == POSITIONAL:
        group.add_argument(name, help=words)
    elif hint is bool:
        group.add_argument(_flag(name), action=argparse.BooleanOptionalAction, help=words)
    else:
        more = {"action": "append"} if field.metadata == REPEATED else more
        group.add_argument(_flag(name), metavar=described(hint)[1], help=words, **more)


def _value(name: str, field: dataclasses.Field, hint: Any, given: bool | str | list[str]) -> Any:
    """Return what was given for a field as its type has it."""
    if isinstance(given, bool):
        return given
    values = [v.removeprefix(_VALUE) for v in ([given] if isinstance(given, str) else given)]
    if field.metadata in (POSITIONAL, REPEATED):
        return tuple(values)
    text = (",".join if _is_list(hint) else " ".join)(values)
    if field.metadata == PAIRS:
        return tuple(pair for pair in _BETWEEN_PAIRS.split(text) if pair)
    try:
        if len(values) != 1 and not _is_list(hint):
            raise ValueError
        return read_text(hint, text)
    except (KeyError, ValueError):
        shown = repr(text) if values else "nothing"
        raise SettingError(f"{_flag(name)} must be {described(hint)[0]}, got {shown}") from None


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(arm) is tuple for arm in (hint, *typing.get_args(hint)))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _token(flag: str) -> str:
    """Return a flag with dashes in its name, or a value as argparse takes any."""
    if not flag.startswith("--"):
        return _VALUE + flag
    return re.sub("^[^=]*", lambda name: name[0].replace("_", "-"), flag)
