"""Data larger than the disk: row groups of parquet shards through a cache of a fixed size.

Row groups are in the cache before a batch needs them, and held until it has them. Images are
shuffled in blocks, so that an epoch needs few row groups at a time.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from PIL import Image

from dbsl.base.errors import ReadError, plural
from dbsl.base.machine import lazy_import, local_processes
from dbsl.config.fields import Needs, Role, Within
from dbsl.config.hooks import Extra
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import Splits
from dbsl.data.images import ImageLoader, Request
from dbsl.data.sources import Batch
from dbsl.data.transforms import Transform
from dbsl.extras.streaming.groups import GroupCache
from dbsl.extras.streaming.shards import ShardedSplit, open_shards
from dbsl.run.session import Session

datasets = lazy_import("datasets")

_BATCHES_AHEAD = 2  # a loader process's: DataLoader's default
_THREADS = 4  # row groups that are read at a time
_PATIENCE_S = 600.0  # without a row group, when one is waited for
_LOOK_S = 0.5  # after which a thread that waits for room looks whether anybody still needs it
SHUFFLE_BLOCK = 8192  # images: 82 row groups of the 100 that `datasets` writes


@dataclass(frozen=True)
class StreamSettings(ImageConfig):
    """Whether data are read in row groups as they are needed."""

    # --- data
    # GiB of disk cache for parquet shards (a folder, a URL or a hub id) that may be larger than the
    # disk; unset: no cache
    cache_gib: Annotated[float | None, Within(0, open_low=True), Role.ORDER | Role.DATA] = None
    # images shuffled together, with --cache-gib; more mix better and need a larger cache
    shuffle_block: Annotated[int, Within(1), Role.ORDER | Role.DATA, Needs("cache_gib")] = (
        SHUFFLE_BLOCK
    )


class Streaming(Extra):
    """Reads data in row groups."""

    Settings = StreamSettings

    @classmethod
    def of(cls, config: StreamSettings) -> Streaming | None:
        return None if config.cache_gib is None else cls()

    def data(self, config: StreamSettings) -> Streams:
        return Streams(config.cache_gib, config.shuffle_block)

    def begin(self, session: Session) -> None:
        """Refuse a cache without room for the images that are read at once."""
        run = session.run
        config, data = run.config, run.data
        in_order = run.evaluation_batch if getattr(config, "eval_train", False) else 0
        spans = [run.largest_batch]
        # A process that takes a part of each batch passes over the others' parts.
        if config.sync != "step" or session.accelerator.num_processes > 1:
            spans += [plan.global_batch_size or 0 for plan in run.plans.values()]
        if run.place is not None:
            spans += [w.local_batch_size for plan in run.plans.values() for w in plan.workers]
        data.train.check_room(max(spans), in_order=in_order)
        for source in (data.evaluation, *run.also.values()):
            if isinstance(source, StreamLoader):
                source.check_room(1, in_order=run.evaluation_batch)


@dataclass(frozen=True, eq=False)  # compared and hashed by identity: a key of caches
class Blocks:
    """All groups are shuffled and cut into blocks; then the samples of each block are shuffled.

    It is a permutation of the samples like any other: shares, rounds and places in it mean what
    they always do. What it lacks is that samples of one group stay within a block of each other.
    """

    sizes: np.ndarray  # samples of each group, at least 1, int64 [G]; numbers follow the groups
    block: int  # samples that a block has, give or take a group

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

    def largest(self, weights: np.ndarray) -> int:
        """Return a bound on any block's weight, from the groups' `weights`, int64 [G]."""
        heaviest = np.argsort(-weights / self.sizes, kind="stable")
        # A block has this many samples at most: it may begin and end inside of a group's stretch.
        most = -(-self.samples // self.count) + int(self.sizes.max())
        taken = np.cumsum(self.sizes[heaviest]) < most
        return int(weights[heaviest][: taken.sum() + 1].sum())

    @property
    def count(self) -> int:
        """Blocks of an epoch."""
        return max(1, round(self.samples / self.block))

    @property
    def smallest(self) -> int:
        """Bound on the samples of any block of any epoch, at least 1."""
        return max(1, self.samples // self.count - int(self.sizes.max()))

    def _cut(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Return the groups in the order of an epoch, and the block of each, ascending."""
        groups = rng.permutation(len(self.sizes))
        begins = np.cumsum(self.sizes[groups]) - self.sizes[groups]
        return groups, begins * self.count // self.samples


class _Awaited(list[Request]):
    """Requests of loader processes, each given out once its row groups are in the cache."""

    on_its_way: Prefetch | None = None  # the row groups of the latest requests

    def __iter__(self) -> Iterator[Request]:
        row_groups = self.on_its_way
        for number, request in enumerate(list.__iter__(self)):
            row_groups.wait(number)
            yield request

    def stop(self) -> None:
        """Bring no more row groups."""
        if self.on_its_way is not None:
            self.on_its_way.stop()


class StreamLoader(ImageLoader):
    """Images in row groups that come into a cache before loader processes read them.

    `block` images are shuffled together.
    """

    _Requests = _Awaited

    def __init__(
        self,
        split: ShardedSplit,
        device: torch.device,
        loader_workers: int,
        max_bad: int,
        *,
        cache: GroupCache,
        block: int,
    ) -> None:
        super().__init__(split, device, loader_workers, max_bad)
        self.blocks = Blocks(np.diff(split.begins), block)
        self._cache = cache
        self._ahead = _BATCHES_AHEAD * loader_workers
        cache.knows(*split.names)
        weakref.finalize(self, _Awaited.stop, self._requests)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[Batch]:
        """See `ImageLoader.batches`; waits for the row groups of the first batches."""
        index_batches = list(index_batches)
        self._requests.on_its_way = Prefetch(self._cache, self._split, index_batches, self._ahead)
        return super().batches(index_batches, transform, epoch)

    def described(self, seed: int) -> str:
        """Return in a line how large the cache is, and what is shuffled together."""
        return (
            f"{plural(len(self.blocks.sizes), 'row group')} through a cache of "
            f"{self._cache.limit / 2**30:.3g} GiB, shuffled in {plural(self.blocks.count, 'block')}"
        )

    def check_room(self, batch: int, in_order: int = 0) -> None:
        """Raise ``SettingError`` if the cache is too small for an epoch.

        A batch has at most `batch` images in an epoch's order, `in_order` in that of their numbers.
        """
        # A stretch of samples that begins inside of a block ends inside of another.
        blocks = 1 + max(1, -(-(self._ahead + 1) * batch // self.blocks.smallest))
        needed = min(blocks, self.blocks.count) * self.blocks.largest(self._split.weights)
        ends = self._split.begins[:-1] + self.blocks.sizes - 1 + (self._ahead + 1) * in_order
        last = self._split.places_of(np.minimum(ends, len(self) - 1))
        total = np.concatenate([[0], np.cumsum(self._split.weights)])
        needed = max(needed, int((total[last + 1] - total[:-1]).max()) if in_order else 0)
        why = f" for blocks of {self.blocks.block} images and batches of {batch}"
        self._cache.check_room(min(needed, int(total[-1])), why)

    def check_batches(self, index_batches: Sequence[np.ndarray]) -> None:
        """Raise ``SettingError`` if the cache is too small for these batches."""
        first, last = _uses(self._split, index_batches)
        most = _most_held(self._split, first, last, len(index_batches), self._ahead)
        self._cache.check_room(most)

    def _received(self, number: int) -> None:
        self._requests.on_its_way.through(number)


class Streams:
    """A data set's splits as streams through one cache of so many GiB; see `StreamLoader`."""

    def __init__(self, cache_gib: float, block: int) -> None:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / "row-groups"
        self._cache = GroupCache(folder, int(cache_gib * 2**30), local_processes())
        self.source = partial(StreamLoader, cache=self._cache, block=block)

    def open(self, config: ImageConfig) -> Splits:
        """See `dbsl.extras.streaming.shards.open_shards`."""
        cache, kept = self._cache, []

        def keep(name: str, write: Callable[[Path], None]) -> Path:
            kept.append(name)
            cache.knows(name)
            return cache.fetch(name, 0, write, f"dataset {config.dataset!r}")

        try:
            return open_shards(config, cache.folder, keep)
        finally:
            cache.release(*kept)

    def first_images(self, split: ShardedSplit, most: int) -> list[Image.Image | str]:
        """Return the first images of a split, all of one row group, or why one is not to be had."""
        name, weight = split.names[0], int(split.weights[0])
        self._cache.check_room(weight, " for a row group")
        try:
            split.fetch(0, self._cache)
            return list(split.decode(np.arange(min(most, split.begins[1]))))
        finally:
            self._cache.release(name)


def _uses(split: ShardedSplit, batches: Sequence[np.ndarray]) -> np.ndarray:
    """Return the first and the last batch that need each row group, int64 [2, G]; -1: none."""
    samples = np.concatenate([np.empty(0, np.int64), *batches]).astype(np.int64)
    places = split.places_of(samples)
    number = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    first, last = found = np.full((2, len(split.groups)), -1)
    first[places[::-1]] = number[::-1]  # among equal places the one assigned last counts
    last[places] = number
    return found


def _most_held(
    split: ShardedSplit, first: np.ndarray, last: np.ndarray, batches: int, ahead: int
) -> int:
    """Return the most that is held at once, by the split's weights."""
    used, change = np.flatnonzero(last >= 0), np.zeros(batches + ahead + 2, np.int64)
    np.add.at(change, first[used], split.weights[used])
    np.add.at(change, last[used] + ahead + 1, -split.weights[used])
    return int(np.cumsum(change)[:batches].max(initial=0))


class Prefetch:
    """Brings the row groups of batches into the cache, in the order of the batches.

    As many are on their way, or held, as this process may hold. A row group is let go with the last
    batch that needs it. What an earlier one of the same cache still brings is ended. `batches` are
    sample numbers, int64 [B]; `ahead` of them may be waited for before the first is through.
    """

    def __init__(
        self, cache: GroupCache, split: ShardedSplit, batches: Sequence[np.ndarray], ahead: int
    ) -> None:
        self._cache, self._split = cache, split
        self._first, self._last = _uses(split, batches)
        used = np.flatnonzero(self._last >= 0)
        self._queue = used[np.argsort(self._first[used], kind="stable")]
        self._by_last = used[np.argsort(self._last[used], kind="stable")]
        self._lasts = self._last[self._by_last]
        cache.check_room(_most_held(split, self._first, self._last, len(batches), ahead))
        self._needed = np.searchsorted(
            self._first[self._queue], np.arange(len(batches)), side="right"
        )
        self._there = np.zeros(len(self._queue), dtype=bool)
        self._taken = self._released = 0
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self.stopped = False
        cache.stop_bringing()  # for an earlier one
        cache.stop_bringing = self.stop
        for _ in range(min(_THREADS, len(self._queue))):
            threading.Thread(target=self._work).start()

    def wait(self, batch: int) -> None:
        """Return when all row groups of a batch, and of those before it, are in the cache."""
        with self._changed:
            while self.stopped or not self._there[: self._needed[batch]].all():
                if self._error is not None:
                    raise self._error
                if self.stopped:  # what was there may be gone
                    raise RuntimeError("a later call of batches() took over the cache")
                so_far = self._there.sum()
                if not self._changed.wait(_PATIENCE_S) and self._there.sum() == so_far:
                    raise ReadError(f"no row group came within {_PATIENCE_S:.0f} s")

    def through(self, batch: int) -> None:
        """Let go of what no batch after this one needs."""
        done = int(np.searchsorted(self._lasts, batch, side="right"))
        gone = self._by_last[self._released : done]
        if not len(gone) or self.stopped:
            return
        self._release(gone)
        with self._changed:
            self._released = done
            self._changed.notify_all()

    def stop(self) -> None:
        """Bring no more, and let go of everything."""
        with self._changed:
            if self.stopped:
                return
            self.stopped = True
            self._changed.notify_all()
        self._release(np.setdiff1d(self._queue[: self._taken], self._by_last[: self._released]))

    def _release(self, places: np.ndarray) -> None:
        self._cache.release(*(self._split.names[place] for place in places), holder=self)

    def _work(self) -> None:
        try:
            while (number := self._next()) is not None:
                place = int(self._queue[number])
                self._split.fetch(place, self._cache, holder=self)
                with self._changed:
                    self._there[number] = True
                    self._changed.notify_all()
                    stopped = self.stopped
                if stopped:  # meanwhile
                    self._release(np.array([place]))
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _next(self) -> int | None:
        """Return the next row group's place in the queue, once there is room; None: no more."""
        with self._changed:
            while True:
                # At its end the interpreter waits for threads.
                gone = self.stopped or self._error or not threading.main_thread().is_alive()
                if gone or self._taken == len(self._queue):
                    return None
                weights, end = self._split.weights, self._taken + 1
                held = weights[self._queue[:end]].sum()
                held -= weights[self._by_last[: self._released]].sum()
                if held <= self._cache.share:
                    self._taken = end
                    return end - 1
                self._changed.wait(_LOOK_S)
