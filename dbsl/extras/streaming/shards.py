"""Splits with images in parquet shards: in a folder, at a URL, or in a hub repository.

Opening a split reads metadata and labels, but no image. Images are read by row group into a file
of the cache, and come from there.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.machine import hub_or_cache, lazy_import
from dbsl.config.image_settings import ImageConfig
from dbsl.data.images import ImageSplit, Stored
from dbsl.data.tables import (
    HUB_ID,
    MakeSplit,
    Splits,
    has_card,
    open_splits,
    opening,
    parquet_files,
    same_classes,
)
from dbsl.extras.streaming.groups import GroupCache

datasets, fsspec, pa = lazy_import("datasets"), lazy_import("fsspec"), lazy_import("pyarrow")
parquet = lazy_import("pyarrow.parquet")

_READERS = 16  # files to read metadata from at a time
_ROWS = 256  # decoded from a shard at a time, to save memory
_FORMAT = 3  # of files in the cache: older ones are not read
_SPARE = (64, 2048)  # extra bytes of a row, and of a file, in the cache

File = tuple[str, str]  # path or URL of a shard, and a value that changes with it


@dataclass(frozen=True, eq=False)
class Shards:
    """The row groups of one split; arrays are int64 [G]."""

    files: tuple[File, ...]
    column: str  # the images'
    file: np.ndarray  # shard of each row group
    number: np.ndarray  # its number in the shard
    sizes: np.ndarray  # its rows
    weights: np.ndarray  # bytes of its images, or a little more

    def named(self, group: int) -> str:
        """Return a row group's description for messages."""
        return f"row group {self.number[group]} of {self.files[self.file[group]][0]}"

    def write(self, group: int, path: Path) -> None:
        """Write the images of a row group as an Arrow file."""
        of_group = {"row_groups": [int(self.number[group])], "columns": [self.column]}
        with _opened(*self.files[self.file[group]]) as shard:
            schema = pa.schema([shard.schema_arrow.field(self.column)])
            with pa.ipc.new_file(str(path), schema) as file:
                for batch in shard.iter_batches(_ROWS, **of_group, use_threads=False):
                    file.write(batch.replace_schema_metadata(None))


@dataclass(frozen=True, eq=False)
class ShardedSplit(ImageSplit):
    """Encoded images in row groups, and labels, of one split; sample numbers follow the rows."""

    shards: Shards  # all row groups of the split
    cache: GroupCache

    @cached_property
    def first_rows(self) -> np.ndarray:
        """First row of each row group, then the number of rows, int64 [G + 1]."""
        return np.concatenate([[0], np.cumsum(self.shards.sizes)])

    @cached_property
    def groups(self) -> np.ndarray:
        """Row groups that have samples, int64 [K]."""
        return np.flatnonzero(np.diff(np.searchsorted(self.rows, self.first_rows)))

    @cached_property
    def begins(self) -> np.ndarray:
        """First sample of each of these, then the number of samples, int64 [K + 1]."""
        begins = np.searchsorted(self.rows, self.first_rows)
        return np.append(begins[self.groups], begins[-1])

    @cached_property
    def weights(self) -> np.ndarray:
        """Approximate bytes of each one's file in the cache, int64 [K]."""
        return self.shards.weights[self.groups]

    @cached_property
    def names(self) -> list[str]:
        """Cache file of each."""
        shards = self.shards
        return [
            _name_of(shards.files[shards.file[group]], shards.column, int(shards.number[group]))
            for group in self.groups
        ]

    def places_of(self, samples: np.ndarray) -> np.ndarray:
        """Return the place among `groups` of each sample's row group."""
        return np.searchsorted(self.begins, samples, side="right") - 1

    def fetch(self, place: int) -> None:
        """Bring the file of the row group at `place` into the cache."""
        group, weight = int(self.groups[place]), int(self.weights[place])
        write = partial(self.shards.write, group)
        self.cache.fetch(self.names[place], weight, write, self.shards.named(group))

    def spread(self, most: int) -> np.ndarray:
        """See `ImageSplit.spread`; the samples are of one row group."""
        return np.arange(min(most, self.begins[1]))

    def describe_bad(self, row: int, reason: str) -> str:
        """Return which image cannot be decoded, and why."""
        group = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        where = f"image {row} of split {self.name!r} of dataset {self.dataset!r}"
        return f"{where}, {self.shards.named(group)}, cannot be decoded ({reason})"

    def _values(self, samples: np.ndarray) -> list[Stored]:
        places, values = self.places_of(samples), [None] * len(samples)
        for place in np.unique(places):
            with self._file(int(place)) as file:
                column = pa.ipc.open_file(file).read_all().column(0)
                rows = self.rows[samples] - self.first_rows[self.groups[place]]
                for number in np.flatnonzero(places == place):
                    values[number] = column[int(rows[number])].as_py()
                del column  # it is a view of the file, which is closed here
        return values

    def _file(self, place: int) -> pa.MemoryMappedFile:
        while True:
            try:
                return pa.memory_map(str(self.cache.folder / self.names[place]))
            except FileNotFoundError:  # not fetched, or removed for room
                self.fetch(place)
                self.cache.let_go(self.names[place])

    def _check_path(self, path: str) -> None:
        """Refuse an image stored elsewhere: a shard may name any file or URL."""
        raise SettingError("its bytes must be in the shard")


def open_shards(config: ImageConfig, cache: GroupCache) -> Splits:
    """Return the training split, the evaluation split if one has labels, and the class names.

    The dataset is a folder of parquet files, one such file, a URL of either, or a hub id.
    """
    dataset = config.dataset
    must = "parquet shards with cache_gib (a folder, a file, a URL or a hub id that can be reached)"
    with opening(dataset, must):
        files = _find_files(dataset)
        features = {}
        for name, of_split in files.items():
            with _opened(*of_split[0]) as shard:
                features[name] = datasets.Features.from_arrow_schema(shard.schema_arrow)

    def read(name: str, image_column: str, label_column: str) -> tuple[Any, MakeSplit]:
        columns = image_column, label_column
        shards, labels = _read_index(cache, dataset, files[name], *columns)

        def split(rows: np.ndarray, classes: np.ndarray) -> ShardedSplit:
            of_split = image_column, dataset, name
            return ShardedSplit(None, rows, classes, *of_split, shards, cache)

        return labels[label_column], split

    return open_splits(config, features, read)


def _find_files(dataset: str) -> dict[str, list[File]]:
    """Return the shards of each split, each with a value that changes with it."""
    path, finder = Path(dataset).expanduser(), datasets.data_files
    if "://" in dataset and not dataset.endswith(".parquet"):
        base = dataset.rstrip("/")
        patterns = finder.get_data_patterns(base)
        found = finder.DataFilesDict.from_patterns(patterns, base_path=base)
    elif "://" in dataset or path.is_file():
        file = dataset if "://" in dataset else str(path.resolve())
        found = finder.DataFilesDict.from_patterns({"train": [file]})
    elif path.exists():
        if has_card(path):
            found = datasets.load_dataset_builder(str(path)).config.data_files
        else:
            patterns = {n: [*map(glob.escape, of)] for n, of in parquet_files(path).items()}
            found = finder.DataFilesDict.from_patterns(patterns)
    elif HUB_ID.fullmatch(dataset) and dataset != "digits":
        with hub_or_cache() as answers:
            if not answers:
                raise OSError("there is no such folder, and the hub cannot be reached")
            found = datasets.load_dataset_builder(dataset).config.data_files
    else:
        raise FileNotFoundError("there is no such folder")
    files = {}
    for name, of_split in (found or {}).items():
        known = zip(of_split, of_split.origin_metadata, strict=True)
        shards = [(url, "/".join(map(str, origin))) for url, origin in known]
        files |= {str(name): [s for s in shards if ".parquet" in Path(s[0]).suffixes]}
    files = {name: shards for name, shards in files.items() if shards}
    if not files:
        raise SettingError(f"{dataset} has no parquet files: leave out --cache-gib")
    return files


def _read_index(
    cache: GroupCache, dataset: str, files: Sequence[File], image_column: str, label_column: str
) -> tuple[Shards, pa.Table]:
    """Return a split's row groups and a table of its labels; both are kept in one file."""
    name = _name_of(files, image_column, label_column)
    cache.knows(name)
    write = partial(_write_index, files, image_column, label_column)
    path = cache.fetch(name, 0, write, f"dataset {dataset!r}")
    with pa.OSFile(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    cache.let_go(name)
    groups = np.array(json.loads(table.schema.metadata[b"row groups"]), np.int64).reshape(-1, 4)
    groups = groups[groups[:, 2] > 0]
    return Shards(tuple(files), image_column, *groups.T), table.replace_schema_metadata(None)


def _name_of(*key: Any) -> str:
    """Return the name of a key's file in the cache."""
    return f"{hashlib.sha256(repr((_FORMAT, key)).encode()).hexdigest()[:32]}.arrow"


def _write_index(files: Sequence[File], image_column: str, label_column: str, path: Path) -> None:
    with ThreadPoolExecutor(min(_READERS, len(files))) as pool:
        found = list(pool.map(lambda file: _read_one(file, image_column, label_column), files))
    described = (datasets.Features.from_arrow_schema(labels.schema) for _, labels in found)
    same_classes(zip((url for url, _ in files), described, strict=True))
    groups = [(number, *group) for number, (of_file, _) in enumerate(found) for group in of_file]
    table = pa.concat_tables([labels for _, labels in found], promote_options="permissive")
    table = table.replace_schema_metadata({"row groups": json.dumps(groups)})
    with pa.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def _read_one(
    file: File, image_column: str, label_column: str
) -> tuple[list[tuple[int, int, int]], pa.Table]:
    """Return number, rows and bytes of each row group of a shard, and a table of its labels."""
    with _opened(*file) as shard:
        missing = {image_column, label_column} - {*shard.schema_arrow.names}
        if missing:
            raise SettingError(
                f"dataset must have the columns {image_column!r} and {label_column!r} in all "
                f"shards, got {file[0]} without {missing.pop()!r}"
            )
        groups = []
        for number in range(shard.num_row_groups):
            rows = shard.metadata.row_group(number)
            columns = map(rows.column, range(rows.num_columns))
            size = sum(
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.partition(".")[0] == image_column
            )
            spare = _SPARE[0] * rows.num_rows + _SPARE[1]
            groups.append((number, rows.num_rows, size + spare))
        labels = shard.read(columns=[label_column], use_threads=False)
    return groups, labels


@contextmanager
def _opened(url: str, origin: str) -> Iterator[parquet.ParquetFile]:
    # A column of a row group is one request; caches would fetch more than that.
    file, metadata = fsspec.open(url, "rb", cache_type="none"), _metadata(url, origin)
    with file as source, parquet.ParquetFile(source, metadata=metadata) as shard:
        yield shard


@lru_cache(maxsize=256)
def _metadata(url: str, origin: str) -> Any:
    with fsspec.open(url, "rb") as file:
        return parquet.read_metadata(file)
