"""Files of row groups on a machine's disk, shared by its processes, in about a given space.

Removing a file costs only time. A file has its name once it is complete, an open file remains
readable, and a process that misses one writes it again. Its time shows other processes whether it
is in use: a needed file's time is far in the future, and another's is that of its release.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from dbsl.base.errors import ReadError, SettingError, words_of
from dbsl.base.files import put_in_place

logger = logging.getLogger(__name__)

PAUSES_S = (1.0, 5.0)  # before a file is tried again
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # not the source's fault: no use trying again
_STRIPES = 64  # locks for writing files, chosen by name
_LOCKED_WITHIN_S = 600.0  # longest wait while others look at the files, or write one
_AHEAD_S = 1e8  # lead of a needed file's time; file systems may end in 2038
_FILE = ".arrow"


class GroupCache:
    """The files in a folder of this machine, which together may take `limit` bytes."""

    def __init__(self, folder: Path, limit: int, processes: int = 1) -> None:
        self.folder, self.limit, self.processes = folder, limit, processes
        self.share = limit // processes  # bytes that this process may need at a time
        self._told = False  # whether it said that it needs more
        self._known = set[str]()
        folder.mkdir(parents=True, exist_ok=True)
        self._make_room(0)

    def knows(self, *names: str) -> None:
        """Name the files of the data in use, which are kept longer than others."""
        self._known.update(names)

    def tell_need(self, needed: int) -> None:
        """Warn once that this process needs more bytes than its share."""
        if not self._told:
            self._told = True
            logger.warning(
                "cache_gib is too small: the batches at hand need %.3g GiB or more, got %.3g; row "
                "groups are read more than once",
                *(needed * self.processes / 2**30, self.limit / 2**30),
            )

    def fetch(self, name: str, weight: int, write: Callable[[Path], None], what: str) -> Path:
        """Return the file of a name, of about `weight` bytes; write it if it is missing.

        One process of the machine writes it, and tries again if that fails. The file is needed
        until `let_go`. `what` describes it in messages.
        """
        path = self.folder / name
        for pause in (*PAUSES_S, None):
            try:
                if not path.exists():
                    with self._locked(f"writing-{int(path.stem[:8], 16) % _STRIPES}"):
                        if not path.exists():
                            self._write(path, weight, write)
                with suppress(FileNotFoundError):  # removed since
                    os.utime(path, (time.time() + _AHEAD_S,) * 2)
                return path
            except Exception as error:  # libraries that read from anywhere raise anything
                refused = isinstance(error, SettingError)  # not ValueError: pyarrow raises it
                if refused or (isinstance(error, OSError) and error.errno in _DISK):
                    raise
                if pause is None:
                    raise ReadError(
                        f"{what} cannot be read, tried {len(PAUSES_S) + 1} times "
                        f"({words_of(error)})"
                    ) from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def let_go(self, *names: str) -> None:
        """Release files; they remain on the disk until others need the room."""
        for name in names:
            with suppress(FileNotFoundError):
                os.utime(self.folder / name)

    def _write(self, path: Path, weight: int, write: Callable[[Path], None]) -> None:
        # While it is being written, others count the bytes in its name.
        temporary = path.with_name(f"{path.name}.{weight}")
        self._make_room(weight, temporary)
        try:
            write(temporary)
            larger = temporary.stat().st_size > weight
            put_in_place(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        if larger:
            self._make_room(0)

    def _locked(self, name: str) -> FileLock:
        """Return a lock of the folder; `all` guards counting and removing files."""
        return FileLock(self.folder / f"{name}.lock", timeout=_LOCKED_WITHIN_S)

    def _make_room(self, weight: int, temporary: Path | None = None) -> None:
        """Remove files until `weight` bytes fit or none is left; create the file to write."""
        with self._locked("all"):
            sizes, used = {}, {}
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    _, ending, more = entry.name.partition(_FILE)
                    with suppress(FileNotFoundError):  # it was just renamed
                        if ending:
                            size, used[entry.name] = entry.stat().st_size, entry.stat().st_mtime
                            sizes[entry.name] = max(size, int(more.rpartition(".")[2] or 0))
            total, now = weight + sum(sizes.values()), time.time()
            half = {name for name in sizes if not name.endswith(_FILE)}

            def worth(name: str) -> tuple[int, float]:
                if name in half:
                    return 0, 0.0
                if used[name] > now:  # needed, or left by a killed process if long ago
                    return 3, used[name]
                # In an epoch, files used last are needed last.
                return (2, -used[name]) if name in self._known else (1, used[name])

            for name in sorted(sizes, key=worth):
                # Nobody waits longer for a writer: it was killed.
                if used[name] < now - _LOCKED_WITHIN_S if name in half else total > self.limit:
                    (self.folder / name).unlink(missing_ok=True)
                    total -= sizes[name]
            if temporary is not None:
                temporary.touch()
