"""The processes that train together: their number, what they exchange, and their counts."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dbsl.base.errors import SettingError, require
from dbsl.cluster.wire import gather_texts

USED: set[str] = set()  # what this process's loops have called
_AHEAD: dict[dist.ProcessGroup | None, tuple[int, Tensor, dist.Work]] = {}
_by_itself = False  # whether `mean_scale` counts only this process


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes; without a process group there must be only one."""
    if dist.is_initialized():
        return dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            "the process group must be there first (init_process_group or Accelerator()), got none "
            f"and WORLD_SIZE={os.environ['WORLD_SIZE']}"
        )
    return 1


def exchange_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device on which a group's processes exchange small tensors."""
    backend = dist.get_backend(group) if dist.is_initialized() else ""
    return "cuda" if "nccl" in backend else "xpu" if "xccl" in backend else "cpu"


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every process passes, by rank: plain numbers, texts, lists and dicts.

    Values travel as JSON. Pickles from other processes are not read.
    """
    if world_size(group) == 1:
        return [mine]
    texts = gather_texts(json.dumps(mine), exchange_device(group), group)
    return [*map(json.loads, texts)]


def compare(
    mine: Mapping[str, Any], problem: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Raise on every process the first process's problem, or else name a value that differs."""
    rows = gather([problem, {name: str(value) for name, value in mine.items()}], group)
    if found := [said for said, _ in rows if said]:
        raise SettingError(found[0])
    for name in mine:
        first, *others = (values.get(name) for _, values in rows)
        for rank, value in enumerate(others, 1):
            must = f"{name} must be the same on every process"
            require(value == first, must, f"{first} on rank 0 and {value} on rank {rank}")


def agreed(name: str, value: str) -> str:
    """Return the first value that any process gave a name, without waiting."""
    if world_size() == 1:
        return value
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(f"dbsl/{name}", "", value).decode()


def digest(what: Any) -> str:
    """Return a short hash, to compare things by."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


@contextmanager
def by_itself() -> Iterator[None]:
    """Have `mean_scale` count only this process inside, where the others do not call it."""
    global _by_itself
    _by_itself = True
    try:
        yield
    finally:
        _by_itself = False


def mean_scale(
    count: int | Sequence[int],
    group: dist.ProcessGroup | None = None,
    *,
    ahead: int | Sequence[int] | None = None,
) -> Any:
    """Return n * count / sum of counts: the loss scale for a loop without this library's sampler.

    The loss of a process is a mean over `count` samples, tokens or pixels, at least 1. Every
    process must call this: an all-reduce of two numbers sums over the processes of `group`.
    If several batches make a step, pass the counts of all of them before the first one's
    backward pass. The result is a scale for each batch; it covers the whole window, so do not
    also divide by the number of batches.

    `ahead` has the counts of the next call, which returns at once: its all-reduce begins now.
    `group` has the data-parallel processes; None: all. A count below 1 raises `SettingError` on
    every process. A count other than the one `ahead` announced raises it on that process.
    """
    USED.add("mean_scale")
    known = None if _by_itself else _AHEAD.pop(group, None)
    announced, counts, work = known or _add_up(count, group)
    if work is not None:
        work.wait()
    if ahead is not None and not _by_itself:
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
    processes = 1 if _by_itself else world_size(group)
    scales = [processes * each / total for each in _numbers(count)]
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
    if _by_itself or not dist.is_initialized():
        return count, counts, None
    counts = counts.to(exchange_device(group))
    return count, counts, dist.all_reduce(counts, group=group, async_op=True)
