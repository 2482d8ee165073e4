"""The processes that train together: how many there are, and what each of them says."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from dbsl.base.errors import SettingError


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


def gather(mine: Any) -> list[Any]:
    """Return what every process passes, by rank: plain numbers, texts, lists and dicts.

    They travel as JSON. Pickles of other processes are not read.
    """
    if world_size() == 1:
        return [mine]
    device = exchange_device()
    text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8).to(device)
    lengths = torch.zeros(world_size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(lengths, torch.tensor([len(text)], device=device))
    longest = int(lengths.max())
    padded = torch.nn.functional.pad(text, (0, longest - len(text)))
    rows = torch.empty(world_size() * longest, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(rows, padded)
    texts = zip(rows.view(-1, longest).cpu(), lengths.tolist(), strict=True)
    return [json.loads(bytes(row[:length].tolist())) for row, length in texts]


def agreed(name: str, value: str) -> str:
    """Return the value that a process was the first to give a name; nobody waits."""
    if world_size() == 1:
        return value
    store = dist.distributed_c10d._get_default_store()
    return store.compare_set(f"dbsl/{name}", "", value).decode()
