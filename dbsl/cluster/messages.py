"""What processes send each other beside weights: reports and plans, as tensors of fixed shape.

Nothing is pickled, and what comes is checked. Here is no communication.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from enum import IntEnum

import torch
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.plan.turns import RoundReport, StepLine
from dbsl.plan.types import CurrentPlan, Plan, WorkerPlan

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


def encode_plan(segment: CurrentPlan, device: torch.device) -> Tensor:
    """Return where a plan begins, in the first row, and each worker's part, in the others."""
    rows = plan_tensor(len(segment.plan.workers), device)
    rows[0, :2] = torch.tensor([segment.first_round, segment.start])
    rows[1:] = torch.tensor([_row(w) for w in segment.plan.workers], dtype=torch.float64)
    return rows


def decode_plan(rows: Tensor, like: Plan) -> CurrentPlan:
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
    return CurrentPlan(replace(like, workers=workers), first_round, start)


def _row(worker: WorkerPlan) -> list[float]:
    return [float(getattr(worker, field.name)) for field in _PLAN_FIELDS]
