"""Rows of the CSV files in experiments/results/, and their numbers as tables have them."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from experiments.compare.statistics import interval

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments/results"

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fixed(number: str, digits: int, sign: str = "") -> str:
    """Return a number of a CSV file in decimals, halves rounded up; with `sign` "+" it has one."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(number).quantize(step, ROUND_HALF_UP):{sign}f}"


def with_interval(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Return the mean and half its 95 % interval, in decimals; of one value the value alone.

    With `sign` "+" the mean has one. Of no values it is nothing.
    """
    if not values:
        return ""
    found = interval(values)
    half = f" ± {found.half:.{digits}f}" if found.count > 1 else ""
    return f"{found.mean:{sign}.{digits}f}{half}"
