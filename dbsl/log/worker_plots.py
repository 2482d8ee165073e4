"""A picture of the workers over a run: what each was given, and how long it computed and waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dbsl.log.plots import DPI, save_figure

MAX_LINES = 10  # more workers are drawn as a median and a range

_PANELS = (
    ("local_batch_size", "batch size\n[samples]"),
    ("share", "share of the\nepoch [%]"),
    ("compute_time_s", "computing\n[s per epoch]"),
    ("wait_time_s", "waiting, transfers\n[s per epoch]"),
    ("idle", "done before the\nslowest by [%]"),
)


def worker_history(metrics: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw `worker_figure` into a PNG."""
    save_figure(worker_figure(metrics), path)


def worker_values(metrics: Sequence[Mapping[str, Any]]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return a run's epochs and, for each quantity drawn, an array [workers, epochs].

    Epochs count from 1. An epoch that a worker has not finished is NaN.
    """
    rounds: dict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in metrics:
        if row["event"] == "round":
            rounds[row["worker"], row["epoch"]].append(row)
    workers = 1 + max(worker for worker, _ in rounds)
    epochs = sorted({epoch for _, epoch in rounds})
    names = ("local_batch_size", "samples", "compute_time_s", "wait_time_s")
    values = {name: np.full((workers, len(epochs)), np.nan) for name in names}
    for (worker, epoch), own in rounds.items():
        column = epochs.index(epoch)
        values["local_batch_size"][worker, column] = own[-1]["local_batch_size"]
        for name in names[1:]:
            values[name][worker, column] = sum(row.get(name, 0.0) for row in own)
    with np.errstate(invalid="ignore", divide="ignore"):
        values["share"] = 100 * values["samples"] / np.nansum(values["samples"], axis=0)
        longest = np.nanmax(values["compute_time_s"], axis=0)
        values["idle"] = 100 * (1 - values["compute_time_s"] / longest)
    return [epoch + 1 for epoch in epochs], values


def worker_figure(metrics: Sequence[Mapping[str, Any]]) -> Figure:
    """Return batch size, share, compute, wait and idle time of each worker over epochs.

    Args:
        metrics: Records of a metrics.jsonl, with one finished round at least.
    """
    epochs, values = worker_values(metrics)
    figure = Figure(figsize=(9, 10), dpi=DPI, layout="constrained")
    panels = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (name, label) in zip(panels, _PANELS, strict=True):
        _draw(axes, epochs, values[name])
        axes.set_ylabel(label, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("epoch")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[0].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    figure.suptitle("Who was given how much, and how long it took", fontsize=11)
    return figure


def _draw(axes: Axes, epochs: Sequence[int], values: np.ndarray) -> None:
    marker = "o" if len(epochs) <= 40 else None
    if len(values) > MAX_LINES:
        axes.plot(epochs, np.nanmedian(values, axis=0), marker=marker, markersize=3, label="median")
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.fill_between(epochs, low, high, alpha=0.25, label=f"range of {len(values)} workers")
        return
    colors = matplotlib.color_sequences["tab10"]
    for worker, own in enumerate(values):
        label = f"worker {worker}"
        axes.plot(epochs, own, color=colors[worker], marker=marker, markersize=3, label=label)
