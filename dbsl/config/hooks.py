"""Extras: parts of a run that lie in dbsl/extras, and the moments at which a run calls them.

An extra is a class there, derived from `Extra`, alone in its file or folder. It is found by that:
no module of the core names it, and deleting its file is all it takes to be rid of it. What it needs
of slow libraries it imports when it is used. An extra of your own is such a file, too.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dbsl

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
Row = Mapping[str, Any]  # of metrics.jsonl, as `dbsl.log.rows.read_metrics` returns it

_FOLDER = Path(dbsl.__file__).parent / "extras"
# The settings of all extras, by file: what is said of one whose file is not there.
_SETTINGS = {
    "hub.py": ("push_to_hub",),
}


class Extra:
    """A part that a run can do without; each method is a moment, at which it does nothing.

    `Settings` is a dataclass of its flags, derived from `RunConfig`; None: it has none. Objects
    are made where all settings are known, by `of`.
    """

    Settings: type | None = None

    @classmethod
    def of(cls, config: Any) -> Extra | None:
        """Return the extra of a run with these settings; None: it is not asked for."""
        return cls()

    # --- before training, on every process
    def check(self, config: Any, accelerator: Accelerator) -> None:
        """Refuse settings, before anything is measured or written."""

    # --- what only reports: the main process, from rows alone (`python -m dbsl.report RUN`, too)
    def end(self, folder: Path) -> None:
        """The run is over, and its summary.json is written."""

    # --- after training, on every process
    def finished(self, config: Any, folder: Path, accelerator: Accelerator) -> None:
        """The run is finished, now or by an earlier session."""


class Extras:
    """The extras of a run, in the order of their names."""

    def __init__(self, extras: Mapping[str, Extra] | None = None) -> None:
        self._extras = dict(extras or {})

    @classmethod
    def of(cls, config: Any) -> Extras:
        """Return the extras that these settings ask for."""
        known = {
            name: extra.of(config)
            for name, extra in found_extras().items()
            if extra.Settings is None or isinstance(config, extra.Settings)
        }
        return cls({name: extra for name, extra in known.items() if extra is not None})

    def each(self, moment: Callable[..., T], *given: Any) -> list[T]:
        """Call a method of `Extra` of each; return what they return."""
        return [getattr(extra, moment.__name__)(*given) for extra in self._extras.values()]


@lru_cache
def found_extras() -> dict[str, type[Extra]]:
    """Return the extras that lie in dbsl/extras, by the names of their files."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules([str(_FOLDER)])):
        module = importlib.import_module(f"dbsl.extras.{name}")
        for value in vars(module).values():
            own = isinstance(value, type) and value.__module__.startswith(module.__name__)
            if own and issubclass(value, Extra):
                found[name] = value
    return found


def settings_of_extras() -> tuple[type, ...]:
    """Return the settings of all extras, as bases of a config."""
    return tuple(extra.Settings for extra in found_extras().values() if extra.Settings)


def defaults_of_extras() -> dict[str, Any]:
    """Return the defaults of the extras' settings, by name."""
    return {
        field.name: field.default
        for cls in settings_of_extras()
        for field in fields(cls)
        if field.name in inspect.get_annotations(cls)
    }


def file_of(setting: str) -> str | None:
    """Return the file that an extra's setting lacks; None: it lacks none."""
    for file, names in _SETTINGS.items():
        if setting in names and not (_FOLDER / file).exists():
            return f"dbsl/extras/{file}"
    return None
