"""What a settings field declares in its type: bounds, and its role in a run.

`parse_kwargs` reads the settings that are ``name=value`` texts.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from enum import Flag, auto
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from dbsl.base.errors import LARGEST, SettingError, as_given, require

M = TypeVar("M")

PAIRS = {"flag": "pairs"}  # metadata of a field of name=value texts; values may be lists
NO_FLAG = {"flag": None}  # a run finds it by itself
UNSET = "unset"  # the value that undoes a file's setting

_NO_TEXT = re.compile("[\0\n\r\ud800-\udc7f\udd00-\udfff]")  # no file can have the last of these
_WORDS = {
    bool: ("true or false", ""),
    int: ("a whole number", "N"),
    float: ("a number", "X"),
    Path: ("a text", "FILE"),
}
_UNIONS = (typing.Union, types.UnionType)


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each in a list: ``Annotated[float, Within(0, 1)]``.

    A list has one of the `lengths`, or at least one number; `order` holds between neighbours.
    """

    low: float = -LARGEST
    high: float = LARGEST
    open_low: bool = False
    open_high: bool = False
    lengths: tuple[int, ...] = ()
    order: Callable[[float, float], bool] | None = None

    def check(self, name: str, value: Any) -> None:
        """Raise ``SettingError`` naming setting, bound and value unless a value is within."""
        is_list = isinstance(value, (tuple, list))
        for number in value if is_list else (value,):
            if isinstance(number, (int, float)) and (bound := self._missed(number)):
                raise SettingError(f"{name} must be {bound}, got {_shown(number)}")
        if is_list and self.lengths and len(value) not in self.lengths:
            several = in_words(self.lengths)
            raise SettingError(f"{name} must have {several} values, got {len(value) or 'none'}")
        if is_list and self.order and not all(map(self.order, value, value[1:])):
            raise SettingError(f"{name} must ascend, got {as_given(value)}")
        if is_list and not value and self != Within():
            raise SettingError(f"{name} must have a value, got none")

    def _missed(self, value: float) -> str:
        """Return the bound that a number violates, in words; empty: none."""
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        if above and below:  # NaN is neither
            return ""
        if value in (math.inf, -math.inf) or (value != value and self == Within()):
            return "finite"
        if self.high != LARGEST:
            ends = "(" if self.open_low else "[", ")" if self.open_high else "]"
            return f"in {ends[0]}{_shown(self.low)}, {_shown(self.high)}{ends[1]}"
        if value > LARGEST:
            return f"at most {LARGEST:g}"
        return f"above {self.low:g}" if self.open_low else f"at least {self.low:g}"


class Choice:
    """What a text may be: a word, optionally with numbers after a colon, as ``delta:0.7,0.9`` has.

    ``Choice(mean={}, delta={"LR": Positive, "MOMENTUM": BelowOne})``, each number with its type.
    """

    def __init__(self, **words: Mapping[str, Any]) -> None:
        self._words = words
        self.forms = [f"{w}[:{','.join(parts)}]" if parts else w for w, parts in words.items()]

    def numbers(self, name: str, text: str) -> list[Any]:
        """Return the numbers after a word; refuse a text of any other form."""
        word, colon, rest = text.partition(":")
        kinds, given = self._words.get(word, {}), rest.split(",") if colon else []
        found = []
        with contextlib.suppress(ValueError):
            for kind, number in zip(kinds.values(), given, strict=False):
                found.append(typing.get_args(kind)[0](number))
        is_known = word in self._words and len(found) == len(given)
        require(is_known, f"{name} must be {in_words(self.forms)}", text)
        for (part, kind), number in zip(kinds.items(), found, strict=False):
            typing.get_args(kind)[1].check(f"{part} of {name} {word}", number)
        return found


Count, Number = Annotated[int, Within(1)], Annotated[int, Within(0)]
Positive, Amount = Annotated[float, Within(0, open_low=True)], Annotated[float, Within(0)]
Share, BelowOne = Annotated[float, Within(0, 1)], Annotated[float, Within(0, 1, open_high=True)]


def _shown(value: float) -> str:
    """Return a number in words: a whole one exactly, unless it is too long."""
    if not isinstance(value, int):
        return f"{value:g}"
    digits = str(value)
    return digits if len(digits) <= 20 else f"one of {len(digits)} digits"


class Role(Flag):
    """A setting's role in a run; without one, weights depend on it."""

    FREE = auto()  # a resumed run may change it: no weight depends on it
    COMMAND = auto()  # the command's, not its run's: config.yaml leaves it out
    NODE = auto()  # each machine may have its own
    WORKERS = auto()  # may change with their number; a list: by resolution, or also by worker
    PLAN = auto()  # of plans or exchanges: with another value, a process's saved state does not fit
    ORDER = auto()  # an epoch's sample order is drawn from it


class Needs:
    """A setting takes effect only with others: at these values, or, for a bare name, switched on.

    With `new`, it is refused only when a run begins: a resumed run may have had the others.
    """

    words = "except with"

    def __init__(self, *given: str, new: bool = False, why: str = "", **values: Any) -> None:
        self.new, self.why = new, why
        listed = {name: v if isinstance(v, tuple) else (v,) for name, v in values.items()}
        self._cases = [dict.fromkeys(given) | listed]  # each one's values; None: switched on

    def __or__(self, other: Needs) -> Needs:
        """Return needs that are met if either's are."""
        either = copy(self)
        either._cases = self._cases + other._cases
        return either

    def __str__(self) -> str:
        cases = (
            [f"{name} {in_words(among)}" if among else name for name, among in case.items()]
            for case in self._cases
        )
        return " or ".join(map(" and ".join, cases)) + self.why

    def are_met(self, config: Any) -> bool:
        """Whether a config meets them."""
        return any(all(is_on(config, *one) for one in case.items()) for case in self._cases)

    def allowed(self, name: str, config: Any) -> tuple[Any, ...]:
        """Return the values that a config allows a setting; none: any."""
        return () if self.are_met(config) else (getattr(type(config), name),)


class Excludes(Needs):
    """A setting must be off with others, given as for `Needs`, or have a value in `but`."""

    words = "with"

    def __init__(self, *given: str, but: tuple[str, ...] = (), **others: Any) -> None:
        super().__init__(*given, **others)
        self._but = but

    def allowed(self, name: str, config: Any) -> tuple[Any, ...]:
        """Return the values that a config allows a setting; none: any."""
        off = is_on(config, name) and self.are_met(config)
        return (self._but or (getattr(type(config), name),)) if off else ()


def is_on(config: Any, name: str, among: tuple[Any, ...] | None = None) -> bool:
    """Whether a setting has one of these values; None: any except its default, 0, false and empty.

    A value may have more after a colon, as gradients:4 has.
    """
    value = getattr(config, name, None)
    if among:
        return word_of(value) in among
    return bool(value) and value != getattr(type(config), name)


def word_of(value: Any) -> Any:
    """Return a value without the numbers after its colon."""
    return value.partition(":")[0] if isinstance(value, str) else value


@lru_cache
def markers(cls: type, kind: type[M]) -> list[tuple[str, M]]:
    """Return the annotations of a kind in a dataclass's field types, each with its field."""
    hints = typing.get_type_hints(cls, include_extras=True)
    names = [f.name for f in fields(cls)] if is_dataclass(cls) else hints
    several = ((name, one) for name in names for one in _metadata(hints[name]))
    return [(name, one) for name, one in several if isinstance(one, kind)]


def _metadata(hint: Any) -> Iterator[Any]:
    yield from getattr(hint, "__metadata__", ())
    for arm in typing.get_args(hint):
        yield from _metadata(arm)


def with_role(cls: type, role: Role) -> tuple[str, ...]:
    """Return the fields of a dataclass that have a role, or one of several."""
    return tuple(name for name, own in markers(cls, Role) if own & role)


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value is of a type; a text that is blank, or that no file can hold, is of none."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in _UNIONS:
        return any(_is_of(arm, value) for arm in inside)
    if origin is tuple:
        return isinstance(value, tuple | list) and all(_is_of(inside[0], one) for one in value)
    if origin is typing.Literal:
        return isinstance(value, str | int) and value in inside
    if hint is str:
        return isinstance(value, str) and bool(value.strip()) and not _NO_TEXT.search(value)
    kind = {int: Integral, float: Real}.get(hint, origin or hint)
    return isinstance(value, kind) and (hint is bool or not isinstance(value, bool))


def check_fields(config: Any) -> None:
    """Refuse the first field that does not match its type; any number is `Within()`."""
    for name, choice in markers(type(config), Choice):  # before others are compared with it
        if (value := getattr(config, name)) is not None:
            choice.numbers(name, value)
    bounds = dict(markers(type(config), Within))
    for name, hint in _hints(type(config)).items():
        value = getattr(config, name)
        must = f"{name} must be {described(hint)[0]}"
        require(_is_of(hint, value), must, repr(value) if isinstance(value, str) else value)
        bounds.get(name, Within()).check(name, value)
    check_needs(config, new=False)


def check_needs(config: Any, *, new: bool) -> None:
    """Raise ``SettingError`` for the first field that does not fit the others."""
    for name, needs in markers(type(config), Needs):
        value, allowed = getattr(config, name), needs.allowed(name, config)
        if needs.new == new and allowed and word_of(value) not in (*allowed, None):
            must = f"{name} must be {in_words(allowed)} {needs.words} {needs}"
            raise SettingError(f"{must}, got {as_given(value)}")


def read_text(hint: Any, text: str) -> Any:
    """Return a text as a type, or as the first that fits of a union; KeyError, ValueError: none."""
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


def is_readable(hint: Any) -> bool:
    """Whether `read_text` returns values of a type, and YAML can hold them."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin in (tuple, *_UNIONS):
        return all(arm is ... or is_readable(arm) for arm in inside)
    return origin is typing.Literal or hint in (bool, int, float, str, types.NoneType)


def in_words(choices: Sequence[Any]) -> str:
    """Return choices as a text, with an "or" before the last."""
    *before, last = map(as_given, choices)
    return f"{', '.join(before)} or {last}" if before else last


def described(hint: Any) -> tuple[str, str]:
    """Return a type in words, and as the help shows it."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return in_words(inside), "|".join(map(str, inside))
    if origin is tuple:
        words, shown = described(inside[0])
        return words.removeprefix("a ") + "s", f"{shown},.."
    if origin in _UNIONS:
        arms = [described(arm) for arm in inside if arm is not types.NoneType]
        words, shown = zip(*arms, strict=True)
        return " or ".join(words), "|".join(filter(None, shown))
    return _WORDS.get(hint, ("a text", "TEXT"))


def parse_kwargs(
    setting: str,
    pairs: tuple[str, ...],
    elsewhere: Mapping[str, str] = MappingProxyType({}),
    bounds: Mapping[str, Within] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return ``name=value`` texts as literals, or else texts; `elsewhere` names other settings'."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise SettingError(f"{setting} must be of the form name=value, got {pair!r}")
        if name in found:
            raise SettingError(f"{setting} must name each argument once, got {name} twice")
        if name in elsewhere:
            raise SettingError(f"{setting} must leave {name} to {elsewhere[name]}")
        found[name] = text
        with contextlib.suppress(ValueError, SyntaxError):
            found[name] = ast.literal_eval(text)
    for name in found.keys() & bounds.keys():
        value, bound = found[name], bounds[name]
        numbers = value if isinstance(value, tuple) and bound.lengths else (value,)
        are_numbers = all(isinstance(number, int | float) for number in numbers)
        require(are_numbers, f"{setting} must have a number as {name}", value)
        bound.check(f"{setting} {name}", value)
    return found


def check_names(setting: str, given: Collection[str], known: Collection[str]) -> None:
    """Refuse the first unknown argument."""
    for name in given:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known, 3, 0.5) or sorted(known))
            raise SettingError(f"{setting} must name arguments such as {near}, got {name}")


def arguments(*functions: Callable[..., Any]) -> set[str]:
    """Return the names of functions' or classes' arguments, without each one's first."""
    several = [list(inspect.signature(function).parameters.values())[1:] for function in functions]
    return {one.name for own in several for one in own if one.kind is not one.VAR_KEYWORD}
