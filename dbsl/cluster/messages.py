"""What processes send each other beside weights: reports and plans, as tensors of fixed shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from dbsl.base.errors import one_of_several
from dbsl.cluster.heartbeats import Heartbeats
from dbsl.plan.follow import Planner
from dbsl.plan.turns import RoundReport, StepLine
from dbsl.plan.types import CurrentPlan, Plan, WorkerPlan

SERVER_RANK = 0
CPU = torch.device("cpu")
# Kinds of messages to the server. A push is of weights or gradients, or of the weights' change.
DONE, PUSH, PUSH_CHANGE, PULL, PLAN, LEAVE = range(6)
NOTHING_ANNOUNCED = (0, -1)

_FIELDS = [field for field in fields(RoundReport) if field.name != "lines"]  # which come behind
_PLAN_FIELDS = fields(WorkerPlan)
_KINDS = {"int": int, "float": float, "bool": bool}
_WHOLE = 4  # numbers at the start of a step line that are whole


def encode(report: RoundReport, device: torch.device) -> Tensor:
    """Return a report as float64 [fields]; integers up to 2**53 stay exact.

    Its step lines are sent apart (`encode_lines`).
    """
    values = [getattr(report, field.name) for field in _FIELDS]
    return torch.tensor(values, dtype=torch.float64, device=device)


def decode(row: Tensor) -> RoundReport:
    """Return the report that `encode` was given.

    Raises:
        ValueError: If the row is none such.
    """
    if row.shape != (len(_FIELDS),) or row.dtype != torch.float64:
        raise ValueError(
            f"report must be float64 [{len(_FIELDS)}], got {row.dtype} {list(row.shape)}"
        )
    counts = [v for f, v in zip(_FIELDS, row.tolist(), strict=True) if f.type != "float"]
    if not all(value.is_integer() and abs(value) <= 2**53 for value in counts):
        raise ValueError(f"report must have whole numbers up to 2**53, got {counts}")
    values = zip(_FIELDS, row.tolist(), strict=True)
    return RoundReport(*(_KINDS[field.type](value) for field, value in values))


def encode_lines(lines: Sequence[StepLine]) -> Tensor:
    """Return step lines as float64 [lines, fields]."""
    return torch.tensor(lines, dtype=torch.float64).view(len(lines), len(StepLine._fields))


def line_rows(report: RoundReport) -> Tensor:
    """Return room for the step lines that follow a report, float64 [lines, fields].

    Raises:
        ValueError: If there are more of them than steps.
    """
    if not 0 <= report.logged <= report.steps:
        raise ValueError(
            f"report must have at most a line for each of {report.steps} steps, got {report.logged}"
        )
    return torch.zeros(report.logged, len(StepLine._fields), dtype=torch.float64)


def with_lines(report: RoundReport, rows: Tensor) -> RoundReport:
    """Return a report with the step lines that came behind it, as `encode_lines` made them.

    Raises:
        ValueError: If they are no such lines, or another worker's.
    """
    lines = []
    for row in rows.tolist():
        whole = row[:_WHOLE]
        if not all(value.is_integer() and 0 <= value <= 2**53 for value in whole):
            raise ValueError(f"step line must begin with whole numbers, got {whole}")
        line = StepLine(*map(int, whole), *row[_WHOLE:])
        if line.worker != report.worker:
            raise ValueError(f"step line must be of worker {report.worker}, got {line.worker}")
        lines.append(line)
    return replace(report, logged=0, lines=tuple(lines))


def message(
    kind: int, report: RoundReport | None = None, *, epoch: int = 0, round_: int = 0
) -> Tensor:
    """Return a message's head, float64 [1 + fields]: its kind, then a push's report or numbers."""
    head = torch.zeros(1 + len(_FIELDS), dtype=torch.float64)
    head[0] = kind
    head[1], head[2] = epoch, round_
    if report is not None:
        head[1:] = encode(report, CPU)
    return head


def message_kind(head: Tensor) -> int:
    """Return a message's kind.

    Raises:
        ValueError: If there is none such.
    """
    kind = float(head[0])
    if kind not in range(LEAVE + 1):
        raise ValueError(f"message must be of a known kind, got {kind:g}")
    return int(kind)


def message_numbers(head: Tensor, epochs: int) -> tuple[int, int]:
    """Return the epoch and the round that a question about the plan names.

    Raises:
        ValueError: If the run has no such epoch or round.
    """
    epoch, round_ = (float(value) for value in head[1:3])
    if not (epoch.is_integer() and 0 <= epoch < epochs and round_.is_integer() and round_ >= 0):
        raise ValueError(f"message must name an epoch below {epochs}, got {epoch:g}, {round_:g}")
    return int(epoch), int(round_)


def check_report(report: RoundReport, worker: int, epoch: int, round_: int) -> None:
    """Raise ``ValueError`` unless a report is of the worker's next round and of finite numbers."""
    if (report.worker, report.epoch, report.round) != (worker, epoch, round_):
        raise ValueError(
            f"report must be of worker {worker}, epoch {epoch}, round {round_}, got worker "
            f"{report.worker}, epoch {report.epoch}, round {report.round}"
        )
    if not 0 < report.merge_weight <= 1:
        raise ValueError(f"report must have a merge weight in (0, 1], got {report.merge_weight:g}")
    numbers = (report.time_s, report.compute_time_s, report.wait_time_s, report.learning_rate)
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        raise ValueError(f"report must have finite times and learning rate, got {numbers}")
    if min(report.samples, report.steps, report.local_batch_size) < 0:
        raise ValueError("report must have counts of at least 0")


def answer(*, stop: bool = False, announced: tuple[int, int] = NOTHING_ANNOUNCED) -> Tensor:
    """Return what the server says before it sends weights, float64 [3].

    Whether the run stops (then no weights follow), and the number and epoch of the latest save.
    """
    return torch.tensor([float(stop), *announced], dtype=torch.float64)


def read_answer(head: Tensor) -> tuple[bool, tuple[int, int]]:
    """Return what `answer` was given."""
    stop, sequence, epoch = head.tolist()
    return bool(stop), (int(sequence), int(epoch))


def share_text(text: str, accelerator: Accelerator) -> str:
    """Return the main process's text on every process (a collective; up to 1,000 bytes)."""
    # As bytes: collectives for objects would unpickle whatever comes.
    letters = torch.zeros(1000, dtype=torch.int32, device=accelerator.device)
    if accelerator.is_main_process:
        content = list(text.encode()[:1000])
        letters[: len(content)] = torch.tensor(content, dtype=torch.int32)
    return bytes(broadcast(letters).tolist()).rstrip(b"\0").decode(errors="replace")


def exchange_reports(reports: Sequence[RoundReport], device: torch.device) -> list[RoundReport]:
    """Return the reports of all ranks, in their order (a collective; none or one a rank)."""
    empty = torch.full((len(_FIELDS),), -1.0, dtype=torch.float64, device=device)
    row = encode(reports[0], device) if reports else empty
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [decode(row) for row in rows if row[0] >= 0]


class FusedSum:
    """A vector summed over all ranks, and with it their reports, in one collective.

    Reports travel as bytes behind the vector: integers below 256 are exact in every dtype, and
    nothing but zeros is added to them.

    Args:
        like: A vector as they are summed.
        dtype: What travels.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        self._row = len(_FIELDS) * torch.float64.itemsize
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
        return [decode(row.view(torch.float64)) for row in found.to(torch.uint8).contiguous()]


def plan_tensor(workers: int, device: torch.device) -> Tensor:
    """Return room for an encoded plan, float64 [1 + workers, fields]."""
    return torch.zeros(1 + workers, len(_PLAN_FIELDS), dtype=torch.float64, device=device)


def encode_plan(segment: CurrentPlan, device: torch.device) -> Tensor:
    """Return where a plan begins, in the first row, and each worker's part, in the others."""
    rows = plan_tensor(len(segment.plan.workers), device)
    rows[0, :2] = torch.tensor([segment.first_round, segment.start])
    rows[1:] = torch.tensor([_row(w) for w in segment.plan.workers], dtype=torch.float64)
    return rows


def decode_plan(rows: Tensor, like: Plan) -> CurrentPlan:
    """Return the segment that `encode_plan` was given; what is the run's is taken from `like`.

    Raises:
        ValueError: If the rows are no plan of as many workers.
    """
    if rows.shape != (1 + len(like.workers), len(_PLAN_FIELDS)) or not rows.isfinite().all():
        raise ValueError(f"plan must be of {len(like.workers)} workers, got {list(rows.shape)}")
    first_round, start = (int(value) for value in rows[0, :2].tolist())
    workers = tuple(
        WorkerPlan(*(_KINDS[f.type](value) for f, value in zip(_PLAN_FIELDS, row, strict=True)))
        for row in rows[1:].tolist()
    )
    return CurrentPlan(replace(like, workers=workers), first_round, start)


def _row(worker: WorkerPlan) -> list[float]:
    return [float(getattr(worker, field.name)) for field in _PLAN_FIELDS]


def pairs_with_server(timeout: timedelta) -> dict[int, dist.ProcessGroup]:
    """Return this rank's gloo connections by the other rank: with the server, or with all from it.

    A collective, of which every rank makes every pair in the same order.
    """
    pairs = {
        rank: dist.new_group([SERVER_RANK, rank], backend="gloo", timeout=timeout)
        for rank in range(1, dist.get_world_size())
    }
    own = dist.get_rank()
    return pairs if own == SERVER_RANK else {SERVER_RANK: pairs[own]}


class ControlGroup:
    """Integers that all processes agree on, beside the weights' own process group.

    Args:
        timeout_s: Longest wait for a process.
        heartbeats: Is told of every exchange that this process enters.
    """

    def __init__(self, timeout_s: float, heartbeats: Heartbeats | None = None) -> None:
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
        mine = torch.full((most, len(StepLine._fields)), -1.0, dtype=torch.float64)
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
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._segments: dict[tuple[int, int], CurrentPlan] = {}

    def at(self, epoch: int, round_: int) -> CurrentPlan:
        """Return the plan in force (a collective where it may change; all ranks ask in order)."""
        if self.planner.balance == "none" or not one_of_several():
            return self.planner.at(epoch, round_)
        if (epoch, round_) not in self._segments:
            last = next(iter(self._segments.values()), None)
            if last is None or self.planner.is_boundary(epoch, round_):
                last = self._shared(epoch, round_)
            self._segments = {(epoch, round_): last}
        return self._segments[epoch, round_]

    def _shared(self, epoch: int, round_: int) -> CurrentPlan:
        like = self.planner.current_at(epoch)
        device = torch.device("cuda") if dist.get_backend() == "nccl" else CPU
        rows = plan_tensor(len(like.workers), device)
        if dist.get_rank() == SERVER_RANK:
            segment = self.planner.at(epoch, round_)
            rows = encode_plan(segment, device)
        dist.broadcast(rows, src=SERVER_RANK)
        if dist.get_rank() == SERVER_RANK:
            return segment
        return decode_plan(rows, like)
