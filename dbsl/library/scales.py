"""The weight of a mean loss where each process counts what its own is the mean of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.library.processes import exchange_device, world_size

USED: set[str] = set()  # what loops of this process have called
_AHEAD: dict[dist.ProcessGroup | None, tuple[int, Tensor, dist.Work]] = {}


def mean_scale(
    count: int | Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    ahead: int | Sequence[int] | None = None,
) -> Any:
    """Return n * count / sum of counts: the scale of a loop whose sampler is not this library's.

    The loss of a process is a mean over `count` samples, tokens or pixels, at least 1. The sum is
    taken over the processes of `group` by an all-reduce of two numbers, which every process calls.
    Where several batches make a step, pass the counts of all of them before the first one's
    backward pass. Returned is the scale of each, which has the whole window: do not divide by the
    number of batches as well.

    `ahead` are the counts of the next call, whose all-reduce begins now: that call returns at once.
    `group` are the data-parallel processes; None: all. It is a `SettingError` on every process if a
    count is below 1, and where it is not the one that `ahead` announced.
    """
    USED.add("mean_scale")
    announced, counts, work = _AHEAD.pop(group, None) or _add_up(count, group)
    if work is not None:
        work.wait()
    if ahead is not None:
        _AHEAD[group] = _add_up(ahead, group)
    total, none = counts.tolist()
    if none:
        raise SettingError(
            "count must be at least 1 on every process: a mean over nothing is NaN, "
            f"got {announced} here"
        )
    if announced != count:
        raise SettingError(
            f"count must be {announced}, announced by ahead, got {count}: one is announced at a "
            "time, and none before a loop is left early"
        )
    scales = [world_size(group) * each / total for each in _numbers(count)]
    return scales if isinstance(count, list | tuple) else scales[0]


def _numbers(count: Any) -> list[float]:
    try:
        return [*map(float, count)] if isinstance(count, list | tuple) else [float(count)]
    except (TypeError, ValueError, RuntimeError):
        return [math.nan]


def _add_up(count: Any, group: dist.ProcessGroup | None) -> tuple[Any, Tensor, dist.Work | None]:
    numbers = _numbers(count)
    fits = all(1 <= number < math.inf for number in numbers) and numbers
    counts = torch.tensor([sum(numbers), float(not fits)], dtype=torch.float64)
    if not dist.is_initialized():
        return count, counts, None
    counts = counts.to(exchange_device(group))
    return count, counts, dist.all_reduce(counts, group=group, async_op=True)
