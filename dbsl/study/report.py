"""Results of a study: a table, the knees with their rules, files and pictures."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.files import write_table, write_text
from dbsl.study.scaling import (
    CRITICAL_RULE,
    EDGE_RULE,
    OBJECTIVE,
    PERFECT_RULE,
    USEFUL_RULE,
    Result,
    Study,
    critical_batch,
    effective_rate,
    find_knees,
    steps_to_result,
)

REPORT, TABLE = "report.json", "results.csv"
Budgets = tuple[int | None, int | None]  # steps, examples


def write_report(
    workloads: Mapping[str, Sequence[Study]],
    folder: Path,
    goal: float | None,
    objective: str = OBJECTIVE,
    budgets: Budgets = (None, None),
) -> str:
    """Write ``report.json``, ``results.csv`` and ``plots/``; return the report for people.

    Args:
        workloads: Studies by workload.
        folder: Where to.
        goal: Value to fall under; None, or where trials ended at it: each study's own.
        objective: Column of the measurements that the goal is about.
        budgets: Steps and examples after which measurements do not count.

    Raises:
        SettingError: If there is no goal, or a workload's studies have different ones.
    """
    from dbsl.study.plots import draw_study  # slow to import

    steps, examples = (math.inf if budget is None else budget for budget in budgets)
    lines, rows, report, results, goals = [], [], {}, {}, {}
    for name, studies in workloads.items():
        goals[name] = _goal_of(name, studies, goal)
        found = {
            study.batch_size: steps_to_result(
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
        lines += [*_edge_warnings(found), ""]
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / TABLE, rows)
    write_text(folder / REPORT, json.dumps(report, indent=2) + "\n")
    drawn = {name: own for name, own in results.items() if own}
    if drawn:
        draw_study(drawn, goals, folder / "plots")
        lines.append(f"pictures in {folder / 'plots'}, all numbers in {folder / TABLE}")
    else:
        lines.append(f"no batch size reached its goal: no pictures; see {folder / TABLE}")
    return "\n".join(lines)


def _knees(found: Mapping[int, Result | None]) -> dict[str, Any]:
    """Return where a workload's scaling ends, as ``report.json`` has it."""
    reached = {result.batch_size: result.steps for result in found.values() if result}
    knees = find_knees(reached, found) if reached else None
    return {
        "steps_to_result": {str(size): steps for size, steps in reached.items()},
        "perfect_scaling_up_to": knees and knees.perfect,
        "perfect_scaling_rule": PERFECT_RULE,
        "useful_batch_size": knees and knees.useful,
        "useful_rule": USEFUL_RULE,
        "useful_is_seen": knees and knees.is_seen,
        "critical_batch_size": critical_batch(reached),
        "critical_rule": CRITICAL_RULE,
    }


def _goal_of(name: str, studies: Sequence[Study], goal: float | None) -> float:
    if goal is not None and not any(study.ends_at_goal for study in studies):
        return goal
    goals = {study.goal for study in studies}
    if len(goals) > 1 or None in goals:
        raise SettingError(f"goal_error must be given, since the studies of {name} do not name one")
    return goals.pop()


def _row(study: Study, result: Result | None, goal: float) -> dict[str, Any]:
    parameters = result.trial.parameters if result else {}
    states = [trial.status for trial in study.trials]
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
        **{s.lower(): states.count(s) for s in ("COMPLETE", "INCOMPLETE", "INFEASIBLE")},
    }


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
        states = [trial.status for trial in study.trials]
        ended = {
            "complete": states.count("COMPLETE"),
            "cut short": states.count("INCOMPLETE"),
            "diverged": states.count("INFEASIBLE"),
        }
        trials = ", ".join(f"{count} {state}" for state, count in ended.items() if count) or "none"
        if result is None:
            lines.append(f"{study.batch_size:>7} {'not reached':>19}{' ' * 37}  {trials}")
            continue
        parameters = result.trial.parameters
        saved = first.examples / max(result.examples, 1)  # 1: steps fell as the batch grew
        lines.append(
            f"{result.batch_size:>7} {result.steps:>8} {result.examples:>10} {saved:>6.2f} "
            f"{parameters['learning_rate']:>9.3g} {parameters.get('momentum', 0.0):>9.4g} "
            f"{effective_rate(parameters):>9.3g}  {trials}"
        )
    if not report["steps_to_result"]:
        return [*lines, "no batch size reached the goal: a longer budget, or an easier goal"]
    more = "" if report["useful_is_seen"] else "; the largest tried: more may still be useful"
    lines += [
        "saved: perfect scaling is 1.00; below, a batch costs more samples than the smallest one",
        f"perfect scaling up to {report['perfect_scaling_up_to']} ({PERFECT_RULE})",
        f"maximum useful batch {report['useful_batch_size']} ({USEFUL_RULE}){more}",
    ]
    if (critical := report["critical_batch_size"]) is not None:
        lines.append(f"critical batch {critical:.3g} ({CRITICAL_RULE})")
    return lines


def _edge_warnings(found: Mapping[int, Result | None]) -> list[str]:
    return [
        f"warning: at batch {result.batch_size} the best trial's {', '.join(result.at_edge)} lies "
        f"{EDGE_RULE}: a wider one may give fewer steps"
        for result in found.values()
        if result and result.at_edge
    ]
