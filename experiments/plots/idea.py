"""The picture of the idea: DDP steps of two fast and two slow GPUs, batches equal and balanced.

    python -m experiments.plots.idea

splits the global batch of configs/mixed_gpus.yaml, with the step times in its head, and writes
docs/idea.png.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dbsl.base.files import save_figure
from dbsl.plan.deals import BatchSplit, split_batch
from dbsl.plan.solve import TimeModel
from experiments.plots.rows import ROOT

FAST, SLOW, IDLE = "#56b4e9", "#e69f00", "#dddddd"  # told apart by colour-blind readers too
MIXED = [TimeModel(slope, 0.01) for slope in (0.0002, 0.0002, 0.0006, 0.0006)]
STEPS = 5, 8  # with equal and with balanced batches, in nearly the same time


def mixed_split() -> BatchSplit:
    """Return how configs/mixed_gpus.yaml splits its global batch."""
    config = yaml.safe_load((ROOT / "configs/mixed_gpus.yaml").read_text())
    return split_batch(config["global_batch_size"], MIXED)


def idea_figure(split: BatchSplit) -> Figure:
    """Return steps with equal batches above those of the split, on one axis of time."""
    figure = Figure(figsize=(11, 4.2), dpi=110, layout="constrained", facecolor="white")
    equal, balanced = figure.subplots(2, 1, sharex=True)
    size = sum(split.local_batch_sizes) // len(MIXED)
    _draw(equal, [size] * len(MIXED), STEPS[0])
    _draw(balanced, split.local_batch_sizes, STEPS[1])
    less = 100 - 100 * max(split.times_s) / split.equal_time_s
    equal.set_title("DDP with equal batches: the fast GPUs wait", loc="left", fontsize=12)
    title = f"dbsl: all finish together, {less:.0f} % less time a step"
    balanced.set_title(title, loc="left", fontsize=12, fontweight="bold")
    samples = size * len(MIXED)
    label = f"planned seconds; gradients of {samples} samples are averaged at every line"
    balanced.set_xlabel(label)
    balanced.set_xlim(0, 1.005 * STEPS[0] * split.equal_time_s)
    names = {FAST: "fast GPU", SLOW: "slow GPU", IDLE: "idle"}
    handles = [Patch(color=color, label=name) for color, name in names.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    return figure


def _draw(axes: Axes, sizes: Sequence[int], steps: int) -> None:
    times = [model.intercept + model.slope * b for model, b in zip(MIXED, sizes, strict=True)]
    starts = max(times) * np.arange(steps)
    for worker, (size, time_s) in enumerate(zip(sizes, times, strict=True)):
        color = FAST if MIXED[worker].slope == min(model.slope for model in MIXED) else SLOW
        for left, width, shade in ((0, time_s, color), (time_s, max(times) - time_s, IDLE)):
            spans = [(start + left, width) for start in starts]
            axes.broken_barh(spans, (worker - 0.38, 0.76), facecolor=shade, edgecolor="white")
        for start in starts:
            axes.text(start + time_s / 2, worker, str(size), ha="center", va="center", fontsize=9)
    for end in starts + max(times):
        axes.axvline(end, color="black", lw=1)
    axes.set_yticks(range(len(MIXED)), [f"GPU {worker}" for worker in range(len(MIXED))])
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def main() -> None:
    """Draw the picture."""
    save_figure(idea_figure(mixed_split()), ROOT / "docs/idea.png")


if __name__ == "__main__":
    main()
