"""The processes that train together: how many there are, and what each of them says."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from dbsl.base.errors import SettingError, require
from dbsl.cluster.wire import gather_texts


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes; without a process group there must be one alone."""
    if dist.is_initialized():
        return dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            "the process group must be there first (init_process_group or Accelerator()), got none "
            f"and WORLD_SIZE={os.environ['WORLD_SIZE']}"
        )
    return 1


def exchange_device(group: dist.ProcessGroup | None = None) -> str:
    """Return the device that small tensors of a group's processes travel on."""
    backend = dist.get_backend(group) if dist.is_initialized() else ""
    return "cuda" if "nccl" in backend else "xpu" if "xccl" in backend else "cpu"


def gather(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return what every process passes, by rank: plain numbers, texts, lists and dicts.

    They travel as JSON. Pickles of other processes are not read.
    """
    if world_size(group) == 1:
        return [mine]
    texts = gather_texts(json.dumps(mine), exchange_device(group), group)
    return [*map(json.loads, texts)]


def compare(
    mine: Mapping[str, Any], problem: str = "", group: dist.ProcessGroup | None = None
) -> None:
    """Refuse on every process what is not alike on all; before that, the first one's problem."""
    rows = gather([problem, {name: str(value) for name, value in mine.items()}], group)
    if found := [said for said, _ in rows if said]:
        raise SettingError(found[0])
    for name in mine:
        first, *others = (values.get(name) for _, values in rows)
        for rank, value in enumerate(others, 1):
            must = f"{name} must be the same on every process"
            require(value == first, must, f"{first} on rank 0 and {value} on rank {rank}")


def agreed(name: str, value: str) -> str:
    """Return the value that a process was the first to give a name; nobody waits."""
    if world_size() == 1:
        return value
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(f"dbsl/{name}", "", value).decode()


def digest(what: Any) -> str:
    """Return a short text that tells whether things are the same."""
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
