"""How processes communicate: messages, reports and plans as JSON, vectors in chunks, collectives.

Nothing is pickled.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.plan.types import Plan, RoundReport, plan_from_plain, report_from_plain

if TYPE_CHECKING:  # the library runs without it
    from accelerate import Accelerator

SERVER_RANK = 0
CPU = torch.device("cpu")

# --- messages


class Kind(IntEnum):
    """What a message asks of the server, and what follows."""

    DONE = 0
    PUSH = 1  # with a report; then weights, their change since a pull, or gradients
    PULL = 2  # asks for the worker's next round; if the run continues, weights follow the answer
    LEAVE = 3  # is answered


class Answer(IntEnum):
    """What the server answers."""

    GOES_ON = 0  # with the round's plan
    STOPPED = 1  # to be resumed
    FINISHED = 2  # before its last epoch


def tell(pair: dist.ProcessGroup, what: Kind | Answer, text: str = "") -> None:
    """Send a question, or an answer, with a text over a group of two."""
    letters = text_row(text)
    isend(torch.tensor([what, len(letters)]), pair).wait(EVER)
    if len(letters):
        isend(letters, pair).wait(EVER)


def hear(pair: dist.ProcessGroup, kinds: type[IntEnum]) -> tuple[Any, str]:
    """Receive a message of these kinds; return it and its text."""
    head = torch.empty(2, dtype=torch.int64)
    irecv(head, pair).wait(EVER)
    what, length = head.tolist()
    letters = torch.empty(length, dtype=torch.uint8)
    if length:
        irecv(letters, pair).wait(EVER)
    return kinds(what), read_text(letters)


def text_row(text: str, room: int = 0) -> Tensor:
    """Return a text as uint8, of at least `room` bytes."""
    return torch.tensor(list(text.encode().ljust(room, b"\0")), dtype=torch.uint8)


def read_text(row: Tensor) -> str:
    """Return the text that `text_row` was given."""
    return bytes(row.tolist()).rstrip(b"\0").decode()


# --- reports and plans


def encode(record: RoundReport | Plan) -> str:
    """Return a report or a plan as JSON; numbers keep all their bits."""
    return json.dumps(asdict(record), default=lambda number: number.item())


def read_report(text: str) -> RoundReport:
    """Return the report that `encode` was given."""
    return report_from_plain(json.loads(text))


def read_plan(text: str) -> Plan:
    """Return the plan that `encode` was given."""
    return plan_from_plain(json.loads(text))


# --- vectors

CHUNK = 1 << 22  # bytes: cache-sized, and few enough messages
# Timeout of an exchange, which ends earlier: a `Keepalive` closes the connection after silence.
EVER = timedelta(days=10_000)


def isend(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to send a tensor over a group of two."""
    return pair.send([tensor], 1 - pair.rank(), tag)


def irecv(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to receive into a tensor over a group of two."""
    return pair.recv([tensor], 1 - pair.rank(), tag)


class Channel:
    """A worker's connection with the server, at either end: vectors travel in chunks.

    Vectors in host memory are sent and received in place; a device's vector passes through a
    buffer, pinned for CUDA. `vector` receives what arrives.
    """

    def __init__(self, pair: dist.ProcessGroup, vector: Tensor) -> None:
        self.pair, self.vector, self._host = pair, vector, vector
        if vector.device.type != "cpu":
            self._host = torch.empty_like(vector, device=CPU, pin_memory=vector.is_cuda)
        self._pending: list[dist.Work] = []  # each keeps its tensor alive

    def ask(self, kind: Kind) -> tuple[Answer, str]:
        """Ask the server; return its answer, once the last push has left this process."""
        tell(self.pair, kind)
        answer = hear(self.pair, Answer)
        self.wait()
        return answer

    def send(self, vector: Tensor) -> None:
        """Begin to send a vector; it must not change until `wait`."""
        self.wait()
        vector = vector if vector.device.type == "cpu" else self._host.copy_(vector)
        self._pending = [isend(chunk, self.pair) for chunk in _chunks(vector)]

    def receive(self) -> None:
        """Receive into `vector`."""
        self.wait()
        for chunk in _chunks(self._host):
            self._pending.append(irecv(chunk, self.pair))
            # Two at a time: beats, which share the connection, come between later ones.
            if len(self._pending) == 2:
                self._pending.pop(0).wait(EVER)
        self.wait()
        if self._host is not self.vector:
            self.vector.copy_(self._host)

    def wait(self) -> None:
        """Wait until the last vector sent has left this process."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait(EVER)


def _chunks(vector: Tensor) -> Sequence[Tensor]:
    return vector.split(CHUNK // vector.itemsize)


# --- collectives


def wait_for_all() -> None:
    """Wait until all processes arrive here; a single process does not wait (a collective).

    It uses gloo, which fails at once if a process dies: NCCL waits on the device until its timeout.
    """
    if dist.is_initialized():
        dist.barrier(_in_host_memory(dist.group.WORLD))


@cache
def _in_host_memory(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return all processes' group over gloo; the first call is a collective."""
    if dist.get_backend(world) == "gloo":
        return world
    (device, *_) = world._device_types
    return dist.new_group(backend="gloo", timeout=world._get_backend(device).options._timeout)


def all_reduce_time_s(size: int, device: torch.device, times: int = 5) -> float:
    """Return the seconds in which all processes sum a vector of `size` bytes (a collective)."""
    vector, found = torch.zeros(size // 4, device=device), []
    for _ in range(1 + times):  # the first makes connections
        wait_for_all()
        began = time.perf_counter()
        dist.all_reduce(vector)
        vector[:1].cpu()  # waits for the device
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def share_text(text: str, accelerator: Accelerator) -> str:
    """Return the main process's text on every process (a collective)."""
    # As bytes: collectives for objects would unpickle whatever arrives.
    if not dist.is_initialized():
        return text if accelerator.is_main_process else ""
    return share_from(SERVER_RANK, text, accelerator.device)


@contextmanager
def refused_by_all(accelerator: Accelerator) -> Iterator[None]:
    """Raise the main process's `SettingError` on all, so that none waits for another."""
    error = ""
    try:
        yield
    except SettingError as reason:
        error = str(reason)
    if error := share_text(error, accelerator):
        raise SettingError(error)


def share_from(
    rank: int, text: str, device: torch.device, group: dist.ProcessGroup | None = None
) -> str:
    """Return one rank's text, of any length, on all processes of the group (a collective)."""
    length = torch.tensor(1 + len(text.encode()), device=device)  # none would be an error
    dist.broadcast(length, group=group, group_src=rank)
    letters = text_row(text, int(length))[: int(length)].to(device)  # others' may be longer
    dist.broadcast(letters, group=group, group_src=rank)
    return read_text(letters)


def gather_texts(
    text: str, device: torch.device | str, group: dist.ProcessGroup | None = None
) -> list[str]:
    """Return the texts of all processes of the group, by rank (a collective)."""
    length = torch.tensor(1 + len(text.encode()), device=device)  # none would be an error
    dist.all_reduce(length, dist.ReduceOp.MAX, group=group)
    row = text_row(text, int(length)).to(device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [*map(read_text, rows)]


def pairs_with_server(timeout: timedelta) -> dict[int, dist.ProcessGroup]:
    """Return the server's gloo connections with all ranks, or this rank's with the server, by peer.

    A collective: every rank makes every pair, in the same order.
    """
    pairs = {
        rank: dist.new_group([SERVER_RANK, rank], backend="gloo", timeout=timeout)
        for rank in range(1, dist.get_world_size())
    }
    own = dist.get_rank()
    return pairs if own == SERVER_RANK else {SERVER_RANK: pairs[own]}
