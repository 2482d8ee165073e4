"""A process that is launched again while the others train asks rank 0 to be taken in.

The launcher's store is where it asks. A process group of torch.distributed is of fixed size: the
process has none, but a gloo connection with rank 0, as the other workers have. Every wait ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from dbsl.base.errors import NothingLeft, SettingError, SyncError
from dbsl.base.machine import connect_store, restarts
from dbsl.cluster.wire import SERVER_RANK

NOTHING_LEFT = "nothing is left to do"

_LOOK_S = 0.2  # between looks at who asks
_PAIR_S = 60.0  # that two processes may come to their connection apart
_GRACE_S = 30.0  # that rank 0 may answer late
_LEFT_OUT_S = 2.0  # that rank 0 may be later than a process in noticing that they are apart
_DYING_S = 0.5  # after which a process that died accepts no connections any more
_SLOW_S = 20.0  # that a process which is launched tries to reach it
_AGAIN_S = 1.0  # after which rank 0 does, if it was cut off
_STORE = "the launcher's store"
_OVER = "over"
_COME = "come"


class Host(Protocol):
    """What takes workers in."""

    def is_served(self, rank: int) -> bool:
        """Whether a rank's worker is there, and has something left to do."""

    def admit(self, rank: int, pair: dist.ProcessGroup) -> None:
        """Take a rank's worker in, or raise ``ValueError`` with the reason."""


class Admission(NamedTuple):
    """What a process that joins begins with."""

    pair: dist.ProcessGroup  # with rank 0
    clock: int  # rounds behind it
    sequence: int  # number of the last save
    number: int  # how often its rank has asked


@dataclass(frozen=True)
class RunningJob:
    """A job that this process was launched into, while the others train."""

    rank: int
    processes: int  # of the job, as it was launched
    settings: Mapping[str, Any]  # complete, with what else `Door` was given

    def enter(self, timeout_s: float) -> Admission:
        """Ask to be taken in, and wait for the answer.

        Args:
            timeout_s: Silence after which rank 0 counts a worker as lost, such as the one before.

        Raises:
            NothingLeft: If the job has no round for this process.
            SyncError: If rank 0 refuses, or does not answer.
        """
        try:
            return self._enter(timeout_s)
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            said = f"rank 0 has not taken rank {self.rank} in: {_reason(error)}"
            raise SyncError(said) from error

    def _enter(self, timeout_s: float) -> Admission:
        store = _store()
        if store is None:
            raise SyncError("no launcher's store to ask at")
        number = store.add(f"asked/{self.rank}", 1)
        answer = f"answer/{self.rank}/{number}"
        store.wait([answer], timedelta(seconds=2 * timeout_s + _GRACE_S))
        said = store.get(answer).decode()
        if said == _COME:
            pair = _connect(store, self.rank, number, own=1)
            head = greeting(0, 0)
            # Rank 0 has the connection, and answers at once.
            pair.recv([head], 0, 0).wait(timedelta(seconds=_GRACE_S))
            clock, sequence = (int(value) for value in head.tolist())
            if clock >= 0:
                return Admission(pair, clock, sequence, number)
            said = store.get(f"refused/{self.rank}/{number}").decode()
        if said.startswith(NOTHING_LEFT):
            raise NothingLeft(f"rank {self.rank} joins no more: {said}")
        raise SyncError(f"rank 0 has not taken rank {self.rank} in: {said}")


def find_running_job() -> RunningJob | None:
    """Return the job that this process was launched into; None: it starts with the others.

    Raises:
        SyncError: If the job has come to its end, or is stopping.
    """
    rank, processes = (int(os.environ.get(name, "0")) for name in ("RANK", "WORLD_SIZE"))
    if rank == SERVER_RANK or (settings := _look_up_patiently("open")) is None:
        return None
    if settings == _OVER:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise SyncError(f"the job at {where} is over, and takes rank {rank} in no more")
    return RunningJob(rank, processes, json.loads(settings))


def why_left_out(number: int) -> str | None:
    """Return why rank 0 goes on without this process; None: it does not, or is not heard.

    Args:
        number: Of the question with which the process has joined; 0: it began with the others.
    """
    deadline = time.monotonic() + _LEFT_OUT_S
    # A store that dies with rank 0 now would be tried in vain, and torch prints pages of frames.
    time.sleep(_DYING_S)
    while (reason := _look_up(f"left out/{os.environ.get('RANK')}/{number}")) is None:
        if time.monotonic() > deadline or _look_up("open") in (None, _OVER):
            return None
        time.sleep(_LOOK_S)
    return reason


def _look_up(key: str) -> str | None:
    """Return what the launcher's store has at a key now; None: nothing, or no store answers."""
    try:
        return _ask_for(key)
    except (OSError, RuntimeError):
        return None


def _look_up_patiently(key: str) -> str | None:
    """Return what the launcher's store has at a key; a connection may be slow, or fail at first."""
    deadline, told = time.monotonic() + _SLOW_S, False
    while True:
        try:
            return _ask_for(key)
        except ConnectionRefusedError:  # nobody listens there: the store is still to come
            return None
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline:
                return None
            if not told:
                tqdm.write(f"{_STORE} does not answer ({_reason(error)}): it is asked again")
        told = True
        time.sleep(_LOOK_S)


def _ask_for(key: str) -> str | None:
    """Return what the launcher's store has at a key; None: nothing, or there is no launcher."""
    store = _store(at_once=True)
    return store.get(key).decode() if store is not None and store.check([key]) else None


def _reason(error: Exception) -> str:
    return str(error).split("\n")[0]


def greeting(clock: int, sequence: int) -> Tensor:
    """Return what a process that joins is told first, int64 [2]; a clock of -1: it is refused."""
    return torch.tensor([clock, sequence], dtype=torch.int64)


class Door:
    """Rank 0's part: hears who asks to join, and takes them in one by one or refuses.

    Args:
        settings: The complete settings that the job trains with, in plain values.
        processes: Of the job.
        timeout_s: Silence after which a worker counts as lost.
    """

    def __init__(self, settings: Mapping[str, Any], processes: int, timeout_s: float) -> None:
        self._settings = json.dumps(settings)
        self._processes = processes
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: dist.Store | None = None
        self._seen: dict[int, tuple[int, float]] = {}  # by rank: its last question's number, when
        self._answered: dict[int, int] = {}
        self._taken_in: dict[int, int] = {}  # by rank: the number of its question

    def open(self, host: Host) -> None:
        """Begin to listen, where there is a launcher's store."""
        self._store = store = _store()
        if store is None:
            return
        self._host = host
        store.set("open", self._settings)
        self._thread = threading.Thread(
            target=self._listen, args=(store,), name="door", daemon=True
        )
        self._thread.start()

    def number_of(self, rank: int) -> int:
        """Return the number of the question with which a rank was taken in; 0: it asked none."""
        return self._taken_in.get(rank, 0)

    def leave_word(self, rank: int, number: int, reason: str) -> None:
        """Tell a process that others go on without it: it may still be there.

        Call it without a lock: a store that has stopped keeps the caller waiting.

        Args:
            rank: The process's.
            number: What `number_of` gave when it was left out; one that joins later has another.
            reason: Why it was.
        """
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone, and with it the launcher
                self._store.set(f"left out/{rank}/{number}", reason)

    def close(self) -> None:
        """Take nobody in any more."""
        self._closed.set()

    def _listen(self, store: dist.Store) -> None:
        """Answer those who ask (runs in a thread)."""
        cut_off = False
        while not self._closed.wait(_AGAIN_S if cut_off else _LOOK_S):
            try:
                if cut_off:
                    self._store = store = _store(at_once=True)
                for rank in range(1, self._processes):
                    self._look_after(rank, store)
            except (OSError, RuntimeError) as error:
                if not cut_off:
                    tqdm.write(
                        f"warning: {_STORE} does not answer ({_reason(error)}); until it does, no "
                        "process that is launched again can join"
                    )
                cut_off = True
                continue
            if cut_off:
                tqdm.write(f"{_STORE} answers again")
            cut_off = False
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it the launcher
            store.set("open", _OVER)

    def _look_after(self, rank: int, store: dist.Store) -> None:
        """Answer a rank's last question, if it is time to."""
        number = store.add(f"asked/{rank}", 0)
        if number == self._answered.get(rank, 0):
            return
        if self._seen.get(rank, (0, 0.0))[0] != number:
            self._seen[rank] = number, time.monotonic()
        late = time.monotonic() - self._seen[rank][1] > 2 * self._timeout_s
        there = self._host.is_served(rank)
        if there and not late:
            return  # perhaps it has died, and it is not noticed yet
        said = f"another process is heard as rank {rank}" if there else _COME
        store.set(f"answer/{rank}/{number}", said)
        self._answered[rank] = number
        if not there:
            self._let_in_soon(rank, number)

    def _let_in_soon(self, rank: int, number: int) -> None:
        threading.Thread(
            target=self._let_in, args=(rank, number), name=f"let-in-{rank}", daemon=True
        ).start()

    def _let_in(self, rank: int, number: int) -> None:
        """Connect with a process and take it in; if it has died meanwhile, forget it."""
        with contextlib.suppress(RuntimeError):
            store = _store()
            pair = _connect(store, rank, number, own=0)
            try:
                self._taken_in[rank] = number  # it may be lost as soon as it is admitted
                self._host.admit(rank, pair)
            except SettingError as reason:
                store.set(f"refused/{rank}/{number}", str(reason))
                pair.send([greeting(-1, 0)], 1, 0).wait(timedelta(seconds=_GRACE_S))


def _store(*, at_once: bool = False) -> dist.Store | None:
    """Return a connection of one's own with the launcher's store, for this launch's attempt."""
    return connect_store(f"join/{restarts()}", at_once=at_once)


def _connect(store: dist.Store, rank: int, number: int, *, own: int) -> dist.ProcessGroup:
    """Return a connection between rank 0 and a process; both call it within a minute."""
    prefix = dist.PrefixStore(f"pair/{rank}/{number}", store)
    return dist.ProcessGroupGloo(prefix, own, 2, timedelta(seconds=_PAIR_S))
