"""Uneven and disturbed machines on even ones: factors on compute time, the same for each seed.

Pure. Real processes wait for the extra time after their own compute time; in the simulated cluster
the factors are on the virtual clock.

What exchanges cost on a network, for simulated workers; pure.

A vector of S bytes over a link of G bit/s, the same in both directions, with a delay of L seconds
for each message. A ring all-reduce of n workers sends 2 (n - 1) messages of S / n in turn
(Patarasu and Yuan 2009); a vector to or from the server is one message of S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.seeds import generator
from dbsl.config.fields import in_range


@dataclass(frozen=True)
class Disturbance:
    """An undisturbed worker is slowed by `factor` with a probability per epoch, for some epochs.

    The test of Ye et al. (arXiv 2007.11831): probability 0.1, 4 to 20 epochs.
    """

    probability: float
    shortest: int  # epochs
    longest: int
    factor: float


@dataclass(frozen=True)
class Emulation:
    """How much longer than its time model each worker takes, by epoch and round.

    Attributes:
        slowdown: Constant factors, at least 1, by worker.
        disturbance: Factors that come and go.
        noise: Standard deviation of a round's time, relative; lognormal with mean 1.
        seed: The run's seed.
    """

    slowdown: Mapping[int, float] = field(default_factory=dict)
    disturbance: Disturbance | None = None
    noise: float = 0.0
    seed: int = 0

    def factor(self, worker: int, epoch: int) -> float:
        """Return the factor on a worker's compute time in an epoch, without noise."""
        factor = self.slowdown.get(worker, 1.0)
        if self.disturbance and _disturbed(self.disturbance, self.seed, worker, epoch):
            factor *= self.disturbance.factor
        return factor

    def noise_factor(self, worker: int, epoch: int, round_: int) -> float:
        """Return the noise on one round's time, a factor."""
        if not self.noise:
            return 1.0
        sigma = math.sqrt(math.log1p(self.noise**2))
        stream = generator(self.seed, "time noise", worker, epoch, round_)
        return math.exp(sigma * stream.standard_normal() - sigma**2 / 2)


@lru_cache(maxsize=4096)
def _disturbed(disturbance: Disturbance, seed: int, worker: int, epoch: int) -> bool:
    """Walk the worker's epochs up to this one: slowed or not follows from those before."""
    stream = generator(seed, "disturbance", worker)
    left = 0
    for _ in range(epoch + 1):
        # Every epoch makes two draws, so that its draws do not depend on other epochs.
        starts, length = stream.random(), stream.random()
        if left:
            left -= 1
        if not left and starts < disturbance.probability:
            span = disturbance.longest - disturbance.shortest + 1
            left = disturbance.shortest + int(length * span)
    return left > 0


def parse_slowdown(values: Sequence[str], workers: int) -> dict[int, float]:
    """Return factors by worker from ``("0:2.0", "3:1.5")``.

    Raises:
        SettingError: If a value is none such, a worker does not exist or a factor is below 1.
    """
    factors: dict[int, float] = {}
    for value in values:
        worker, _, factor = str(value).partition(":")
        if not _is_count(worker) or not _is_number(factor):
            raise SettingError(
                f"slowdown must be worker:factor (in YAML in quotes), such as 0:2.0, got {value}"
            )
        if int(worker) >= workers:
            raise SettingError(f"slowdown must name a worker in [0, {workers - 1}], got {worker}")
        if int(worker) in factors:
            raise SettingError(f"slowdown must name each worker once, got {worker} twice")
        in_range(f"slowdown of worker {worker}", float(factor), 1)
        factors[int(worker)] = float(factor)
    return factors


def parse_disturb(value: str) -> Disturbance:
    """Return the disturbance of ``PROBABILITY:SHORTEST-LONGEST[:FACTOR]``, such as ``0.1:4-20``.

    Raises:
        SettingError: If the value is none such or a number is out of its range.
    """
    probability, _, rest = value.partition(":")
    epochs, _, factor = rest.partition(":")
    shortest, _, longest = epochs.partition("-")
    longest, factor = longest or shortest, factor or "2"
    numeric = _is_number(probability) and _is_number(factor)
    if not (numeric and _is_count(shortest) and _is_count(longest)):
        raise SettingError(
            "disturb must be probability:epochs[:factor], such as 0.1:4-20 or 0.1:4-20:3, "
            f"got {value}"
        )
    found = Disturbance(float(probability), int(shortest), int(longest), float(factor))
    if not (0 <= found.probability <= 1 and 1 <= found.shortest <= found.longest):
        raise SettingError(
            "disturb must have a probability in [0, 1] and ascending numbers of epochs from 1 on, "
            f"got {value}"
        )
    in_range("disturb factor", found.factor, 1)
    return found


def _is_count(text: str) -> bool:
    return text.isdecimal() and len(text) < 10


def _is_number(text: str) -> bool:
    try:
        return not np.isnan(float(text))
    except ValueError:
        return False


@dataclass(frozen=True)
class Link:
    """The network between workers.

    Attributes:
        gbps: Rate of every worker's link in each direction, Gbit/s.
        ms: Delay of a message, milliseconds.
        overlap: Share of a joint step's computing that gradients travel behind, in [0, 1].
    """

    gbps: float
    ms: float = 0.0
    overlap: float = 0.0

    def message_s(self, size: float) -> float:
        """Return the seconds of one message of `size` bytes."""
        return 8 * size / (self.gbps * 1e9) + self.ms / 1e3

    def all_reduce_s(self, size: float, workers: int) -> float:
        """Return the seconds in which `workers` sum a vector of `size` bytes, in a ring."""
        return 2 * (workers - 1) * self.message_s(size / workers)

    def joint_step_s(self, size: float, workers: int, compute_s: float) -> float:
        """Return the seconds of a joint step that `workers` wait for their gradients' sum.

        Args:
            size: Bytes of the gradients.
            workers: Workers.
            compute_s: Seconds that the step is computed for, of which `overlap` hides the sum.
        """
        return max(0.0, self.all_reduce_s(size, workers) - self.overlap * compute_s)

    def barrier_s(self, size: float, workers: int, *, at_server: bool) -> float:
        """Return the seconds of a meeting at a barrier: a sum; from a server, a broadcast too."""
        if workers == 1:
            return 0.0
        return self.all_reduce_s(size, workers) + at_server * self.message_s(size)

    def round_trip_s(self, size: float) -> float:
        """Return the seconds of a push to the server and a pull, of `size` bytes each."""
        return 2 * self.message_s(size)
