"""Pictures of a study: steps, examples and best learning rate against batch size, log-log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from dbsl.log.plots import DPI, save_figure
from dbsl.study.scaling import (
    PERFECT_RULE,
    USEFUL_RULE,
    Result,
    effective_rate,
    find_knees,
    heuristic_rates,
)

_REGIONS = (
    ("perfect scaling", "#009e73"),
    ("diminishing returns", "#e69f00"),
    ("no gain", "#999999"),
)

Results = Mapping[str, Sequence[Result]]


def draw_study(results: Results, goals: Mapping[str, float], folder: Path) -> None:
    """Write ``steps.png``, ``examples.png`` and ``learning_rate.png`` into a folder.

    Args:
        results: By workload, batch sizes ascending; none is empty.
        goals: By workload.
        folder: Where to; it is made.
    """
    save_figure(steps_figure(results, goals), folder / "steps.png")
    save_figure(examples_figure(results, goals), folder / "examples.png")
    save_figure(rates_figure(results), folder / "learning_rate.png")


def steps_figure(results: Results, goals: Mapping[str, float]) -> Figure:
    """Return steps to result against batch size, a panel per workload, the three regions shaded."""
    figure, panels = _panels(len(results))
    for axes, (name, own) in zip(panels, results.items(), strict=True):
        sizes, steps = _columns(own)
        knees = find_knees(dict(zip(sizes.tolist(), steps.tolist(), strict=True)))
        first, last = sizes[0], sizes[-1]  # nothing is known beyond these
        # If no larger batch was tried, the end of the gain has not been seen.
        useful = knees.useful if knees.is_seen else last
        ends = (first, min(knees.perfect, useful), useful, last)
        for (label, color), start, end in zip(_REGIONS, ends, ends[1:], strict=False):
            if end > start:
                axes.axvspan(start, end, color=color, alpha=0.15, lw=0, label=label)
        perfect = steps[0] * sizes[0] / sizes
        axes.plot(sizes, perfect, "k--", lw=1, label="steps halve as the batch doubles")
        axes.plot(sizes, steps, "o-", color="#0072b2", label="measured")
        for size, count in zip(sizes, steps, strict=True):
            axes.annotate(
                f"{count:g}", (size, count), (0, 6), textcoords="offset points", fontsize=8
            )
        _finish(axes, sizes, f"{name}, error < {goals[name]:g}", "steps to the goal")
        axes.set_xlim(first / 1.3, last * 1.3)
        axes.legend(fontsize=8, loc="lower left")
    figure.suptitle(
        "Fewest steps to the goal, everything else tuned at each batch size\n"
        f"perfect scaling up to {PERFECT_RULE}\nno gain from {USEFUL_RULE}",
        fontsize=10,
    )
    return figure


def examples_figure(results: Results, goals: Mapping[str, float]) -> Figure:
    """Return samples to result against batch size, all workloads in one panel."""
    figure, (axes,) = _panels(1)
    for (name, own), color in zip(results.items(), _colors(len(results)), strict=True):
        sizes, steps = _columns(own)
        label = f"{name}, error < {goals[name]:g}"
        axes.plot(sizes, sizes * steps, "o-", color=color, label=label)
    sizes = np.array(sorted({r.batch_size for own in results.values() for r in own}))
    _finish(axes, sizes, "", "samples to the goal")
    title = "Samples that the fewest steps cost: level where scaling is perfect"
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    return figure


def rates_figure(results: Results) -> Figure:
    """Return the best trial's learning rate, alone and over 1 - momentum, with both rules."""
    figure, panels = _panels(2)
    kinds = (
        ("learning rate", lambda parameters: parameters["learning_rate"]),
        ("learning rate / (1 - momentum)", effective_rate),
    )
    for axes, (label, rate) in zip(panels, kinds, strict=True):
        for (name, own), color in zip(results.items(), _colors(len(results)), strict=True):
            sizes, _ = _columns(own)
            rates = [rate(result.trial.parameters) for result in own]
            linear, root = heuristic_rates(own, rates)
            axes.plot(sizes, rates, "o-", color=color, label=name)
            axes.plot(sizes, linear, "--", color=color, lw=0.8)
            axes.plot(sizes, root, ":", color=color, lw=1.2)
        sizes = np.array(sorted({r.batch_size for own in results.values() for r in own}))
        _finish(axes, sizes, label, label)
        axes.plot([], [], "k--", lw=0.8, label="in proportion to the batch")
        axes.plot([], [], "k:", lw=1.2, label="to its square root")
        axes.legend(fontsize=8)
    figure.suptitle("Learning rate of the trial with the fewest steps", fontsize=10)
    return figure


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    size = (max(7.5, 5.2 * columns), 4.6 * rows)
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _columns(own: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    steps = [max(r.steps, 1) for r in own]  # 0 steps (met by the initial weights) have no log
    return np.array([r.batch_size for r in own]), np.array(steps)


def _colors(count: int) -> Sequence[str]:
    palette = matplotlib.color_sequences["tab10"]
    return [palette[index % len(palette)] for index in range(count)]


def _finish(axes: Axes, sizes: np.ndarray, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    # Show numbers between the decades only on an axis of about one decade.
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(plain if high < 30 * low else NullFormatter())
    axes.margins(y=0.1)
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
