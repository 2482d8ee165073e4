"""A process is killed, stopped, or asked to stop."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.benchmarks.faults.run import (
    FLAGS,
    JOINT,
    TIMEOUT_S,
    FaultyRun,
    Row,
    environment,
    metrics,
    samples,
    summary,
)
from experiments.benchmarks.kills import COMMON, ROOT, children, fingerprint
from experiments.benchmarks.ranks import free_port

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
    lost = summary(folder).get("lost_workers")
    last = samples(folder, epochs - 1)
    events = metrics(folder)
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


def launcher_restarts(scratch: Path) -> Iterator[Row]:
    """One of torchrun's processes is killed; it ends the others and starts all again."""
    for sync in ("bsp", "asp"):
        folder = scratch / f"restarted-{sync}"
        command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        command += ["--num_processes", "2", "--max_restarts", "2", "--main_process_port"]
        command += [str(free_port()), "train.py", *COMMON, "--epochs", "8", *FLAGS]
        command += ["--sync", sync, "--output-dir", str(folder)]
        log = scratch / f"restarted-{sync}.log"
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        done = folder / "checkpoints/epoch-0003/manifest.json"
        while not done.exists() and process.poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(children(process.pid)[-1], signal.SIGKILL)
        while "resumed from" not in log.read_text() and process.poll() is None:
            time.sleep(0.05)
        resumed_s = round(time.monotonic() - began, 1)
        status = process.wait(120)
        from_ = re.search(r"resumed from \S*(epoch-\d+|save-\d+)", log.read_text())
        yield Row(
            "one process is killed, accelerate launch --max_restarts 2",
            sync,
            "the launcher starts all again, which go on by themselves",
            f"resumed from {from_ and from_.group(1)}, {resumed_s} s later; status {status}",
            status == 0 and from_ is not None,
            "the launcher's",
        )
