"""Plans as text, before a run starts: tables, timelines, seconds, comparisons, notes on memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dbsl.base.errors import duration, plural, px
from dbsl.plan.machines import WorkerProfiles
from dbsl.plan.stages import Stage
from dbsl.plan.types import Plan, WorkerPlan

_BAR_WIDTH = 48  # characters
MAX_ROWS = 16
_WIDTHS = {"worker": 9, "batch": 8, "samples": 10, "steps": 8, "weight": 8, "time": 10, "idle": 8}


def worker_rows(plan: Plan) -> list[tuple[str, WorkerPlan]]:
    """Return the plan's workers as rows of numbers and plan; equal neighbours share a row."""
    rows, first = [], 0
    for worker, group in itertools.groupby(plan.workers):
        last = first + len(list(group)) - 1
        rows.append((str(first) if first == last else f"{first}-{last}", worker))
        first = last + 1
    return rows


def epoch_spans(stages: Sequence[Stage]) -> str:
    """Return the epochs of these stages in words, counted from 1: ``epochs 1-40, 81-100``."""
    spans: list[tuple[int, int]] = []
    for start, end in sorted((stage.first_epoch, stage.end_epoch) for stage in stages):
        if spans and spans[-1][1] == start:  # they are consecutive
            start, _ = spans.pop()
        spans.append((start, end))
    texts = [str(end) if end == start + 1 else f"{start + 1}-{end}" for start, end in spans]
    if len(texts) > 6:
        texts[5:] = ["…"]
    return f"epoch{'' if texts[0].isdigit() and len(texts) == 1 else 's'} {', '.join(texts)}"


def nodes_in_words(nodes: Sequence[int]) -> str:
    """Return how many nodes there are and the processes of each, as in ``2 nodes (3 + 1)``."""
    sizes = [len(list(group)) for _, group in itertools.groupby(nodes)]
    return f"{plural(len(sizes), 'node')} ({sizes_in_words(sizes)})"


def sizes_in_words(sizes: Sequence[int]) -> str:
    """Return the sizes of groups, as in ``3 + 1`` and ``2 each``."""
    texts = list(map(str, sizes))
    if len(set(sizes)) == 1:
        texts = [f"{sizes[0]} each"]
    elif len(texts) > 8:
        texts[4:-3] = ["…"]
    return " + ".join(texts)


def format_plan(plan: Plan) -> str:
    """Return the plan as a table, equal workers on one line, with its cost below."""
    rows, left_out = worker_rows(plan), {"weight", "idle"} if len(plan.workers) == 1 else set()

    def line(*cells: object) -> str:
        columns = zip(_WIDTHS, cells, strict=True)
        return "".join(f"{c:>{_WIDTHS[name]}}" for name, c in columns if name not in left_out)

    lines = [line(*_WIDTHS)]
    for name, w in rows[:MAX_ROWS]:
        counts = name, w.local_batch_size, w.samples, w.steps, f"{w.merge_weight:.4f}"
        idle = f"{100 * (1 - w.predicted_time_s / plan.time_s):.1f} %"
        lines.append(line(*counts, duration(w.predicted_time_s), idle))
    if len(rows) > MAX_ROWS:
        lines.append(f"{'':>9}  ... and {len(rows) - MAX_ROWS} rows more")
    lines.append(f"  {comparison(plan)}")
    lines += [f"  note: {note}" for note in plan.notes]
    return "\n".join(lines)


def comparison(plan: Plan) -> str:
    """Return one line: an epoch's seconds and, for several workers, those of other plans."""
    if len(plan.workers) == 1:
        return f"{duration(plan.time_s)} an epoch of {plural(plan.workers[0].steps, 'step')}"
    if plan.global_batch_size is not None:
        steps = plan.workers[0].steps
        size, larger = divmod(plan.samples, steps)  # steps with one more sample
        return (
            f"{duration(plan.time_s)} an epoch of {steps} joint steps, "
            f"{f'{size} or {size + 1}' if larger else size} samples each; split equally "
            f"{duration(plan.equal_batch_time_s)}; idle {100 * plan.idle_share:.1f} %"
        )
    return (
        f"{duration(plan.time_s)} an epoch; all large {duration(plan.all_large_time_s)}, one equal "
        f"batch {duration(plan.equal_batch_time_s)}; {100 * plan.small_share:.1f} % of the samples "
        f"in small batches; idle {100 * plan.idle_share:.1f} %"
    )


def timeline(plan: Plan, rounds: int) -> str:
    """Return an epoch as bars of text, one row per worker: S, L computing, dots waiting."""
    width = max(1, _BAR_WIDTH // rounds)
    lines = []
    for name, w in worker_rows(plan)[:MAX_ROWS]:
        busy = max(1, round(width * w.predicted_time_s / plan.time_s))
        bar = ("S" if w.small else "L") * busy + "." * (width - busy)
        lines.append(f"{name:>9}  |{'|'.join([bar] * rounds)}|")
    return "\n".join(lines)


def format_run(
    stages: Sequence[Stage],
    plans: Mapping[int, Plan],
    rounds: int,
    *,
    rates: Callable[[Stage], str] = lambda stage: f"{stage.learning_rate:g}",
    timelines: bool = False,
    begin: int = 0,
    simulated: bool = False,
) -> str:
    """Return the plans of a run in the order of their use, and its total time.

    `rates` returns a stage's learning rates. Epochs before `begin` are left out. Workers that are
    `simulated` compute in turn, which takes the sum of their times.
    """
    lines, epochs = [], stages[-1].end_epoch
    stages = [
        replace(stage, first_epoch=max(stage.first_epoch, begin))
        for stage in stages
        if stage.end_epoch > begin
    ]
    for resolution, plan in plans.items():
        its_stages = [stage for stage in stages if stage.resolution == resolution]
        if not its_stages:
            lines += [f"{px(resolution)}: no epoch{' left' * bool(begin)}", ""]
            continue
        plain = plan.global_batch_size or len(plan.workers) == 1
        ratio = "" if plain else f"; time ratio {plan.time_ratio:.3f}"
        rate = ", ".join(dict.fromkeys(map(rates, its_stages)))
        lines.append(f"{px(resolution, after=', ')}{epoch_spans(its_stages)}, lr {rate}{ratio}")
        lines.append(format_plan(plan))
        lines += [timeline(plan, rounds), ""] if timelines else [""]

    def total(time_of: Callable[[Plan], float]) -> str:
        return duration(sum(len(s.epochs) * time_of(plans[s.resolution]) for s in stages))

    side, more, others, here = "", "", "", ""
    if any(len(plan.workers) > 1 for plan in plans.values()):
        side, more = ", workers side by side", " or exchanges"
        others = f" (all large {total(lambda plan: plan.all_large_time_s)}, one equal batch "
        joint = any(plan.global_batch_size for plan in plans.values())
        equal = total(lambda plan: plan.equal_batch_time_s)
        others = f"{' (split equally ' if joint else others}{equal})"
        if simulated:
            in_turn = total(lambda plan: sum(worker.predicted_time_s for worker in plan.workers))
            here = f"; here, one after another: {in_turn}"
    span = epoch_spans(stages) if begin else f"all {epochs} epochs"
    text = f"predicted for {span}{side}, without evaluation{more}"
    lines.append(f"{text}: {total(lambda plan: plan.time_s)}{others}{here}")
    return "\n".join(lines)


def with_notes(plan: Plan, known: WorkerProfiles, resolution: int) -> Plan:
    """Return a resolution's plan with notes on micro-batches, and on batches beyond memory."""
    unknown = [None] * len(plan.workers)
    micro = (known.micro_batch_sizes or {}).get(resolution, unknown)
    fits = (known.fits or {}).get(resolution, unknown)
    notes: defaultdict[str, list[str]] = defaultdict(list)
    for number, (worker, most, fit) in enumerate(zip(plan.workers, micro, fits, strict=True)):
        batch = worker.local_batch_size
        at_once = min(batch, most or batch)
        if at_once < batch:
            note = f"batches of {batch} in {-(-batch // most)} micro-batches of at most {most}"
            notes[note].append(str(number))
        if fit is not None and at_once > fit:
            note = f"{at_once} samples at once are more than the {fit} that fit into memory"
            notes[f"{note}: set --micro-batch-size auto"].append(str(number))
    lines = (f"worker{'s' * (len(w) > 1)} {', '.join(w)}: {note}" for note, w in notes.items())
    return replace(plan, notes=(*plan.notes, *lines))
