"""What a quorum costs where nobody is ever late: seconds of a round beside the plain barrier's.

    python -m benchmarks.quorum_cost

Runs of train.py in 2 and 4 processes on this machine, by turns with `--sync bsp` alone, which
merges by an all-reduce, and with `--min-workers`, whose pushes go to a server on rank 0. A round is
one small step, so that little but the exchange is measured. Seconds are those of training, without
evaluations, from the first epoch's end to the last one's. What a run is compared with is the other
run of its turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.kills import ROOT
from benchmarks.ranks import fork_rank, free_port, preload
from benchmarks.record import record
from dbsl.log.rows import read_metrics
from dbsl.model import build_model

MODELS = ("test_resnet", "resnet10t")
PROCESSES = (2, 4)
ROUNDS, EPOCHS, BATCH = 20, 6, 4
ARMS = {"bsp": "", "quorum": "--min-workers {least} --grace-seconds 60"}


def seconds_per_round(model: str, processes: int, arm: str, folder: Path) -> float:
    """Train, and return the mean seconds of a round after the first epoch."""
    flags = (
        f"--model {model} --train-samples {processes * ROUNDS * BATCH} --eval-samples 20 "
        f"--resolutions 32 --large-batch-size {BATCH} --rounds-per-epoch {ROUNDS} "
        f"--epochs {EPOCHS} --slope 0.001 --intercept 0.01 --report-to none --cpu-threads 1 "
        f"--no-noise-scale --no-save-best --keep-checkpoints 0 --output-dir {folder} "
        + ARMS[arm].format(least=processes - 1)
    )
    shutil.rmtree(folder, ignore_errors=True)
    port = free_port()
    children = [fork_rank(flags.split(), rank, processes, port) for rank in range(processes)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        raise RuntimeError(f"{arm} of {processes} processes ended with {statuses}")
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if missed := summary.get("missed_samples", 0):
        raise RuntimeError(f"nobody was to be late, got {missed} missed samples")
    events = read_metrics(folder / "metrics.jsonl")
    ends = [event["train_time_s"] for event in events if event["event"] == "eval"]
    return (ends[-1] - ends[0]) / ROUNDS / (len(ends) - 1)


def measure(model: str, processes: int, turns: int, folder: Path) -> dict[str, Any]:
    """Let both arms take turns, each first in every other one; return a row."""
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for turn in range(turns):
        for arm in sorted(ARMS, reverse=turn % 2 == 1):
            seconds[arm].append(seconds_per_round(model, processes, arm, folder))
    pairs = list(zip(seconds["bsp"], seconds["quorum"], strict=True))
    ratios = sorted(quorum / bsp for bsp, quorum in pairs)
    built = build_model(model, 10, final_resolution=32)
    return {
        "model": model,
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "processes": processes,
        "turns": turns,
        "bsp_s": f"{median(seconds['bsp']):.4g}",
        "quorum_s": f"{median(seconds['quorum']):.4g}",
        "added_s": f"{median(quorum - bsp for bsp, quorum in pairs):.3g}",
        "ratio": f"{median(ratios):.3f}",
        "ratio_low": f"{ratios[0]:.3f}",
        "ratio_high": f"{ratios[-1]:.3f}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> None:
    """Measure all and write results/quorum_cost.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--note", default="", help="what else the machine did")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in MODELS:
            for processes in PROCESSES:
                row = measure(model, processes, arguments.turns, Path(scratch) / "run")
                rows.append(row | {"note": arguments.note})
                print(json.dumps(rows[-1]), flush=True)
    record(ROOT / "results/quorum_cost.csv", rows, "python -m benchmarks.quorum_cost")


if __name__ == "__main__":
    main()
