"""The ``--help`` of a dataclass of settings, in the groups and words of its own source."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

_GROUP = re.compile(r"\s*# --- (.+)")
_COMMENT = re.compile(r"\s*# (.+)")
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.+))?")
_NAMES = {int: "N", float: "X", str: "TEXT"}


def format_help(
    cls: type, *, common: Sequence[str] = (), others: Mapping[str, str] | None = None
) -> str:
    """Return the help of a dataclass's flags: those in `common` first, then group by group.

    A comment ``# --- title`` in the class begins a group. A flag's help is the comment behind its
    field, or the ones directly above where there is none behind.

    Args:
        cls: The dataclass.
        common: Fields to show first, in this order.
        others: Flags that are not fields, and their help; they come last among the common ones.
    """
    formatter = argparse.ArgumentParser(
        prog="train.py",
        usage="accelerate launch %(prog)s [--flag VALUE ...]",
        description=cls.__doc__,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    groups, words = read_source(cls)
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    first = formatter.add_argument_group("common")
    for name in common:
        _add(first, fields[name], hints[name], words[name])
    for flag, text in (others or {}).items():
        first.add_argument(flag, help=text.replace("%", "%%"), metavar="FILE")
    first.add_argument("-h, --help", dest="help", action=_Shown, help="show this and exit")
    for title, names in groups.items():
        group = formatter.add_argument_group(title)
        for name in names:
            if name not in common and fields[name].metadata.get("flag", True):
                _add(group, fields[name], hints[name], words[name])
    return formatter.format_help()


class _Shown(argparse.Action):
    """A flag that is only shown."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(nargs=0, **settings)

    def __call__(self, *_: object) -> None:
        """Do nothing."""


def read_source(cls: type) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names of fields by group, and what the source says of each.

    Groups that a class inherits come before its own, as its fields do.
    """
    groups: dict[str, list[str]] = {}
    words: dict[str, str] = {}
    above: list[str] = []
    sources = [inspect.getsource(c) for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c)]
    for line in "\n".join(sources).splitlines():
        if found := _GROUP.fullmatch(line):
            groups[found[1]] = []
            above = []
        elif found := _COMMENT.fullmatch(line):
            above.append(found[1])
        else:
            found = _FIELD.fullmatch(line)
            if found and groups:
                name, behind = found.groups()
                groups[list(groups)[-1]].append(name)
                words[name] = behind or " ".join(above)
            above = []
    return groups, words


def _add(group: Any, field: dataclasses.Field, hint: Any, words: str) -> None:
    flag, default = "--" + field.name.replace("_", "-"), field.default
    words = words.replace("%", "%%")
    if hint is bool:
        flag, words = (f"--[no-]{flag[2:]}", f"{words} (default: on)") if default else (flag, words)
        group.add_argument(flag, action=_Shown, help=words)
        return
    if default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else str(default)
        words += f" (default: {shown})"
    group.add_argument(flag, metavar=_type_name(hint), help=words)


def _type_name(hint: Any) -> str:
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return "|".join(_type_name(arm) for arm in inside if arm is not type(None))
    if origin is typing.Literal:
        return "|".join(map(str, inside))
    if origin is tuple:
        name = _type_name(inside[0])
        return f"{name},.."
    return _NAMES.get(hint, "TEXT")
