"""How the processes of a launch connect: settings that torch and Accelerate leave open."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from dbsl.base.errors import SettingError
from dbsl.base.machine import connect_store, restarts


def prepare_group(timeout_s: float, *, cpu: bool) -> None:
    """Prepare the process group that Accelerate makes, or make it if Accelerate would fail.

    It would fail after a restart: the launcher's store still holds the earlier processes' addresses
    (torch 2.15), so each attempt needs its own keys. `cpu` is whether processes compute on the CPU,
    with or without an accelerator.
    """
    _bind_to_launcher()
    if not restarts() or not (cpu or torch.cuda.is_available()):
        return
    if (store := connect_store()) is None:
        return
    dist.init_process_group(
        chosen_backend() or ("gloo" if cpu else "nccl"),
        store=dist.PrefixStore(f"group/{restarts()}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=group_timeout(timeout_s, cpu=cpu),
    )


def group_timeout(timeout_s: float, *, cpu: bool) -> timedelta:
    """Return the process group's own timeout.

    NCCL's watchdog ends a process without naming a rank: a `Watch` must decide first.
    """
    return timedelta(seconds=timeout_s + 60 * (not cpu))


def chosen_backend() -> str | None:
    """Return the backend that DBSL_BACKEND names for processes of a launcher; None: the device's.

    With ``gloo`` several processes may share one GPU, which NCCL refuses; it is slower.
    """
    name = os.environ.get("DBSL_BACKEND", "")
    if name not in ("", "gloo"):
        raise SettingError(f"DBSL_BACKEND must be gloo or unset, got {name!r}")
    # With a named backend, Accelerate assumes that a group exists, even without a launcher.
    return name if name and "LOCAL_RANK" in os.environ else None


def _bind_to_launcher() -> None:
    """Make gloo listen only on the interface that reaches the launcher (Linux).

    ``GLOO_SOCKET_IFNAME``, if set, takes precedence. Call this before a process group exists.
    """
    address = os.environ.get("MASTER_ADDR")
    if not address or "GLOO_SOCKET_IFNAME" in os.environ or not sys.platform.startswith("linux"):
        return
    with suppress(OSError):
        if interface := _interface_to(address):
            os.environ["GLOO_SOCKET_IFNAME"] = interface


def _interface_to(address: str) -> str | None:
    family, _, _, _, peer = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(peer)  # sends nothing
        here = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, found in interfaces for a in found if a.address == here), None)
