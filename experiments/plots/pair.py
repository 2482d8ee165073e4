"""Draw results/pair/pair.png: seconds of training over those of the fast process alone.

python -m experiments.plots.pair
"""

import pandas as pd
from matplotlib.figure import Figure

from dbsl.base.files import save_figure
from experiments.benchmarks.demos.pair import MACHINES, limit
from experiments.plots.rows import RESULTS
from experiments.recompute import interval, times

COLOURS = {"ddp": "#999999", "train.py": "#0072b2", "uneven": "#56b4e9", "rounds": "#e69f00"}


def pair_figure() -> Figure:
    """Return bars of each arm on each machine, with 95 % intervals over turns and the limits."""
    figure = Figure(figsize=(9, 3.6), dpi=110, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for number, (arm, colour) in enumerate(COLOURS.items()):
        where = (f"pair/pair:machine == '{name}'" for name in MACHINES)
        found = pd.DataFrame([interval(times(each, arm, "alone")) for each in where])
        places = [place + 0.2 * (number - 1.5) for place in range(len(MACHINES))]
        axes.bar(places, found[0], 0.2, yerr=found.get(1), color=colour, label=arm, capsize=2)
    for place, slower in enumerate(MACHINES.values()):
        told = "limit by the speeds" if place == 0 else None
        axes.hlines(limit(slower), place - 0.45, place + 0.45, "black", "dashed", label=told)
    axes.axhline(1, color="#cc3311", label="the fast process alone")
    axes.set_xticks(range(len(MACHINES)), [f"speeds {name}" for name in MACHINES])
    axes.set_ylabel("seconds over the fast one alone")
    axes.legend(ncols=3, fontsize=8)
    return figure


if __name__ == "__main__":
    save_figure(pair_figure(), RESULTS / "pair/pair.png")
