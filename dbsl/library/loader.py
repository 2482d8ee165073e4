"""A loader that somebody else built, with batches of another size on every process.

The order is that of the loader's own sampler, or the batches of its own batch sampler (buckets).
Every process draws the same joint batches, and fetches its own part of each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from dbsl.base.errors import SettingError, require
from dbsl.base.seeds import stream_seed
from dbsl.library.lengths import deal
from dbsl.library.processes import agreed, world_size
from dbsl.library.sizes import plain
from dbsl.library.uneven import UnevenBatchSampler
from dbsl.plan.sampler import ends_of_parts

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "prefetch_factor"),
    *("multiprocessing_context", "generator", "persistent_workers", "pin_memory_device"),
)
_BUILT = itertools.count()  # loaders of this process: each has a name of its own


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
    kind: type[UnevenLoader] | None = None,
) -> UnevenLoader:
    """Return a loader of the same data whose batches have another size on each process.

    It keeps the loader's sampler (random, weighted, grouped by length), its `drop_last`, collate
    function, workers and pinning. With `batch_size` the joint batches are cut from what the sampler
    yields, n times as large unless sizes are given. A batch sampler of another kind gives joint
    batches itself, and `local_batch_sizes` are the proportions in which each is split.

    Call it on every process, after the process group and instead of anything that splits the loader
    over processes.

    Args:
        loader: A torch DataLoader of a dataset with numbered samples.
        local_batch_sizes: Samples of a joint batch that each process takes, by rank; None: equal.
        global_batch_size: Samples of a joint batch, over all processes.
        lengths: Tokens, pixels or another cost of each sample of the dataset. A joint batch is then
            dealt so that samples times the longest of them, over the speed, is alike on all
            processes; a speed is the process's share of `local_batch_sizes`.
        kind: Class of the loader; None: `UnevenLoader`.

    The other arguments are those of `UnevenBatchSampler`.

    Raises:
        SettingError: Names the argument, its bound and its value, on every process.
    """
    _refuse_others(loader)
    cut = type(loader.batch_sampler) is BatchSampler
    order = loader.sampler if cut else loader.batch_sampler
    _refuse_split(order)
    if global_batch_size is None and local_batch_sizes is None:
        global_batch_size = _usual_size(loader, cut, num_replicas)
    sampler = _Joint(
        loader,
        lengths,
        len(order) if cut else len(loader.dataset),
        global_batch_size,
        local_batch_sizes,
        balance=balance,
        balance_every=balance_every,
        accumulate=accumulate,
        drop_last=bool(cut and loader.drop_last),
        seed=seed,
        rank=rank,
        num_replicas=num_replicas,
        least=least,
        limits=limits,
    )
    return (kind or UnevenLoader)(loader, sampler)


def share(samples: int, local_batch_sizes: Sequence[int], rank: int) -> tuple[int, int]:
    """Return where a process's part of a joint batch of so many samples begins and ends."""
    sizes = tuple(plain(local_batch_sizes))
    whole = all(isinstance(size, Integral) and size >= 1 for size in sizes)
    require(sizes and whole, "local_batch_sizes must be integers of at least 1", str(sizes))
    fits = isinstance(rank, Integral) and 0 <= rank < len(sizes)
    require(fits, f"rank must be in [0, {len(sizes)})", rank)
    enough = isinstance(samples, Integral) and samples >= len(sizes)
    require(enough, f"samples must be an integer of at least {len(sizes)}", samples)
    ends = ends_of_parts(samples, sizes, 1)
    return ends[rank], ends[rank + 1]


def steps_of(loader: Any, epochs: float, prepared: bool = False) -> int:
    """Return the optimizer steps of so many epochs, for a schedule's total or its warm-up.

    `loader` is one of `uneven`, an `UnevenBatchSampler`, or a DataLoader that has one. A scheduler
    that went through Accelerate's `prepare` advances n times a step: say so by `prepared`.
    """
    sampler = sampler_of(loader)
    steps = math.ceil(epochs * math.ceil(sampler.batches_per_epoch / sampler.accumulate))
    return steps * (sampler.num_replicas if prepared else 1)


class UnevenLoader:
    """A loader's batches, cut by the sizes of the processes; `uneven` builds it.

    It has the methods of its `sampler`, an `UnevenBatchSampler`: `scale`, `set_epoch`, `watch`,
    `state_dict`, `load_state_dict`.

    It is no torch DataLoader: a framework would split it once more. One that rebuilds a loader
    from its parts (Accelerate's `skip_first_batches`) gets a `batch_sampler` of numbers and a
    `collate_fn` that fetches the batch of a number; so batches that it skips are known.
    """

    num_workers, prefetch_factor = 0, None  # of a loader that is rebuilt so

    def __init__(self, loader: DataLoader, sampler: UnevenBatchSampler) -> None:
        self.sampler, self.dataset = sampler, _Samples(loader.dataset)
        kept = {name: getattr(loader, name) for name in _KEPT}
        self.fetcher = DataLoader(loader.dataset, batch_sampler=sampler, **kept)
        self._batches: Iterator[Any] | None = None
        self._at = 0  # number of the batch that comes

    @property
    def batch_sampler(self) -> _Numbers:
        """Numbers of the batches, for what rebuilds a loader from its parts."""
        return _Numbers(self)

    @property
    def collate_fn(self) -> Callable[[Sequence[int]], Any]:
        """Fetches the batch of a number, for the same."""
        return self._fetch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __len__(self) -> int:
        """Return the batches of the epoch that comes or is under way."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's batches of an epoch, or of what is left of it."""
        return self._pass(0)

    def _pass(self, first: int) -> Iterator[Any]:
        """Yield the batches from a number on; those before it were skipped."""
        self.sampler.skip(first)
        yield from self.fetcher

    def scale(self, count: int) -> float:
        """Return n * count / B, by which the mean loss of a batch is multiplied."""
        return self.sampler.scale(count)

    def share(self, samples: int) -> tuple[int, int]:
        """Return where this process's part of a joint batch of so many samples begins and ends."""
        return share(samples, self.sampler.local_batch_sizes, self.sampler.rank)

    def _fetch(self, numbers: Sequence[int]) -> Any:
        """Return the batch of a number; the first of a pass may be a later one."""
        (number,) = numbers
        if self._batches is None or number != self._at:
            self._batches = self._pass(number)
        batch, self._at = next(self._batches), number + 1
        if self._at == len(self):
            next(self._batches, None)  # the epoch is over, and knows it
            self._batches = None
        return batch


class _Joint(UnevenBatchSampler):
    """Joint batches in a loader's own order, which is drawn alike on every process."""

    _draws_skipped = False

    def __init__(
        self, loader: DataLoader, lengths: Sequence[int] | None, *args: Any, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._cuts = type(loader.batch_sampler) is BatchSampler  # else its batches are joint ones
        self._order = loader.sampler if self._cuts else loader.batch_sampler
        self._name = f"loader {next(_BUILT)}"
        self._lengths = None if lengths is None else np.asarray(lengths)
        if lengths is not None:
            fits = self._lengths.shape == (len(loader.dataset),) and (self._lengths > 0).all()
            must = f"lengths must be a number above 0 for each of the {len(loader.dataset)} samples"
            require(fits, must, f"shape {self._lengths.shape}")
        inner = (loader, self._order, getattr(self._order, "sampler", None))
        found = [getattr(each, "generator", None) for each in inner]
        self._generators = [g for g in found if isinstance(g, torch.Generator)]
        self._drawn: tuple[int | None, list[Any], list[int]] = (None, [], [])

    def _draw(self, epoch: int) -> tuple[list[Any], list[int]]:
        """Return the samples of an epoch, in order, and where batches that are joint ones end."""
        if epoch != self._drawn[0]:
            with _seeded(stream_seed(self._seed, "joint batches", epoch), self._generators):
                if hasattr(self._order, "set_epoch"):
                    self._order.set_epoch(epoch)
                drawn = [*itertools.islice(self._order, len(self._order))]
            ends = [] if self._cuts else [0, *itertools.accumulate(map(len, drawn))]
            joint = drawn if self._cuts else [*itertools.chain.from_iterable(drawn)]
            fewest = self._bounds[1] * self.num_replicas
            smallest = fewest if self._cuts else min(map(len, drawn), default=0)
            must = f"batches of the batch sampler must have at least {fewest} samples"
            require(smallest >= fewest, must, smallest)
            digest = hashlib.sha256(repr((joint, ends)).encode()).hexdigest()
            alike = agreed(f"{self._name}, epoch {epoch}", digest) == digest
            must = "the sampler must draw the same batches on every process under one seed"
            require(alike, must, f"others in epoch {epoch} on another process")
            self._drawn = epoch, joint, ends
        return self._drawn[1:]

    def _cut(self, start: int) -> Any:
        if self._cuts:
            return super()._cut(start)
        ends = self._draw(self.epoch)[1]
        must = "samples of a state must be whole batches of the batch sampler"
        require(start in ends, must, start)
        return _Ends(ends[ends.index(start) :])

    def _part(
        self, cut: Any, epoch: int, number: int, sizes: Sequence[int], rank: int
    ) -> tuple[list[Any], float]:
        batch = self._draw(epoch)[0][cut.begin(number) : cut.begin(number + 1)]
        if self._lengths is None:
            ends = ends_of_parts(len(batch), tuple(sizes), self._bounds[1])
            part = batch[ends[rank] : ends[rank + 1]]
            return part, len(part)
        lengths = self._lengths[batch]
        places = deal(lengths, sizes, self._bounds[1])[rank]
        # In samples of usual length, so that sizes and speeds keep their unit.
        cost = len(places) * float(lengths[places].max() / self._lengths.mean())
        return [batch[place] for place in places], cost


class _Ends:
    """Where the batches of a batch sampler begin and end."""

    def __init__(self, ends: list[int]) -> None:
        self._ends, self.steps_per_epoch = ends, len(ends) - 1

    def begin(self, number: int) -> int:
        return self._ends[number]


class _Numbers:
    """The batch sampler that others see: numbers of batches."""

    def __init__(self, of: UnevenLoader) -> None:
        self.sampler = of
        self.set_epoch = of.sampler.set_epoch

    def __iter__(self) -> Iterator[list[int]]:
        return ([number] for number in range(len(self.sampler)))

    def __len__(self) -> int:
        return len(self.sampler)


class _Samples:
    """The dataset; of what another loader asks by numbers of batches it returns the numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_dataset"], name)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, numbers: list[int]) -> list[int]:
        return numbers


def sampler_of(loader: Any) -> UnevenBatchSampler:
    """Return the sampler of a loader of `uneven`, of a DataLoader that has one, or itself."""
    found = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    for sampler in found:
        if isinstance(sampler, UnevenBatchSampler):
            return sampler
    raise SettingError(f"loader must come from dbsl.uneven, got {type(loader).__name__}")


@contextmanager
def _seeded(seed: int, generators: Iterable[torch.Generator]) -> Iterator[None]:
    """Draw from torch, numpy, random and these generators under a seed, and put them back."""
    numbers = np.random.get_state()  # noqa: NPY002 (samplers draw from it)
    before = random.getstate(), [g.get_state() for g in generators]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        for generator in generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(numbers)  # noqa: NPY002
            for generator, state in zip(generators, before[1], strict=True):
                generator.set_state(state)


def _usual_size(loader: DataLoader, cut: bool, replicas: int | None) -> int | None:
    """Return the joint batch of a loader without sizes: its own on each process, or its sampler's.

    None: its batch sampler does not say.
    """
    if cut:
        return loader.batch_size * (replicas or world_size())
    return getattr(loader.batch_sampler, "batch_size", None)


def _refuse_others(loader: Any) -> None:
    """Refuse what gives no batches of numbered samples."""
    if not isinstance(loader, DataLoader):
        raise SettingError(f"loader must be a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        what = "IterableDataset" if isinstance(loader.dataset, IterableDataset) else "no batch size"
        raise SettingError(
            f"loader must give batches of numbered samples, got {what}: give each process's loader "
            "its own batch size, and multiply the loss by dbsl.mean_scale(samples)"
        )


def _refuse_split(order: Any) -> None:
    """Refuse a sampler that deals its samples out to processes already, or repeats them."""
    name = type(order).__name__
    if getattr(order, "num_repeats", None) or getattr(order, "repetitions", None):
        raise SettingError(f"loader must have each sample once, got {name}: repeated augmentation")
    if isinstance(order, UnevenBatchSampler):
        raise SettingError("loader must have a sampler of another kind, got UnevenBatchSampler")
    if hasattr(order, "num_replicas"):
        raise SettingError(
            f"loader must have a sampler for all processes together, got {name}, which splits them "
            "already: pass a loader with RandomSampler (shuffle=True), or its inner sampler"
        )
