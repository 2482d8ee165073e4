"""Folders of files at a URL, through fsspec: which are whole, and the way there and back.

A file may be cut off on its way. A folder counts by its listing, which is written last, and each of
its files by the length and checksum in there.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from dbsl.base.errors import SettingError, in_line
from dbsl.base.files import describe
from dbsl.base.machine import lazy_import
from dbsl.config.settings import CHECKPOINT, CHECKPOINTS

fsspec = lazy_import("fsspec")

T = TypeVar("T")

LISTING = "mirror.json"
RUN = "run"  # in a checkpoint's folder: what its run folder had when it was mirrored
_TRIES = 4
# No second try brings the right, file, library or operation that is lacking. A ValueError may pass:
# a server's answer that was cut off is no JSON.
_HOPELESS = (PermissionError, FileNotFoundError, ImportError, NotImplementedError)
_PART = r"[^./\\:][^/\\:]*"
_FILE = re.compile(rf"({_PART}/)*{_PART}")  # no way out of the folder


class DamagedError(Exception):
    """A folder at a URL that is not whole."""


@dataclass(frozen=True)
class Listing:
    """What a folder at a URL holds."""

    run: str  # a name that the run has for itself
    files: dict[str, dict[str, Any]]  # length and SHA-256 of each, by name
    sequence: int = 0  # number of the checkpoint; 0: it is the run's own folder
    session: str = ""  # name of the process that mirrors; in the run's own folder alone


class Bucket:
    """A folder at a URL; its own folders are named by their path in it, "" is itself.

    Errors are those of the file system: ask within `refusing`, or be ready for any.
    """

    def __init__(self, url: str) -> None:
        self._fs, root = fsspec.url_to_fs(url)
        if isinstance(self._fs, fsspec.implementations.local.LocalFileSystem):
            # Others make folders unasked.
            self._fs = type(self._fs)(auto_mkdir=True)
        self._root = PurePosixPath(root)
        self.url = url.rstrip("/")

    def names(self, folder: str = "") -> list[str]:
        """Return what is in a folder; there may be none."""
        self._fs.invalidate_cache()
        try:
            return [PurePosixPath(p).name for p in self._fs.ls(self._at(folder), detail=False)]
        except FileNotFoundError:
            return []

    def listing(self, folder: str = "") -> Listing | None:
        """Return a folder's listing; None: there is none that can be read."""
        self._fs.invalidate_cache()
        try:
            content = self._fs.cat_file(self._at(folder, LISTING))
        except FileNotFoundError:
            return None
        try:
            listing = Listing(**json.loads(content))
            names = all(_FILE.fullmatch(name) for name in listing.files)
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        return listing if names and type(listing.sequence) is int else None

    def checkpoints(self) -> dict[str, Listing | None]:
        """Return the checkpoints, newest first; in front those without a listing."""
        names = [name for name in self.names(CHECKPOINTS) if CHECKPOINT.fullmatch(name)]
        found = {name: self.listing(f"{CHECKPOINTS}/{name}") for name in names}
        order = sorted(found, key=lambda n: found[n].sequence if found[n] else 2**31, reverse=True)
        return {name: found[name] for name in order}

    def put(self, folder: str, files: Mapping[str, Path], listing: Listing) -> None:
        """Upload files, and the listing when they are there."""
        with tempfile.TemporaryDirectory() as scratch:
            last = Path(scratch) / LISTING
            last.write_text(json.dumps(asdict(listing), indent=2), encoding="utf-8")
            for part in (files, {LISTING: last}):
                there = [self._at(folder, name) for name in part]
                self._fs.put([str(path) for path in part.values()], there)

    def get(self, folder: str, listing: Listing, names: Collection[str], to: Path) -> None:
        """Download files of a folder; `DamagedError`: one is missing, or not as it was."""
        where = f"{self.url}/{folder}".rstrip("/")
        self._fs.invalidate_cache()
        for name in names:
            (to / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            self._fs.get([self._at(folder, name) for name in names], [str(to / n) for n in names])
            for name in names:
                if describe(to / name) != listing.files.get(name):
                    raise DamagedError(f"{where} is damaged: {name} is not as it was written")
        except FileNotFoundError as error:
            raise DamagedError(f"{where} is damaged: a file is missing ({error})") from None

    def remove(self, folder: str) -> None:
        """Remove a folder; it counts no more as soon as that begins."""
        self.remove_file(folder, LISTING)
        with suppress(FileNotFoundError):
            self._fs.rm(self._at(folder), recursive=True)

    def remove_file(self, folder: str, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._at(folder, name))

    def _at(self, *parts: str) -> str:
        return str(self._root.joinpath(*parts))


def tried(call: Callable[..., T], *arguments: Any) -> T:
    """Return what a call returns; where a connection may have been cut, it is tried again."""
    for number in range(1, _TRIES):
        try:
            return call(*arguments)
        except (*_HOPELESS, DamagedError):
            raise
        except Exception:
            time.sleep(pause_s(number))
    return call(*arguments)


def pause_s(number: int) -> float:
    """Return the seconds to wait after so many tries that failed."""
    return min(2.0**number, 60.0)


@contextmanager
def refusing(setting: str, url: str, use: str) -> Iterator[None]:
    """Refuse a URL for any error of a file system."""
    try:
        yield
    except Exception as error:
        raise SettingError(
            f"{setting} must be a URL that can be {use}, got {url} ({in_line(error)})"
        ) from error
