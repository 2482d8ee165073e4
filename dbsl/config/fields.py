"""Command lines: the fields of a dataclass as flags, and what is wrong with one in one line.

Bounds of settings, stated in their types.

Arguments of other libraries' functions as a setting: ``name=value`` texts.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import difflib
import inspect
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from dbsl.base.errors import SettingError
from dbsl.config.hooks import file_of

T = TypeVar("T")

# Metadata of a field of texts, which keep their commas.
POSITIONAL = {"flag": "positional"}  # the values that stand behind no flag
REPEATED = {"flag": "repeated"}  # one value behind each flag, which may be given again
PAIRS = {"flag": "pairs"}  # name=value, where a value may be a list

UNSET = "unset"  # the value that takes back a setting of a file

_VALUE = "\0"  # goes before each value: argparse would take what begins with "-" for a flag
_WORDS = {int: ("a whole number", "N"), float: ("a number", "X"), Path: ("a text", "FILE")}
_UNIONS = (typing.Union, types.UnionType)
_GROUP = re.compile(r"\s*# --- (.+)")
_COMMENT = re.compile(r"\s*# (?!--- )(.+)")
_BETWEEN_PAIRS = re.compile(r",\s*(?=[^,=]*=)")
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.+))?")


def parse_flags(cls: type[T], flags: Sequence[str] | None = None, prog: str = "") -> T:
    """Build the dataclass `cls` from flags; unset: this process's. See `read_flags`."""
    return build(cls, read_flags(cls, sys.argv[1:] if flags is None else flags, prog))


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass `cls` from the fields that flags set.

    Raises:
        SettingError: If a field without a default is missing, or from its own ``__post_init__``.
    """
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

    Raises:
        SettingError: If a flag is unknown or its value has the wrong type.
        SystemExit: After help.
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
    parser = _Parser(
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
    groups: dict[str, list[str]] = {"options": []}  # where a class has no groups
    words: dict[str, str] = {}
    above: list[str] = []
    sources = [inspect.getsource(c) for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]
    for line in "\n".join(sources).splitlines():
        if found := _GROUP.fullmatch(line):
            groups[found[1]] = []
        elif found := _FIELD.fullmatch(line):
            name, behind = found.groups()
            groups[list(groups)[-1]].append(name)
            words[name] = behind or " ".join(above)
        comment = _COMMENT.fullmatch(line)
        above = [*above, comment[1]] if comment else []
    return {title: names for title, names in groups.items() if names}, words


def kinds_in_words(cls: type) -> dict[str, str]:
    """Return what the fields of a dataclass are in words, such as ``a number``, but switches."""
    hints = typing.get_type_hints(cls)
    return {name: _described(hint)[0] for name, hint in hints.items() if hint is not bool}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
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
        group.add_argument(_flag(name), metavar=_described(hint)[1], help=words, **more)


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
        raise SettingError(f"{_flag(name)} must be {_described(hint)[0]}, got {shown}") from None


def _is_list(hint: Any) -> bool:
    return any(typing.get_origin(arm) is tuple for arm in (hint, *typing.get_args(hint)))


def read_text(hint: Any, text: str) -> Any:
    """Return the value that a text means as a type; of a union the first type that it fits.

    Raises:
        KeyError, ValueError: If it means none.
    """
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if hint is types.NoneType:
        return {UNSET: None, "None": None}[text]
    if hint is bool:
        return {"true": True, "false": False}[text.lower()]
    if origin is typing.Literal:
        return {str(choice): choice for choice in inside}[text]
    if origin is tuple:
        return tuple(read_text(inside[0], part) for part in text.split(",") if part)
    if origin in _UNIONS:
        for arm in sorted(inside, key=lambda arm: arm is not types.NoneType):
            with contextlib.suppress(KeyError, ValueError):
                return read_text(arm, text)
        raise ValueError
    return hint(text) if hint in _WORDS else text


def in_words(hint: Any) -> str:
    """Return what a type is in words."""
    return "true or false" if hint is bool else _described(hint)[0]


def _described(hint: Any) -> tuple[str, str]:
    """Return what a type is in words, and what the help shows."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        *before, last = map(str, inside)
        return f"{', '.join(before)} or {last}" if before else last, "|".join(map(str, inside))
    if origin is tuple:
        words, shown = _described(inside[0])
        return words.removeprefix("a ") + "s", f"{shown},.."
    if origin in _UNIONS:
        arms = [_described(arm) for arm in inside if arm is not types.NoneType]
        return " or ".join(words for words, _ in arms), "|".join(shown for _, shown in arms)
    return _WORDS.get(hint, ("a text", "TEXT"))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _token(flag: str) -> str:
    """Return a flag with dashes in its name, or a value as argparse takes any."""
    if not flag.startswith("--"):
        return _VALUE + flag
    return re.sub("^[^=]*", lambda name: name[0].replace("_", "-"), flag)


# No setting is beyond it, unless its bound says so: a larger number is a slip, and the arithmetic
# behind the settings would overflow. Whole numbers up to here are exact as floats, too.
LARGEST = 1e15


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number of a list: ``Annotated[float, Within(0, 1)]``."""

    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    open_high: bool = False

    def check(self, name: str, value: float) -> None:
        """Raise ``SettingError`` naming setting, bound and value unless the value lies within."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below:  # NaN is neither
            return
        if value in (math.inf, -math.inf) or (value != value and self == Within()):
            bound = "finite"
        elif self.high != LARGEST:
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            bound = f"in {ends[0]}{_shown(self.low)}, {_shown(self.high)}{ends[1]}"
        elif value > LARGEST:
            bound = f"at most {LARGEST:g}"
        else:
            bound = f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"
        raise SettingError(f"{name} must be {bound}, got {_shown(value)}")


def _shown(value: float) -> str:
    """Return a number in words: a whole one exactly, unless it is too long."""
    if not isinstance(value, int):
        return f"{value:g}"
    digits = str(value)
    return digits if len(digits) <= 20 else f"one of {len(digits)} digits"


def in_range(name: str, value: float, *bounds: float, **ends: bool) -> None:
    """Check one value that has no type of its own; the bounds are those of `Within`."""
    Within(*bounds, **ends).check(name, value)


def check_bounds(config: Any) -> None:
    """Raise ``SettingError`` for the first number of a dataclass outside the bounds of its type.

    A type without bounds has those of `Within()`; a list with bounds has a number at least.
    """
    for name, bound in _bounds(type(config)):
        value = getattr(config, name)
        if bound and value == ():
            raise SettingError(f"{name} must have a value, got none")
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, (int, float)):
                (bound or Within()).check(name, number)


@lru_cache
def _bounds(cls: type) -> tuple[tuple[str, Within | None], ...]:
    hints = typing.get_type_hints(cls, include_extras=True)
    found = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(cls)}
    return tuple(
        (name, next((bound for bound in metadata if isinstance(bound, Within)), None))
        for name, metadata in found.items()
    )


def parse_kwargs(setting: str, pairs: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of ``name=value`` texts; values are Python's literals, or else texts."""
    found: dict[str, Any] = {}
    for name, text in _texts(setting, pairs).items():
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found


@lru_cache
def read_kwargs(
    setting: str, pairs: tuple[str, ...], *takers: type, but: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    """Return the arguments of ``name=value`` texts, as the fields of classes have them.

    Their types and bounds are those of settings; the fields in `but` are settings themselves.
    """
    hints: dict[str, Any] = {}
    for taker in takers:
        hints |= typing.get_type_hints(taker, include_extras=True)
    texts, found = _texts(setting, pairs), {}
    check_names(setting, texts, hints, dict(zip(but, but, strict=True)))
    for name, text in texts.items():
        hint, *more = typing.get_args(hints[name]) if _annotated(hints[name]) else [hints[name]]
        try:
            found[name] = read_text(hint, text)
        except (KeyError, ValueError):
            raise SettingError(
                f"{setting} must have {in_words(hint)} as {name}, got {text!r}"
            ) from None
        bound = next((own for own in more if isinstance(own, Within)), Within())
        for number in found[name] if isinstance(found[name], tuple) else (found[name],):
            if isinstance(number, int | float):
                bound.check(f"{setting} {name}", number)
    return found


def check_names(
    setting: str,
    given: Collection[str],
    known: Collection[str],
    elsewhere: Mapping[str, str] | None = None,
) -> None:
    """Raise ``SettingError`` for the first argument that is not known, or another setting's.

    `elsewhere` are those settings, by argument.
    """
    for name in given:
        if there := (elsewhere or {}).get(name):
            raise SettingError(f"{setting} must leave {name} to {there}")
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 3, 0.5) or sorted(known))
            raise SettingError(f"{setting} must name arguments such as {near}, got {name}")


def arguments(*functions: Callable[..., Any]) -> set[str]:
    """Return the names of the further arguments that functions or classes take."""
    several = (list(inspect.signature(function).parameters.values())[1:] for function in functions)
    return {one.name for own in several for one in own if one.kind is not one.VAR_KEYWORD}


def _texts(setting: str, pairs: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise SettingError(f"{setting} must be of the form name=value, got {pair!r}")
        if name in found:
            raise SettingError(f"{setting} must name each argument once, got {name} twice")
        found[name] = text
    return found


def _annotated(hint: Any) -> bool:
    return hasattr(hint, "__metadata__")
