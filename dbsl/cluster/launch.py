"""How a process meets the others of its launch.

They meet at the launcher's store, at MASTER_ADDR, which outlives the processes that torchrun and
accelerate restart. No port is opened here. Every wait ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from dbsl.base.errors import SettingError, SyncError, reason_of
from dbsl.base.machine import STORE_PATIENCE, connect, launcher_address, restarts

_LOOK_S = 0.1  # between looks at who has come
_QUIET_S = 30.0  # that processes wait for each other without a word


def join_processes(timeout_s: float, *, cpu: bool) -> dist.Store | None:
    """Meet the processes that a launcher started, or restarted, and prepare their group.

    Accelerate makes the group itself, but after a restart: the launcher's store still holds the
    addresses of the processes before (torch 2.15), so that each attempt needs keys of its own.

    A process waits `timeout_s` for another. `cpu` is whether they compute on the CPU, be there an
    accelerator or not. Keep the store that is returned until there is a group; None: there is no
    launcher.
    """
    _bind_to_launcher()
    met = _meet(timeout_s)
    if met is None or not restarts() or not (cpu or torch.cuda.is_available()):
        return met
    met.set_timeout(STORE_PATIENCE)  # little may have been left when this process reached it
    dist.init_process_group(
        chosen_backend() or ("gloo" if cpu else "nccl"),
        # The launcher's store is there for the group as well, under other keys.
        store=dist.PrefixStore(f"dbsl/group/{restarts()}", met),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=group_timeout(timeout_s, cpu=cpu),
    )
    return met


def group_timeout(timeout_s: float, *, cpu: bool) -> timedelta:
    """Return the process group's own timeout.

    NCCL's watchdog ends a process without naming anybody: a `Watch` is to decide before.
    """
    return timedelta(seconds=timeout_s + 60 * (not cpu))


def _meet(timeout_s: float) -> dist.Store | None:
    """Wait until all processes of a launch have come; return the store at which they have met.

    torch waits as long, but tells nobody who is missing, and ends with a traceback.
    """
    where, rank = launcher_address(), int(os.environ.get("RANK", "-1"))
    if where is None or rank < 0:
        return None
    began, processes, came, told = time.monotonic(), int(os.environ["WORLD_SIZE"]), 0, rank > 0
    store, start = _open_store(*where, rank, timeout_s), f"dbsl/start/{restarts()}"
    try:
        if store.add(f"{start}/{rank}", 1) == 1:
            store.add(start, 1)
        elif store.add(start, 0) == processes:
            raise SyncError(
                f"rank {rank} was started again, and the others have begun; it is back when all "
                "are started again with --resume"
            )
        while (came := store.add(start, 0)) < processes:  # one thread answers them all
            waited_s = time.monotonic() - began
            counted = f"{came} of {processes} processes have connected"
            if waited_s > timeout_s:
                raise SyncError(f"{counted} within {timeout_s:g} s (--worker-timeout)")
            if waited_s > _QUIET_S and not told:
                told = True
                print(f"{counted}; waiting for the others", file=sys.stderr, flush=True)
            time.sleep(_LOOK_S)
    except SyncError:
        raise
    except RuntimeError as error:
        raise SyncError(
            f"rank 0 or the launcher ended while {came} of {processes} processes had connected"
        ) from error
    return store


def _open_store(address: str, port: int, rank: int, timeout_s: float) -> dist.Store:
    """Return a connection with the launcher's store, which rank 0 serves where no launcher does."""
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where, patience = f"{address}:{port}", timedelta(seconds=timeout_s)
    # Many tenants: the process group's store has the same server.
    options = {"is_master": serves, "wait_for_workers": False, "multi_tenant": True}
    said = f"rank {rank} waits for rank 0 at {where}"
    telling = threading.Timer(_QUIET_S, print, [said], {"file": sys.stderr, "flush": True})
    telling.daemon = True
    telling.start()
    try:
        return connect(address, port, timeout=patience, **options)
    except RuntimeError as error:
        if serves:
            raise SyncError(f"rank 0 cannot listen at {where}: {reason_of(error)}") from error
        raise SyncError(
            f"nothing answers at {where}, where rank 0 was to be within {timeout_s:g} s "
            "(--worker-timeout)"
        ) from error
    finally:
        telling.cancel()


def chosen_backend() -> str | None:
    """Return the backend that DBSL_BACKEND names for processes of a launcher; None: the device's.

    With ``gloo`` several processes may share one GPU, which NCCL refuses; it is slower.
    """
    name = os.environ.get("DBSL_BACKEND", "")
    if name not in ("", "gloo"):
        raise SettingError(f"DBSL_BACKEND must be gloo or unset, got {name!r}")
    # Accelerate takes a named backend for a group that exists, also where no launcher is.
    return name if name and "LOCAL_RANK" in os.environ else None


def _bind_to_launcher() -> None:
    """Have gloo listen only on the interface that reaches the launcher (Linux).

    ``GLOO_SOCKET_IFNAME`` decides instead where it is set. Call it before there is a process group.
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
