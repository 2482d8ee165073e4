"""Seconds per epoch against the number of workers, simulated and real: the same steps in all.

A small network on small batches, so that what workers cost beside their steps shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
SAMPLES, BATCH, EPOCHS = 4000, 4, 4


def rows(dataset: str, simulated: list[int], real: list[int]) -> list[dict[str, Any]]:
    """Train with each number of workers; return a row for each."""
    found = []
    for sync in ("bsp", "asp"):
        for kind, counts in (("simulated", simulated), ("real", real)):
            base = None
            for workers in counts:
                seconds = _epochs(dataset, sync, workers, processes=kind == "real")
                base = base or median(seconds)
                found.append(
                    {
                        "part": "workers",
                        "what": f"{sync}, {kind}",
                        "workers": workers,
                        "median": f"{median(seconds):.2f}",
                        "low": f"{min(seconds):.2f}",
                        "high": f"{max(seconds):.2f}",
                        "unit": "s/epoch",
                        "over_fewest": f"{median(seconds) / base:.3f}",
                    }
                )
    return found


def _epochs(dataset: str, sync: str, workers: int, *, processes: bool) -> list[float]:
    """Return the seconds of each epoch but the first."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable]
        if processes and workers > 1:
            command += ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(workers)]
        command += ["train.py", "--dataset", dataset, "--train-samples", str(SAMPLES)]
        command += ["--model", "test_resnet", "--resolutions", "32", "--sync", sync]
        command += ["--local-batch-sizes", ",".join([str(BATCH)] * workers)]
        command += ["--epochs", str(EPOCHS), "--eval-samples", "100"]
        command += ["--slope", "0.001", "--intercept", "0.001", "--lr", "0.01"]
        command += ["--cpu-threads", "1", "--mixed-precision", "no", "--report-to", "none"]
        command += ["--checkpoint-every", "0", "--output-dir", f"{scratch}/run"]
        if not processes or workers == 1:
            command += ["--workers", str(workers)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=900,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        lines = Path(scratch, "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    ends = [r["train_time_s"] for r in records if r["event"] == "eval"]
    return [after - before for before, after in pairwise(ends)]
