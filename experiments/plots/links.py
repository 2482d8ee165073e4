"""Slow links: tables and the picture of time against accuracy, by model and rate.

    python -m experiments.plots.links

reads the CSV files in experiments/results/links, as experiments/configs/links/README.md has
registered them, and writes links.png there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, LogLocator, NullLocator

from dbsl.tools.compare.statistics import holm, interval
from experiments.benchmarks.demos import more_workers
from experiments.benchmarks.demos.slow_link import ARMS, EPOCHS, RATES
from experiments.plots.evidence import COLORS
from experiments.plots.rows import (
    RESULTS,
    Rows,
    equivalence_p,
    not_below_p,
    read,
    shown_p,
    with_interval,
)

FOLDER = RESULTS / "links"
SIZES = {"test_resnet": "0.4 M parameters", "resnet10t": "4.9 M parameters"}
FORMATS, POOLED, MARGIN, LEVEL = ("int8", "int4", "int2"), (4, 8, 16), 0.5, 0.025
POWERSGD, LOSS = "step powersgd:4:4", 1.0
GOALS = {"G1": (10.0, "rounds_8 int2", 1.6), "G2": (100.0, "rounds_8 int4", 1.0)}
MARKERS = ("o", "s", "^", "D", "v")  # of formats
WIRES = ("float32", "bf16", "int8", "int4", "int2")

SECOND = (("resnet10t", 100.0), ("resnet10t", 10.0))  # panels of the second machine
DDP = "accelerate_ddp"
AGAINST = (  # file of times, Mb/s, arm, model, control
    ("second/time.csv", 100.0, "rounds_8 int4", "test_resnet", DDP),
    *(
        ("time.csv", rate, arm, model, POWERSGD)
        for rate, arm, _ in reversed(GOALS.values())
        for model in SIZES
    ),
)

Accuracy = dict[tuple[str, str], dict[int, float]]  # percent, by model and arm, by seed


@dataclass(frozen=True)
class Against:
    """An arm and its control.

    Attributes:
        text: Both.
        rows: The file of times, in experiments/results.
        epochs: Of a training.
        ratios: Seconds of training over the control's, by turn.
        points: Accuracy less the control's, by seed.
    """

    text: str
    rows: str
    epochs: int
    ratios: Sequence[float]
    points: Sequence[float]


def main() -> None:
    """Draw the picture from its CSV files."""
    figure = links_figure(read(FOLDER / "accuracy.csv"), panels())
    figure.savefig(FOLDER / "links.png")


def links_test_resnet(up: str) -> list[str]:
    """Return bytes, accuracy and seconds of every arm of the small model."""
    return _arms(up, "test_resnet", read(FOLDER / "accuracy.csv"), panels())


def links_resnet10t(up: str) -> list[str]:
    """Return the same of the larger model."""
    return _arms(up, "resnet10t", read(FOLDER / "accuracy.csv"), panels())


def panels() -> Rows:
    """Return the times of tables and picture, those of a model and rate of one machine."""

    def second(row: Mapping[str, str]) -> bool:
        return (row["model"], float(row["megabits"])) in SECOND

    found = [row for row in read(FOLDER / "time.csv") if not second(row)]
    return found + [row for row in read(FOLDER / "second/time.csv") if second(row)]


def links_questions(up: str) -> list[str]:
    """Return what the rows say of each registered question."""
    files = ("accuracy.csv", "time.csv", "second/time.csv", "powersgd/accuracy.csv")
    return _questions(up, *(read(FOLDER / file) for file in files))


def links_more_workers(up: str) -> list[str]:
    """Return what the rows of four and eight simulated workers say, a line for each case."""
    return _more_workers(up, read(FOLDER / "more_workers.csv"))


def links_against() -> list[Against]:
    """Return rounds of few bits and what they are held against; PowerSGD has a rate of its own."""
    tuned = read(FOLDER / "powersgd/accuracy.csv")
    by_arm = _by_arm(read(FOLDER / "accuracy.csv")) | _by_arm(tuned)
    found = []
    for file, rate, arm, model, control in AGAINST:
        wire = arm.rpartition(" ")[2]
        whose = "PowerSGD" if control == POWERSGD else "plain DDP"
        found.append(
            Against(
                f"{rate:g} Mb/s, {SIZES[model].removesuffix(' parameters')}: {wire}, {whose}",
                f"links/{file}",
                EPOCHS[model],
                _ratios(read(FOLDER / file), arm, control, model, rate),
                _less(by_arm, model, arm, control),
            )
        )
    return found


def _arms(up: str, model: str, accuracy: Rows, time: Rows) -> list[str]:
    rates = RATES[model]
    heads = [f"{rate:,.0f} Mb/s: s an epoch once warm; of training" for rate in rates]
    lines = [
        f"| {SIZES[model]}, {EPOCHS[model]} epochs ([accuracy]({up}results/links/accuracy.csv), "
        f"[time]({up}results/links/time.csv)) | MB an epoch and worker | accuracy, % | "
        f"{' | '.join(heads)} |",
        "|---|---|---|" + "---|" * len(rates),
    ]
    for arm in map(str, ARMS):
        own = [row for row in accuracy if (row["arm"], row["model"]) == (arm, model)]
        if not own:
            continue
        sent = fmean(float(row["megabytes"]) for row in own)
        cells = [f"`{arm}`", f"{sent:.2f}", with_interval(_percent(own), 1)]
        for rate in rates:
            turns = _turns(time, arm, model, rate)
            part = " *" if any(int(row["epochs"]) < EPOCHS[model] for row in turns) else ""
            epoch_s, train_s = ([float(r[c]) for r in turns] for c in ("epoch_s", "train_s"))
            seconds = f"{with_interval(epoch_s, 2)}; {with_interval(train_s, 1)}{part}"
            cells.append(seconds if turns else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _questions(up: str, accuracy: Rows, time: Rows, second: Rows, own_rate: Rows) -> list[str]:
    by_arm = _by_arm(accuracy)
    lines = [
        f"| ([accuracy]({up}results/links/accuracy.csv), [time]({up}results/links/time.csv)) "
        "| mean, 95 % | n | p, corrected | |",
        "|---|---|---|---|---|",
    ]
    differences = {wire: list(pooled(by_arm, wire).values()) for wire in FORMATS}
    corrected = holm([equivalence_p(each, MARGIN) for each in differences.values()])
    for (wire, values), p in zip(differences.items(), corrected, strict=True):
        verdict = "equivalent" if p < LEVEL else "not shown"
        lines.append(
            f"| F: {wire} less float32, points | {with_interval(values, 2, '+')} | {len(values)} "
            f"| {shown_p(p)} | {verdict} within {MARGIN} |"
        )
    accuracies = _not_lower(by_arm, "G3: `{}` less PowerSGD")
    for (goal, model), line in accuracies.items():
        rate, arm, least = GOALS[goal]
        ratios = _ratios(time, POWERSGD, arm, model, rate)
        found = interval(ratios)
        reached = "reached" if found.mean - found.half >= least else "not reached"
        lines.append(
            f"| {goal}: seconds of PowerSGD over `{arm}`, {SIZES[model]}, {rate:g} Mb/s "
            f"| {with_interval(ratios, 2)} | {found.count} | | {least:g} {reached} |"
        )
        warm = _ratios(time, POWERSGD, arm, model, rate, "epoch_s")
        lines.append(
            f"| {goal}, epochs once warm alone: {SIZES[model]} | {with_interval(warm, 2)} "
            f"| {len(warm)} | | |"
        )
        lines.append(line)
    tuned = by_arm | _by_arm(own_rate)
    lines += _not_lower(tuned, "after the fact: `{}` less PowerSGD at its rate").values()
    for control, name in ((POWERSGD, "PowerSGD"), (DDP, "plain DDP")):
        for rate, arm, _ in GOALS.values():
            for model, size in SIZES.items():
                if ratios := _ratios(second, control, arm, model, rate):
                    lines.append(
                        f"| second machine: seconds of {name} over `{arm}`, {size}, {rate:g} Mb/s "
                        f"| {with_interval(ratios, 2)} | {len(ratios)} | | |"
                    )
    for name, same in (
        ("as accuracy.csv says", repeated(by_arm, [*time, *second])),
        ("at the same digits whatever the link's rate", alike(time) + alike(second)),
    ):
        lines.append(f"| whole trainings that end {name} | {sum(same)} of {len(same)} | | | |")
    return lines


def _more_workers(up: str, rows: Rows) -> list[str]:
    by_arm = _by_arm([row for row in rows if float(row["megabits"]) == min(more_workers.RATES)])
    goals = [(rate, arm) for rate, arm, _ in GOALS.values()]
    lines = [
        f"| ([CSV]({up}results/links/more_workers.csv)) | "
        + " | ".join(f"PowerSGD's seconds over `{arm}`'s, {rate:g} Mb/s" for rate, arm in goals)
        + " | "
        + " | ".join(f"`{arm}` less PowerSGD, points; p, corrected" for _, arm in goals)
        + " | "
        + " | ".join(f"`{arm}` less float32" for _, arm in goals)
        + " | `rounds_8 float32` less `step float32` |",
        "|---|" + "---|" * 7,
    ]
    less = {
        (case, arm): _less(by_arm, case, arm, POWERSGD)
        for case in more_workers.CASES
        for _, arm in goals
    }
    corrected = holm([not_below_p(each, -LOSS) for each in less.values()])
    shown = {
        key: f"{with_interval(values, 1, '+')}; {shown_p(p)}"
        for (key, values), p in zip(less.items(), corrected, strict=True)
    }
    pairs = [(arm, "rounds_8 float32") for _, arm in goals]
    pairs.append(("rounds_8 float32", "step float32"))
    for case, (model, workers) in more_workers.CASES.items():
        seconds = {
            (row["arm"], float(row["megabits"])): float(row["virtual_s"])
            for row in rows
            if row["model"] == case
        }
        cells = [f"{workers} workers, {SIZES[model]}"]
        cells += [f"{seconds[POWERSGD, rate] / seconds[arm, rate]:.2f}" for rate, arm in goals]
        cells += [shown[case, arm] for _, arm in goals]
        cells += [with_interval(_less(by_arm, case, *pair), 1, "+") for pair in pairs]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _not_lower(by_arm: Accuracy, name: str) -> dict[tuple[str, str], str]:
    """Return by goal and model how far its rounds are ahead of PowerSGD; `name` takes the arm."""
    less = {
        (goal, model): _less(by_arm, model, arm, POWERSGD)
        for goal, (_, arm, _) in GOALS.items()
        for model in SIZES
    }
    corrected = holm([not_below_p(each, -LOSS) for each in less.values()])
    return {
        (goal, model): f"| {name.format(GOALS[goal][1])}, {SIZES[model]}, points "
        f"| {with_interval(values, 1, '+')} | {len(values)} | {shown_p(p)} "
        f"| {'not lower' if p < 0.05 else 'not shown'} by {LOSS:g} |"
        for ((goal, model), values), p in zip(less.items(), corrected, strict=True)
    }


def repeated(by_arm: Accuracy, time: Rows) -> list[bool]:
    """Return for each whole training on a shaped link whether it ended at the same accuracy."""
    return [
        100 * float(row["accuracy"]) == by_arm[row["model"], row["arm"]][int(row["turn"])]
        for row in time
        if row["accuracy"]
    ]


def alike(time: Rows) -> list[bool]:
    """Return for each arm and turn that ran at several rates whether accuracies are the same."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in time:
        if row["accuracy"]:
            found.setdefault((row["model"], row["arm"], row["turn"]), []).append(row["accuracy"])
    return [len(set(each)) == 1 for each in found.values() if len(each) > 1]


def pooled(by_arm: Accuracy, wire: str) -> dict[int, float]:
    """Return a format's accuracy less that of float32, mean of models and rounds, by seed."""
    cells = [
        (by_arm[model, f"rounds_{rounds} {wire}"], by_arm[model, f"rounds_{rounds} float32"])
        for model in SIZES
        for rounds in POOLED
    ]
    seeds = set.intersection(*(set(one) & set(other) for one, other in cells))
    return {s: fmean(one[s] - other[s] for one, other in cells) for s in sorted(seeds)}


def front(points: Mapping[str, tuple[float, float]]) -> list[str]:
    """Return the arms that no other beats in both seconds and accuracy, the fastest first."""
    found, best = [], float("-inf")
    for arm, (_, accuracy) in sorted(points.items(), key=lambda each: (each[1][0], -each[1][1])):
        if accuracy > best:
            found.append(arm)
            best = accuracy
    return found


def links_figure(accuracy: Rows, time: Rows) -> Figure:
    """Return accuracy by seconds of whole training: a panel for each model and rate."""
    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    panels = figure.subplots(len(SIZES), 3)
    for own, model in zip(panels, SIZES, strict=True):
        for axes, rate in zip(
            own[::-1], RATES[model][::-1], strict=False
        ):  # slow ones at the right
            _draw(axes, model, rate, accuracy, time)
    handles, labels = panels[0][1].get_legend_handles_labels()
    panels[0][0].axis("off")  # at 1 Gb/s only the larger model was run
    panels[0][0].legend(handles, labels, loc="center", fontsize=9)
    return figure


def _draw(axes: Axes, model: str, rate: float, accuracy: Rows, time: Rows) -> None:
    ends = {}
    for arm in ARMS:
        turns = _turns(time, str(arm), model, rate)
        own = [r for r in accuracy if (r["arm"], r["model"]) == (str(arm), model)]
        if not turns or not own:
            continue
        seconds, right = interval([float(r["train_s"]) for r in turns]), interval(_percent(own))
        ends[str(arm)] = (seconds.mean, right.mean)
        color, marker = _look(arm)
        axes.errorbar(
            *ends[str(arm)],
            xerr=seconds.half if seconds.count > 1 else None,
            yerr=right.half if right.count > 1 else None,
            fmt=marker,
            color=color,
            mfc=color if arm.wire else "white",
            ms=6,
            elinewidth=0.6,
            alpha=0.9,
        )
    along = front(ends)
    axes.step(*zip(*(ends[arm] for arm in along), strict=True), where="post", color="0.3", lw=1)
    _legend(axes)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(LogFormatter(labelOnlyBase=False, minor_thresholds=(9, 9)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("s of training, annealed (log): mean, 95 %")
    axes.set_ylabel("accuracy (%): mean, 95 %")
    axes.set_title(f"{SIZES[model]}, {rate:,.0f} Mb/s", fontsize=10)


def _look(arm: object) -> tuple[object, str]:
    """Return an arm's colour, by its exchanges, and marker, by its format."""
    kinds = [0, 1, 4, 8, 16]
    if arm.wire.startswith("powersgd"):
        return "black", "*" if arm.wire.endswith(":4") else "P"
    marker = MARKERS[WIRES.index(arm.wire or "float32")]
    return COLORS[kinds.index(arm.rounds)], marker


def _legend(axes: Axes) -> None:
    texts = ("joint steps", "1 round an epoch", *(f"{rounds} rounds" for rounds in (4, 8, 16)))
    for color, text in zip(COLORS, texts, strict=False):
        axes.plot([], [], "-", lw=4, color=color, label=text)
    for marker, wire in zip(MARKERS, WIRES, strict=True):
        axes.plot([], [], marker, color="0.4", label=wire)
    for marker, steps in (("*", 4), ("P", 40)):
        axes.plot([], [], marker, color="black", label=f"PowerSGD after {steps} steps")
    axes.plot([], [], "o", color="0.4", mfc="white", label="Accelerate's loops")
    axes.plot([], [], "-", color="0.3", label="front")


def _turns(time: Rows, arm: str, model: str, rate: float) -> Rows:
    case = (arm, model, rate)
    return [r for r in time if (r["arm"], r["model"], float(r["megabits"])) == case]


def _ratios(
    time: Rows, one: str, other: str, model: str, rate: float, column: str = "train_s"
) -> list[float]:
    """Return the seconds of an arm over another's, by turn."""
    own, control = (
        {row["turn"]: float(row[column]) for row in _turns(time, arm, model, rate)}
        for arm in (one, other)
    )
    return [own[turn] / control[turn] for turn in sorted(own.keys() & control.keys())]


def _by_arm(accuracy: Rows) -> Accuracy:
    found: Accuracy = {}
    for row in accuracy:
        own = found.setdefault((row["model"], row["arm"]), {})
        own[int(row["seed"])] = 100 * float(row["accuracy"])
    return found


def _less(by_arm: Accuracy, model: str, one: str, other: str) -> list[float]:
    """Return by how many points an arm is ahead of another one, for seeds 0 to 4."""
    own, control = by_arm[model, one], by_arm[model, other]
    return [own[seed] - control[seed] for seed in range(5) if seed in own and seed in control]


def _percent(rows: Rows) -> list[float]:
    return [100 * float(row["accuracy"]) for row in rows]


if __name__ == "__main__":
    main()
