"""Processes of unlike speed: tables and the picture of what balanced parts gain.

    python -m experiments.plots.quotas

reads quota.csv and splits.csv in experiments/results/uneven, registered in
experiments/configs/uneven/README.md, and writes quotas.png there.
"""

from __future__ import annotations

from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from dbsl.tools.compare.statistics import holm, interval
from experiments.benchmarks.demos.uneven import ARMS, EPOCHS, MACHINES, SWEPT
from experiments.plots.evidence import COLORS
from experiments.plots.links import Against
from experiments.plots.rows import RESULTS, Rows, equivalence_p, read, shown_p, with_interval

FOLDER = RESULTS / "uneven"
PLAIN, BALANCED, MARGIN = ARMS[0], ("dynamic", "dbs"), 1.0
UNEVEN = [name for name in MACHINES if name != "1:1"]
LOOK = {arm: color for arm, color in zip(ARMS, COLORS, strict=False)}
DUAL = {  # arms of experiments/configs/uneven
    "three_small": "dual batch, 4 steps of 57, 2 of 261",
    "all_small": "4 steps of 60, 8 of 60",
    "all_large": "1 step of 240, 2 of 240",
}
TESTED, CONTROL = "three_small", "all_small"
README_ROWS = {
    "2:1": "speeds 2:1: `--sync step --balance dynamic`, plain DDP",
    "4:1": "speeds 4:1: the same",
}


def main() -> None:
    """Draw the picture from its CSV files."""
    figure = quotas_figure(read(FOLDER / "quota.csv"), read(FOLDER / "splits.csv"))
    figure.savefig(FOLDER / "quotas.png")


def quota_arms(up: str) -> list[str]:
    """Return seconds and accuracy of every arm on every machine."""
    rows = read(FOLDER / "quota.csv")
    lines = [
        f"| speeds ([CSV]({up}results/uneven/quota.csv)): s of training over plain DDP's; "
        f"accuracy, % | {' | '.join(f'`{arm}`' for arm in ARMS)} | limit by the speeds |",
        "|---|" + "---|" * len(ARMS) + "---|",
    ]
    for name, machine in MACHINES.items():
        cells = []
        for arm in ARMS:
            own = [100 * float(row["accuracy"]) for row in _own(rows, arm, name)]
            time = "1" if arm == PLAIN else with_interval(_ratios(rows, arm, name), 2)
            cells.append(f"{time}; {with_interval(own, 1)}")
        lines.append(f"| {name} | {' | '.join(cells)} | {machine.limit:.2f} |")
    return lines


def quota_questions(up: str) -> list[str]:
    """Return what the rows say of each registered question."""
    rows = read(FOLDER / "quota.csv")
    lines = [
        f"| ([CSV]({up}results/uneven/quota.csv)) | mean, 95 % | n | p, corrected | |",
        "|---|---|---|---|---|",
    ]
    ratios = {name: _ratios(rows, "dynamic", name) for name in MACHINES}
    p = holm([float(ttest_1samp(ratios[name], 1.0).pvalue) for name in UNEVEN])
    corrected = dict(zip(UNEVEN, p, strict=True))
    for name, values in ratios.items():
        found = interval(values)
        verdict = "costs nothing" if found.mean + found.half < 1.05 else "not shown to cost nothing"
        if name in corrected:
            gains = corrected[name] < 0.05 and found.mean < 1
            verdict = "gains" if gains else "not shown to gain"
        lines.append(
            f"| U1: `dynamic` over plain DDP, seconds, {name} | {with_interval(values, 2)} "
            f"| {found.count} | {shown_p(corrected[name]) if name in corrected else ''} "
            f"| {verdict} |"
        )
    less = {arm: list(pooled(rows, arm).values()) for arm in BALANCED}
    p = holm([equivalence_p(values, MARGIN) for values in less.values()])
    for (arm, values), each in zip(less.items(), p, strict=True):
        verdict = "equivalent" if each < 0.05 else "not shown"
        lines.append(
            f"| U2: `{arm}` less plain DDP, points | {with_interval(values, 2, '+')} "
            f"| {len(values)} | {shown_p(each)} | {verdict} within {MARGIN:g} |"
        )
    return lines


def quota_more(up: str) -> list[str]:
    """Return what was registered without a test, machine by machine."""
    rows = read(FOLDER / "quota.csv")
    lines = [
        f"| without a test ([CSV]({up}results/uneven/quota.csv)) | s of training: `dynamic` over "
        "`equal` | s of the second half: `dynamic` over plain DDP "
        "| points: `dynamic` less plain DDP | points: `dbs` less plain DDP |",
        "|---|---|---|---|---|",
    ]
    for name in MACHINES:
        times = (
            _ratios(rows, "dynamic", name, "equal"),
            _ratios(rows, "dynamic", name, column="epoch_s"),
        )
        points = (list(_less(rows, arm, name).values()) for arm in BALANCED)
        cells = [with_interval(each, 2) for each in times]
        cells += [with_interval(each, 1, "+") for each in points]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def uneven_dual(up: str) -> list[str]:
    """Return dual batch on uneven workers and a slow link, next to small and to large batches."""
    rows = read(FOLDER / "arms_runs.csv")
    accuracy: dict[str, dict[str, float]] = {}
    for row in rows:
        accuracy.setdefault(row["arm"], {})[row["seed"]] = float(row["accuracy"])
    lines = [
        f"| four simulated workers, three of them half as fast, 100 Mb/s "
        f"([CSV]({up}results/uneven/arms_runs.csv)) | accuracy, % | training images right, % "
        f"| over `{CONTROL}`, points, 95 % | n | p | epochs | virtual s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, text in DUAL.items():
        own = [row for row in rows if row["arm"] == arm]
        less = [right - accuracy[CONTROL][seed] for seed, right in accuracy[arm].items()]
        fitted, time_s = (
            fmean(float(row[name]) for row in own) for name in ("train_accuracy", "train_time_s")
        )
        cells = (
            with_interval([*accuracy[arm].values()], 1),
            f"{fitted:.1f}",
            "" if arm == CONTROL else with_interval(less, 1, "+"),
            str(len(own)),
            shown_p(interval(less).p) if arm == TESTED else "",
            own[0]["epochs"],
            f"{time_s:.1f}",
        )
        lines.append(f"| `{arm}`: {text} | {' | '.join(cells)} |")
    return lines


def quotas_against() -> list[Against]:
    """Return README's rows: balanced parts next to plain DDP."""
    rows = read(FOLDER / "quota.csv")
    return [
        Against(
            text,
            "uneven/quota.csv",
            EPOCHS,
            _ratios(rows, "dynamic", name),
            list(_less(rows, "dynamic", name).values()),
        )
        for name, text in README_ROWS.items()
    ]


def pooled(rows: Rows, arm: str) -> dict[str, float]:
    """Return an arm's accuracy less plain DDP's, mean of the uneven machines, by turn."""
    found: dict[str, list[float]] = {}
    for name in UNEVEN:
        for turn, less in _less(rows, arm, name).items():
            found.setdefault(turn, []).append(less)
    return {turn: fmean(each) for turn, each in found.items() if len(each) == len(UNEVEN)}


def quotas_figure(rows: Rows, splits: Rows) -> Figure:
    """Return times over plain DDP's by machine, and seconds of an epoch by parts set by hand."""
    figure = Figure(figsize=(12, 4), dpi=110, layout="constrained")
    whole, *swept = figure.subplots(1, 1 + len(SWEPT), width_ratios=(2, *(1 for _ in SWEPT)))
    _draw_machines(whole, rows)
    for axes, name in zip(swept, SWEPT, strict=True):
        _draw_splits(axes, name, splits)
    return figure


def _draw_machines(axes: Axes, rows: Rows) -> None:
    for place, name in enumerate(MACHINES):
        for shift, arm in enumerate(ARMS[1:]):
            ratios = _ratios(rows, arm, name)
            found, where = interval(ratios), place + 0.25 * (shift - 1)
            axes.bar(where, found.mean, 0.22, yerr=found.half, color=LOOK[arm], capsize=2)
            axes.plot([where] * len(ratios), ratios, "_", color="0.2", ms=5)
        ends = (place - 0.4, place + 0.4)
        axes.plot(ends, [MACHINES[name].limit] * 2, "--", color="black", lw=1)
    for arm in ARMS[1:]:
        axes.plot([], [], lw=6, color=LOOK[arm], label=arm)
    axes.plot([], [], "--", color="black", lw=1, label="limit by the speeds")
    axes.axhline(1, color=LOOK[PLAIN], lw=1, label="plain DDP")
    axes.set_xticks(range(len(MACHINES)), list(MACHINES), fontsize=8)
    axes.set_ylabel("whole training over plain DDP's: mean, 95 %")
    axes.set_title("two and three processes by CPU quota", fontsize=10)
    low, high = axes.get_ylim()
    axes.set_ylim(low, 1.3 * high)  # room for the legend
    axes.legend(fontsize=7, loc="upper center", ncols=5)


def _draw_splits(axes: Axes, name: str, splits: Rows) -> None:
    own = [row for row in splits if row["machine"] == name]
    for arm in dict.fromkeys(row["arm"] for row in own):
        found = interval([float(row["epoch_s"]) for row in own if row["arm"] == arm])
        axes.errorbar(int(arm.split("/")[1]), found.mean, found.half, fmt="o", color=COLORS[0])
    axes.set_xlabel("samples of 128, of the slower process")
    axes.set_ylabel("s an epoch once warm: mean, 95 %")
    axes.set_title(f"{name}, parts by hand", fontsize=10)
    axes.set_ylim(0)


def _own(rows: Rows, arm: str, machine: str) -> Rows:
    return [row for row in rows if (row["arm"], row["machine"]) == (arm, machine)]


def _less(rows: Rows, arm: str, machine: str) -> dict[str, float]:
    """Return an arm's accuracy less plain DDP's, in points, by turn."""
    control = {row["turn"]: float(row["accuracy"]) for row in _own(rows, PLAIN, machine)}
    own = {row["turn"]: float(row["accuracy"]) for row in _own(rows, arm, machine)}
    return {turn: 100 * (right - control[turn]) for turn, right in own.items()}


def _ratios(
    rows: Rows, arm: str, machine: str, control: str = PLAIN, column: str = "train_s"
) -> list[float]:
    """Return an arm's seconds over those of a control, by turn."""
    base = {row["turn"]: float(row[column]) for row in _own(rows, control, machine)}
    return [float(row[column]) / base[row["turn"]] for row in _own(rows, arm, machine)]


if __name__ == "__main__":
    main()
