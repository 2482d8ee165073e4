"""Arms of a comparison: their runs, means with intervals, paired differences. Pure but for reading.

An *arm* is a config; its runs differ in the seed alone. Figures are those of the last epoch, never
the best one on the evaluation set.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.machine import lazy_import

optimize, stats = lazy_import("scipy.optimize"), lazy_import("scipy.stats")

CONFIDENCE = 0.95
_SPREAD = 1e-5  # tables round accuracies to this; less of it is rounding
MADE_ON = ("device", "precision", "torch", "timm")  # fields of summary.json


@dataclass(frozen=True)
class ArmRun:
    """One finished run of an arm; accuracies in [0, 1] and losses are those of the last epoch."""

    seed: int
    accuracy: float
    loss: float
    train_time_s: float  # a simulated cluster's: on its workers' clock, as if side by side
    samples: int  # trained on, repeated ones counted
    curve: tuple[tuple[float, float], ...]  # training seconds and accuracy at each evaluation
    epochs: int = 1
    workers: int = 1
    ema_accuracy: float | None = None  # the averaged weights', if there are any
    ema_loss: float = math.nan
    total_time_s: float = math.nan  # by the clock on the wall, start and evaluation included
    made_on: tuple[tuple[str, str], ...] = ()  # `MADE_ON` by name
    train_accuracy: float | None = None  # on unaugmented training images, if it was measured
    train_loss: float | None = None
    settings: str = ""  # hash of the settings that made it; empty: not recorded

    def time_to(self, accuracy: float) -> float:
        """Return the seconds of training until it was so accurate, or inf.

        Between two evaluations accuracy is taken to change evenly, from 0 at the start.
        """
        before_s, before = 0.0, 0.0
        for time_s, value in self.curve:
            if value >= accuracy:
                share = (accuracy - before) / (value - before) if value > before else 1.0
                return before_s + max(0.0, share) * (time_s - before_s)
            before_s, before = time_s, value
        return math.inf


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with Student's 95 % interval; NaN is what fewer than two do not tell."""

    mean: float
    sd: float  # standard deviation of single values
    half: float  # half of the interval's width
    count: int
    p: float = math.nan  # two-sided t-test that the mean is 0

    @property
    def detectable(self) -> float:
        """The smallest mean that a test of so many values finds in four of five cases, or NaN."""
        return detectable(self.count) * self.sd


def read_run(folder: Path) -> ArmRun:
    """Return a finished run from its folder."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        evaluations = [row for row in map(json.loads, lines) if row["event"] == "eval"]
        simulated = all("virtual_time_s" in row for row in evaluations)  # throughout
        key = "virtual_time_s" if simulated else "train_time_s"
        return ArmRun(
            seed=int(summary["seed"]),
            accuracy=float(summary["final_accuracy"]),
            loss=math.nan if summary["final_loss"] is None else float(summary["final_loss"]),
            train_time_s=float(evaluations[-1][key]),
            samples=int(summary["samples_seen"]),
            curve=tuple((float(row[key]), float(row["accuracy"])) for row in evaluations),
            epochs=int(summary["epochs"]),
            workers=int(summary["workers"]),
            ema_accuracy=summary.get("final_ema_accuracy"),
            ema_loss=float(summary.get("final_ema_loss") or math.nan),
            total_time_s=float(summary["total_time_s"]),
            made_on=tuple((name, str(summary[name])) for name in MADE_ON if name in summary),
            train_accuracy=summary.get("train_accuracy"),
            train_loss=summary.get("train_loss"),
        )
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise SettingError(f"run must be finished and readable, got {folder} ({error})") from None


def interval(values: Sequence[float]) -> Estimate:
    """Return mean, standard deviation and 95 % t-interval of one or more independent values.

    Where one is not finite, as the loss of a diverged run, only the mean and the count are told.
    """
    if not values:
        raise SettingError("values must be one or more, got none")
    mean = fmean(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Estimate(mean, math.nan, math.nan, len(values))
    freedom, sd = len(values) - 1, stdev(values)
    error = float(stats.sem(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Estimate(mean, sd, half, len(values), p)


@cache
def detectable(count: int, power: float = 0.8) -> float:
    """Return the effect, in standard deviations, that a two-sided 5 % t-test finds so often.

    In a single value nothing is detectable: NaN.
    """
    if count < 2:
        return math.nan
    freedom = count - 1
    bound = stats.t.ppf((1 + CONFIDENCE) / 2, freedom)

    def missing(effect: float) -> float:
        return power - float(stats.nct.sf(bound, freedom, effect * math.sqrt(count)))

    return float(optimize.brentq(missing, 1e-6, 100.0))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for their number, by Holm's step-down rule; NaN stays.

    One of them below 5 % is then wrong in 5 % of families of tests at most.
    """
    order = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    corrected, highest = list(p_values), 0.0
    for rank, (p, i) in enumerate(order):
        highest = max(highest, min(1.0, p * (len(order) - rank)))
        corrected[i] = highest
    return corrected


def paired(runs: Sequence[ArmRun], baseline: Sequence[ArmRun]) -> Estimate | None:
    """Return the difference in accuracy to a baseline, seed by seed; None where no seed is in both.

    Arms with one seed share the split, the order and the initial weights, so that a pair differs
    in less than two runs do. Accuracies are whole numbers of images: differences that are all equal
    have a spread that is too small to be told, and then no p.
    """
    others = {run.seed: run.accuracy for run in baseline}
    differences = [run.accuracy - others[run.seed] for run in runs if run.seed in others]
    if not differences:
        return None
    found = interval(differences)
    return replace(found, half=math.nan, sd=math.nan, p=math.nan) if found.sd < _SPREAD else found


def averaged(runs: Sequence[ArmRun]) -> list[ArmRun]:
    """Return runs as their averaged weights did, without those that averaged none.

    What is of the raw weights is left out: the curve, and what training images gave.
    """
    of_raw = {"curve": (), "train_accuracy": None, "train_loss": None}
    return [
        replace(run, **of_raw, accuracy=run.ema_accuracy, loss=run.ema_loss)
        for run in runs
        if run.ema_accuracy is not None
    ]


def equal_time_epochs(runs: Sequence[ArmRun], baseline: Sequence[ArmRun]) -> int:
    """Return the most epochs, at least 1, for which an arm takes at most the baseline's time."""
    budget_s = fmean(run.train_time_s for run in baseline)
    epoch_s = fmean(run.train_time_s / run.epochs for run in runs)
    # The factor keeps all epochs of equal times.
    return max(1, math.floor(budget_s / epoch_s * (1 + 1e-9)))


def table(
    arms: Mapping[str, Sequence[ArmRun]], baseline: str, target: float | None = None
) -> list[dict[str, Any]]:
    """Return a row of figures for each arm, in the order given.

    *Cost per point*: worker seconds (training time times workers) beyond the baseline's, for each
    percentage point of accuracy over it. It is negative where the arm is better and cheaper, and
    NaN where it is not better. *p*: of the paired t-test, *p_holm* corrected for the number of
    arms; *detectable*: the difference that so many seeds would find in four of five cases.
    `target` is the accuracy to time; unset: a point below the baseline's mean at its last epoch.
    """
    finished = {name: runs for name, runs in arms.items() if runs}
    if target is None:
        own = finished.get(baseline) or next(iter(finished.values()), ())
        target = fmean([run.accuracy for run in own] or [0.0]) - 0.01
    base_cost = _worker_time(finished[baseline]) if baseline in finished else math.nan
    rows = []
    for name, runs in finished.items():
        accuracy, loss = interval([r.accuracy for r in runs]), interval([r.loss for r in runs])
        difference = paired(runs, finished.get(baseline, ())) if name != baseline else None
        gain = 100 * difference.mean if difference else math.nan
        times = [run.time_to(target) for run in runs]
        timed = any(run.curve for run in runs)
        cost = _worker_time(runs)
        rows.append(
            {
                "arm": name,
                "seeds": len(runs),
                "accuracy": 100 * accuracy.mean,
                "sd": 100 * accuracy.sd,
                "ci95": 100 * accuracy.half,
                "difference": gain,
                "difference_ci95": 100 * difference.half if difference else math.nan,
                "p": difference.p if difference else math.nan,
                "p_holm": math.nan,
                "detectable": 100 * difference.detectable if difference else math.nan,
                "loss": loss.mean,
                "loss_sd": loss.sd,
                "train_time_s": fmean(run.train_time_s for run in runs),
                "worker_time_s": cost,
                "cost_per_point_s": (cost - base_cost) / gain if gain > 0 else math.nan,
                "minutes": fmean(run.total_time_s for run in runs) / 60,
                "workers": max(run.workers for run in runs),
                "epochs": max(run.epochs for run in runs),
                "samples": round(fmean(run.samples for run in runs)),
                "target": 100 * target,
                "time_to_target_s": fmean(times) if timed else math.nan,
                "reached": sum(map(math.isfinite, times)) if timed else math.nan,
            }
        )
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
    return rows


def _worker_time(runs: Sequence[ArmRun]) -> float:
    return fmean(run.train_time_s * run.workers for run in runs)
