"""Pictures of a run: its plan, accuracy and loss, and its workers.

All that is drawn comes from rows of metrics.jsonl: `python -m dbsl.report RUN` draws them again.

Figures are made without pyplot, so that drawing keeps no state and may happen in any thread.
matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

import io
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dbsl.base.files import write_bytes
from dbsl.base.words import duration, px, short_loss
from dbsl.config.hooks import Extra, Row
from dbsl.log.rows import figures_of, read_metrics
from dbsl.plan.stages import Stage
from dbsl.plan.text import (
    MAX_ROWS,
    comparison,
    epoch_spans,
    idle_share,
    total_times_s,
    worker_rows,
)
from dbsl.plan.types import Plan, WorkerPlan, plan_from_plain
from dbsl.run.evaluation import further_sets
from dbsl.run.folder import settings_in

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend

DPI = 100
SMALL, LARGE, IDLE = "#e69f00", "#56b4e9", "#d9d9d9"  # told apart by colour-blind readers too
_KINDS = ((SMALL, "small"), (LARGE, "large"))
TRAIN, EVAL, AVERAGED = "#0072b2", "#d55e00", "#009e73"
_WIDE = 1000  # ratio of the largest loss to the smallest from which their axis is logarithmic
_FAR = 20  # times what three quarters of a panel stay below: not drawn to scale
_TOP = 0.93  # share of a panel's height where such values are marked


class Pictures(Extra):
    """Draws the plan when a run begins, and what came of it at its end."""

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        """Draw the plan."""
        draw_plan(folder, rows)

    def end(self, folder: Path) -> None:
        """Draw accuracy, loss and workers; the plan again, if it was remade."""
        rows, settings = read_metrics(folder / "metrics.jsonl"), settings_in(folder)
        falling = settings["lr_schedule"] != "step"
        curves = curves_figure(rows, bce=settings.get("bce_loss", False), falling=falling)
        save_figure(curves, folder / "plots/accuracy.png")
        save_figure(worker_figure(rows), folder / "plots/workers.png")
        draw_plan(folder, rows)


def draw_plan(folder: Path, rows: Iterable[Row]) -> None:
    """Draw `timeline_figure` into plots/plan.png, from plan.json and the rows of plans."""
    by_name = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    told = [row for row in rows if row["event"] == "plan"]
    stages = [Stage(0, 0, dropout=0.0, **span) for span in stage_spans(told)]
    plans = {
        0 if name == "plan" else int(name.split()[0]): plan_from_plain(plan)  # "32 px"
        for name, plan in by_name.items()
    }
    last = {row["resolution"]: row for row in told}
    latest = {}
    for resolution, row in last.items():
        named = [{k: v for k, v in own.items() if k != "worker"} for own in row["workers"]]
        plan = replace(plans[resolution], workers=tuple(WorkerPlan(**own) for own in named))
        if plan.workers != plans[resolution].workers:
            latest[resolution] = (row["from_epoch"], plan)
    rounds = settings_in(folder)["rounds_per_epoch"]
    figure = timeline_figure(stages, plans, rounds, latest)
    save_figure(figure, folder / "plots/plan.png")


def timeline_figure(
    stages: Sequence[Stage],
    plans: Mapping[int, Plan],
    rounds_per_epoch: int,
    latest: Mapping[int, tuple[int, Plan]] | None = None,
) -> Figure:
    """Return what the plan predicts for one epoch: a bar per worker and round, and the idle time.

    There is one panel per resolution, in the order in which the run meets them. Where there are
    many workers, neighbours with the same plan share a row. `latest` says where a resolution's plan
    was remade: since which epoch the last one holds, and that plan, which has a panel below.
    """
    from matplotlib.patches import Patch

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
    figure = _new_figure(14, 1.5 + 0.36 * sum(heights))
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
    from matplotlib.ticker import MaxNLocator

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

    figure = _new_figure(14, 9)
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
        fit_axis(bottom)
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


def fit_axis(axes: Axes, words: Callable[[float], str] = short_loss) -> None:
    """Scale a panel for most of its values, logarithmically where these are far apart.

    Triangles at the top stand for those that are too far above, and the largest is named there.
    """
    points = [(x, y, line) for line in axes.lines for x, y in line.get_xydata()]
    drawn = sorted(y for _, y, _ in points if 0 < y < math.inf)
    if not drawn:
        return
    most = _FAR * drawn[(len(drawn) - 1) * 3 // 4]  # three quarters are not above that
    within = [y for y in drawn if y <= most]
    if within[-1] > _WIDE * within[0]:
        axes.set_yscale("log")
        most = 3 * within[-1]  # it has room for more
    far = [(y, x, line.get_color()) for x, y, line in points if y > most]
    if not far:
        return
    if axes.get_yscale() == "log":
        axes.set_ylim(within[0] / 2, most)
    else:
        room = 0.1 * (within[-1] - within[0]) or within[-1]
        axes.set_ylim(max(0, within[0] - room / 2), within[-1] + room)
    top = axes.get_xaxis_transform()
    for _, x, color in far:
        axes.plot([x], [_TOP], "^", color=color, transform=top, label="_far")
    largest, x, color = max(far)
    side = 1 if x < max(x for x, _, _ in points) / 2 else -1
    axes.annotate(
        f"{'up to ' * (len(far) > 1)}{words(largest)}",
        (x, _TOP),
        xycoords=top,
        color=color,
        fontsize=9,
        ha="left" if side > 0 else "right",
        va="center",
        xytext=(7 * side, 0),
        textcoords="offset points",
    )


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


def _new_figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=DPI, layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write the figure as a PNG, whole or not at all."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, png.getvalue())


MAX_LINES = 10  # more workers are drawn as a median and a range

_PANELS = (
    ("local_batch_size", "batch size\n[samples]"),
    ("share", "share of the\nepoch [%]"),
    ("time_s", "computing, measured\n[s per epoch]"),
    ("compute_time_s", "computing, on the\ncluster's clock [s]"),
    ("wait_time_s", "waiting, transfers\n[s per epoch]"),
    ("idle", "done before the\nslowest by [%]"),
)
_LEAST_LEFT_OUT = 0.01  # percent of an epoch: less is rounding
_SECONDS = ("time_s", "wait_time_s")  # panels in which one outlier does not set the scale
_SHAPES = {"lost": "X", "joined": "^"}  # by event
_OF_ONE = ("local_batch_size", "time_s")  # what there is to say of one worker


def worker_values(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return a run's epochs and, for each quantity drawn, an array [workers, epochs].

    Epochs count from 1. An epoch that a worker has not finished is NaN. A share is one of all
    samples of an epoch, those that nobody trained on included. "before" is the share that no worker
    has of each epoch, [epochs]: workers of before a restart had it, in joint steps. A worker that
    was lost in an epoch has no idle time in it: it is not known how long it would have taken.
    """
    rounds: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in metrics:
        if row["event"] == "round":
            rounds[row["worker"], row["epoch"]].append(row)
    workers = 1 + max(worker for worker, _ in rounds)
    epochs = sorted({epoch for _, epoch in rounds})
    names = ("local_batch_size", "samples", "compute_time_s", "wait_time_s")
    names += ("time_s", "predicted_time_s")
    values = {name: np.full((workers, len(epochs)), np.nan) for name in names}
    for (worker, epoch), own in rounds.items():
        column = epochs.index(epoch)
        values["local_batch_size"][worker, column] = own[-1]["local_batch_size"]
        for name in names[1:]:
            values[name][worker, column] = sum(row[name] for row in own)
    # The longest epoch has them all, unless samples were left out of each.
    taken = np.zeros(len(epochs))
    for row in metrics:
        if row["event"] == "restart" and row["epoch"] in epochs:
            taken[epochs.index(row["epoch"])] += row["samples"]
    samples = np.max(np.nansum(values["samples"], axis=0) + taken)
    values["before"] = 100 * taken / samples
    with np.errstate(invalid="ignore", divide="ignore"):
        values["share"] = 100 * values["samples"] / samples
        longest = np.nanmax(values["compute_time_s"], axis=0)
        values["idle"] = 100 * (1 - values["compute_time_s"] / longest)
    for kind, worker, epoch in worker_marks(metrics):
        if kind != "joined" and worker < workers and epoch - 1 in epochs:
            values["idle"][worker, epochs.index(epoch - 1)] = np.nan
    return [epoch + 1 for epoch in epochs], values


def worker_marks(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, int, int]]:
    """Return which workers were lost or have joined, and in which epochs, from 1."""
    marks, epoch = [], 0
    for row in metrics:
        if row["event"] == "round":
            epoch = max(epoch, row["epoch"])  # that a worker was lost in: none is told
        elif row["event"] in _SHAPES:
            marks.append((row["event"], row["worker"], 1 + row.get("epoch", epoch)))
    return marks


def worker_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Return batch size, share, times and idle time of each worker over epochs.

    Measured seconds have the planned ones beside them, dotted. One worker has no share, nothing to
    wait for, and nobody to be ahead of. A simulated cluster's clock runs by the plan: what its
    workers computed on it has a panel of its own. Next to the shares stands what nobody trained on,
    and who was lost or has joined.
    """
    from matplotlib.ticker import MaxNLocator

    epochs, values = worker_values(metrics)
    simulated = any("virtual_time_s" in row for row in metrics if row["event"] == "round")
    alone = len(values["share"]) == 1
    shown = [panel for panel in _PANELS if simulated or panel[0] != "compute_time_s"]
    if alone:
        shown = [panel for panel in shown if panel[0] in _OF_ONE]
    figure = _new_figure(9, 2 * len(shown))
    panels = figure.subplots(len(shown), 1, sharex=True)
    for axes, (name, label) in zip(panels, shown, strict=True):
        _draw(axes, epochs, values[name], values["predicted_time_s"] if name == "time_s" else None)
        axes.set_ylabel(label, fontsize=9)
        if name == "share":
            nobody = 100 - values["before"] - np.nansum(values["share"], axis=0)
            _draw_members(axes, epochs, values["share"], nobody, worker_marks(metrics))
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax or 1.0)
        if name in _SECONDS:
            fit_axis(axes, duration)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    if not alone:
        _add_legend(panels[0])
    _add_legend(panels[[name for name, _ in shown].index("time_s")], ("planned",))
    title = "Who was given how much, and how long it took"
    figure.suptitle("Batch size, and how long each epoch took" if alone else title, fontsize=11)
    return figure


def _draw(
    axes: Axes, epochs: Sequence[int], values: np.ndarray, planned: np.ndarray | None = None
) -> None:
    import matplotlib

    style = {"marker": "o" if len(epochs) <= 40 else None, "markersize": 3}
    if len(values) > MAX_LINES:
        axes.plot(epochs, np.nanmedian(values, axis=0), label="median", **style)
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(epochs, low, high, alpha=0.25, label=f"range of {len(values)} workers")
        planned = None if planned is None else np.nanmedian(planned, axis=0)[None]
    else:
        colors = matplotlib.color_sequences["tab10"]
        for worker, own in enumerate(values):
            axes.plot(epochs, own, color=colors[worker], label=f"worker {worker}", **style)
    for own in () if planned is None else planned:
        axes.plot(epochs, own, ":", lw=2, color="black", label="planned")


def _draw_members(
    axes: Axes,
    epochs: Sequence[int],
    share: np.ndarray,
    left_out: np.ndarray,
    marks: Sequence[tuple[str, int, int]],
) -> None:
    """Draw what nobody trained on, in percent, and who was lost or has joined."""
    import matplotlib

    if np.any(left_out > _LEAST_LEFT_OUT):
        axes.bar(epochs, left_out, color="0.8", width=0.8, zorder=0, label="nobody")
    colors = matplotlib.color_sequences["tab10"]
    for kind, shape in _SHAPES.items():
        own = [(w, e) for k, w, e in marks if k == kind and e in epochs and w < len(share)]
        if not own:
            continue
        axes.scatter(
            [epoch for _, epoch in own],
            [np.nan_to_num(share[worker, epochs.index(epoch)]) for worker, epoch in own],
            marker=shape,
            s=45,
            color=[colors[w] if len(share) <= MAX_LINES else "black" for w, _ in own],
            edgecolors="black",
            zorder=3,
            clip_on=False,
            label=kind,
        )
    _add_legend(axes, ("nobody", *_SHAPES))


def _add_legend(axes: Axes, only: Collection[str] = ()) -> Legend | None:
    """Name what is drawn, or `only` some of it, beside a panel; None: there is nothing to name."""
    drawn = zip(*axes.get_legend_handles_labels(), strict=True)
    named = {name: handle for handle, name in drawn if not only or name in only}
    if not named:
        return None
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
    return axes.legend(named.values(), named.keys(), fontsize=9, **place)
