"""What exchanges cost on a network, for simulated workers; pure.

A vector of S bytes over a link of G bit/s, the same in both directions, with a delay of L seconds
for each message. A ring all-reduce of n workers sends 2 (n - 1) messages of S / n in turn
(Patarasu and Yuan 2009); a vector to or from the server is one message of S.
"""

from __future__ import annotations

from dataclasses import dataclass


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
