"""Modules that are imported when they are first used.

Together timm, datasets and scipy take seconds to import. A wrong flag is refused,
``--help`` printed and a stopped run found finished before that.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    # Not importlib's LazyLoader, whose modules stand in sys.modules: `inspect` looks at all of
    # those, and would load them in the middle of whatever torch is importing just then.
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> ModuleType:
    """Return what stands for a module, and imports it when one of its attributes is first read.

    Raises:
        ModuleNotFoundError: If there is no such module.
    """
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _LazyModule(name)
