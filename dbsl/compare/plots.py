"""A picture of arms: accuracy over training time, and at the last epoch with its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from dbsl.compare.statistics import Run, interval
from dbsl.log.plots import DPI, save_figure


def draw_arms(arms: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Draw `arms_figure` into a PNG."""
    save_figure(arms_figure(arms), path)


def arms_figure(arms: Mapping[str, Sequence[Run]]) -> Figure:
    """Return mean accuracy over mean training time, and last-epoch accuracy with 95 % intervals.

    Args:
        arms: Finished runs by arm; arms without any are left out.
    """
    finished = {name: runs for name, runs in arms.items() if runs}
    figure = Figure(figsize=(13, max(5.5, 0.32 * len(finished))), dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2)
    palette = matplotlib.color_sequences["tab20"]
    goes_on = False
    for place, (name, runs) in enumerate(finished.items()):
        color = palette[place % len(palette)]
        epochs = min(len(run.curve) for run in runs)
        curves = np.array([run.curve[:epochs] for run in runs])  # [seeds, epochs, 2]
        times, accuracies = curves[..., 0].mean(0), 100 * curves[..., 1].mean(0)
        label = f"{name} (n = {len(runs)})"
        left.plot(times, accuracies, "o-", ms=3, color=color, label=label)
        found = interval([100 * run.accuracy for run in runs])
        half = 0.0 if np.isnan(found.half) else found.half
        low, high = max(found.mean - half, 0.0), min(found.mean + half, 100.0)
        ends = [[found.mean - low], [high - found.mean]]
        right.errorbar(found.mean, place, xerr=ends, fmt="o", capsize=4, color=color)
        # No accuracy lies beyond 0 or 100 %; the interval of few seeds may.
        for end, beyond, mark in (
            (low, found.mean - half < 0, "<"),
            (high, found.mean + half > 100, ">"),
        ):
            if beyond:
                right.plot(end, place, mark, ms=9, color=color, clip_on=False)
                goes_on = True
        right.plot([100 * run.accuracy for run in runs], [place] * len(runs), "|", color="0.4")
    left.set_xlabel("training time (s), mean over seeds")
    left.set_ylabel("accuracy (%), mean over seeds")
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))  # hides no point
    right.set_yticks(range(len(finished)), list(finished))
    right.invert_yaxis()
    label = "accuracy at the last epoch (%): mean, 95 % t-interval, single seeds"
    right.set_xlabel(label + "\ntriangle: the interval goes on beyond what is possible" * goes_on)
    low, high = right.get_xlim()
    right.set_xlim(max(low, 0.0), min(high, 100.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure
