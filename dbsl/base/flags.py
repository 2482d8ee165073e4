"""Command lines: lists with commas or spaces, and dataclasses whose own checks give one line."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro
from tyro.conf import Positional

from dbsl.base.bounds import Within
from dbsl.base.helptext import format_help

T = TypeVar("T")

_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts"}


def parse_flags(
    cls: type[T],
    flags: Sequence[str] | None = None,
    prog: str | None = None,
    common: Sequence[str] = (),
    others: Mapping[str, str] | None = None,
    *,
    check: bool = True,
) -> T:
    """Build the dataclass `cls` from flags; only the first process prints help and errors.

    Args:
        cls: The dataclass.
        flags: The command line; unset: this process's.
        prog: Name of the command.
        common: Fields that the help shows first.
        others: Flags that the caller has read himself, with their help.
        check: Make the dataclass's own checks; without them the result is of another class.

    Raises:
        ValueError: If a flag is unknown or its value has the wrong type, or from the dataclass's
            own ``__post_init__``.
        SystemExit: After help.
    """
    flags = sys.argv[1:] if flags is None else flags
    if common and {"-h", "--help"} & set(flags):
        if os.environ.get("RANK", "0") == "0":
            print(format_help(cls, common=common, others=others))
        raise SystemExit(0)
    flags = _split_commas(cls, flags)
    if not {"-h", "--help"} & set(flags):
        _check_types(cls, flags)  # tyro would frame an error in a box, in words of its own

    class Unchecked(cls):  # tyro would frame an error of __post_init__ in a box
        def __post_init__(self) -> None:
            """Leave the checks to the class itself, below."""

    parsed = tyro.cli(
        Unchecked,
        prog=prog,
        description=cls.__doc__,
        args=flags,
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    if not check:
        return parsed
    return cls(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(cls)})


def _check_types(cls: type, flags: Sequence[str]) -> None:
    """Raise ``ValueError`` for the first flag that is unknown or has a value of another type."""
    hints = typing.get_type_hints(cls)
    hints = {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.metadata.get("flag", True)}
    positional = any(
        Positional in getattr(hint, "__metadata__", ())
        for hint in typing.get_type_hints(cls, include_extras=True).values()
    )
    given: list[tuple[str, list[str]]] = [("", [])]  # flags and their values
    for token in flags:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            given.append((name.replace("-", "_"), [value] if equals else []))
        else:
            given[-1][1].append(token)
    if given[0][1] and not positional:
        raise ValueError(f"values must come behind a flag, got {given[0][1][0]!r}")
    for name, values in given[1:]:
        flag = "--" + name.replace("_", "-")
        is_off = name.startswith("no_") and hints.get(name[3:]) is bool
        if name not in hints and not is_off:
            near = difflib.get_close_matches(name, hints, 1)
            such = f", such as --{near[0].replace('_', '-')}" if near else ""
            raise ValueError(f"flag must be one that --help lists{such}, got {flag}")
        if is_off or hints[name] is bool:
            if values and not positional:
                off = "" if is_off else f" (off: --no-{flag[2:]})"
                raise ValueError(f"{flag} must have no value{off}, got {values[0]!r}")
            continue
        if values == ["None"] and type(None) in typing.get_args(hints[name]):
            continue  # unset again what a file sets
        kinds = _kinds(hints[name])
        if positional and not any(kind.many for kind in kinds):
            values = values[:1]  # the next word may stand for itself
        if not any(kind.takes(values) for kind in kinds):
            # Name the value of the list that is wrong.
            wrong = [v for v in values if not any(kind.takes([v]) for kind in kinds)] or values
            what = " or ".join(kind.words for kind in kinds)
            got = repr(" ".join(wrong)) if wrong else "nothing"
            raise ValueError(f"{flag} must be {what}, got {got}")


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Form of a flag: in words, how a value is read, and whether there may be many."""

    words: str
    read: Callable[[str], object]
    many: bool = False

    def takes(self, values: Sequence[str]) -> bool:
        """Whether these values are of the kind."""
        if len(values) != 1 and not self.many:
            return False
        try:
            for value in values:
                self.read(value)
        except ValueError:
            return False
        return True


def _kinds(hint: Any) -> list[_Kind]:
    """Return the kinds of value that a type hint allows, unset left out."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for arm in inside if arm is not type(None) for kind in _kinds(arm)]
    if origin is typing.Literal:
        *others, last = map(str, inside)
        return [_Kind(f"{', '.join(others)} or {last}" if others else last, inside.index)]
    if origin is tuple:
        kinds = _kinds(inside[0])
        return [_Kind(_PLURALS.get(k.words, k.words), k.read, many=True) for k in kinds]
    number = {int: _Kind("a whole number", int), float: _Kind("a number", float)}
    return [number.get(hint, _Kind("a text", str))]


def _split_commas(cls: type, flags: Sequence[str]) -> list[str]:
    """Split ``24,32`` into two values behind flags whose field is a tuple, unless annotated."""
    hints = typing.get_type_hints(cls, include_extras=True)
    tuples = {name.replace("_", "-") for name, hint in hints.items() if _is_tuple(hint)}
    out: list[str] = []
    inside = False
    for token in flags:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            inside = name.replace("_", "-") in tuples
            out += [f"--{name}", *value.split(",")] if inside and equals else [token]
        elif inside:
            out += [part for part in token.split(",") if part]
        else:
            out.append(token)
    return out


def _is_tuple(hint: Any) -> bool:
    if typing.get_origin(hint) is typing.Annotated:
        inside, *others = typing.get_args(hint)
        return all(isinstance(other, Within) for other in others) and _is_tuple(inside)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_tuple(arm) for arm in typing.get_args(hint))
    return typing.get_origin(hint) is tuple
