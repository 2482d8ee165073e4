"""The run folder: made by one run, and held by it alone for as long as it lives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from accelerate import Accelerator
from filelock import FileLock, Timeout

from dbsl.base.errors import SettingError
from dbsl.base.files import write_text
from dbsl.base.machine import remember
from dbsl.base.words import px
from dbsl.cluster.wire import refused_by_all, share_text
from dbsl.config.complete import RESOLVED
from dbsl.config.fields import Role, with_role
from dbsl.config.hooks import defaults_of_extras
from dbsl.config.parse import RUN_FOLDER, config_to_yaml
from dbsl.plan.types import Plan
from dbsl.run.code import Code, write_code

LOCK = ".lock"
# What a run leaves for people, in its folder; checkpoints and trackers' files are beside it.
RESULTS = ("README.md", "model*.safetensors", "plots/*.png", "config.json", "config.yaml")
RESULTS += ("plan.json", "summary.json", "metrics.jsonl")


class RunFolder:
    """A run's folder, locked on the main process until `release` or the process's end.

    The operating system frees the lock of a process that is killed. A folder that this run has made
    goes again, if the run ends before it has written anything. A `new` one must not be there yet;
    else it is a run's that is resumed. Unless somebody chose (`named`) the path, a number is added
    where it is taken.
    """

    def __init__(
        self, path: Path, accelerator: Accelerator, *, new: bool, named: bool = True
    ) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._made: list[Path] = []  # folders, the innermost first
        with refused_by_all(accelerator):
            if accelerator.is_main_process:
                try:
                    self._open(new, named)
                except (SettingError, OSError) as reason:
                    self.release()
                    if isinstance(reason, SettingError):
                        raise
                    raise SettingError(
                        f"output_dir must be a folder that can be written, got {path} ({reason})"
                    ) from reason
        self.path = Path(share_text(str(self.path), accelerator))
        if new:  # a launcher that restarts the processes finds them in the folder that they were in
            self.path = Path(remember(RUN_FOLDER, str(self.path)))

    def write_settings(
        self, given: Any, resolved: Mapping[str, Any], plans: Mapping[int, Plan]
    ) -> None:
        """Write ``config.yaml``, as given and as found out, and ``plan.json`` on the main process.

        ``config.yaml`` leaves the folder's name out: read back, it repeats the run elsewhere.
        """
        if self._lock is None:
            return
        rows = {px(resolution) or "plan": asdict(plan) for resolution, plan in plans.items()}
        write_text(self.path / "plan.json", json.dumps(rows, indent=2))
        commands = with_role(type(given), Role.COMMAND)
        extras = defaults_of_extras()  # left out: a run that uses none reads back without them
        settings = {
            name: value
            for name, value in asdict(given).items()
            if name not in commands and (name not in extras or value != extras[name])
        }
        write_text(self.path / "config.yaml", config_to_yaml(settings, resolved))

    def write_code(self, code: Code) -> None:
        """Keep the code that the run goes on with, on the main process."""
        if self._lock is not None:
            write_code(self.path, code)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Let go of the folder; remove it, if this run has made it and left it empty."""
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)  # while it is held; FileLock copes with that
            self._lock.release()
            self._lock = None
        while self._made:
            with contextlib.suppress(OSError):  # not empty, or never made
                self._made.pop(0).rmdir()

    def _open(self, new: bool, named: bool) -> None:
        path, number = self.path, 1
        while not self._make():
            if named:
                break
            number += 1
            self.path = path.with_name(f"{path.name}-{number}")
        if not self.path.is_dir():
            raise SettingError(f"output_dir must be a folder, got file {self.path}")
        inside = {entry.name for entry in self.path.iterdir()} - {LOCK}
        if new and inside:
            has_run = "config.yaml" in inside
            hint = "; --resume auto goes on with the run in it" if has_run else ""
            raise SettingError(
                f"output_dir must be a new folder, got {self.path}, which exists{hint}"
            )
        self._take_lock()

    def _make(self) -> bool:
        """Make the folder; say whether it was not there."""
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True)
        except FileExistsError:
            self._made = []
        return bool(self._made)

    def _take_lock(self) -> None:
        path = self.path / LOCK
        self._lock = FileLock(path)  # before it is taken: a full disk may leave an empty file
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            self._lock = None
            raise SettingError(
                f"output_dir must be no other run's, got {self.path}, which is in use by "
                f"{_holder(path)}"
            ) from None
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        path.write_text(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")


def holder_of(path: Path) -> str | None:
    """Return which process holds a run's folder, or None."""
    if not (path / LOCK).exists():
        return None
    try:
        with FileLock(path / LOCK, blocking=False):
            return None
    except Timeout:
        return _holder(path / LOCK)


def _holder(lock: Path) -> str:
    return lock.read_text(encoding="utf-8", errors="replace").strip() or "another process"


def default_folder(config: Any) -> Path:
    """Return the run folder of a run for which none is named, under ``runs/``."""
    dataset = Path(config.dataset).stem or "data"
    model = Path(config.model.rpartition(":")[2]).name  # local-dir:runs/first is named first
    return Path(f"runs/{dataset}-{model}-{time.strftime('%Y%m%d-%H%M%S')}")


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of a run by its config.yaml, with what it found out."""
    given = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return given | given.pop(RESOLVED, {})


def check_metrics(path: Path, keep_bytes: int) -> None:
    """Raise ``SettingError`` unless metrics.jsonl has the bytes that a run goes on behind."""
    size = path.stat().st_size if path.exists() else 0
    if size < keep_bytes:
        raise SettingError(
            f"metrics.jsonl must have the {keep_bytes} bytes it had at the checkpoint, "
            f"got {size} in {path}"
        )
