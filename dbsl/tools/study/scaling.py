"""Steps to result against batch size: the published definition, where scaling ends, the report.

Shallue, Lee, Antognini, Sohl-Dickstein, Frostig, Dahl: Measuring the Effects of Data
Parallelism on Neural Network Training, JMLR 20(112), 2019 (arXiv 1811.03600). A *workload* is a
dataset, a model and an optimizer; a *study* is the search of one workload at one batch size; a
*trial* is one training in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsl.base.errors import require
from dbsl.base.files import save_figure, write_table, write_text

STATUSES = ("COMPLETE", "INCOMPLETE", "INFEASIBLE")  # finished, cut short, diverged
OBJECTIVE = "val/classification_error"
PERFECT, USEFUL = 1.2, 1.1  # factors of the first two rules
RULES = {
    "perfect_scaling": f"the largest b with steps(b) <= {PERFECT} * steps(b0) * b0 / b",
    "useful": f"the smallest b with steps(b) <= {USEFUL} * min steps",
    "critical": "B of the fit steps(b) = S_min * (1 + B / b): there twice S_min, twice the samples",
}
TABLE, PICTURE = "results.csv", "plots/study.png"
Rows = Sequence[Mapping[str, Any]]  # of results.csv: one workload's, batch sizes ascending


@dataclass(frozen=True)
class Trial:
    """One training run, with its metaparameters and its measurements."""

    trial_id: int  # in its study, from 1
    status: str  # one of `STATUSES`
    steps: int  # taken
    parameters: Mapping[str, Any]  # metaparameters, ``learning_rate`` among them
    measurements: pandas.DataFrame = field(repr=False)  # ``step`` and the metrics, float64

    def reached_at(self, goal: float) -> float:
        """Return the first measured step with an error under the goal, or inf."""
        good = self.measurements["step"][self.measurements[OBJECTIVE] < goal]  # NaN is not under it
        return float(good.min()) if len(good) else math.inf


@dataclass(frozen=True)
class Study:
    """All trials of a workload at one batch size."""

    dataset: str
    model: str
    optimizer: str
    batch_size: int
    trials: tuple[Trial, ...]  # by ascending number
    goal: float | None = None  # error that its trials should fall under, if the study has one
    # Whether trials ended there, or where they could not be the first any more. They then say
    # nothing about another goal, be it easier or harder.
    ends_at_goal: bool = False

    @property
    def workload(self) -> str:
        """The workload's name."""
        return f"{self.dataset}/{self.model}/{self.optimizer}"

    def best_trial(self, goal: float) -> Trial | None:
        """Return the trial that was first measured strictly under the goal, or None.

        Ties go to the trial with the lower number. Trials that diverged or were cut short are
        ignored. Its `reached_at` is the steps to result.
        """
        complete = (trial for trial in self.trials if trial.status == "COMPLETE")
        best = min(complete, key=lambda trial: trial.reached_at(goal), default=None)
        return best if best and math.isfinite(best.reached_at(goal)) else None


def find_knees(steps: Mapping[int, int | None]) -> dict[str, Any]:
    """Return where scaling ends, in the form of ``report.json``.

    `steps` has steps to result by batch size; None: no trial reached the goal. b0 is the smallest
    batch size that did. `useful_is_seen`: a size above the useful one was tried.
    """
    reached = {size: count for size, count in steps.items() if count is not None}
    first, least = min(reached, default=0), min(reached.values(), default=0)
    perfect = [b for b, s in reached.items() if s <= PERFECT * reached[first] * first / b]
    useful = min((b for b, s in reached.items() if s <= USEFUL * least), default=None)
    return {
        "steps_to_result": {str(size): count for size, count in reached.items()},
        "perfect_scaling_up_to": max(perfect, default=None),
        "perfect_scaling_rule": RULES["perfect_scaling"],
        "useful_batch_size": useful,
        "useful_rule": RULES["useful"],
        "useful_is_seen": useful and useful < max(steps),
        "critical_batch_size": critical_batch(reached),
        "critical_rule": RULES["critical"],
    }


def critical_batch(steps: Mapping[int, int]) -> float | None:
    """Return the batch size at which training takes twice the fewest steps and samples.

    It is B of the curve steps(b) = S_min*(1 + B/b) of McCandlish et al. (arXiv 1812.06162, eq.
    2.11), fitted by least squares of relative errors. The gradient noise scale predicts it. None:
    the sizes do not show both ends of the curve.
    """
    if len(steps) < 3 or min(steps.values()) < 1:
        return None
    sizes, counts = np.array(list(steps), dtype=float), np.array(list(steps.values()), dtype=float)
    columns = np.stack([1 / counts, 1 / (sizes * counts)], axis=1)
    (fewest, slope), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    return float(slope / fewest) if fewest > 0 and slope > 0 else None


def write_report(workloads: Mapping[str, Sequence[Study]], folder: Path, goal: float | None) -> str:
    """Write ``report.json``, ``results.csv`` and the picture; return the report as text.

    `goal` is the error to fall under; each study's own if None, or if trials ended there.
    """
    lines, tables, report = [], {}, {}
    for name, studies in workloads.items():
        own = goal
        if goal is None or any(study.ends_at_goal for study in studies):
            goals = {study.goal for study in studies}
            text = f"goal_error must be given, since the studies of {name} do not name one"
            require(len(goals) == 1 and None not in goals, text, "none")
            (own,) = goals
        rows = tables[name] = [_row(study, own) for study in studies]
        knees = find_knees({row["batch_size"]: row["steps_to_result"] for row in rows})
        report[name] = {"goal": own, "objective": OBJECTIVE, **knees}
        lines += _describe(name, rows, report[name])
        if goal not in (None, own):
            lines.append(f"its goal is kept, not {goal:g}: its trials ended at it")
        lines.append("")
    write_table(folder / TABLE, [row for rows in tables.values() for row in rows])
    write_text(folder / "report.json", json.dumps(report, indent=2) + "\n")
    reached = {name: [row for row in rows if row["trial_id"]] for name, rows in tables.items()}
    drawn = {name: rows for name, rows in reached.items() if rows}
    if not drawn:
        return "\n".join([*lines, f"no batch size reached its goal; see {folder / TABLE}"])
    save_figure(study_figure(drawn, report), folder / PICTURE)
    return "\n".join([*lines, f"picture in {folder / PICTURE}, all numbers in {folder / TABLE}"])


def _row(study: Study, goal: float) -> dict[str, Any]:
    """Return a row of the table, with blanks if no trial reached the goal at this size."""
    best, steps, examples, rate, momentum = study.best_trial(goal), None, None, None, None
    if best is not None:
        steps = int(best.reached_at(goal))
        examples, rate = steps * study.batch_size, f"{best.parameters['learning_rate']:.6g}"
        momentum = f"{best.parameters.get('momentum', 0.0):.6g}"
    endings = [trial.status for trial in study.trials]
    return {
        **{n: getattr(study, n) for n in ("dataset", "model", "optimizer", "batch_size")},
        "goal": goal,
        "steps_to_result": steps,
        "examples_to_result": examples,
        "trial_id": best and best.trial_id,
        "learning_rate": rate,
        "momentum": momentum,
        **{status.lower(): endings.count(status) for status in STATUSES},
    }


def _describe(name: str, rows: Rows, report: Mapping[str, Any]) -> list[str]:
    """Return a workload's table and knees as lines; `report` is its part of ``report.json``."""
    shown = pandas.DataFrame(rows, dtype=object).drop(columns=["dataset", "model", "optimizer"])
    lines = [
        f"{name}: least steps to an error < {report['goal']:g}, over the complete trials",
        shown.where(shown.notna(), "-").to_string(index=False),
        "infeasible: diverged; incomplete: cut short, a better one was there before",
    ]
    if not report["steps_to_result"]:
        return [*lines, "no batch size reached the goal: a longer budget, or an easier goal"]
    more = "" if report["useful_is_seen"] else "; the largest tried: more may still be useful"
    critical = report["critical_batch_size"] and f"{report['critical_batch_size']:.3g}"
    return [
        *lines,
        f"perfect scaling up to {report['perfect_scaling_up_to']} ({RULES['perfect_scaling']})",
        f"maximum useful batch {report['useful_batch_size']} ({RULES['useful']}){more}",
        f"critical batch {critical} ({RULES['critical']})",
    ]


def study_figure(tables: Mapping[str, Rows], report: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Return a panel of steps per workload, and one of the best trials' learning rates."""
    figure = Figure(figsize=(5.2 * (len(tables) + 1), 4.6), layout="constrained")
    *panels, rates = figure.subplots(1, len(tables) + 1)
    for axes, (name, rows) in zip(panels, tables.items(), strict=True):
        _draw_steps(axes, rows, report[name])
        axes.set_title(f"{name}, error < {report[name]['goal']:g}", fontsize=10)
    _draw_rates(rates, tables)
    figure.suptitle("Fewest steps to the goal, all else tuned at each batch size; the rate there")
    return figure


def _draw_steps(axes: Axes, rows: Rows, report: Mapping[str, Any]) -> None:
    """Draw steps to result against batch size, and where scaling ends."""
    sizes = np.array([row["batch_size"] for row in rows])
    steps = np.array([max(row["steps_to_result"], 1) for row in rows])  # 0 (at the start): no log
    axes.axvspan(sizes[0], report["perfect_scaling_up_to"], alpha=0.15, label="perfect scaling")
    if report["useful_is_seen"]:
        axes.axvspan(report["useful_batch_size"], sizes[-1], color="k", alpha=0.1, label="no gain")
    ideal = steps[0] * sizes[0] / sizes
    axes.plot(sizes, ideal, "k--", lw=1, label="steps halve as the batch doubles")
    axes.plot(sizes, steps, "o-", label="measured")
    for size, count in zip(sizes, steps, strict=True):
        axes.annotate(f"{count:g}", (size, count), (0, 6), textcoords="offset points", fontsize=8)
    _finish(axes, sizes, "steps to the goal")


def _draw_rates(axes: Axes, tables: Mapping[str, Rows]) -> None:
    """Draw the best effective rates, lr / (1 - momentum), and both rules of thumb."""
    for name, rows in tables.items():
        sizes = np.array([row["batch_size"] for row in rows])
        rates = [float(row["learning_rate"]) / (1 - float(row["momentum"])) for row in rows]
        growth = sizes / sizes[0]
        (drawn,) = axes.plot(sizes, rates, "o-", label=name)
        axes.plot(sizes, rates[0] * growth, "--", color=drawn.get_color(), lw=0.8)
        axes.plot(sizes, rates[0] * np.sqrt(growth), ":", color=drawn.get_color(), lw=1.2)
    axes.plot([], [], "k--", lw=0.8, label="in proportion to the batch")
    axes.plot([], [], "k:", lw=1.2, label="to its square root")
    sizes = sorted({row["batch_size"] for rows in tables.values() for row in rows})
    _finish(axes, sizes, "learning rate / (1 - momentum)")


def _finish(axes: Axes, sizes: Sequence[int], label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes], fontsize=8)
    axes.xaxis.minorticks_off()
    axes.margins(y=0.1)
    axes.grid(alpha=0.3, which="both")
    axes.set_xlabel("batch size (samples)")
    axes.set_ylabel(label)
    axes.legend(fontsize=8, loc="best")
