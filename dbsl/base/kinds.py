"""The fields of a dataclass as flags: which values each takes, by its type."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Marks of a field: Annotated[tuple[str, ...], POSITIONAL]. Its values keep their commas.
POSITIONAL = "positional"  # the values that stand behind no flag
REPEATED = "repeated"  # one value behind each flag, which may be given again


@dataclasses.dataclass(frozen=True)
class Kind:
    """Form of a flag's value: in words, in the help, how it is read, whether there may be many."""

    words: str
    shown: str
    one: Callable[[str], Any]
    many: bool = False

    def read(self, values: Sequence[str]) -> Any:
        """Return the value; raise ``ValueError`` if these are no such values."""
        if self.many:
            return tuple(self.one(value) for value in values)
        (value,) = values
        return self.one(value)

    def takes(self, values: Sequence[str]) -> bool:
        """Whether these values are of the kind."""
        try:
            self.read(values)
        except ValueError:
            return False
        return True


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field on the command line; without kinds it is on or off."""

    name: str
    kinds: tuple[Kind, ...]
    optional: bool
    mark: str | None

    @classmethod
    def of(cls, name: str, hint: Any) -> Flag:
        """Return the flag of a field with this type."""
        marks = [m for m in getattr(hint, "__metadata__", ()) if m in (POSITIONAL, REPEATED)]
        hint = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        kinds = () if hint is bool else tuple(_kinds(hint))
        mark = marks[0] if marks else None
        if mark == REPEATED:
            kinds = tuple(_kinds(typing.get_args(hint)[0]))
        return cls(name, kinds, type(None) in typing.get_args(hint), mark)

    @property
    def shown(self) -> str:
        """The flag as it is written."""
        return "--" + self.name.replace("_", "-")

    @property
    def most(self) -> int | None:
        """Most values that it takes; None: any number."""
        return None if any(kind.many for kind in self.kinds) else len(self.kinds[:1])

    def read(self, values: list[str]) -> Any:
        """Return the value; raise ``ValueError`` unless it has the field's type."""
        flag = self.shown
        if not self.kinds:
            if values:
                raise ValueError(
                    f"{flag} must have no value (off: --no-{flag[2:]}), got {values[0]!r}"
                )
            return True
        if values == ["None"] and self.optional:
            return None  # unset again what a file sets
        if self.most is None and not self.mark:
            values = [part for value in values for part in value.split(",") if part]
        for kind in self.kinds:
            if kind.takes(values):
                return kind.read(values)
        # Name the value of the list that is wrong.
        wrong = [v for v in values if not any(kind.takes([v]) for kind in self.kinds)] or values
        what = " or ".join(kind.words for kind in self.kinds)
        raise ValueError(
            f"{flag} must be {what}, got {repr(' '.join(wrong)) if wrong else 'nothing'}"
        )


_TEXT = Kind("a text", "TEXT", str)
_KINDS = {
    int: Kind("a whole number", "N", int),
    float: Kind("a number", "X", float),
    Path: Kind("a text", "TEXT", Path),
}
_PLURALS = {"a whole number": "whole numbers", "a number": "numbers", "a text": "texts"}


def flags_of(cls: type) -> dict[str, Flag]:
    """Return a dataclass's fields as flags, by name."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = [field for field in dataclasses.fields(cls) if field.metadata.get("flag", True)]
    return {field.name: Flag.of(field.name, hints[field.name]) for field in fields}


def _kinds(hint: Any) -> list[Kind]:
    """Return the kinds of value that a type hint allows, unset left out."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return [kind for arm in inside if arm is not type(None) for kind in _kinds(arm)]
    if origin is typing.Literal:
        *before, last = names = list(map(str, inside))
        words = f"{', '.join(before)} or {last}" if before else last
        return [Kind(words, "|".join(names), lambda value: inside[names.index(value)])]
    if origin is tuple:
        return [
            Kind(_PLURALS.get(k.words, k.words), f"{k.shown},..", k.one, many=True)
            for k in _kinds(inside[0])
        ]
    return [_KINDS.get(hint, _TEXT)]
