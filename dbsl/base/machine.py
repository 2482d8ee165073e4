"""What a process finds where it runs: libraries that are slow to import, CPU cores, the hub."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

_THREADS = "OMP_NUM_THREADS"
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by torchrun, accelerate
_PATIENCE_S = 3.0  # for an answer of the hub, of any kind


_LAZY: list[str] = []


class _LazyModule(ModuleType):
    # Not importlib's LazyLoader, whose modules stand in sys.modules: `inspect` looks at all of
    # those, and would load them in the middle of whatever torch is importing just then.
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> ModuleType:
    """Return what stands for a module, and imports it when one of its attributes is first read.

    Together timm, datasets and scipy take seconds to import. A wrong flag is refused, ``--help``
    printed and a stopped run found finished before that. The library for other loops does without
    most of them; a run asks for all by `check_installed`.
    """
    _LAZY.append(name)
    return _LazyModule(name)


def check_installed() -> None:
    """Raise ``ModuleNotFoundError`` for a module that is missing, before a run needs it."""
    for name in _LAZY:
        if importlib.util.find_spec(name.partition(".")[0]) is None:  # a parent would be imported
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


datasets, huggingface_hub = lazy_import("datasets"), lazy_import("huggingface_hub")


def cores_of_process() -> int:
    """Return this process's part of the cores that the launch may run on, at least 1."""
    can_tell = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return max(1, cores // local_processes())


def lower_priority() -> None:
    """Have this thread give way to the others, on Linux; elsewhere it would be the process."""
    with suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def threads_of_process(jobs: int = 1) -> int:
    """Return how many threads torch is to use here: of this process's cores, shared by `jobs` runs.

    ``OMP_NUM_THREADS`` is an upper bound if the user has set it. torchrun and accelerate launch set
    it to 1 themselves where it was not set; such a 1 does not count.
    """
    threads = max(1, cores_of_process() // jobs)
    first = os.environ.get(_THREADS, "").partition(",")[0].strip()  # the outer one of nested levels
    bound = int(first) if first.isdecimal() else 0
    if bound == 0 or (bound == 1 and _launcher_has_set_it()):
        return threads
    return min(threads, bound)


def local_processes() -> int:
    """Return how many processes the launcher has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _launcher_has_set_it() -> bool:
    """Whether ``OMP_NUM_THREADS`` is a launcher's: it was itself started without."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return False
    import psutil  # the library for other loops does without

    try:
        return _THREADS not in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return True  # another user's process, say: the launcher set it more often


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Inside, Hugging Face libraries read their caches alone unless the hub answers.

    They would try again for a minute. Yields whether it does; with ``HF_HUB_OFFLINE`` set it is not
    asked.
    """
    answers = not huggingface_hub.constants.HF_HUB_OFFLINE and _hub_answers()
    settings = (huggingface_hub.constants, datasets.config)
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        for module in settings:
            module.HF_HUB_OFFLINE = not answers
        yield answers
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def _hub_answers() -> bool:
    try:
        session = huggingface_hub.utils.get_session()  # has the user's proxies and certificates
        session.head(huggingface_hub.constants.ENDPOINT, timeout=_PATIENCE_S)
    except Exception:  # no name, no route, no answer: each client library has types of its own
        return False
    return True
