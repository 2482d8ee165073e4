"""Pictures of a run, from its plan and from its metrics.jsonl alone.

Figures are made without pyplot, so that drawing keeps no state and may happen in any thread.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from dbsl.base.files import write_bytes
from dbsl.base.words import duration, px, short_loss
from dbsl.log.rows import figures_of
from dbsl.plan.stages import Stage
from dbsl.plan.text import (
    MAX_ROWS,
    comparison,
    epoch_spans,
    idle_share,
    total_times_s,
    worker_rows,
)
from dbsl.plan.types import Plan, WorkerPlan
from dbsl.run.evaluation import further_sets

DPI = 100
SMALL, LARGE, IDLE = "#e69f00", "#56b4e9", "#d9d9d9"  # told apart by colour-blind readers too
_KINDS = ((SMALL, "small"), (LARGE, "large"))
TRAIN, EVAL, AVERAGED = "#0072b2", "#d55e00", "#009e73"
_WIDE = 1000  # ratio of the largest loss to the smallest from which their axis is logarithmic
_TOP = 0.93  # share of a panel's height where what is not drawn to scale is marked
_EXPLODED = 20  # times what three quarters of the losses stay below: not drawn to scale


def plan_timeline(
    stages: Sequence[Stage],
    plans: Mapping[int, Plan],
    rounds_per_epoch: int,
    path: Path,
    latest: Mapping[int, tuple[int, Plan]] | None = None,
) -> None:
    """Draw `timeline_figure` into a PNG."""
    save_figure(timeline_figure(stages, plans, rounds_per_epoch, latest), path)


def accuracy_and_loss(
    metrics: Sequence[Mapping[str, Any]], path: Path, *, bce: bool = False, falling: bool = False
) -> None:
    """Draw `curves_figure` into a PNG."""
    save_figure(curves_figure(metrics, bce=bce, falling=falling), path)


def timeline_figure(
    stages: Sequence[Stage],
    plans: Mapping[int, Plan],
    rounds_per_epoch: int,
    latest: Mapping[int, tuple[int, Plan]] | None = None,
) -> Figure:
    """Return what the plan predicts for one epoch: a bar per worker and round, and the idle time.

    There is one panel per resolution, in the order in which the run meets them. Where there are
    many workers, neighbours with the same plan share a row.

    Args:
        stages: All stages of the run.
        plans: The plan that each resolution starts with.
        rounds_per_epoch: Rounds of a worker in an epoch.
        latest: Where a resolution's plan was remade: since which epoch the last one holds, and that
            plan. It has a panel below the first one's.
    """
    latest = latest or {}
    shown = []  # a resolution, its plan, and when that holds
    for resolution in dict.fromkeys(stage.resolution for stage in stages):
        epochs = epoch_spans([stage for stage in stages if stage.resolution == resolution])
        remade = resolution in latest
        shown.append((resolution, plans[resolution], epochs + ", the first plan" * remade))
        if remade:
            since, plan = latest[resolution]
            shown.append((resolution, plan, f"from epoch {since + 1} on, the last plan"))
    rows = [worker_rows(plan, MAX_ROWS) for _, plan, _ in shown]
    heights = [min(len(own), MAX_ROWS) + 2.5 for own in rows]
    figure = Figure(figsize=(14, 1.5 + 0.36 * sum(heights)), dpi=DPI, layout="constrained")
    planned, all_large, equal = total_times_s(stages, plans)
    joint = any(plan.global_batch_size for plan in plans.values())
    others = f"with all batches large {duration(all_large)}, with one equal batch {duration(equal)}"
    if joint:
        others = f"with each global batch split equally {duration(equal)}"
    used = {resolution for resolution, _, _ in shown}
    unused = [px(resolution) for resolution in plans if resolution not in used]
    alone = all(len(plan.workers) == 1 for plan in plans.values())
    what = ": how long each worker computes, how long it waits"
    figure.suptitle(
        f"Predicted time of one epoch{'' if alone else what}\n"
        f"all {stages[-1].end_epoch} epochs{' by the first plans' * bool(latest)}: "
        f"{duration(planned)}{'' if alone else f'; {others}'}"
        + (f"\nno epoch is at {' or '.join(unused)}" if unused else ""),
        fontsize=13,
    )
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, own, (resolution, plan, when) in zip(panels[:, 0], rows, shown, strict=True):
        for y, (_, worker) in enumerate(own[:MAX_ROWS]):
            _draw_worker(axes, y, plan, worker, rounds_per_epoch)
        names = [f"worker{'s' if '-' in name else ''} {name}" for name, _ in own[:MAX_ROWS]]
        axes.set_yticks(range(len(names)), names, fontsize=9)
        axes.set_ylim(len(names) - 0.4, -0.6)
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right"]].set_visible(False)
        rest = f"  (the first {MAX_ROWS} of {len(own)} rows)" if len(own) > MAX_ROWS else ""
        axes.set_title(
            f"{px(resolution, after=' images, ')}{when}: {comparison(plan)}{rest}",
            loc="left",
            fontsize=11,
        )
    panels[-1, 0].set_xlabel("seconds since the epoch began")
    small, large = (Patch(color=c, label=f"computes on {n} batches") for c, n in _KINDS)
    part = Patch(color=LARGE, label="computes on its part of each global batch")
    waits = Patch(fc=IDLE, ec="white", hatch="///", label="waits for the slowest worker")
    if not alone:
        figure.legend(
            handles=[part, waits] if joint else [small, large, waits],
            loc="outside lower center",
            ncols=3,
            frameon=False,
        )
    return figure


def curves_figure(
    metrics: Sequence[Mapping[str, Any]], *, bce: bool = False, falling: bool = False
) -> Figure:
    """Return accuracy and loss over epochs and over training time, sub-stages shaded.

    Time is the simulated cluster's clock where all evaluations have it, else, and for one worker,
    measured. It is known when an epoch was evaluated, and interpolated between. With `bce`
    training's loss is binary cross-entropy, evaluation's is cross-entropy. With `falling` the
    learning rate falls inside a sub-stage, which is named by the rate of its last step.
    """
    evaluations = [row for row in metrics if row["event"] == "eval"]
    stages = stage_spans(metrics)
    if falling:
        stages = [stage | {"learning_rate": _rate_at_end(metrics, stage)} for stage in stages]
    several = any(row.get("worker") for row in metrics if row["event"] == "round")
    simulated = several and all("virtual_time_s" in row for row in evaluations)
    time_key = "virtual_time_s" if simulated else "train_time_s"
    known = [0.0, *(row["epoch"] + 1.0 for row in evaluations)]  # in completed epochs
    times_s = [0.0, *(row[time_key] for row in evaluations)]
    epochs, losses, figures = _train_losses(metrics)
    further = dict.fromkeys(name for row in evaluations for name in further_sets(row))

    figure = Figure(figsize=(14, 9), dpi=DPI, layout="constrained")
    figure.suptitle(
        "Accuracy and loss of the run (each strip: epochs with one resolution"
        + ("; lr: where it ends)" if falling else " and learning rate)"),
        fontsize=14,
    )
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    time_label = "training time (s)" if not simulated else "training time on simulated workers (s)"
    for (top, bottom), label, position in (
        (panels[:, 0], "epochs completed", lambda epoch: np.asarray(epoch, dtype=float)),
        (panels[:, 1], time_label, lambda e: np.interp(e, known, times_s, right=math.nan)),
    ):
        x = position(known[1:])
        _line(top, x, [_number(row["accuracy"], 100) for row in evaluations], EVAL, "evaluation")
        trained = ", binary cross-entropy" if bce else ""
        _line(bottom, position(epochs), losses, TRAIN, f"training{trained}, mean of the epoch")
        for number, (name, values) in enumerate(figures.items()):
            color = f"C{(number + 4) % 10}"  # the first ones are much as those of the losses
            _line(bottom, position(epochs), values, color, f"training, {name}")
        tested = "evaluation, cross-entropy" if bce else "evaluation"
        _line(bottom, x, [_number(row["loss"]) for row in evaluations], EVAL, tested)
        if any("ema_accuracy" in row for row in evaluations):
            averages = [_number(row.get("ema_accuracy"), 100) for row in evaluations]
            _line(top, x, averages, AVERAGED, "evaluation, averaged weights")
            averages = [_number(row.get("ema_loss")) for row in evaluations]
            _line(bottom, x, averages, AVERAGED, "evaluation, averaged weights")
        for number, name in enumerate(further):
            pairs = [further_sets(row).get(name, (math.nan, math.nan)) for row in evaluations]
            accuracies, others = zip(*pairs, strict=True)
            colour = f"C{(number + 4) % 10}"
            _line(top, x, [_number(value, 100) for value in accuracies], colour, name)
            _line(bottom, x, [_number(value) for value in others], colour, name)
        fit_axis(bottom, _EXPLODED, _WIDE)
        ends = [v for line in bottom.lines for v in line.get_xdata() if math.isfinite(v)]
        end = 1.02 * max(ends, default=1.0)
        bottom.set_xlabel(label)
        bottom.set_xlim(0, end)
        for axes in (top, bottom):
            axes.grid(alpha=0.3)
            axes.tick_params(labelbottom=True, labelleft=True)
            if axes.lines:
                axes.legend(loc="best", fontsize=9)
            else:
                axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center")
        if bottom.lines:
            _shade(top, bottom, stages, position, end, "to lr" if falling else "lr")
    panels[1, 0].xaxis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    if not evaluations:
        panels[0, 0].set_ylim(0, 100)
    panels[0, 0].set_ylabel("accuracy of the evaluation (%)")
    panels[1, 0].set_ylabel("loss")
    return figure


def fit_axis(
    axes: Axes,
    far: float,
    wide: float = math.inf,
    *,
    least: float = 0.0,
    words: Callable[[float], str] = short_loss,
) -> bool:
    """Scale a panel for most of its values; return whether some are too far above these.

    Triangles at the top stand for those, and the largest is named there.

    Args:
        axes: The panel, with its lines.
        far: What is more than so many times what three quarters stay below is not drawn to scale.
        wide: Ratio of the largest other value to the smallest above which the axis is logarithmic.
        least: What three quarters count as staying below at least.
        words: What a value is named by.
    """
    points = [point for line in axes.lines for point in line.get_xydata()]
    drawn = sorted(y for _, y in points if 0 < y < math.inf)
    if not drawn:
        return False
    usual = drawn[(len(drawn) - 1) * 3 // 4]  # three quarters are not above it
    most = far * max(usual, least)
    within = [y for y in drawn if y <= most]
    lowest, highest = within[0], within[-1]
    if highest > wide * lowest:
        axes.set_yscale("log")
        most = 3 * highest  # it has room for more
    if drawn[-1] <= most:
        return False
    if axes.get_yscale() == "log":
        axes.set_ylim(lowest / 2, most)
    else:
        room = 0.1 * (highest - lowest) or highest
        axes.set_ylim(lowest - room / 2, highest + room)
    end = max(x for x, _ in points)
    beyond = [(line, [(x, y) for x, y in line.get_xydata() if y > most]) for line in axes.lines]
    far_points = [(y, x, line.get_color()) for line, own in beyond for x, y in own]
    largest, x, color = max(far_points)
    for line, own in beyond:
        axes.plot(
            [x for x, _ in own],
            [_TOP] * len(own),
            "^",
            color=line.get_color(),
            transform=axes.get_xaxis_transform(),
            label="_far",
        )
    side = 1 if x < end / 2 else -1
    axes.annotate(
        f"{'up to ' * (len(far_points) > 1)}{words(largest)}",
        (x, _TOP),
        xycoords=axes.get_xaxis_transform(),
        color=color,
        fontsize=9,
        ha="left" if side > 0 else "right",
        va="center",
        xytext=(7 * side, 0),
        textcoords="offset points",
    )
    return True


def stage_spans(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the spans of epochs with one resolution and learning rate, in order.

    A later row takes the place of earlier ones: that of a run made longer, from the epoch on from
    which it holds.
    """
    of_epoch: dict[int, dict[str, Any]] = {}
    for row in metrics:
        if row["event"] == "plan":
            kind = {name: row[name] for name in ("resolution", "learning_rate")}
            first = max(row["first_epoch"], row.get("from_epoch", 0))
            of_epoch |= dict.fromkeys(range(first, row["end_epoch"]), kind)
    spans: list[dict[str, Any]] = []
    for epoch, kind in sorted(of_epoch.items()):
        if spans and spans[-1] == spans[-1] | kind:
            spans[-1]["end_epoch"] = epoch + 1
        else:
            spans.append({"first_epoch": epoch, "end_epoch": epoch + 1, **kind})
    return spans


def _draw_worker(axes: Axes, y: int, plan: Plan, worker: WorkerPlan, rounds_per_epoch: int) -> None:
    compute_s, round_s = worker.predicted_time_s / rounds_per_epoch, plan.time_s / rounds_per_epoch
    starts = [round_s * index for index in range(rounds_per_epoch)]
    idle = [start + compute_s for start in starts]
    color = SMALL if worker.small else LARGE
    axes.barh([y] * len(starts), compute_s, left=starts, height=0.7, fc=color, ec="white")
    axes.barh(
        [y] * len(idle),
        round_s - compute_s,
        left=idle,
        height=0.7,
        fc=IDLE,
        ec="white",
        hatch="///",
    )
    idles = f", idle {100 * idle_share(plan, worker):.1f} %" * (len(plan.workers) > 1)
    axes.text(
        1.01,
        y,
        f"batch {worker.local_batch_size:,}, {worker.samples:,} samples, "
        f"{duration(worker.predicted_time_s)}{idles}",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize=9,
    )


def _rate_at_end(metrics: Sequence[Mapping[str, Any]], span: Mapping[str, Any]) -> float:
    """Return the highest learning rate of a worker in the last round of a span, or nan."""
    own, restarts = [], 0  # behind a restart rounds may count from 0 again
    for row in metrics:
        restarts += row["event"] == "restart"
        told = row["event"] == "round" and "learning_rate" in row
        if told and span["first_epoch"] <= row["epoch"] < span["end_epoch"]:
            place = (row["epoch"], restarts, row.get("round", 0))
            own.append((place, row["learning_rate"]))
    return max(own, default=(None, math.nan))[1]


def _train_losses(
    metrics: Sequence[Mapping[str, Any]],
) -> tuple[list[float], list[float], dict[str, list[float]]]:
    """Return completed epochs and, for each, its loss and figures as means over samples."""
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for row in metrics:
        if row["event"] == "round":
            rounds.setdefault(row["epoch"], []).append(row)

    def means(name: str) -> list[float]:
        own = [[row for row in rounds[epoch] if name in row] for epoch in epochs]
        sums = [sum(_number(row[name]) * row["samples"] for row in rows) for rows in own]
        counts = [sum(row["samples"] for row in rows) or math.nan for rows in own]
        return [total / count for total, count in zip(sums, counts, strict=True)]

    # Of an epoch whose steps other workers took, all of them, no loss is known.
    epochs = sorted(epoch for epoch, rows in rounds.items() if any(row["samples"] for row in rows))
    names = dict.fromkeys(
        name for rows in rounds.values() for row in rows for name in figures_of(row)
    )
    figures = {name: means(name) for name in names}
    return [epoch + 1.0 for epoch in epochs], means("loss"), figures


def _number(value: float | None, factor: float = 1.0) -> float:
    return math.nan if value is None else factor * value


def _line(
    axes: Axes, x: Sequence[float] | np.ndarray, y: Sequence[float], color: str, label: str
) -> None:
    if np.isfinite(x).any():
        marker = "o" if len(x) <= 40 else None
        axes.plot(x, y, color=color, marker=marker, markersize=4, label=label)


def _shade(
    top: Axes,
    bottom: Axes,
    stages: Sequence[Mapping[str, Any]],
    position: Callable[[float], float],
    end: float,
    rate: str,
) -> None:
    """Shade every other sub-stage in both panels; name each above the top one.

    `rate` is the word before a learning rate; one that is nan is not named.
    """
    spans = [
        (float(position(stage["first_epoch"])), float(position(stage["end_epoch"])), stage)
        for stage in stages
    ]
    # A sub-stage that the run has not finished ends where the axis does.
    spans = [(a, min(b, end) if math.isfinite(b) else end, s) for a, b, s in spans if a < end]
    narrow = any(b - a < 0.12 * end for a, b, _ in spans)
    for index, (start, stop, stage) in enumerate(spans):
        if index % 2:
            for axes in (top, bottom):
                axes.axvspan(start, stop, color="black", alpha=0.07, lw=0)
        if stop - start < 0.02 * end:  # no room for a name
            continue
        told = [px(stage["resolution"])] if stage["resolution"] else []
        if math.isfinite(stage["learning_rate"]):
            told.append(f"{rate} {stage['learning_rate']:.3g}")
        top.text(
            (start + stop) / 2,
            1.01,
            (", " if narrow else "\n").join(told),
            transform=top.get_xaxis_transform(),
            rotation=90 if narrow else 0,
            ha="center",
            va="bottom",
            fontsize=8,
        )


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG, whole or not at all."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, png.getvalue())
