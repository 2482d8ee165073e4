"""The table of settings that change from one learning-rate stage to the next."""

from __future__ import annotations

from statistics import fmean

from experiments.benchmarks.recipe import best_rate
from experiments.plots.rows import RESULTS, Rows, read, with_interval

FIRST = "all large, 4 merges"
RECIPE = {  # arms of experiments.benchmarks.recipe
    FIRST: "all large, four merges an epoch",
    "all large, 8 merges": "eight merges",
    "merges 8, 4, 1": "eight, four and one merge, by stage (QSR)",
    "dual batch, 4 merges": "three small workers, four merges",
    "small workers 0, 3, 4": "no, three and four small workers, by stage",
    "both": "merges and small workers by stage",
    "slow momentum": "`--merge delta --outer-lr 0.7 --outer-momentum 0.5`",
    "average of the last epochs": "`--ema-decay 0.5`, the averaged weights (SWAP)",
    "ddp": "data parallelism, 128 samples a step",
    "ddp, then dual batch": "the same in the first stage, then three small workers",
}
WORKLOADS = {"cifar100": "CIFAR-100, 20 classes", "imagenette": "Imagenette"}


def recipe(up: str) -> list[str]:
    """Return each arm at its best rate: held-out images right, gain over the first, time."""
    rows = read(RESULTS / "recipe.csv")
    heads = [
        f"{name}: rate; accuracy, % | over the first row, 95 % | workers' time"
        for name in WORKLOADS.values()
    ]
    lines = [
        f"| ([CSV]({up}results/recipe.csv)) | {' | '.join(heads)} |",
        "|---|" + "---|" * 3 * len(heads),
    ]
    for arm, text in RECIPE.items():
        cells = [text]
        for workload in WORKLOADS:
            first = {row["turn"]: row for row in _tuned(rows, workload, FIRST)}
            own = _tuned(rows, workload, arm)
            accuracies = [100 * float(row["accuracy"]) for row in own]
            gains = [
                100 * (float(row["accuracy"]) - float(first[row["turn"]]["accuracy"]))
                for row in own
                if arm != FIRST
            ]
            time_s = fmean(float(row["virtual_s"]) for row in own)
            cells += [f"{own[0]['lr']}; {with_interval(accuracies, 1)}"]
            cells += [with_interval(gains, 1, "+"), f"{time_s:.1f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _tuned(rows: Rows, workload: str, arm: str) -> Rows:
    """Return the runs of an arm at the rate that was best for it."""
    rate = best_rate(rows, workload, arm)
    return [
        row
        for row in rows
        if (row["workload"], row["arm"], float(row["lr"])) == (workload, arm, rate)
    ]
