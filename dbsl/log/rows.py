"""Records as rows of metrics.jsonl and as words for people."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.words import short_loss
from dbsl.plan.stages import Stage
from dbsl.plan.types import RESERVED, Plan, RoundReport, StepLine
from dbsl.run.evaluation import Evaluation, further_sets, more_in_words

MAX_PRINTED_WORKERS = 8
_TOLERANCE = 0.50  # relative, of a worker's time in an epoch
PLAN_TOTALS = (
    *("time_ratio", "epoch_time_s", "all_large_time_s", "equal_batch_time_s"),
    *("idle_share", "small_share"),
)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, their epochs counted from 0 as everywhere in the code.

    A last line that a killed run left half is dropped, and so is a round that an ``undone`` event
    behind it tells of: no weights came of it, and its samples were trained on again.

    Raises:
        SettingError: If another line is not JSON; the message names it.
    """
    records = []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise SettingError(f"{path} line {number} must be JSON, got {line[:60]!r}") from error
    return [in_code(record) for record in _without_undone(records)]


def _without_undone(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    undone: Counter[tuple[Any, ...]] = Counter()
    kept = []
    for record in reversed(records):
        place = tuple(record.get(name) for name in ("worker", "epoch", "round"))
        if record["event"] == "undone":
            undone[place] += 1
        elif record["event"] == "round" and undone[place]:
            undone[place] -= 1
            continue
        kept.append(record)
    return kept[::-1]


def for_people(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with its epochs counted from 1, as the printed lines and trackers count."""
    names = {"end_epoch": "last_epoch"}
    shifted = {"epoch", "from_epoch", "first_epoch"}
    return {names.get(k, k): v + 1 if k in shifted else v for k, v in row.items()}


def in_code(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it was before `for_people`."""
    names = {"last_epoch": "end_epoch"}
    shifted = {"epoch", "from_epoch", "first_epoch"}
    return {names.get(k, k): v - 1 if k in shifted else v for k, v in row.items()}


def plan_row(stage: Stage, plan: Plan) -> dict[str, Any]:
    """Return a stage and its plan as a row."""
    values = asdict(stage)
    found = (plan.time_ratio, plan.time_s, plan.all_large_time_s, plan.equal_batch_time_s)
    totals = dict(zip(PLAN_TOTALS, (*found, plan.idle_share, plan.small_share), strict=True))
    row = {"stage": values.pop("index"), **values, **totals, "notes": plan.notes}
    return row | {"workers": worker_rows(plan)}


def round_row(report: RoundReport) -> dict[str, Any]:
    """Return a round's report as a row, without what was not measured."""
    row = asdict(report)
    seldom = ("refused", "micro_batch", "micro_square", "gradient_batch", "gradient_square")
    seldom += ("logged", "lines")
    del row["fault"]  # said in words
    figures = row.pop("figures")
    return {name: value for name, value in row.items() if value or name not in seldom} | figures


def report_from_row(row: Mapping[str, Any]) -> RoundReport:
    """Return a round's report from its row in a file; what was not finite is nan."""
    names = {field.name for field in fields(RoundReport)} & row.keys()
    found = {name: math.nan if row[name] is None else row[name] for name in names}
    return RoundReport(**found, figures=figures_of(row))


def step_row(line: StepLine) -> dict[str, Any]:
    """Return a step line as a row."""
    row = line._asdict()
    return row | row.pop("figures")


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the loss function's figures in a round's row or in a step's."""
    return {n: math.nan if row[n] is None else row[n] for n in row if n not in RESERVED}


def worker_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for each worker of a plan."""
    return [{"worker": index, **asdict(worker)} for index, worker in enumerate(plan.workers)]


def given_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return what rounds come to together; loss and figures are means over their samples."""
    samples = sum(report.samples for report in reports)
    losses = sum(report.loss * report.samples for report in reports)
    sums = ("time_s", "predicted_time_s", "compute_time_s", "wait_time_s", "steps")
    return {
        "loss": losses / samples if samples else math.nan,
        **{name: sum(getattr(report, name) for report in reports) for name in sums},
        "staleness": sum(report.staleness for report in reports) / max(len(reports), 1),
        "local_batch_size": reports[-1].local_batch_size if reports else 0,
        "samples": samples,
        **figures_together(reports),
    }


def figures_together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return the loss function's figures, each the mean over the samples of the rounds with it."""
    found = {}
    for name in dict.fromkeys(name for report in reports for name in report.figures):
        own = [(r.figures[name], r.samples) for r in reports if name in r.figures]
        samples = sum(count for _, count in own)
        found[name] = sum(v * count for v, count in own) / samples if samples else math.nan
    return found


def last_learning_rate(reports: Sequence[RoundReport]) -> float:
    """Return the learning rate of an epoch's last step; of workers with unlike ones the highest."""
    last = max((report.round for report in reports), default=0)
    rates = (report.learning_rate for report in reports if report.round == last)
    return max(rates, default=math.nan)


def of_workers(reports: Sequence[RoundReport]) -> dict[int, dict[str, float]]:
    """Return what rounds, sorted by worker, come to for each of them."""
    groups = itertools.groupby(reports, key=lambda report: report.worker)
    return {worker: together(list(group)) for worker, group in groups}


def pushes_row(first: RoundReport, values: Mapping[str, float]) -> dict[str, Any]:
    """Return a worker's pushes of an epoch as one round: its first report, with their sums."""
    names = {**asdict(first), **first.figures}
    own = {name: value for name, value in values.items() if name in names}
    return round_row(first) | own | {"round": 0}


def mean_times(workers: Mapping[int, Mapping[str, float]], plan: Plan) -> dict[str, float]:
    """Return the mean time of small and of large workers, as measured and as predicted."""
    means = {}
    # An epoch that a resumed run finished with fewer workers has some without a plan.
    planned = dict(enumerate(plan.workers))
    for small, name in ((True, "small"), (False, "large")):
        own = [v for w, v in workers.items() if w in planned and planned[w].small == small]
        if own:
            means[f"{name}_workers_time_s"] = sum(v["time_s"] for v in own) / len(own)
            predicted = sum(v["predicted_time_s"] for v in own) / len(own)
            means[f"predicted_{name}_workers_time_s"] = predicted
    return means


def times_by_worker(workers: Mapping[int, Mapping[str, float]]) -> dict[str, dict[int, float]]:
    """Return what a row of times says of each worker."""
    return {
        f"workers_{name}": {worker: values[name] for worker, values in workers.items()}
        for name in ("compute_time_s", "wait_time_s", "idle_time_share")
    }


def missed_times(workers: Mapping[int, Mapping[str, float]]) -> str | None:
    """Return a warning if a worker's time in an epoch is far from the plan's.

    Of one worker alone there is none: nothing is planned by its time.
    """
    if len(workers) == 1:
        return None
    errors = {
        worker: values["time_s"] / values["predicted_time_s"] - 1
        for worker, values in workers.items()
        if values["predicted_time_s"] > 0
    }
    worst = max(errors, key=lambda worker: abs(errors[worker]), default=None)
    if worst is None or abs(errors[worst]) <= _TOLERANCE:
        return None
    missed = sum(abs(error) > _TOLERANCE for error in errors.values())
    return (
        f"warning: {missed} of {len(workers)} workers took other times than planned (worker "
        f"{worst}: {100 * errors[worst]:+.0f} %); --profile-refresh measures them again"
    )


def add_shares(workers: Mapping[int, dict[str, float]]) -> None:
    """Add each worker's share of the samples, and of the time, waiting for the slowest."""
    longest = max((values["compute_time_s"] for values in workers.values()), default=0.0)
    samples = sum(values["samples"] for values in workers.values())
    for values in workers.values():
        values["share"] = values["samples"] / max(samples, 1)
        values["idle_time_share"] = 1 - values["compute_time_s"] / longest if longest else 0.0


def plan_changes(before: Plan, plan: Plan) -> str:
    """Return in words what a new plan changes."""
    if len(plan.workers) > MAX_PRINTED_WORKERS:
        moved = sum(a != b for a, b in zip(before.workers, plan.workers, strict=True))
        return f"new batches and shares for {moved} of {len(plan.workers)} workers"
    batches = " ".join(str(worker.local_batch_size) for worker in plan.workers)
    shares = " ".join(str(worker.samples) for worker in plan.workers)
    return f"batches {batches}, samples {shares}"


def times_in_words(times_s: Sequence[float]) -> str:
    """Return the workers' times, from the shortest to the longest; nothing if none is known."""
    if not times_s or max(times_s) <= 0:
        return ""
    ends = [two_digits(min(times_s)), two_digits(max(times_s))]
    return f"  {'worker' if len(times_s) == 1 else 'workers'} {'-'.join(dict.fromkeys(ends))} s"


def evaluation_in_words(evaluation: Evaluation | None, loss_name: str = "loss") -> str:
    """Return an evaluation as a part of the epoch's line; nothing where there was none."""
    if evaluation is None:
        return ""
    ema = evaluation.ema_accuracy
    averaged = "" if ema is None else f"  EMA {100 * ema:.1f} %"
    loss = short_loss(evaluation.loss)
    top5 = evaluation.top5_accuracy
    first5 = "" if top5 is None else f" (top-5 {100 * top5:.1f} %)"
    others = "".join(
        f"  {name} {100 * accuracy:.1f} %, {loss_name} {short_loss(loss)}"
        for name, (accuracy, loss) in further_sets(evaluation.more).items()
    )
    own = more_in_words(evaluation)
    result = f"  eval {100 * evaluation.accuracy:.1f} %{first5}, {loss_name} {loss}{averaged}"
    return f"{result}{others}{own}"


def two_digits(value: float) -> str:
    """Return a number with two significant digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def result_in_words(values: Mapping[str, Any], unit: str, loss_name: str = "loss") -> str:
    """Return what there is of the result, in one line."""
    formats = {
        "final_accuracy": "accuracy {:.2%}",
        "best_accuracy": " (best {:.2%})",
        "final_top5_accuracy": ", top-5 {:.2%}",
        "final_loss": f", {loss_name} {{}}",
        "train_time_s": ", training {:.1f} s",
        "start_up_time_s": " and start-up {:.1f} s",
        "total_time_s": " of {:.1f} s",
        "images_per_s": f", {{:.0f}} {unit}/s",
    }
    shown = dict(values)
    if "final_loss" in shown:
        shown["final_loss"] = short_loss(shown["final_loss"])
    given = [text.format(shown[key]) for key, text in formats.items() if key in shown]
    return "".join(given).lstrip(", ").replace("%", " %")


def strict_numbers(value: Any) -> Any:
    """Return `value` in JSON's own types, with null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): strict_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_numbers(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
