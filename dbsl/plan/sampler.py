"""Which samples each worker takes, step by step; over all workers an epoch covers each one once.

Pure. An epoch is one seeded permutation, or one that an `Order` draws. The start of a round or
joint step is known without the ones before it. A sampler's state is thus three integers (seed,
epoch, position), shares may change between rounds, and a process holds one permutation for any
number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from dbsl.base.seeds import generator
from dbsl.plan.machines import split_batch

_EVALUATED = 256  # samples at once, where more are not faster


@dataclass(frozen=True)
class Part:
    """One worker's samples of one step, or a micro-batch of them."""

    worker: int
    indices: np.ndarray  # int64 [b]; may be empty where a global batch has few samples
    weight: float  # weight of their mean loss in the step's loss
    share: float = 1.0  # of the worker's samples of the step
    first: bool = True  # of the worker's micro-batches of the step
    last: bool = True


@dataclass(frozen=True)
class Step:
    """One optimizer step: the parts of one worker, or of all that take it together."""

    parts: tuple[Part, ...]
    progress: float  # share of the epoch that is over when the step begins, in [0, 1)
    odd: bool = False  # a joint step in which some worker has no sample
    reweighted: bool = False  # a joint step with part weights that may differ from before
    batches: tuple[Part, ...] = ()  # what is computed at once: parts, or their micro-batches


class Order(Protocol):
    """Draws an epoch's order; hashed by identity."""

    def order(self, rng: np.random.Generator) -> np.ndarray:
        """Return a permutation of the samples, int64 [n]."""


@lru_cache(maxsize=2)  # asynchronous workers may be an epoch apart; 8 bytes a sample
def _permutation(samples: int, seed: int, blocks: Order | None, epoch: int) -> np.ndarray:
    rng = generator(seed, "shuffle", epoch)
    return blocks.order(rng) if blocks else rng.permutation(samples)


def ordered(
    samples: int, seed: int | None, blocks: Order | None, epoch: int, begin: int, end: int
) -> np.ndarray:
    """Return the samples of an epoch's order from `begin` up to `end`; without a seed, unshuffled.

    It is a copy, which does not hold the whole order in memory.
    """
    if seed is None:
        return np.arange(begin, end)
    return _permutation(samples, seed, blocks, epoch)[begin:end].copy()


class EpochSampler:
    """Index batches of every worker, round by round, for shares that sum to the number of samples.

    A round of s samples in batches of at most b takes ceil(s/b) steps, with sizes that differ by at
    most one. Nothing is dropped, and there is no leftover batch of a sample or two, on which batch
    norm and the learning rate would be wrong.

    `shares` are samples per worker and epoch, and `least` is a batch's fewest samples. In an epoch
    that has begun, the first `first_round` rounds took the first `start` samples of its order;
    `shares` and `rounds` are those left.
    """

    def __init__(
        self,
        shares: Sequence[int],
        *,
        rounds: int = 1,
        seed: int = 0,
        first_round: int = 0,
        start: int = 0,
        least: int = 1,
        blocks: Order | None = None,
    ) -> None:
        self._shares = np.asarray(shares, dtype=np.int64)
        self.samples = start + int(self._shares.sum())
        self._order = partial(ordered, self.samples, seed, blocks)
        self._rounds, self._first_round = rounds, first_round
        self._start, self._least = start, least

    def start_of(self, round_: int) -> int:
        """Return how many samples of the epoch all workers take before a round."""
        return self._start + int(self._before(round_).sum())

    def indices(self, worker: int, epoch: int, round_: int) -> np.ndarray:
        """Return the samples that a worker trains on in one round of an epoch, int64 [s]."""
        before = self._before(round_)
        taken = self._before(round_ + 1) - before
        first = self._start + int(before.sum()) + int(taken[:worker].sum())
        return self._order(epoch, first, first + int(taken[worker]))

    def steps(self, worker: int, epoch: int, round_: int, local_batch_size: int) -> list[Step]:
        """Return a worker's steps of one round, each one part of at most `local_batch_size`.

        There are none if a remainder has too few samples for all workers and rounds.
        """
        indices = self.indices(worker, epoch, round_)
        batches = split_evenly(indices, local_batch_size, self._least)
        rounds = self._first_round + self._rounds
        return [
            Step((Part(worker, indices, 1.0),), (round_ + k / len(batches)) / rounds)
            for k, indices in enumerate(batches)
        ]

    def _before(self, round_: int) -> np.ndarray:
        """Return the samples of each worker before a round.

        A worker with too few samples for all rounds has them in the last one.
        """
        over = round_ - self._first_round
        few = self._shares < self._rounds * self._least
        return np.where(
            few, self._shares * (over // self._rounds), self._shares * over // self._rounds
        )


class StepSampler:
    """Index batches of joint steps: global batches of at most B samples, cut into workers' parts.

    `cuts_of_epoch` gives the steps; a part has at least `least` samples, unless it is empty.
    The samples of a global batch do not depend on the sizes of the parts, which may change
    from step to step.
    """

    def __init__(
        self,
        samples: int,
        global_batch_size: int,
        *,
        seed: int = 0,
        drop_last: bool = False,
        least: int = 1,
        blocks: Order | None = None,
    ) -> None:
        self._order = partial(ordered, samples, seed, blocks)
        self._least = least
        self._cuts = cuts_of_epoch(samples, global_batch_size, least, drop_last)
        self.steps_per_epoch = len(self._cuts) - 1

    def begin(self, number: int) -> int:
        """Return how many samples of the epoch come before a step."""
        return int(self._cuts[number])

    def step(
        self, epoch: int, number: int, sizes: Sequence[int], workers: Sequence[int] | None = None
    ) -> Step:
        """Return the parts of a step that these workers have; None: all.

        Parts of all workers are in proportion to `sizes`, which sum to B.
        """
        before, begin, end = (self.begin(max(n, 0)) for n in (number - 1, number, number + 1))
        batch = self._order(epoch, begin, end)
        places = {w: w for w in (range(len(sizes)) if workers is None else workers)}
        parts, odd = parts_of(batch, sizes, places, self._least)
        reweighted = number > 0 and end - begin != begin - before
        return Step(parts, number / self.steps_per_epoch, odd=odd, reweighted=reweighted)


def cuts_of_epoch(
    samples: int, global_batch_size: int, least: int = 1, drop_last: bool = False
) -> np.ndarray:
    """Return where the fewest joint steps of at most B samples begin and end, sizes within one.

    Whole batches and a leftover would be worse: of 5,000 samples in batches of 128, the last has 8,
    two for each of four workers, on which batch norm and the learning rate are wrong. If a step
    would have fewer than `least` samples, there are fewer steps. With `drop_last`, each step has B
    samples, and the leftover of an epoch is not trained on.
    """
    steps, rest = divmod(samples, global_batch_size)
    if drop_last:
        return np.arange(steps + 1) * global_batch_size
    steps = min(steps + (rest > 0), max(1, samples // least))
    # The larger steps come last, so that the weights of parts change once in an epoch.
    size, larger = divmod(samples, steps)
    numbers = np.arange(steps + 1)
    return numbers * size + np.maximum(0, numbers - (steps - larger))


def whole_steps(
    samples: int, size: int, fewest: int, *, start: int = 0, drop_last: bool = False
) -> np.ndarray:
    """Return where steps of one size begin and end, as torch's `BatchSampler` cuts them.

    Steps begin at sample `start`, and the last has the rest. If that is less than `fewest`
    samples, the last two steps share theirs.
    """
    cuts = np.arange(start, samples + 1, size)
    rest = samples - int(cuts[-1])
    if drop_last or not rest:
        return cuts
    if rest < fewest and len(cuts) > 1:
        together = size + rest
        cuts = cuts[:-1] if together < 2 * fewest else np.append(cuts[:-1], samples - together // 2)
    return np.append(cuts, samples)


@lru_cache(maxsize=64)  # an epoch's steps have two sizes, each split the same way
def ends_of_parts(samples: int, sizes: tuple[int, ...], least: int) -> tuple[int, ...]:
    """Return where each part of a joint step ends, after a 0 where the first begins."""
    return (0, *np.cumsum(split_batch(samples, sizes, least)).tolist())


def parts_of(
    batch: np.ndarray, sizes: Sequence[int], places: Mapping[int, int], least: int
) -> tuple[tuple[Part, ...], bool]:
    """Return parts of a joint batch in proportion to `sizes`, and whether any is empty.

    `places` maps each place for which a part is made to its worker.
    """
    ends = ends_of_parts(len(batch), tuple(sizes), least)
    parts = (
        Part(worker, batch[ends[n] : ends[n + 1]], (ends[n + 1] - ends[n]) / len(batch))
        for n, worker in places.items()
    )
    return tuple(parts), any(a == b for a, b in itertools.pairwise(ends))


def micro_parts(part: Part, most: int | None, least: int = 1) -> list[Part]:
    """Return a part as micro-batches with weighted losses that sum to its own.

    Each has `least` to `most` samples; None: the part stays whole.
    """
    count = len(part.indices)
    if most is None or count <= most:
        return [part] if count else []
    pieces = split_evenly(part.indices, most, least)
    last = len(pieces) - 1
    return [
        Part(
            part.worker,
            piece,
            part.weight * len(piece) / count,
            share=len(piece) / count,
            first=number == 0,
            last=number == last,
        )
        for number, piece in enumerate(pieces)
    ]


def split_evenly(indices: np.ndarray, local_batch_size: int, least: int = 1) -> list[np.ndarray]:
    """Cut indices into the fewest batches of at most `local_batch_size`, sizes within one.

    Where a batch would have fewer than `least`, there are fewer and larger batches.
    """
    if not len(indices):
        return []
    steps = max(1, min(-(-len(indices) // local_batch_size), len(indices) // least))
    return [
        indices[len(indices) * k // steps : len(indices) * (k + 1) // steps] for k in range(steps)
    ]


def evaluation_batch_size(given: int | None, device_type: str, largest: int) -> int:
    """Return the samples per step of evaluation: as given, or what suits the device.

    CUDA is fast with many. Without gradients few activations are kept, so four times the
    `largest` training batch fits where that batch does.
    """
    if given is not None:
        return given
    return min(max(_EVALUATED, 4 * largest), 2000) if device_type == "cuda" else _EVALUATED


def evaluation_batches(
    samples: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[np.ndarray]:
    """Return this rank's index batches of an evaluation set; over all ranks each sample once."""
    first, last = samples * rank // world_size, samples * (rank + 1) // world_size
    return split_evenly(np.arange(first, last), batch_size)
