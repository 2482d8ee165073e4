"""Rows of the CSV files in results/, and their numbers as tables have them."""

from __future__ import annotations

import csv
import statistics
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path

from scipy.stats import t as student

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"

Rows = list[dict[str, str]]


def read(path: Path) -> Rows:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def fixed(number: str, digits: int, sign: str = "") -> str:
    """Return a number of a CSV file in decimals, halves rounded up; with `sign` "+" it has one."""
    step = Decimal(1).scaleb(-digits)
    return f"{Decimal(number).quantize(step, ROUND_HALF_UP):{sign}f}"


def interval(values: list[float], digits: int) -> str:
    """Return the mean and half the 95 % interval (Student's t), in decimals."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"
