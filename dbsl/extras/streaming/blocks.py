"""The order of an epoch whose data lie in groups, of which few are open at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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

    def pair_shares(self, labels: np.ndarray, rng: np.random.Generator) -> dict[str, float]:
        """Return how well blocks are mixed: what two samples that meet at random have in common.

        ``group`` and ``class`` are shares in [0, 1] of the pairs within blocks that are of one
        group, or class; ``group_of_all`` and ``class_of_all`` are of all pairs there are.
        `labels` are the samples' classes, int64 [n].
        """
        groups, blocks = self._cut(rng)
        block_of = np.empty_like(blocks)
        block_of[groups] = blocks  # by group
        block_of_samples, everything = np.repeat(block_of, self.sizes), np.zeros(self.samples, int)
        group_of = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return {
            "group": _shared(group_of, block_of_samples),
            "group_of_all": _shared(group_of, everything),
            "class": _shared(labels, block_of_samples),
            "class_of_all": _shared(labels, everything),
        }

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


def _shared(values: np.ndarray, among: np.ndarray) -> float:
    """Return the share of the pairs in equal `among` whose values are equal, too."""
    _, sets = np.unique(among, return_counts=True)
    _, equal = np.unique(among * (values.max() + 1) + values, return_counts=True)
    pairs = (sets * (sets - 1)).sum()
    return float((equal * (equal - 1)).sum() / pairs) if pairs else 0.0
