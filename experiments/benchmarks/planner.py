"""Seconds and memory of plans for many workers: ``python -m experiments.benchmarks.planner``.

Each case runs in a process of its own, so that its peak memory is its own; the largest has 100,000
workers. Seconds are the median of five plans.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dbsl.plan.solve import TimeModel, plan_dual_batch

WORKERS = (10, 1_000, 100_000)


def case(workers: int, unequal: bool) -> dict[str, object]:
    """Plan for this many workers, a quarter of them small, and return what it took."""
    rng = np.random.default_rng(0)
    machines, limits = TimeModel(5e-4, 0.015), 256
    if unequal:
        slopes, intercepts = rng.uniform(1e-4, 1e-3, workers), rng.uniform(5e-3, 5e-2, workers)
        machines = [TimeModel(a, b) for a, b in zip(slopes, intercepts, strict=True)]
        limits = rng.integers(64, 512, workers)
    taken = []
    for _ in range(5):
        began = time.perf_counter()
        plan = plan_dual_batch(2_000 * workers, workers, workers // 4, limits, machines)
        taken.append(time.perf_counter() - began)
    assert sum(w.samples for w in plan.workers) == 2_000 * workers
    # Not getrusage: its peak starts with that of the process which started this one.
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {
        "workers": workers,
        "machines": "unequal" if unequal else "equal",
        "plan_s": f"{statistics.median(taken):.5f}",
        "peak_mib": round(peak_kib / 1024),
    }


def main() -> None:
    """Run all cases and write experiments/results/planner.csv."""
    from experiments.benchmarks.record import record

    rows = []
    for workers in WORKERS:
        for unequal in ("0", "1"):
            command = [
                sys.executable,
                "-m",
                "experiments.benchmarks.planner",
                str(workers),
                unequal,
            ]
            rows.append(json.loads(subprocess.check_output(command, text=True)))
    record(
        Path("experiments/results/planner.csv"), rows, "python -m experiments.benchmarks.planner"
    )


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(case(int(sys.argv[1]), sys.argv[2] == "1")))
    else:
        main()
