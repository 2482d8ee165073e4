"""Plays all combinations and writes experiments/results/coverage.csv."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from experiments.benchmarks import coverage
from experiments.benchmarks.coverage.cases import BALANCES, SYNCS, Case, cases
from experiments.benchmarks.coverage.check import check_drawn
from experiments.benchmarks.record import record

RESULTS = Path(__file__).resolve().parents[3] / "experiments/results/coverage.csv"
# Columns of the table and what they sum up of what came of the cases.
_SUMS = {
    "rounds": "turns",
    "plan_changes": "changes",
    "stops": "stops",
    "resized": "resized",
    "workers_lost": "lost_workers",
    "ended_by_loss": "ended",
    "samples": "expected",
    "trained": "trained",
    "counted_as_lost": "lost",
}


def measure(sync: str, balance: str, number: int, start: int) -> dict[str, object]:
    """Play random cases of one kind, and return a row of what came of them."""
    total, began = Counter(), time.perf_counter()

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(sync, balance))
    def property_(case: Case) -> None:
        played = check_drawn(case)
        total["cases"] += 1
        total["in_blocks"] += bool(case.groups)
        if played.ended:  # before its end: what it would have trained on is not counted
            played.expected = played.trained + played.lost
        for column, name in _SUMS.items():
            total[column] += getattr(played, name)

    property_()
    row = {"sync": sync, "balance": balance}
    row |= {column: total[column] for column in ("cases", "in_blocks", *_SUMS)}
    row |= {"twice": 0, "miscounted": 0}  # it would not have come so far
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Play all combinations and write the table."""
    parser = argparse.ArgumentParser(description=coverage.__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    each = -(-arguments.cases // (len(SYNCS) * len(BALANCES)))
    rows = []
    for sync in SYNCS:
        for balance in BALANCES:
            rows.append(measure(sync, balance, each, arguments.seed))
            print(json.dumps(rows[-1]), flush=True)
    record(RESULTS, rows, f"python -m experiments.benchmarks.coverage --cases {arguments.cases}")


if __name__ == "__main__":
    main()
