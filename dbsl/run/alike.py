"""Processes of one run have the same settings and the same code, or none of them begins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

from dbsl.base.errors import SettingError
from dbsl.base.words import as_given
from dbsl.cluster.collectives import share_from
from dbsl.run.accelerator import launched_precision
from dbsl.run.code import Code, unlike
from dbsl.run.config import RunConfig
from dbsl.run.resolved import RESOLVED

# What each node has by its own cores. It decides on no exchange, and what was found out is compared
# as the settings that it is.
_OF_A_NODE = ("cpu_threads", "loader_workers", RESOLVED)


def check_alike(config: RunConfig, code: Code, state: PartialState) -> None:
    """Compare settings and code of all processes (a collective).

    It is their first exchange: which others follow is for the settings to say.

    Raises:
        SettingError: On every process, if those of one are not rank 0's.
    """
    if state.num_processes == 1:
        return
    own = _described(config, code)
    first = json.loads(share_from(0, json.dumps(own), state.device))
    found = difference(first, own, "rank 0", f"rank {state.process_index}")
    own_flag = torch.tensor(found is not None, device=state.device).int()
    flags = [torch.empty_like(own_flag) for _ in range(state.num_processes)]
    dist.all_gather(flags, own_flag)
    others = [rank for rank, flag in enumerate(flags) if flag]
    if others:
        raise SettingError(share_from(others[0], found or "", state.device))


def difference(
    first: Mapping[str, Any], own: Mapping[str, Any], there: str, here: str
) -> str | None:
    """Return in one line what is not the same in two processes; None: nothing."""
    before = first["settings"]
    names = [n for n, value in own["settings"].items() if before.get(n) != value]
    if names:
        more = f" (also different: {', '.join(names[1:])})" if names[1:] else ""
        what, one, other = names[0], before.get(names[0]), own["settings"][names[0]]
    elif own["script"] != first["script"]:
        what, one, other, more = "the script", first["script"], own["script"], ""
    elif files := unlike(first["code"], own["code"]):
        return f"code must be the same in all processes, got another {files} on {here} than {there}"
    else:
        return None
    return (
        f"{what} must be the same in all processes, got {one or 'none'} on {there}, "
        f"{other or 'none'} on {here}{more}"
    )


def _described(config: RunConfig, code: Code) -> dict[str, Any]:
    settings = {n: as_given(v) for n, v in asdict(config).items() if n not in _OF_A_NODE}
    if config.mixed_precision == "auto":
        settings["mixed_precision"] = launched_precision() or "auto"
    return {"settings": settings, "script": code.script, "code": dict(code.sums)}
