"""Runs of train.py as processes of one command: several at a time, all ended with it."""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dbsl.base.errors import EXIT_DIVERGED, EXIT_STOPPED, RunStopped, SettingError
from dbsl.config.parse import parse_config
from dbsl.config.settings import CHECKPOINTS
from dbsl.run.folder import holder_of
from dbsl.run.stopping import Stopping

SCRIPT = Path(__file__).resolve().parents[2] / "train.py"
_END_PATIENCE_S = 120.0  # for runs that were asked to stop: a step and a checkpoint


@dataclass(frozen=True)
class Launch:
    """One run to be made."""

    title: str  # for people
    folder: Path
    flags: tuple[str, ...] = field(repr=False)  # train.py's, without those that name the folder
    # Variables of its process, in addition to those of this one.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def check_flags(flags: Sequence[str]) -> None:
    """Refuse flags that train.py would refuse."""
    from train import Config  # it stands outside of all packages, and takes a second

    parse_config(Config, flags)


def is_finished(folder: Path) -> bool:
    """Whether a run folder's run came to its end."""
    return (folder / "summary.json").exists()


def launch_all(
    launches: Sequence[Launch],
    jobs: int,
    stopping: Stopping,
    on_finished: Callable[[], object] = lambda: None,
) -> None:
    """Make runs that are not finished, `jobs` at a time; a run that was stopped goes on.

    One at a time prints here; of several each writes to ``<folder>.log``. With several GPUs they
    take turns on them. `on_finished` is called after each run that came to its end, by one thread
    at a time. If a run fails, or this process is asked to stop, those under way save and end first.
    One that diverges before its end is told at the end of all, and has no result.
    """
    waiting = [(n, one) for n, one in enumerate(launches, 1) if not is_finished(one.folder)]
    runs = _Runs(len(launches), jobs, stopping, on_finished)
    stopping.on_signal = runs.end
    with ThreadPoolExecutor(jobs) as pool:
        made = [pool.submit(runs.make, number, launch) for number, launch in waiting]
        try:
            statuses = [future.result() for future in made]
        except KeyboardInterrupt:  # the second: now
            runs.kill()
            raise
        finally:
            runs.end()
    if runs.failed:
        launch, status = runs.failed[0]
        where = f"{launch.folder}.log" if jobs > 1 else "above"
        raise SettingError(
            f"every run must end with status 0, got status {status} of {launch.folder} (see "
            f"{where}); repeat the command to continue"
        )
    for launch in runs.diverged:
        where = f" (see {launch.folder}.log)" if jobs > 1 else ""
        print(f"warning: {launch.title} diverged and has no result{where}", flush=True)
    if any(statuses) or None in statuses:
        raise RunStopped("stopped; repeat the command to continue")


class _Runs:
    """Processes under way; threads share it."""

    def __init__(
        self, total: int, jobs: int, stopping: Stopping, on_finished: Callable[[], object]
    ) -> None:
        self.failed: list[tuple[Launch, int]] = []  # the first of them is the cause
        self.diverged: list[Launch] = []  # without a result
        self._total, self._stopping, self._on_finished = total, stopping, on_finished
        self._running: set[subprocess.Popen] = set()
        self._asked: set[subprocess.Popen] = set()  # to stop
        self._log = jobs > 1
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(jobs):
            self._slots.put(slot)
        self._lock, self._over = threading.Lock(), threading.Event()

    def end(self) -> None:
        """Ask all processes to stop, and begin no more."""
        self._over.set()
        with self._lock:
            for process in self._running - self._asked:
                self._asked.add(process)  # once: a second signal ends a run before it has saved
                process.terminate()
                patience = threading.Timer(_END_PATIENCE_S, process.kill)
                patience.daemon = True
                patience.start()

    def kill(self) -> None:
        """End all processes at once."""
        with self._lock:
            for process in self._running:
                process.kill()

    def make(self, number: int, launch: Launch) -> int | None:
        """Make a run; return its status, or None if all were to end before it began."""
        slot = self._slots.get()
        try:
            with self._lock:
                if self._over.is_set() or self._stopping.reason:
                    return None
                if is_finished(launch.folder):  # by another command since
                    self._on_finished()
                    return 0
                print(f"run {number}/{self._total}: {launch.title}", flush=True)
                process = _start(launch, slot, log=self._log)
                self._running.add(process)
            status = process.wait()
            if status == EXIT_DIVERGED:
                status = 0  # a result, too, if it came to its end
                if not is_finished(launch.folder):
                    self.diverged.append(launch)
            with self._lock:
                self._running.discard(process)
                stopped = status == EXIT_STOPPED or (status < 0 and process in self._asked)
                if status and not stopped:
                    self.failed.append((launch, status))
                if not status:
                    self._on_finished()
            if status:
                self.end()
            return status
        finally:
            self._slots.put(slot)


def has_checkpoint(folder: Path) -> bool:
    """Whether a run that was ended has something to go on from."""
    return any((folder / CHECKPOINTS).glob("*/*"))


def of_one_device(number: int) -> dict[str, str]:
    """Return the environment of one of several processes, to which CUDA devices are dealt out."""
    if (devices := torch.cuda.device_count()) < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # a scheduler's choice, say
    names = visible.split(",") if visible else list(map(str, range(devices)))
    return {"CUDA_VISIBLE_DEVICES": names[number % devices]}


def _start(launch: Launch, slot: int, *, log: bool) -> subprocess.Popen:
    folder = launch.folder
    if holder := holder_of(folder):
        raise SettingError(f"runs_dir must have no run under way, got {folder}, in use by {holder}")
    if folder.exists() and not (has_checkpoint(folder) or is_finished(folder)):
        shutil.rmtree(folder)  # it was ended before it had anything to go on from
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(SCRIPT), *launch.flags]
    command += ["--output-dir", str(folder), "--resume", "auto"]
    environment = os.environ | launch.environment | of_one_device(slot)
    with open(f"{folder}.log", "a", encoding="utf-8") if log else nullcontext() as out:
        # In a session of its own: Ctrl-C reaches this process alone, which asks them to stop.
        how = {"start_new_session": True, "stdout": out, "stderr": out}
        return subprocess.Popen(command, env=environment, **how)
