"""Files that are whole or absent: a reader, even after a crash, never finds half of one."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dbsl.base.errors import require

_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # some network disks, WSL
_WINDOWS = os.name == "nt"  # where no folder can be opened, and no read-only file synced

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_output(setting: str, path: Path) -> None:
    """Raise ``SettingError`` unless a file can be written there; missing folders are fine."""
    replaced = path.is_file() or not path.exists()  # no folder, device or pipe
    must = f"{setting} must be a file in a folder that can be written"
    require(path.name and replaced and can_write(path), must, path if path.name else "none")


def check_folder(setting: str, path: Path) -> None:
    """Raise ``SettingError`` unless files can be written in a folder, which may be made."""
    ok = (path.is_dir() or not path.exists()) and can_write(path / "file")
    require(ok, f"{setting} must be a folder that can be written", path)


def can_write(path: Path) -> bool:
    """Return whether a new file can be written there; it tries the nearest folder."""
    folder = next(folder for folder in path.resolve().parents if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    write_with(path, lambda temporary: temporary.write_bytes(content))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys as a CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path.resolve(), text.getvalue())  # a link remains one


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_with(path.resolve(), lambda temporary: figure.savefig(temporary, format="png"))


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` write a temporary file, and rename it to `path` once it is on the disk.

    After this returns, a power cut leaves the file whole.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # renaming keeps both if they name one file


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a temporary file to its final name once it is on the disk."""
    sync_file(temporary)
    os.replace(temporary, path)
    sync_file(path.parent)  # also the name


def sync_file(path: Path) -> None:
    """Wait until what was written to a file or folder is on the disk, if the system can tell."""
    if _WINDOWS and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a whole file a second name atomically; if links are not possible, copy it.

    Replacing the file under one name later does not change it under the other.
    """

    def give(temporary: Path) -> None:
        temporary.unlink(missing_ok=True)
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copy2(source, temporary)

    target.parent.mkdir(parents=True, exist_ok=True)
    write_with(target, give)


def describe(path: Path) -> dict[str, Any]:
    """Return a file's length and checksum."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}
