"""The code that a run trains by, kept in its folder; a resumed run says if it has changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from dbsl.config.hooks import Extra
from dbsl.run.folder import PACKAGE, SUMS, Code, script_of, started_script, unlike

_DIFF = "git.diff"  # begins with the commit
_FOLDER = re.compile(r"code(-\d+)?")
_GIT_S = 30.0  # that git may take, on a slow disk


class KeptCode(Extra):
    """Keeps a run's code in `code/`, and what a resume goes on with in `code-2/` and so on."""

    def write(self, folder: Path, code: Code) -> None:
        kept = [*kept_code(folder).values()]
        changed = unlike(kept[-1], code.sums) if kept else ""
        if changed:
            print(f"warning: code has changed since the run began: {changed}", flush=True)
        if changed or not kept:
            last = max(map(_number, _folders(folder)), default=0)
            _write(folder / (f"code-{last + 1}" if last else "code"), code)

    @staticmethod
    def in_words(run_folder: Path) -> str:
        """Return which code has trained a run, for its model card."""
        said = []
        for folder, sums in kept_code(run_folder).items():
            diff = (folder / _DIFF).read_bytes() if (folder / _DIFF).exists() else b""
            commit, _, changes = diff.partition(b"\n")
            at = f" at git {commit.decode()}" if commit else ""
            at += f" with the changes in `{folder.name}/{_DIFF}`" if changes.strip() else ""
            script = script_of(sums)
            what = f"`{script}`" if script else "code without a script"
            said.append(f"{what} (kept in `{folder.name}/` of the run folder){at}")
        return ", after a resume by ".join(said)


def kept_code(run_folder: Path) -> dict[Path, Mapping[str, str]]:
    """Return the folders of the code that a run was trained by, the first first, and its sums."""
    found = [path for path in _folders(run_folder) if (path / SUMS).is_file()]
    kept = {}
    for folder in sorted(found, key=_number):
        lines = (folder / SUMS).read_text(encoding="utf-8").splitlines()
        kept[folder] = {line[66:]: line[:64] for line in lines}
    return kept


def _folders(run_folder: Path) -> list[Path]:
    return [path for path in run_folder.glob("code*") if _FOLDER.fullmatch(path.name)]


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[2] or 1)


def _write(folder: Path, code: Code) -> None:
    scratch = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(scratch, ignore_errors=True)
    lines = "".join(f"{sum_}  {name}\n" for name, sum_ in code.sums.items())
    own = {name: content for name, content in code.files.items() if not name.startswith("dbsl/")}
    own |= {SUMS: lines.encode()} | ({_DIFF: diff} if (diff := git_diff()) else {})
    for name, content in own.items():
        path = scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.replace(scratch, folder)


def git_diff() -> bytes:
    """Return the commit of the checkout that the code is in, and the changes; empty: none is."""
    script = started_script()
    git = ["git", "-C", str(script.parent if script else PACKAGE)]
    found, env = b"commit ", os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        for command in ("rev-parse HEAD", "diff HEAD --no-ext-diff --no-color"):
            options = {"env": env, "capture_output": True, "check": True, "timeout": _GIT_S}
            found += subprocess.run([*git, *command.split()], **options).stdout
    except (OSError, subprocess.SubprocessError):
        return b""  # no git, or no checkout
    return found
