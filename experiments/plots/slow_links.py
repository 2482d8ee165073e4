"""Slow links at equal virtual time: tables and the picture of all arms, link by link.

    python -m experiments.plots.slow_links

reads the CSV files in experiments/results/slow, registered in experiments/configs/slow/README.md,
and writes slow.png there. A link counts once all its registered arms are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import ttest_1samp

from dbsl.tools.compare.statistics import holm, interval
from experiments.benchmarks.slow import AFTER, ARMS, EVERY, GBPS, Point, best, rate
from experiments.plots.evidence import COLORS
from experiments.plots.rows import RESULTS, Rows, read, shown_p, with_interval

FOLDER = RESULTS / "slow"
SEEDS, LEVEL, MARGIN = 5, 0.05, 1.0
JOINT = ("ddp", "ddp_fp16", "powersgd", "larger_batch")
SMALL = ("dual_3_rounds", "dual_4_rounds")
ROUNDS = tuple(arm for arm in ARMS if arm not in JOINT)
PLAIN = ("diloco", "post_local", "qsr")
REFERENCE, WITH_REFERENCE = "dual_3", (0.1, 0.01)  # of experiments/results/gap, on these links
LINKS = sorted(GBPS, reverse=True)
KINDS = {  # colour and name of a kind of arms
    "joint steps": ((*JOINT, "powersgd_larger", "powersgd_1_larger", "fp16_larger"), COLORS[0]),
    "rounds, large batches": (
        ("local_sgd", *PLAIN, "local_sgd_once", "local_sgd_int"),
        COLORS[1],
    ),
    "rounds, small batches": ((*SMALL, "dual_4_int"), COLORS[2]),
}
ANSWERS = (  # pairs whose first, or second, was added after the fact
    ("dual_4_int", "powersgd_larger"),
    ("dual_4_int", "powersgd_1_larger"),
    ("dual_4_int", "local_sgd_int"),
    ("dual_4_rounds", "local_sgd_once"),
    ("powersgd_larger", "powersgd"),
    ("fp16_larger", "larger_batch"),
)


@dataclass(frozen=True)
class Link:
    """What the rows say of a link whose registered arms are complete, and of others that are."""

    gbps: float
    tuned: Mapping[str, tuple[Point, float]]  # best point and its held-out accuracy, by arm
    epochs: Mapping[str, int]
    fitted: Mapping[str, float]  # training images right, percent, mean over seeds
    accuracy: Mapping[str, Mapping[str, float]]  # percent, by arm and seed

    @property
    def name(self) -> str:
        """The link's rate."""
        return f"{1000 * self.gbps:,.0f} Mb/s"

    def best_of(self, arms: tuple[str, ...]) -> str:
        """Return the arm with the highest mean of the tuning seeds on held-out images."""
        return max(arms, key=lambda arm: self.tuned[arm][1])

    def has(self, *arms: str) -> bool:
        """Whether all these arms are complete."""
        return self.accuracy.keys() >= {*arms}

    def less(self, one: str, other: str) -> list[float]:
        """Return by how many points an arm is ahead of another one, seed by seed."""
        return self.over(one, self.accuracy[other])

    def over(self, arm: str, reference: Mapping[str, float]) -> list[float]:
        """Return by how many points an arm is ahead of accuracies by seed."""
        return [right - reference[turn] for turn, right in self.accuracy[arm].items()]

    def questions(self) -> dict[str, tuple[str, str]]:
        """Return the arms of each registered difference."""
        return {
            "S1": (self.best_of(ROUNDS), self.best_of(JOINT)),
            "S2": (self.best_of(SMALL), "local_sgd"),
            "S3": ("dual_4_int", "dual_4_rounds"),
        }


@cache
def links() -> tuple[Link, ...]:
    """Return the links that are complete, the fastest first."""
    tuning, rows = (read(FOLDER / f"{name}.csv") for name in ("tuning", "arms_runs"))
    return tuple(link for gbps in LINKS if (link := _link(gbps, tuning, rows)))


def _link(gbps: float, tuning: Rows, rows: Rows) -> Link | None:
    own = [row for row in rows if float(row["gbps"]) == gbps]
    accuracy: dict[str, dict[str, float]] = {}
    for row in sorted(own, key=lambda row: int(row["turn"])):
        accuracy.setdefault(row["arm"], {})[row["turn"]] = float(row["accuracy"])
    accuracy = {arm: accuracy[arm] for arm in EVERY if len(accuracy.get(arm, ())) == SEEDS}
    if not ARMS.keys() <= accuracy.keys():
        return None
    points = {arm: best(tuning, gbps, arm) for arm in accuracy}
    tuned = {arm: (point, _held_out(tuning, gbps, arm, point)) for arm, point in points.items()}
    epochs = {row["arm"]: int(row["epochs"]) for row in own}
    right = [(row["arm"], float(row["train_accuracy"] or 0)) for row in own]  # diverged: none
    fitted = {arm: fmean(each for name, each in right if name == arm) for arm in accuracy}
    return Link(gbps, tuned, epochs, fitted, accuracy)


def _held_out(tuning: Rows, gbps: float, arm: str, point: Point) -> float:
    key = (arm, gbps, " ".join(map(str, point)))
    return fmean(
        float(row["accuracy"])
        for row in tuning
        if (row["arm"], float(row["gbps"]), row["point"]) == key
    )


def main() -> None:
    """Draw the picture."""
    slow_figure().savefig(FOLDER / "slow.png")


def slow_arms(up: str) -> list[str]:
    """Return each arm's accuracy and epochs on the links, and what tuning chose."""
    lines = [
        f"| tuned settings ([tuning]({up}results/slow/tuning.csv), "
        f"[CSV]({up}results/slow/arms_runs.csv)) | accuracy, % | training images right, % "
        "| epochs | rate | held-out images, % |",
        "|---|---|---|---|---|---|",
    ]
    for link in links():
        for arm, (point, held_out) in link.tuned.items():
            own = [
                with_interval([*link.accuracy[arm].values()], 1),
                f"{link.fitted[arm]:.1f}",
                str(link.epochs[arm]),
                f"{rate(point):g}",
                f"{held_out:.1f}",
            ]
            told = f"`{arm}`{_settings(arm, point)}{', after the fact' * (arm in AFTER)}"
            lines.append(f"| {link.name}: {told} | {' | '.join(own)} |")
    return lines


def _settings(arm: str, point: Point) -> str:
    """Return a point's settings but for the rate as flags of train.py, configs by their names."""
    own = zip(EVERY[arm].settings.items(), point, strict=False)
    found = [f"{name} {values[place].rpartition('/')[2]}" for (name, values), place in own]
    return f", `{', '.join(found)}`" if found else ""


def slow_questions(up: str) -> list[str]:
    """Return what the rows say of each registered question, p corrected over all nine."""
    tests = {
        (link.name, name): link.less(*pair)
        for link in links()
        for name, pair in link.questions().items()
    }
    lacking = 3 * len(LINKS) - len(tests)  # of links that are not complete
    p = holm([float(ttest_1samp(each, 0).pvalue) for each in tests.values()] + [1.0] * lacking)
    corrected = dict(zip(tests, p, strict=False))
    lines = [
        f"| ([CSV]({up}results/slow/arms_runs.csv)) | difference, points, 95 % | n "
        "| p, corrected | |",
        "|---|---|---|---|---|",
    ]
    for link in links():
        for name, (one, other) in link.questions().items():
            each, shown = tests[link.name, name], corrected[link.name, name]
            lines.append(
                f"| {name}: `{one}` minus `{other}`, {link.name} | {with_interval(each, 1, '+')} "
                f"| {len(each)} | {shown_p(shown)} "
                f"| {_verdict(each, shown, *_words(name, one, other))} |"
            )
    return lines


def slow_more(up: str) -> list[str]:
    """Return the differences that were registered without a test, or after the fact."""
    pairs = [(SMALL[0], SMALL[1]), *((arm, "local_sgd") for arm in PLAIN)]
    pairs += [(arm, JOINT[0]) for arm in JOINT[1:]]
    pairs += [*((arm, "powersgd") for arm in ROUNDS), *ANSWERS]
    heads = [link.name for link in links()]
    lines = [
        f"| without a test ([CSV]({up}results/slow/arms_runs.csv)): points, 95 % "
        f"| {' | '.join(heads)} |",
        "|---|" + "---|" * len(heads),
    ]
    for one, other in pairs:
        cells = [
            with_interval(link.less(one, other) if link.has(one, other) else [], 1, "+")
            for link in links()
        ]
        if any(cells):
            after = ", after the fact" * bool({one, other} & AFTER.keys())
            lines.append(f"| `{one}` minus `{other}`{after} | {' | '.join(cells)} |")
    rows = [row for row in read(RESULTS / "gap/arms_runs.csv") if row["arm"] == REFERENCE]
    reference = {row["seed"]: float(row["accuracy"]) for row in rows}
    for arm in ARMS:
        found = [
            link.over(arm, reference) if link.gbps in WITH_REFERENCE else [] for link in links()
        ]
        cells = (with_interval(each, 1, "+") for each in found)
        lines.append(f"| `{arm}` minus gap's `{REFERENCE}` | {' | '.join(cells)} |")
    return lines


def _words(name: str, one: str, other: str) -> tuple[str, str, str]:
    """Return what is said if a difference is below zero, above, or within the margin."""
    if name == "S1":
        return f"`{other}` is the best choice", f"`{one}` is ahead", "as good as each other"
    return "costs", "helps", f"within {MARGIN:g} point either way"


def _verdict(values: list[float], p: float, below: str, above: str, within: str) -> str:
    found = interval(values)
    if p < LEVEL:
        return below if found.mean < 0 else above
    return within if abs(found.mean) + found.half <= MARGIN else "not settled"


def slow_figure() -> Figure:
    """Return accuracies of all arms, a panel for each link."""
    figure = Figure(figsize=(4 + 4 * len(links()), 4.5), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(links()), squeeze=False)[0]
    for axes, link in zip(panels, links(), strict=True):
        _draw(axes, link)
    after = "; *: after the fact" if any(AFTER.keys() & link.accuracy for link in links()) else ""
    text = f"accuracy (%) at the last epoch: mean, 95 %; ticks: seeds{after}"
    where = {"loc": "outside lower center", "ncols": len(KINDS), "fontsize": 9}
    figure.legend(*panels[0].get_legend_handles_labels(), title=text, title_fontsize=9, **where)
    return figure


def _draw(axes: Axes, link: Link) -> None:
    order = sorted(link.accuracy, key=lambda arm: fmean(link.accuracy[arm].values()))
    for kind, (arms, color) in KINDS.items():
        for arm in filter(link.has, arms):
            values, place = [*link.accuracy[arm].values()], order.index(arm)
            found = interval(values)
            axes.errorbar(found.mean, place, xerr=found.half, fmt="o", color=color, capsize=3)
            axes.plot(values, [place] * len(values), "|", color=color, ms=8, alpha=0.6)
        axes.plot([], [], "o", color=color, label=kind)
    names = [f"{arm}{'*' * (arm in AFTER)} ({link.epochs[arm]})" for arm in order]
    axes.set_yticks(range(len(order)), names)
    axes.set_title(f"{link.name}, equal virtual time (epochs)", fontsize=10)
    axes.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    main()
