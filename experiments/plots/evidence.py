"""Pictures of docs/results.md: the planner's plans, accuracy by n_S, arms of configs/gap.

    python -m experiments.plots.evidence

reads the CSV files of experiments/results and writes ``mini/{plans,small_workers}.png`` and
``gap/arms.png``.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsl.base.files import save_figure
from dbsl.plan.sampler import EpochSampler
from dbsl.plan.solve import PlanRules, TimeModel, plan_dual_batch
from dbsl.plan.types import Plan
from experiments.compare.report import arms_figure, read_runs
from experiments.compare.statistics import ArmRun, interval
from experiments.plots.rows import RESULTS, Rows, read

COLORS = [c for n, c in enumerate(matplotlib.color_sequences["tab10"]) if n != 7]  # not grey
COLORS.append("black")
RATIOS = ("1.05", "1.10")
CONFERENCE = "COMPSAC 2022 CIFAR-100"
JOURNAL = "arXiv 2509.26092 CIFAR-100"
GAP_ARMS = ("all_large", "all_large_rounds_4", "dual_3", "dual_4", "hybrid")
GAP_ARMS += ("ddp_128", "ddp_128_1gbps")  # those of experiments/configs/gap that are drawn
UNTUNED = ("dual_1", "dual_2")  # they have the rate of dual_3
TUNED_LATER = "dual_1-lr0.2"  # after the fact


def published_plan(small_workers: int, ratio: float) -> Plan:
    """Return the plan of the conference's CIFAR-100 setting."""
    model = TimeModel(0.00056607, 0.014041204118283607)
    return plan_dual_batch(
        50000, 4, small_workers, 500, model, PlanRules(time_ratio=ratio, rounding="truncate")
    )


def plans_figure(published: Rows, profile: Rows) -> Figure:
    """Return plans beside the published ones, what the sampler gives, and times against the fit."""
    figure = Figure(figsize=(12, 8), dpi=110, layout="constrained")
    (batches, shares), (drawn, times) = figure.subplots(2, 2)
    counts = range(1, 5)
    for color, ratio in zip(COLORS, RATIOS, strict=False):
        rows = [r for r in published if r["source"] == CONFERENCE and r["k"] == ratio]
        plans = [published_plan(count, float(ratio)) for count in counts]
        for axes, column, planned in (
            (batches, "small_batch_size", [plan.small_batch_size for plan in plans]),
            (shares, "small_samples", [plan.small_samples for plan in plans]),
        ):
            axes.plot(counts, planned, "-", color=color, label=f"this planner, k = {ratio}")
            axes.plot(
                [int(row["small_workers"]) for row in rows],
                [int(row[column]) for row in rows],
                "o",
                color=color,
                mfc="none",
                ms=9,
                label=f"published, k = {ratio}",
            )
    batches.set_ylabel("small batch B_S (samples)")
    shares.set_ylabel("samples of a small worker d_S")
    for axes in (batches, shares):
        axes.set_xlabel("small workers n_S of 4")
        axes.set_xticks(list(counts))
        axes.legend(fontsize=8)
    _draw_samples(drawn, [published_plan(count, 1.05) for count in counts])
    for color, (side, precision) in zip(
        COLORS, sorted({(r["resolution"], r["precision"]) for r in profile}), strict=False
    ):
        rows = [r for r in profile if (r["resolution"], r["precision"]) == (side, precision)]
        times.plot(
            [float(row["predicted_ms"]) for row in rows],
            [float(row["measured_ms"]) for row in rows],
            "o",
            color=color,
            mfc="none",
            label=f"{side} px, {precision}",
        )
    ends = [min(times.get_xlim()), max(times.get_xlim())]
    times.plot(ends, ends, "-", color="0.6", lw=1)
    times.set_xlabel("predicted step time (ms), ResNet-18, two cores")
    times.set_ylabel("measured (ms), batches the fit had not seen")
    times.legend(fontsize=8)
    return figure


def gap_figure() -> Figure:
    """Return accuracy of the drawn arms of configs/gap, over time and at the end."""
    runs = read_runs(RESULTS / "gap")
    return arms_figure({arm: runs[arm] for arm in GAP_ARMS}, "all_large")


def small_workers_runs() -> dict[str, list[ArmRun]]:
    """Return the runs of configs/gap, and of one small worker at a rate of its own."""
    after = read_runs(RESULTS / "gap/after")
    return {**read_runs(RESULTS / "gap"), TUNED_LATER: after[TUNED_LATER]}


def small_workers_figure(published: Rows, runs: dict[str, list[ArmRun]]) -> Figure:
    """Return accuracy over the number of small workers: published, and of the gap runs."""
    figure = Figure(figsize=(11, 4.8), dpi=110, layout="constrained")
    theirs, ours = figure.subplots(1, 2)
    _draw_published(theirs, published)
    _draw_measured(ours, runs)
    theirs.set_ylim(63.5, 75.5)
    ours.set_ylim(36.5, 48.5)  # as many points
    for axes in (theirs, ours):
        axes.set_xlabel("small workers n_S of 4 (0: all large)")
        axes.set_ylabel("accuracy (%)")
        axes.set_xticks(range(5))
        axes.set_xlim(-0.3, 4.8)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="lower right")
    return figure


def _draw_published(axes: Axes, published: Rows) -> None:
    for color, marker, (source, method, ratio) in zip(
        COLORS,
        "osD^",
        [
            (CONFERENCE, "dual batch", "1.05"),
            (CONFERENCE, "dual batch", "1.10"),
            (JOURNAL, "dual batch", "1.05"),
            (JOURNAL, "hybrid", "1.05"),
        ],
        strict=False,
    ):
        rows = [
            row
            for row in published
            if row["source"] == source
            and (row["small_workers"] == "0" or row["k"] == ratio)
            and row["method"] in (method, "all large")
        ]
        rows.sort(key=lambda row: int(row["small_workers"]))
        axes.plot(
            [int(row["small_workers"]) for row in rows],
            [float(row["accuracy"]) for row in rows],
            f"{marker}-",
            color=color,
            label=f"{method}, k = {ratio}, {source.partition(' CIFAR')[0]}",
        )
    title = "published: ResNet-18, 100 classes, a server, one run each:\n"
    axes.set_title(title + "best epoch (arXiv), best or last not known (COMPSAC)", fontsize=10)


def _draw_measured(axes: Axes, runs: dict[str, list[ArmRun]]) -> None:
    names = ["all_large", TUNED_LATER, *(f"dual_{count}" for count in range(2, 5))]
    places = {**dict(zip(names, range(5), strict=True)), "dual_1": 1, "hybrid": 3, "ddp_128": 4.35}
    found = {name: interval([100 * run.accuracy for run in runs[name]]) for name in places}
    axes.plot(range(5), [found[name].mean for name in names], "-", color=COLORS[4])
    for color, group, label in (
        (COLORS[4], [*names, "dual_1"], "dual batch, k = 1.05; hollow: rate not tuned"),
        (COLORS[5], ["hybrid"], "hybrid, k = 1.05, in 0.81 of the time"),
        ("black", ["ddp_128"], "plain data parallelism, 128 samples, free link"),
    ):
        for name in group:
            axes.errorbar(
                places[name],
                found[name].mean,
                yerr=found[name].half,
                fmt="o" if names[0] in group else "s",
                mfc="none" if name in UNTUNED else color,
                capsize=4,
                color=color,
                label=label if name == group[0] else None,
            )
            text = f"n = {found[name].count}"
            where = (places[name] + 0.09, found[name].mean + 0.15)
            axes.annotate(text, where, fontsize=8, color=color)
    title = "measured here: 0.4 M parameters, 20 classes, a barrier and a mean:\n"
    axes.set_title(title + "last epoch, mean over seeds, 95 % interval", fontsize=10)


def _draw_samples(axes: Axes, plans: Sequence[Plan]) -> None:
    """Draw how many samples of an epoch each worker is given by the sampler, in which steps."""
    for place, plan in enumerate(plans, 1):
        sampler = EpochSampler([worker.samples for worker in plan.workers], rounds=1, seed=0)
        seen, left = np.zeros(plan.samples, dtype=np.int64), 0
        for number, worker in enumerate(plan.workers):
            steps = sampler.steps(number, 0, 0, worker.local_batch_size)
            indices = np.concatenate([part.indices for step in steps for part in step.parts])
            np.add.at(seen, indices, 1)
            color = COLORS[1] if worker.small else COLORS[0]
            axes.barh(place, len(indices), left=left, color=color, edgecolor="white")
            text = f"{len(steps)} x {worker.local_batch_size}"
            axes.text(left + len(indices) / 2, place, text, ha="center", va="center", fontsize=7)
            left += len(indices)
        assert (seen == 1).all()  # each sample once
    axes.set_yticks(range(1, len(plans) + 1))
    axes.invert_yaxis()
    axes.set_ylabel("small workers n_S of 4, k = 1.05")
    axes.set_xlabel("samples of an epoch, each given once; steps x batch, small workers in orange")


def main() -> None:
    """Draw the pictures."""
    published, profile = (read(RESULTS / f"{name}.csv") for name in ("published", "profile"))
    mini = RESULTS / "mini"
    save_figure(plans_figure(published, profile), mini / "plans.png")
    save_figure(small_workers_figure(published, small_workers_runs()), mini / "small_workers.png")
    save_figure(gap_figure(), RESULTS / "gap/arms.png")


if __name__ == "__main__":
    main()
