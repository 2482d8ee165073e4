"""What processes send each other beside weights: reports and plans, as tensors of fixed shape.

Nothing is pickled, and what comes is checked. Here is no communication.

A vector from one process to another, in chunks: what is done with one overlaps with the next.

What all processes do together: sums, agreements, and plans and reports that all of them get.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from enum import IntEnum
from typing import Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from dbsl.base.errors import SettingError, one_of_several
from dbsl.plan.follow import Planner
from dbsl.plan.types import Plan, RoundReport, Segment, StepLine, WorkerPlan

SERVER_RANK = 0
CPU = torch.device("cpu")
NOTHING_ANNOUNCED = (0, -1)

_APART = ("lines", "figures")  # of a report: step lines come behind it, figures are more columns
_FIELDS = [field for field in fields(RoundReport) if field.name not in _APART]
_LINE = len(StepLine._fields) - 1  # numbers of a step line without figures
_PLAN_FIELDS = fields(WorkerPlan)
ROW = len(_FIELDS)  # numbers of an encoded report without figures
_KINDS = {"int": int, "float": float, "bool": bool}
_WHOLE = 4  # numbers at the start of a step line that are whole


class Kind(IntEnum):
    """What a message asks of the server."""

    DONE = 0
    PUSH = 1  # weights or gradients
    PUSH_CHANGE = 2  # the weights' change since the pull
    PULL = 3
    PLAN = 4
    LEAVE = 5


class Ending(IntEnum):
    """Whether the run goes on."""

    GOES_ON = 0
    STOPPED = 1  # to be gone on with: workers save and stop
    FINISHED = 2  # before its last epoch


def encode(report: RoundReport, device: torch.device) -> Tensor:
    """Return a report as float64 [fields + figures]; integers up to 2**53 stay exact.

    Its step lines are sent apart (`encode_lines`).
    """
    values = [getattr(report, field.name) for field in _FIELDS]
    return torch.tensor([*values, *report.figures.values()], dtype=torch.float64, device=device)


def decode(row: Tensor, figures: Iterable[str] = ()) -> RoundReport:
    """Return the report that `encode` was given, with figures of these names.

    Raises:
        SettingError: If the row is none such.
    """
    names = tuple(figures)
    if row.shape != (ROW + len(names),) or row.dtype != torch.float64:
        raise SettingError(
            f"report must be float64 [{ROW + len(names)}], got {row.dtype} {list(row.shape)}"
        )
    values, own = row[:ROW].tolist(), row[ROW:].tolist()
    counts = [v for f, v in zip(_FIELDS, values, strict=True) if f.type != "float"]
    if not all(value.is_integer() and abs(value) <= 2**53 for value in counts):
        raise SettingError(f"report must have whole numbers up to 2**53, got {counts}")
    found = {f.name: _KINDS[f.type](value) for f, value in zip(_FIELDS, values, strict=True)}
    return RoundReport(**found, figures=dict(zip(names, own, strict=True)))


def encode_lines(lines: Sequence[StepLine]) -> Tensor:
    """Return step lines as float64 [lines, fields + figures]."""
    rows = [[*line[:_LINE], *line.figures.values()] for line in lines]
    return torch.tensor(rows, dtype=torch.float64)


def line_rows(report: RoundReport) -> Tensor:
    """Return room for the step lines that follow a report, float64 [lines, fields + figures].

    Raises:
        SettingError: If there are more of them than steps.
    """
    if not 0 <= report.logged <= report.steps:
        raise SettingError(
            f"report must have at most a line for each of {report.steps} steps, got {report.logged}"
        )
    return torch.zeros(report.logged, _LINE + len(report.figures), dtype=torch.float64)


def with_lines(report: RoundReport, rows: Tensor) -> RoundReport:
    """Return a report with the step lines that came behind it, as `encode_lines` made them.

    Raises:
        SettingError: If they are no such lines, or another worker's.
    """
    lines = []
    for row in rows.tolist():
        whole = row[:_WHOLE]
        if not all(value.is_integer() and 0 <= value <= 2**53 for value in whole):
            raise SettingError(f"step line must begin with whole numbers, got {whole}")
        figures = dict(zip(report.figures, row[_LINE:], strict=True))
        line = StepLine(*map(int, whole), *row[_WHOLE:_LINE], figures)
        if line.worker != report.worker:
            raise SettingError(f"step line must be of worker {report.worker}, got {line.worker}")
        lines.append(line)
    return replace(report, logged=0, lines=tuple(lines))


def message(
    kind: int,
    report: RoundReport | None = None,
    *,
    epoch: int = 0,
    round_: int = 0,
    figures: int = 0,
) -> Tensor:
    """Return a message's head: its kind, then a push's report or numbers.

    It is float64 [1 + fields + figures], whatever is in it.
    """
    head = torch.zeros(1 + ROW + figures, dtype=torch.float64)
    head[0] = kind
    head[1], head[2] = epoch, round_
    if report is not None:
        head[1:] = encode(report, CPU)
    return head


def message_kind(head: Tensor) -> Kind:
    """Return a message's kind.

    Raises:
        SettingError: If there is none such.
    """
    kind = float(head[0])
    if kind not in tuple(Kind):
        raise SettingError(f"message must be of a known kind, got {kind:g}")
    return Kind(int(kind))


def message_numbers(head: Tensor, epochs: int) -> tuple[int, int]:
    """Return the epoch and the round that a question about the plan names.

    Raises:
        SettingError: If the run has no such epoch or round.
    """
    epoch, round_ = (float(value) for value in head[1:3])
    if not (epoch.is_integer() and 0 <= epoch < epochs and round_.is_integer() and round_ >= 0):
        raise SettingError(f"message must name an epoch below {epochs}, got {epoch:g}, {round_:g}")
    return int(epoch), int(round_)


def check_report(report: RoundReport, worker: int, epoch: int, round_: int) -> None:
    """Refuse a report that is not of the worker's next round or not of finite numbers."""
    if (report.worker, report.epoch, report.round) != (worker, epoch, round_):
        raise SettingError(
            f"report must be of worker {worker}, epoch {epoch}, round {round_}, got worker "
            f"{report.worker}, epoch {report.epoch}, round {report.round}"
        )
    if not 0 < report.merge_weight <= 1:
        raise SettingError(
            f"report must have a merge weight in (0, 1], got {report.merge_weight:g}"
        )
    numbers = (report.time_s, report.compute_time_s, report.wait_time_s, report.learning_rate)
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        raise SettingError(f"report must have finite times and learning rate, got {numbers}")
    if min(report.samples, report.steps, report.local_batch_size) < 0:
        raise SettingError("report must have counts of at least 0")


def answer(
    *, stop: Ending = Ending.GOES_ON, announced: tuple[int, int] = NOTHING_ANNOUNCED
) -> Tensor:
    """Return what the server says before it sends weights, float64 [3].

    Whether the run ends (then no weights follow), and the number and epoch of the latest save.
    """
    return torch.tensor([float(stop), *announced], dtype=torch.float64)


def read_answer(head: Tensor) -> tuple[Ending, tuple[int, int]]:
    """Return what `answer` was given."""
    stop, sequence, epoch = head.tolist()
    return Ending(int(stop)), (int(sequence), int(epoch))


def plan_tensor(workers: int, device: torch.device) -> Tensor:
    """Return room for an encoded plan, float64 [1 + workers, fields]."""
    return torch.zeros(1 + workers, len(_PLAN_FIELDS), dtype=torch.float64, device=device)


def encode_plan(segment: Segment, device: torch.device) -> Tensor:
    """Return where a plan begins, in the first row, and each worker's part, in the others."""
    rows = plan_tensor(len(segment.plan.workers), device)
    rows[0, :2] = torch.tensor([segment.first_round, segment.start])
    rows[1:] = torch.tensor([_row(w) for w in segment.plan.workers], dtype=torch.float64)
    return rows


def decode_plan(rows: Tensor, like: Plan) -> Segment:
    """Return the segment that `encode_plan` was given; what is the run's is taken from `like`.

    Raises:
        SettingError: If the rows are no plan of as many workers.
    """
    if rows.shape != (1 + len(like.workers), len(_PLAN_FIELDS)) or not rows.isfinite().all():
        raise SettingError(f"plan must be of {len(like.workers)} workers, got {list(rows.shape)}")
    first_round, start = (int(value) for value in rows[0, :2].tolist())
    workers = tuple(
        WorkerPlan(*(_KINDS[f.type](value) for f, value in zip(_PLAN_FIELDS, row, strict=True)))
        for row in rows[1:].tolist()
    )
    return Segment(replace(like, workers=workers), first_round, start)


def _row(worker: WorkerPlan) -> list[float]:
    return [float(getattr(worker, field.name)) for field in _PLAN_FIELDS]


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
    vector must stay as it is.

    Args:
        like: A vector as they are sent.
        pair: Group of this process and the other one.
        dtype: What travels.
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
        arrivals = [None] * len(chunks)
        before, copies = _split(minus, len(chunks)), _split(copy, len(chunks))
        if self._stream is not None:  # all copies to the host are queued before the first is sent
            self._stream.wait_stream(torch.cuda.current_stream(vector.device))
            with torch.cuda.stream(self._stream):
                arrivals = [
                    self._stage(*both, old) for both, old in zip(chunks, before, strict=True)
                ]
        for number, (chunk, staged) in enumerate(chunks):
            if self._stream is None:  # while the chunks before it are on their way
                self._stage(chunk, staged, before[number])
            else:
                arrivals[number].synchronize()
            self._pending.append(isend(staged, self._pair))
            if copy is not None:
                copies[number].copy_(chunk)

    def _stage(
        self, chunk: Tensor, staged: Tensor, minus: Tensor | None
    ) -> torch.cuda.Event | None:
        """Copy a chunk to where it is sent from; of a CUDA device, return the copy's event."""
        if staged is not chunk:
            change = chunk if minus is None else chunk - minus
            staged.copy_(change, non_blocking=self._stream is not None)
        if self._stream is None:
            return None
        return self._stream.record_event()

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


def _split(vector: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """Return a vector's chunks, once for all of them; of no vector, as many times None."""
    return [None] * count if vector is None else vector.split(CHUNK)


def wait_for_all() -> None:
    """Wait until all processes have come here; one process alone goes on at once (a collective).

    Accelerate's own names the GPU by the local rank. Of two processes on one GPU, or where each
    process is shown one GPU, the second has no such device.
    """
    if dist.is_initialized():
        nccl = dist.get_backend() == "nccl"
        dist.barrier(device_ids=[torch.cuda.current_device()] if nccl else None)


def share_text(text: str, accelerator: Accelerator) -> str:
    """Return the main process's text on every process (a collective; up to 1,000 bytes)."""
    # As bytes: collectives for objects would unpickle whatever comes.
    letters = torch.zeros(1000, dtype=torch.int32, device=accelerator.device)
    if accelerator.is_main_process:
        content = list(text.encode()[:1000])
        letters[: len(content)] = torch.tensor(content, dtype=torch.int32)
    return bytes(broadcast(letters).tolist()).rstrip(b"\0").decode(errors="replace")


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
    letters = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    length = torch.tensor(len(letters), device=device)
    dist.broadcast(length, rank)
    if dist.get_rank() != rank:
        letters = torch.empty(int(length), dtype=torch.uint8, device=device)
    dist.broadcast(letters, rank)
    return bytes(letters.tolist()).decode()


def exchange_reports(report: RoundReport, device: torch.device) -> list[RoundReport]:
    """Return the reports of all ranks, in their order (a collective)."""
    row = encode(report, device)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [decode(row, report.figures) for row in rows]


class FusedSum:
    """A vector summed over all ranks, and with it their reports, in one collective.

    Reports travel as bytes behind the vector: integers below 256 are exact in every dtype, and
    nothing but zeros is added to them.

    Args:
        like: A vector as they are summed.
        dtype: What travels.
        figures: Names of the reports' figures.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, figures: Sequence[str] = ()) -> None:
        self._figures = figures
        self._row = (ROW + len(figures)) * torch.float64.itemsize
        room = dist.get_world_size() * (1 + self._row)
        self._all = torch.zeros(len(like) + room, dtype=dtype, device=like.device)
        self.vector = self._all[: len(like)]  # this rank's, then the sum
        self._rows = self._all[len(like) :].view(dist.get_world_size(), 1 + self._row)

    def exchange(self, report: RoundReport | None) -> list[RoundReport]:
        """Sum `vector` in place (a collective); return the ranks' reports, in their order."""
        self._rows.zero_()
        if report is not None:
            letters = encode(report, CPU).view(torch.uint8).to(self._rows.dtype)
            mine = self._rows[dist.get_rank()]
            mine[0] = 1  # there is a report
            mine[1:] = letters.to(mine.device)
        dist.all_reduce(self._all)
        rows = self._rows.cpu()
        found = rows[rows[:, 0] != 0, 1:]
        letters = found.to(torch.uint8).contiguous()
        return [decode(row.view(torch.float64), self._figures) for row in letters]


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


class Entered(Protocol):
    """What is told of every exchange that this process enters: `dbsl.cluster.alive.Heartbeats`."""

    def enter(self) -> None:
        """Note that an exchange with the others begins."""


class ControlGroup:
    """Integers that all processes agree on, beside the weights' own process group.

    Args:
        timeout_s: Longest wait for a process.
        heartbeats: Is told of every exchange that this process enters.
    """

    def __init__(self, timeout_s: float, heartbeats: Entered | None = None) -> None:
        self.heartbeats = heartbeats
        # In host memory: asking must not wait for what a device has queued.
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._writers = dist.new_group(backend="gloo", timeout=timeout)

    def enter(self) -> None:
        """Note that this process begins an exchange with all others."""
        if self.heartbeats is not None:
            self.heartbeats.enter()

    def highest(self, *values: int) -> list[int]:
        """Return the highest of each of all processes' values (a collective)."""
        self.enter()
        numbers = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self._group)
        return numbers.tolist()

    def with_lines(
        self, reports: Sequence[RoundReport], own: RoundReport | None
    ) -> list[RoundReport]:
        """Return all processes' reports with their step lines (a collective if there are any).

        Args:
            reports: Of all processes, as every one of them has them.
            own: This process's, with its lines.
        """
        most = max((len(line_rows(report)) for report in reports), default=0)
        if not most:
            return list(reports)
        self.enter()
        width = line_rows(reports[0]).shape[1]
        mine = torch.full((most, width), -1.0, dtype=torch.float64)
        if own is not None and own.lines:
            mine[: len(own.lines)] = encode_lines(own.lines)
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine, group=self._group)
        lines = {int(of_rank[0, 0]): of_rank for of_rank in rows}  # by worker; none: -1
        return [
            with_lines(report, lines[report.worker][: report.logged]) if report.logged else report
            for report in reports
        ]

    def gather_rows(self, row: Tensor) -> list[Tensor]:
        """Return the rows of all processes (a collective of their writer threads)."""
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row, group=self._writers)
        return rows


class SharedPlans:
    """The server rank's plans on every rank, for those who meet in each round.

    A plan that follows the machines is decided in one place: two kinds of CPU may round alike
    measurements to unlike plans.

    Args:
        planner: Decides in the server rank's process.
        control: Is told of every exchange that this process enters.
    """

    def __init__(self, planner: Planner, control: ControlGroup | None = None) -> None:
        self.planner = planner
        self._control = control
        self._last: tuple[tuple[int, int] | None, Segment | None] = (None, None)

    def at(self, epoch: int, round_: int) -> Segment:
        """Return the plan in force (a collective where it may change; all ranks ask in order)."""
        alike = self.planner.balance == "none" or self.planner.takes_over(epoch)
        if alike or not one_of_several():
            return self.planner.at(epoch, round_)
        place, current = self._last
        if place != (epoch, round_):
            if current is None or self.planner.is_boundary(epoch, round_):
                current = self._shared(epoch, round_)
            self._last = (epoch, round_), current
        return current

    def _shared(self, epoch: int, round_: int) -> Segment:
        like = self.planner.current_at(epoch)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else CPU
        rows = plan_tensor(len(like.workers), device)
        if dist.get_rank() == SERVER_RANK:
            current = self.planner.at(epoch, round_)
            rows = encode_plan(current, device)
        if self._control is not None:
            self._control.enter()
        dist.broadcast(rows, src=SERVER_RANK)
        return current if dist.get_rank() == SERVER_RANK else decode_plan(rows, like)
