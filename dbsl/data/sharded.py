"""A split whose images lie in row groups, read from the files that a cache has of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import
from dbsl.data.images import ImageSplit

pa = lazy_import("pyarrow")


class RowGroups(Protocol):
    """Row groups of shards; `dbsl.data.shards.Shards` is such."""

    files: tuple[tuple[str, str], ...]
    column: str
    file: np.ndarray
    number: np.ndarray
    sizes: np.ndarray
    weights: np.ndarray

    def named(self, group: int) -> str:
        """Return which row group it is, for people."""

    def write(self, group: int, rows: np.ndarray | None, path: Path) -> None:
        """Write rows of a row group as an Arrow file; None: all rows."""


@dataclass(frozen=True, eq=False)
class ShardedSplit(ImageSplit):
    """Encoded images in row groups, and labels, of one split.

    Sample numbers follow the rows. A file in the cache has the rows of a row group that are samples
    of the split: what is held out of a split, or left out of a subset, takes no room.

    Attributes:
        shards: All row groups of the split.
        folder: The cache.
    """

    shards: RowGroups
    folder: Path

    @cached_property
    def first_rows(self) -> np.ndarray:
        """First row of each row group, and their number behind it, int64 [G + 1]."""
        return np.concatenate([[0], np.cumsum(self.shards.sizes)])

    @cached_property
    def groups(self) -> np.ndarray:
        """Row groups that have samples, int64 [K]."""
        return np.flatnonzero(np.diff(np.searchsorted(self.rows, self.first_rows)))

    @cached_property
    def begins(self) -> np.ndarray:
        """First sample of each of these, and the number of samples behind it, int64 [K + 1]."""
        begins = np.searchsorted(self.rows, self.first_rows)
        return np.append(begins[self.groups], begins[-1])

    @cached_property
    def weights(self) -> np.ndarray:
        """Bytes that the file of each takes in the cache, about, int64 [K]."""
        weights, sizes = self.shards.weights[self.groups], self.shards.sizes[self.groups]
        return -(-weights * np.diff(self.begins) // sizes)

    @cached_property
    def names(self) -> list[str]:
        """File of each in the cache: a hash of all that it has."""
        files = [repr(file).encode() for file in self.shards.files]
        names = []
        for place, group in enumerate(self.groups):
            rows = self.rows_of(place)
            digest = hashlib.sha256(files[self.shards.file[group]])
            digest.update(repr((self.shards.column, int(self.shards.number[group]))).encode())
            digest.update(b"all" if rows is None else rows.tobytes())
            names.append(f"{digest.hexdigest()[:32]}.arrow")
        return names

    def rows_of(self, place: int) -> np.ndarray | None:
        """Return which rows of the place-th row group are samples, int64; None: all."""
        first, last = self.begins[place : place + 2]
        group = self.groups[place]
        if last - first == self.shards.sizes[group]:
            return None
        return self.rows[first:last] - self.first_rows[group]

    def places_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the place among `groups` of each sample's row group."""
        return np.searchsorted(self.begins, samples % len(self), side="right") - 1

    def write(self, place: int, path: Path) -> None:
        """Write the file of the place-th row group."""
        self.shards.write(int(self.groups[place]), self.rows_of(place), path)

    def describe_bad(self, row: int, reason: str) -> str:
        """Return which image cannot be decoded, and why."""
        group = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        where = f"image {row} of split {self.name!r} of dataset {self.dataset!r}"
        return f"{where}, {self.shards.named(group)}, cannot be decoded ({reason})"

    def _values(self, samples: np.ndarray) -> list[Any]:
        samples = samples % len(self)
        places, values = self.places_of(samples), [None] * len(samples)
        for place in np.unique(places):
            with pa.memory_map(str(self.folder / self.names[place])) as file:
                column = pa.ipc.open_file(file).read_all().column(0)
                for number in np.flatnonzero(places == place):
                    values[number] = column[int(samples[number] - self.begins[place])].as_py()
                del column  # it is a view of the file, which is closed here
        return values

    def _check_path(self, path: str) -> None:
        """Refuse an image that lies elsewhere: what a shard names may be any file, or a URL."""
        raise SettingError("its bytes must lie in the shard")
