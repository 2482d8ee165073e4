"""Rows of a benchmark into a CSV, each with the machine and the versions it was measured on."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from dbsl.base.files import write_text
from dbsl.profile.timing import device_name


def record(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    command: str,
    *,
    keep: Callable[[Mapping[str, str]], bool] | None = None,
) -> None:
    """Write rows to a CSV and print them as a table.

    Rows that have been read from such a file keep their machine and versions.

    Args:
        path: The file.
        rows: As measured; a row may lack columns of others.
        command: That measures them.
        keep: Says which rows the file keeps, if it is there. New ones stand where the first of the
            others stood. None: it keeps none.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        **{name: version(name) for name in ("torch", "timm")},
        "date": date.today().isoformat(),
        "command": command,
    }
    if keep is not None and path.exists():
        rows = _in_place(rows, path, keep)
    names = list(dict.fromkeys(name for row in rows for name in row if name not in where))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*names, *where])
    writer.writeheader()
    writer.writerows({**where, **row} for row in rows)
    write_text(path, text.getvalue())
    table = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(f"{value:>{w}}" for value, w in zip(line, widths, strict=True)))
    print(f"written to {path}")


def _in_place(
    rows: Sequence[Mapping[str, Any]], path: Path, keep: Callable[[Mapping[str, str]], bool]
) -> list[Mapping[str, Any]]:
    """Return a file's rows with new ones in place of those that it does not keep."""
    with path.open(newline="", encoding="utf-8") as file:
        before = list(csv.DictReader(file))
    first = next((place for place, row in enumerate(before) if not keep(row)), len(before))
    return [*before[:first], *rows, *filter(keep, before[first:])]
