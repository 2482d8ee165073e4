"""Who is alive, and whose fault it is when an exchange between processes fails.

Where all meet, heartbeats go through the launcher's store. A server and its worker tell each other
on the connection that they have (`Pulse`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from dbsl.base.errors import (
    DivergedError,
    ReadError,
    RunStopped,
    SaveError,
    SyncError,
    in_line,
    is_lost_peer,
    reason_of,
)
from dbsl.base.machine import STORE_PATIENCE, connect_store, restarts
from dbsl.cluster.wire import irecv, isend

_LAST, _STOP = 1.0, 2.0  # beats that say more than that a process is alive
_BEAT_S = 0.4
_WATCH = 5  # beats between two looks at the others'
_LOST = "lost"


class Heartbeats:
    """Each process says twice a second that it is alive, and how far it is.

    When an exchange fails, that tells whose fault it is: a process that died or was stopped says
    nothing more, one that hangs has entered fewer exchanges than the others.

    Where an exchange does not fail when a peer dies (NCCL's waits on the device, for its own
    timeout), the death is heard on `pairs`, and ends this process: connections (gloo) with rank 0,
    or in rank 0 with each other rank. After a silence of `timeout_s` a process counts as lost.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        timeout_s: float,
        pairs: Mapping[int, dist.ProcessGroup] | None = None,
    ) -> None:
        self.entered = 0  # exchanges with the others that this process has begun
        self._rank = rank
        self._others = [r for r in range(world_size) if r != rank]
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._heard: str | None = None  # whose fault it is
        self._ends = False  # the main thread is on its way out, and needs no other thread to end it
        self._store = connect_store(f"beats/{restarts()}")
        self._thread = threading.Thread(target=self._beat, name="heartbeats", daemon=True)
        if self._store is not None:
            self._store.set(f"beat/{rank}", "0 0")
            self._thread.start()
        self._pulses = {
            peer: Pulse(peer, pair, timeout_s, asks=rank != 0, on_lost=partial(self._gone, peer))
            for peer, pair in (pairs if pairs and self._store else {}).items()
        }

    def enter(self) -> None:
        """Note that this process begins an exchange with the others."""
        self.entered += 1

    @contextlib.contextmanager
    def naming_the_missing(self) -> Iterator[None]:
        """Turn a failed exchange into a `SyncError` that names the rank whose fault it is.

        Of any other error that ends this process alone, the others are told.
        """
        try:
            yield
        except (RunStopped, DivergedError, GeneratorExit):  # all end by it
            self._ends = True
            raise
        except BaseException as error:
            self._ends = True
            leaves = isinstance(error, SystemExit) and not error.code
            if self._store is None or leaves:
                raise
            # Data may be read, and saved, over connections of their own.
            if is_lost_peer(error) and not isinstance(error, (ReadError, SaveError)):
                raise SyncError(self._verdict(reason_of(error))) from error
            self._confess(error)
            raise

    def close(self) -> None:
        """Leave: from now on this process may be silent."""
        self._ends = True
        self._closed.set()
        if self._store is not None:
            self._thread.join(STORE_PATIENCE.total_seconds())
            with contextlib.suppress(RuntimeError):
                self._store.set(f"beat/{self._rank}", "done")
        for pulse in self._pulses.values() if self._rank else ():
            pulse.close()

    def _verdict(self, reason: str) -> str:
        """Return who is missing, as the first process to notice has found it."""
        try:
            silent: list[int] = []
            if not self._store.check([_LOST]):
                silent, after = self._silent()
                found = self._found(silent, after)
                self._store.compare_set(_LOST, "", f"{found} ({reason})")
            verdict = self._hear()
            self._see_off([r for r in self._others if r not in silent])
            return verdict
        except RuntimeError:
            if self._heard is not None:
                return self._heard
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            return f"rank 0 or the launcher died: nothing answers at {where} ({reason})"

    def _found(self, silent: list[int], beats: Mapping[int, str]) -> str:
        """Return in words whose fault it is, by the last beats of the others."""
        if silent:
            return f"{_ranks(silent)} died or fell silent"
        behind = [r for r in self._others if _entered(beats[r]) < self.entered]
        if not behind:
            return "an exchange between processes failed"
        fewest = min(_entered(beats[r]) for r in behind)
        return f"{_ranks([r for r in behind if _entered(beats[r]) == fewest])} hangs"

    def _confess(self, error: BaseException) -> None:
        """Tell the others that this process ends by an error of its own."""
        found = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        said = "" if isinstance(error, KeyboardInterrupt) else f": {in_line(error)}"
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(_LOST, "", f"rank {self._rank} {found}{said}")
            self._hear()
            self._see_off(self._others)

    def _silent(self) -> tuple[list[int], dict[int, str]]:
        """Return who says nothing, and all last beats; where it is more than one, look longer."""
        before = self._beats()
        for _ in range(3):  # a busy machine may delay a beat or two, of those that live
            time.sleep(_WATCH * _BEAT_S)
            after = self._beats()
            silent = [r for r in self._others if before[r] == after[r] != "done"]
            if len(silent) < 2:
                break
        return silent, after

    def _hear(self) -> str:
        """Return whose fault it is, once a process has found it; note that this one knows."""
        if self._heard is None:
            self._heard = self._store.get(_LOST).decode()
            self._store.set(f"told/{self._rank}", "")
        return self._heard

    def _see_off(self, living: list[int]) -> None:
        """Keep the store, which may end with rank 0, until the others that live know."""
        if self._rank:
            return
        for _ in range(2 * _WATCH):
            beats = self._beats()
            waited_for = [f"told/{r}" for r in living if beats[r] != "done"]
            if not waited_for or self._store.check(waited_for):
                return
            time.sleep(_BEAT_S)

    def _beats(self) -> dict[int, str]:
        values = self._store.multi_get([f"beat/{rank}" for rank in self._others])
        return {r: value.decode() for r, value in zip(self._others, values, strict=True)}

    def _beat(self) -> None:
        """Say that this process is alive; see that those it watches are (runs in a thread)."""
        count, seen = 0, {}
        # All watch rank 0, which watches all.
        watched = self._others if self._rank == 0 else [0]
        while not self._closed.wait(_BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self._rank}", f"{count} {self.entered}")
                if count % _WATCH == 0:
                    self._watch(watched, seen)
            except RuntimeError:  # the store is gone, and with it the launcher or rank 0
                return  # the next exchange fails, and says so

    def _watch(self, watched: list[int], seen: dict[int, tuple[str, float]]) -> None:
        now = time.monotonic()
        keys = [f"beat/{rank}" for rank in watched]
        if not self._store.check(keys):
            return  # not all have begun
        for rank, value in zip(watched, self._store.multi_get(keys), strict=True):
            text = value.decode()
            if text == "done" or seen.get(rank, ("", 0.0))[0] != text:
                seen[rank] = (text, now)
            elif now - seen[rank][1] > self._timeout_s:
                found = f"rank {rank} has said nothing for {self._timeout_s:g} s"
                self._store.compare_set(_LOST, "", found)
        if self._store.check([_LOST]):
            self._end_soon()

    def _gone(self, peer: int) -> None:
        """Tell all processes that one has died (runs in its pulse's thread)."""
        if self._closed.is_set():
            return
        with contextlib.suppress(RuntimeError):  # the store is gone with it
            if self._store.get(f"beat/{peer}") == b"done":
                return  # it has left in good order
            failure = self._pulses[peer].failure
            self._store.compare_set(_LOST, "", f"rank {peer} died or fell silent ({failure})")
        self._end_soon()

    def _end_soon(self) -> None:
        """End this process, unless its main thread has by then."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._hear()
        threading.Timer(_BEAT_S * 8, self._end).start()

    def _end(self) -> None:
        """End a process whose main thread waits in an exchange that does not come back."""
        if self._ends:
            return
        found = self._heard or "rank 0 or the launcher died"
        print(f"error: {found}", file=sys.stderr, flush=True)
        os._exit(2)


class Pulse:
    """Two processes tell each other that they are alive, whatever else they do meanwhile.

    One `asks` twice a second and the other answers, each in a thread, on the connection on which
    they exchange weights: compute may take as long as it takes. When one has heard nothing of the
    other for too long, the connection is closed, and whatever waits for it in either process fails.

    `on_lost` is called, in the thread, when the other one was lost, `on_stop` when it asks to stop.

    Attributes:
        failure: Why the other one counts as lost, or None.
        is_refused: Whether it is there, and answers no more.
    """

    _TAG = 1  # messages of any other tag are not mistaken for these

    def __init__(
        self,
        peer: int,
        pair: dist.ProcessGroup,
        timeout_s: float,
        *,
        asks: bool,
        on_lost: Callable[[], object] = lambda: None,
        on_stop: Callable[[], object] = lambda: None,
    ) -> None:
        self.failure: str | None = None
        self.is_refused = False
        self._peer, self._pair, self._asks = peer, pair, asks
        self._timeout_s = timeout_s
        self._on_lost, self._on_stop = on_lost, on_stop
        self._asks_to_stop = False
        self._closed = threading.Event()
        self._beat = torch.zeros(1)
        self._thread = threading.Thread(target=self._run, name=f"pulse-{peer}", daemon=True)
        self._thread.start()

    def reason(self, error: BaseException) -> str:
        """Return why an exchange with the other process failed."""
        if "timeout" in str(error):  # gloo's, for all that waits where the pulse has given up
            self._thread.join(_BEAT_S)
        return self.failure or reason_of(error)

    def close(self) -> None:
        """Say that this process is silent from now on; the one that asks does."""
        self._closed.set()
        self._thread.join(self._timeout_s)

    def ask_to_stop(self) -> None:
        """Tell the other process, with the next beat, that the run is to stop; the one that asks.

        It hears of it whatever this process waits for.
        """
        self._asks_to_stop = True

    def give_up(self) -> None:
        """Tell the other process that nobody answers it any more; the one that answers does."""
        self._closed.set()

    def _run(self) -> None:
        try:
            if self._asks:
                self._ask()
            else:
                while (heard := self._hear(self._timeout_s)) != _LAST:
                    if heard == _STOP:
                        self._on_stop()
                    self._say(_LAST if self._closed.is_set() else 0.0)
        except RuntimeError as error:
            silent = "timed out" in str(error).lower()
            found = f"rank {self._peer} has said nothing for {self._timeout_s:g} s"
            if not self._asks:  # the one that asks waits for longer than is set
                found += " (--worker-timeout)"
            self.failure = self.failure or (found if silent else reason_of(error))
            self._on_lost()

    def _ask(self) -> None:
        while not self._closed.wait(min(_BEAT_S, self._timeout_s / 4)):
            self._say(_STOP if self._asks_to_stop else 0.0)
            if self._hear(self._timeout_s) == _LAST:
                self.failure = f"rank {self._peer} goes on without this process"
                self.is_refused = True
                self._hear(0.001)  # in vain, which closes the connection
        self._say(_LAST)

    def _say(self, what: float) -> None:
        self._beat.fill_(what)
        work = isend(self._beat, self._pair, self._TAG)
        work.wait(timedelta(seconds=self._timeout_s))

    def _hear(self, timeout_s: float) -> float:
        work = irecv(self._beat, self._pair, self._TAG)
        work.wait(timedelta(seconds=timeout_s))
        return self._beat.item()


def _entered(beat: str) -> float:
    return float("inf") if beat == "done" else int(beat.split()[1])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
