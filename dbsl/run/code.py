"""The code that a run trains with: kept in its folder, and the same in all processes.

Processes of one run have the same settings and the same code, or none of them begins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState

import dbsl
from dbsl.base.errors import SettingError
from dbsl.base.machine import launched_precision
from dbsl.base.words import as_given
from dbsl.cluster.wire import share_from
from dbsl.config.fields import Role, with_role
from dbsl.config.settings import RunConfig

SUMS = "SHA256SUMS"  # of all files, dbsl's too, as `sha256sum` writes it; the script comes first
DIFF = "git.diff"  # begins with the commit
CODE = "code*/**/*"  # all of it in a run folder
_PACKAGE = Path(dbsl.__file__).parent
_INSTALLED = ("site-packages", "dist-packages")
_NOT_OWN = tuple(
    f"{place}{os.sep}"
    for place in (_PACKAGE, sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
)
_MOST = 3  # files that are named
_GIT_S = 30.0  # that git may take, on a slow disk


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
    for name, path in _imported():
        names.setdefault(str(path), name)  # the script may be there by another name, too
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
    own = {SUMS: lines.encode()} | ({DIFF: diff} if diff else {})
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
        diff = (folder / DIFF).read_bytes() if (folder / DIFF).exists() else b""
        commit, _, changes = diff.partition(b"\n")
        at = f" at git {commit.decode()}" if commit else ""
        at += f" with the changes in `{folder.name}/{DIFF}`" if changes.strip() else ""
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


def _imported() -> Iterator[tuple[str, Path]]:
    """Yield name and path of each file that was imported and is neither dbsl nor installed."""
    for name, module in sorted(sys.modules.items()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if name != "__main__" and isinstance(path, str) and _is_own(path):
            package = "/__init__" * (Path(path).stem == "__init__")
            yield f"{name.replace('.', '/')}{package}.py", Path(path).absolute()


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


# What each node has by its own cores. It decides on no exchange, and what was found out is compared
# as the settings that it is.


def check_alike(config: RunConfig, code: Code, state: PartialState) -> None:
    """Refuse, in all processes, settings or code that are not rank 0's (a collective).

    It is their first exchange: which others follow is for the settings to say.
    """
    if state.num_processes == 1:
        return
    own = _described(config, code)
    first = json.loads(share_from(0, json.dumps(own), state.device))
    found = _difference(first, own, f"rank {state.process_index}")
    own_flag = torch.tensor(found is not None, device=state.device).int()
    flags = [torch.empty_like(own_flag) for _ in range(state.num_processes)]
    dist.all_gather(flags, own_flag)
    others = [rank for rank, flag in enumerate(flags) if flag]
    if others:
        raise SettingError(share_from(others[0], found or "", state.device))


def _difference(first: Mapping[str, Any], own: Mapping[str, Any], here: str) -> str | None:
    """Return in one line what is not the same as on rank 0; None: nothing."""
    before = first["settings"] | {"the script": first["script"]}
    now = own["settings"] | {"the script": own["script"]}
    names = [name for name, value in now.items() if before.get(name) != value]
    if names:
        what, *rest = names
        more = f" (also different: {', '.join(rest)})" if rest else ""
        return (
            f"{what} must be the same in all processes, got {before.get(what) or 'none'} on "
            f"rank 0, {now[what] or 'none'} on {here}{more}"
        )
    if files := unlike(first["code"], own["code"]):
        return f"code must be the same in all processes, got another {files} on {here} than rank 0"
    return None


def _described(config: RunConfig, code: Code) -> dict[str, Any]:
    of_node = with_role(type(config), Role.NODE)
    settings = {n: as_given(v) for n, v in asdict(config).items() if n not in of_node}
    if config.mixed_precision == "auto":
        settings["mixed_precision"] = launched_precision() or "auto"
    return {"settings": settings, "script": code.script, "code": dict(code.sums)}
