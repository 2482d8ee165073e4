"""Rows of a demonstration, kept as they come."""

from __future__ import annotations

import csv
from pathlib import Path
from threading import Lock
from typing import Any

from experiments.benchmarks.record import record


class Table:
    """A CSV of runs, which a later call goes on with.

    Args:
        path: The file.
        keys: Columns that tell runs apart.
        module: The one that makes the runs.
    """

    def __init__(self, path: Path, keys: tuple[str, ...], module: str) -> None:
        self._path, self._keys, self._module = path, keys, module
        self._lock = Lock()  # runs may end in several threads
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
        with self._lock:
            self.rows.append(row)
            record(self._path, self.rows, f"python -m {self._module}")
