"""A loader built elsewhere, with its own batch size on every process.

Samples keep the order of the loader's sampler, or the batches of its batch sampler (buckets).
Every process draws the same joint batches and fetches its own part of each.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from dbsl.base.errors import SettingError, require, require_whole
from dbsl.base.seeds import global_streams, stream_seed
from dbsl.library.processes import agreed, digest, world_size
from dbsl.library.uneven import UnevenBatchSampler, plain, warn
from dbsl.plan.deals import deal
from dbsl.plan.sampler import ends_of_parts

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    *("multiprocessing_context", "generator", "persistent_workers", "pin_memory_device"),
)
_BUILT = itertools.count()  # numbers this process's loaders, to name each


def uneven(  # noqa: D417 (UnevenBatchSampler describes the others)
    loader: DataLoader,
    local_batch_sizes: Sequence[int] | None = None,
    *,
    global_batch_size: int | None = None,
    balance: str | None = None,
    balance_every: int | None = None,
    accumulate: int = 1,
    seed: int = 0,
    lengths: Sequence[int] | None = None,
    rank: int | None = None,
    num_replicas: int | None = None,
    least: int = 1,
    limits: Sequence[int] | None = None,
) -> UnevenLoader:
    """Return a loader of the same data with its own batch size on each process.

    It keeps the loader's sampler (random, weighted, grouped by length), its `drop_last`, collate
    function, workers and pinning. If the loader has a `batch_size`, joint batches are cut from the
    sampler's order; unless sizes are given, they are n times as large. A `batch_sampler` of yours
    yields joint batches itself, each split in the proportions of `local_batch_sizes`.

    Call it on every process, after creating the process group and instead of anything that splits
    the loader over processes.

    Args:
        loader: A torch DataLoader of a dataset with numbered samples.
        local_batch_sizes: Samples of a joint batch that each process takes, by rank; None: equal.
        global_batch_size: Samples of a joint batch, over all processes.
        lengths: Tokens, pixels or another cost of each sample in the dataset. A joint batch is then
            split so that samples times the longest length, over the speed, is about equal on all
            processes. A process's speed is its share of `local_batch_sizes`.

    The other arguments are those of `UnevenBatchSampler`.

    Raises:
        SettingError: Names the argument, its bound and its value, on every process.
    """
    options = dict(locals())
    return UnevenLoader(loader, _Joint(**options))


def share(samples: int, local_batch_sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return where a process's part of a joint batch of `samples` begins and ends."""
    sizes = tuple(plain(local_batch_sizes))
    require_whole("local_batch_sizes", sizes, 1)
    there = int(os.environ.get("WORLD_SIZE", len(sizes)))  # from a launcher; loader workers have it
    must = f"local_batch_sizes must have a size for each of {there} processes"
    require(there % len(sizes) == 0, must, str(sizes))
    fits = isinstance(rank, Integral) and 0 <= rank < len(sizes)
    require(fits, f"rank must be in [0, {len(sizes)})", rank)
    require_whole("samples", samples, len(sizes))
    ends = ends_of_parts(samples, sizes, 1)
    return ends[rank], ends[rank + 1]


def steps_of(loader: Any, epochs: float, prepared: bool = False) -> int:
    """Return the optimizer steps of `epochs` epochs, for a schedule's total or its warm-up.

    `loader` comes from `uneven`, or is an `UnevenBatchSampler` or a DataLoader with one. Set
    `prepared` for a scheduler from Accelerate's `prepare`, which advances n times a step.
    """
    sampler = sampler_of(loader)
    steps = math.ceil(epochs * math.ceil(sampler.batches_per_epoch / sampler.accumulate))
    return steps * (sampler.num_replicas if prepared else 1)


class UnevenLoader:
    """A loader's batches, cut to the sizes of the processes; `uneven` builds it.

    It has the methods of its `sampler`, an `UnevenBatchSampler`: `scale`, `set_epoch`, `watch`,
    `state_dict`, `load_state_dict`.

    It is not a torch DataLoader, which a framework would split again. A framework that rebuilds a
    loader from its parts (Accelerate's `skip_first_batches`) gets a `batch_sampler` of batch
    numbers and a `dataset` that maps a number to a batch, so skipped batches are known.
    """

    num_workers, prefetch_factor = 0, None  # for a loader rebuilt in this way
    collate_fn = staticmethod(lambda batch: batch)  # `dataset` has collated it

    def __init__(self, loader: DataLoader, sampler: UnevenBatchSampler) -> None:
        kept = {name: getattr(loader, name) for name in _KEPT}
        self.fetcher = DataLoader(loader.dataset, batch_sampler=sampler, **kept)
        self.sampler = sampler

    @property
    def dataset(self) -> _Batches:
        """A map from number to batch, for code that rebuilds a loader; a new object, not kept here.

        In a reference cycle, a loader's deletion waits 5 s for each worker.
        """
        return _Batches(self)

    @property
    def batch_sampler(self) -> BatchSampler:
        """Batch numbers, for code that rebuilds a loader from its parts."""
        numbers = BatchSampler(SequentialSampler(self.sampler), 1, drop_last=False)
        numbers.set_epoch = self.sampler.set_epoch  # timm's loop calls it
        return numbers

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.sampler)})

    def __len__(self) -> int:
        """Return the number of batches in the current or next epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's batches of an epoch, or the remaining ones."""
        return self._pass(0)

    def _pass(self, first: int) -> Iterator[Any]:
        """Yield the batches from number `first` on; those before it were skipped."""
        self.sampler.skip(first)
        epoch, number = None, 0
        for number, batch in enumerate(self.fetcher, 1):
            if epoch is None:  # a single batch may be a preview
                epoch = self.sampler._iterator
            else:
                self.sampler.count(epoch, number)
            yield batch
        if epoch is not None:
            self.sampler.count(epoch, number)
            self.sampler.let_go()  # a loader with persistent workers keeps its iterator

    def share(self, samples: int) -> tuple[int, int]:
        """Return where this process's part of a joint batch of `samples` begins and ends."""
        return share(samples, self.sampler.local_batch_sizes, self.sampler.rank)


class _Joint(UnevenBatchSampler):
    """Joint batches in a loader's own order, which every process draws identically."""

    _draws_skipped = False

    def __init__(self, loader: DataLoader, lengths: Sequence[int] | None, **options: Any) -> None:
        self._order = order = _order_of(loader)
        self._joins = order is loader.sampler  # else its batches are joint batches
        total, sizes = options["global_batch_size"], options["local_batch_sizes"]
        if total is None and sizes is None:
            total = getattr(loader.batch_sampler, "batch_size", None)  # None: not stated
            of_each = options["num_replicas"] or world_size() if self._joins else 1
            options["global_batch_size"] = total and total * of_each
        samples = len(order) if self._joins else len(loader.dataset)
        super().__init__(samples, drop_last=bool(self._joins and loader.drop_last), **options)
        own, step = loader.batch_size, self.global_batch_size
        if total is None and self._joins and own not in (1, step, step / self.num_replicas):
            warn(
                f"a step has {step} samples, the sum of local_batch_sizes: the loader's batch_size "
                f"({own}) does not count"
            )
        self._name = f"loader {next(_BUILT)}"
        self._lengths = None if lengths is None else np.asarray(lengths)
        self._costs = digest(plain(lengths))
        if lengths is not None:
            fits = self._lengths.shape == (len(loader.dataset),) and (self._lengths > 0).all()
            must = f"lengths must be a number above 0 for each of the {len(loader.dataset)} samples"
            require(fits, must, f"shape {self._lengths.shape}")
        inner = (loader, order, getattr(order, "sampler", None))
        found = [getattr(each, "generator", None) for each in inner]
        self._generators = [g for g in found if isinstance(g, torch.Generator)]
        self._epoch: tuple[int | None, list[Any], list[int]] = (None, [], [])

    def _drawn_order(self, epoch: int) -> tuple[list[Any], list[int]]:
        """Return an epoch's samples, in order, and where a batch sampler's joint batches end."""
        if epoch != self._epoch[0]:
            seed = stream_seed(self._seed, "joint batches", epoch)
            before = [generator.get_state() for generator in self._generators]
            with global_streams(seed):
                for generator in self._generators:
                    generator.manual_seed(seed)
                if hasattr(self._order, "set_epoch"):
                    self._order.set_epoch(epoch)
                order = [*itertools.islice(self._order, len(self._order))]
            for generator, state in zip(self._generators, before, strict=True):
                generator.set_state(state)
            ends = []
            if not self._joins:
                smallest, fewest = min(map(len, order)), self._bounds[1] * self.num_replicas
                must = f"batches of the batch sampler must have at least {fewest} samples"
                require(smallest >= fewest, must, smallest)
                ends = [0, *itertools.accumulate(map(len, order))]
                order = [*itertools.chain.from_iterable(order)]
            own = digest((order, ends, self._costs))
            alike = agreed(f"{self._name}, epoch {epoch}", own) == own
            must = "lengths and the batches that a seed gives must be the same on every process"
            require(alike, must, f"others in epoch {epoch} on another one")
            self._epoch = epoch, order, ends
        return self._epoch[1:]

    def _cuts(self, start: int) -> np.ndarray:
        if self._joins:
            return super()._cuts(start)
        ends = self._drawn_order(self.epoch)[1]
        must = "samples of a state must be whole batches of the batch sampler"
        require(start in ends, must, start)
        return np.array(ends[ends.index(start) :])

    def _samples(self, epoch: int, begin: int, end: int) -> list[Any]:
        return self._drawn_order(epoch)[0][begin:end]

    def _part(
        self, epoch: int, begin: int, end: int, sizes: Sequence[int], rank: int
    ) -> tuple[list[Any], float]:
        if self._lengths is None:
            return super()._part(epoch, begin, end, sizes, rank)
        batch = self._samples(epoch, begin, end)
        lengths = self._lengths[batch]
        places = deal(lengths, sizes, self._bounds[1])[rank]
        # In samples of mean length, so that sizes and speeds keep their unit.
        cost = len(places) * float(lengths[places].max() / self._lengths.mean())
        return [batch[place] for place in places], cost


class _Batches:
    """The dataset that other code sees; it returns a batch by its number."""

    def __init__(self, loader: UnevenLoader) -> None:
        self._loader, self._dataset = loader, loader.fetcher.dataset
        self._batches: Iterator[Any] = iter(())
        self._at: int | None = None  # number of the next batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[int]) -> Any:
        (number,) = numbers
        if number != self._at:  # a pass begins, perhaps after the first batch
            self._batches = self._loader._pass(number)
        batch, self._at = next(self._batches), number + 1
        if self._at == len(self._loader):
            next(self._batches, None)  # run the end of the epoch
            self._at = None
        return batch


def sampler_of(loader: Any) -> UnevenBatchSampler:
    """Return the `UnevenBatchSampler` of a loader, or the argument if it is one."""
    found = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    for sampler in found:
        if isinstance(sampler, UnevenBatchSampler):
            return sampler
    raise SettingError(f"loader must come from dbsl.uneven, got {type(loader).__name__}")


def _order_of(loader: Any) -> Any:
    """Return a loader's sampler, or the batch sampler that was passed to it.

    Refuse loaders without numbered samples, and samplers that split or repeat them.
    """
    kind = type(loader).__name__
    require(isinstance(loader, DataLoader), "loader must be a torch DataLoader", kind)
    numbered = not isinstance(loader.dataset, IterableDataset)
    if not numbered or loader.batch_sampler is None:
        what = "no batch size" if numbered else "IterableDataset"
        raise SettingError(
            f"loader must give batches of numbered samples, got {what}: give each process's loader "
            "its own batch size, and multiply the loss by dbsl.mean_scale(samples)"
        )
    # torch builds one from batch_size; a batch sampler that was passed yields joint batches.
    order = loader.batch_sampler if loader.batch_size is None else loader.sampler
    inner = getattr(order, "sampler", None)
    for each, place in ((order, ""), (inner, f" as the sampler of {type(order).__name__}")):
        name = type(each).__name__ + place
        repeats = getattr(each, "num_repeats", None) or getattr(each, "repetitions", None)
        must = "loader must have each sample once"
        require(not repeats, must, f"{name}: repeated augmentation")
        if hasattr(each, "num_replicas"):
            raise SettingError(
                f"loader must have a sampler for all processes together, got {name}, which splits "
                "them already: put RandomSampler(dataset), or its own inner sampler, in its place"
            )
    return order
