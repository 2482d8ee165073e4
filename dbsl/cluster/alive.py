"""Which processes are alive, and which one is at fault when an exchange fails."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
from dbsl.cluster import wire
from dbsl.plan.types import Action, RoundReport

_BEAT_S = 0.4
_STOP, _LAST = 1, 2  # beats with a further message
_GRACE_S = 5.0
_LOOK_S = 0.5  # between checks for another process's failure
_ANSWER_S = 5.0  # within it a living process sees a failure and answers
_END_S = 3.2  # the main thread's time to end the process itself
_ASK_EVERY_S = 1.0  # interval at which processes agree whether to stop or save


class Keepalive:
    """Two processes tell each other that they are alive, during any other work.

    One `asks` twice a second and the other answers, each in a thread, on the connection that
    carries the weights: a computation may take any time. If one `wants_stop`, its beats make the
    other call `on_stop`. The connection is closed when one has heard nothing from the other for too
    long, or learns that the other continues without it. Operations that wait on it then fail in
    both processes, unless part of the message has arrived. `failure` gives the reason, and the
    thread calls `on_lost` with this object.
    """

    _TAG = 1  # keeps beats apart from messages with other tags

    def __init__(
        self,
        peer: int,
        pair: dist.ProcessGroup,
        timeout_s: float,
        *,
        asks: bool,
        wants_stop: Callable[[], bool] = bool,
        on_stop: Callable[[], object] = bool,
        on_lost: Callable[[Keepalive], object],
    ) -> None:
        self.failure: str | None = None
        self._peer, self._pair, self._asks, self._timeout_s = peer, pair, asks, timeout_s
        # The asker waits longer: if the network fails, the other one names the lost rank.
        self._limit_s = timeout_s + _GRACE_S * asks
        self._wants_stop, self._on_stop, self._on_lost = wants_stop, on_stop, on_lost
        self._ending = threading.Event()
        # The thread ends when the last beat is sent.
        self.thread = threading.Thread(target=self._run, name=f"keepalive-{peer}", daemon=True)
        self.thread.start()

    def reason(self, error: BaseException) -> str:
        """Return why an exchange with the other process failed."""
        if is_lost_peer(error):
            self.thread.join(_ANSWER_S)  # it fails too, with more detail
        return self.failure or reason_of(error)

    def end(self) -> None:
        """Send one last beat; an asker that has not ended learns from it that it is left out."""
        self._ending.set()

    def _run(self) -> None:
        try:
            left_out = self._beat()
        except RuntimeError as error:
            said = f"has said nothing for {self._timeout_s:g} s (--worker-timeout)"
            silent = "timed out" in str(error).lower()
            self.failure = f"rank {self._peer} {said}" if silent else reason_of(error)
        else:
            if not left_out:
                return
            self.failure = f"rank {self._peer} answers no more"
            with suppress(RuntimeError):
                self._hear(0.001)  # times out, which closes the connection
        self._on_lost(self)

    def _beat(self) -> bool:
        """Exchange beats until one side ends; return whether this side asks and the other ended."""
        speaks = self._asks
        while True:
            if speaks:
                last = self._ending.wait(min(_BEAT_S, self._timeout_s / 4) if self._asks else 0.0)
                beat = torch.tensor([_LAST if last else _STOP * self._wants_stop()])
                wire.isend(beat, self._pair, self._TAG).wait(timedelta(seconds=self._limit_s))
            else:
                beat = self._hear(self._limit_s)
                last = beat == _LAST
                if beat == _STOP:
                    self._on_stop()
            if last:
                return self._asks and not speaks
            speaks = not speaks

    def _hear(self, limit_s: float) -> int:
        beat = torch.zeros(1, dtype=torch.int64)
        wire.irecv(beat, self._pair, self._TAG).wait(timedelta(seconds=limit_s))
        return int(beat)


class Watch:
    """Ends all processes of a run when one fails, and names the one that died or hangs.

    Each watches the store that they used to connect. The first with a failed exchange calls the
    roll there. A dead process does not answer; a hanging one answers in a thread, but does not
    leave its step. If a peer's death does not fail an exchange (NCCL waits on the device, until its
    own timeout), the result of the roll call ends the process.
    """

    def __init__(self) -> None:
        self._rank, self._ranks = dist.get_rank(), range(dist.get_world_size())
        self._store = dist.PrefixStore("dbsl/watch", distributed_c10d._get_default_store())
        self._found = ""  # who is at fault; once it is set, the store may end
        # The main thread is leaving, and no other needs to end it.
        self._leaves = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a failed exchange into a `SyncError` that names the rank at fault.

        Another error is raised here as it is; the other processes are told of it.
        """
        threading.Thread(target=self._look, name="watch", daemon=True).start()
        try:
            yield
        except (RunStopped, DivergedError, GeneratorExit):  # every process ends with it
            raise
        except BaseException as error:
            self._leaves.set()
            # Reading data and saving may use their own connections.
            if is_lost_peer(error) and not isinstance(error, (ReadError, SaveError)):
                raise SyncError(self._call_roll("", reason_of(error))) from error
            left = isinstance(error, SystemExit) and not error.code
            said = "left the run" if left else f"failed: {in_line(error)}"
            self._call_roll(f"rank {self._rank} {said}", "")
            raise
        finally:
            self._leaves.set()

    def _look(self) -> None:
        """Wait until a process fails, then end this one (runs in a thread)."""
        try:
            while not self._store.check(["failed"]):
                if self._leaves.wait(_LOOK_S):
                    return
            self._answer("alive")
            deadline = time.monotonic() + 2 * _ANSWER_S
            while not self._store.check(["found"]) and time.monotonic() < deadline:
                time.sleep(_BEAT_S / 4)
            self._take("nobody has said why")
        except RuntimeError as error:
            self._found = self._found or _no_store(reason_of(error))
        end_later(self._found, self._leaves)

    def _call_roll(self, found: str, reason: str) -> str:
        """Find the rank at fault, unless it is known, and tell all others."""
        try:
            if found:
                self._store.compare_set("found", "", found)
            self._store.set("failed", "")
            self._answer("alive", "out")
            deadline = time.monotonic() + _ANSWER_S
            while self._missing("out") and not self._store.check(["found"]):
                if time.monotonic() > deadline:
                    break
                time.sleep(_BEAT_S / 4)
            silent, hanging = self._missing("alive"), self._missing("out")
            ranks = ", ".join(map(str, silent or hanging))
            how = "died or fell silent" if silent else "hangs"
            none = f"an exchange between processes failed ({reason})"
            self._take(f"rank {ranks} {how} ({reason})" if ranks else none)
            deadline = time.monotonic() + _ANSWER_S  # the store may end with this process
            while {*self._missing("told")} - {*silent} and time.monotonic() < deadline:
                time.sleep(_BEAT_S / 4)
        except RuntimeError:
            self._found = self._found or _no_store(reason)
        return self._found

    def _take(self, otherwise: str) -> None:
        self._found = self._store.compare_set("found", "", otherwise).decode()
        self._answer("told")

    def _answer(self, *words: str) -> None:
        for word in words:
            self._store.set(f"{word}/{self._rank}", "")

    def _missing(self, word: str) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"{word}/{rank}"])]


def _no_store(reason: str) -> str:
    return f"rank 0 or the launcher, where processes had met, has ended ({reason})"


def end_later(found: str, leaves: threading.Event) -> None:
    """End this process with an error line, unless its main thread sets `leaves` first."""

    def end() -> None:
        if not leaves.is_set():
            print(f"error: {found}", file=sys.stderr, flush=True)
            os._exit(2)

    timer = threading.Timer(_END_S, end)
    timer.daemon = True
    timer.start()


class ControlGroup:
    """Agreement of all processes, outside the weights' process group; it waits for `timeout_s`.

    With `islands`, the ranks of each worker, only processes of one worker agree.
    """

    def __init__(
        self,
        timeout_s: float,
        watch: Watch | None = None,
        islands: Sequence[Sequence[int]] = (),
    ) -> None:
        self.watch = watch
        # In host memory: asking must not wait for work queued on a device.
        how = {"backend": "gloo", "timeout": timedelta(seconds=timeout_s)}
        if islands:
            self._group, _ = dist.new_subgroups_by_enumeration(islands, **how)
        else:
            self._group = dist.new_group(**how)
        self._steps, self._ask_at, self._asked_s = 0, 1, time.monotonic()

    def agree(self, action: Action) -> Action:
        """Return the strongest action requested; called each step, it exchanges once a second."""
        self._steps += 1
        if self._steps < self._ask_at:
            return Action.GO_ON
        now = time.monotonic()
        step_s = max(now - self._asked_s, 1e-6) / self._steps
        # The first process's steps decide when they ask again.
        first = dist.get_rank(self._group) == 0
        own = round(min(max(_ASK_EVERY_S / step_s, 1.0), 1000.0)) if first else 0
        strongest, self._ask_at = self.highest(action, own)
        self._steps, self._asked_s = 0, now
        return Action(strongest)

    def highest(self, *values: int) -> list[int]:
        """Return the maximum of each value over all processes (a collective)."""
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()

    def gather_reports(self, report: RoundReport | None) -> list[RoundReport]:
        """Return the reports of all processes that have one, by rank (a collective)."""
        texts = self.gather_texts("" if report is None else wire.encode(report))
        return [wire.read_report(text) for text in texts if text]

    def share(self, text: str) -> str:
        """Return the first process's text on all processes (a collective)."""
        return wire.share_from(0, text, wire.CPU, self._group)

    def let_first_wait(self, peer: int) -> None:
        """Make the first process wait, without a limit, until `peer` calls this."""
        word = torch.zeros(1)
        if self._group.rank() == 0:
            self._group.recv([word], peer, 0).wait(wire.EVER)
        elif self._group.rank() == peer:
            self._group.send([word], 0, 0).wait()

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes, by rank (a collective)."""
        return wire.gather_texts(text, wire.CPU, self._group)
