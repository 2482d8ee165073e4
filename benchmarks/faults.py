"""What goes wrong in a run, what was promised, what happened: ``python -m benchmarks.faults``.

Each row breaks a real run of train.py and looks at what is left. Processes that are to outlive one
of them are started without torchrun, which ends all when one fails. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from benchmarks.kills import COMMON, ROOT, fingerprint
from benchmarks.record import record
from dbsl.log.rows import read_metrics

TIMEOUT_S = 8.0  # --worker-timeout
FLAGS = shlex.split(
    "--large-batch-size 10 --small-workers 1 --rounds-per-epoch 2 --checkpoint-every 1 "
    f"--worker-timeout {TIMEOUT_S}"
)
JOINT = shlex.split(
    "--local-batch-sizes 5,5,10 --sync step --rounds-per-epoch 2 --checkpoint-every 1 "
    f"--worker-timeout {TIMEOUT_S}"
)


class Run:
    """Processes of one run, each a rank with a log of its own."""

    def __init__(self, folder: Path, flags: list[str], world_size: int = 3, epochs: int = 8):
        self.folder = folder
        command = [sys.executable, "train.py", *COMMON, "--epochs", str(epochs), *flags]
        command += ["--output-dir", str(folder)]
        port = _free_port()
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
                    env=_environment() | {k: str(v) for k, v in several.items()}
                    if world_size > 1
                    else _environment(),
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


def main() -> None:
    """Run all faults, or those whose function's name contains a word."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="")
    only = parser.parse_args().only
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        for fault in FAULTS:
            if only in fault.__name__:
                for row in fault(Path(scratch)):
                    rows.append(row)
                    print(json.dumps(vars(row)), flush=True)
    measured = {(row.fault, row.mode): {k: str(v) for k, v in vars(row).items()} for row in rows}
    table = ROOT / "results/faults.csv"
    if only and table.exists():  # rows that were not run again stay
        with table.open(newline="", encoding="utf-8") as file:
            names = [field.name for field in fields(Row)]
            before = [{name: old[name] for name in names} for old in csv.DictReader(file)]
        measured = {(old["fault"], old["mode"]): old for old in before} | measured
    record(table, list(measured.values()), "python -m benchmarks.faults")
    sys.exit(not all(row.kept for row in rows))


def worker_dies(scratch: Path) -> Iterator[Row]:
    """A worker's process is killed, where nobody waits for it."""
    for sync in ("asp", "ssp"):
        for what, number in (("killed (SIGKILL)", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            # Nobody waits in asp: the run must last longer than the timeout.
            epochs = 120 if number == signal.SIGSTOP and sync == "asp" else 8
            flags = [*FLAGS, "--sync", sync]
            run = Run(scratch / f"dies-{sync}-{number}", flags, epochs=epochs)
            run.wait_for_epoch(2)
            os.kill(run.processes[2].pid, number)
            noticed = run.seconds_until(lambda run=run: run.said("warning: rank 2"))
            statuses = run.wait([0, 1])
            summary = _summary(run.folder)
            lost = summary.get("lost_workers")
            last = _samples(run.folder, epochs - 1)
            kept = statuses == [0, 0] and lost == [2] and last == 240
            kept = kept and noticed <= (5 if number == signal.SIGKILL else TIMEOUT_S + 5)
            yield Row(
                f"a worker is {what}",
                sync,
                "it is dropped, the others share its samples, the run ends and says so",
                f"status {statuses}, lost_workers {lost}, {last} of 240 samples in the last epoch",
                kept,
                noticed,
            )


def worker_dies_at_barrier(scratch: Path) -> Iterator[Row]:
    """A worker's process is killed or stopped, where the others wait for it."""
    for sync, flags in (("bsp", FLAGS), ("step", JOINT)):
        whole = Run(scratch / f"whole-{sync}", flags)
        assert whole.wait() == [0, 0, 0], whole.said("error")
        for what, number in (("killed (SIGKILL)", signal.SIGKILL), ("stopped", signal.SIGSTOP)):
            folder = scratch / f"barrier-{sync}-{number}"
            run = Run(folder, flags)
            run.wait_for_epoch(2)
            os.kill(run.processes[2].pid, number)
            began = time.monotonic()
            statuses = run.wait([0, 1], timeout_s=4 * TIMEOUT_S)
            noticed = round(time.monotonic() - began, 1)
            named = all(run.said("error: .*rank 2", rank) for rank in (0, 1))
            again = Run(folder, [*flags, "--resume", "auto"])
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
        folder = scratch / f"server-{sync}"
        run = Run(folder, flags)
        run.wait_for_epoch(2)
        run.processes[0].kill()
        began = time.monotonic()
        statuses = run.wait([1, 2], timeout_s=4 * TIMEOUT_S)
        noticed = round(time.monotonic() - began, 1)
        named = all(run.said("error: .*rank 0", rank) for rank in (1, 2))
        resumed = Run(folder, [*flags, "--resume", "auto"]).wait()
        yield Row(
            "the server rank is killed (SIGKILL)",
            sync,
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
        command += [str(_free_port()), "train.py", *COMMON, "--epochs", "8", *FLAGS]
        command += ["--sync", sync, "--output-dir", str(folder)]
        log = scratch / f"restarted-{sync}.log"
        process = subprocess.Popen(
            command, cwd=ROOT, env=_environment(), stdout=log.open("w"), stderr=subprocess.STDOUT
        )
        done = folder / "checkpoints/epoch-0003/manifest.json"
        while not done.exists() and process.poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        os.kill(_ranks_of(process.pid)[-1], signal.SIGKILL)
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


def asked_to_stop(scratch: Path) -> Iterator[Row]:
    """Signals, and the limit on minutes."""
    for mode, world_size, flags in (
        ("bsp, simulated", 1, FLAGS),
        ("asp, simulated", 1, [*FLAGS, "--sync", "asp"]),
        ("bsp, 3 processes", 3, FLAGS),
        ("step, 3 processes", 3, JOINT),
        ("asp, 3 processes", 3, [*FLAGS, "--sync", "asp"]),
    ):
        if world_size == 1:
            flags = [*flags, "--workers", "3"]
        whole = Run(scratch / f"unstopped-{mode}", flags, world_size)
        assert set(whole.wait()) == {0}, whole.said("error")
        for name in ("SIGTERM", "SIGINT"):
            folder = scratch / f"stopped-{mode}-{name}"
            run = Run(folder, flags, world_size)
            run.wait_for_epoch(2)
            time.sleep(0.15)  # into the next epoch
            began = time.monotonic()
            for process in run.processes:
                process.send_signal(getattr(signal, name))
            statuses = run.wait()
            seconds = round(time.monotonic() - began, 1)
            resumed = Run(folder, [*flags, "--resume", "auto"], world_size).wait()
            same = fingerprint(folder) == fingerprint(whole.folder)
            exact = "asp, 3" not in mode
            yield Row(
                name,
                mode,
                f"finishes the step, saves, status 75; resumed {'the same bits' if exact else ''}",
                f"status {statuses}, {run.said('^stopped')!r}, resumed {resumed}"
                + (f", same bits: {same}" if exact else ""),
                set(statuses) == {75} and set(resumed) == {0} and (same or not exact),
                seconds,
            )
    folder = scratch / "minutes"
    run = Run(folder, [*FLAGS, "--max-minutes", "0.15"], 1, epochs=60)
    statuses = run.wait()
    yield Row(
        "--max-minutes 0.15",
        "bsp, simulated",
        "saves and ends with status 75 in time",
        f"status {statuses}, {run.said('^stopped')!r}",
        statuses == [75],
        "0",
    )


def not_finite(scratch: Path) -> Iterator[Row]:
    """A learning rate that blows the weights up."""
    for mode, world_size, flags in (
        ("bsp, simulated", 1, FLAGS),
        ("bsp, 2 processes", 2, FLAGS),
        ("asp, 2 processes", 2, [*FLAGS, "--sync", "asp"]),
        ("step, 2 processes", 2, [*JOINT, "--local-batch-sizes", "7,13"]),
    ):
        folder = scratch / f"nan-{mode}"
        wild = ["--lr", "1e25", "--warmup-epochs", "0", "--max-bad-rounds", "3"]
        run = Run(folder, [*flags, *wild], world_size, epochs=12)
        statuses = run.wait()
        refused = [r for r in _metrics(folder) if r["event"] == "round" and r.get("refused")]
        said = any(run.said("error: max_bad_rounds", rank) for rank in range(world_size))
        yield Row(
            "weights are not finite (--lr 1e25)",
            mode,
            "rounds are refused and counted; above --max-bad-rounds 3 the run stops and says so",
            f"status {statuses}, {len(refused)} refused rounds logged, named: {said}",
            0 not in statuses and "hangs" not in statuses and len(refused) >= 3 and said,
            "at the round's end",
        )


def damaged_checkpoint(scratch: Path) -> Iterator[Row]:
    """A bit of the newest checkpoint flips; its manifest is cut."""
    whole = Run(scratch / "undamaged", [*FLAGS, "--workers", "3"], 1)
    assert whole.wait() == [0]
    for what in ("a bit of its weights flips", "its manifest is cut in half"):
        folder = scratch / f"damaged-{len(what)}"
        run = Run(folder, [*FLAGS, "--workers", "3"], 1)
        run.wait_for_epoch(3)
        run.wait(timeout_s=0)
        newest = max(folder.glob("checkpoints/*/manifest.json"), key=lambda p: p.stat().st_mtime)
        if "bit" in what:
            path = newest.parent / "rank-00000.safetensors"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        else:
            newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
        again = Run(folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1)
        statuses = again.wait()
        same = fingerprint(folder) == fingerprint(whole.folder)
        yield Row(
            f"the newest checkpoint is damaged: {what}",
            "bsp, simulated",
            "it is passed over with a warning, the one before is taken; the same bits",
            f"status {statuses}, {again.said('passed over')!r}, same bits: {same}",
            statuses == [0] and same and again.said("passed over") is not None,
            "at the start",
        )


def no_room(scratch: Path) -> Iterator[Row]:
    """The disk fills up; the folder is read-only; another run has it."""
    disk = scratch / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)])
    if mounted.returncode == 0:
        try:
            folder = disk / "run"
            run = Run(folder, [*FLAGS, "--workers", "3"], 1, epochs=20)
            run.wait_for_epoch(2)
            with contextlib.suppress(OSError), (disk / "ballast").open("wb") as ballast:
                while True:
                    ballast.write(b"x" * 4096)
            statuses, said = run.wait(), run.said("error")
            left = sorted(p.parent.name for p in folder.glob("checkpoints/*/manifest.json"))
            (disk / "ballast").unlink()
            parts = list(folder.rglob("*.tmp"))
            resumed = Run(folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1, 20).wait()
            yield Row(
                "the disk is full",
                "bsp, simulated",
                "a clear error, the last good checkpoint intact",
                f"status {statuses}, {said!r}, left {left}, {len(parts)} half files; "
                f"with room again resumed {resumed}",
                statuses == [2] and bool(left) and not parts and resumed == [0],
                "at the next write",
            )
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            run = Run(disk / "other", [*FLAGS, "--workers", "3"], 1)
            statuses = run.wait()
            yield Row(
                "the folder is read-only",
                "bsp, simulated",
                "a clear error before anything is trained",
                f"status {statuses}, {run.said('error')!r}",
                statuses == [2] and run.said("error: output_dir") is not None,
                "at the start",
            )
        finally:
            subprocess.run(["umount", str(disk)])
    folder = scratch / "in-use"
    run = Run(folder, [*FLAGS, "--workers", "3"], 1, epochs=30)
    run.wait_for_epoch(1)
    other = Run(folder, [*FLAGS, "--workers", "3", "--resume", "auto"], 1)
    statuses, first = other.wait(), run.processes[0].poll()
    run.wait(timeout_s=0)
    yield Row(
        "another run has the folder",
        "bsp, simulated",
        "a clear error, and the other run goes on",
        f"status {statuses}, {other.said('error')!r}, the other is running: {first is None}",
        statuses == [2] and other.said("in use by process") is not None and first is None,
        "at the start",
    )


def bad_images(scratch: Path) -> Iterator[Row]:
    """Files that are no images among those of a folder."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for side, kind in ((32, "stored"), (80, "read as needed")):
        data = scratch / f"images-{side}"
        for label in ("cat", "dog"):
            for number in range(40):
                path = data / "train" / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                pixels = rng.integers(0, 255, (side, side, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(path)
                if number in (5, 17, 30):
                    path.write_bytes(path.read_bytes()[:60])
        for limit, goal in ((8, [0]), (1, [2])):
            folder = scratch / f"bad-{side}-{limit}"
            flags = [*FLAGS, "--dataset", str(data), "--max-bad-images", str(limit)]
            flags += ["--train-samples", "64", "--eval-samples", "16", "--workers", "3"]
            run = Run(folder, flags, 1, epochs=4)
            statuses = run.wait()
            listed = _summary(folder).get("bad_images")
            said = run.said("error: max_bad_images")
            yield Row(
                f"6 of 80 images cannot be decoded ({kind}), --max-bad-images {limit}",
                "bsp, simulated",
                "left out, counted, listed by index" if goal == [0] else "a clear stop",
                f"status {statuses}, " + (f"listed {listed}" if goal == [0] else repr(said)),
                statuses == goal and bool(listed if goal == [0] else said),
                "when read",
            )


FAULTS = [
    worker_dies,
    worker_dies_at_barrier,
    server_dies,
    launcher_restarts,
    asked_to_stop,
    not_finite,
    damaged_checkpoint,
    no_room,
    bad_images,
]


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _ranks_of(launcher: int) -> list[int]:
    out = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True
    ).stdout
    return [int(pid) for pid in out.split()]


def _metrics(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return read_metrics(path) if path.exists() else []


def _samples(folder: Path, epoch: int) -> int:
    rounds = [r for r in _metrics(folder) if r["event"] == "round" and r["epoch"] == epoch]
    return sum(r["samples"] for r in rounds)


def _summary(folder: Path) -> dict:
    path = folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


if __name__ == "__main__":
    main()
