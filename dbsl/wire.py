"""What processes send each other beside weights: reports and plans, as tensors of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.balance import Planner, Segment
from dbsl.plan import Plan, WorkerPlan
from dbsl.server import RoundReport

SERVER_RANK = 0
CPU = torch.device("cpu")
DONE, PUSH, PULL, PLAN = 0.0, 1.0, 2.0, 3.0

_FIELDS = fields(RoundReport)
_PLAN_FIELDS = fields(WorkerPlan)
_KINDS = {"int": int, "float": float, "bool": bool}


def encode(report: RoundReport, device: torch.device) -> Tensor:
    """Return a report as float64 [fields]; integers up to 2**53 stay exact."""
    return torch.tensor(astuple(report), dtype=torch.float64, device=device)


def decode(row: Tensor) -> RoundReport:
    """Return the report that `encode` was given."""
    values = zip(_FIELDS, row.tolist(), strict=True)
    return RoundReport(*(_KINDS[field.type](value) for field, value in values))


def message(kind: float, report: RoundReport | None = None, *, epoch: int = 0) -> Tensor:
    """Return the head of a message, float64 [1 + fields]: a push's report, a plan's epoch."""
    head = torch.zeros(1 + len(_FIELDS), dtype=torch.float64)
    head[0] = kind
    head[1] = epoch
    if report is not None:
        head[1:] = encode(report, CPU)
    return head


def exchange_reports(reports: Sequence[RoundReport], device: torch.device) -> list[RoundReport]:
    """Return the reports of all ranks, in their order (a collective; none or one a rank)."""
    empty = torch.full((len(_FIELDS),), -1.0, dtype=torch.float64, device=device)
    row = encode(reports[0], device) if reports else empty
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [decode(row) for row in rows if row[0] >= 0]


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
    """Return the segment that `encode_plan` was given; what is the run's is taken from `like`."""
    first_round, start = (int(value) for value in rows[0, :2].tolist())
    workers = tuple(
        WorkerPlan(*(_KINDS[f.type](value) for f, value in zip(_PLAN_FIELDS, row, strict=True)))
        for row in rows[1:].tolist()
    )
    return Segment(replace(like, workers=workers), first_round, start)


def _row(worker: WorkerPlan) -> list[float]:
    return [float(getattr(worker, field.name)) for field in _PLAN_FIELDS]


class SharedPlans:
    """The server rank's plans on every rank, for those who meet in each round.

    A plan that follows the machines is decided in one place: two kinds of CPU may round alike
    measurements to unlike plans.
    """

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self._segments: dict[tuple[int, int], Segment] = {}

    def at(self, epoch: int, round_: int) -> Segment:
        """Return the plan in force (a collective where it may change; all ranks ask in order)."""
        if self.planner.balance == "none" or not dist.is_initialized():
            return self.planner.at(epoch, round_)
        if (epoch, round_) not in self._segments:
            last = next(iter(self._segments.values()), None)
            if last is None or self.planner.is_boundary(epoch, round_):
                last = self._shared(epoch, round_)
            self._segments = {(epoch, round_): last}
        return self._segments[epoch, round_]

    def _shared(self, epoch: int, round_: int) -> Segment:
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
