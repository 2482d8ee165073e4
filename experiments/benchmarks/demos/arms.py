"""Runs of a few processes, each where its prefix puts it: train.py, or plain.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmarks.ranks import free_port

ROOT = Path(__file__).resolve().parents[3]
_TIMEOUT_S = 1800


def run_plain(prefixes: Sequence[Sequence[str]], address: str, **settings: Any) -> dict[str, float]:
    """Return what the loop of Accelerate's documentation has measured; see `plain.Settings`."""
    text = json.dumps(settings)
    command = [sys.executable, "-m", "experiments.benchmarks.demos.plain", text]
    return json.loads(run_ranks(command, prefixes, address).splitlines()[-1])


def run_train(
    prefixes: Sequence[Sequence[str]], address: str, flags: Mapping[str, Any]
) -> dict[str, float]:
    """Return seconds of training, of an epoch once warm, and the last accuracy of train.py.

    Epochs of the run's second half are warm: plans have settled.

    Args:
        prefixes: What each rank's command begins with, such as ``taskset -c 0``.
        address: Of rank 0.
        flags: Settings by flag, without dashes in front.
    """
    with tempfile.TemporaryDirectory() as scratch:
        common = {"report-to": "none", "output-dir": f"{scratch}/run", "checkpoint-every": 0}
        common |= {"eval-every": half_of(flags["epochs"]), "mixed-precision": "no"}
        common |= {"resolutions": 32, "lr-schedule": "cosine", "warmup-epochs": 1}
        command = [sys.executable, "train.py", "--no-save-best", "--no-noise-scale"]
        for name, value in {**common, **flags}.items():
            command += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        run_ranks(command, prefixes, address)
        lines = Path(scratch, "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "eval"]
    first, last = rows[0], rows[-1]
    epochs = last["epoch"] - first["epoch"]
    return {
        "train_s": last["train_time_s"],
        "epoch_s": (last["train_time_s"] - first["train_time_s"]) / epochs,
        "accuracy": last["accuracy"],
    }


def half_of(epochs: int) -> int:
    """Return after how many epochs half of a run is done."""
    return max(1, epochs // 2)


def run_ranks(command: Sequence[str], prefixes: Sequence[Sequence[str]], address: str) -> str:
    """Run a command once per rank, and return what rank 0 printed.

    Args:
        command: What all ranks run.
        prefixes: What each rank's command begins with.
        address: Of rank 0.

    Raises:
        RuntimeError: If a rank fails; the others are ended.
    """
    port = free_port()
    ranks = []
    try:
        for rank, prefix in enumerate(prefixes):
            environment = os.environ | {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(prefixes))},
                **{"MASTER_ADDR": address, "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "1"},
                **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            }
            ranks.append(
                subprocess.Popen(
                    [*prefix, *command],
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            )
        answers = []
        for rank in ranks:
            answers.append(rank.communicate(timeout=_TIMEOUT_S))
            if rank.returncode:
                said = answers[-1][1][-2000:]
                raise RuntimeError(f"{' '.join(command)} ended with {rank.returncode}: {said}")
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()
    return answers[0][0]
