"""Uneven machines and a network on an even one: factors on compute time, and seconds of exchanges.

Both are the same for each seed. Real processes wait for the extra time after their own compute
time; in the simulated cluster all of it is on the virtual clock.

A vector of S bytes goes over a link of G bit/s, the same in both directions, with a delay of L
seconds for each message. A ring all-reduce of n workers sends 2 (n - 1) messages of S / n in turn
(Patarasu and Yuan 2009); a vector to or from the server is one message of S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.base.seeds import generator
from dbsl.config.fields import in_range
from dbsl.plan.types import Round, Segment

if TYPE_CHECKING:
    from dbsl.run.training import Run


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


class SimulatedTimes:
    """How long rounds take on the virtual clock: what workers compute, and what is exchanged.

    Both take a worker, an epoch, a round and perhaps a plan. Without one the planner is asked for
    the plan in force, which may decide it.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        tensors = run.model.state_dict().values()
        self._state = sum(t.numel() for t in tensors if t.is_floating_point())
        trained = (p for p in run.model.parameters() if p.requires_grad)
        self._parameters = sum(p.numel() for p in trained)

    def duration(
        self, worker: int, epoch: int, round_: int, segment: Segment | None = None
    ) -> float:
        """Return the seconds that a worker computes in a round."""
        return self._computed(worker, epoch, round_, segment)[0]

    def exchange(
        self, worker: int, epoch: int, round_: int, segment: Segment | None = None
    ) -> float:
        """Return the seconds that a worker's round takes on the emulated link.

        The server is with worker 0, unless it has a process of its own.
        """
        config = self._run.config
        if config.link_gbps is None:
            return 0.0
        link = Link(config.link_gbps, config.link_ms, config.link_overlap)
        size = 4 * (self._parameters if config.sync == "step" else self._state)  # bytes of float32
        if config.sync == "step":
            compute_s, steps = self._computed(worker, epoch, round_, segment)
            return steps * link.joint_step_s(size, config.workers, compute_s / max(steps, 1))
        if config.sync == "bsp":
            at_server = config.merge == "delta" or config.push == "gradients"
            return link.barrier_s(size, config.workers, at_server=at_server)
        return 0.0 if worker == 0 and not config.dedicated_server else link.round_trip_s(size)

    def _computed(
        self, worker: int, epoch: int, round_: int, segment: Segment | None
    ) -> tuple[float, int]:
        """Return the seconds of a worker's round, and its steps."""
        run = self._run
        turn = Round((worker,), epoch, round_)
        steps = run.sampler.steps(segment or run.planner.at(epoch, round_), turn)
        samples = sum(len(part.indices) for step in steps for part in step.parts)
        model = run.known.models[run.stage_at(epoch).resolution][worker]
        seconds = (
            model.time(samples, len(steps))
            * run.emulation.factor(worker, epoch)
            * run.emulation.noise_factor(worker, epoch, round_)
        )
        return seconds, len(steps)
