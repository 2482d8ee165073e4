"""Command lines: the fields of a dataclass as flags, and what is wrong with one in one line."""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from dbsl.base.helptext import format_help
from dbsl.base.kinds import POSITIONAL, REPEATED, Flag, flags_of

T = TypeVar("T")


def parse_flags(
    cls: type[T],
    flags: Sequence[str] | None = None,
    prog: str = "",
    common: Sequence[str] = (),
    others: Mapping[str, str] | None = None,
) -> T:
    """Build the dataclass `cls` from flags; unset: this process's. One process prints help.

    `common` names the fields that the help shows first, `others` the flags that the caller reads.

    Raises:
        ValueError: If a flag is unknown or its value has the wrong type, or from the dataclass's
            own ``__post_init__``.
        SystemExit: After help.
    """
    flags = sys.argv[1:] if flags is None else flags
    if {"-h", "--help"} & set(flags):
        if os.environ.get("RANK", "0") == "0":
            print(format_help(cls, flags_of(cls), prog, common=common, others=others))
        raise SystemExit(0)
    return cls(**read_flags(cls, flags, others or ()))


def split_flags(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return fields with the values behind their flags; first those behind none, named ""."""
    given: list[tuple[str, list[str]]] = [("", [])]
    for token in flags:
        if token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            given.append((name.replace("-", "_"), [value] if equals else []))
        else:
            given[-1][1].append(token)
    return given


def read_flags(cls: type, flags: Sequence[str], others: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that flags set. Lists take commas or spaces, and the last flag counts.

    Raises:
        ValueError: If a flag is unknown, is missing or has a value of another type.
    """
    known = flags_of(cls) | {other[2:]: Flag.of(other[2:], str) for other in others}
    positional = next((name for name, flag in known.items() if flag.mark == POSITIONAL), None)
    found: dict[str, Any] = {}
    (_, loose), *given = split_flags(flags)
    for name, values in given:
        is_off = name.startswith("no_") and name[3:] in known and not known[name[3:]].kinds
        if name not in known and not is_off:
            near = difflib.get_close_matches(name, known, 1)
            such = f", such as --{near[0].replace('_', '-')}" if near else ""
            shown = name.replace("_", "-")
            raise ValueError(f"flag must be one that --help lists{such}, got --{shown}")
        flag = known[name[3:] if is_off else name]
        if positional and flag.most is not None:
            loose += values[flag.most :]
            values = values[: flag.most]
        value = flag.read(values)
        if is_off:
            value = False
        found[flag.name] = (*found.get(flag.name, ()), value) if flag.mark == REPEATED else value
    if loose and not positional:
        raise ValueError(f"values must come behind a flag, got {loose[0]!r}")
    if positional:
        found[positional] = tuple(loose)
    for field in dataclasses.fields(cls):
        missing = (field.default, field.default_factory) == (dataclasses.MISSING,) * 2
        if missing and field.name not in found:
            raise ValueError(f"--{field.name.replace('_', '-')} must be given")
    return {name: value for name, value in found.items() if f"--{name}" not in others}
