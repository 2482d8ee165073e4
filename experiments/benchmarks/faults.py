"""What goes wrong in a run, what was promised, what happened.

    python -m experiments.benchmarks.faults [--only WORD]

Each row breaks a real run of train.py and looks at what is left. Processes that are to outlive one
of them are started without torchrun, which ends all when one fails. About 10 minutes on two cores.
Rows of faults.csv that are not measured stay, such as those of full disks and bad images, which
tests/ tries.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dbsl.log.rows import read_metrics
from experiments.benchmarks.kills import COMMON, ROOT, fingerprint
from experiments.benchmarks.ranks import free_port
from experiments.benchmarks.record import record

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
            several = {**numbers, "LOCAL_WORLD_SIZE": world_size, **where} if world_size > 1 else {}
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            environment |= {name: str(value) for name, value in several.items()}
            out = self.logs[rank].open("w")
            how = {"env": environment, "stdout": out, "stderr": subprocess.STDOUT}
            self.processes.append(subprocess.Popen(command, cwd=ROOT, **how))

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


def metrics(folder: Path) -> list[dict]:
    """Return the events of a run."""
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


_ENDS = (("killed (SIGKILL)", signal.SIGKILL), ("stopped", signal.SIGSTOP))


def worker_dies(scratch: Path) -> Iterator[Row]:
    """A worker's process is killed or stopped, where nobody waits for it."""
    for sync in ("asp", "ssp"):
        for what, number in _ENDS:
            # Nobody waits in asp: the run must last longer than the timeout.
            epochs = 120 if number == signal.SIGSTOP and sync == "asp" else 8
            folder = scratch / f"dies-{sync}-{number}"
            yield _goes_on(folder, what, number, sync, [*FLAGS, "--sync", sync], epochs)


def _goes_on(folder: Path, what: str, number: int, mode: str, flags: list[str], epochs: int) -> Row:
    """End a worker's process in a run that is to go on without it."""
    run = FaultyRun(folder, flags, epochs=epochs)
    run.wait_for_epoch(2)
    os.kill(run.processes[2].pid, number)
    noticed = run.seconds_until(lambda: run.said("warning: rank 2"))
    statuses = run.wait([0, 1])
    summary, events = folder / "summary.json", metrics(folder)
    lost = json.loads(summary.read_text()).get("lost_workers") if summary.exists() else None
    rounds = (e for e in events if e["event"] == "round" and e["epoch"] == epochs - 1)
    last = sum(e["samples"] for e in rounds)
    counted = sum(e["samples"] for e in events if e["event"] in ("round", "lost"))
    kept = statuses == [0, 0] and lost == [2] and last == 240 and counted == 240 * epochs
    kept = kept and noticed <= (5 if number == signal.SIGKILL else TIMEOUT_S + 5)
    return Row(
        f"a worker is {what}",
        mode,
        "it is dropped, the others share its samples, the run ends and says so",
        f"status {statuses}, lost_workers {lost}, {last} of 240 samples in the last epoch, "
        f"{240 * epochs - counted} of {240 * epochs} neither trained on nor counted",
        kept,
        noticed,
    )


def worker_dies_at_barrier(scratch: Path) -> Iterator[Row]:
    """A worker's process is killed or stopped, where the others wait for it."""
    for sync, flags in (("bsp", FLAGS), ("step", JOINT)):
        whole = FaultyRun(scratch / f"whole-{sync}", flags)
        assert whole.wait() == [0, 0, 0], whole.said("error")
        for what, number in _ENDS:
            folder = scratch / f"barrier-{sync}-{number}"
            run = FaultyRun(folder, flags)
            run.wait_for_epoch(2)
            os.kill(run.processes[2].pid, number)
            began = time.monotonic()
            statuses = run.wait([0, 1], timeout_s=4 * TIMEOUT_S)
            noticed = round(time.monotonic() - began, 1)
            named = all(run.said("error: .*rank 2", rank) for rank in (0, 1))
            again = FaultyRun(folder, [*flags, "--resume", "auto"])
            resumed = again.wait()
            same = fingerprint(folder) == fingerprint(whole.folder)
            yield Row(
                f"a worker is {what}",
                sync,
                "every rank stops within the timeout and names it; resumed, the same bits",
                f"status {statuses}, named by all: {named}; resumed {resumed}, same bits: {same}",
                statuses == [2, 2] and named and same and noticed <= TIMEOUT_S + 6,
                noticed,
            )


def server_dies(scratch: Path) -> Iterator[Row]:
    """Rank 0 is killed."""
    for sync in ("bsp", "step", "ssp", "asp"):
        flags = JOINT if sync == "step" else [*FLAGS, "--sync", sync]
        yield _ends(scratch / f"server-{sync}", sync, flags)


def _ends(folder: Path, mode: str, flags: list[str]) -> Row:
    """Kill rank 0 of a run, which is to stop and to be resumed."""
    run = FaultyRun(folder, flags)
    run.wait_for_epoch(2)
    run.processes[0].kill()
    began = time.monotonic()
    statuses = run.wait([1, 2], timeout_s=4 * TIMEOUT_S)
    noticed = round(time.monotonic() - began, 1)
    named = all(run.said("error: .*rank 0", rank) for rank in (1, 2))
    resumed = FaultyRun(folder, [*flags, "--resume", "auto"]).wait()
    return Row(
        "the server rank is killed (SIGKILL)",
        mode,
        "every rank stops within the timeout and names it; the run can be resumed",
        f"status {statuses}, named by all: {named}; resumed {resumed}",
        statuses == [2, 2] and named and resumed == [0, 0, 0] and noticed <= TIMEOUT_S + 6,
        noticed,
    )


def asked_to_stop(scratch: Path) -> Iterator[Row]:
    """All processes get a signal."""
    for mode, world_size, flags in (
        ("bsp, simulated", 1, FLAGS),
        ("asp, simulated", 1, [*FLAGS, "--sync", "asp"]),
        ("bsp, 3 processes", 3, FLAGS),
        ("step, 3 processes", 3, JOINT),
        ("asp, 3 processes", 3, [*FLAGS, "--sync", "asp"]),
    ):
        if world_size == 1:
            flags = [*flags, "--workers", "3"]
        whole = FaultyRun(scratch / f"unstopped-{mode}", flags, world_size)
        assert set(whole.wait()) == {0}, whole.said("error")
        for name in ("SIGTERM", "SIGINT"):
            folder = scratch / f"stopped-{mode}-{name}"
            run = FaultyRun(folder, flags, world_size)
            run.wait_for_epoch(2)
            time.sleep(0.15)  # into the next epoch
            began = time.monotonic()
            for process in run.processes:
                process.send_signal(getattr(signal, name))
            statuses, said = run.wait(), run.said("^stopped")
            seconds = round(time.monotonic() - began, 1)
            resumed = FaultyRun(folder, [*flags, "--resume", "auto"], world_size).wait()
            same = fingerprint(folder) == fingerprint(whole.folder)
            exact = "asp, 3" not in mode
            yield Row(
                name,
                mode,
                f"finishes the step, saves, status 75; resumed {'the same bits' if exact else ''}",
                f"status {statuses}, {said!r}, resumed {resumed}"
                + (f", same bits: {same}" if exact else ""),
                set(statuses) == {75} and set(resumed) == {0} and (same or not exact),
                seconds,
            )


FAULTS = (worker_dies, worker_dies_at_barrier, server_dies, asked_to_stop)


def main() -> None:
    """Try all faults, or those whose function's name has a word, and write faults.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            for row in fault(Path(scratch)) if only in fault.__name__ else ():
                rows.append(row)
                print(json.dumps(vars(row)), flush=True)
    measured = {(row.fault, row.mode) for row in rows}
    record(
        ROOT / "experiments/results/faults.csv",
        [vars(row) for row in rows],
        "python -m experiments.benchmarks.faults",
        keep=lambda row: (row["fault"], row["mode"]) not in measured,
    )
    sys.exit(not all(row.kept for row in rows))


if __name__ == "__main__":
    main()
