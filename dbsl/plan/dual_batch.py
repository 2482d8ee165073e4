"""Who trains on how much, in which batches: dual-batch plans from a model of step time.

Pure functions. The formulas are those of Lu, Liu, Hong and Wu, "Dual Batch Size Learning"
(COMPSAC 2022, doi 10.1109/COMPSAC54236.2022.00110) and of its journal version (arXiv 2509.26092);
equation numbers below are theirs. Unequal workers are planned by the same balance. From the shell::

    python -m dbsl.plan --samples 50000 --workers 4 --small-workers 3 --time-ratio 1.05 \
        --large-batch-size 500 --slope 0.00056607 --intercept 0.014041204118283607
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dbsl.base.errors import SettingError
from dbsl.plan.machines import Machines, largest_remainder, steps_in_shares
from dbsl.plan.solve import (
    SmallBatch,
    batch_sizes,
    check_fits,
    end_together,
    fit_rounds,
    published_shares,
    round_half_up,
)
from dbsl.plan.types import NoPlanError, Plan, Rounding, TimeModel, UpdateFactor, WorkerPlan


def update_factor(small_samples: float, large_samples: float, rule: UpdateFactor) -> float:
    """Return f, the weight of a small worker's update: d_S/d_L, its square root, or 1."""
    if rule == "none":
        return 1.0
    ratio = small_samples / large_samples
    return math.sqrt(ratio) if rule == "sqrt" else ratio


def merge_weights(shares: np.ndarray, rule: UpdateFactor) -> np.ndarray:
    """Return the weight of each worker's update by its share of the samples, float64 [n].

    The largest share has weight 1; d_S/d_L, for shares of any size.
    """
    parts = shares / shares.max()
    return {"data": parts, "sqrt": np.sqrt(parts), "none": np.ones(len(shares))}[rule]


def plan_dual_batch(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int | Sequence[int],
    time_model: TimeModel | Sequence[TimeModel],
    *,
    time_ratio: float | None = None,
    small_batch_size: int | None = None,
    small_share: float | None = None,
    min_batch_size: int = 1,
    rounds: int = 1,
    factor: UpdateFactor = "data",
    rounding: Rounding = "round",
    clamp: bool = True,
    least: int = 1,
) -> Plan:
    """Plan one epoch in which some workers take small batches and all finish together.

    Equal workers: large ones get d_L = k*d/n samples (eq. 4), small ones the rest (eq. 6) in
    batches of B_S = b / (t/d_S - a) (eq. 8), where t = k * (a + b/B_L) * d/n is everyone's time. As
    in the published tables, d_L is rounded, d_S is what that leaves, rounded, and B_S follows from
    the exact t and that d_S and is rounded once. Unequal workers keep the same balance, each with
    its own a, b and B_L: in the common time T worker i takes T / (a_i + b_i/B_i) samples, and B_S,
    the same for all small workers, is the one with which these come to d.

    At most one of `time_ratio`, `small_batch_size` and `small_share` is given; the others follow. A
    batch size that meets a bound stays there, and samples move so that all still finish together;
    `Plan.notes` says so.

    Where steps have a floor f, a + b/x above is max(a + b/x, f/x).

    Args:
        samples: Training samples per epoch, d.
        workers: Number of workers, n.
        small_workers: Workers on the small batch, n_S, in [0, workers]; they are the first.
        large_batch_size: Samples per step of a large worker, B_L, and the most that a small one may
            take; one for all or one for each.
        time_model: Step time, one for all or one for each worker.
        time_ratio: Time that dual batch may take over all-large, k > 1; 1.05 if nothing is given.
        small_batch_size: B_S.
        small_share: Share of the samples, in (0, 1), to train on in small batches.
        min_batch_size: Smallest B_S that may be solved for.
        rounds: Rounds per epoch; a batch must fit into a worker's samples of one round.
        factor: Rule of the model-update factor.
        rounding: ``round`` as in the journal's tables, ``truncate`` as in the conference's.
        clamp: Whether a solved B_S below `min_batch_size` is raised to it; else it is no plan.
        least: Samples that each worker has in a round at least, however slow it is.

    Raises:
        SettingError: If a setting is outside its bound; the message names both.
        NoPlanError: If the time model leaves no small batch.
    """
    machines = Machines.of(workers, large_batch_size, time_model)
    _check_counts(samples, workers, small_workers, rounds)
    _check_one_given(
        time_ratio=time_ratio, small_batch_size=small_batch_size, small_share=small_share
    )
    to_integer: Callable[[float], int] = int if rounding == "truncate" else round_half_up
    notes: list[str] = []
    batch, published, ratio = small_batch_size, None, 1.0
    if small_workers and batch is None:
        task = SmallBatch(machines, samples, small_workers, min_batch_size, to_integer)
        ratio = task.wanted_ratio(time_ratio, small_share)
        batch, published = task.solve(ratio, clamp, notes)
    sizes = batch_sizes(machines.limits, small_workers, batch, notes)
    shares = largest_remainder(machines.speeds(sizes), samples)
    if published:
        exact = published_shares(published, workers, small_workers, samples)
        if end_together(machines, exact, sizes, rounds):
            shares = exact
        else:  # rounding a B_S of a few samples has moved the times
            notes.append(f"small batch rounded to {batch}, samples moved to finish together")
            published = None
    if machines.equal:
        given = small_batch_size is not None
        check_fits(int(machines.limits[0]), batch, shares, small_workers, rounds, given)
    shares, sizes = fit_rounds(machines, samples, shares, sizes, rounds, least, notes)
    time_s, all_large_s = (machines.balanced_time(samples, s) for s in (sizes, machines.limits))
    weights, terms = merge_weights(shares, factor), {}
    if machines.equal:  # where workers differ, no one value holds for all
        large, small = published or (
            to_integer(time_s * float(machines.speeds(s)[0])) for s in (machines.limits, sizes)
        )
        weights, terms = _equal_terms(machines, large, small, small_workers, factor)
    return Plan(
        samples=samples,
        time_ratio=float(ratio) if published else time_s / all_large_s,
        small_batch_size=batch if small_workers else None,
        all_large_time_s=machines.all_large_time(samples, rounds),
        equal_batch_time_s=machines.equal_batch_time(samples, rounds),
        notes=tuple(notes),
        workers=_worker_plans(machines, shares, sizes, weights, small_workers, rounds),
        **terms,
    )


def _equal_terms(
    machines: Machines,
    large_samples: int,
    small_samples: int,
    small_workers: int,
    factor: UpdateFactor,
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return the merge weights of equal workers, float64 [n], and what the papers' tables give."""
    f = update_factor(small_samples, large_samples, factor) if small_workers else None
    small = np.arange(len(machines.limits)) < small_workers
    return np.where(small, f or 1.0, 1.0), {
        "large_batch_size": int(machines.limits[0]),
        "large_samples": large_samples,
        "small_samples": small_samples if small_workers else None,
        "update_factor": f,
    }


def says_unlike(
    small_ratio: float, small_workers: int | None, local_batch_sizes: Sequence[int] | None
) -> bool:
    """Whether these settings speak of several workers, unlike ones."""
    return small_ratio > 0 or small_workers is not None or bool(local_batch_sizes)


def count_workers(
    processes: int,
    *,
    workers: int | None = None,
    small_ratio: float = 0.0,
    small_workers: int | None = None,
    local_batch_sizes: Sequence[int] | None = None,
    dedicated_server: bool = False,
) -> tuple[int, int]:
    """Return the number of workers and of small workers among them.

    One process holds all workers; of several, each is one, but for a dedicated server. Unless told
    otherwise one process has 4 workers where something is said of unlike ones, else 1: on equal
    samples several workers cost accuracy. A ratio above 0 makes at least one small worker.

    Raises:
        SettingError: If a count does not match the processes or the other count.
    """
    if processes == 1:
        if dedicated_server:
            raise SettingError("dedicated_server must have at least 2 processes, got 1")
        unlike = says_unlike(small_ratio, small_workers, local_batch_sizes)
        total = workers if workers is not None else 4 if unlike else 1
    else:
        total = processes - dedicated_server
        if workers not in (None, total):
            what = "processes less the dedicated server" if dedicated_server else "processes"
            raise SettingError(f"workers must equal the number of {what} ({total}), got {workers}")
    if small_workers is None:
        small_workers = max(1, round_half_up(small_ratio * total)) if small_ratio > 0 else 0
    if small_workers > total:
        raise SettingError(
            f"small_workers must be at most the workers ({total}), got {small_workers}"
        )
    return total, small_workers


def plan_with_fallback(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int | Sequence[int],
    time_model: TimeModel | Sequence[TimeModel],
    *,
    measured: bool,
    small_batch_size: int | None = None,
    min_batch_size: int = 2,
    **options: Any,
) -> tuple[Plan, str | None]:
    """Plan as `plan_dual_batch` does; a *measured* time model that admits no plan is no error.

    Noise may leave a measurement without a small batch. B_S is then max(min_batch_size, B_L/8), and
    the workers' samples still balance the measured times. Returns the plan and, where it fell back,
    a line that says so.
    """
    counts = (samples, workers, small_workers, large_batch_size, time_model)
    try:
        return plan_dual_batch(
            *counts,
            small_batch_size=small_batch_size,
            min_batch_size=min_batch_size,
            clamp=not measured,
            **options,
        ), None
    except NoPlanError as error:
        if not measured:
            raise
        smallest = int(np.min(large_batch_size))
        batch = min(max(min_batch_size, smallest // 8), smallest)
        others = {k: v for k, v in options.items() if k not in ("time_ratio", "small_share")}
        plan = plan_dual_batch(*counts, small_batch_size=batch, **others)
        return plan, (
            f"the measured step times admit no plan: {error}; going on with small batches of "
            f"{batch}, which makes the time ratio {plan.time_ratio:.3f}"
        )


def _check_counts(samples: int, workers: int, small_workers: int, rounds: int) -> None:
    if samples < workers:
        raise SettingError(
            f"samples must be at least the number of workers ({workers}), got {samples}"
        )
    if not 0 <= small_workers <= workers:
        raise SettingError(f"small_workers must be in [0, workers={workers}], got {small_workers}")
    if rounds < 1:
        raise SettingError(f"rounds_per_epoch must be at least 1, got {rounds}")


def _check_one_given(**goals: float | None) -> None:
    given = [name for name, value in goals.items() if value is not None]
    if len(given) > 1:
        raise SettingError(
            f"time_ratio, small_batch_size and small_share must not be given together: the others "
            f"follow from one, got {' and '.join(given)}"
        )


def _worker_plans(
    machines: Machines,
    shares: np.ndarray,
    sizes: np.ndarray,
    merge_weights: np.ndarray,
    small_workers: int,
    rounds: int,
) -> tuple[WorkerPlan, ...]:
    columns = (
        sizes,
        shares,
        steps_in_shares(shares, sizes, rounds),
        merge_weights,
        machines.times(shares, sizes, rounds),
        shares / machines.speeds(sizes),
        np.arange(len(sizes)) < small_workers,
    )
    return tuple(itertools.starmap(WorkerPlan, zip(*(c.tolist() for c in columns), strict=True)))
