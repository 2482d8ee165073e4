"""What vectors travel as between processes, by `--wire`, and what rounding leaves for the next one.

Every format is known here alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dbsl.cluster.weights import FlatWeights

# --- rounds

BLOCK = 256  # numbers that share a scale, float32
_BITS = {"bf16": 16, "int8": 8, "int4": 4, "int2": 2}  # of a number
ROUND_FORMATS = ("float32", *_BITS)


def message_bytes(wire: str, matrices: int, rest: int, itemsize: int = 4) -> int:
    """Return the bytes of a message: numbers in matrices, and the rest, which stays whole."""
    if wire == "float32":
        return itemsize * (matrices + rest)
    numbers = -(-matrices // BLOCK) * BLOCK
    scales = 0 if wire == "bf16" else 4 * numbers // BLOCK
    return numbers * _BITS[wire] // 8 + scales + itemsize * rest


def encode(numbers: Tensor, wire: str) -> Tensor:
    """Return rows of numbers [R, L] as bytes, uint8 [R, bytes]; L is a multiple of BLOCK.

    An int8 or int4 is the nearest multiple of a scale, by which its block's largest number is 127
    or 7. An int2 is -1, 0 or 1, by the rule of ternary weight networks (Li et al., arXiv
    1605.04711): 0 up to 0.7 times the mean size, and the scale is the others' mean size.
    """
    rows = len(numbers)
    if wire == "bf16":
        return numbers.bfloat16().view(torch.uint8)
    bits, blocks = _BITS[wire], numbers.reshape(rows, -1, BLOCK)
    sizes = blocks.abs()
    if wire == "int2":
        taken = sizes > 0.7 * sizes.mean(2, keepdim=True)
        count = taken.sum(2, keepdim=True).clamp_(min=1)
        scales = ((sizes * taken).sum(2, keepdim=True) / count).float()
        integers = blocks.sign() * taken
    else:
        scales = (sizes.amax(2, keepdim=True) / (2 ** (bits - 1) - 1)).float()
        tiny = torch.finfo(torch.float32).tiny  # in a block of zeros
        integers = (blocks / scales.clamp(min=tiny)).round_()
    # From 0 up, as many as fit into a byte, from places far apart: each operation has long rows.
    fields = integers.add_(2 ** (bits - 1)).to(torch.uint8).view(rows, 8 // bits, -1)
    packed = fields[:, 0].clone()
    for place in range(1, 8 // bits):
        packed |= fields[:, place] << (bits * place)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), packed], 1)


def decode(message: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers [R, L] of `encode`'s bytes [R, bytes]."""
    if wire == "bf16":
        return message.view(torch.bfloat16).to(dtype)
    rows, bits = len(message), _BITS[wire]
    blocks = 8 * message.shape[1] // (32 + BLOCK * bits)
    scales, packed = message.split([4 * blocks, message.shape[1] - 4 * blocks], 1)
    mask = 2**bits - 1
    fields = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    integers = torch.stack(fields, 1).view(rows, blocks, BLOCK).to(dtype) - 2 ** (bits - 1)
    scales = scales.reshape(-1).view(torch.float32).view(rows, blocks, 1)
    return (integers * scales.to(dtype)).view(rows, -1)


class Rounding:
    """Rounds numbers to a format; what that leaves counts with the next ones (error feedback)."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.left: Tensor | None = None  # [R, L], as the numbers

    def encode(self, numbers: Tensor) -> Tensor:
        """Return numbers [R, L], and what was left of those before, as bytes."""
        numbers = numbers if self.left is None else numbers + self.left
        message = encode(numbers, self.wire)
        self.left = numbers - decode(message, self.wire, numbers.dtype)
        return message

    def round(self, numbers: Tensor) -> Tensor:
        """Return what comes of numbers [R, L]."""
        return decode(self.encode(numbers), self.wire, numbers.dtype)


class RoundedSum:
    """Sums the vectors [P] of all processes, of which rounded matrices travel (a collective).

    All get the same bits. Two processes send each other what they add. Of more each sums a part of
    all vectors and rounds the sum once more, as in ZeRO++ (Wang et al., arXiv 2306.10209), so that
    fewer bytes travel. Vectors and buffers, which are few, are summed whole.
    """

    def __init__(
        self, wire: str, weights: FlatWeights, group: dist.ProcessGroup | None = None
    ) -> None:
        self._weights, self._group, self._processes = weights, group, dist.get_world_size(group)
        self._added, self._summed = Rounding(wire), Rounding(wire)
        self._wire = wire

    @torch.no_grad()
    def __call__(self, vector: Tensor) -> Tensor:
        processes, group = self._processes, self._group
        matrices, rest = self._weights.split(vector)
        dist.all_reduce(rest, group=group)
        parts = 1 if processes == 2 else processes
        numbers = pad(matrices, (0, -len(matrices) % (parts * BLOCK))).view(parts, -1)
        added = self._added.encode(numbers)  # [parts, bytes]
        if processes > 2:
            came = torch.empty_like(added)  # of the part that this process sums, by rank
            dist.all_to_all_single(came, added, group=group)
            added = self._summed.encode(self._sum(came, vector.dtype)[None])
        came = added.new_empty(processes, added.shape[1])
        dist.all_gather_into_tensor(came, added, group=group)
        if processes > 2:
            summed = decode(came, self._wire, vector.dtype).view(-1)
        else:
            summed = self._sum(came, vector.dtype)
        return self._weights.join(summed[: len(matrices)], rest)

    def _sum(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum of rows of bytes, in their order."""
        numbers = decode(rows, self._wire, dtype)
        total = numbers[0].clone()
        for row in numbers[1:]:
            total += row
        return total

    def forget(self) -> None:
        """Leave nothing for the next sum."""
        self._added.left = self._summed.left = None

    def state_dict(self) -> dict[str, Any]:
        """Return what this process's rounding has left."""
        return {"added": self._added.left, "summed": self._summed.left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        device = self._weights.vector.device
        for rounding, left in ((self._added, state["added"]), (self._summed, state["summed"])):
            rounding.left = None if left is None else left.to(device)


class SimulatedSum:
    """What `RoundedSum` makes of the workers' vectors, in one process."""

    def __init__(self, wire: str, weights: FlatWeights, workers: int) -> None:
        self._weights, self._added = weights, [Rounding(wire) for _ in range(workers)]
        self._summed = Rounding(wire)

    @torch.no_grad()
    def __call__(self, vectors: Mapping[int, Tensor]) -> Tensor:
        """Return the sum of vectors [P] by worker; one that has none adds what it has left."""
        total, others, nothing = 0, 0, torch.zeros_like(next(iter(vectors.values())))
        for worker, rounding in enumerate(self._added):
            matrices, rest = self._weights.split(vectors.get(worker, nothing))
            numbers = pad(matrices, (0, -len(matrices) % BLOCK))[None]
            total, others = total + rounding.round(numbers), others + rest
        if len(self._added) > 2:
            total = self._summed.round(total)
        return self._weights.join(total[0, : len(matrices)], others)

    def state_dict(self) -> list[Tensor | None]:
        """Return what rounding has left."""
        return [rounding.left for rounding in (*self._added, self._summed)]

    def load_state_dict(self, state: Sequence[Tensor | None]) -> None:
        device = self._weights.vector.device
        for rounding, left in zip((*self._added, self._summed), state, strict=True):
            rounding.left = None if left is None else left.to(device)


class Packing:
    """Vectors [P] of one direction of a connection as messages, uint8 [size].

    Pushes count what rounding left of those before. So do pulls, by themselves: they are the change
    of the server's weights since what the worker has.
    """

    def __init__(self, wire: str, weights: FlatWeights) -> None:
        self.rounding, self._weights = Rounding(wire), weights
        self._matrices = len(weights.vector) - weights.rest
        itemsize = weights.vector.itemsize
        self.size = message_bytes(wire, self._matrices, weights.rest, itemsize)

    @classmethod
    def of(cls, wire: str, weights: FlatWeights) -> Packing | None:
        """Return what packs a connection's vectors; None: they travel as they are."""
        return None if wire == "float32" else cls(wire, weights)

    def pack(self, vector: Tensor, *, keep: bool = True) -> Tensor:
        """Return a vector as a message; `keep` what is left for the next one."""
        matrices, rest = self._weights.split(vector)
        numbers = pad(matrices, (0, -len(matrices) % BLOCK))[None]
        packed = self.rounding.encode(numbers) if keep else encode(numbers, self.rounding.wire)
        return torch.cat([rest.view(torch.uint8), packed[0]])

    def unpack(self, message: Tensor) -> Tensor:
        """Return the vector of a message."""
        dtype = self._weights.vector.dtype
        whole = self._weights.rest * dtype.itemsize
        numbers = decode(message[None, whole:].contiguous(), self.rounding.wire, dtype)[0]
        return self._weights.join(numbers[: self._matrices], message[:whole].view(dtype))


class SimulatedLink:
    """What a simulated worker pulls and pushes, as messages would have it."""

    def __init__(self, wire: str, weights: FlatWeights) -> None:
        self._packing = Packing(wire, weights)
        self._held: Tensor | None = None  # what the worker pulled last

    def pull(self, weights: Tensor) -> Tensor:
        """Return what the worker gets of the server's weights [P]."""
        if self._held is not None:
            weights = self._held + self._packing.unpack(
                self._packing.pack(weights - self._held, keep=False)
            )
        self._held = weights
        return weights

    def push(self, weights: Tensor) -> Tensor:
        """Return what the server gets of the worker's weights [P]."""
        return self._held + self._packing.unpack(self._packing.pack(weights - self._held))

    def state_dict(self) -> dict[str, Tensor | None]:
        """Return what both ends count from."""
        return {"held": self._held, "left": self._packing.rounding.left}

    def load_state_dict(self, state: Mapping[str, Tensor | None], device: torch.device) -> None:
        held, left = (v if v is None else v.to(device) for v in (state["held"], state["left"]))
        self._held, self._packing.rounding.left = held, left
