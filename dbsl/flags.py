"""Command lines: lists with commas or spaces, and dataclasses whose own checks give one line."""

from __future__ import annotations

import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import tyro

from dbsl.helptext import format_help

T = TypeVar("T")


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
        prog: What the command is called.
        common: Fields that the help shows first.
        others: Flags that the caller has read himself, with their help.
        check: Make the dataclass's own checks; without them the result is of another class.

    Raises:
        ValueError: From the dataclass's own ``__post_init__``.
        SystemExit: If a flag is unknown or its value has the wrong type (status 2), or after help.
    """
    flags = sys.argv[1:] if flags is None else flags
    if common and {"-h", "--help"} & set(flags):
        if os.environ.get("RANK", "0") == "0":
            print(format_help(cls, common=common, others=others))
        raise SystemExit(0)

    class Unchecked(cls):  # tyro would frame an error of __post_init__ in a box
        def __post_init__(self) -> None:
            """Leave the checks to the class itself, below."""

    parsed = tyro.cli(
        Unchecked,
        prog=prog,
        description=cls.__doc__,
        args=_split_commas(cls, flags),
        console_outputs=os.environ.get("RANK", "0") == "0",
    )
    if not check:
        return parsed
    return cls(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(cls)})


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
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_tuple(arm) for arm in typing.get_args(hint))
    return typing.get_origin(hint) is tuple
