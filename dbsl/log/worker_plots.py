"""A picture of the workers over a run: what each was given, and how long it computed and waited."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import MaxNLocator
from scipy.sparse.csgraph import connected_components

from dbsl.base.words import duration
from dbsl.log.plots import DPI, fit_axis, save_figure

MAX_LINES = 10  # more workers are drawn as a median and a range

_PANELS = (
    ("local_batch_size", "batch size\n[samples]"),
    ("share", "share of the\nepoch [%]"),
    ("time_s", "computing, measured\n[s per epoch]"),
    ("compute_time_s", "computing, on the\ncluster's clock [s]"),
    ("wait_time_s", "waiting, transfers\n[s per epoch]"),
    ("idle", "done before the\nslowest by [%]"),
)
_SAME = 0.01  # share of a panel's height; nearer lines count as one
_LEAST_LEFT_OUT = 0.01  # percent of an epoch: less is rounding
_DASH = 4.0  # length of a coinciding worker's dashes, in widths of its line
_WIDE = 30  # ratio of planned to measured seconds from which their axis is logarithmic
_FAR = 10  # times what three quarters of a panel stay below: not drawn to scale
_SECONDS = ("time_s", "wait_time_s")  # panels in which one outlier does not set the scale
_SHAPES = {"lost": "X", "joined": "^"}  # by event
_OF_ONE = ("local_batch_size", "time_s")  # what there is to say of one worker


def worker_history(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw `worker_figure` into a PNG."""
    save_figure(worker_figure(metrics), path)


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

    Measured seconds have the planned ones beside them, dotted: in the worker's colour, or in black
    where workers have the same. One worker has no share, nothing to wait for, and nobody to be
    ahead of. A simulated cluster's clock runs by the plan: what its workers computed on it has a
    panel of its own. Beside the shares stands what nobody trained on, and who was lost or has
    joined.

    Args:
        metrics: Records of a metrics.jsonl, with one finished round at least.
    """
    epochs, values = worker_values(metrics)
    simulated = any("virtual_time_s" in row for row in metrics if row["event"] == "round")
    alone = len(values["share"]) == 1
    shown = [panel for panel in _PANELS if simulated or panel[0] != "compute_time_s"]
    if alone:
        shown = [panel for panel in shown if panel[0] in _OF_ONE]
    figure = Figure(figsize=(9, 2 * len(shown)), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(shown), 1, sharex=True)
    for axes, (name, label) in zip(panels, shown, strict=True):
        planned = values["predicted_time_s"] if name == "time_s" else None
        _draw(axes, epochs, values[name], planned)
        axes.set_ylabel(label, fontsize=9)
        if name == "share":
            nobody = 100 - values["before"] - np.nansum(values["share"], axis=0)
            _draw_members(axes, epochs, values["share"], nobody, worker_marks(metrics))
        least = 0.01 * np.nanmedian(values["time_s"])  # shorter waiting counts as none
        wide = math.inf if planned is None else _WIDE
        far = name in _SECONDS and fit_axis(axes, _FAR, wide, least=least, words=duration)
        if axes.get_yscale() == "linear" and far:
            axes.set_ylim(bottom=0)
        elif axes.get_yscale() == "linear":
            top = np.nanmax(values[name] if planned is None else [values[name], planned])
            if name == "share":
                top = max(top, 100 - np.nanmin(np.nansum(values[name], axis=0)))
            axes.set_ylim(0, 1.1 * top or 1.0)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    first, seconds = panels[0], panels[[name for name, _ in shown].index("time_s")]
    for line in () if alone else _add_legend(first).get_lines():
        line.set(linestyle="-", markersize=4)
    _add_legend(seconds, ("planned",))  # the workers are named above
    title = "Who was given how much, and how long it took (dashed: workers that coincide)"
    figure.suptitle("Batch size, and how long each epoch took" if alone else title, fontsize=11)
    return figure


def _draw(
    axes: Axes, epochs: Sequence[int], values: np.ndarray, planned: np.ndarray | None = None
) -> None:
    marker = "o" if len(epochs) <= 40 else None
    if len(values) > MAX_LINES:
        axes.plot(epochs, np.nanmedian(values, axis=0), marker=marker, markersize=3, label="median")
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(epochs, low, high, alpha=0.25, label=f"range of {len(values)} workers")
        if planned is not None:
            axes.plot(epochs, np.nanmedian(planned, axis=0), ":", color="black", label="planned")
        return
    colors = matplotlib.color_sequences["tab10"]
    groups, near = hiding(values)
    for worker, own in enumerate(values):
        group = groups[worker]
        x, y = _broken(epochs, own, near[np.ix_(group, group)])
        place, many = group.index(worker), len(group)
        # Dashes of a group's lines follow one another, and their rings lie in one another.
        style = (_DASH * place, (_DASH, _DASH * (many - 1))) if many > 1 else "-"
        axes.plot(
            x,
            y,
            color=colors[worker],
            linestyle=style,
            dash_capstyle="butt",
            marker=marker,
            markersize=3 + 3 * (many - 1 - place),
            markerfacecolor="none" if many > 1 else None,
            label=f"worker {worker}",
        )
    if planned is None:
        return
    groups = coinciding(planned)
    for worker, own in enumerate(planned):
        if worker != groups[worker][0]:
            continue  # it is drawn
        color = colors[worker] if len(groups[worker]) == 1 < len(planned) else "black"
        axes.plot(epochs, own, ":", lw=2, marker="x", markersize=5, color=color, label="_")
    axes.plot([], [], ":", lw=2, marker="x", markersize=5, color="black", label="planned")


def _draw_members(
    axes: Axes,
    epochs: Sequence[int],
    share: np.ndarray,
    left_out: np.ndarray,
    marks: Sequence[tuple[str, int, int]],
) -> None:
    """Draw what nobody trained on, in percent, and who was lost or has joined."""
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


def _broken(
    epochs: Sequence[int], values: np.ndarray, near: np.ndarray
) -> tuple[list[int], list[float]]:
    """Return a line, broken where it parts from others of its group or meets them.

    Dashes begin anew behind a break: those of lines that meet follow one another again.
    """
    x, y = [], []
    for place, (epoch, value) in enumerate(zip(epochs, values, strict=True)):
        x.append(epoch)
        y.append(value)
        inside = 0 < place < near.shape[2]
        if inside and not np.array_equal(near[:, :, place - 1], near[:, :, place]):
            x += [epoch, epoch]
            y += [math.nan, value]
    return x, y


def hiding(values: np.ndarray) -> tuple[list[list[int]], np.ndarray]:
    """Return for each worker of values [workers, epochs] all whose lines would hide each other.

    Such lines coincide in half of what there is of one, at least. Beside it: which lines coincide
    where, [workers, workers, epochs - 1] from one epoch to the next.
    """
    height = max(np.nanmax(values, initial=0.0), 1e-9)
    near = np.abs(values[:, None] - values[None]) <= _SAME * height  # NaN is near nothing
    if values.shape[1] > 1:
        near = near[:, :, :-1] & near[:, :, 1:]
    drawn = np.einsum("wwe->w", near.astype(int))
    least = np.maximum(0.5 * np.minimum(drawn[:, None], drawn[None]), 1)
    same = near.sum(axis=2) >= least
    return _groups(connected_components(same, directed=False)[1]), near


def coinciding(values: np.ndarray) -> list[list[int]]:
    """Return for each worker of values [workers, epochs] all whose lines lie on its own."""
    height = max(np.nanmax(values, initial=0.0), 1e-9)
    same = np.all(
        (np.abs(values[:, None] - values[None]) <= _SAME * height) | np.isnan(values[:, None]),
        axis=2,
    )  # [workers, workers]
    # Only a group's first line is drawn, so that all must lie on it: a chain of lines may part.
    firsts: list[int] = []
    for worker in range(len(values)):
        firsts.append(next((first for first in firsts if same[worker, first]), worker))
    return _groups(np.array(firsts))


def _groups(labels: np.ndarray) -> list[list[int]]:
    """Return for each worker all that have its label."""
    return [np.flatnonzero(labels == own).tolist() for own in labels]
