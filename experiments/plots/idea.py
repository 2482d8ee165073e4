"""The picture of the idea: every worker has its own batch size, in rounds and in joint steps.

    python -m experiments.plots.idea

solves two plans and writes docs/idea.png. The rounds are those of README's first command, whose
step times are in experiments/configs/digits/first_command.yaml. The joint steps are those of
configs/mixed_gpus.yaml, with the step times in its head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from dbsl.base.files import save_figure
from dbsl.library.planning import BatchSplit, split_batch
from dbsl.plan.solve import TimeModel, plan_dual_batch
from dbsl.plan.types import Plan
from experiments.plots.rows import ROOT

SMALL, LARGE = "#e69f00", "#56b4e9"  # told apart by colour-blind readers too
WORKERS, ROUNDS, JOINT_STEPS = 4, 2, 8
SAMPLES, LARGE_BATCH = 1437, 32  # the digits, and what the run takes for them
MIXED = [TimeModel(slope, 0.01) for slope in (0.0002, 0.0002, 0.0006, 0.0006)]


def first_plan() -> Plan:
    """Return the plan that README's first command has at 16 px."""
    times = yaml.safe_load((ROOT / "experiments/configs/digits/first_command.yaml").read_text())
    model = TimeModel(times["slope"][1], times["intercept"][1])
    return plan_dual_batch(
        samples=SAMPLES,
        workers=WORKERS,
        small_workers=1,
        large_batch_size=LARGE_BATCH,
        time_model=model,
    )


def mixed_split() -> BatchSplit:
    """Return how configs/mixed_gpus.yaml splits its global batch."""
    config = yaml.safe_load((ROOT / "configs/mixed_gpus.yaml").read_text())
    return split_batch(config["global_batch_size"], MIXED)


def idea_figure(plan: Plan, split: BatchSplit) -> Figure:
    """Return two rounds of the plan, and some joint steps of the split, on axes of time."""
    figure = Figure(figsize=(11, 4.9), dpi=110, layout="constrained", facecolor="white")
    rounds, joint = figure.subplots(2, 1)
    _draw_rounds(rounds, plan)
    _draw_joint(joint, split)
    names = {SMALL: "a step on a small batch", LARGE: "a step on a large batch"}
    handles = [Patch(color=color, label=name) for color, name in names.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=2, frameon=False)
    return figure


def _draw_rounds(axes: Axes, plan: Plan) -> None:
    for worker, each in enumerate(plan.workers):
        color = SMALL if each.small else LARGE
        step_s = each.predicted_time_s / each.steps
        for start in np.arange(ROUNDS) * plan.time_s:
            _draw_steps(axes, worker, start + step_s * np.arange(each.steps), step_s, color)
    texts = [
        f"{each.steps} steps of {each.local_batch_size} samples,\nweight {each.merge_weight:.2f}"
        for each in plan.workers
    ]
    _finish(axes, texts)
    for end in plan.time_s * np.arange(1, ROUNDS + 1):
        axes.axvline(end, color="black", lw=2)
        axes.text(end, -0.62, "merge", ha="center", va="bottom", fontsize=10)
    axes.set_xlim(0, 1.02 * ROUNDS * plan.time_s)
    axes.set_title(
        "Rounds, --sync bsp: each worker trains by itself, then all weights are averaged",
        loc="left",
        fontsize=11,
        pad=18,
    )


def _draw_joint(axes: Axes, split: BatchSplit) -> None:
    step_s = max(split.times_s)
    starts = step_s * np.arange(JOINT_STEPS)
    for worker, (batch, time_s) in enumerate(
        zip(split.local_batch_sizes, split.times_s, strict=True)
    ):
        color = LARGE if batch == max(split.local_batch_sizes) else SMALL
        _draw_steps(axes, worker, starts, time_s, color)
        for start in starts:
            axes.text(start + time_s / 2, worker, str(batch), ha="center", va="center", fontsize=9)
    for end in starts + step_s:
        axes.axvline(end, color="black", lw=1)
    fast = min(model.slope for model in MIXED)
    _finish(axes, ["fast GPU" if m.slope == fast else "slow GPU" for m in MIXED])
    axes.set_xlim(0, 1.02 * JOINT_STEPS * step_s)
    axes.set_xlabel(
        f"planned seconds: {step_s:.3f} a step; with equal batches {split.equal_time_s:.3f}"
    )
    total = sum(split.local_batch_sizes)
    axes.set_title(
        f"Joint steps, --sync step: gradients of {total} samples are averaged at every line",
        loc="left",
        fontsize=11,
    )


def _draw_steps(
    axes: Axes, worker: int, starts: Sequence[float] | np.ndarray, width: float, color: str
) -> None:
    spans = [(start, width) for start in starts]
    axes.broken_barh(spans, (worker - 0.38, 0.76), facecolor=color, edgecolor="white", lw=1)


def _finish(axes: Axes, texts: Sequence[str]) -> None:
    names = [f"worker {worker}: {text}" for worker, text in enumerate(texts)]
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def main() -> None:
    """Draw the picture."""
    save_figure(idea_figure(first_plan(), mixed_split()), ROOT / "docs/idea.png")


if __name__ == "__main__":
    main()
