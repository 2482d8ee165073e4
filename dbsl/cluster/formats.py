"""What numbers are sent as, by `--wire`: how many bytes it takes, and what stays behind."""

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

from dbsl.config.fields import refuse
from dbsl.config.settings import Wire

# --- joint steps

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}  # what gradients are rounded to
_LEAST_SAVING = 2  # of a matrix that PowerSGD compresses; torch's own value
# A factor of zeros, as of a layer without a gradient, would be divided by its length, or stay zeros
# for ever. The first is lost in any other length, the second in any other number.
_EPSILON, _NEAR_ZERO = 1e-30, 1e-15
_KEPT = ("error_dict", "p_memory_dict", "q_memory_dict")


def trained_shapes(model: nn.Module) -> list[torch.Size]:
    """Return the shapes of what is trained of a model, whose gradients joint steps send."""
    return [p.shape for p in model.parameters() if p.requires_grad]


def joint_messages(wire: Wire, shapes: Sequence[torch.Size]) -> list[int]:
    """Return the bytes of each sum of a joint step's gradients; one follows the other."""
    numbers = sum(math.prod(shape) for shape in shapes)
    if not wire.rank:
        return [(2 if wire.name in DTYPES else 4) * numbers]
    left, right = 0, 0
    for rows, columns in _matrices(shapes):
        rank = min(rows, columns, wire.rank)
        if _should_compress(rows, columns, rank, _LEAST_SAVING)[0]:
            numbers, left, right = (
                numbers - rows * columns,
                left + rows * rank,
                right + columns * rank,
            )
    return [4 * numbers, 4 * left, 4 * right]


def check_rank(wire: Wire, shapes: Sequence[torch.Size], given: str) -> None:
    """Refuse PowerSGD that would compress nothing of these shapes."""
    nothing = wire.rank and not joint_messages(wire, shapes)[1]
    # The largest with (n + m) * rank * _LEAST_SAVING < n * m
    ranks = [-(-n * m // (_LEAST_SAVING * (n + m))) - 1 for n, m in _matrices(shapes)]
    most = max(ranks, default=0)
    text = f"wire must be powersgd with a rank of at most {most}, beyond which it saves nothing"
    text = text if most > 0 else "wire must not be powersgd with a model that has no large matrix"
    refuse([(nothing, text, given)])


def _matrices(shapes: Sequence[torch.Size]) -> Iterator[tuple[int, int]]:
    for shape in shapes:
        rows = shape[0] if shape else 1
        yield rows, math.prod(shape) // rows


class LowRank:
    """torch's PowerSGD (Vogels et al., arXiv 1905.13727), and what it keeps from step to step.

    Its products are linear in the gradient and its remainder: processes with a part of both each
    send what one with the sums would.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire, self._group = wire, dist.group.WORLD if dist.is_initialized() else _Alone()
        self._trained: list[bool] = []
        self.reset()

    def reset(self) -> None:
        """Begin without factors and remainders, with the steps in float32."""
        # torch asks for two of them, after which DDP's buckets are in order: here they are already.
        how = {"start_powerSGD_iter": 2, "orthogonalization_epsilon": _EPSILON}
        how["min_compression_rate"] = _LEAST_SAVING
        self.state = PowerSGDState(self._group, self.wire.rank, **how)
        self.state.start_powerSGD_iter = self.wire.steps

    def begin(self, trained: list[bool]) -> None:
        """Note which parameters are trained; where it is others, begin without what was kept."""
        if trained != self._trained:
            self._trained = trained
            self.reset()

    def __call__(self, flat: Tensor, gradients: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Sum and average what `flat` holds over processes, in place.

        `gradients` are its tensors, in the same order in one process and in several: by it the
        first factors are drawn.
        """
        for factors in self.state.q_memory_dict.values():
            other = torch.arange(len(factors), device=flat.device).sin() * _NEAR_ZERO
            factors.copy_(factors.where(factors != 0, other.to(factors)))
        # Channels-last ones as rows in that order; a number alone as a vector.
        lying = [g if g.is_contiguous() else g.permute(0, 2, 3, 1) for g in gradients]
        rows = [g.flatten(1) if g.dim() > 1 else g.view(-1) for g in lying]
        bucket = SimpleNamespace(buffer=lambda: flat, gradients=lambda: rows)  # torch asks no more
        bucket.index, bucket.is_last = lambda: 0, lambda: True
        return powerSGD_hook(self.state, bucket)

    def state_dict(self) -> dict[str, Any]:
        kept = {name: dict(getattr(self.state, name)) for name in _KEPT}
        return kept | {"rank": self.wire.rank, "steps": self.state.iter, "trained": self._trained}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take back what `state_dict` returned; of another rank, begin without."""
        if state["rank"] != self.wire.rank:
            return
        self._trained, self.state.iter = state["trained"], state["steps"]
        for name in _KEPT:
            kept = {number: t.to(device, copy=True) for number, t in state[name].items()}
            getattr(self.state, name).update(kept)


class _Alone(dist.ProcessGroup):
    """A process group of this process, whose sums are what they are given; torch knows no other."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        future = torch.futures.Future()
        future.set_result(tensors)
        return SimpleNamespace(get_future=lambda: future)
