"""Runs of train.py for the stages: their flags, how to start them, what they leave."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.runner import ROOT

# What makes each mode what it is; `equal` of those whose workers share every step's batch.
MODES: dict[str, tuple[str, str]] = {
    "bsp": ("dual", "--sync bsp --rounds-per-epoch 2"),
    "step": ("equal", "--sync step"),
    "asp": ("dual", "--sync asp --rounds-per-epoch 2"),
    "ssp": ("dual", "--sync ssp --rounds-per-epoch 2"),
    "gradients": ("equal", "--push gradients"),
    "delta": ("dual", "--sync bsp --merge delta --rounds-per-epoch 2"),
    "fp16": ("dual", "--mixed-precision fp16"),
    "float32": ("dual", "--mixed-precision no"),
    "paper": ("dual", "--augment paper"),
    "mixup": ("dual", "--mixup 0.2"),
}
BATCHES = "--large-batch-size {} --small-workers 3 --slope 0.00003 --intercept 0.003"
TINY = "--large-batch-size 10 --small-workers 1 --slope 0.001 --intercept 0.01"


def common_flags(settings: Settings, folder: Path) -> list[str]:
    """Return the data, the model and the place of a run; tiny in a dry one.

    Of two epochs the first is at the lower resolution.
    """
    flags = ["--output-dir", str(folder), "--report-to", "none", "--checkpoint-every", "0"]
    flags += ["--dataset", settings.data, "--seed", "0", "--schedule", "progressive"]
    if settings.dry:
        flags += ["--model", "test_resnet", "--train-samples", "240", "--eval-samples", "40"]
        flags += ["--resolutions", "16,24", "--cpu-threads", "1", "--lr", "0.02"]
    else:
        flags += ["--model", "resnet18", "--resolutions", "24,32", "--train-samples", "6000"]
    return flags


def dual_batch_flags(settings: Settings) -> list[str]:
    """Return batch sizes of workers: some small, step times not measured."""
    return TINY.split() if settings.dry else BATCHES.format(500).split()


def equal_batch_flags(settings: Settings, workers: int = 4) -> list[str]:
    """Return one batch size for all workers, for modes with joint steps or pushed gradients."""
    size = "8" if settings.dry else "125"
    flags = f"--local-batch-sizes {','.join([size] * workers)} --slope 0.001 --intercept 0.01"
    return flags.split()


def train_here(flags: Sequence[str]) -> None:
    """Run train.py in this process, with the traceback of whatever it raises."""
    import train
    from dbsl.config.parse import parse_config

    train.main(parse_config(train.Config, list(flags)))


def run(
    command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
) -> int:
    """Run ``python ARGUMENTS``; return the status, which must be among `allowed` (0)."""
    allowed = options.pop("allowed", (0,))
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env={**os.environ, **(environment or {})}, **options
    )
    if done.returncode not in allowed:
        raise RuntimeError(f"python {' '.join(command)} ended with status {done.returncode}")
    return done.returncode


def results_of(folder: Path) -> dict[str, Any]:
    """Return what a run has in its metrics so far, and whether all its losses are finite."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    evaluations = [row for row in rows if row["event"] == "eval"]
    rounds = [row for row in rows if row["event"] == "round"]
    losses: dict[int, list[tuple[float, int]]] = {}
    for row in rounds:
        loss = row.get("loss")
        loss = float(loss) if loss is not None else math.nan
        losses.setdefault(row["epoch"], []).append((loss, row["samples"]))
    means = [
        sum(loss * n for loss, n in pairs) / max(1, sum(n for _, n in pairs))
        for _, pairs in sorted(losses.items())
    ]
    held = [row["loss"] for row in evaluations]
    finite = [isinstance(x, int | float) and math.isfinite(x) for x in (*means, *held)]
    train_s = evaluations[-1]["train_time_s"] if evaluations else None
    return {
        "epochs": evaluations[-1]["epoch"] if evaluations else 0,
        "finite": bool(finite) and all(finite),
        "train_loss": [_short(x) for x in means],
        "eval_loss": [_short(x) for x in held],
        "accuracy": [_short(row["accuracy"]) for row in evaluations],
        "train_s": _short(train_s),
        "images": sum(row["samples"] for row in rounds),
    }


def model_hash(folder: Path) -> str:
    """Return a hash of a run's final weights."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def peak_memory() -> dict[str, int]:
    """Return the peaks of CUDA's allocator in this process, in MiB; none without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return {}
    return {
        "peak_allocated_mib": torch.cuda.max_memory_allocated() >> 20,
        "peak_reserved_mib": torch.cuda.max_memory_reserved() >> 20,
    }


def _short(value: Any) -> Any:
    """Return a number of six digits; JSON has no NaN."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
