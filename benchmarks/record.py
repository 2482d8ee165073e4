"""Rows of a benchmark into a CSV, each with the machine and the versions it was measured on."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dbsl.profile.setup import device_name


def record(path: Path, rows: Sequence[Mapping[str, Any]], command: str) -> None:
    """Write rows to a CSV and print them as a table.

    Rows that have been read from such a file keep their machine and versions.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("torch", "timm")},
        "date": date.today().isoformat(),
        "command": command,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*rows[0], *where])))
        writer.writeheader()
        writer.writerows({**where, **row} for row in rows)
    names = [name for name in rows[0] if name not in where]
    widths = [max(len(name), *(len(str(row[name])) for row in rows)) for name in names]
    for line in (names, *([row[name] for name in names] for row in rows)):
        print("  ".join(f"{value!s:>{w}}" for value, w in zip(line, widths, strict=True)))
    print(f"written to {path}")
