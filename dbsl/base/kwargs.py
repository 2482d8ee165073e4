"""Arguments of other libraries' functions as a setting: ``name=value`` texts."""

from __future__ import annotations

import ast
import difflib
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError
from dbsl.base.flags import in_words, read_text


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
