"""What a launch of several processes shares: the launcher's store, and the process group.

The store, at MASTER_ADDR, outlives the processes that torchrun and accelerate restart. No port is
opened here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

STORE_PATIENCE = timedelta(seconds=20)


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


def join_processes(timeout_s: float, *, cpu: bool) -> None:
    """Prepare the process group of processes that a launcher started, or restarted.

    Accelerate makes the group itself, but after a restart: the launcher's store still holds the
    addresses of the processes before (torch 2.15), so that each attempt needs keys of its own.

    Args:
        timeout_s: Longest wait of one process for another.
        cpu: Whether the processes compute on the CPU, be there an accelerator or not.
    """
    _bind_to_launcher()
    # The launcher's store is there for the group as well, under other keys.
    store = connect_store(f"group/{restarts()}") if restarts() else None
    if store is None or not (cpu or torch.cuda.is_available()):
        return
    dist.init_process_group(
        chosen_backend() or ("gloo" if cpu else "nccl"),
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout_s),
    )


def chosen_backend() -> str | None:
    """Return the backend that DBSL_BACKEND names for processes of a launcher; None: the device's.

    With ``gloo`` several processes may share one GPU, which NCCL refuses; it is slower.

    Raises:
        ValueError: If it names another one.
    """
    name = os.environ.get("DBSL_BACKEND", "")
    if name not in ("", "gloo"):
        raise ValueError(f"DBSL_BACKEND must be gloo or unset, got {name!r}")
    # Accelerate takes a named backend for a group that exists, also where no launcher is.
    return name if name and "LOCAL_RANK" in os.environ else None


def _bind_to_launcher() -> None:
    """Have gloo listen only on the interface that reaches the launcher (Linux).

    ``GLOO_SOCKET_IFNAME`` decides instead where it is set. Call it before there is a process group.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address or "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError):
        interface = _interface_to(address)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_to(address: str) -> str | None:
    """Return the interface by which packets to an address leave this machine."""
    family, _, _, _, peer = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces for a in found if a.address == own), None)


def connect_store(prefix: str) -> dist.Store | None:
    """Return a connection of one's own to the launcher's store; None: there is no launcher."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not address or not port or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return None
    store = dist.TCPStore(address, int(port), is_master=False, timeout=STORE_PATIENCE)
    return dist.PrefixStore(f"dbsl/{prefix}", store)
