"""Which samples each worker takes, step by step; over all workers an epoch covers each one once.

Pure. An epoch is one seeded permutation, cut into the workers' shares, each share into rounds and
each round into batches. A position is three integers (seed, epoch, round), so a sampler's state
costs nothing to save, and a process holds one permutation however many workers live in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dbsl.seeds import generator


@lru_cache(maxsize=2)  # asynchronous workers may be one epoch apart; int64, 8 bytes a sample
def _permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    order = generator(seed, "shuffle", epoch).permutation(samples)
    order.flags.writeable = False
    return order


class EpochSampler:
    """Index batches of every worker, for shares that sum to the number of samples.

    A round of s samples in batches of at most b takes ceil(s/b) steps, whose sizes differ by at
    most one: a leftover batch of a sample or two, on which batch norm and the learning rate would
    be wrong, does not occur, and nothing is dropped.
    """

    def __init__(self, shares: Sequence[int], *, rounds: int = 1, seed: int = 0) -> None:
        """Cut epochs into `shares` (samples per worker and epoch, each at least `rounds`)."""
        if min(shares) < rounds:
            raise ValueError(
                f"rounds must be at most the smallest share ({min(shares)}), got {rounds}"
            )
        self.offsets = np.concatenate([[0], np.cumsum(shares)])
        self.samples = int(self.offsets[-1])
        self.rounds = rounds
        self.seed = seed

    def indices(self, worker: int, epoch: int, round_: int) -> np.ndarray:
        """Return the samples that a worker trains on in one round of an epoch, int64 [s]."""
        start, end = int(self.offsets[worker]), int(self.offsets[worker + 1])
        first = start + (end - start) * round_ // self.rounds
        last = start + (end - start) * (round_ + 1) // self.rounds
        return _permutation(self.samples, self.seed, epoch)[first:last].copy()

    def batches(
        self, worker: int, epoch: int, round_: int, local_batch_size: int
    ) -> list[np.ndarray]:
        """Return one round's index batches, each of at most `local_batch_size` samples."""
        return split_evenly(self.indices(worker, epoch, round_), local_batch_size)


def split_evenly(indices: np.ndarray, local_batch_size: int) -> list[np.ndarray]:
    """Cut indices into the fewest batches of at most `local_batch_size`, sizes within one."""
    steps = -(-len(indices) // local_batch_size)
    return [
        indices[len(indices) * k // steps : len(indices) * (k + 1) // steps] for k in range(steps)
    ]


def evaluation_batches(
    samples: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[np.ndarray]:
    """Return this rank's index batches of an evaluation set; over all ranks each sample once."""
    first, last = samples * rank // world_size, samples * (rank + 1) // world_size
    return split_evenly(np.arange(first, last), batch_size) if last > first else []
