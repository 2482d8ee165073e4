"""What checkpoints cost: ``python -m experiments.benchmarks.checkpoint_cost``.

ResNet-18, 100 classes, 4 simulated workers, 2,000 CIFAR-100 images an epoch (give their folder with
--dataset). Every second epoch is followed by a save, which is written beside the next one; epochs
with and without are compared in one run. About 6 minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Train, and write experiments/results/checkpoint_cost.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="uoft-cs/cifar100")
    parser.add_argument("--train-samples", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=13)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        command = [sys.executable, "train.py", "--dataset", arguments.dataset, "--resolutions"]
        command += ["32", "--train-samples", str(arguments.train_samples), "--eval-samples", "100"]
        command += ["--epochs", str(arguments.epochs), "--large-batch-size", "64"]
        command += ["--small-workers", "1", "--slope", "0.01", "--intercept", "0.05"]
        command += ["--report-to", "none", "--checkpoint-every", "2", "--keep-checkpoints", "99"]
        command += ["--output-dir", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        ends = [0.0, *(r["train_time_s"] for r in rows if r["event"] == "eval")]
        manifests = [
            json.loads(path.read_text())["manifest"]
            for path in sorted(folder.glob("checkpoints/*/manifest.json"))
        ]
    # Seconds of epochs 2, 3, ...: a save comes after the second, fourth, ..., so that every odd
    # one has a save to be written beside it.
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    saving = {k: seconds[k] for k in range(2, len(seconds)) if k % 2 == 0}
    # Each with the two beside it, whose machine was as noisy.
    ratios = [
        s / mean([seconds[k - 1], seconds[min(k + 1, len(seconds) - 1)]])
        for k, s in saving.items()
        if k + 1 < len(seconds)
    ]
    row = {
        "samples": arguments.train_samples,
        "epoch_s": f"{median(seconds[1:]):.2f}",
        "saves": len(manifests),
        "mib": round(sum(f["bytes"] for f in manifests[-1]["files"].values()) / 2**20),
        "copy_s": f"{median(m['seconds']['copy'] for m in manifests):.3f}",
        "write_s": f"{median(m['seconds']['write'] for m in manifests):.2f}",
        "copy_share": f"{median(m['seconds']['copy'] for m in manifests) / median(seconds):.4f}",
        "epoch_ratio_median": f"{median(ratios):.4f}",
        "epoch_ratio_mean": f"{mean(ratios):.4f}",
        "epoch_ratios": " ".join(f"{ratio:.3f}" for ratio in ratios),
    }
    record(
        ROOT / "experiments/results/checkpoint_cost.csv",
        [row],
        "python -m experiments.benchmarks.checkpoint_cost",
    )


if __name__ == "__main__":
    main()
