"""How processes talk: messages, reports and plans as tensors, vectors in chunks, collectives.

Nothing is pickled, and what comes is checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from enum import IntEnum
from typing import TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.plan.types import BAD_WEIGHTS, Plan, RoundReport, Segment, StepLine, WorkerPlan

SERVER_RANK = 0
CPU = torch.device("cpu")

_KINDS = {"int": int, "float": float, "bool": bool, "tuple[StepLine, ...]": int}
_MOST = 2**53  # up to which float64 has all whole numbers

# --- messages


class Kind(IntEnum):
    """What a message asks of the server, and what then follows."""

    DONE = 0
    PUSH = 1  # weights or gradients: as many rows of a report as its number says, and a vector
    PUSH_CHANGE = 2  # the weights' change since the pull; likewise
    PULL = 3  # is answered; where the run goes on, a vector comes
    PLAN = 4  # of the worker's next round, which comes
    LEAVE = 5  # is answered


class Ending(IntEnum):
    """What the server answers, with number and epoch of the save to take part in."""

    GOES_ON = 0
    STOPPED = 1  # to be gone on with: workers save and stop
    FINISHED = 2  # before its last epoch


KindT = TypeVar("KindT", Kind, Ending)


def message(what: Kind | Ending, *numbers: int) -> Tensor:
    """Return a question or an answer, with up to two numbers, float64 [3]."""
    return torch.tensor([what, *numbers, 0, 0][:3], dtype=torch.float64)


def read_message(head: Tensor, kinds: type[KindT]) -> tuple[KindT, int, int]:
    """Return what a message says, which must be of these kinds, and its numbers."""
    what, *numbers = head.tolist()
    if what not in tuple(kinds):
        raise SettingError(f"message must be of a known kind, got {what:g}")
    _whole("message", *numbers)
    return kinds(int(what)), *map(int, numbers)


def tell(pair: dist.ProcessGroup, what: Kind | Ending, *numbers: int) -> None:
    """Send a question, or an answer, over a group of two."""
    send(message(what, *numbers), pair)


def hear(pair: dist.ProcessGroup, kinds: type[KindT]) -> tuple[KindT, int, int]:
    """Receive a message of these kinds, and return it and its numbers."""
    head = torch.empty(3, dtype=torch.float64)
    receive(head, pair)
    return read_message(head, kinds)


_TEXT = 500  # bytes


def text_row(text: str) -> Tensor:
    """Return a text as uint8 [500], cut where it is longer."""
    content = text.encode()[:_TEXT].ljust(_TEXT, b"\0")
    return torch.tensor(list(content), dtype=torch.uint8)


def read_text(row: Tensor) -> str:
    """Return the text that `text_row` was given."""
    return bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore")


def _whole(what: str, *values: float) -> int:
    """Return the first of some numbers, all of which must be whole and not too large."""
    if not all(value.is_integer() and abs(value) <= _MOST for value in values):
        raise SettingError(f"{what} must have whole numbers up to 2**53, got {list(values)}")
    return int(values[0])


# --- reports

# Of the lines it is their number.
_NUMBERS = [field for field in fields(RoundReport) if field.name != "figures"]
LOGGED = [field.name for field in _NUMBERS].index("lines")
_LINE = len(StepLine._fields) - 1  # numbers of a step line without figures
_WHOLE = 4  # of these, from the first on, are whole
_MOST_ROWS = 1 << 20


def report_room(count: int, figures: Sequence[str] = ()) -> Tensor:
    """Return room for a report of so many rows with figures of these names, all -1."""
    if not 1 <= count <= _MOST_ROWS:
        raise SettingError(f"report must have 1 .. {_MOST_ROWS} rows, got {count}")
    return torch.full((count, len(_NUMBERS) + len(figures)), -1.0, dtype=torch.float64)


def report_rows(report: RoundReport) -> Tensor:
    """Return a report, and in further rows its step lines, as float64 [1 + lines, F].

    Figures come behind the numbers. Whole numbers up to 2**53 stay exact.
    """
    rows = report_room(1 + len(report.lines), tuple(report.figures))
    numbers = [getattr(report, field.name) for field in _NUMBERS]
    numbers[LOGGED] = len(report.lines)
    rows[0] = torch.tensor([*numbers, *report.figures.values()], dtype=torch.float64)
    for row, line in zip(rows[1:], report.lines, strict=True):
        values = [*line[:_LINE], *line.figures.values()]
        row[: len(values)] = torch.tensor(values, dtype=torch.float64)
    return rows


def read_report(rows: Tensor, figures: Sequence[str] = ()) -> RoundReport:
    """Return the report that `report_rows` was given, with figures of these names."""
    names, first = tuple(figures), rows[0].tolist()
    values, means = first[: len(_NUMBERS)], first[len(_NUMBERS) :]
    _whole("report", *(v for f, v in zip(_NUMBERS, values, strict=True) if f.type != "float"))
    found = {f.name: _KINDS[f.type](value) for f, value in zip(_NUMBERS, values, strict=True)}
    count = found.pop("lines")
    report = RoundReport(**found, figures=dict(zip(names, means, strict=True)))
    if not 0 <= count <= min(report.steps, len(rows) - 1):
        raise SettingError(
            f"report must have at most a line for each of {report.steps} steps, got {count}"
        )
    lines = [_read_line(row, names) for row in rows[1 : 1 + count].tolist()]
    for line in lines:
        if line.worker != report.worker:
            raise SettingError(f"step line must be of worker {report.worker}, got {line.worker}")
    return replace(report, lines=tuple(lines))


def _read_line(row: Sequence[float], figures: Sequence[str]) -> StepLine:
    _whole("step line", *row[:_WHOLE])
    means = row[_LINE : _LINE + len(figures)]
    numbers = (*map(int, row[:_WHOLE]), *row[_WHOLE:_LINE])
    return StepLine(*numbers, dict(zip(figures, means, strict=True)))


def check_report(report: RoundReport, worker: int, epoch: int, round_: int) -> None:
    """Refuse a report that is not of the worker's next round or not of finite numbers."""
    if (report.worker, report.epoch, report.round) != (worker, epoch, round_):
        raise SettingError(
            f"report must be of worker {worker}, epoch {epoch}, round {round_}, got worker "
            f"{report.worker}, epoch {report.epoch}, round {report.round}"
        )
    if not 0 < report.merge_weight <= 1:
        raise SettingError(f"report must have a weight in (0, 1], got {report.merge_weight:g}")
    times = (report.time_s, report.compute_time_s, report.wait_time_s, report.learning_rate)
    numbers = *times, report.samples, report.steps, report.local_batch_size
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        raise SettingError(f"report must have finite numbers of at least 0, got {numbers}")


# --- plans

_PLAN_FIELDS = fields(WorkerPlan)


def segment_room(workers: int) -> Tensor:
    """Return room for an encoded plan, float64 [1 + workers, fields]."""
    return torch.zeros(1 + workers, len(_PLAN_FIELDS), dtype=torch.float64)


def encode_segment(segment: Segment) -> Tensor:
    """Return where a plan begins, in the first row, and each worker's part, in the others."""
    rows = segment_room(len(segment.plan.workers))
    rows[0, :2] = torch.tensor([segment.first_round, segment.start])
    for row, worker in zip(rows[1:], segment.plan.workers, strict=True):
        values = [float(getattr(worker, field.name)) for field in _PLAN_FIELDS]
        row[:] = torch.tensor(values, dtype=torch.float64)
    return rows


def decode_segment(rows: Tensor, like: Plan) -> Segment:
    """Return what `encode_segment` was given; what is the run's is taken from `like`."""
    if rows.shape != (1 + len(like.workers), len(_PLAN_FIELDS)) or not rows.isfinite().all():
        raise SettingError(f"plan must be of {len(like.workers)} workers, got {list(rows.shape)}")
    first_round, start = (int(value) for value in rows[0, :2].tolist())
    workers = tuple(
        WorkerPlan(*(_KINDS[f.type](value) for f, value in zip(_PLAN_FIELDS, row, strict=True)))
        for row in rows[1:].tolist()
    )
    return Segment(replace(like, workers=workers), first_round, start)


# --- vectors

CHUNK = 1 << 20  # numbers, 4 MiB of float32: cache-sized, and few enough messages
# Timeout of an exchange, which ends earlier: a `Pulse` closes the connection after silence.
_EVER = timedelta(days=10_000)


def isend(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to send a tensor over a group of two.

    Not by `dist.isend`, which does not know groups of processes that joined a running job.
    """
    return pair.send([tensor], 1 - pair.rank(), tag)


def irecv(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to receive into a tensor over a group of two."""
    return pair.recv([tensor], 1 - pair.rank(), tag)


def send(tensor: Tensor, pair: dist.ProcessGroup) -> None:
    """Send a tensor over a group of two, however long the other process is busy."""
    isend(tensor, pair).wait(_EVER)


def receive(tensor: Tensor, pair: dist.ProcessGroup) -> None:
    """Receive into a tensor over a group of two, however long the other process is busy."""
    irecv(tensor, pair).wait(_EVER)


class Transfer:
    """Sends vectors of one length over a group of two, and receives them.

    A vector in host memory and in the wire's dtype is sent from, and received into, where it is;
    others pass a buffer, which is pinned for a CUDA device. Between `send` and `wait` the sent
    vector must stay as it is. What travels is in `dtype`; None: that of `like`.
    """

    def __init__(
        self, like: Tensor, pair: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self._pair = pair
        self._dtype = dtype or like.dtype
        self._buffer: Tensor | None = None
        self._length = len(like)
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._pending: list[dist.Work] = []

    def send(
        self, vector: Tensor, *, minus: Tensor | None = None, copy: Tensor | None = None
    ) -> None:
        """Begin to send a vector, or its difference to `minus`; `copy` becomes equal to it."""
        self.wait()
        chunks = self._chunks(vector, direct=minus is None)
        before, copies = _split(minus, len(chunks)), _split(copy, len(chunks))
        arrivals = []
        if self._stream is not None:  # all copies to the host are queued before the first is sent
            self._stream.wait_stream(torch.cuda.current_stream(vector.device))
            with torch.cuda.stream(self._stream):
                for (chunk, staged), old in zip(chunks, before, strict=True):
                    _stage(chunk, staged, old)
                    arrivals.append(self._stream.record_event())
        for number, (chunk, staged) in enumerate(chunks):
            if arrivals:
                arrivals[number].synchronize()
            else:  # while the chunks before it are on their way
                _stage(chunk, staged, before[number])
            self._pending.append(isend(staged, self._pair))
            if copy is not None:
                copies[number].copy_(chunk)

    def wait(self) -> None:
        """Wait until what was sent last is on its way, and may be changed."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait(_EVER)

    def receive(
        self,
        vector: Tensor,
        *,
        plus: Tensor | None = None,
        copy: Tensor | None = None,
        check: bool = False,
    ) -> bool:
        """Receive into a vector; on a CUDA device its chunks are being copied when this returns.

        `plus` is added to it, and `copy` becomes equal to it. With `check`, return whether all of
        it is finite.
        """
        self.wait()
        chunks, sums = self._chunks(vector), []
        added, copies = _split(plus, len(chunks)), _split(copy, len(chunks))
        works = [irecv(staged, self._pair) for _, staged in chunks]
        for number, (work, (chunk, staged)) in enumerate(zip(works, chunks, strict=True)):
            work.wait(_EVER)
            # All of this while the next chunk comes.
            if staged is not chunk:
                chunk.copy_(staged, non_blocking=True)
            if plus is not None:
                chunk.add_(added[number])
            if copy is not None:
                copies[number].copy_(chunk)
            if check:
                sums.append(chunk.sum())  # finite ones do not overflow
        return not sums or bool(torch.stack(sums).sum().isfinite())

    def _chunks(self, vector: Tensor, *, direct: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Return chunks of the vector, each with what of it is sent or received."""
        chunks = vector.split(CHUNK)
        if direct and vector.dtype == self._dtype and vector.device.type == "cpu":
            return [(chunk, chunk) for chunk in chunks]
        if self._buffer is None:
            pinned = self._stream is not None
            self._buffer = torch.empty(self._length, dtype=self._dtype, pin_memory=pinned)
        return list(zip(chunks, self._buffer.split(CHUNK), strict=True))


def _stage(chunk: Tensor, staged: Tensor, minus: Tensor | None) -> None:
    """Copy a chunk to where it is sent from."""
    if staged is not chunk:
        staged.copy_(chunk if minus is None else chunk - minus, non_blocking=True)


def _split(vector: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """Return a vector's chunks, once for all of them; of no vector, as many times None."""
    return [None] * count if vector is None else vector.split(CHUNK)


class Link:
    """A worker's connection with the server, at either end: what travels on it, in which order.

    Pushes travel as `wire`, if that is given: gradients are rounded to it. Weights lose less as
    their change since the pull, which both ends count from what was pulled.
    """

    def __init__(
        self, pair: dist.ProcessGroup, like: Tensor, wire: torch.dtype | None, *, weights: bool
    ) -> None:
        self.pair = pair
        changes = weights and wire not in (None, like.dtype)
        self._whole, self._narrow = Transfer(like, pair), Transfer(like, pair, wire)
        # What is no change, as where a run was resumed inside a round.
        self._full = self._whole if changes else self._narrow
        self._pulled = torch.empty_like(like) if changes else None
        self._can_change = False  # since `_pulled` is there

    def ask(self, kind: Kind) -> tuple[Ending, int, int]:
        """Ask the server; return its answer, as the last push has left this process."""
        tell(self.pair, kind)
        answer = hear(self.pair, Ending)
        self.wait()
        return answer

    def push(self, report: RoundReport, vector: Tensor) -> None:
        """Begin to push a vector, which is there before the next pull ends."""
        rows = report_rows(report)
        tell(self.pair, Kind.PUSH_CHANGE if self._can_change else Kind.PUSH, len(rows))
        send(rows, self.pair)
        if self._can_change:
            self._narrow.send(vector, minus=self._pulled)
        else:
            self._full.send(vector)

    def take_push(
        self, kind: Kind, rows: int, figures: Sequence[str], vector: Tensor
    ) -> RoundReport:
        """Receive a push into a vector; return its report, refused if the vector is not finite."""
        room = report_room(rows, figures)
        receive(room, self.pair)
        report = read_report(room, figures)
        if kind == Kind.PUSH:
            finite = self._full.receive(vector, check=True)
        elif self._can_change:
            finite = self._narrow.receive(vector, plus=self._pulled, check=True)
        else:
            raise SettingError("a change of weights must follow a pull")
        good = finite or report.refused
        return report if good else replace(report, refused=True, fault=BAD_WEIGHTS)

    def give_weights(self, weights: Tensor) -> None:
        """Send the weights that were pulled."""
        self._whole.send(weights, copy=self._pulled)
        self._whole.wait()
        self._can_change = self._pulled is not None

    def take_weights(self, vector: Tensor) -> None:
        """Receive what `give_weights` sends into a vector."""
        self._whole.receive(vector, copy=self._pulled)
        self._can_change = self._pulled is not None

    def wait(self) -> None:
        """Wait until the last push has left this process."""
        self._whole.wait()
        self._narrow.wait()


# --- collectives


def wait_for_all() -> None:
    """Wait until all processes have come here; one process alone goes on at once (a collective).

    Accelerate's own names the GPU by the local rank. Of two processes on one GPU, or where each
    process is shown one GPU, the second has no such device.
    """
    if dist.is_initialized():
        nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)


def share_text(text: str, accelerator: Accelerator) -> str:
    """Return the main process's text on every process (a collective)."""
    # As bytes: collectives for objects would unpickle whatever comes.
    if not dist.is_initialized():
        return text if accelerator.is_main_process else ""
    return share_from(SERVER_RANK, text, accelerator.device)


@contextmanager
def refused_by_all(accelerator: Accelerator) -> Iterator[None]:
    """Raise a `SettingError` of the main process in here on all: none is to wait for another."""
    error = ""
    try:
        yield
    except SettingError as reason:
        error = str(reason)
    if error := share_text(error, accelerator):
        raise SettingError(error)


def share_from(rank: int, text: str, device: torch.device) -> str:
    """Return a rank's text, of any length, on every process of the group (a collective)."""
    content = list(text.encode())
    length = torch.tensor(len(content), device=device)
    dist.broadcast(length, rank)
    letters = torch.zeros(1 + int(length), dtype=torch.uint8, device=device)  # none is an error
    if dist.get_rank() == rank:
        letters[1:] = torch.tensor(content, dtype=torch.uint8)
    dist.broadcast(letters, rank)
    return bytes(letters[1:].tolist()).decode()


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
