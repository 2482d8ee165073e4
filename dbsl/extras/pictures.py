"""Pictures of a run: its plan, accuracy and loss, and its workers.

All that is drawn comes from rows of metrics.jsonl: `python -m dbsl.report RUN` draws them again.
Figures are made without pyplot, so that drawing keeps no state and may happen in any thread.
matplotlib is imported when the first one is drawn.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dbsl.base.errors import duration, px, short_loss
from dbsl.base.files import save_figure
from dbsl.base.machine import lazy_import
from dbsl.config.hooks import Extra, Row
from dbsl.log.rows import read_metrics, report_from_row, together
from dbsl.plan.stages import Stage
from dbsl.plan.text import MAX_ROWS, comparison, epoch_spans, total_times_s, worker_rows
from dbsl.plan.types import Plan, RoundReport, plan_from_plain
from dbsl.run.evaluation import further_sets
from dbsl.run.folder import settings_in

figures, patches = lazy_import("matplotlib.figure"), lazy_import("matplotlib.patches")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Name, colour, completed epochs and values of a line; a value that is not known is nan.
Curve = tuple[str, str, list[float], Sequence[float]]

SMALL, LARGE, IDLE = "#e69f00", "#56b4e9", "#d9d9d9"  # told apart by colour-blind readers too
TRAIN, EVAL, AVERAGED = "#0072b2", "#d55e00", "#009e73"
MAX_LINES = 10  # more workers are drawn as a median and a range
_WAITS = {"fc": IDLE, "ec": "white", "hatch": "///"}
_FAR = 20  # times what three quarters of a panel stay below: not drawn to scale
_TOP = 0.93  # share of a panel's height where such values are marked
_LEAST_LEFT_OUT = 0.01  # percent of an epoch: less is rounding
_SHAPES = {"lost": "X", "joined": "^"}  # by event
_PANELS = {
    "local_batch_size": "batch size\n[samples]",
    "share": "share of the\nepoch [%]",
    "time_s": "computing, measured\n[s per epoch]",
    "compute_time_s": "computing, on the\ncluster's clock [s]",
    "wait_time_s": "waiting, transfers\n[s per epoch]",
}


class Pictures(Extra):
    """Draws the plan when a run begins, and what came of it at its end."""

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        by_name = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        plans = {
            0 if name == "plan" else int(name.split()[0]): plan_from_plain(plan)  # "32 px"
            for name, plan in by_name.items()
        }
        settings = settings_in(folder)
        epochs = settings["epochs"]
        # A run that goes on with fewer epochs or resolutions has no plan of what was dropped.
        stages = [
            Stage(0, 0, dropout=0.0, **span | {"end_epoch": min(span["end_epoch"], epochs)})
            for span in stage_spans(read_metrics(folder / "metrics.jsonl"))
            if span["resolution"] in plans and span["first_epoch"] < epochs
        ]
        figure = timeline_figure(stages, plans, settings["rounds_per_epoch"])
        save_figure(figure, folder / "plots/plan.png")

    def end(self, folder: Path) -> None:
        rows, settings = read_metrics(folder / "metrics.jsonl"), settings_in(folder)
        falling = settings["lr_schedule"] != "step"
        curves = curves_figure(rows, bce=settings.get("bce_loss", False), falling=falling)
        save_figure(curves, folder / "plots/accuracy.png")
        save_figure(worker_figure(rows), folder / "plots/workers.png")


def timeline_figure(
    stages: Sequence[Stage], plans: Mapping[int, Plan], rounds_per_epoch: int
) -> Figure:
    """Return what the plan predicts for one epoch: a bar per worker and round, and the idle time.

    There is one panel per resolution, in the order in which the run meets them. Where there are
    many workers, neighbours with the same plan share a row.
    """
    shown = []  # plans with their titles
    for resolution in dict.fromkeys(stage.resolution for stage in stages):
        epochs = epoch_spans([stage for stage in stages if stage.resolution == resolution])
        shown.append((plans[resolution], f"{px(resolution, after=' images, ')}{epochs}"))
    heights = [min(len(worker_rows(plan, MAX_ROWS)), MAX_ROWS) + 2.5 for plan, _ in shown]
    figure = figures.Figure(figsize=(14, 1.5 + 0.36 * sum(heights)), layout="constrained")
    figure.suptitle(_timeline_title(stages, plans), fontsize=13)
    panels = figure.subplots(len(shown), 1, squeeze=False, sharex=True, height_ratios=heights)
    for axes, (plan, title) in zip(panels[:, 0], shown, strict=True):
        _draw_epoch(axes, plan, title, rounds_per_epoch)
    panels[-1, 0].set_xlabel("seconds since the epoch began")
    if any(len(plan.workers) > 1 for plan in plans.values()):
        told = {SMALL: "computes on small batches", LARGE: "computes on large batches"}
        if any(plan.global_batch_size for plan in plans.values()):
            told = {LARGE: "computes on its part of each global batch"}
        handles = [patches.Patch(color=color, label=text) for color, text in told.items()]
        handles.append(patches.Patch(**_WAITS, label="waits for the slowest worker"))
        figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def _timeline_title(stages: Sequence[Stage], plans: Mapping[int, Plan]) -> str:
    planned, all_large, equal = map(duration, total_times_s(stages, plans))
    others = f"; with all batches large {all_large}, with one equal batch {equal}"
    if any(plan.global_batch_size for plan in plans.values()):
        others = f"; with each global batch split equally {equal}"
    what = " by the first plan: how long each worker computes, how long it waits"
    if all(len(plan.workers) == 1 for plan in plans.values()):
        what = others = ""
    epochs = sum(len(stage.epochs) for stage in stages)
    return f"Predicted time of one epoch{what}\nall {epochs} epochs: {planned}{others}"


def _draw_epoch(axes: Axes, plan: Plan, title: str, rounds: int) -> None:
    rows, round_s = worker_rows(plan, MAX_ROWS), plan.time_s / rounds
    for y, (_, worker, _) in enumerate(rows[:MAX_ROWS]):
        compute_s, color = worker.predicted_time_s / rounds, SMALL if worker.small else LARGE
        for start in (round_s * index for index in range(rounds)):
            axes.barh(y, compute_s, left=start, height=0.7, fc=color, ec="white")
            axes.barh(y, round_s - compute_s, left=start + compute_s, height=0.7, **_WAITS)
        idle = 100 * (1 - worker.predicted_time_s / plan.time_s)
        idles = f", idle {idle:.1f} %" * (len(plan.workers) > 1)
        text = f"batch {worker.local_batch_size:,}, {worker.samples:,} samples, "
        text += f"{duration(worker.predicted_time_s)}{idles}"
        place = {"transform": axes.get_yaxis_transform(), "va": "center"}
        axes.text(1.01, y, text, fontsize=9, **place)
    names = [f"worker{'s' if '-' in name else ''} {name}" for name, *_ in rows[:MAX_ROWS]]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(labelbottom=True)
    axes.spines[["top", "right"]].set_visible(False)
    rest = f"  (the first {MAX_ROWS} of {len(rows)} rows)" if len(rows) > MAX_ROWS else ""
    axes.set_title(f"{title}: {comparison(plan)}{rest}", loc="left", fontsize=11)


def curves_figure(metrics: Sequence[Row], *, bce: bool = False, falling: bool = False) -> Figure:
    """Return accuracy and loss over epochs and over training time, sub-stages shaded.

    Time is the simulated cluster's clock where all evaluations have it, else, and for one worker,
    measured. It is known when an epoch was evaluated, and interpolated between. With `bce`
    training's loss is binary cross-entropy, evaluation's is cross-entropy. With `falling` the
    learning rate falls inside sub-stages, which are not named by it.
    """
    evaluations = [row for row in metrics if row["event"] == "eval"]
    several = any(row.get("worker") for row in metrics if row["event"] == "round")
    simulated = several and all("virtual_time_s" in row for row in evaluations)
    time_key = "virtual_time_s" if simulated else "train_time_s"
    known = [0.0, *(row["epoch"] + 1.0 for row in evaluations)]  # in completed epochs
    times_s = [0.0, *(row[time_key] for row in evaluations)]
    figure = figures.Figure(figsize=(14, 9), layout="constrained")
    strips = "epochs with one resolution" + " and learning rate" * (not falling)
    figure.suptitle(f"Accuracy and loss of the run (each strip: {strips})", fontsize=14)
    panels = figure.subplots(2, 2, sharex="col", sharey="row")
    curves = _curves(metrics, evaluations, bce=bce)
    for column, label, position in (
        (panels[:, 0], "epochs completed", lambda epoch: np.asarray(epoch, dtype=float)),
        (
            *(panels[:, 1], f"training time{' on simulated workers' * simulated} (s)"),
            lambda epoch: np.interp(epoch, known, times_s, right=math.nan),
        ),
    ):
        for axes, own in zip(column, curves, strict=True):
            for name, color, epochs, values in own:
                if np.isfinite(x := position(epochs)).any():
                    style = {"marker": "o" if len(x) <= 40 else None, "markersize": 4}
                    axes.plot(x, values, color=color, label=name, **style)
            axes.grid(alpha=0.3)
            axes.tick_params(labelbottom=True, labelleft=True)
            if axes.lines:
                axes.legend(loc="best", fontsize=9)
            else:
                axes.text(0.5, 0.5, "no evaluation yet", transform=axes.transAxes, ha="center")
        bottom = column[1]
        fit_axis(bottom)
        ends = [v for line in bottom.lines for v in line.get_xdata() if math.isfinite(v)]
        end = 1.02 * max(ends, default=1.0)
        bottom.set_xlabel(label)
        bottom.set_xlim(0, end)
        if bottom.lines:
            _shade(column, stage_spans(metrics), position, end, falling)
    panels[1, 0].locator_params("x", integer=True, steps=[1, 2, 5, 10])
    if not evaluations:
        panels[0, 0].set_ylim(0, 100)
    panels[0, 0].set_ylabel("accuracy of the evaluation (%)")
    panels[1, 0].set_ylabel("loss")
    return figure


def _curves(
    metrics: Sequence[Row], evaluations: Sequence[Row], *, bce: bool
) -> tuple[list[Curve], list[Curve]]:
    rounds = _reports_by(metrics, "epoch")
    # An epoch is left out if other processes took all of its steps: its loss is not known.
    trained = {e + 1.0: together(own) for e, own in rounds.items() if any(r.samples for r in own)}
    named = {"loss": f"training{', binary cross-entropy' * bce}, mean of the epoch"}
    figures = (name for own in rounds.values() for report in own for name in report.figures)
    named |= {name: f"training, {name}" for name in figures}
    colors = [TRAIN, *map(_color, range(len(named)))]
    losses = [
        (text, color, list(trained), [own.get(name, math.nan) for own in trained.values()])
        for (name, text), color in zip(named.items(), colors, strict=False)
    ]
    sets = {"": ("evaluation", EVAL)}
    if any("ema_accuracy" in row for row in evaluations):
        sets["ema_"] = "evaluation, averaged weights", AVERAGED
    further = dict.fromkeys(name for row in evaluations for name in further_sets(row))
    first = len(named) - 1  # colour that no figure has
    sets |= {f"{name}_": (name, _color(number)) for number, name in enumerate(further, first)}
    accuracies, epochs = [], [row["epoch"] + 1.0 for row in evaluations]
    for start, (name, color) in sets.items():
        found = [[row.get(f"{start}{n}") for row in evaluations] for n in ("accuracy", "loss")]
        accuracy, loss = np.array(found, dtype=float)  # nan for None
        accuracies.append((name, color, epochs, 100 * accuracy))
        losses.append((name + ", cross-entropy" * (bce and not start), color, epochs, loss))
    return accuracies, losses


def _reports_by(metrics: Iterable[Row], *names: str) -> dict[Any, list[RoundReport]]:
    found = defaultdict(list)
    for row in metrics:
        if row["event"] == "round":
            found[itemgetter(*names)(row)].append(report_from_row(row))
    return dict(sorted(found.items()))


def _color(number: int) -> str:
    return f"C{(number + 4) % 10}"  # the first ones are much as those of the losses


def fit_axis(axes: Axes, words: Callable[[float], str] = short_loss) -> None:
    """Scale a panel for most of its values.

    Triangles at the top stand for those that are too far above, and the largest is named there.
    """
    points = [(y, x, line.get_color()) for line in axes.lines for x, y in line.get_xydata()]
    drawn = sorted(y for y, _, _ in points if 0 < y < math.inf)
    quartile = drawn[(len(drawn) - 1) * 3 // 4] if drawn else math.inf  # the third
    most = _FAR * quartile
    far = [point for point in points if point[0] > most]
    if not far:
        return
    within = [y for y in drawn if y <= most]
    room = 0.1 * (within[-1] - within[0]) or within[-1]
    axes.set_ylim(max(0, within[0] - room / 2), within[-1] + room)
    top = axes.get_xaxis_transform()
    for _, x, color in far:
        axes.plot([x], [_TOP], "^", color=color, transform=top, label="_far")
    largest, x, color = max(far)
    leftward = x >= max(x for _, x, _ in points) / 2
    text = f"  {'up to ' * (len(far) > 1)}{words(largest)}  "
    place = {"transform": top, "va": "center", "ha": "right" if leftward else "left"}
    axes.text(x, _TOP, text, color=color, fontsize=9, **place)


def stage_spans(metrics: Sequence[Row]) -> list[dict[str, Any]]:
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


def _shade(
    column: Sequence[Axes],
    stages: Sequence[Mapping[str, Any]],
    position: Callable[[Sequence[float]], np.ndarray],
    end: float,
    falling: bool,
) -> None:
    """Shade every other sub-stage in all panels; name each above the top one."""
    begins, ends = (position([s[name] for s in stages]) for name in ("first_epoch", "end_epoch"))
    ends = np.fmin(ends, end)  # also of a sub-stage that the run has not finished, where it is nan
    spans = [(a, b, s) for a, b, s in zip(begins, ends, stages, strict=True) if a < end]
    narrow = any(b - a < 0.12 * end for a, b, _ in spans)
    for index, (start, stop, stage) in enumerate(spans):
        for axes in column if index % 2 else ():
            axes.axvspan(start, stop, color="black", alpha=0.07, lw=0)
        if stop - start < 0.02 * end:  # no room for a name
            continue
        told = [px(stage["resolution"])] * bool(stage["resolution"])
        told += [f"lr {stage['learning_rate']:.3g}"] * (not falling)
        text = (", " if narrow else "\n").join(told)
        place = {"transform": column[0].get_xaxis_transform(), "ha": "center", "va": "bottom"}
        place["rotation"] = 90 if narrow else 0
        column[0].text((start + stop) / 2, 1.01, text, fontsize=8, **place)


def worker_values(metrics: Sequence[Row]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return a run's epochs and, for each quantity drawn, an array [workers, epochs].

    Epochs count from 1. An epoch that a worker has not finished is NaN. A share is one of all
    samples of an epoch, those that nobody trained on included. "nobody" is the share of those,
    [epochs]; it leaves out what workers of before a restart had, in joint steps.
    """
    rounds = _reports_by(metrics, "worker", "epoch")
    workers, epochs = 1 + max(w for w, _ in rounds), sorted({epoch for _, epoch in rounds})
    names = {*_PANELS, "samples", "predicted_time_s"}
    values = {name: np.full((workers, len(epochs)), np.nan) for name in names}
    for (worker, epoch), reports in rounds.items():
        for name, value in together(reports).items():
            if name in names:
                values[name][worker, epochs.index(epoch)] = value
    taken = np.zeros(len(epochs))
    for row in metrics:
        if row["event"] == "restart" and row["epoch"] in epochs:
            taken[epochs.index(row["epoch"])] += row["samples"]
    # The longest epoch has them all, unless samples were left out of each.
    trained = np.nansum(values["samples"], axis=0) + taken
    values["nobody"] = 100 - 100 * trained / np.max(trained)
    values["share"] = 100 * values["samples"] / np.max(trained)
    return [epoch + 1 for epoch in epochs], values


def worker_marks(metrics: Sequence[Row]) -> list[tuple[str, int, int]]:
    """Return which workers were lost or have joined, and in which epochs, from 1."""
    marks, epoch = [], 0
    for row in metrics:
        if row["event"] == "round":
            epoch = max(epoch, row["epoch"])  # a row of a lost worker may name no epoch
        elif row["event"] in _SHAPES:
            marks.append((row["event"], row["worker"], 1 + row.get("epoch", epoch)))
    return marks


def worker_figure(metrics: Sequence[Row]) -> Figure:
    """Return batch size, share and times of each worker over epochs.

    Measured seconds have the planned ones next to them, dotted. One worker has no share, and
    nothing to wait for. A simulated cluster's clock runs by the plan: what its workers computed on
    it has a panel of its own. Next to the shares stands what nobody trained on, and who was lost or
    has joined.
    """
    epochs, values = worker_values(metrics)
    alone, shown = len(values["share"]) == 1, dict(_PANELS)
    if not any("virtual_time_s" in row for row in metrics if row["event"] == "round"):
        del shown["compute_time_s"]
    if alone:
        shown = {name: _PANELS[name] for name in ("local_batch_size", "time_s")}
    figure = figures.Figure(figsize=(9, 2 * len(shown)), layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True)
    for axes, (name, label) in zip(panels, shown.items(), strict=True):
        _draw(axes, epochs, values[name], values["predicted_time_s"] if name == "time_s" else None)
        axes.set_ylabel(label, fontsize=9)
        if name == "share":
            _draw_members(axes, epochs, values, metrics)
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax or 1.0)
        if name in ("time_s", "wait_time_s"):
            fit_axis(axes, duration)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    panels[-1].locator_params("x", integer=True, steps=[1, 2, 5, 10])
    if not alone:
        _add_legend(panels[0])
    _add_legend(panels[[*shown].index("time_s")], ("planned",))
    title = "Who was given how much, and how long it took"
    figure.suptitle("Batch size, and how long each epoch took" if alone else title, fontsize=11)
    return figure


def _draw(
    axes: Axes, epochs: Sequence[int], values: np.ndarray, planned: np.ndarray | None = None
) -> None:
    style = {"marker": "o" if len(epochs) <= 40 else None, "markersize": 3}
    if len(values) > MAX_LINES:
        axes.plot(epochs, np.nanmedian(values, axis=0), label="median", **style)
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(epochs, low, high, alpha=0.25, label=f"range of {len(values)} workers")
        planned = None if planned is None else np.nanmedian(planned, axis=0)[None]
    else:
        for worker, own in enumerate(values):
            axes.plot(epochs, own, color=f"C{worker}", label=f"worker {worker}", **style)
    for own in () if planned is None else planned:
        axes.plot(epochs, own, ":", lw=2, color="black", label="planned")


def _draw_members(
    axes: Axes, epochs: Sequence[int], values: Mapping[str, np.ndarray], metrics: Sequence[Row]
) -> None:
    """Draw what nobody trained on, in percent, and who was lost or has joined."""
    share, nobody = values["share"], values["nobody"]
    if np.any(nobody > _LEAST_LEFT_OUT):
        axes.bar(epochs, nobody, color="0.8", width=0.8, zorder=0, label="nobody")
    for kind, worker, epoch in worker_marks(metrics):
        if epoch in epochs and worker < len(share):
            color = f"C{worker}" if len(share) <= MAX_LINES else "black"
            place = epoch, np.nan_to_num(share[worker, epochs.index(epoch)])
            look = {"c": color, "edgecolors": "black", "zorder": 3, "clip_on": False}
            axes.scatter(*place, s=45, marker=_SHAPES[kind], label=kind, **look)
    _add_legend(axes, ("nobody", *_SHAPES))


def _add_legend(axes: Axes, only: Collection[str] = ()) -> None:
    """Name what is drawn, or `only` some of it, to the right of a panel."""
    drawn = zip(*axes.get_legend_handles_labels(), strict=True)
    if named := {name: handle for handle, name in drawn if not only or name in only}:
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}
        axes.legend(named.values(), named.keys(), fontsize=9, **place)
