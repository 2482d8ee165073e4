"""What a plan says about itself once the machines, the model and the data are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dbsl.plan.types import Plan
from dbsl.run.workers import Workers


def with_notes(plan: Plan, known: Workers, resolution: int) -> Plan:
    """Return a resolution's plan with notes on memory."""
    notes = tuple(_on_memory(plan, known, resolution))
    return replace(plan, notes=(*plan.notes, *notes)) if notes else plan


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
