"""A run of several processes that is to be broken, and a row of what came of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dbsl.log.rows import read_metrics
from experiments.benchmarks.kills import COMMON, ROOT
from experiments.benchmarks.ranks import free_port

TIMEOUT_S = 8.0  # --worker-timeout
FLAGS = shlex.split(
    "--large-batch-size 10 --small-workers 1 --rounds-per-epoch 2 --checkpoint-every 1 "
    f"--worker-timeout {TIMEOUT_S}"
)
JOINT = shlex.split(
    "--local-batch-sizes 5,5,10 --sync step --rounds-per-epoch 2 --checkpoint-every 1 "
    f"--worker-timeout {TIMEOUT_S}"
)


class FaultyRun:
    """Processes of one run, each a rank with a log of its own."""

    def __init__(self, folder: Path, flags: list[str], world_size: int = 3, epochs: int = 8):
        self.folder = folder
        command = [sys.executable, "train.py", *COMMON, "--epochs", str(epochs), *flags]
        command += ["--output-dir", str(folder)]
        port = free_port()
        logs = Path(tempfile.gettempdir())  # the run's own disk may be full
        name = f"faults-{os.getpid()}-{folder.name}"
        self.logs = [logs / f"{name}-{rank}.log" for rank in range(world_size)]
        self.processes = []
        for rank in range(world_size):
            numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            several = {**numbers, "LOCAL_WORLD_SIZE": world_size, **where}
            self.processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=environment() | {k: str(v) for k, v in several.items()}
                    if world_size > 1
                    else environment(),
                    stdout=self.logs[rank].open("w"),
                    stderr=subprocess.STDOUT,
                )
            )

    def wait_for_epoch(self, epoch: int) -> None:
        """Wait until so many epochs are in metrics.jsonl and, if it saves, in a checkpoint."""
        deadline = time.monotonic() + 120
        done = self.folder / "checkpoints" / f"epoch-{epoch:04d}" / "manifest.json"
        while not done.exists():
            if time.monotonic() > deadline or self.processes[0].poll() is not None:
                raise RuntimeError(self.logs[0].read_text()[-2000:])
            time.sleep(0.02)

    def wait(self, ranks: list[int] | None = None, timeout_s: float = 120) -> list[int | str]:
        """Return the exit statuses; 'hangs' for a process that had to be killed."""
        statuses: list[int | str] = []
        deadline = time.monotonic() + timeout_s
        for rank in ranks if ranks is not None else range(len(self.processes)):
            try:
                left = max(0.1, deadline - time.monotonic())
                statuses.append(self.processes[rank].wait(left))
            except subprocess.TimeoutExpired:
                statuses.append("hangs")
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        return statuses

    def said(self, pattern: str, rank: int = 0) -> str | None:
        """Return the first line of a rank's output that a pattern is found in."""
        for line in self.logs[rank].read_text().splitlines():
            if re.search(pattern, line):
                return line
        return None

    def seconds_until(self, condition: Callable[[], object], timeout_s: float = 60) -> float:
        """Return how long it takes for a condition to hold; NaN: it did not come."""
        began = time.monotonic()
        while time.monotonic() - began < timeout_s:
            if condition():
                return round(time.monotonic() - began, 1)
            time.sleep(0.05)
        return float("nan")


@dataclass
class Row:
    """A line of the table."""

    fault: str
    mode: str
    promised: str
    happened: str
    kept: bool
    seconds_to_notice: float | str


def environment() -> dict[str, str]:
    """Return the environment of a run's process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def metrics(folder: Path) -> list[dict]:
    """Return the events of a run."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def samples(folder: Path, epoch: int) -> int:
    """Return the samples that a run has trained on in an epoch, from 0."""
    rounds = [r for r in metrics(folder) if r["event"] == "round" and r["epoch"] == epoch]
    return sum(r["samples"] for r in rounds)


def summary(folder: Path) -> dict:
    """Return a run's summary; empty: it has none."""
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}
