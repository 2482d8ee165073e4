"""Breaks runs and writes experiments/results/faults.csv."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from experiments.benchmarks import faults
from experiments.benchmarks.faults import files, processes, stops
from experiments.benchmarks.faults.run import Row
from experiments.benchmarks.kills import ROOT
from experiments.benchmarks.record import record

FAULTS = (
    processes.worker_dies,
    processes.worker_dies_at_barrier,
    processes.server_dies,
    processes.launcher_restarts,
    stops.asked_to_stop,
    stops.not_finite,
    files.damaged_checkpoint,
    files.no_room,
    files.bad_images,
)


def main() -> None:
    """Run all faults, or those whose function's name contains a word."""
    parser = argparse.ArgumentParser(description=faults.__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            if only in fault.__name__:
                for row in fault(Path(scratch)):
                    rows.append(row)
                    print(json.dumps(vars(row)), flush=True)
    measured = {(row.fault, row.mode) for row in rows}
    record(
        ROOT / "experiments/results/faults.csv",
        [vars(row) for row in rows],
        "python -m experiments.benchmarks.faults",
        keep=(lambda row: (row["fault"], row["mode"]) not in measured) if only else None,
    )
    sys.exit(not all(row.kept for row in rows))


if __name__ == "__main__":
    main()
