"""Results of a study: a table, the knees with their rules, files and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from dbsl.base.errors import SettingError
from dbsl.base.files import save_figure, write_table, write_text
from dbsl.config.fields import refuse
from dbsl.tools.study import scaling
from dbsl.tools.study.scaling import Result, Study

REPORT, TABLE = "report.json", "results.csv"
_ENDINGS = {"COMPLETE": "complete", "INCOMPLETE": "cut short", "INFEASIBLE": "diverged"}
_REGIONS = (
    ("perfect scaling", "#009e73"),
    ("diminishing returns", "#e69f00"),
    ("no gain", "#999999"),
)
_COLORS = matplotlib.color_sequences["tab10"]
Budgets = tuple[int | None, int | None]  # steps, examples
Results = Mapping[str, Sequence[Result]]  # by workload, batch sizes ascending; none is empty


def write_report(
    workloads: Mapping[str, Sequence[Study]],
    folder: Path,
    goal: float | None,
    objective: str = scaling.OBJECTIVE,
    budgets: Budgets = (None, None),
) -> str:
    """Write ``report.json``, ``results.csv`` and ``plots/``; return the report for people.

    `goal` is the value of `objective` to fall under; None, or where trials ended at it: each
    study's own. Measurements after the budgets do not count.
    """
    steps, examples = (math.inf if budget is None else budget for budget in budgets)
    lines, rows, report, results, goals = [], [], {}, {}, {}
    for name, studies in workloads.items():
        goals[name] = _goal_of(name, studies, goal, objective)
        found = {
            study.batch_size: scaling.steps_to_result(
                study, goals[name], objective=objective, step_budget=steps, example_budget=examples
            )
            for study in studies
        }
        results[name] = [result for result in found.values() if result is not None]
        rows += [_row(study, found[study.batch_size], goals[name]) for study in studies]
        report[name] = {"goal": goals[name], "objective": objective, **_knees(found)}
        lines += _describe(name, studies, found, report[name])
        if goal not in (None, goals[name]):
            lines.append(
                f"its goal is kept, not {goal:g}: its trials ended at it (--no-early-stopping "
                "measures for any goal)"
            )
        lines += [
            f"warning: at batch {result.batch_size} the best trial's {', '.join(result.at_edge)} "
            f"lies {scaling.EDGE_RULE}: a wider range may give fewer steps"
            for result in found.values()
            if result and result.at_edge
        ]
        lines.append("")
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / TABLE, rows)
    write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    drawn = {name: own for name, own in results.items() if own}
    if drawn:
        save_figure(steps_figure(drawn, goals), folder / "plots/steps.png")
        save_figure(rates_figure(drawn), folder / "plots/learning_rate.png")
        lines.append(f"pictures in {folder / 'plots'}, all numbers in {folder / TABLE}")
    else:
        lines.append(f"no batch size reached its goal: no pictures; see {folder / TABLE}")
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


def _goal_of(name: str, studies: Sequence[Study], goal: float | None, objective: str) -> float:
    ended, other = any(study.ends_at_goal for study in studies), objective != scaling.OBJECTIVE
    left = f"objective must be left out, since trials of {name} ended at their goal"
    given = f"goal_error must be given with objective {objective}"
    refuse([(other and ended, left, objective), (other and goal is None, given, goal)])
    if goal is not None and not ended:
        return goal
    goals = {study.goal for study in studies}
    if len(goals) > 1 or None in goals:
        raise SettingError(f"goal_error must be given, since the studies of {name} do not name one")
    return goals.pop()


def _row(study: Study, result: Result | None, goal: float) -> dict[str, Any]:
    parameters = result.trial.parameters if result else {}
    return {
        "dataset": study.dataset,
        "model": study.model,
        "optimizer": study.optimizer,
        "batch_size": study.batch_size,
        "goal": goal,
        "steps_to_result": result.steps if result else "",
        "examples_to_result": result.examples if result else "",
        "trial_id": result.trial.trial_id if result else "",
        "learning_rate": f"{parameters['learning_rate']:.6g}" if result else "",
        "momentum": f"{parameters.get('momentum', 0.0):.6g}" if result else "",
        "at_edge": " ".join(result.at_edge) if result else "",
        **{status.lower(): count for status, count in _endings(study).items()},
    }


def _endings(study: Study) -> dict[str, int]:
    statuses = [trial.status for trial in study.trials]
    return {status: statuses.count(status) for status in _ENDINGS}


def _describe(
    name: str,
    studies: Sequence[Study],
    found: Mapping[int, Result | None],
    report: Mapping[str, Any],
) -> list[str]:
    """Return a workload's table and knees as lines; `report` is its part of ``report.json``."""
    goal = f"{report['objective']} < {report['goal']:g}"
    lines = [
        f"{name}: least steps to {goal}, over the complete trials of each size",
        f"{'batch':>7} {'steps':>8} {'examples':>10} {'saved':>6} {'lr':>9} {'momentum':>9} "
        f"{'lr/(1-m)':>9}  trials",
    ]
    first = next((result for result in found.values() if result), None)
    for study in studies:
        result = found[study.batch_size]
        ended = [f"{count} {_ENDINGS[how]}" for how, count in _endings(study).items() if count]
        trials = ", ".join(ended) or "none"
        if result is None:
            lines.append(f"{study.batch_size:>7} {'not reached':>19}{' ' * 37}  {trials}")
            continue
        parameters = result.trial.parameters
        saved = first.examples / max(result.examples, 1)  # 1: steps fell as the batch grew
        lines.append(
            f"{result.batch_size:>7} {result.steps:>8} {result.examples:>10} {saved:>6.2f} "
            f"{parameters['learning_rate']:>9.3g} {parameters.get('momentum', 0.0):>9.4g} "
            f"{scaling.effective_rate(parameters):>9.3g}  {trials}"
        )
    if not report["steps_to_result"]:
        return [*lines, "no batch size reached the goal: a longer budget, or an easier goal"]
    more = "" if report["useful_is_seen"] else "; the largest tried: more may still be useful"
    lines += [
        "saved: perfect scaling is 1.00; below, a batch costs more samples than the smallest one",
        f"perfect scaling up to {report['perfect_scaling_up_to']} ({scaling.PERFECT_RULE})",
        f"maximum useful batch {report['useful_batch_size']} ({scaling.USEFUL_RULE}){more}",
    ]
    if (critical := report["critical_batch_size"]) is not None:
        lines.append(f"critical batch {critical:.3g} ({scaling.CRITICAL_RULE})")
    return lines


def steps_figure(results: Results, goals: Mapping[str, float]) -> Figure:
    """Return steps to result against batch size, a panel per workload, the three regions shaded."""
    figure, panels = _panels(len(results))
    for axes, (name, own) in zip(panels, results.items(), strict=True):
        sizes, steps = _columns(own)
        knees = scaling.find_knees(dict(zip(sizes.tolist(), steps.tolist(), strict=True)))
        first, last = sizes[0], sizes[-1]  # nothing is known beyond these
        ends = (first, min(knees.perfect, knees.useful), knees.useful, last)
        for (label, color), start, end in zip(_REGIONS, ends, ends[1:], strict=False):
            if end > start:
                axes.axvspan(start, end, color=color, alpha=0.15, lw=0, label=label)
        perfect = steps[0] * sizes[0] / sizes
        axes.plot(sizes, perfect, "k--", lw=1, label="steps halve as the batch doubles")
        axes.plot(sizes, steps, "o-", color="#0072b2", label="measured")
        for size, count in zip(sizes, steps, strict=True):
            axes.annotate(
                f"{count:g}", (size, count), (0, 6), textcoords="offset points", fontsize=8
            )
        _finish(axes, sizes, f"{name}, error < {goals[name]:g}", "steps to the goal")
        axes.set_xlim(first / 1.3, last * 1.3)
        axes.legend(fontsize=8, loc="lower left")
    figure.suptitle(
        "Fewest steps to the goal, everything else tuned at each batch size\n"
        f"perfect scaling up to {scaling.PERFECT_RULE}\nno gain from {scaling.USEFUL_RULE}",
        fontsize=10,
    )
    return figure


def rates_figure(results: Results) -> Figure:
    """Return the best trial's learning rate, alone and over 1 - momentum, with both rules."""
    figure, panels = _panels(2)
    kinds = (
        ("learning rate", lambda parameters: parameters["learning_rate"]),
        ("learning rate / (1 - momentum)", scaling.effective_rate),
    )
    for axes, (label, rate) in zip(panels, kinds, strict=True):
        for (name, own), color in zip(results.items(), cycle(_COLORS)):
            sizes, _ = _columns(own)
            rates = [rate(result.trial.parameters) for result in own]
            growth = sizes / sizes[0]
            axes.plot(sizes, rates, "o-", color=color, label=name)
            axes.plot(sizes, rates[0] * growth, "--", color=color, lw=0.8)
            axes.plot(sizes, rates[0] * np.sqrt(growth), ":", color=color, lw=1.2)
        sizes = np.array(sorted({r.batch_size for own in results.values() for r in own}))
        _finish(axes, sizes, label, label)
        axes.plot([], [], "k--", lw=0.8, label="in proportion to the batch")
        axes.plot([], [], "k:", lw=1.2, label="to its square root")
        axes.legend(fontsize=8)
    figure.suptitle("Learning rate of the trial with the fewest steps", fontsize=10)
    return figure


def _panels(count: int) -> tuple[Figure, Sequence[Axes]]:
    columns = min(count, 3)
    rows = -(-count // columns)
    size = (max(7.5, 5.2 * columns), 4.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for unused in panels[count:]:
        unused.remove()
    return figure, panels[:count]


def _columns(own: Sequence[Result]) -> tuple[np.ndarray, np.ndarray]:
    steps = [max(r.steps, 1) for r in own]  # 0 steps (met by the initial weights) have no log
    return np.array([r.batch_size for r in own]), np.array(steps)


def _finish(axes: Axes, sizes: np.ndarray, title: str, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_major_formatter(plain)
    # Show numbers between the decades only on an axis of about one decade.
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(plain if high < 30 * low else NullFormatter())
    axes.margins(y=0.1)
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=10)
