"""Stages that say whether something works: machine, modes, tests, resume, several processes."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.gpu.runner import ROOT
from experiments.benchmarks.gpu.runs import (
    MODES,
    common_flags,
    dual_batch_flags,
    equal_batch_flags,
    model_hash,
    peak_memory,
    results_of,
    run,
    train_here,
)

PACKAGES = ("torch", "torchvision", "timm", "accelerate", "numpy", "triton", "datasets")
_LOSSES_APART = 0.02  # relative, of simulated and real processes: kernels differ in the last bits


def environment(settings: Settings) -> Iterator[dict[str, Any]]:
    """Say what this machine is, and that it computes."""
    yield {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    yield {name: _version(name) for name in PACKAGES}
    if not torch.cuda.is_available():
        yield {"cuda": None}
        if not settings.dry:
            raise RuntimeError("torch.cuda.is_available() is False")
    else:
        found = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info()
        yield {
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "capability": f"{found.major}.{found.minor}",
            "multiprocessors": found.multi_processor_count,
            "memory_gib": round(total / 2**30, 1),
            "free_gib": round(free / 2**30, 1),
            "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        }
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(64, 64, device=device)
    yield {"computes": float((ones @ ones).sum()) == 64.0**3}


def mode(settings: Settings, name: str) -> Iterator[dict[str, Any]]:
    """Train two epochs in a mode; all losses must be finite."""
    kind, own = MODES[name]
    flags = own.split()
    if name == "fp16" and not torch.cuda.is_available():
        flags = ["--mixed-precision", "bf16"]
        yield {"note": "fp16 needs a GPU: this was bf16"}
    flags += (dual_batch_flags if kind == "dual" else equal_batch_flags)(settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        train_here([*common_flags(settings, folder), "--epochs", "2", *flags])
        found = results_of(folder)
    yield {**found, **peak_memory()}
    if not found["finite"]:
        raise RuntimeError(f"losses of {name} are not finite: {found}")


def tests(settings: Settings) -> Iterator[dict[str, Any]]:
    """Run the tests marked gpu, of the files that have any: others may lack their imports here."""
    files = [str(p) for p in sorted((ROOT / "tests").glob("**/test_*.py")) if _has_gpu_tests(p)]
    with tempfile.TemporaryFile("w+") as output:
        command = ["-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *files]
        status = run(command, stdout=output, stderr=output, allowed=(0, 1, 2, 3, 4, 5))
        output.seek(0)
        text = output.read()
    print(text)
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|error)", text)}
    yield {"files": len(files), "status": status, **counts}
    if status or (torch.cuda.is_available() and not counts.get("passed")):
        raise RuntimeError(text[-1500:])


def resume(settings: Settings, sync: str) -> Iterator[dict[str, Any]]:
    """Stop a run in the middle and resume it: its weights must be the unbroken run's, to the bit.

    Kernels are deterministic; with others, weights differed on an H100.
    """
    flags = (equal_batch_flags if sync == "step" else dual_batch_flags)(settings)
    flags += ["--epochs", "2", "--sync", sync, "--rounds-per-epoch", "2"]
    module, workspace = ["-m", "experiments.benchmarks.gpu.repeatable"], {}
    workspace["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with tempfile.TemporaryDirectory() as scratch:
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        run([*module, *common_flags(settings, whole), *flags], workspace)
        again = [*common_flags(settings, broken), *flags]
        # Joint steps of all workers are one round, else each worker has its own.
        before = "2" if sync == "step" else "6"
        status = run([*module, "--stop-in-round", before, *again], workspace, allowed=(75,))
        run([*module, *again, "--resume", "auto"], workspace)
        same = model_hash(whole) == model_hash(broken)
        yield {"stopped_with": status, "same_bits": same, "finite": results_of(whole)["finite"]}
    if not same:
        raise RuntimeError("the resumed run has other weights than the unbroken one")


def two_processes(settings: Settings, sync: str) -> Iterator[dict[str, Any]]:
    """Train two workers as two processes on one GPU, through gloo, and as simulated ones."""
    flags = ["--epochs", "2", "--sync", sync, "--mixed-precision", "no"]
    flags += equal_batch_flags(settings, workers=2)
    with tempfile.TemporaryDirectory() as scratch:
        one, two = Path(scratch) / "one", Path(scratch) / "two"
        run(["train.py", *common_flags(settings, one), *flags, "--workers", "2"])
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run([*launcher, "train.py", *common_flags(settings, two), *flags], {"DBSL_BACKEND": "gloo"})
        simulated, real = results_of(one), results_of(two)
    pairs = zip(simulated["eval_loss"], real["eval_loss"], strict=True)
    apart = max(abs(a / b - 1) if a and b else 1.0 for a, b in pairs)
    yield {
        "simulated_loss": simulated["eval_loss"],
        "real_loss": real["eval_loss"],
        "largest_difference": float(f"{apart:.3g}"),
        "simulated_s": simulated["train_s"],
        "real_s": real["train_s"],
    }
    if apart > _LOSSES_APART:
        raise RuntimeError(f"losses differ by {apart:.2%}: {simulated} and {real}")


def _has_gpu_tests(path: Path) -> bool:
    return "mark.gpu" in path.read_text(encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
