"""Files of row groups on the disk of a machine, shared by its processes, in a bounded space.

A process says which files it needs before it has them, and holds them until it does not. Files that
anybody holds stay. The rest goes when room is needed. Locks of a process that was killed are free
again, and what it held with them.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

from dbsl.base.errors import ReadError, SettingError, words_of
from dbsl.base.files import put_in_place
from dbsl.base.machine import lazy_import

pa = lazy_import("pyarrow")

PAUSES_S = (1.0, 5.0)  # before a file is tried again
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}  # not the source's fault: trying again is no help
_STRIPES = 64  # locks of files that are being written, by name
_WRITTEN_WITHIN_S = 600.0  # by another process that writes the same file, or one of its stripe
_LOCKED_WITHIN_S = 600.0  # for what others hold the folder's lock for, a look at its files
_FILE, _HELD, _ALIVE = ".arrow", ".held", ".alive"


class GroupCache:
    """The files in a folder of this machine, and which of them this process holds.

    All files may take `limit` bytes. Processes of one run name the same limit and folder.
    """

    def __init__(self, folder: Path, limit: int, processes: int = 1) -> None:
        self.folder, self.limit, self.processes = folder, limit, processes
        self.share = limit // processes  # bytes that this process may hold at a time
        self._name, self._known, self._whole = uuid.uuid4().hex, set[str](), set[str]()
        self._held: dict[str, int] = {}  # bytes
        self._holders: dict[str, set[object]] = {}  # who holds what
        self.stop_bringing: Callable[[], object] = lambda: None  # the latest files
        self._mutex = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        alive = FileLock(folder / f"{self._name}{_ALIVE}", thread_local=False)
        with self._locked():  # nobody sees the lock's file before it is locked
            alive.acquire()
            self._make_room({})
        self._end = weakref.finalize(self, _leave, folder, self._name, alive, os.getpid())

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

    def hold(
        self,
        weights: Mapping[str, int],
        later: Mapping[str, int] | None = None,
        holder: object = None,
    ) -> None:
        """Hold files, which need not be there yet, and make room for them.

        `weights` are their bytes, together with what is held at most `share`; `later` are files
        that will be needed after these, and when: the last of them go first. A file stays until all
        its holders in this process let go.
        """
        with self._mutex, self._locked():
            self._held |= {n: w for n, w in weights.items() if n not in self._held}
            for name in weights:
                self._holders.setdefault(name, set()).add(holder)
            path = self.folder / f"{self._name}{_HELD}"
            path.with_suffix(".new").write_text(json.dumps(self._held), encoding="utf-8")
            path.with_suffix(".new").replace(path)
            self._make_room(later or {})

    def release(self, *names: str, holder: object = None) -> None:
        """Let a holder's files go. Other processes learn of it when this one holds its next."""
        with self._mutex:
            for name in names:
                holders = self._holders.get(name, set())
                holders.discard(holder)
                if not holders:
                    self._holders.pop(name, None)
                    self._held.pop(name, None)
        for name in names:
            with suppress(OSError):
                os.utime(self.folder / name)

    def fetch(self, name: str, write: Callable[[Path], None], what: str) -> Path:
        """Return the file of a name, written unless it is there whole.

        One process of the machine writes it. A file that cannot be written is tried again. This
        process must hold it; `what` says what it is, for people.
        """
        path = self.folder / name
        if name in self._whole and path.exists():
            return path
        for pause in (*PAUSES_S, None):
            try:
                self._write(path, write)
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

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        stripe = int(path.stem[:8], 16) % _STRIPES
        with FileLock(self.folder / f"writing-{stripe}.lock", timeout=_WRITTEN_WITHIN_S):
            if not _is_whole(path):
                temporary = path.with_name(f"{path.name}.{self._name}")
                try:
                    write(temporary)
                    put_in_place(temporary, path)
                finally:
                    temporary.unlink(missing_ok=True)
        self._whole.add(path.name)
        with self._mutex:
            if path.name in self._held:
                self._held[path.name] = path.stat().st_size

    def _locked(self) -> AbstractContextManager[object]:
        """Have the lock of the folder: of what is held, and of what is removed."""
        try:
            return FileLock(self.folder / "all.lock").acquire(timeout=_LOCKED_WITHIN_S)
        except Timeout:
            raise ReadError(
                f"{self.folder} has been locked by another process for {_LOCKED_WITHIN_S:g} s "
                "(one that was stopped?)"
            ) from None

    def _make_room(self, later: Mapping[str, int]) -> None:
        """Remove files that nobody holds until the rest, and what is held, fit."""
        living = self._living()
        held, there = dict(self._held), {}
        for name in living:
            with suppress(OSError, ValueError):
                path = self.folder / f"{name}{_HELD}"
                held = json.loads(path.read_text(encoding="utf-8")) | held
        with os.scandir(self.folder) as entries:
            for entry in entries:
                name, dot, owner = entry.name.partition(_FILE)
                if dot and not owner:
                    with suppress(FileNotFoundError):
                        there[entry.name] = entry.stat()
                elif dot and owner[1:] not in living:  # half of a file
                    _remove(Path(entry.path))
        total = sum(stat.st_size for stat in there.values())
        total += sum(weight for name, weight in held.items() if name not in there)

        def worth(name: str) -> tuple[int, float]:
            if name in later:
                return 2, -later[name]
            used = there[name].st_mtime
            # The files of an epoch that were used last are needed last.
            return (1, -used) if name in self._known else (0, used)

        for name in sorted(there.keys() - held.keys(), key=worth):
            if total <= self.limit:
                break
            if _remove(self.folder / name):
                total -= there[name].st_size
                self._whole.discard(name)

    def _living(self) -> set[str]:
        """Return the names of the processes that use the folder, this one included."""
        living = {self._name}
        for path in self.folder.glob(f"*{_ALIVE}"):
            if path.stem == self._name:
                continue
            lock = FileLock(path)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                living.add(path.stem)
            else:
                lock.release()
                _leave(self.folder, path.stem)
        return living


def _leave(folder: Path, name: str, alive: FileLock | None = None, process: int = 0) -> None:
    if process not in (0, os.getpid()):
        return  # a fork of it
    for ending in (_HELD, ".new", _ALIVE):
        _remove(folder / f"{name}{ending}")
    if alive is not None:
        alive.release()


def _is_whole(path: Path) -> bool:
    """Whether a file is there and not damaged; one that is damaged is removed."""
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            for number in range(reader.num_record_batches):
                reader.get_batch(number)
    except (OSError, pa.ArrowException):
        _remove(path)
        return False
    return True


def _remove(path: Path) -> bool:
    """Remove a file; where that cannot be, as of an open one on Windows, it stays for now."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return False
    return True
