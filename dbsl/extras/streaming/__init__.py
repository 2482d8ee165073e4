"""Data larger than the disk: row groups of parquet shards through a cache of a fixed size.

Row groups are fetched into the cache before a batch needs them. Images are shuffled in blocks, so
an epoch needs few row groups at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from dbsl.base.errors import plural
from dbsl.base.machine import lazy_import, local_processes
from dbsl.config.fields import Needs, Role, Within
from dbsl.config.hooks import Extra
from dbsl.config.image_settings import ImageConfig
from dbsl.data.images import ImageLoader, Request
from dbsl.data.sources import Batch
from dbsl.data.transforms import Transform
from dbsl.extras.streaming.groups import GroupCache
from dbsl.extras.streaming.shards import ShardedSplit, open_shards

datasets = lazy_import("datasets")

_THREADS = 4  # row groups read at a time
_LOOK_S = 0.5  # between checks of a thread that waits for room: is it still needed?


@dataclass(frozen=True)
class StreamSettings(ImageConfig):
    """Whether data are read in row groups as they are needed."""

    # --- data
    # GiB of the disk cache through which parquet shards (a folder, a URL or a hub id) that exceed
    # the disk are read; unset: none
    cache_gib: Annotated[float | None, Within(0, open_low=True), Role.ORDER] = None
    # with --cache-gib: images shuffled together; more mix better and need a larger cache
    shuffle_block: Annotated[int, Within(1), Role.ORDER, Needs("cache_gib")] = 8192


class Streaming(Extra):
    """Reads a data set's splits in row groups, through one cache."""

    Settings = StreamSettings

    @classmethod
    def of(cls, config: StreamSettings) -> Streaming | None:
        return None if config.cache_gib is None else cls()

    def data(self, config: StreamSettings) -> Streaming:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / "row-groups"
        limit = int(config.cache_gib * 2**30)
        self.open = partial(open_shards, cache=GroupCache(folder, limit, local_processes()))
        self.source = partial(StreamLoader, block=config.shuffle_block)
        return self


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: a key of caches
class Blocks:
    """Shuffles all groups, cuts them into blocks, and shuffles the samples of each block.

    The order is a permutation of the samples: shares, rounds and places in it mean what they
    always do. Unlike in a full shuffle, samples of one group remain within a block of each other.
    """

    sizes: np.ndarray  # samples of each group, at least 1, int64 [G]; numbers follow the groups
    block: int  # samples in a block, give or take a group

    @property
    def samples(self) -> int:
        """Samples of all groups."""
        return int(self.sizes.sum())

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """Return the samples of an epoch in order, int64 [n]."""
        groups, blocks = self._cut(rng)
        sizes, first = self.sizes[groups], (np.cumsum(self.sizes) - self.sizes)[groups]
        samples = np.arange(self.samples) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
        return samples[np.lexsort((rng.random(len(samples)), np.repeat(blocks, sizes)))]

    @property
    def count(self) -> int:
        """Blocks of an epoch."""
        return max(1, round(self.samples / self.block))

    def _cut(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the groups in the order of an epoch, and the block of each, ascending."""
        groups = rng.permutation(len(self.sizes))
        begins = np.cumsum(self.sizes[groups]) - self.sizes[groups]
        return groups, begins * self.count // self.samples


class _Awaited(list[Request]):
    """Requests of loader processes, each released once its row groups are in the cache."""

    on_its_way: Prefetch | None = None  # the row groups of the latest requests

    def __iter__(self) -> Iterator[Request]:
        row_groups = self.on_its_way
        for number, request in enumerate(list.__iter__(self)):
            row_groups.wait(number)
            yield request

    def stop(self) -> None:
        """Stop fetching row groups."""
        if self.on_its_way is not None:
            self.on_its_way.stop()


class StreamLoader(ImageLoader):
    """Images in row groups, fetched into a cache before loader processes read them.

    `block` images are shuffled together.
    """

    _Requests = _Awaited

    def __init__(self, split: ShardedSplit, *more: Any, block: int) -> None:
        super().__init__(split, *more)
        self.blocks = Blocks(np.diff(split.begins), block)
        split.cache.knows(*split.names)
        weakref.finalize(self, _Awaited.stop, self._requests)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[Batch]:
        """See `ImageLoader.batches`; waits for the row groups of the first batches."""
        index_batches = list(index_batches)
        self._requests.stop()
        self._requests.on_its_way = Prefetch(self._split, index_batches)
        return super().batches(index_batches, transform, epoch)

    def described(self, seed: int) -> str:
        """Return a line with the cache's size and the numbers of row groups and blocks."""
        groups, blocks = len(self.blocks.sizes), self.blocks.count
        return (
            f"{plural(groups, 'row group')} through a cache of "
            f"{self._split.cache.limit / 2**30:.3g} GiB, shuffled in {plural(blocks, 'block')}"
        )

    def _received(self, number: int) -> None:
        self._requests.on_its_way.through(number)


class Prefetch:
    """Fetches the row groups of batches into the cache, in the order of the batches.

    It fetches ahead while all needed row groups fit into this process's share, and always fetches
    those that a batch waits for. A row group is released with the last batch that needs it.
    `batches` are sample numbers, int64 [B].
    """

    def __init__(self, split: ShardedSplit, batches: Sequence[np.ndarray]) -> None:
        self._split, self._cache = split, split.cache
        places = split.places_of(np.concatenate([np.empty(0, np.int64), *batches]))
        number = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
        # First and last batch that need each row group; -1: none.
        first, last = np.full((2, len(split.groups)), -1)
        first[places[::-1]] = number[::-1]  # of equal places, the last assignment wins
        last[places] = number
        used = np.flatnonzero(last >= 0)
        self._queue = used[np.argsort(first[used], kind="stable")]
        self._by_last = used[np.argsort(last[used], kind="stable")]
        self._firsts, self._lasts = first[self._queue], last[self._by_last]
        self._taken = self._released = 0
        self._changed = threading.Condition()
        self.stopped = False
        for _ in range(min(_THREADS, len(used))):
            threading.Thread(target=self._work).start()

    def wait(self, batch: int) -> None:
        """Wait until a batch's row groups are in the cache; call it in the order of batches."""
        with self._changed:
            held = self._held(int(np.searchsorted(self._firsts, batch, side="right")))
        if held > self._cache.share:
            self._cache.tell_need(held)
        for place in self._queue[self._firsts == batch]:
            self._split.fetch(int(place))  # waits if another is writing it

    def through(self, batch: int) -> None:
        """Release the row groups that no later batch needs."""
        done = int(np.searchsorted(self._lasts, batch, side="right"))
        self._let_go(self._by_last[self._released : done])
        with self._changed:
            self._released = done
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop fetching, and release everything."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()
        self._let_go(np.setdiff1d(self._queue[: self._taken], self._by_last[: self._released]))

    def _let_go(self, places: Iterable[int]) -> None:
        self._cache.let_go(*(self._split.names[place] for place in places))

    def _work(self) -> None:
        with suppress(Exception):  # `wait` raises it, too
            while (place := self._take()) is not None:
                self._split.fetch(int(place))
                if self.stopped:  # meanwhile
                    self._let_go([place])

    def _take(self) -> int | None:
        """Return the place of the next row group, once it has room; None: no more."""
        with self._changed:
            while True:
                # The interpreter waits for threads before it exits.
                gone = self.stopped or not threading.main_thread().is_alive()
                if gone or self._taken == len(self._queue):
                    return None
                if self._held(self._taken + 1) <= self._cache.share:
                    self._taken += 1
                    return self._queue[self._taken - 1]
                self._changed.wait(_LOOK_S)

    def _held(self, end: int) -> int:
        """Return the bytes of the queue up to a place that have not been released."""
        weights, gone = self._split.weights, self._by_last[: self._released]
        return int(weights[self._queue[:end]].sum() - weights[gone].sum())
