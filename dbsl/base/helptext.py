"""The ``--help`` of a dataclass of settings, in the groups and words of its own source."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dbsl.base.kinds import POSITIONAL, Flag

_GROUP = re.compile(r"\s*# --- (.+)")
_COMMENT = re.compile(r"\s*# (.+)")
_FIELD = re.compile(r"    (\w+): [^#]*(?:# (.+))?")


def format_help(
    cls: type,
    known: Mapping[str, Flag],
    prog: str,
    *,
    common: Sequence[str] = (),
    others: Mapping[str, str] | None = None,
) -> str:
    """Return the help of a dataclass's flags: those in `common` first, then group by group.

    A comment ``# --- title`` in the class begins a group. A flag's help is the comment behind its
    field, or the ones directly above where there is none behind. `others` are flags that are not
    fields; they come last in the first group.
    """
    formatter = argparse.ArgumentParser(
        usage=f"{prog} [--flag VALUE ...]",
        description=cls.__doc__,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
    )
    groups, words = read_source(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if common:
        groups = {"common": list(common)} | {
            title: [name for name in names if name not in common] for title, names in groups.items()
        }
    for title, names in groups.items():
        group = formatter.add_argument_group(title)
        for name in names:
            if name in known:
                _add(group, known[name], fields[name].default, words[name])
        if title == next(iter(groups)):
            for flag, text in (others or {}).items():
                group.add_argument(flag, help=text.replace("%", "%%"), metavar="FILE")
            _add_switch(group, "-h, --help", "show this and exit")
    return formatter.format_help()


def read_source(cls: type) -> tuple[dict[str, list[str]], dict[str, str]]:
    """Return the names of fields by group, inherited ones first, and what the source says."""
    groups: dict[str, list[str]] = {"options": []}  # where a class has no groups
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
            if found:
                name, behind = found.groups()
                groups[list(groups)[-1]].append(name)
                words[name] = behind or " ".join(above)
            above = []
    return {title: names for title, names in groups.items() if names}, words


def _add(group: Any, flag: Flag, default: Any, words: str) -> None:
    words, shown = words.replace("%", "%%"), flag.shown
    if flag.mark == POSITIONAL:
        group.add_argument(flag.name, help=words)
    elif not flag.kinds:
        shown, words = (
            (f"--[no-]{shown[2:]}", f"{words} (default: on)") if default else (shown, words)
        )
        _add_switch(group, shown, words)
    else:
        if default not in (None, (), dataclasses.MISSING):
            value = ",".join(map(str, default)) if isinstance(default, tuple) else default
            words += f" (default: {value})"
        group.add_argument(shown, metavar="|".join(k.shown for k in flag.kinds), help=words)


def _add_switch(group: Any, shown: str, words: str) -> None:
    group.add_argument(shown, dest=shown, action="store_true", help=words)
