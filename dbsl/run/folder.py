"""A run's folder, which only one run may hold, and the code that its processes run.

All processes of a run must have the same settings and code; otherwise none begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator, PartialState
from filelock import FileLock, Timeout

import dbsl
from dbsl.base.errors import SettingError, as_given, px, require
from dbsl.base.files import write_text
from dbsl.base.machine import launched_precision, remember
from dbsl.cluster.wire import SERVER_RANK, refused_by_all, share_from, share_text
from dbsl.config.complete import FOUND
from dbsl.config.fields import Role, with_role
from dbsl.config.hooks import defaults_of_extras
from dbsl.config.parse import RUN_FOLDER, config_to_yaml
from dbsl.config.settings import AGAIN, RunConfig
from dbsl.plan.types import Plan, plan_of_epochs

LOCK = ".lock"
PACKAGE = Path(dbsl.__file__).parent
_INSTALLED = ("site-packages", "dist-packages")
_NOT_OWN = tuple(
    f"{place}{os.sep}"
    for place in (PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
_GIT_S = 30.0  # time limit for git, on a slow disk


class LockedFolder(AbstractContextManager):
    """A run's folder, locked on the main process until `release` or the process's end.

    The operating system frees the lock of a killed process. If the run ends before it writes
    anything, the folders that it created are removed. A `new` folder must not exist yet; without
    `new`, it is that of the run to resume. If the path exists and the user did not choose it
    (`named`), a number is added.
    """

    def __init__(
        self, path: Path, accelerator: Accelerator, *, new: bool, named: bool = True
    ) -> None:
        self.path = path
        self._lock: FileLock | None = None
        self._made: list[Path] = []  # created folders, the innermost first
        with refused_by_all(accelerator), ExitStack() as undo:
            if accelerator.is_main_process:
                undo.callback(self.release)
                try:
                    self._open(new, named)
                except OSError as reason:
                    raise SettingError(
                        f"output_dir must be a folder that can be written, got {path} ({reason})"
                    ) from reason
            undo.pop_all()
        self.path = Path(share_text(str(self.path), accelerator))
        if new:  # processes that a launcher restarts use the same folder
            self.path = Path(remember(RUN_FOLDER, str(self.path)))

    def write_settings(
        self, given: RunConfig, found: Mapping[str, Any], plans: Mapping[int, Plan]
    ) -> None:
        """Write ``config.yaml`` (settings as given and as found) and ``plan.json``.

        ``config.yaml`` omits the folder's name, so it can repeat the run in another folder.
        """
        if self._lock is None:
            return
        # Leave out extras' defaults: a run that uses none can be read without the extras.
        commands, unused = with_role(type(given), Role.COMMAND), defaults_of_extras().items()
        said = (pair for pair in asdict(given).items() if pair not in unused)
        settings = {name: value for name, value in said if name not in commands}
        if settings["profile"] == AGAIN:  # for this command only: kept, it would measure again
            del settings["profile"]
        write_text(self.path / "config.yaml", config_to_yaml(settings, found))
        rows = {
            px(resolution) or "plan": plan_of_epochs(plan) for resolution, plan in plans.items()
        }
        write_text(self.path / "plan.json", json.dumps(rows, indent=2))

    def keep_script(self, code: Mapping[str, bytes]) -> None:
        """Copy the script into the folder; a resume with a changed script also keeps the old."""
        script = script_of(code)
        if self._lock is None or not script:
            return
        path, content = self.path / Path(script).name, code[script]
        if path.exists() and path.read_bytes() != content:
            number = next(n for n in count(1) if not path.with_stem(f"{path.stem}-{n}").exists())
            before = path.with_stem(f"{path.stem}-{number}")
            path.rename(before)
            what = f"{path.name} has changed since the run began; it was kept as {before.name}"
            print(f"warning: {what}", flush=True)
        path.write_bytes(content)

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Unlock the folder; remove it if this run created it and left it empty."""
        if self._lock is not None:
            (self.path / LOCK).unlink(missing_ok=True)  # while locked; FileLock allows it
            self._lock.release()
            self._lock = None
        while self._made:
            with suppress(OSError):  # not empty, or never created
                self._made.pop(0).rmdir()

    def _open(self, new: bool, named: bool) -> None:
        path = self.path
        for number in count(2):
            self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
            try:
                self.path.mkdir(parents=True)
            except FileExistsError:
                self._made = []
            if named or self._made:
                break
            self.path = path.with_name(f"{path.name}-{number}")
        if not self.path.is_dir():
            raise SettingError(f"output_dir must be a folder, got file {self.path}")
        inside = {entry.name for entry in self.path.iterdir()} - {LOCK}
        hint = "; --resume auto continues the run in it" * ("config.yaml" in inside)
        got = f"{self.path}, which exists{hint}"
        require(not (new and inside), "output_dir must be a new folder", got)
        lock = self.path / LOCK
        self._lock = FileLock(lock)  # before acquiring: a full disk may leave an empty file
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            self._lock = None
            raise SettingError(
                f"output_dir must be no other run's, got {self.path}, which is in use by "
                f"{holder_of(self.path)}"
            ) from None
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        with suppress(PermissionError):  # Windows forbids writing to a locked file
            lock.write_text(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")


def holder_of(path: Path) -> str | None:
    """Return the process that holds a run's folder, or None."""
    if not (path / LOCK).exists():
        return None
    try:
        with FileLock(path / LOCK, blocking=False):
            return None
    except Timeout:
        text = (path / LOCK).read_text(encoding="utf-8", errors="replace")
        return text.strip() or "another process"


def default_folder(config: Any) -> Path:
    """Return the default folder of a run, under ``runs/``."""
    dataset = Path(config.dataset).stem or "data"
    model = Path(config.model.rpartition(":")[2]).name  # local-dir:runs/first gives first
    return Path(f"runs/{dataset}-{model}-{time.strftime('%Y%m%d-%H%M%S')}")


def settings_in(folder: Path) -> dict[str, Any]:
    """Return a run's settings from its config.yaml, including those that it found."""
    given = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    return given | given.pop(FOUND, {})


# --- the code


def read_code() -> dict[str, bytes]:
    """Return this process's code as it is on disk: contents by name, the script first.

    It has the loaded modules that are not installed, and dbsl, wherever it is.
    """
    script = started_script()
    names = {str(script): script.name} if script else {}
    dbsl_first = sorted(sys.modules.items(), key=lambda it: (not it[0].startswith("dbsl"), it[0]))
    for name, module in dbsl_first:
        path = getattr(module, "__dict__", {}).get("__file__")
        own = isinstance(path, str) and (_is_own(path) or path.startswith(_NOT_OWN[0]))
        if own and name != "__main__":
            package = "/__init__" * (Path(path).stem == "__init__")
            # The script may also be loaded under another name.
            names.setdefault(str(Path(path).absolute()), f"{name.replace('.', '/')}{package}.py")
    return {name: Path(p).read_bytes() for p, name in names.items() if os.path.isfile(p)}


def script_of(code: Mapping[str, bytes]) -> str:
    """Return the name of the script; empty if there is none, as in a notebook."""
    first = next(iter(code))
    return "" if first.startswith("dbsl/") else first


def started_script() -> Path | None:
    """Return the file that was started; None if there is none or it is an installed command."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return Path(path).absolute() if path and _is_own(path) and os.path.isfile(path) else None


def commit_of(script: Path | None) -> str:
    """Return the commit of a script's checkout; ``-dirty`` if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        how = {"capture_output": True, "check": True, "timeout": _GIT_S, "text": True}
        folder = script.parent if script else PACKAGE
        return subprocess.run(command, cwd=folder, **how).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""  # no git or no checkout


def _is_own(path: str) -> bool:
    """Return whether a path is a Python file that is neither dbsl's nor installed."""
    place = os.path.abspath(path)  # not Path: there are thousands of modules
    installed = any(f"{os.sep}{name}{os.sep}" in place for name in _INSTALLED)
    return place.endswith(".py") and not installed and not place.startswith(_NOT_OWN)


def check_alike(config: RunConfig, code: Mapping[str, bytes], state: PartialState) -> None:
    """Refuse, in all processes, settings or code that differ from rank 0's (a collective).

    It is the first exchange; the settings decide which exchanges follow.
    """
    if state.num_processes == 1:
        return
    # Leave out settings that follow from a node's own cores: they affect no exchange.
    of_node = with_role(type(config), Role.NODE)
    now = {n: as_given(v) for n, v in asdict(config).items() if n not in of_node}
    if config.mixed_precision == "auto":
        now["mixed_precision"] = launched_precision() or "auto"
    now["the script"] = script_of(code)
    now |= {f"code of {n}": hashlib.sha256(text).hexdigest()[:12] for n, text in code.items()}
    first = json.loads(share_from(SERVER_RANK, json.dumps(now), state.device))
    here, found = f"rank {state.process_index}", ""
    # A file that only one process has loaded is no difference.
    if names := [name for name, value in now.items() if first.get(name, value) != value]:
        what, *rest = names
        more = f" (also different: {', '.join(rest)})" if rest else ""
        found = (
            f"{what} must be the same in all processes, got {first[what] or 'none'} on rank 0, "
            f"{now[what] or 'none'} on {here}{more}"
        )
    rank = torch.tensor(state.process_index if found else state.num_processes, device=state.device)
    dist.all_reduce(rank, dist.ReduceOp.MIN)
    if rank < state.num_processes:
        raise SettingError(share_from(int(rank), found, state.device))
