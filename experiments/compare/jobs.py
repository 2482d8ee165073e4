"""Runs of train.py as processes of one command: several at a time, all ended with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
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
_LOOK_S = 0.05  # between looks at which have ended


@dataclass(frozen=True)
class Launch:
    """One run to be made."""

    title: str  # for people
    folder: Path
    flags: tuple[str, ...] = field(repr=False)  # train.py's, without those that name the folder
    # Variables of its process, in addition to those of this one.
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass
class _Running:
    """A run under way, its place among those of a time, and when it is killed if it is to stop."""

    launch: Launch
    process: subprocess.Popen
    slot: int
    killed_at: float | None = None


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
    take turns on them. `on_finished` is called after each run that came to its end. If a run fails,
    or this process is asked to stop, those under way save and end first. One that diverges before
    its end is told at the end of all, and has no result.
    """
    waiting = deque((n, one) for n, one in enumerate(launches, 1) if not is_finished(one.folder))
    running: list[_Running] = []
    diverged: list[Launch] = []
    error: Exception | None = None  # the first is the cause
    stopped = False
    try:
        while running or (waiting and not (error or stopped)):
            ended = [one for one in running if one.process.poll() is not None]
            running = [one for one in running if one not in ended]
            try:
                for one in ended:
                    status = one.process.returncode
                    if status == EXIT_STOPPED or (status < 0 and one.killed_at):
                        stopped = True
                    elif status not in (0, EXIT_DIVERGED):
                        error = error or _failed(one.launch, status, log=jobs > 1)
                    else:
                        if status and not is_finished(one.launch.folder):
                            diverged.append(one.launch)
                        on_finished()
                stopped |= bool(waiting or running) and stopping.reason is not None
                if waiting and len(running) < jobs and not (error or stopped):
                    number, launch = waiting.popleft()
                    if is_finished(launch.folder):  # by another command since
                        on_finished()
                        continue
                    print(f"run {number}/{len(launches)}: {launch.title}", flush=True)
                    slot = min({*range(jobs)} - {one.slot for one in running})
                    running.append(_Running(launch, _start(launch, slot, log=jobs > 1), slot))
                    continue
            except Exception as raised:  # those under way save first
                error = error or raised
            if error or stopped:
                _end(running)
            time.sleep(_LOOK_S)
    finally:  # a second Ctrl-C: now
        for one in running:
            one.process.kill()
    if error:
        raise error
    for launch in diverged:
        where = f" (see {launch.folder}.log)" if jobs > 1 else ""
        print(f"warning: {launch.title} diverged and has no result{where}", flush=True)
    if stopped:
        raise RunStopped("stopped; repeat the command to continue")


def _end(running: Sequence[_Running]) -> None:
    """Ask all to stop, once: a second signal ends a run before it has saved; then kill them."""
    for one in running:
        if one.killed_at is None:
            one.killed_at = time.monotonic() + _END_PATIENCE_S
            one.process.terminate()
        elif time.monotonic() > one.killed_at:
            one.process.kill()


def _failed(launch: Launch, status: int, *, log: bool) -> SettingError:
    return SettingError(
        f"every run must end with status 0, got status {status} of {launch.folder} (see "
        f"{f'{launch.folder}.log' if log else 'above'}); repeat the command to continue"
    )


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
