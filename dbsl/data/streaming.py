"""Images from shards that are larger than the disk: through a bounded cache, in blocks."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dbsl.base.cores import local_processes
from dbsl.base.lazy import lazy_import
from dbsl.base.seeds import generator
from dbsl.base.words import plural
from dbsl.data.group_cache import GroupCache
from dbsl.data.images import ImageLoader
from dbsl.data.prefetch import Prefetch, too_small
from dbsl.data.sharded import ShardedSplit
from dbsl.data.shards import open_shards
from dbsl.data.transforms import Transform
from dbsl.plan.blocks import Blocks

datasets = lazy_import("datasets")

_BATCHES_AHEAD = 2  # a loader process's: DataLoader's default


class StreamLoader(ImageLoader):
    """Images in row groups that come into a cache before loader processes read them.

    Attributes:
        blocks: Draws the order of an epoch, in which few row groups are needed at a time.

    Args:
        split: The images.
        device: Where batches are made.
        loader_workers: Processes; 0: this one.
        max_bad: Most images that may fail to be decoded before that is an error.
        cache: Where row groups come to.
        block: Images that are shuffled together.
    """

    def __init__(
        self,
        split: ShardedSplit,
        device: torch.device,
        loader_workers: int,
        max_bad: int,
        cache: GroupCache,
        block: int,
    ) -> None:
        self._awaited = _Awaited()
        super().__init__(split, device, loader_workers, max_bad, requests=self._awaited)
        self.blocks = Blocks(np.diff(split.begins), block)
        self._cache = cache
        self._ahead = _BATCHES_AHEAD * loader_workers
        cache.knows(*split.names)
        weakref.finalize(self, _Awaited.stop, self._awaited)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `ImageLoader.batches`; waits for the row groups of the first batches."""
        index_batches = list(index_batches)
        self._awaited.on_its_way = Prefetch(self._cache, self._split, index_batches, self._ahead)
        return super().batches(index_batches, transform, epoch)

    def described(self, seed: int) -> str:
        """Return in a line how large the cache is, and how well the first epoch is shuffled."""
        shares = self.blocks.pair_shares(self.labels, generator(seed, "shuffle", 0))
        percent = {name: f"{100 * share:.2g} %" for name, share in shares.items()}
        groups = plural(len(self.blocks.sizes), "row group")
        return (
            f"{groups} through a cache of {self._cache.limit / 2**30:.3g} GiB, shuffled in "
            f"{plural(self.blocks.count, 'block')}: of two images of a block {percent['group']} "
            f"are of one row group ({percent['group_of_all']} of any two), {percent['class']} of "
            f"one class ({percent['class_of_all']})"
        )

    def check_room(self, batch: int, in_order: int = 0) -> None:
        """Raise ``SettingError`` if the cache is too small for an epoch.

        Args:
            batch: Images of a batch in an epoch's order, at most.
            in_order: Images of a batch in the order of their numbers, at most.
        """
        # A stretch of samples that begins inside of a block ends inside of another.
        blocks = 1 + max(1, -(-(self._ahead + 1) * batch // self.blocks.smallest))
        needed = min(blocks, self.blocks.count) * self.blocks.largest(self._split.weights)
        ends = self._split.begins[:-1] + self.blocks.sizes - 1 + (self._ahead + 1) * in_order
        last = self._split.places_of(np.minimum(ends, len(self) - 1))
        total = np.concatenate([[0], np.cumsum(self._split.weights)])
        needed = max(needed, int((total[last + 1] - total[:-1]).max()) if in_order else 0)
        needed = min(needed, int(total[-1]))
        if needed > self._cache.share:
            why = f" for blocks of {self.blocks.block} images and batches of {batch}"
            raise too_small(needed, self._cache, why)

    def _received(self, number: int) -> None:
        self._awaited.on_its_way.through(number)


class _Awaited(list):
    """Requests of loader processes, each given out once its row groups are in the cache.

    Attributes:
        on_its_way: The row groups of the latest requests.
    """

    on_its_way: Prefetch | None = None

    def __iter__(self) -> Iterator[Any]:
        row_groups = self.on_its_way
        for number, request in enumerate(list.__iter__(self)):
            row_groups.wait(number)
            yield request

    def stop(self) -> None:
        """Bring no more row groups."""
        if self.on_its_way is not None:
            self.on_its_way.stop()


class Streams:
    """A data set's splits as streams through one cache.

    Args:
        cache_gib: GiB that the cache may take.
        block: Images that are shuffled together.
    """

    def __init__(self, cache_gib: float, block: int) -> None:
        folder = Path(datasets.config.HF_DATASETS_CACHE) / "dbsl" / "row-groups"
        self._cache = GroupCache(folder, int(cache_gib * 2**30), local_processes())
        self._block = block

    def open(
        self, dataset: str, image_column: str | None, label_column: str | None
    ) -> tuple[ShardedSplit, ShardedSplit | None, tuple[str, ...]]:
        """See `dbsl.data.shards.open_shards`."""
        cache, kept = self._cache, []

        def keep(name: str, write: Any) -> Path:
            kept.append(name)
            cache.knows(name)
            cache.hold({name: 0})  # small, and only until it has been read
            return cache.fetch(name, write, f"dataset {dataset!r}")

        try:
            return open_shards(dataset, image_column, label_column, cache.folder, keep)
        finally:
            cache.release(*kept)

    def first_images(self, split: ShardedSplit, most: int) -> list[Image.Image | str]:
        """Return the first images of a split, all of one row group, or why one is not to be had."""
        name, weight = split.names[0], int(split.weights[0])
        if weight > self._cache.share:
            raise too_small(weight, self._cache, " for a row group")
        self._cache.hold({name: weight})
        try:
            self._cache.fetch(
                name, lambda path: split.write(0, path), split.shards.named(int(split.groups[0]))
            )
            return list(split.decode(np.arange(min(most, split.begins[1]))))
        finally:
            self._cache.release(name)

    def source(
        self, split: ShardedSplit, device: torch.device, loader_workers: int, max_bad: int
    ) -> StreamLoader:
        """Return a split's images as a source."""
        return StreamLoader(split, device, loader_workers, max_bad, self._cache, self._block)
