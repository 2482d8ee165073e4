"""What all processes do together: sums, agreements, and plans and reports that all of them get."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor

from dbsl.base.errors import one_of_several
from dbsl.cluster.heartbeats import Heartbeats
from dbsl.cluster.messages import (
    CPU,
    ROW,
    SERVER_RANK,
    decode,
    decode_plan,
    encode,
    encode_lines,
    encode_plan,
    line_rows,
    plan_tensor,
    with_lines,
)
from dbsl.plan.follow import Planner
from dbsl.plan.turns import RoundReport
from dbsl.plan.types import CurrentPlan


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
        self._last: tuple[tuple[int, int] | None, CurrentPlan | None] = (None, None)

    def at(self, epoch: int, round_: int) -> CurrentPlan:
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

    def _shared(self, epoch: int, round_: int) -> CurrentPlan:
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
