"""Real processes, one of them slowed 3 times: ``python -m experiments.benchmarks.slowed``.

Two processes train ResNet-18 on the digits. The first epochs of a run keep the equal split, then
the plan follows the measured times, so that both are timed in one run. ``--sync step`` moves
samples of each global batch, ``--sync bsp`` shares of the epoch. About four minutes on two cores.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from dbsl.log.rows import read_metrics

EQUAL, EPOCHS = 3, 8  # epochs of the equal split, of which the first warms up; epochs in all
ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *flags: str) -> list[dict]:
    """Train in two processes and return the records of metrics.jsonl."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "train.py", "--output-dir", str(folder)]
    command += ["--slowdown", "0:3", "--balance-every", str(EQUAL), "--epochs", str(EPOCHS)]
    command += ["--resolutions", "16", "--lr-milestones", str(EPOCHS - 1), "--report-to", "none"]
    command += ["--large-batch-size", "32", *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, stdout=subprocess.DEVNULL)
    return read_metrics(folder / "metrics.jsonl")


def row(metrics: list[dict], sync: str) -> dict[str, object]:
    """Return the epoch times and idle shares before and after the plan followed the times."""
    ends = [0.0, *(r["train_time_s"] for r in metrics if r["event"] == "eval")]
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    idle = [mean(r["workers_idle_time_share"].values()) for r in metrics if r["event"] == "times"]
    last = [r for r in metrics if r["event"] == "round" and r["epoch"] == EPOCHS - 1]
    before, after = slice(1, EQUAL), slice(EQUAL, EPOCHS)
    return {
        "sync": sync,
        "equal_epoch_s": f"{mean(seconds[before]):.2f}",
        "balanced_epoch_s": f"{mean(seconds[after]):.2f}",
        "ratio": f"{mean(seconds[after]) / mean(seconds[before]):.3f}",
        "idle_before": f"{mean(idle[before]):.3f}",
        "idle_after": f"{mean(idle[after]):.3f}",
        "batches_after": " ".join(str(r["local_batch_size"]) for r in last),
        "samples_after": " ".join(str(r["samples"]) for r in last),
    }


def main() -> None:
    """Run both and write experiments/results/slowed.csv."""
    from experiments.benchmarks.record import record

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for sync in ("step", "bsp"):
            metrics = run(Path(folder) / sync, "--sync", sync, "--balance", "dynamic")
            rows.append(row(metrics, sync))
    record(Path("experiments/results/slowed.csv"), rows, "python -m experiments.benchmarks.slowed")


if __name__ == "__main__":
    main()
