"""What a process finds on its machine: slow libraries, CPU cores, the hub and its launcher.

torchrun and accelerate launch serve a store at MASTER_ADDR. It outlives the processes that they
restart.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore

# They ask a run to stop. Slurm's --signal=USR1@120 is common; Windows has two of them.
_NAMES = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
STOP_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
_STORE_PATIENCE = timedelta(seconds=20)
_THREADS = "OMP_NUM_THREADS"
_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "ACCELERATE_MIXED_PRECISION")  # set by torchrun, accelerate
_ANSWER_S = 3.0  # for any answer from a server
_CONNECT_S = 6.0  # beyond the timeout, for a slow name server, which costs 5 s
_LAZY: list[str] = []  # names of modules that are imported later


class _LazyModule(ModuleType):
    # Not importlib's LazyLoader, which puts modules into sys.modules: `inspect` looks at all of
    # those, and would load them in the middle of an import by torch.
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_import(name: str) -> ModuleType:
    """Return a stand-in for a module that imports it when an attribute is first read.

    Together, timm, datasets and scipy take seconds to import. Before that, a wrong flag is refused,
    ``--help`` is printed, and a resumed run may prove finished. The library for other loops needs
    few of them; a run checks all with `check_installed`.
    """
    _LAZY.append(name)
    return _LazyModule(name)


def check_installed() -> None:
    """Raise ``ModuleNotFoundError`` for a missing module before a run needs it."""
    for name in _LAZY:
        if importlib.util.find_spec(name.partition(".")[0]) is None:  # a parent would be imported
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


datasets, huggingface_hub = lazy_import("datasets"), lazy_import("huggingface_hub")
dist, accelerator = lazy_import("torch.distributed"), lazy_import("torch.accelerator")
cuda = lazy_import("torch.cuda")


def moment(device: torch.device) -> Any:
    """Return the current moment in a device's work, for `seconds_between`.

    On CUDA it is an event in the stream, so nothing waits until it is read. Elsewhere it is
    time.perf_counter() once the device has finished its work.
    """
    if device.type == "cuda":
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(device))
        return event
    if device.type != "cpu":
        accelerator.synchronize(device)
    return time.perf_counter()


def seconds_between(start: Any, end: Any) -> float:
    """Return the seconds from one moment to another; waits for both."""
    if isinstance(end, float):
        return end - start
    for event in (start, end):
        event.synchronize()
    return start.elapsed_time(end) / 1000


def local_processes() -> int:
    """Return how many processes the launcher has started on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_of_process() -> int:
    """Return this process's share of the cores that the launch may use, at least 1."""
    can_tell = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if can_tell else os.cpu_count() or 1
    return max(1, cores // local_processes())


def threads_of_process(jobs: int = 1) -> int:
    """Return how many threads torch should use: this process's cores, divided among `jobs` runs.

    ``OMP_NUM_THREADS`` is an upper bound if the user has set it. torchrun and accelerate launch set
    it to 1 themselves if it was not set; such a 1 is ignored.
    """
    threads = max(1, cores_of_process() // jobs)
    first = os.environ.get(_THREADS, "").partition(",")[0].strip()  # the outermost of nested levels
    bound = int(first) if first.isdecimal() else 0
    if bound == 0 or (bound == 1 and _launcher_has_set_it()):
        return threads
    return min(threads, bound)


def _launcher_has_set_it() -> bool:
    """Whether a launcher set ``OMP_NUM_THREADS``: it was itself started without."""
    if not any(name in os.environ for name in _LAUNCHERS):
        return False
    import psutil  # the library for other loops needs no psutil

    try:
        return _THREADS not in psutil.Process(os.getppid()).environ()
    except (psutil.Error, OSError):
        return True  # such as another user's process: usually the launcher set it


@contextmanager
def hub_or_cache() -> Iterator[bool]:
    """Have Hugging Face libraries read only their caches unless the hub answers.

    They would retry for a minute. Yields whether it answers; with ``HF_HUB_OFFLINE`` set, it is not
    asked.
    """
    settings = _, hub = datasets.config, huggingface_hub.constants  # the first imports the second
    online = not hub.HF_HUB_OFFLINE and answers(hub.ENDPOINT)
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        for module in settings:
            module.HF_HUB_OFFLINE = not online
        yield online
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value


def answers(url: str) -> bool:
    """Whether a URL's server answers."""
    try:
        session = huggingface_hub.utils.get_session()  # has the user's proxies and certificates
        session.head(url, timeout=_ANSWER_S)
    except Exception:  # no name, no route, no answer: each client library has its own types
        return False
    return True


def launched_precision() -> Literal["bf16", "fp16"] | None:
    """Return the precision that `accelerate launch` was asked for; None: it does not say.

    The launcher sets ``no`` even if nobody asked for it.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    return asked if asked in ("bf16", "fp16") else None


def restarts() -> int:
    """Return how often torchrun or accelerate has restarted this launch's processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def remember(key: str, value: str) -> str:
    """Return this launch's value for a key: `value`, unless it was set before.

    Without a launcher that restarts processes, it is `value`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # as with srun: nothing serves a store yet
        return value
    store = connect_store()
    return value if store is None else store.compare_set(key, "", value).decode()


def recall(key: str) -> str | None:
    """Return this launch's value for a key, if it was restarted."""
    store = connect_store() if restarts() else None
    return store.get(key).decode() if store is not None and store.check([key]) else None


def connect_store() -> Store | None:
    """Return a new connection to the launcher's store; None: there is no launcher."""
    # torchrun itself serves the store, even if it started one process.
    least = 1 if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else 2
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or int(os.environ.get("WORLD_SIZE", "1")) < least:
        return None
    store = _connect(address, int(port))
    return dist.PrefixStore("dbsl/launch", store)


def _connect(address: str, port: int) -> TCPStore:
    """Return a connection to a store, or raise ``RuntimeError`` soon after the timeout.

    torch (2.15) itself waits forever if a connection is accepted but never answered, as by a
    process that was stopped.
    """
    made: list[TCPStore | RuntimeError] = []

    def try_it() -> None:
        try:
            made.append(dist.TCPStore(address, port, is_master=False, timeout=_STORE_PATIENCE))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=try_it, name="store", daemon=True)
    thread.start()
    thread.join(_STORE_PATIENCE.total_seconds() + _CONNECT_S)
    store = made[0] if made else RuntimeError(f"timed out: nobody answers at {address}:{port}")
    if isinstance(store, RuntimeError):
        raise store
    return store
