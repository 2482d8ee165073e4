"""Files of row groups on the disk of a machine, shared by its processes, in a bounded space.

A process has each file that it needs open, under a shared lock of the operating system. A file is
removed under an exclusive lock alone, so what anybody needs stays. Locks of a process that was
killed are free again. The rest goes when room is needed.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from dbsl.base.errors import ReadError, SettingError, words_of
from dbsl.base.files import put_in_place
from dbsl.base.machine import lazy_import

fcntl, pa = lazy_import("fcntl"), lazy_import("pyarrow")  # Windows has no fcntl

PAUSES_S = (1.0, 5.0)  # before a file is tried again
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # not the source's fault: trying again is no help
_STRIPES = 64  # locks of files that are being written, by name
_LOCKED_WITHIN_S = 600.0  # for what others look at the files, or write one, for
_FILE = ".arrow"


class GroupCache:
    """The files in a folder of this machine, and which of them this process holds.

    All files may take `limit` bytes. Processes of one run name the same limit and folder.
    """

    def __init__(self, folder: Path, limit: int, processes: int = 1) -> None:
        self.folder, self.limit, self.processes = folder, limit, processes
        self.share = limit // processes  # bytes that this process may hold at a time
        self._known, self._whole = set[str](), set[str]()
        self._held: dict[str, int] = {}  # file descriptors under a shared lock, by name
        self._holders: dict[str, set[object]] = {}  # who holds what
        self.stop_bringing: Callable[[], object] = lambda: None  # the latest files
        self._mutex = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self._make_room(0)

    def check_room(self, needed: int, why: str = "") -> None:
        """Refuse a cache in which a process may hold less than it needs, bytes."""
        if needed <= self.share:
            return
        least, digits = needed * self.processes / 2**30, 2
        digits -= int(np.floor(np.log10(least)))
        least = np.ceil(least * 10.0**digits) / 10.0**digits  # rounded up: it is enough
        why += f", a part for each of {self.processes} processes" * (self.processes > 1)
        given = f"{self.limit / 2**30:.3g}"
        raise SettingError(f"cache_gib must be at least {least:.3g}{why}, got {given}")

    def knows(self, *names: str) -> None:
        """Tell which files the data in use have: they are kept for longer than others."""
        self._known.update(names)

    def fetch(
        self,
        name: str,
        weight: int,
        write: Callable[[Path], None],
        what: str,
        holder: object = None,
    ) -> Path:
        """Hold the file of a name, of about `weight` bytes, written unless it is there whole.

        One process of the machine writes it. A file that cannot be written is tried again. It stays
        until all its holders in this process let go; together they hold at most `share` bytes.
        `what` says what it is, for people.
        """
        path = self.folder / name
        for pause in (*PAUSES_S, None):
            try:
                stripe = int(path.stem[:8], 16) % _STRIPES
                with self._locked(f"writing-{stripe}"):
                    if not self._take(path, holder):
                        self._write(path, weight, write, holder)
                return path
            except Exception as error:  # libraries that read from anywhere raise anything
                refused = isinstance(error, SettingError)  # not pyarrow's, which is a kind of it
                if refused or (isinstance(error, OSError) and error.errno in _DISK):
                    raise
                if pause is None:
                    raise ReadError(
                        f"{what} cannot be read, tried {len(PAUSES_S) + 1} times "
                        f"({words_of(error)})"
                    ) from error
            time.sleep(pause)
        raise AssertionError("unreachable")

    def release(self, *names: str, holder: object = None) -> None:
        """Let a holder's files go; they stay on the disk until others need the room."""
        with self._mutex:
            for name in names:
                holders = self._holders.get(name, set())
                holders.discard(holder)
                if not holders and name in self._held:
                    file = self._held.pop(name)
                    with suppress(OSError):  # removed by hand
                        os.utime(self.folder / name)
                    # Forks, such as loader processes, have the descriptor, too, and the lock is
                    # that of all.
                    fcntl.flock(file, fcntl.LOCK_UN)
                    os.close(file)

    def _take(self, path: Path, holder: object) -> bool:
        """Hold a file that is there and whole; False: it is not."""
        name = path.name
        with self._mutex:
            if name not in self._held:
                with self._locked("all"):  # nobody removes it before it is locked
                    try:
                        file = os.open(path, os.O_RDONLY)
                    except FileNotFoundError:
                        return False
                    fcntl.flock(file, fcntl.LOCK_SH)
                if name not in self._whole and not _is_whole(path):
                    os.close(file)
                    path.unlink(missing_ok=True)
                    return False
                self._hold(name, file, holder)
            self._holders[name].add(holder)
        return True

    def _hold(self, name: str, file: int, holder: object) -> None:
        self._whole.add(name)
        self._held[name] = file
        self._holders[name] = {holder}

    def _write(
        self, path: Path, weight: int, write: Callable[[Path], None], holder: object
    ) -> None:
        # While it is written, others count the bytes that its name says.
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{weight}")
        file = self._make_room(weight, temporary)
        try:
            write(temporary)
            put_in_place(temporary, path)
        except BaseException:
            os.close(file)
            temporary.unlink(missing_ok=True)
            raise
        fcntl.flock(file, fcntl.LOCK_SH)  # the file itself, under its name
        with self._mutex:
            self._hold(path.name, file, holder)
        if path.stat().st_size > weight:
            self._make_room(0)

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Have a lock of the folder; `all` is that of what is held, and of what is removed."""
        try:
            with FileLock(self.folder / f"{name}.lock", timeout=_LOCKED_WITHIN_S):
                yield
        except Timeout:
            raise ReadError(
                f"{self.folder} has been locked by another process for {_LOCKED_WITHIN_S:g} s "
                "(one that was stopped?)"
            ) from None

    def _make_room(self, weight: int, temporary: Path | None = None) -> int | None:
        """Remove files that nobody holds until `weight` bytes fit; begin a file that takes them."""
        with self._locked("all"):
            sizes, used = {}, {}
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    _, ending, more = entry.name.partition(_FILE)
                    if ending:
                        size, used[entry.name] = entry.stat().st_size, entry.stat().st_mtime
                        sizes[entry.name] = max(size, int(more.rpartition(".")[2] or 0))
            total = weight + sum(sizes.values())

            def worth(name: str) -> tuple[int, float]:
                if not name.endswith(_FILE):
                    return 0, 0.0  # half of a file, whose writer holds it, or was killed
                # The files of an epoch that were used last are needed last.
                return (2, -used[name]) if name in self._known else (1, used[name])

            for name in sorted(sizes, key=worth):
                if (total > self.limit or not name.endswith(_FILE)) and self._remove(name):
                    total -= sizes[name]
            if temporary is None:
                return None
            file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            fcntl.flock(file, fcntl.LOCK_EX)
            return file

    def _remove(self, name: str) -> bool:
        """Remove a file, unless anybody holds it."""
        file = os.open(self.folder / name, os.O_RDONLY)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (self.folder / name).unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(file)
        self._whole.discard(name)
        return True


def _is_whole(path: Path) -> bool:
    """Whether a file is not damaged."""
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                reader.get_batch(number)
    except (OSError, pa.ArrowException):
        return False
    return True
