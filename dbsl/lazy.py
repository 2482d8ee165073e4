"""Modules that are imported when they are first used.

Together timm, datasets and scipy take seconds to import. A wrong flag is refused, ``--help``
printed and a stopped run found finished before that.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType


def lazy_import(name: str) -> ModuleType:
    """Return a module whose code runs when one of its attributes is first read.

    Raises:
        ModuleNotFoundError: If there is no such module.
    """
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
