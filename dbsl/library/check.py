"""Whether a loop's averaged gradient is that of the joint batch, and what is wrong where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dbsl.base.errors import require
from dbsl.base.seeds import global_streams, seed_streams
from dbsl.cluster.weights import kept_modes
from dbsl.library.loader import sampler_of
from dbsl.library.processes import by_itself, gather
from dbsl.library.uneven import UnevenBatchSampler
from dbsl.library.watch import SHARDED, alone

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; of shorter formats 5 %


def check(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], loader: Any) -> str:
    """Return whether processes together have the gradient of the joint batch, in one line.

    Call it once, on every process. Each takes its part of a joint batch, and process 0 the whole
    one. `loss_fn(model, batch)` returns what the loop calls `backward` on, scale and all; of what
    waits for other processes it may call `mean_scale` alone. `loader` comes from `uneven`, or has
    an `UnevenBatchSampler`. Dropout is off meanwhile. Gradients, weights and statistics are as
    before afterwards.

    The line says "equal", with the relative difference. Or it says that the loss is off by n,
    divided by the accumulation twice, or scaled twice or not at all; that it is a sum, or a mean
    over something else than samples; or that the loss of a sample depends on the others
    (contrastive losses, batch norm), which no scale can mend.
    """
    sampler = sampler_of(loader)
    whole = not any(isinstance(module, SHARDED) for module in model.modules())
    require(whole, "model must have its parameters whole", "one that FSDP shards")
    parts, source = sampler.first_parts(), getattr(loader, "fetcher", loader)
    sizes, n, rank = [len(part) for part in parts], sampler.num_replicas, sampler.rank
    calls: list[int] = []  # counts that scale was called with
    factors: list[float] = []  # by which the loss is multiplied besides it

    def gradient_of(indices: list[Any], scale: float) -> list[Tensor]:
        def scaled(count: int) -> float:
            calls.append(int(count))
            return scale

        sampler.scale = scaled  # stands before the class's own
        model.zero_grad()
        loss = loss_fn(model, source.collate_fn([_sample(source, i) for i in indices]))
        factors.append(_factor(loss) / (scale if calls else 1.0))
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]

    with _put_back(model, sampler):
        mine = gradient_of(parts[rank], n * sizes[rank] / sum(sizes))
        said_by_all = gather([calls[:1], factors[0]])
        joint = mine
        if rank == 0:
            with by_itself():
                joint = gradient_of([i for part in parts for i in part], 1.0)
        weights = _hypotheses(sizes)
        errors, free = _compare(mine, joint, weights, n)
    for at, (called, _) in enumerate(said_by_all):
        if called and called[0] != sizes[at]:
            return (
                f"scale was given {called[0]} on process {at}, whose part has {sizes[at]} samples: "
                "the collate function drops some, or the count is of something else"
            )
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    tolerance = _TOLERANCE.get(dtype, 0.05)
    right = (said for said, error in zip(weights, errors, strict=True) if error <= tolerance)
    said = next(right, None)
    if said == "equal":
        constant = _constant({factor for _, factor in said_by_all}, n, sampler.accumulate)
        return constant or f"equal ({errors[0]:.0e})"
    return f"{said or _other_reason(model, free, tolerance)}; off by {errors[0]:.1g}"


def _sample(source: Any, index: Any) -> Any:
    seed_streams(0)  # the same augmentation each time
    return source.dataset[index]


def _other_reason(model: nn.Module, free: float | None, tolerance: float) -> str:
    """Return why no weights of this library's are right, by how far the best ones are off."""
    norms = any(isinstance(m, _BatchNorm) and m.training for m in model.modules())
    if free is not None and free <= max(tolerance, 1e-5):
        return (
            "the loss is a mean over something else than samples, such as tokens: multiply it by "
            "dbsl.mean_scale(tokens) instead"
        )
    why = "batch norm has each process's own statistics" if norms else "a contrastive loss, or so"
    return f"the loss of a sample depends on other samples ({why})"


def _hypotheses(sizes: list[int]) -> dict[str, list[float]]:
    """Return by what each process's gradient must be weighted to be right, if this happened."""
    n, total = len(sizes), sum(sizes)
    scales = [n * size / total for size in sizes]
    a_sum = "the loss is a sum over samples: multiply it by n, and leave scale out"
    return {
        "equal": [1 / n] * n,
        "the loss is not multiplied by scale": [size / total for size in sizes],
        "the loss is multiplied by scale twice": [1 / (n * scale) for scale in scales],
        a_sum: [1 / scale for scale in scales],
        f"{a_sum} (it is off by n)": [1.0] * n,
    }


def _constant(factors: set[float], n: int, accumulate: int) -> str:
    """Return what is wrong if every process multiplies its loss by a number besides the scale."""
    if len(factors) > 1:  # a mean that is taken by hand has another one on each
        return ""
    (factor,) = factors
    known = {
        1 / accumulate: f"the loss is divided by the accumulation ({accumulate}) twice",
        float(accumulate): f"the loss is multiplied by the accumulation ({accumulate})",
        1 / n: f"the loss is off by n: divided by {n}",
        float(n): f"the loss is off by n: multiplied by {n}",
    }
    known.pop(1.0, None)
    return next((said for at, said in known.items() if abs(factor / at - 1) < 1e-6), "")


def _factor(loss: Tensor) -> float:
    """Return the product of the numbers that a loss was multiplied with last."""
    factor, node = 1.0, loss.grad_fn
    while type(node).__name__ in ("MulBackward0", "DivBackward0"):
        number = node._saved_other
        if number is None or number.numel() != 1 or number.requires_grad:
            break
        divides = type(node).__name__ == "DivBackward0"
        factor = factor / number.item() if divides else factor * number.item()
        node = node.next_functions[0][0]
    return factor


def _compare(
    mine: list[Tensor], joint: list[Tensor], weights: dict[str, list[float]], processes: int
) -> tuple[list[float], float | None]:
    """Return the relative error of each weighting, and of the best weights there are."""
    rows = torch.tensor([*weights.values()], dtype=torch.float64)
    errors, gram = torch.zeros(len(rows), dtype=torch.float64), 0.0
    for own, target in zip(mine, joint, strict=True):
        parts, target = [own.double().flatten()], target.double().flatten()
        if processes > 1:
            (own,) = parts
            parts = [torch.empty_like(own) for _ in range(processes)]
            dist.all_gather(parts, own)
            dist.broadcast(target, 0)
        table = torch.stack([*parts, target]).cpu()
        errors += (rows @ table[:-1] - table[-1]).square().sum(1)
        gram = gram + table @ table.T
    size = gram[-1, -1].clamp(min=1e-300)
    free = torch.linalg.lstsq(gram[:-1, :-1], gram[:-1, -1:]).solution.flatten()
    residual = (size - free @ gram[:-1, -1]).clamp(min=0)
    positive = bool((free > 0).all())
    return (errors / size).sqrt().tolist(), float((residual / size).sqrt()) if positive else None


@contextmanager
def _put_back(model: nn.Module, sampler: UnevenBatchSampler) -> Iterator[None]:
    """Have no dropout and no exchange between processes inside; leave everything as it was."""
    gradients = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    with torch.random.fork_rng(), global_streams(), alone(model), kept_modes(model):
        model.eval()
        for norm in norms:
            norm.train(not isinstance(norm, nn.SyncBatchNorm))
        try:
            yield
        finally:
            sampler.__dict__.pop("scale", None)
            with torch.no_grad():
                for buffer, value in zip(model.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
