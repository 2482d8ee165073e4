"""Formats in which `--wire` sends numbers: their size in bytes, and their rounding error."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    _should_compress,
    powerSGD_hook,
)
from torch.nn.functional import pad

from dbsl.base.errors import require
from dbsl.cluster.weights import FlatWeights
from dbsl.config.settings import Wire

# --- joint steps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # gradients are rounded to these
_LEAST_SAVING = 2  # PowerSGD compresses matrices only beyond this ratio; torch's own value
# A factor of zeros, as for a layer without a gradient, would be divided by its norm, 0, or remain
# zero. The first value, added to any other norm, changes no digit; nor does the second, added to
# any other number.
_EPSILON, _NEAR_ZERO = 1e-30, 1e-15
_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")


def trained_shapes(model: nn.Module) -> list[torch.Size]:
    """Return the shapes of a model's trained parameters; joint steps send their gradients."""
    return [p.shape for p in model.parameters() if p.requires_grad]


def joint_messages(wire: Wire, shapes: Sequence[torch.Size]) -> list[int]:
    """Return the bytes of each sum of a joint step's gradients; sums are consecutive."""
    numbers = sum(math.prod(shape) for shape in shapes)
    if not wire.rank:
        return [(2 if wire.name in DTYPES else 4) * numbers]
    left, right = 0, 0
    for rows, columns in _matrices(shapes):
        rank = min(rows, columns, wire.rank)
        if _should_compress(rows, columns, rank, _LEAST_SAVING)[0]:
            numbers -= rows * columns
            left += rows * rank
            right += columns * rank
    return [4 * numbers, 4 * left, 4 * right]


def check_rank(wire: Wire, shapes: Sequence[torch.Size], given: str) -> None:
    """Refuse PowerSGD if it would compress none of these shapes."""
    # The largest with (n + m) * rank * _LEAST_SAVING < n * m
    ranks = [-(-n * m // (_LEAST_SAVING * (n + m))) - 1 for n, m in _matrices(shapes)]
    most = max(ranks, default=0)
    text = f"wire must be powersgd with a rank of at most {most}: above, torch compresses nothing"
    text = text if most > 0 else "wire must not be powersgd with a model that has no large matrix"
    require(not wire.rank or joint_messages(wire, shapes)[1], text, given)


def _matrices(shapes: Sequence[torch.Size]) -> Iterator[tuple[int, int]]:
    for shape in shapes:
        rows = shape[0] if shape else 1
        yield rows, math.prod(shape) // rows


class LowRank:
    """torch's PowerSGD (Vogels et al., arXiv 1905.13727), and its state between steps.

    Its products are linear in the gradient and its remainder: processes that each have a part of
    both send what one process with the sums would send.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._trained: list[bool] = []
        self.reset()

    def reset(self) -> None:
        """Discard factors and remainders; the first steps are in float32 again."""
        # torch requires two such steps, for DDP to order its buckets: here they are in order.
        how = {"start_powerSGD_iter": 2, "orthogonalization_epsilon": _EPSILON}
        how["min_compression_rate"] = _LEAST_SAVING
        self.state = PowerSGDState(dist.group.WORLD, self.wire.rank, **how)
        self.state.start_powerSGD_iter = self.wire.steps

    def begin(self, trained: list[bool]) -> None:
        """Note which parameters are trained; if they have changed, discard the state."""
        if trained != self._trained:
            self._trained = trained
            self.reset()

    def __call__(self, flat: Tensor, gradients: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Sum and average `flat` over processes, in place.

        `gradients` are its tensors, in the order of the model's parameters: the first factors are
        drawn in this order.
        """
        for factors in self.state.q_memory_dict.values():
            other = torch.arange(len(factors), device=flat.device).sin() * _NEAR_ZERO
            factors.copy_(factors.where(factors != 0, other.to(factors)))
        # Channels-last tensors become rows in that order; a scalar becomes a vector.
        lying = [g if g.is_contiguous() else g.permute(0, 2, 3, 1) for g in gradients]
        rows = [g.flatten(1) if g.dim() > 1 else g.view(-1) for g in lying]
        bucket = SimpleNamespace(buffer=lambda: flat, gradients=lambda: rows)  # torch needs no more
        bucket.index, bucket.is_last = lambda: 0, lambda: True
        return powerSGD_hook(self.state, bucket)

    def state_dict(self) -> dict[str, Any]:
        kept = {name: dict(getattr(self.state, name)) for name in _KEPT}
        return kept | {"rank": self.wire.rank, "steps": self.state.iter, "trained": self._trained}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Restore what `state_dict` returned; ignore it if the rank differs."""
        if state["rank"] != self.wire.rank:
            return
        self._trained, self.state.iter = state["trained"], state["steps"]
        for name in _KEPT:
            kept = {number: t.to(device, copy=True) for number, t in state[name].items()}
            getattr(self.state, name).update(kept)


# --- rounds

BLOCK = 256  # numbers that share a scale, float32
_BITS = {"bf16": 16, "int8": 8, "int4": 4, "int2": 2}  # bits of a number


def numbers_of(model: nn.Module) -> tuple[int, int]:
    """Return how many numbers of a model's weights are in matrices, and how many are not."""
    trained = filter(torch.is_floating_point, model.parameters())
    matrices = sum(p.numel() for p in trained if p.dim() > 1)
    floating = (t.numel() for t in model.state_dict().values() if t.is_floating_point())
    return matrices, sum(floating) - matrices


def message_bytes(wire: str, matrices: int, rest: int, itemsize: int = 4) -> int:
    """Return the bytes of a message: numbers in matrices, and the rest, which is not rounded."""
    if wire == "float32":
        return itemsize * (matrices + rest)
    numbers = -(-matrices // BLOCK) * BLOCK
    scales = 0 if wire == "bf16" else 4 * numbers // BLOCK
    return numbers * _BITS[wire] // 8 + scales + itemsize * rest


def encode(numbers: Tensor, wire: str) -> Tensor:
    """Return rows of numbers [R, L], of at least float32, as bytes, uint8 [R, bytes].

    L is a multiple of BLOCK.

    An int8 or int4 is the nearest multiple of a scale that makes its block's largest number 127 or
    7. An int2 is -1, 0 or 1, by the rule of ternary weight networks (Li et al., arXiv 1605.04711):
    0 up to 0.7 times the mean magnitude; the scale is the mean magnitude of the others.
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
    # From 0 up, packed into bytes from places far apart: each operation has long rows.
    fields = integers.add_(2 ** (bits - 1)).to(torch.uint8).view(rows, 8 // bits, -1)
    packed = fields[:, 0].clone()
    for place in range(1, 8 // bits):
        packed |= fields[:, place] << (bits * place)
    return torch.cat([scales.view(rows, -1).view(torch.uint8), packed], 1)


def decode(message: Tensor, wire: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers [R, L] of `encode`'s bytes [R, bytes]."""
    if not message.numel():  # a model without matrices
        return message.to(dtype)
    if wire == "bf16":
        return message.view(torch.bfloat16).to(dtype)
    rows, bits = len(message), _BITS[wire]
    blocks = 8 * message.shape[1] // (32 + BLOCK * bits)
    scales, packed = message.split([4 * blocks, message.shape[1] - 4 * blocks], 1)
    mask = 2**bits - 1
    fields = [(packed >> (bits * place)) & mask for place in range(8 // bits)]
    integers = torch.stack(fields, 1).view(rows, blocks, BLOCK).to(dtype)
    scales = scales.reshape(-1).view(torch.float32).view(rows, blocks, 1)
    numbers = (integers - 2 ** (bits - 1)) * scales.to(integers.dtype)
    return numbers.view(rows, -1).to(dtype)


class Rounding:
    """Rounds numbers to a format, and adds the error to the next ones (error feedback)."""

    def __init__(self, wire: str) -> None:
        self.wire = wire
        self.left: Tensor | None = None  # [R, L], like the numbers

    def encode(self, numbers: Tensor) -> Tensor:
        """Return numbers [R, L], plus the last rounding error, as bytes."""
        numbers = numbers if self.left is None else numbers + self.left
        message = encode(numbers, self.wire)
        self.left = numbers - decode(message, self.wire, numbers.dtype)
        return message


class WorkerSum:
    """Sums the vectors [P] of all workers; matrices are sent in the `wire` format (a collective).

    All receive the same bits. With a format that rounds, two processes exchange their vectors.
    More than two each sum a part of all vectors and round the sum again, as in ZeRO++ (Wang et
    al., arXiv 2306.10209), to send fewer bytes. One-dimensional parameters and buffers, which are
    few, are summed unrounded.

    `simulated` workers are all in this process.
    """

    def __init__(
        self,
        wire: str,
        weights: FlatWeights,
        group: dist.ProcessGroup | None = None,
        *,
        simulated: int = 0,
    ) -> None:
        self._wire, self._weights, self._group, self._real = wire, weights, group, not simulated
        alone = not (simulated or dist.is_initialized())
        self._workers = 1 if alone else simulated or dist.get_world_size(group)
        # For this process's vectors, by worker, and the sum.
        count = 0 if wire == "float32" else (simulated or 1) + 1
        self._roundings = [Rounding(wire) for _ in range(count)]

    @torch.no_grad()
    def __call__(self, *vectors: Tensor) -> Tensor:
        """Return the sum, which may share memory with one of the vectors.

        A worker that has nothing adds zeros and its last rounding error.
        """
        if self._wire == "float32":
            (summed,) = vectors
            if self._workers > 1:
                dist.all_reduce(summed, group=self._group)
            return summed
        twice, rest, encoded = self._workers > 2, None, []
        parts = self._workers if self._real and twice else 1
        *added, summed = self._roundings
        for each, vector in zip(added, vectors, strict=True):  # one at a time, to save memory
            matrices, own = self._weights.split(vector)
            rest = own if rest is None else rest + own
            padded = pad(matrices, (0, -len(matrices) % (parts * BLOCK)))
            encoded.append(each.encode(padded.view(parts, -1)))
        rows = torch.cat(encoded)  # [parts or workers, bytes]
        if self._real:
            dist.all_reduce(rest, group=self._group)
        if twice:
            came = rows  # the part that this process sums, by worker
            if self._real:
                dist.all_to_all_single(came := torch.empty_like(rows), rows, group=self._group)
            rows = summed.encode(self._sum(came, rest.dtype))
        if self._real:
            own, rows = rows, rows.new_empty(self._workers, rows.shape[1])
            dist.all_gather_into_tensor(rows, own, group=self._group)
        total = decode(rows, self._wire, rest.dtype) if twice else self._sum(rows, rest.dtype)
        return self._weights.join(total.view(-1)[: len(matrices)], rest)

    def _sum(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum [1, L] of rows of bytes, in their order."""
        first, *others = rows.split(1)
        numbers = (decode(row, self._wire, dtype) for row in others)
        return sum(numbers, decode(first, self._wire, dtype))

    def forget(self) -> None:
        """Discard the rounding errors."""
        for rounding in self._roundings:
            rounding.left = None

    def state_dict(self) -> list[Tensor | None] | None:
        """Return this process's rounding errors; None: float32 has none."""
        return [rounding.left for rounding in self._roundings] or None

    def load_state_dict(self, state: Sequence[Tensor | None] | None) -> None:
        """Restore what `state_dict` returned, unless either format is float32."""
        for rounding, left in zip(self._roundings, state or (), strict=False):
            rounding.left = None if left is None else left.to(self._weights.vector.device)
