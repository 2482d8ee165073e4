"""Emulation of uneven and disturbed machines, and of a network; reproducible by seed.

Real processes wait for the extra time after their own compute time. In the simulated cluster, the
virtual clock includes the factors and the cost of exchanges. A vector of S bytes goes over a
link of G bit/s, the same in both directions, with a delay of L seconds for each message. A ring
all-reduce of n workers sends 2 (n - 1) messages of S / n in turn (Patarasu and Yuan 2009); a vector
to or from the server is one message of S.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from accelerate import Accelerator

from dbsl.base.errors import require
from dbsl.base.seeds import generator
from dbsl.cluster.formats import joint_messages, message_bytes
from dbsl.config.fields import PAIRS, Within, check_names, parse_kwargs
from dbsl.config.hooks import Extra, Machine
from dbsl.config.settings import RunConfig, wire_of
from dbsl.run.plans import SimulatedTimes

_COUNT, _NUMBER = r"(\d{1,9})", r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|inf)"
_BOUNDS = {"noise": Within(0), "gbps": Within(1e-6), "ms": Within(0)}


@dataclass(frozen=True)
class EmulateSettings(RunConfig):
    """Machines made slower than they are, and a network between simulated workers."""

    # --- emulation of uneven machines
    # make workers slower than their machines: 0:2.0,3:1.5 has worker 0 take 2 times and worker 3
    # take 1.5 times as long for a step
    slowdown: tuple[str, ...] | None = None
    # more to emulate, as name=value. disturb=0.1:4-20: in each epoch a worker turns slow with
    # probability 0.1, for 4 to 20 epochs (2 times; with disturb=0.1:4-20:3 3 times). Of simulated
    # workers: noise=0.1 (relative standard deviation of a round's time) gbps=1 (Gbit/s of their
    # links; else exchanges take no time) ms=0.1 (a message's delay, with gbps)
    emulate: tuple[str, ...] = field(default=(), metadata=PAIRS)


class Emulate(Extra):
    """Makes machines and the network differ from the plan."""

    Settings = EmulateSettings

    @classmethod
    def of(cls, config: EmulateSettings) -> Emulate | None:
        return cls() if config.slowdown or config.emulate else None

    def machine(self, config: EmulateSettings, accelerator: Accelerator) -> Emulation:
        """Return it; with several processes, refuse settings for simulated workers."""
        more = parse_kwargs("emulate", config.emulate, bounds=_BOUNDS)
        check_names("emulate", more, {"disturb", *_BOUNDS})
        require("gbps" in more or "ms" not in more, "emulate must have gbps with ms", "none")
        simulated = more.keys() & {"noise", "gbps"} if accelerator.num_processes > 1 else ()
        must = "emulate must be without noise and gbps with several processes, whose times are real"
        require(not simulated, must, config.emulate)
        return Emulation(
            parse_slowdown(config.slowdown or (), config.workers),
            parse_disturb(str(more["disturb"])) if "disturb" in more else None,
            more.get("noise", 0.0),
            config.seed,
            EmulatedLink(more["gbps"], more.get("ms", 0.0)) if "gbps" in more else None,
        )


@dataclass(frozen=True)
class Disturbance:
    """Slows an undisturbed worker by `factor` with a probability per epoch, for some epochs.

    The test of Ye et al. (arXiv 2007.11831): probability 0.1, 4 to 20 epochs.
    """

    probability: float
    shortest: int  # epochs
    longest: int
    factor: float


@dataclass(frozen=True)
class Emulation(Machine):
    """How much longer than its time model each worker takes, by epoch and round."""

    slowdown: Mapping[int, float] = field(default_factory=dict)  # factors, at least 1, by worker
    disturbance: Disturbance | None = None  # factors that come and go
    noise: float = 0.0  # standard deviation of a round's time, relative; lognormal with mean 1
    seed: int = 0  # the run's
    link: EmulatedLink | None = None  # between simulated workers; None: exchanges take no time

    @property
    def slows(self) -> bool:
        return bool(self.slowdown or self.disturbance)

    def factor(self, worker: int, epoch: int) -> float:
        factor = self.slowdown.get(worker, 1.0)
        if self.disturbance and _disturbed(self.disturbance, self.seed, worker, epoch):
            factor *= self.disturbance.factor
        return factor

    def noise_factor(self, worker: int, epoch: int, round_: int) -> float:
        if not self.noise:
            return 1.0
        sigma = math.sqrt(math.log1p(self.noise**2))
        stream = generator(self.seed, "time noise", worker, epoch, round_)
        return math.exp(sigma * stream.standard_normal() - sigma**2 / 2)

    def exchange_s(self, times: SimulatedTimes, steps: int, worker: int) -> float:
        """Return the seconds that a simulated worker's round spends on its links.

        The server runs with worker 0, unless it has its own process.
        """
        config, link = times.plans.config, self.link
        if link is None:
            return 0.0
        if config.sync == "step":
            (size,) = joint_messages(wire_of(config), times.shapes)
            return steps * link.all_reduce_s(size, config.workers)
        size = message_bytes(config.wire, *times.numbers)
        if config.sync == "bsp":
            at_server = config.push != "weights"
            return link.barrier_s(size, config.workers, at_server=at_server)
        at_server = worker == 0 and not config.dedicated_server
        return 0.0 if at_server else 2 * link.message_s(size)  # a push and a pull


@lru_cache(maxsize=4096)
def _disturbed(disturbance: Disturbance, seed: int, worker: int, epoch: int) -> bool:
    """Return whether a worker is slowed, from a walk through its epochs up to this one."""
    stream = generator(seed, "disturbance", worker)
    left = 0
    for _ in range(epoch + 1):
        # Every epoch makes two draws, so its draws do not depend on other epochs.
        starts, length = stream.random(), stream.random()
        left = max(0, left - 1)
        if not left and starts < disturbance.probability:
            span = disturbance.longest - disturbance.shortest + 1
            left = disturbance.shortest + int(length * span)
    return left > 0


def parse_slowdown(values: Sequence[str], workers: int) -> dict[int, float]:
    """Return factors by worker from ``("0:2.0", "3:1.5")``."""
    factors: dict[int, float] = {}
    for value in values:
        found = re.fullmatch(f"{_COUNT}:{_NUMBER}", str(value))
        text = "slowdown must be worker:factor (in YAML in quotes), such as 0:2.0"
        require(found, text, value)
        worker, factor = int(found[1]), float(found[2])
        require(worker < workers, f"slowdown must name a worker in [0, {workers - 1}]", worker)
        require(worker not in factors, "slowdown must name each worker once", f"{worker} twice")
        Within(1).check(f"slowdown of worker {worker}", factor)
        factors[worker] = factor
    return factors


def parse_disturb(value: str) -> Disturbance:
    """Return the disturbance of ``PROBABILITY:SHORTEST-LONGEST[:FACTOR]``, say ``0.1:4-20``."""
    form = re.fullmatch(f"{_NUMBER}:{_COUNT}(?:-{_COUNT})?(?::{_NUMBER})?", value)
    text = "disturb must be probability:epochs[:factor], such as 0.1:4-20 or 0.1:4-20:3"
    require(form, text, value)
    share, shortest, longest, factor = form.groups()
    found = Disturbance(float(share), int(shortest), int(longest or shortest), float(factor or 2))
    right = 0 <= found.probability <= 1 and 1 <= found.shortest <= found.longest
    text = "disturb must have a probability in [0, 1] and ascending numbers of epochs from 1 on"
    require(right, text, value)
    Within(1).check("disturb factor", found.factor)
    return found


@dataclass(frozen=True)
class EmulatedLink:
    """The network between workers: seconds that vectors of `size` bytes take."""

    gbps: float  # rate of every worker's link in each direction, Gbit/s
    ms: float = 0.0  # delay of a message

    def message_s(self, size: float) -> float:
        return 8 * size / (self.gbps * 1e9) + self.ms / 1e3

    def all_reduce_s(self, size: float, workers: int) -> float:
        """Return the seconds of a vector's ring all-reduce over `workers`."""
        return 2 * (workers - 1) * self.message_s(size / workers)

    def barrier_s(self, size: float, workers: int, *, at_server: bool) -> float:
        """Return the seconds of an exchange at a barrier: a sum, and from a server, a broadcast."""
        if workers == 1:
            return 0.0
        return self.all_reduce_s(size, workers) + at_server * self.message_s(size)
