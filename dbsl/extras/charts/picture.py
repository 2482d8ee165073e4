"""The picture of a run: accuracy, and each worker's batch size, time and plan.

Figures are made without pyplot, so drawing keeps no state. matplotlib is imported when the first
one is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dbsl.base.errors import duration, px
from dbsl.base.machine import lazy_import
from dbsl.config.hooks import Row
from dbsl.log.rows import report_from_row, together

figures = lazy_import("matplotlib.figure")

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMALL, LARGE = "#e69f00", "#56b4e9"  # distinct for colour-blind readers too
MOST = 10  # more workers are drawn as a median and a range, or left out of the plan


def run_figure(rows: Sequence[Row]) -> Figure:
    """Return the picture of a run from its rows of metrics.jsonl, four panels.

    If a resume repeated an epoch, its last rows are used.
    """
    figure = figures.Figure(figsize=(12, 7), layout="constrained")
    accuracy, plan, batches, times = figure.subplots(2, 2).flat
    _draw_accuracy(accuracy, rows)
    _draw_plan(plan, [row for row in rows if row["event"] == "plan"])
    epochs, values = worker_values(rows)
    _draw_workers(batches, epochs, values["local_batch_size"], "samples a step of each worker")
    _draw_workers(times, epochs, values["time_s"], "seconds that each worker computes in an epoch")
    planned = values["predicted_time_s"]
    for own in planned if len(planned) <= MOST else [np.nanmedian(planned, axis=0)]:
        times.plot(epochs, own, ":", color="black", label="planned")
    for axes in (accuracy, batches, times):
        axes.set_xlabel("epoch")
        axes.set_ylim(0)
        axes.grid(alpha=0.3)
        axes.locator_params("x", integer=True, steps=[1, 2, 5, 10])
        handles, names = axes.get_legend_handles_labels()
        once = dict(zip(names, handles, strict=True))
        if once:
            axes.legend(once.values(), once.keys(), fontsize=8)
    return figure


def worker_values(rows: Sequence[Row]) -> tuple[list[int], dict[str, np.ndarray]]:
    """Return a run's epochs, from 1, and its values by quantity, [workers, epochs].

    A value is nan if the worker finished no round in that epoch.
    """
    rounds: defaultdict[tuple[int, int], list[Any]] = defaultdict(list)
    for row in rows:
        if row["event"] == "round":
            rounds[row["worker"], row["epoch"]].append(report_from_row(row))
    epochs = sorted({epoch for _, epoch in rounds})
    shape = 1 + max((worker for worker, _ in rounds), default=0), len(epochs)
    names = ("local_batch_size", "time_s", "predicted_time_s")
    values = {name: np.full(shape, np.nan) for name in names}
    for (worker, epoch), reports in rounds.items():
        found = together(reports)
        for name in names:
            values[name][worker, epochs.index(epoch)] = found[name]
    return [epoch + 1 for epoch in epochs], values


def _draw_accuracy(axes: Axes, rows: Sequence[Row]) -> None:
    evaluations = [row for row in rows if row["event"] == "eval"]
    epochs = [row["epoch"] + 1 for row in evaluations]
    known = dict.fromkeys(name for row in evaluations for name in row if "accuracy" in name)
    for name in known:
        if not name.startswith(("top5", "train")):
            values = np.array([row.get(name) for row in evaluations], dtype=float)
            axes.plot(epochs, 100 * values, marker="o", ms=3, label=name.replace("_", " "))
    spans: dict[int, int] = {}  # resolution by epoch; a later plan replaces earlier ones
    for row in rows:
        if row["event"] == "plan":
            first = max(row["first_epoch"], row.get("from_epoch", 0))
            spans |= dict.fromkeys(range(first, row["end_epoch"]), row["resolution"])
    sides = sorted(set(spans.values()))
    for epoch, side in spans.items():
        shade = 0.12 * sides.index(side) / max(1, len(sides) - 1)
        axes.axvspan(epoch, epoch + 1, color="black", alpha=shade, lw=0)
    darker = f", darker: {px(sides[-1])}" if len(sides) > 1 else ""
    axes.set_title(f"accuracy of the evaluation, %{darker}", loc="left", fontsize=10)


def _draw_plan(axes: Axes, plans: Sequence[Row]) -> None:
    """Draw the last plan's prediction of an epoch: a bar for each worker, to scale."""
    plan = plans[-1]
    workers: Sequence[Mapping[str, Any]] = plan["workers"][:MOST]
    longest = max(worker["predicted_time_s"] for worker in workers)
    for y, worker in enumerate(workers):
        color = SMALL if worker["small"] else LARGE
        axes.barh(y, worker["predicted_time_s"], height=0.7, color=color)
        text = f"{worker['samples']:,} samples in batches of {worker['local_batch_size']:,}"
        axes.text(0.01 * longest, y, text, va="center", fontsize=8)
    names = [f"worker {worker['worker']}" for worker in workers]
    axes.set_yticks(range(len(workers)), names, fontsize=8)
    axes.set_ylim(len(workers) - 0.4, -0.6)
    axes.set_xlabel("seconds of an epoch")
    rest = len(plan["workers"]) - len(workers)
    where = px(plan["resolution"], before=" at ")
    more = f" (and {rest} workers more)" if rest else ""
    more += " (orange: small batches)" * any(worker["small"] for worker in plan["workers"])
    title = f"the last plan{where}: an epoch in {duration(plan['epoch_time_s'])}{more}"
    axes.set_title(title, loc="left", fontsize=10)


def _draw_workers(axes: Axes, epochs: Sequence[int], values: np.ndarray, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    if len(values) > MOST:
        low, high = np.nanmin(values, axis=0), np.nanmax(values, axis=0)
        axes.plot(epochs, np.nanmedian(values, axis=0), label="median")
        axes.fill_between(epochs, low, high, alpha=0.25, label=f"range of {len(values)} workers")
        return
    for worker, own in enumerate(values):  # narrow above wide: equal lines all remain visible
        width = 1.5 + 6 * (len(values) - 1 - worker) / len(values)
        axes.plot(epochs, own, marker="o", lw=width, ms=width + 1.5, label=f"worker {worker}")
