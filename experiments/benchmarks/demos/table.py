"""Rows of a demonstration, kept as they come, and ratios within turns."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dbsl.tools.compare.statistics import interval
from experiments.benchmarks.record import record


class Table:
    """A CSV of runs, which a later call goes on with.

    Args:
        path: The file.
        keys: Columns that tell runs apart; the first is the arm, the last the turn.
        module: The one that makes the runs.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], module: str) -> None:
        self._path, self._keys, self._module = path, keys, module
        self.rows: list[dict[str, Any]] = []
        if path.is_file():
            with path.open(newline="", encoding="utf-8") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, *key: object) -> bool:
        """Whether the run of this key has been made."""
        return any([row[k] for k in self._keys] == list(map(str, key)) for row in self.rows)

    def add(self, *parts: Any) -> None:
        """Keep a run: its key, and last what was measured."""
        *key, found = parts
        row = dict(zip(self._keys, map(str, key), strict=True))
        row |= {name: f"{value:.4g}" for name, value in found.items()}
        self.rows.append(row)
        record(self._path, self.rows, f"python -m {self._module}")

    def report(self, column: str, control: str, within: Mapping[str, str] | None = None) -> None:
        """Print each arm's mean, and its ratio to the control's within turns, 95 % intervals."""
        arm, turn = self._keys[0], self._keys[-1]
        rows = [r for r in self.rows if all(r[k] == v for k, v in (within or {}).items())]
        of_control = {row[turn]: float(row[column]) for row in rows if row[arm] == control}
        for name in dict.fromkeys(row[arm] for row in rows):
            mine = [row for row in rows if row[arm] == name]
            ratios = [
                float(row[column]) / of_control[row[turn]]
                for row in mine
                if row[turn] in of_control
            ]
            values, accuracies = ([float(r[c]) for r in mine] for c in (column, "accuracy"))
            print(
                f"{name:>20}  {column} {mean_and_interval(values)}  over {control} "
                f"{mean_and_interval(ratios)}  accuracy {mean_and_interval(accuracies)}  "
                f"n={len(mine)}"
            )


def mean_and_interval(values: list[float]) -> str:
    """Return mean and half the 95 % interval (Student's t); of one value the value alone."""
    if not values:
        return "none"
    found = interval(values)
    return f"{found.mean:.3g}" + (f" +- {found.half:.2g}" if found.count > 1 else "")
