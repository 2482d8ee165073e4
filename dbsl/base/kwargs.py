"""Arguments of other libraries' functions as a setting: ``name=value`` texts."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from dbsl.base.errors import SettingError


def parse_kwargs(setting: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of ``name=value`` texts; values are Python's literals, or else texts.

    Raises:
        SettingError: If one is no such pair, or a name stands twice.
    """
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name.isidentifier():
            raise SettingError(f"{setting} must be of the form name=value, got {pair!r}")
        if name in found:
            raise SettingError(f"{setting} must name each argument once, got {name} twice")
        try:
            found[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            found[name] = text
    return found
