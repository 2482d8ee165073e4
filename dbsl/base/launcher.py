"""What torchrun or accelerate launch says to a process: its store, restarts, the precision.

The store, at MASTER_ADDR, outlives the processes that they restart.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

STORE_PATIENCE = timedelta(seconds=20)
_CONNECT_S = 2.0  # for a connection that is to be there at once


def launched_precision() -> Literal["bf16", "fp16"] | None:
    """Return the precision that `accelerate launch` was asked for; None: it says nothing.

    ``no`` is also what it sets where nobody has asked it.
    """
    asked = os.environ.get("ACCELERATE_MIXED_PRECISION", "").lower()
    return asked if asked in ("bf16", "fp16") else None


def restarts() -> int:
    """Return how often torchrun or accelerate has restarted this launch's processes."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def remember(key: str, value: str) -> str:
    """Return what this launch remembers under a key: `value`, unless it was set before.

    Where no launcher would restart the processes, that is `value`.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # srun, say: nothing serves a store yet
        return value
    store = connect_store("launch")
    return value if store is None else store.compare_set(key, "", value).decode()


def recall(key: str) -> str | None:
    """Return what this launch remembers under a key, if it was restarted."""
    store = connect_store("launch") if restarts() else None
    return store.get(key).decode() if store is not None and store.check([key]) else None


def first_fault(fault: str) -> str:
    """Return the fault that a process of this launch has told of first: this one, if none has."""
    try:
        store = _faults()
        return fault if store is None else store.compare_set("first", "", fault).decode()
    except (OSError, RuntimeError):  # it has ended with the process that served it
        return fault


def note_fault(key: Literal["ended", "shown"]) -> None:
    """Tell the others that this process ends by an error, or that the first fault is shown."""
    with suppress(OSError, RuntimeError):
        if (store := _faults()) is not None:
            store.set(key, "")


def await_shown_fault(seconds: float) -> None:
    """Wait until the first fault is shown, at most so long.

    A process that ends is the launcher's sign to end all others, also in the middle of a line.
    """
    with suppress(OSError, RuntimeError):
        if (store := _faults()) is not None:
            store.wait(["shown"], timedelta(seconds=seconds))


def has_fault() -> bool:
    """Return whether a process of this launch has told of an error."""
    try:
        store = _faults()
        return store is not None and (store.check(["first"]) or store.check(["ended"]))
    except (OSError, RuntimeError):
        return False


def _faults() -> dist.Store | None:
    return connect_store(f"faults/{restarts()}", at_once=True)


def connect_store(prefix: str, *, at_once: bool = False) -> dist.Store | None:
    """Return a new connection to the launcher's store; None: there is no launcher.

    With `at_once` it fails at once where nobody listens (``OSError``), and soon where nobody
    answers (``RuntimeError``), instead of trying again and again.
    """
    where = launcher_address()
    if where is None:
        return None
    if at_once:
        socket.create_connection(where, timeout=_CONNECT_S).close()
    patience = timedelta(seconds=_CONNECT_S) if at_once else STORE_PATIENCE
    store = connect(*where, is_master=False, timeout=patience)
    store.set_timeout(STORE_PATIENCE)
    return dist.PrefixStore(f"dbsl/{prefix}", store)


def launcher_address() -> tuple[str, int] | None:
    """Return the host and the port of the launcher's store; None: there is no launcher."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    return address, int(port)


def connect(address: str, port: int, *, timeout: timedelta, **options: Any) -> dist.TCPStore:
    """Return a connection with a store, or raise ``RuntimeError`` soon after the timeout.

    torch (2.15) itself waits without end where a connection is taken and nobody answers on it, as
    by a process that was stopped.
    """
    made: list[dist.TCPStore | RuntimeError] = []

    def connect() -> None:
        try:
            made.append(dist.TCPStore(address, port, timeout=timeout, **options))
        except RuntimeError as error:
            made.append(error)

    thread = threading.Thread(target=connect, name="store", daemon=True)
    thread.start()
    thread.join(timeout.total_seconds() + _CONNECT_S)
    if not made:
        raise RuntimeError(f"timed out: nobody answers at {address}:{port}")
    if isinstance(made[0], RuntimeError):
        raise made[0]
    return made[0]
