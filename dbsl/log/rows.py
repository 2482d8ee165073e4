"""Rows of metrics.jsonl: how they are read, made from records, and summed up over an epoch.

Epochs count from 0 in the code, and from 1 in files and printed lines.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from dbsl.base.errors import SettingError, require
from dbsl.loss import check_free
from dbsl.plan.stages import Stage
from dbsl.plan.types import RESERVED, Plan, RoundReport, StepLine

# Fields of a plan in its row; `epoch_time_s` is its `time_s`.
PLAN_TOTALS = ("time_ratio", "epoch_time_s", "all_large_time_s", "equal_batch_time_s")
PLAN_TOTALS += ("idle_share", "small_share")
_FROM_1 = {"epoch", "from_epoch", "first_epoch"}  # counted from 1 in files, from 0 in the code
# Figures of an evaluation; other names are a loop's own metrics.
EVALUATED = ("accuracy", "loss", "samples", "resolution", "top5_accuracy", "time_s")
EVALUATED += ("ema_accuracy", "ema_loss", "train_accuracy", "train_loss")
# Times the loss of guessing. Such a loss means logits wrong by thousands for most samples:
# confident or overfitted models that still tell classes apart are far below it.
_NO_RESULT = 1000.0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, their epochs counted from 0 as everywhere in the code.

    A last line that a killed run left incomplete is dropped.
    """
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    try:
        return [in_code(json.loads(line)) for line in whole.splitlines()]
    except json.JSONDecodeError as error:
        text = f"{path} must have a row in JSON in each line, got {error.doc[:60]!r}"
        raise SettingError(text) from error


def for_people(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its epochs counted from 1, as the printed lines and trackers count."""
    names = {"end_epoch": "last_epoch"}
    return {names.get(k, k): v + 1 if k in _FROM_1 else v for k, v in row.items()}


def in_code(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row that `for_people` was given."""
    names = {"last_epoch": "end_epoch"}
    return {names.get(k, k): v - 1 if k in _FROM_1 else v for k, v in row.items()}


def evaluation_row(metrics: Mapping[str, Any], resolution: int) -> dict[str, Any]:
    """Return the results of a loop's `evaluate` as plain numbers; its own metrics come last."""
    missing = {"accuracy", "loss", "samples"} - metrics.keys()
    text = "evaluate must return accuracy, loss and samples"
    require(not missing, text, f"no {min(missing, default='')}")
    own = [name for name in metrics if name not in EVALUATED or name == "resolution"]
    row = {"resolution": resolution}
    for name in [*(name for name in metrics if name not in own), *own]:
        value = metrics[name]
        if name in own:
            check_free(name, "a metric of evaluate", {"resolution": "evaluate itself"})
        # NumPy's and torch's numbers become Python's.
        value = value if getattr(value, "ndim", 1) else value.item()
        require(isinstance(value, int | float), f"{name} of evaluate must be a number", value)
        row[name] = value
    return row


def plan_row(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Return a stage and its plan as a row."""
    values = asdict(stage)
    totals = {n: getattr(plan, n.removeprefix("epoch_")) for n in PLAN_TOTALS}
    workers = [{"worker": index, **asdict(worker)} for index, worker in enumerate(plan.workers)]
    row = {"stage": values.pop("index"), **values, **totals}
    return row | {"notes": plan.notes, "workers": workers}


def round_row(report: RoundReport) -> dict[str, Any]:
    """Return a round's report as a row, without what was not measured."""
    row = asdict(report)
    del row["fault"], row["lines"], row["figures"]  # printed, or in rows of their own
    seldom = ("refused", "micro_batch", "micro_square", "gradient_batch", "gradient_square")
    given = {name: value for name, value in row.items() if value or name not in seldom}
    return given | report.figures


def joined_row(reports: Sequence[RoundReport], values: Mapping[str, float]) -> dict[str, Any]:
    """Return a worker's pushes of an epoch as one round: its last report, with their `values`."""
    refused = all(report.refused for report in reports)
    row = round_row(replace(reports[-1], refused=refused))
    names = {field.name for field in fields(RoundReport)} | reports[-1].figures.keys()
    return row | {name: values[name] for name in values if name in names} | {"round": 0}


def report_from_row(row: Mapping[str, Any]) -> RoundReport:
    """Return a round's report from its row in a file; values that were not finite are nan."""
    names = {field.name for field in fields(RoundReport)} & row.keys()
    found = {name: math.nan if row[name] is None else row[name] for name in names}
    return RoundReport(**found, figures=figures_of(row))


def step_row(line: StepLine) -> dict[str, Any]:
    """Return a step line as a row."""
    row = line._asdict()
    return row | row.pop("figures")


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss function's figures in a round's or step's row."""
    return {n: math.nan if row[n] is None else row[n] for n in row if n not in RESERVED}


def together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return the sums and means over rounds.

    Loss and figures are means over the samples of accepted rounds, or of all if none was.
    """
    samples = sum(report.samples for report in reports)
    taken = _taken(reports)
    losses = sum(report.loss * report.samples for report in taken)
    of = sum(report.samples for report in taken)
    sums = ("time_s", "predicted_time_s", "compute_time_s", "wait_time_s", "steps")
    return {
        "loss": losses / of if of else math.nan,
        **{name: sum(getattr(report, name) for report in reports) for name in sums},
        "staleness": sum(report.staleness for report in reports) / max(len(reports), 1),
        "local_batch_size": reports[-1].local_batch_size if reports else 0,
        "samples": samples,
        **figures_together(reports),
    }


def _taken(reports: Sequence[RoundReport]) -> Sequence[RoundReport]:
    return [report for report in reports if not report.refused] or reports


def figures_together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return the loss function's figures, each a mean over the samples of rounds with it."""
    reports, found = _taken(reports), {}
    for name in dict.fromkeys(name for report in reports for name in report.figures):
        own = [(r.figures[name], r.samples) for r in reports if name in r.figures]
        samples = sum(count for _, count in own)
        found[name] = sum(v * count for v, count in own) / samples if samples else math.nan
    return found


def last_learning_rate(reports: Sequence[RoundReport]) -> float:
    """Return the learning rate of an epoch's last step; if workers differ, the highest."""
    last = max((report.round for report in reports), default=0)
    rates = (report.learning_rate for report in reports if report.round == last)
    return max(rates, default=math.nan)


def of_workers(reports: Sequence[RoundReport]) -> dict[int, dict[str, float]]:
    """Return each worker's sums and means over rounds sorted by worker, with its shares."""
    groups = itertools.groupby(reports, key=lambda report: report.worker)
    workers = {worker: together(list(group)) for worker, group in groups}
    longest = max((values["compute_time_s"] for values in workers.values()), default=0.0)
    samples = sum(values["samples"] for values in workers.values())
    for values in workers.values():
        values["share"] = values["samples"] / max(samples, 1)
        values["idle_time_share"] = 1 - values["compute_time_s"] / longest if longest else 0.0
    return workers


def times_row(workers: Mapping[int, Mapping[str, float]], plan: Plan) -> dict[str, Any]:
    """Return the workers' times, and the small and large ones' means, measured and predicted."""
    row: dict[str, Any] = {}
    # If a resumed run finished the epoch with fewer workers, some have no plan.
    planned = dict(enumerate(plan.workers))
    for small, name in ((True, "small"), (False, "large")):
        own = [v for w, v in workers.items() if w in planned and planned[w].small == small]
        if own:
            row[f"{name}_workers_time_s"] = sum(v["time_s"] for v in own) / len(own)
            predicted = sum(v["predicted_time_s"] for v in own) / len(own)
            row[f"predicted_{name}_workers_time_s"] = predicted
    for name in ("compute_time_s", "wait_time_s", "idle_time_share"):
        row[f"workers_{name}"] = {worker: values[name] for worker, values in workers.items()}
    return row


def no_result(summary: Mapping[str, float]) -> str | None:
    """Return why a run's summary shows no trained model, or None."""
    loss = summary.get("final_loss", 0.0)
    if loss is None or not math.isfinite(loss):  # JSON has no number for it
        return "the loss of the final evaluation is not finite"
    classes = summary["classes"]
    if classes > 1 and loss > _NO_RESULT * math.log(classes):
        return (
            f"the loss of the final evaluation is {loss:.3g}, more than {_NO_RESULT:,.0f} times "
            f"that of guessing among {classes} classes"
        )
    if summary.get("last_epoch_refused"):
        return "every round of the last epoch was refused, since loss or weights were not finite"
    return None


def strict_numbers(value: Any) -> Any:
    """Return `value` in JSON's own types, with null for numbers that JSON lacks."""
    if isinstance(value, Mapping):
        return {str(key): strict_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_numbers(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
