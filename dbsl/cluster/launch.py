"""How a process meets the others of its launch: as all start, or later, while they train.

They meet at the launcher's store, at MASTER_ADDR, which outlives the processes that torchrun and
accelerate restart. No port is opened here. Every wait ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist
from tqdm import tqdm

from dbsl.base.errors import NothingLeft, SettingError, SyncError, reason_of
from dbsl.base.machine import STORE_PATIENCE, connect, connect_store, launcher_address, restarts
from dbsl.cluster.wire import SERVER_RANK, Ending, hear, tell

_LOOK_S = 0.1  # between looks at who has come
_QUIET_S = 30.0  # that processes wait for each other without a word
_PAIR_S = 60.0  # that two processes may come to their connection apart
_GRACE_S = 30.0  # that rank 0 may answer late
_SLOW_S = 20.0  # that a process which is launched tries to reach the store
_AGAIN_S = 1.0  # after which rank 0 does, if it was cut off
_OVER = "over"

# --- as all start


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

    NCCL's watchdog ends a process without naming anybody: `Heartbeats` is to decide before.
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
        if store.add(f"{start}/{rank}", 1) == 1:  # else it has come before, and was launched again
            store.add(start, 1)
        while (came := store.add(start, 0)) < processes:  # one thread answers them all
            waited_s = time.monotonic() - began
            counted = f"{came} of {processes} processes have connected"
            if waited_s > timeout_s:
                raise SyncError(f"{counted} within {timeout_s:g} s (--worker-timeout)")
            if waited_s > _QUIET_S and not told:
                told = True
                _tell(f"{counted}; waiting for the others")
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
    end, where = time.monotonic() + timeout_s, f"{address}:{port}"
    while True:
        left_s = end - time.monotonic()
        patience = timedelta(seconds=max(0.1, min(left_s, _QUIET_S)))
        # Many tenants: the process group's store has the same server.
        options = {"is_master": serves, "wait_for_workers": False, "multi_tenant": True}
        try:
            return connect(address, port, timeout=patience, **options)
        except RuntimeError as error:
            if serves:
                raise SyncError(f"rank 0 cannot listen at {where}: {reason_of(error)}") from error
            if left_s <= _QUIET_S:
                raise SyncError(
                    f"nothing answers at {where}, where rank 0 was to be within {timeout_s:g} s "
                    "(--worker-timeout)"
                ) from error
            _tell(f"rank {rank} waits for rank 0 at {where}")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


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


# --- while the others train


class Admission(NamedTuple):
    """What a worker's process begins with."""

    pair: dist.ProcessGroup  # with rank 0
    clock: int = 0  # rounds behind it
    sequence: int = 0  # number of the last save


@dataclass(frozen=True)
class RunningJob:
    """A job that this process was launched into, while the others train.

    torch's process groups are of fixed size: the process has none, but a gloo connection with rank
    0, as the other workers have.
    """

    rank: int
    processes: int  # as it was launched
    settings: Mapping[str, Any]  # complete, with what else `Door` was given

    def enter(self, timeout_s: float) -> Admission:
        """Ask to be taken in, and wait for the answer.

        Rank 0 counts a worker as lost, such as the one before, after `timeout_s` of silence.
        """
        _bind_to_launcher()
        try:
            store = _join_store()
            number = store.add(f"asked/{self.rank}", 1)
            pair = _connect(store, self.rank, number, 1, 2 * timeout_s + _GRACE_S)
            ending, clock, sequence, said = hear(pair, Ending, timedelta(seconds=_GRACE_S))
        except RuntimeError as error:
            ending, said = Ending.STOPPED, f"it did not answer ({reason_of(error)})"
        if ending == Ending.GOES_ON:
            return Admission(pair, clock, sequence)
        if ending == Ending.FINISHED:
            raise NothingLeft(f"rank {self.rank} joins no more: nothing is left to do: {said}")
        raise SyncError(f"rank 0 has not admitted rank {self.rank}: {said}")


def find_running_job() -> RunningJob | None:
    """Return the job that this process was launched into; None: it starts with the others."""
    rank = int(os.environ.get("RANK", "0"))
    if rank == SERVER_RANK or (settings := _settings_of_job()) is None:
        return None
    if settings == _OVER:
        where = "{}:{}".format(*launcher_address())
        raise SyncError(f"the job at {where} is over, and takes rank {rank} in no more")
    return RunningJob(rank, int(os.environ["WORLD_SIZE"]), json.loads(settings))


def _settings_of_job() -> str | None:
    """Return what a `Door` has left in the store; a connection may be slow, or fail at first."""
    deadline, told = time.monotonic() + _SLOW_S, False
    while True:
        try:
            store = _join_store(at_once=True)
            return store.get("open").decode() if store and store.check(["open"]) else None
        except ConnectionRefusedError:  # nobody listens there: the store is still to come
            return None
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                return None
            if not told:
                _tell(f"the launcher's store does not answer ({reason_of(error)}): trying again")
            told = True
            time.sleep(_LOOK_S)


class Door:
    """Rank 0's part: hears who asks to join, and takes them in one by one or refuses.

    The settings are the complete ones that the job trains with, in plain values. A worker counts as
    lost after `timeout_s` of silence.
    """

    def __init__(self, settings: Mapping[str, Any], processes: int, timeout_s: float) -> None:
        self._settings = json.dumps(settings)
        self._processes, self._timeout_s = processes, timeout_s
        self._closed = threading.Event()
        self._asked: dict[tuple[int, int], float] = {}  # by rank and number of its question: when
        self._answered: set[tuple[int, int]] = set()

    def open(
        self, is_served: Callable[[int], bool], admit: Callable[[int, dist.ProcessGroup], None]
    ) -> None:
        """Begin to listen, where there is a launcher's store.

        `is_served` says whether a rank's worker is there, and has something left to do; `admit`
        takes a rank's worker in, or raises `SettingError` or `NothingLeft` with the reason.
        """
        self._is_served, self._admit = is_served, admit
        if store := _join_store():
            store.set("open", self._settings)
            threading.Thread(target=self._listen, args=(store,), name="door", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _listen(self, store: dist.Store | None) -> None:
        """Answer those who ask (runs in a thread)."""
        told = False
        while not self._closed.wait(_AGAIN_S if told else _LOOK_S):
            try:
                store = store or _join_store(at_once=True)
                for rank in range(1, self._processes):
                    self._look_after(rank, store.add(f"asked/{rank}", 0))
            except (OSError, RuntimeError) as error:
                if not told:
                    tqdm.write(
                        f"warning: the launcher's store does not answer ({reason_of(error)}); "
                        "until it does, no process that is launched again can join"
                    )
                store, told = None, True
                continue
            if told:
                tqdm.write("the launcher's store answers again")
            told = False
        if store is not None:
            with suppress(RuntimeError):  # it is gone, and with it the launcher
                store.set("open", _OVER)

    def _look_after(self, rank: int, number: int) -> None:
        """Answer a rank's last question, if it is time to."""
        question = rank, number
        if number == 0 or question in self._answered:
            return
        late = time.monotonic() - self._asked.setdefault(question, time.monotonic())
        if self._is_served(rank) and late < 2 * self._timeout_s:
            return  # perhaps it has died, and it is not noticed yet
        self._answered.add(question)
        name = f"let-in-{rank}"
        threading.Thread(target=self._let_in, args=question, name=name, daemon=True).start()

    def _let_in(self, rank: int, number: int) -> None:
        """Connect with a process and take it in; if it has died meanwhile, forget it."""
        with suppress(RuntimeError):
            pair = _connect(_join_store(), rank, number, 0, _PAIR_S)
            try:
                self._admit(rank, pair)
            except (NothingLeft, SettingError) as reason:
                over = isinstance(reason, NothingLeft)
                tell(pair, Ending.FINISHED if over else Ending.STOPPED, text=str(reason))


def _join_store(*, at_once: bool = False) -> dist.Store | None:
    """Return another connection with the launcher's store, for this launch's attempt."""
    return connect_store(f"join/{restarts()}", at_once=at_once)


def _connect(
    store: dist.Store, rank: int, number: int, side: int, patience_s: float
) -> dist.ProcessGroup:
    """Return a connection of rank 0, side 0, with a process, side 1; both call it."""
    prefix = dist.PrefixStore(f"pair/{rank}/{number}", store)
    return dist.ProcessGroupGloo(prefix, side, 2, timedelta(seconds=patience_s))
