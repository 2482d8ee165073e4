"""Results of a study: a table, the knees with their rules, files and a picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from dbsl.base.errors import require
from dbsl.base.files import save_figure, write_table, write_text
from dbsl.tools.study import scaling
from dbsl.tools.study.scaling import Result, Study

REPORT, TABLE, PICTURE = "report.json", "results.csv", "plots/study.png"
_OF_WORKLOAD = ["dataset", "model", "optimizer", "goal"]  # columns that are the same in all rows
_REGIONS = (
    ("perfect scaling", "#009e73"),
    ("diminishing returns", "#e69f00"),
    ("no gain", "#999999"),
)
Results = Mapping[str, Sequence[Result]]  # by workload, batch sizes ascending; none is empty


def write_report(workloads: Mapping[str, Sequence[Study]], folder: Path, goal: float | None) -> str:
    """Write ``report.json``, ``results.csv`` and the picture; return the report for people.

    `goal` is the error to fall under; None, or where trials ended at it: each study's own.
    """
    lines, rows, report, drawn = [], [], {}, {}
    for name, studies in workloads.items():
        own = goal
        if goal is None or any(study.ends_at_goal for study in studies):
            goals = {study.goal for study in studies}
            text = f"goal_error must be given, since the studies of {name} do not name one"
            require(len(goals) == 1 and None not in goals, text, "none")
            (own,) = goals
        found = {study.batch_size: scaling.steps_to_result(study, own) for study in studies}
        table = [_row(study, found[study.batch_size], own) for study in studies]
        report[name] = {"goal": own, "objective": scaling.OBJECTIVE, **_knees(found)}
        lines += _describe(name, table, report[name])
        if goal not in (None, own):
            lines.append(
                f"its goal is kept, not {goal:g}: its trials ended at it (--no-early-stopping "
                "measures for any goal)"
            )
        lines.append("")
        rows += table
        if reached := [result for result in found.values() if result]:
            drawn[f"{name}, error < {own:g}"] = reached
    write_table(folder / TABLE, rows)
    write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    if drawn:
        save_figure(study_figure(drawn), folder / PICTURE)
        lines.append(f"picture in {folder / PICTURE}, all numbers in {folder / TABLE}")
    else:
        lines.append(f"no batch size reached its goal: no picture; see {folder / TABLE}")
    return "\n".join(lines)


def _knees(found: Mapping[int, Result | None]) -> dict[str, Any]:
    """Return where a workload's scaling ends, as ``report.json`` has it."""
    reached = {result.batch_size: result.steps for result in found.values() if result}
    knees = scaling.find_knees(reached, found) if reached else None
    return {
        "steps_to_result": {str(size): steps for size, steps in reached.items()},
        "perfect_scaling_up_to": knees and knees.perfect,
        "perfect_scaling_rule": scaling.PERFECT_RULE,
        "useful_batch_size": knees and knees.useful,
        "useful_rule": scaling.USEFUL_RULE,
        "useful_is_seen": knees and knees.is_seen,
        "critical_batch_size": scaling.critical_batch(reached),
        "critical_rule": scaling.CRITICAL_RULE,
    }


def _row(study: Study, result: Result | None, goal: float) -> dict[str, Any]:
    about = {name: getattr(study, name) for name in ("dataset", "model", "optimizer", "batch_size")}
    names = ("steps_to_result", "examples_to_result", "trial_id", "learning_rate", "momentum")
    best = dict.fromkeys(names, "")
    if result:
        trial, steps = result.trial, result.steps
        rates = (trial.parameters["learning_rate"], trial.parameters.get("momentum", 0.0))
        values = (steps, steps * study.batch_size, trial.trial_id, *(f"{v:.6g}" for v in rates))
        best = dict(zip(names, values, strict=True))
    endings = [trial.status for trial in study.trials]
    counts = {status.lower(): endings.count(status) for status in scaling.STATUSES}
    return {**about, "goal": goal, **best, **counts}


def _describe(name: str, rows: Sequence[Mapping[str, Any]], report: Mapping[str, Any]) -> list[str]:
    """Return a workload's table and knees as lines; `report` is its part of ``report.json``."""
    shown = pandas.DataFrame(rows).drop(columns=_OF_WORKLOAD)
    shown["steps_to_result"] = [row["steps_to_result"] or "not reached" for row in rows]
    lines = [
        f"{name}: least steps to {report['objective']} < {report['goal']:g}, over the complete "
        "trials of each size",
        shown.to_string(index=False),
        "infeasible: diverged; incomplete: cut short, a better one was there before",
    ]
    if not report["steps_to_result"]:
        return [*lines, "no batch size reached the goal: a longer budget, or an easier goal"]
    more = "" if report["useful_is_seen"] else "; the largest tried: more may still be useful"
    lines += [
        f"perfect scaling up to {report['perfect_scaling_up_to']} ({scaling.PERFECT_RULE})",
        f"maximum useful batch {report['useful_batch_size']} ({scaling.USEFUL_RULE}){more}",
    ]
    if (critical := report["critical_batch_size"]) is not None:
        lines.append(f"critical batch {critical:.3g} ({scaling.CRITICAL_RULE})")
    return lines


def study_figure(results: Results) -> Figure:
    """Return a panel of steps per workload, and two of the best trials' learning rates."""
    count = len(results) + 2
    columns = min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(5.2 * columns, 4.6 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in panels[count:]:
        unused.remove()
    for axes, (name, own) in zip(panels, results.items(), strict=False):
        _draw_steps(axes, own)
        axes.set_title(name, fontsize=10)
    _draw_rates(panels[count - 2], results, "learning rate", lambda _: 1.0)
    # What momentum makes of a rate in the long run.
    label = "learning rate / (1 - momentum)"
    _draw_rates(panels[count - 1], results, label, lambda own: 1 / (1 - own.get("momentum", 0.0)))
    figure.suptitle(
        "Fewest steps to the goal, everything else tuned at each batch size; the learning rate "
        f"there\nperfect scaling up to {scaling.PERFECT_RULE}\nno gain from {scaling.USEFUL_RULE}",
        fontsize=10,
    )
    return figure


def _draw_steps(axes: Axes, own: Sequence[Result]) -> None:
    """Draw steps to result against batch size, the three regions shaded."""
    sizes = np.array([result.batch_size for result in own])
    steps = np.array([max(result.steps, 1) for result in own])  # 0 (at the start) has no log
    knees = scaling.find_knees(dict(zip(sizes.tolist(), steps.tolist(), strict=True)))
    first, last = sizes[0], sizes[-1]  # nothing is known beyond these
    ends = (first, min(knees.perfect, knees.useful), knees.useful, last)
    for (label, color), start, end in zip(_REGIONS, ends, ends[1:], strict=False):
        if end > start:
            axes.axvspan(start, end, color=color, alpha=0.15, lw=0, label=label)
    ideal = steps[0] * first / sizes
    axes.plot(sizes, ideal, "k--", lw=1, label="steps halve as the batch doubles")
    axes.plot(sizes, steps, "o-", color="#0072b2", label="measured")
    for size, count in zip(sizes, steps, strict=True):
        axes.annotate(f"{count:g}", (size, count), (0, 6), textcoords="offset points", fontsize=8)
    _finish(axes, sizes, "steps to the goal")
    axes.set_xlim(first / 1.3, last * 1.3)


def _draw_rates(
    axes: Axes, results: Results, label: str, factor: Callable[[Mapping[str, float]], float]
) -> None:
    """Draw the best trials' rates, each by its factor, and both rules of thumb."""
    for name, own in results.items():
        sizes = np.array([result.batch_size for result in own])
        given = [result.trial.parameters for result in own]
        rates = [parameters["learning_rate"] * factor(parameters) for parameters in given]
        growth = sizes / sizes[0]
        (drawn,) = axes.plot(sizes, rates, "o-", label=name.partition(",")[0])
        axes.plot(sizes, rates[0] * growth, "--", color=drawn.get_color(), lw=0.8)
        axes.plot(sizes, rates[0] * np.sqrt(growth), ":", color=drawn.get_color(), lw=1.2)
    axes.plot([], [], "k--", lw=0.8, label="in proportion to the batch")
    axes.plot([], [], "k:", lw=1.2, label="to its square root")
    sizes = sorted({result.batch_size for own in results.values() for result in own})
    _finish(axes, sizes, label)


def _finish(axes: Axes, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.xaxis.minorticks_off()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    # Show numbers between the decades only on an axis of about one decade.
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(plain if high < 30 * low else NullFormatter())
    axes.margins(y=0.1)
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel(label)
    axes.legend(fontsize=8, loc="best")
