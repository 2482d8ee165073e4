"""Steps to result against batch size: the published definition, and where scaling ends.

Pure. Shallue, Lee, Antognini, Sohl-Dickstein, Frostig, Dahl: Measuring the Effects of Data
Parallelism on Neural Network Training, JMLR 20(112), 2019 (arXiv 1811.03600). A *workload* is a
dataset, a model and an optimizer; a *study* is the search of one workload at one batch size; a
*trial* is one training in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas

STATUSES = ("COMPLETE", "INCOMPLETE", "INFEASIBLE")  # cut short: says nothing; diverged
OBJECTIVE = "val/classification_error"
PERFECT, USEFUL = 1.2, 1.1  # factors of the two rules
PERFECT_RULE = f"the largest b with steps(b) <= {PERFECT} * steps(b0) * b0 / b"
USEFUL_RULE = f"the smallest b with steps(b) <= {USEFUL} * min steps"
CRITICAL_RULE = "B of the fit steps(b) = S_min * (1 + B / b): there twice S_min, twice the samples"


@dataclass(frozen=True)
class Trial:
    """One training: what it was given, and what was measured on its way."""

    trial_id: int  # in its study; counts from 1
    status: str  # one of `STATUSES`
    steps: int  # taken
    parameters: Mapping[str, Any]  # metaparameters, ``learning_rate`` among them
    measurements: pandas.DataFrame = field(repr=False)  # ``step`` and the metrics, float64

    def reached_at(self, goal: float) -> float:
        """Return the first step at which it was measured under the goal, or inf."""
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
    goal: float | None = None  # error that its trials were to fall under, if the study says so
    # Whether trials ended there, or where they could not be the first any more. They then say
    # nothing about another goal, be it easier or harder.
    ends_at_goal: bool = False

    @property
    def workload(self) -> str:
        """The workload's name."""
        return f"{self.dataset}/{self.model}/{self.optimizer}"


class Result(NamedTuple):
    """The trial that got past the goal first, at one batch size."""

    batch_size: int
    steps: int  # to the goal
    trial: Trial


class Knees(NamedTuple):
    """Where perfect scaling ends, and from where on more batch saves no steps."""

    perfect: int  # `PERFECT_RULE`, with b0 the smallest batch size that reached the goal
    useful: int  # `USEFUL_RULE`
    is_seen: bool  # a larger batch was tried: `useful` is not only the last one


def steps_to_result(study: Study, goal: float) -> Result | None:
    """Return the first measurement strictly under the goal, the least over complete trials.

    Between equal ones the trial with the lower number counts. Trials that diverged or were cut
    short do not count. None: no trial got there.
    """
    complete = [trial for trial in study.trials if trial.status == "COMPLETE"]
    reached = {trial.reached_at(goal): trial for trial in reversed(complete)}
    steps = min(reached, default=math.inf)
    return None if math.isinf(steps) else Result(study.batch_size, int(steps), reached[steps])


def find_knees(steps: Mapping[int, int], tried: Iterable[int] = ()) -> Knees:
    """Return where scaling stops to be perfect and where it ends, by `PERFECT_RULE`, `USEFUL_RULE`.

    `steps` to result are by batch size, of those that reached the goal; `tried` others did not.
    """
    least, first = min(steps.values()), min(steps)
    perfect = max(b for b, s in steps.items() if s <= PERFECT * steps[first] * first / b)
    useful = min(b for b, s in steps.items() if s <= USEFUL * least)
    return Knees(perfect, useful, is_seen=useful < max(*steps, *tried, 0))


def critical_batch(steps: Mapping[int, int]) -> float | None:
    """Return the batch size at which training takes twice the fewest steps and samples.

    Fits the curve steps(b) = S_min*(1 + B/b) of McCandlish et al. (arXiv 1812.06162, eq. 2.11) by
    least relative errors, and returns B. The gradient noise scale predicts it. None: the sizes do
    not show both ends of such a curve.
    """
    if len(steps) < 3 or min(steps.values()) < 1:
        return None
    sizes, counts = np.array(list(steps), dtype=float), np.array(list(steps.values()), dtype=float)
    columns = np.stack([1 / counts, 1 / (sizes * counts)], axis=1)
    (fewest, slope), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
    return float(slope / fewest) if fewest > 0 and slope > 0 else None
