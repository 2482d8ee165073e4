"""The picture of the demonstrations with real processes: uneven machines, and slow links.

    python -m experiments.plots.demos

reads uneven.csv and slow_link.csv in experiments/results/demos and writes demos.png there.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsl.tools.compare.statistics import interval
from experiments.plots.evidence import COLORS
from experiments.plots.machine_tables import DEMO_SLOW_LINK, DEMO_UNEVEN
from experiments.plots.rows import RESULTS, Rows, read

MODEL = "test_resnet"
MARKERS = {1000.0: "o", 100.0: "s", 10.0: "^"}  # by Mb/s


def main() -> None:
    """Draw the demonstrations from their CSV files."""
    folder = RESULTS / "demos"
    figure = demos_figure(read(folder / "uneven.csv"), read(folder / "slow_link.csv"))
    figure.savefig(folder / "demos.png")


def demos_figure(uneven: Rows, slow_link: Rows) -> Figure:
    """Return seconds of an epoch on uneven machines, and accuracy by time on slow links."""
    figure = Figure(figsize=(11, 3.6), dpi=110, layout="constrained")
    machines, links = figure.subplots(1, 2, width_ratios=(4, 6))
    _draw_uneven(machines, uneven)
    _draw_links(links, [row for row in slow_link if row["model"] == MODEL])
    return figure


def _draw_uneven(axes: Axes, rows: Rows) -> None:
    names = [text.partition(":")[0].replace("`", "") for text in DEMO_UNEVEN.values()]
    for place, arm in enumerate(DEMO_UNEVEN):
        seconds = [float(row["epoch_s"]) for row in rows if row["arm"] == arm]
        found = interval(seconds)
        color = COLORS[place and place + 3]  # plain DDP's is that of the other panel
        axes.barh(place, found.mean, xerr=found.half, color=color, alpha=0.7, capsize=4)
        axes.plot(seconds, [place] * len(seconds), "|", color="0.2", ms=10)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("s/epoch: mean, 95 %, single turns")
    axes.set_title("another program on one of two cores", fontsize=10)


def _draw_links(axes: Axes, rows: Rows) -> None:
    for color, (arm, text) in zip(COLORS, DEMO_SLOW_LINK.items(), strict=False):
        own = [row for row in rows if row["arm"] == arm]
        ends = []
        for megabits, marker in MARKERS.items():
            turns = [row for row in own if float(row["megabits"]) == megabits]
            time_s = interval([float(row["train_s"]) for row in turns])
            accuracy = interval([100 * float(row["accuracy"]) for row in turns])
            ends.append((time_s.mean, accuracy.mean))
            axes.errorbar(
                *ends[-1],
                xerr=time_s.half,
                yerr=accuracy.half,
                fmt=marker,
                color=color,
                capsize=2,
            )
        axes.plot(
            *zip(*ends, strict=True), "-", color=color, alpha=0.5, label=text.replace("`", "")
        )
    for megabits, marker in MARKERS.items():
        axes.plot([], [], marker, color="0.4", label=f"{megabits:,.0f} Mb/s")
    axes.set_xscale("log")
    axes.set_xticks([10, 20, 50, 100, 200, 500], ["10", "20", "50", "100", "200", "500"])
    axes.set_xlabel("s of training, annealed")
    axes.set_ylabel("accuracy (%): mean, 95 %")
    axes.set_title("two processes on a shaped link, 0.4 M parameters", fontsize=10)
    axes.legend(fontsize=7, loc="upper center", ncols=2)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.45 * (high - low))  # room for the legend


if __name__ == "__main__":
    main()
