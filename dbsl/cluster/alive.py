"""Who is alive, and whose fault it is when an exchange between processes fails."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

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
from dbsl.cluster import wire
from dbsl.plan.types import Action, RoundReport

_BEAT_S = 0.4
_GRACE_S = 5.0
NOTICED_S = 2.0  # by then a death is heard of, and so is every living process
_TOLD_S = NOTICED_S + 4 * _BEAT_S
_END_S = 3.2  # that the main thread has to end the process itself
_ASK_EVERY_S = 1.0  # that processes tell each other whether to stop or to save
_MEETING = 10**9  # exchanges of all processes are counted in these, those inside a worker in ones
_LAST = "!"  # begins the last beat
_LOST = "lost: "


class Pulse:
    """Two processes tell each other that they are alive, whatever else they do meanwhile.

    One `asks` twice a second and the other answers, each in a thread, on the connection on which
    they exchange weights: compute may take as long as it takes. A beat carries what `says` gives to
    the other's `hears`. When one has heard nothing of the other for too long, the connection is
    closed, and what waits for it in either process fails, unless a part of its message has come;
    `on_lost` is called with this, in the thread. `failure` then says why the other one counts as
    lost; if it is `left_out`, it may be there, and goes on without this process.
    """

    _TAG = 1  # messages of any other tag are not mistaken for these

    def __init__(
        self,
        peer: int,
        pair: dist.ProcessGroup,
        timeout_s: float,
        *,
        asks: bool,
        says: Callable[[], str] = str,
        hears: Callable[[str], object] = str,
        on_lost: Callable[[Pulse], object] = str,
    ) -> None:
        self.failure: str | None = None
        self.left_out = False
        self._peer, self._pair, self._asks, self._timeout_s = peer, pair, asks, timeout_s
        # Later than the other: where the network is at fault, that one says who was lost.
        self._limit_s = timeout_s + _GRACE_S * asks
        self._says, self._hears, self._on_lost = says, hears, on_lost
        self._heard_at, self._quiet_s = time.monotonic(), 0.0
        self._last = ""
        self._ending = threading.Event()
        # It ends when the last beat is sent.
        self.thread = threading.Thread(target=self._run, name=f"pulse-{peer}", daemon=True)
        self.thread.start()

    def reason(self, error: BaseException) -> str:
        """Return why an exchange with the other process failed."""
        if is_lost_peer(error):
            self.thread.join(NOTICED_S)  # it fails, too, and knows more
        return self.failure or reason_of(error)

    def end(self, word: str = "") -> None:
        """Be silent after one more beat. With a word the one that asked is left out."""
        if not self._ending.is_set():
            self._last = word
            self._ending.set()

    def _run(self) -> None:
        lost = True
        try:
            self._beat()
            lost = self.left_out  # as the other one has said
        except RuntimeError as error:
            self.failure = self.failure or self._why(error)
        if lost:
            self._on_lost(self)

    def _beat(self) -> None:
        speaks = self._asks
        while True:
            if speaks:
                pause_s = min(_BEAT_S, self._timeout_s / 4) if self._asks else 0.0
                last = self._ending.wait(pause_s)
                row = wire.text_row(_LAST + self._last if last else self._says())
                wire.isend(row, self._pair, self._TAG).wait(timedelta(seconds=self._limit_s))
            else:
                word = self._hear(self._limit_s)
                last = word.startswith(_LAST)
                word = word.removeprefix(_LAST)
                if last and self._asks:
                    self.left_out = bool(word)
                    self.failure = word or f"rank {self._peer} answers no more"
                self._hears(word)
            if last:
                break
            speaks = not speaks
        if self.failure:
            with suppress(RuntimeError):
                self._hear(0.001)  # in vain, which closes the connection

    def _why(self, error: RuntimeError) -> str:
        # What was sent before a process is stopped it may still hear afterwards.
        quiet_s = max(self._quiet_s, time.monotonic() - self._heard_at)
        timed_out = "timed out" in str(error).lower()
        # One that was stopped finds the connection closed, or that it has waited for long.
        self.left_out = quiet_s > (self._limit_s + _GRACE_S if timed_out else self._timeout_s)
        setting = f"{self._timeout_s:g} s (--worker-timeout)"
        if self.left_out:
            return f"rank {self._peer} has heard nothing of this process for {setting}"
        return (
            f"rank {self._peer} has said nothing for {setting}" if timed_out else reason_of(error)
        )

    def _hear(self, limit_s: float) -> str:
        row = wire.text_row("")
        wire.irecv(row, self._pair, self._TAG).wait(timedelta(seconds=limit_s))
        now = time.monotonic()
        self._heard_at, self._quiet_s = now, now - self._heard_at
        return wire.read_text(row)


class Heartbeats:
    """Whose fault it is when processes that meet cannot: rank 0 finds it, and tells the others.

    Each has a `Pulse` with rank 0, and says how many exchanges it has entered. A process that died
    or was stopped says nothing more, one that hangs has entered fewer than the others.

    Where an exchange does not fail when a peer dies (NCCL's waits on the device, for its own
    timeout), what rank 0 has found ends the process.

    Where workers have several processes, `workers` has the worker of each rank.
    """

    def __init__(self, timeout_s: float, workers: Mapping[int, int] | None = None) -> None:
        self._rank, self._workers, self._timeout_s = dist.get_rank(), workers or {}, timeout_s
        # By rank; in rank 0 that of the others, too, which is infinite once they have left.
        self._entered: dict[int, float] = dict.fromkeys(range(dist.get_world_size()), 0)
        self._said = ""  # what rank 0 is to hear besides
        self._found = ""  # whose fault it is
        self._known = threading.Event()
        # The main thread is on its way out, and needs no other to end it.
        self._leaves = threading.Event()
        self._lock = threading.Lock()
        with self._lock:
            self._pulses = {
                peer: Pulse(
                    *(peer, pair, timeout_s),
                    asks=self._rank != wire.SERVER_RANK,
                    says=self._word,
                    hears=partial(self._hear, peer),
                    on_lost=partial(self._gone, peer),
                )
                for peer, pair in wire.pairs_with_server(timedelta(seconds=timeout_s)).items()
            }

    def enter(self) -> None:
        """Note that this process begins an exchange with all others."""
        entered = self._entered[self._rank]
        self._entered[self._rank] = entered - entered % _MEETING + _MEETING

    def enter_inside(self) -> None:
        """Note that this process begins an exchange with those of its worker."""
        self._entered[self._rank] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn a failed exchange into a `SyncError` that names the rank whose fault it is.

        Any other error ends this process alone; the others get a note of it.
        """
        patience_s = _TOLD_S
        try:
            yield
            # Python aborts where a thread returns from torch while the process comes to its end.
            patience_s = self._timeout_s
        except (RunStopped, DivergedError, GeneratorExit):  # all end by it
            raise
        except BaseException as error:
            # Data may be read, and saved, over connections of their own.
            if is_lost_peer(error) and not isinstance(error, (ReadError, SaveError)):
                reason = reason_of(error)
                self._tell(_LOST + reason)
                raise SyncError(self._found or _no_one(reason)) from error
            left = isinstance(error, SystemExit) and not error.code
            interrupted = isinstance(error, KeyboardInterrupt)
            said = "left the run" if left else f"failed: {in_line(error)}"
            self._tell("was interrupted" if interrupted else said)
            raise
        finally:  # silent from now on, once the others that live know what was found
            self._leaves.set()
            deadline = time.monotonic() + patience_s
            for pulse in self._pulses.values():
                pulse.end()
            for pulse in self._pulses.values():
                pulse.thread.join(max(0.0, deadline - time.monotonic()))

    def _tell(self, said: str) -> None:
        """Have rank 0 find whose fault it is, and wait until that is known."""
        self._leaves.set()
        self._said = said
        if self._rank == wire.SERVER_RANK:
            self._hear(self._rank, self._word())
        self._known.wait(_TOLD_S)

    def _word(self) -> str:
        return f"{self._entered[self._rank]} {self._said}"

    def _hear(self, peer: int, word: str) -> None:
        """Note what another process says: in rank 0 how far it is, elsewhere what rank 0 found."""
        count, _, said = word.partition(" ")
        if self._rank == wire.SERVER_RANK:
            self._entered[peer] = int(count) if count else math.inf
            if said.startswith(_LOST):
                _later(NOTICED_S, self._find_hanging, peer, said.removeprefix(_LOST))
            elif said:
                self._find(f"{self._name(peer)} {said}")
        elif not count:  # it has left
            self._known.set()
        elif not count.isdecimal():
            self._find(word)

    def _gone(self, peer: int, pulse: Pulse) -> None:
        self._find(f"{self._name(peer)} died or fell silent ({pulse.failure})")

    def _find_hanging(self, peer: int, reason: str) -> None:
        """Find who entered the fewest exchanges, unless it is known whose fault it is.

        Only processes of one worker enter the same exchanges inside it: they count where one of
        them, the `peer`, tells that it waits in vain.
        """
        among = {r: n // _MEETING if n < math.inf else n for r, n in self._entered.items()}
        mates = [r for r, worker in self._workers.items() if worker == self._workers.get(peer)]
        if len(mates) > 1 and among[peer] == min(among.values()):
            among = {rank: self._entered[rank] for rank in mates}
        hanging = [rank for rank, count in among.items() if count == min(among.values())]
        names = f"rank {', '.join(map(str, hanging))}"
        names = self._name(*hanging) if len(hanging) == 1 else names
        none = len(hanging) == len(among)
        self._find(_no_one(reason) if none else f"{names} hangs ({reason})")

    def _name(self, rank: int) -> str:
        worker = self._workers.get(rank)
        return f"rank {rank}" if worker is None else f"rank {rank} (a process of worker {worker})"

    def _find(self, what: str) -> None:
        """Note whose fault it is; this process ends, unless its main thread is faster."""
        with self._lock:
            if self._found:
                return
            self._found = what
        for pulse in self._pulses.values() if self._rank == wire.SERVER_RANK else ():
            pulse.end(what)
        self._known.set()
        end_later(what, self._leaves)


def end_later(found: str, leaves: threading.Event) -> None:
    """End this process with a line, unless its main thread is faster, and `leaves`."""

    def end() -> None:
        if not leaves.is_set():
            print(f"error: {found}", file=sys.stderr, flush=True)
            os._exit(2)

    _later(_END_S, end)


def _later(seconds: float, call: Callable[..., object], *arguments: Any) -> None:
    timer = threading.Timer(seconds, call, arguments)
    timer.daemon = True
    timer.start()


def _no_one(reason: str) -> str:
    return f"an exchange between processes failed ({reason})"


class ControlGroup:
    """What all processes agree on, apart from the weights' process group; waits for `timeout_s`.

    With `islands`, the ranks of each worker, those of one worker agree.
    """

    def __init__(
        self,
        timeout_s: float,
        heartbeats: Heartbeats | None = None,
        islands: Sequence[Sequence[int]] = (),
    ) -> None:
        self.heartbeats = heartbeats
        self.enter = lambda: None
        if heartbeats:
            self.enter = heartbeats.enter_inside if islands else heartbeats.enter
        # In host memory: asking must not wait for what a device has queued.
        how = {"backend": "gloo", "timeout": timedelta(seconds=timeout_s)}
        if islands:
            self._group, _ = dist.new_subgroups_by_enumeration(islands, **how)
        else:
            self._group = dist.new_group(**how)
        self._steps, self._ask_at, self._asked_s = 0, 1, time.monotonic()

    def agree(self, action: Action) -> Action:
        """Return the strongest wish; asked at each step, they tell each other once a second."""
        self._steps += 1
        if self._steps < self._ask_at:
            return Action.GO_ON
        now = time.monotonic()
        step_s = max(now - self._asked_s, 1e-6) / self._steps
        # The first one's steps decide when they ask again.
        first = dist.get_rank(self._group) == 0
        own = round(min(max(_ASK_EVERY_S / step_s, 1.0), 1000.0)) if first else 0
        strongest, self._ask_at = self.highest(action, own)
        self._steps, self._asked_s = 0, now
        return Action(strongest)

    def highest(self, *values: int) -> list[int]:
        """Return the highest of each of all processes' values (a collective)."""
        self.enter()
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()

    def gather_reports(self, report: RoundReport | None) -> list[RoundReport]:
        """Return all processes' reports, by rank, of those that have one (a collective)."""
        texts = self.gather_texts("" if report is None else wire.encode(report))
        return [wire.read_report(text) for text in texts if text]

    def share(self, text: str) -> str:
        """Return the first process's text on all processes (a collective)."""
        self.enter()
        return wire.share_from(0, text, wire.CPU, self._group)

    def let_first_wait(self, peer: int) -> None:
        """Have the first process wait until another one calls this, for as long as it takes."""
        self.enter()
        word = torch.zeros(1)
        if self._group.rank() == 0:
            self._group.recv([word], peer, 0).wait(wire.EVER)
        elif self._group.rank() == peer:
            self._group.send([word], 0, 0).wait()

    def gather_texts(self, text: str) -> list[str]:
        """Return the texts of all processes, by rank (a collective)."""
        self.enter()
        return wire.gather_texts(text, self._group)
