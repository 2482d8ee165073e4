"""Output of a comparison: CSV files of arms, single runs and curves, a picture, and a table."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from filelock import FileLock, Timeout
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsl.base.errors import SettingError, short_loss
from dbsl.base.files import save_figure, write_table
from experiments.compare.statistics import MADE_ON, ArmRun, averaged, interval, table

_LOCK = ".lock"  # in the folder, while one of several commands writes there
_LOCKED_WITHIN_S = 60.0
_OF_AVERAGE = " (EMA)"  # after an arm's name: its averaged weights
_MEASURED = {  # columns of single runs, with what a value is multiplied by, and its format
    "accuracy": (100, ".3f"),
    "loss": (1, ".4f"),
    "train_accuracy": (100, ".3f"),
    "train_loss": (1, ".4f"),
    "train_time_s": (1, ".12g"),  # epochs of equal times are found from it again
    "total_time_s": (1, ".1f"),
}
_COUNTED = ("workers", "epochs", "samples")


def write_comparison(
    runs: Mapping[str, Sequence[ArmRun]],
    baseline: str,
    target: float | None,
    folder: Path,
    command: str,
    name: str = "arms",
) -> str:
    """Write ``<name>.csv`` and ``.png``; return a table for people.

    Averaged weights, where runs have them, are another arm below that of the raw ones.
    """
    shown = {}
    for arm, own in runs.items():
        shown[arm] = own
        if of_average := averaged(own):
            shown[f"{arm}{_OF_AVERAGE}"] = of_average
    rows = table(shown, baseline, target)
    if not rows:
        raise SettingError("arms must have at least one finished run, got none")
    folder.mkdir(parents=True, exist_ok=True)
    made = {"date": date.today().isoformat(), "command": command}
    arms = [
        _plain(row) | {key: _common(shown[row["arm"]], key) for key in MADE_ON} | made
        for row in rows
    ]
    write_table(folder / f"{name}.csv", arms)
    save_figure(arms_figure(shown, baseline), folder / f"{name}.png")
    width, goal = max(len(row["arm"]) for row in rows), f"{rows[0]['target']:.1f} %"
    late = [row for row in rows if row["time_to_target_s"] == math.inf]
    missed = ", ".join(f"{row['arm']}: {row['reached']} of {row['seeds']} seeds" for row in late)
    lines = [
        f"{'arm':<{width}}  seeds  accuracy %   95 %  over {baseline}   loss   time s  "
        f"to {goal}  s/point",
        *(_line(row, width, len(baseline)) for row in rows),
        "accuracy and loss at the last epoch; differences are paired by seed; *: p below 0.05, "
        "corrected for the number of arms (Holm); s/point: worker seconds more than "
        f"{baseline}'s for each point over it; {folder}",
        *[f"- below 'to {goal}': not every seed has reached it ({missed})"] * bool(missed),
        *_undetected(rows),
    ]
    return "\n".join(lines)


def _undetected(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line on what so few seeds cannot tell, where there is such a difference."""
    unclear = [r for r in rows if r["p_holm"] >= 0.05 and math.isfinite(r["detectable"])]
    if not unclear:
        return []
    least, most = (f(row["detectable"] for row in unclear) for f in (min, max))
    seeds = " or ".join(str(n) for n in sorted({row["seeds"] for row in unclear}))
    return [
        f"without *: not significant; with {seeds} seeds a difference of {least:.1f} to {most:.1f} "
        "points, by arm, would be found in four of five such comparisons, before the correction"
    ]


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Keep other commands from writing tables into a folder for a while."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(_LOCKED_WITHIN_S)
    except Timeout:
        raise SettingError(
            f"output_dir must be free to write, got {lock.lock_file} in use"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # while it is held; FileLock copes with that
            Path(lock.lock_file).unlink()
        lock.release()


def write_runs(runs: Mapping[str, Sequence[ArmRun]], folder: Path, name: str = "arms") -> None:
    """Write ``<name>_runs.csv`` and ``<name>_curves.csv``: all that `read_runs` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    shown = {arm: own for arm, own in runs.items() if own}
    shown |= {f"{arm}{_OF_AVERAGE}": averaged(own) for arm, own in runs.items()}
    singles = [
        {
            "arm": arm,
            "seed": run.seed,
            **{name: _cell(getattr(run, name), *how) for name, how in _MEASURED.items()},
            **{name: getattr(run, name) for name in _COUNTED},
            "settings": run.settings,
            **{key: dict(run.made_on).get(key, "") for key in MADE_ON},
        }
        for arm, own in shown.items()
        for run in own
    ]
    curves = [
        {
            "arm": arm,
            "seed": run.seed,
            "train_time_s": f"{time_s:.2f}",
            "accuracy": f"{100 * accuracy:.3f}",
        }
        for arm, own in runs.items()
        for run in own
        for time_s, accuracy in run.curve
    ]
    write_table(folder / f"{name}_curves.csv", curves)
    write_table(folder / f"{name}_runs.csv", singles)


def read_runs(folder: Path, name: str = "arms") -> dict[str, list[ArmRun]]:
    """Return the runs of tables that `write_runs` wrote, on this machine or another, by arm."""
    singles, curves = folder / f"{name}_runs.csv", defaultdict(list)
    if not singles.exists():
        return {}
    found: dict[str, list[ArmRun]] = {}
    try:
        for row in _rows(folder / f"{name}_curves.csv"):
            point = float(row["train_time_s"]), float(row["accuracy"]) / 100
            curves[row["arm"], row["seed"]].append(point)
        rows = _rows(singles)
        averages = {(row["arm"], row["seed"]): row for row in rows}
        for row in rows:
            if row["arm"].endswith(_OF_AVERAGE):
                continue
            average = averages.get((row["arm"] + _OF_AVERAGE, row["seed"]))
            run = ArmRun(
                seed=int(row["seed"]),
                curve=tuple(curves[row["arm"], row["seed"]]),
                ema_accuracy=float(average["accuracy"]) / 100 if average else None,
                ema_loss=float(average["loss"]) if average else math.nan,
                made_on=tuple((key, row[key]) for key in MADE_ON),
                settings=row.get("settings", ""),
                **{name: _number(row, name) for name in _MEASURED},
                **{name: int(row[name]) for name in _COUNTED},
            )
            found.setdefault(row["arm"], []).append(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"output_dir must have readable tables, got {singles} ({error})"
        ) from None
    return found


def _rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _cell(value: float | None, factor: float, form: str) -> str:
    return "" if value is None else format(factor * value, form)


def _number(row: Mapping[str, str], name: str) -> float | None:
    """Return the number in a cell; None: it is empty, or the table is older than its column."""
    text = row.get(name) if name in ("train_accuracy", "train_loss") else row[name]
    return float(text) / _MEASURED[name][0] if text else None


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()}


def _common(runs: Sequence[ArmRun], key: str) -> str:
    """Return what runs were made on: one value, or all that there are."""
    return " / ".join(sorted({dict(run.made_on).get(key, "") for run in runs}))


def _line(row: Mapping[str, Any], width: int, baseline: int) -> str:
    def number(value: float, text: str) -> str:
        return format(value, text) if math.isfinite(value) else "-"

    difference = number(row["difference"], "+.2f")
    if math.isfinite(row["difference_ci95"]):
        mark = "*" if row["p_holm"] < 0.05 else " "
        difference += f" ± {row['difference_ci95']:.2f}{mark}"
    return (
        f"{row['arm']:<{width}}  {row['seeds']:>5}  {row['accuracy']:>10.2f}  "
        f"{number(row['ci95'], '.2f'):>5}  {difference:>{baseline + 5}}  "
        f"{short_loss(row['loss']):>5}  "
        f"{row['train_time_s']:>7.1f}  {number(row['time_to_target_s'], '.1f'):>9}  "
        f"{number(row['cost_per_point_s'], '+.1f'):>7}"
    )


def arms_figure(arms: Mapping[str, Sequence[ArmRun]], baseline: str) -> Figure:
    """Return accuracy over training time, and last-epoch accuracy with 95 % intervals.

    On the left are the baseline and the best others that have a curve, with the standard deviation
    of seeds; on the right are all arms, those that the left leaves out in grey.
    """
    finished = {name: runs for name, runs in arms.items() if runs}
    figure = Figure(figsize=(13, max(5.5, 0.32 * len(finished))), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = _colors(finished, baseline)
    goes_on = False
    for name in (name for name in finished if name in colors):
        _draw_curve(left, name, finished[name], colors[name])
    for place, (name, runs) in enumerate(finished.items()):
        color = colors.get(name, "0.6")
        found = interval([100 * run.accuracy for run in runs])
        half = 0.0 if np.isnan(found.half) else found.half
        # No accuracy lies beyond 0 or 100 %; the interval of few seeds may.
        ends = [[min(half, found.mean)], [min(half, 100.0 - found.mean)]]
        right.errorbar(found.mean, place, xerr=ends, fmt="o", capsize=4, color=color)
        for end, room, mark in ((0.0, found.mean, "<"), (100.0, 100.0 - found.mean, ">")):
            if half > room:
                right.plot(end, place, mark, ms=9, color=color, clip_on=False)
                goes_on = True
        right.plot([100 * run.accuracy for run in runs], [place] * len(runs), "|", color="0.4")
    left.set_xlabel("training time (s), mean over seeds")
    left.set_ylabel("accuracy (%): mean and sd over seeds")
    left.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))  # hides no point
    right.set_yticks(range(len(finished)), list(finished))
    right.invert_yaxis()
    label = "accuracy at the last epoch (%):\nmean, 95 % t-interval, single seeds"
    right.set_xlabel(label + "\ntriangle: the interval extends beyond possible values" * goes_on)
    low, high = right.get_xlim()
    right.set_xlim(max(low, 0.0), min(high, 100.0))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def _colors(arms: Mapping[str, Sequence[ArmRun]], baseline: str) -> dict[str, Any]:
    """Return a color of its own for the baseline and for as many of the best as there are more."""
    sequence = matplotlib.color_sequences["tab10"]
    curved = [name for name, runs in arms.items() if all(run.curve for run in runs)]
    curved.sort(key=lambda name: (name != baseline, -fmean(run.accuracy for run in arms[name])))
    drawn = [color for place, color in enumerate(sequence) if place != 7]  # not its grey
    return dict(zip(curved, (*drawn, "black"), strict=False))


def _draw_curve(axes: Axes, name: str, runs: Sequence[ArmRun], color: Any) -> None:
    epochs = min(len(run.curve) for run in runs)
    curves = np.array([run.curve[:epochs] for run in runs])  # [seeds, epochs, 2]
    times, accuracies = curves[..., 0].mean(0), 100 * curves[..., 1].mean(0)
    label = f"{name} (n = {len(runs)})"
    axes.plot(times, accuracies, "o-", ms=3, color=color, label=label)
    if len(runs) > 1:
        sd = 100 * curves[..., 1].std(0, ddof=1)
        axes.fill_between(times, accuracies - sd, accuracies + sd, color=color, alpha=0.15, lw=0)
