"""What a plan says about itself once the machines, the model and the data are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from dbsl.plan.types import Plan
from dbsl.run.config import RunConfig
from dbsl.run.workers import Workers

_FEW = 8  # samples of a worker, whose mean and variance say little


def with_notes(
    plan: Plan, known: Workers, resolution: int, config: RunConfig, model: nn.Module, samples: int
) -> Plan:
    """Return a resolution's plan for so many samples with notes on memory and its last step."""
    notes = (*_on_memory(plan, known, resolution), *_on_last_step(plan, config, model, samples))
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


def _on_last_step(plan: Plan, config: RunConfig, model: nn.Module, samples: int) -> Iterator[str]:
    """Yield a note where batch norm sees few samples in the last, shorter step of an epoch.

    5,000 images of CIFAR-100 in joint steps of 128 leave 8 for four workers. Trained with them, a
    ResNet came to 27.8 %; one worker with the same batches, but 8 in its last, to 44.4 %.
    """
    total = plan.global_batch_size
    norms = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    if total is None or config.drop_last or config.sync_batch_norm or not norms:
        return
    rest = samples % total
    fewest = min(worker.local_batch_size for worker in plan.workers)
    share = rest * fewest / total
    if rest and share < _FEW <= fewest:
        yield (
            f"the last step of an epoch has {rest} of {total} samples, about {share:.0f} for a "
            "worker, too few for batch norm: --drop-last leaves it out"
        )


def _on_memory(plan: Plan, known: Workers, resolution: int) -> Iterator[str]:
    """Yield who takes micro-batches, and whose batch does not fit into memory."""
    micro = (known.micro_batch_sizes or {}).get(resolution, [None] * len(plan.workers))
    fits = (known.fits or {}).get(resolution, [None] * len(plan.workers))
    notes: dict[str, list[int]] = {}
    for number, (worker, most, fit) in enumerate(zip(plan.workers, micro, fits, strict=True)):
        batch = worker.local_batch_size
        at_once = batch if most is None else min(batch, most)
        if at_once < batch:
            note = f"batches of {batch} in {-(-batch // most)} micro-batches of at most {most}"
            notes.setdefault(note, []).append(number)
        if fit is not None and at_once > fit:
            note = (
                f"{at_once} samples at once are more than the {fit} that fit into memory: set "
                "--micro-batch-size auto"
            )
            notes.setdefault(note, []).append(number)
    for note, own in notes.items():
        yield f"{'workers' if len(own) > 1 else 'worker'} {', '.join(map(str, own))}: {note}"
