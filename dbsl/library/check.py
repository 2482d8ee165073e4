"""Check whether a loop's averaged gradient is the joint batch's, and name the fault if not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from dbsl.base.errors import require
from dbsl.base.seeds import global_streams, seed_streams
from dbsl.cluster.weights import kept_modes
from dbsl.library.loader import sampler_of
from dbsl.library.processes import by_itself, gather
from dbsl.library.uneven import UnevenBatchSampler
from dbsl.library.watch import alone, refuse_sharded

_EQUAL = "equal"
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # relative; 5 % for shorter formats


def check(model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], loader: Any) -> str:
    """Return one line on whether the averaged gradient is that of the joint batch.

    Call it once, on every process. Each process takes its part of a joint batch, and process 0 also
    takes the whole. A second joint batch in other proportions rules out a result by chance.
    `loss_fn(model, batch)` returns what the loop calls `backward` on, including the scale. Of
    functions that wait for other processes, it may call only `mean_scale`. `loader` comes from
    `uneven`, or has an `UnevenBatchSampler`. Dropout is off during the check. Gradients, weights
    and statistics are restored afterwards.

    The line says "equal", with the relative difference. Otherwise it says that the loss is off by
    n, divided by the accumulation twice, scaled twice, not at all or by fixed numbers; that it is a
    sum, or a mean over something other than samples; or that the loss of a sample depends on the
    others (contrastive losses, batch norm), which no scale can correct.
    """
    sampler = sampler_of(loader)
    refuse_sharded(model)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training]
    other = sampler.parts(1)
    largest = max(other, key=len)
    del largest[max(len(largest) // 2, 2 if norms else 1) :]
    source, errors, free = getattr(loader, "fetcher", loader), {}, 0.0
    must = "loader must be of dbsl.uneven, or a DataLoader: give the one that it wraps"
    require(isinstance(source, DataLoader), must, type(source).__name__)
    factors: list[list[tuple[float, float]]] = []  # for each trial, by rank
    with _put_back(model, sampler, norms):
        for parts in (sampler.parts(0), other):
            found = _trial(model, loss_fn, source, sampler, parts)
            if isinstance(found, str):
                return found
            errors = {said: max(error, errors.get(said, 0.0)) for said, error in found[0].items()}
            free, factors = max(free, found[1]), [*factors, found[2]]
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad)
    tolerance = _TOLERANCE.get(dtype, 0.05)
    said = next((said for said, error in errors.items() if error <= tolerance), None)
    if said == _EQUAL:
        return _constant({*itertools.chain(*factors)}, sampler) or f"equal ({errors[said]:.0e})"
    numbers = [f"{times / over:g}" for times, over in factors[0]]
    if factors[0] == factors[1] and len({*numbers}) > 1:
        said = (
            f"the loss is multiplied by fixed numbers ({', '.join(numbers)}, by process): "
            "multiply it by scale or dbsl.mean_scale alone"
        )
    if said is None and free <= max(tolerance, 1e-5):
        said = (
            "the loss is a mean over something else than samples, such as tokens: multiply it by "
            "dbsl.mean_scale(tokens) instead"
        )
    why = "batch norm has each process's own statistics" if norms else "a contrastive loss, mixup"
    said = said or f"the loss of a sample depends on other samples ({why})"
    return f"{said}; off by {errors[_EQUAL]:.1g}"


def _trial(
    model: nn.Module, loss_fn: Any, source: Any, sampler: UnevenBatchSampler, parts: list[list[int]]
) -> str | tuple[dict[str, float], float, list[tuple[float, float]]]:
    """Compare a joint batch's gradient with those of its parts; all processes return the same.

    Return the error of each hypothesis, that of the best weights, and the numbers by which
    processes multiplied and divided their losses; or what is wrong with the count for `scale`.
    """
    sizes, n, rank = [len(part) for part in parts], sampler.num_replicas, sampler.rank
    counts: list[int] = []  # passed to scale
    factors: list[tuple[float, float]] = []

    def gradient_of(indices: list[Any], scale: float) -> list[Tensor]:
        def scaled(count: int) -> float:
            counts.append(int(count))
            return scale

        sampler.scale = scaled  # shadows the class's method
        model.zero_grad()
        loss = loss_fn(model, source.collate_fn([_sample(source, i) for i in indices]))
        times, over = _factors(loss)
        factors.append((round(times / (scale if counts else 1.0), 6), over))
        loss.backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]

    mine = gradient_of(parts[rank], n * sizes[rank] / sum(sizes))
    counted, told = zip(*gather([counts[:1], factors[0]]), strict=True)
    joint = mine
    if rank == 0:
        with by_itself():
            joint = gradient_of([i for part in parts for i in part], 1.0)
    weights = _hypotheses(sizes)
    errors, free = _compare(mine, joint, weights, n)
    for at, given in enumerate(counted):
        if given and given[0] != sizes[at]:
            return (
                f"scale was given {given[0]} on process {at}, whose part has {sizes[at]} samples: "
                "the collate function drops some, or the count is of something else"
            )
    return dict(zip(weights, errors, strict=True)), free, [*map(tuple, told)]


def _sample(source: Any, index: Any) -> Any:
    seed_streams(0)  # the same augmentation each time
    return source.dataset[index]


def _hypotheses(sizes: list[int]) -> dict[str, list[float]]:
    """Return, for each hypothesis, the weights that would make processes' gradients right."""
    n, total = len(sizes), sum(sizes)
    scales = [n * size / total for size in sizes]
    a_sum = "the loss is a sum over samples: multiply it by n, and leave scale out"
    return {
        _EQUAL: [1 / n] * n,
        "the loss is not multiplied by scale": [size / total for size in sizes],
        "the loss is multiplied by scale twice": [1 / (n * scale) for scale in scales],
        a_sum: [1 / scale for scale in scales],
        f"{a_sum} (it is off by n)": [1.0] * n,
    }


def _constant(factors: set[tuple[float, float]], sampler: UnevenBatchSampler) -> str:
    """Return the fault if the loop always multiplies or divides the loss by the same number."""
    if len(factors) > 1:  # a mean taken by hand has a different factor for each part
        return ""
    ((times, over),) = factors
    n, accumulate = float(sampler.num_replicas), float(sampler.accumulate)
    known = {
        (n, 1.0): f"the loss is off by n: multiplied by {n:g}",
        (1.0, n): f"the loss is off by n: divided by {n:g}",
        (accumulate, 1.0): f"the loss is multiplied by the accumulation ({accumulate:g})",
        (1.0, accumulate): f"the loss is divided by the accumulation ({accumulate:g}) twice",
    }
    known.pop((1.0, 1.0), None)
    return known.get((times, over), "")


def _factors(loss: Tensor) -> tuple[float, float]:
    """Return the products of a loss's last multipliers and of its last divisors."""
    found, node = {"MulBackward0": 1.0, "DivBackward0": 1.0}, loss.grad_fn
    while (kind := type(node).__name__) in found:
        number = node._saved_other
        if number is None or number.numel() != 1 or number.requires_grad:
            break
        found[kind] *= number.item()
        node = node.next_functions[0][0]
    return found["MulBackward0"], found["DivBackward0"]


def _compare(
    mine: list[Tensor], joint: list[Tensor], weights: dict[str, list[float]], processes: int
) -> tuple[list[float], float]:
    """Return the relative error of each weighting, and that of the best possible weights."""
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
    best = float((residual / size).sqrt()) if (free > 0).all() else math.inf
    return (errors / size).sqrt().tolist(), best


@contextmanager
def _put_back(
    model: nn.Module, sampler: UnevenBatchSampler, norms: list[nn.Module]
) -> Iterator[None]:
    """Switch off dropout and exchange between processes inside; restore everything afterwards."""
    gradients = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
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
