"""Stages that train: an arm of the paper, one seed each.

A stage has to fit into one call. ResNet-18's weights alone are 45 MB, more than what a call may
bring back in a file, so that an unfinished run can only be taken up where it lies: on a machine
that is still held. It saves every two minutes and shortly before its time is up.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.runner import ROOT
from experiments.benchmarks.gpu.runs import peak_memory, results_of, train_here

ARMS = {  # of the arXiv paper's CIFAR-100 setting: the file, and flags
    "all_large": "configs/cifar100/all_large.yaml",
    "dual": "configs/cifar100/dual.yaml",
    "ddp512": "configs/cifar100/ddp_512.yaml",
    "hybrid": "configs/cifar100/hybrid.yaml",
}
_SAVE_S = 25.0  # before the end of a stage, for a save


def train_arm(settings: Settings, arm: str, seed: int) -> Iterator[dict[str, Any]]:
    """Train one arm with one seed, from where it was stopped if it lies in the work folder."""
    from dbsl.base.errors import RunStopped

    folder = Path(settings.work) / f"{arm}-seed{seed}"
    own = arm_flags(settings, arm, seed)
    own += ["--output-dir", str(folder), "--resume", "auto", "--checkpoint-every", "2m"]
    minutes = max(settings.limit_s - _SAVE_S, settings.limit_s / 2) / 60
    yield {"arm": arm, "seed": seed}
    try:
        train_here([*own, "--max-minutes", f"{minutes:.2f}"])
    except RunStopped as stopped:
        yield results_of(folder)
        raise TimeoutError(f"stopped before its last epoch, to be taken up: {stopped}") from None
    found = results_of(folder)
    yield {**found, "final_accuracy": found["accuracy"][-1], **peak_memory()}
    if not found["finite"]:
        raise RuntimeError(f"losses are not finite: {found['train_loss']}")


def arm_flags(settings: Settings, arm: str, seed: int) -> list[str]:
    """Return the flags of an arm of the paper; a dry run has two epochs of little data."""
    config, *flags = ARMS[arm].split()
    own = ["--config", str(ROOT / config), "--seed", str(seed), "--report-to", "none", *flags]
    own += ["--dataset", settings.data, "--compile", "--eval-every", "10"]
    if settings.dry:
        own += ["--label-column", "label"] if settings.data == "digits" else []
        own += ["--model", "test_resnet", "--train-samples", "240", "--eval-samples", "40"]
        own += ["--resolutions", "16,24", "--large-batch-size", "8", "--cpu-threads", "1"]
        own += ["--slope", "0.001", "--intercept", "0.01", "--rounds-per-epoch", "1"]
        own += ["--epochs", "2", "--lr-milestones", "1", "--no-compile", "--eval-every", "2"]
        own += ["--local-batch-sizes", "8,8,8,8"] if "ddp" in config else []
    return own
