"""A run's folder, held by one run alone; and the code that it trains by, which is kept there.

Processes of one run have the same settings and the same code, or none of them begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator, PartialState
from filelock import FileLock, Timeout

import dbsl
from dbsl.base.errors import SettingError
from dbsl.base.files import write_text
from dbsl.base.machine import launched_precision, remember
from dbsl.base.words import as_given, px
from dbsl.cluster.wire import refused_by_all, share_from, share_text
from dbsl.config.complete import RESOLVED
from dbsl.config.fields import Role, with_role
from dbsl.config.hooks import defaults_of_extras
from dbsl.config.parse import RUN_FOLDER, config_to_yaml
from dbsl.config.settings import RunConfig
from dbsl.plan.types import Plan

LOCK = ".lock"
# What a run leaves for people, in its folder; checkpoints and trackers' files are beside it.
RESULTS = ("README.md", "model*.safetensors", "plots/*.png", "config.json", "config.yaml")
RESULTS += ("plan.json", "summary.json", "metrics.jsonl")
SUMS = "SHA256SUMS"  # of all files, dbsl's too, as `sha256sum` writes it; the script comes first
CODE = "code*/**/*"  # all of it in a run folder
_DIFF = "git.diff"  # begins with the commit
_PACKAGE = Path(dbsl.__file__).parent
_INSTALLED = ("site-packages", "dist-packages")
_NOT_OWN = tuple(
    f"{place}{os.sep}"
    for place in (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
_MOST = 3  # files that are named
_GIT_S = 30.0  # that git may take, on a slow disk


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
        self, given: Any, resolved: Mapping[str, Any], plans: Mapping[int, Plan], code: Code
    ) -> None:
        """Write ``config.yaml``, as given and as found out, ``plan.json`` and the code.

        ``config.yaml`` leaves the folder's name out: read back, it repeats the run elsewhere.
        """
        if self._lock is None:
            return
        rows = {px(resolution) or "plan": asdict(plan) for resolution, plan in plans.items()}
        write_text(self.path / "plan.json", json.dumps(rows, indent=2))
        # Extras' defaults are left out: a run that uses none reads back without them.
        unsaid = with_role(type(given), Role.COMMAND), defaults_of_extras()
        settings = {
            name: value
            for name, value in asdict(given).items()
            if name not in unsaid[0] and (name not in unsaid[1] or value != unsaid[1][name])
        }
        write_text(self.path / "config.yaml", config_to_yaml(settings, resolved))
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


# --- the code


@dataclass(frozen=True)
class Code:
    """What this process has loaded."""

    script: str  # name of the file that was started; empty: none, as in a notebook
    # Contents of the script, and of what was imported that is neither dbsl nor installed, by name.
    files: Mapping[str, bytes]
    sums: Mapping[str, str]  # SHA-256 of these and of dbsl's files, by name


def read_code() -> Code:
    """Return the code of this process, as it is on the disk."""
    script = _script()
    names = {str(script): script.name} if script else {}
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if name != "__main__" and isinstance(path, str) and _is_own(path):
            package = "/__init__" * (Path(path).stem == "__init__")
            # The script may be there by another name, too.
            names.setdefault(str(Path(path).absolute()), f"{name.replace('.', '/')}{package}.py")
    files = {name: Path(path).read_bytes() for path, name in names.items() if os.path.isfile(path)}
    sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    first = {script.name: sums[script.name]} if script else {}
    return Code(script.name if script else "", files, first | _sums_of_dbsl() | sums)


def unlike(one: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return in words which files have unlike sums, empty: none; one that only one has is none."""
    names = [name for name, sum_ in other.items() if one.get(name, sum_) != sum_]
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def kept_code(run_folder: Path) -> list[Path]:
    """Return the folders of the code that a run was trained by, the first first."""
    found = [path for path in run_folder.glob("code*") if (path / SUMS).is_file()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2] or 1))


def changed_since(run_folder: Path, code: Code) -> str:
    """Return in words which files are not what the run was last trained by; empty: none."""
    kept = kept_code(run_folder)
    return unlike(_read_sums(kept[-1]), code.sums) if kept else ""


def write_code(run_folder: Path, code: Code) -> None:
    """Keep the code in a run's folder, in one go; what was kept before stays."""
    kept = kept_code(run_folder)
    if kept and not changed_since(run_folder, code):
        return
    folder = run_folder / (f"code-{len(kept) + 1}" if kept else "code")
    scratch = run_folder / f".{folder.name}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    lines = "".join(f"{sum_}  {name}\n" for name, sum_ in code.sums.items())
    diff = git_diff()
    own = {SUMS: lines.encode()} | ({_DIFF: diff} if diff else {})
    for name, content in {**code.files, **own}.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.replace(scratch, folder)


def code_in_words(run_folder: Path) -> str:
    """Return which code has trained a run, for its model card."""
    said = []
    for folder in kept_code(run_folder):
        script = next(iter(_read_sums(folder)))
        diff = (folder / _DIFF).read_bytes() if (folder / _DIFF).exists() else b""
        commit, _, changes = diff.partition(b"\n")
        at = f" at git {commit.decode()}" if commit else ""
        at += f" with the changes in `{folder.name}/{_DIFF}`" if changes.strip() else ""
        what = "code without a script" if script.startswith("dbsl/") else f"`{script}`"
        said.append(f"{what} (kept in `{folder.name}/` of the run folder){at}")
    return ", after a resume by ".join(said)


def git_diff() -> bytes:
    """Return the commit of the checkout that the code is in, and the changes; empty: none is."""
    script = _script()
    folder = script.parent if script else _PACKAGE
    commit = _git(folder, "rev-parse", "HEAD").strip()
    if not commit:
        return b""
    return b"commit " + commit + b"\n" + _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-color")


def _git(folder: Path, *command: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *command],
            env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
            capture_output=True,
            check=True,
            timeout=_GIT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return b""  # no git, or no checkout
    return done.stdout


def _script() -> Path | None:
    """Return the file that was started, unless it is an installed command or there is none."""
    path = getattr(sys.modules["__main__"], "__file__", None)
    return Path(path).absolute() if path and _is_own(path) and os.path.isfile(path) else None


def _is_own(path: str) -> bool:
    """Whether a path is of a file of Python that is neither dbsl's nor installed."""
    place = os.path.abspath(path)  # no Path: thousands of modules are asked about
    installed = any(f"{os.sep}{name}{os.sep}" in place for name in _INSTALLED)
    return place.endswith(".py") and not installed and not place.startswith(_NOT_OWN)


@cache  # what is loaded stays
def _sums_of_dbsl() -> dict[str, str]:
    root = _PACKAGE.parent
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(_PACKAGE.rglob("*.py"))
    }


def _read_sums(folder: Path) -> dict[str, str]:
    lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
    return {name: sum_ for sum_, _, name in (line.partition("  ") for line in lines)}


def check_alike(config: RunConfig, code: Code, state: PartialState) -> None:
    """Refuse, in all processes, settings or code that are not rank 0's (a collective).

    It is their first exchange: which others follow is for the settings to say.
    """
    if state.num_processes == 1:
        return
    # What each node has by its own cores is left out: it decides on no exchange.
    of_node = with_role(type(config), Role.NODE)
    now = {n: as_given(v) for n, v in asdict(config).items() if n not in of_node}
    if config.mixed_precision == "auto":
        now["mixed_precision"] = launched_precision() or "auto"
    now["the script"] = code.script
    first = share_from(0, json.dumps([now, dict(code.sums)]), state.device)
    (before, sums), here = json.loads(first), f"rank {state.process_index}"
    names, found = [name for name, value in now.items() if before.get(name) != value], ""
    if names:
        what, *rest = names
        more = f" (also different: {', '.join(rest)})" if rest else ""
        found = (
            f"{what} must be the same in all processes, got {before.get(what) or 'none'} on "
            f"rank 0, {now[what] or 'none'} on {here}{more}"
        )
    elif files := unlike(sums, code.sums):
        found = f"code must be the same in all processes, got another {files} on {here} than rank 0"
    flag = torch.tensor(bool(found), device=state.device).int()
    flags = [torch.empty_like(flag) for _ in range(state.num_processes)]
    dist.all_gather(flags, flag)
    if others := [rank for rank, differs in enumerate(flags) if differs]:
        raise SettingError(share_from(others[0], found, state.device))
