"""Who trains on how much, in which batches: dual-batch plans from a linear model of step time.

Pure functions. The formulas are those of Lu, Liu, Hong and Wu, "Dual Batch Size Learning"
(COMPSAC 2022, doi 10.1109/COMPSAC54236.2022.00110) and of its journal version (arXiv 2509.26092);
equation numbers below are theirs. From the shell::

    python -m dbsl.plan --samples 50000 --workers 4 --small-workers 3 --time-ratio 1.05 \
        --large-batch-size 500 --slope 0.00056607 --intercept 0.014041204118283607
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

Rounding = Literal["round", "truncate"]
UpdateFactor = Literal["data", "sqrt", "none"]


class NoPlanError(ValueError):
    """The settings are sound, but the time model admits no plan under them."""


@dataclass(frozen=True)
class TimeModel:
    """Time of one training step with x samples, ``slope * x + intercept`` seconds (eq. 2)."""

    slope: float  # a, seconds per sample
    intercept: float  # b, seconds per step

    def __post_init__(self) -> None:
        for name, value in (("slope", self.slope), ("intercept", self.intercept)):
            if not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number of seconds, got {value}")
        if self.slope <= 0:
            raise ValueError(f"slope must be above 0 seconds per sample, got {self.slope}")

    def sample_time(self, local_batch_size: float) -> float:
        """Return seconds per sample in full batches, ``a + b/x`` (the bracket of eq. 3)."""
        return self.slope + self.intercept / local_batch_size

    def time(self, samples: int, steps: int) -> float:
        """Return the seconds that `steps` steps over `samples` samples take together."""
        return self.slope * samples + self.intercept * steps


@dataclass(frozen=True)
class WorkerPlan:
    """One worker's part of an epoch."""

    local_batch_size: int
    samples: int  # its share of the epoch
    steps: int
    merge_weight: float  # the model-update factor f, in (0, 1]
    predicted_time_s: float  # steps counted whole, so it may differ from eq. 3's simplified time
    small: bool


@dataclass(frozen=True)
class Plan:
    """A dual-batch plan of one epoch: the solved quantities and one `WorkerPlan` per worker.

    Small workers come first. The workers' samples sum to `samples` exactly; `large_samples` and
    `small_samples` are the solved shares, of which a worker's own may differ by one sample.
    """

    samples: int
    time_ratio: float  # k: predicted time over that of an all-large plan
    large_batch_size: int
    small_batch_size: int | None
    large_samples: int
    small_samples: int | None
    update_factor: float | None
    workers: tuple[WorkerPlan, ...]


def largest_remainder(weights: Sequence[float] | np.ndarray, total: int) -> np.ndarray:
    """Split `total` into integers proportional to `weights` that sum to it exactly, int64 [n].

    Every part is its quota rounded down or up; the largest fractions go up, ties by position.
    """
    weights = np.asarray(weights, dtype=np.float64)
    quotas = weights / weights.sum() * total
    # A quota meant to be whole may come out a hair below it: that is no remainder of almost 1.
    parts = np.floor(quotas + 1e-9 * np.maximum(quotas, 1.0)).astype(np.int64)
    order = np.argsort(parts - quotas, kind="stable")
    missing = total - int(parts.sum())
    parts[order[:missing]] += 1
    return parts


def update_factor(small_samples: float, large_samples: float, rule: UpdateFactor) -> float:
    """Return f, the weight of a small worker's update: d_S/d_L, its square root, or 1."""
    if rule == "none":
        return 1.0
    ratio = small_samples / large_samples
    return math.sqrt(ratio) if rule == "sqrt" else ratio


def plan_dual_batch(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int,
    time_model: TimeModel,
    *,
    time_ratio: float = 1.05,
    small_batch_size: int | None = None,
    min_batch_size: int = 1,
    rounds: int = 1,
    factor: UpdateFactor = "data",
    rounding: Rounding = "round",
) -> Plan:
    """Plan one epoch for equal workers, some on small batches, all finishing together.

    Large workers get d_L = k*d/n samples (eq. 4), small ones the rest (eq. 6) in batches of
    B_S = b / ((a + b/B_L) * d_L/d_S - a) (eq. 8). Each result is rounded before the next uses it,
    as in the published tables.

    Args:
        samples: Training samples per epoch, d.
        workers: Number of workers, n.
        small_workers: Workers on the small batch, n_S, in [0, workers].
        large_batch_size: Samples per step of a large worker, B_L.
        time_model: Step time of every worker.
        time_ratio: k, what dual batch may cost over all-large; above 1.
        small_batch_size: B_S, if it is given; the shares then follow from it, and so does k.
        min_batch_size: Smallest B_S accepted.
        rounds: Rounds per epoch; a batch must fit into a worker's samples of one round.
        factor: Rule of the model-update factor.
        rounding: ``round`` as in the journal's tables, ``truncate`` as in the conference's.

    Raises:
        ValueError: If a setting is outside its bound; the message names both.
        NoPlanError: If the time model leaves no small batch of at least `min_batch_size`.
    """
    _check_counts(samples, workers, small_workers, large_batch_size, rounds)
    to_integer: Callable[[float], int] = int if rounding == "truncate" else _round_half_up
    large_workers = workers - small_workers

    if small_workers == 0:
        time_ratio, large, small, batch = 1.0, to_integer(samples / workers), None, None
        shares = largest_remainder(np.ones(workers), samples)
    elif small_batch_size is not None:
        batch = small_batch_size
        if not 1 <= batch <= large_batch_size:
            raise ValueError(
                f"small_batch_size must be in [1, large_batch_size={large_batch_size}], got {batch}"
            )
        speeds = np.full(workers, 1 / time_model.sample_time(large_batch_size))
        speeds[:small_workers] = 1 / time_model.sample_time(batch)
        if speeds.min() <= 0:
            raise NoPlanError(
                f"intercept must be above {-time_model.slope * batch:g} s for small_batch_size "
                f"{batch}, got {time_model.intercept:g}"
            )
        shares = largest_remainder(speeds, samples)
        exact_large = samples * speeds[-1] / speeds.sum() if large_workers else None
        small = to_integer(samples * speeds[0] / speeds.sum())
        # With no large worker k still compares with all-large: c_S/c_L on equal shares.
        time_ratio = (
            exact_large * workers / samples
            if exact_large is not None
            else time_model.sample_time(batch) / time_model.sample_time(large_batch_size)
        )
        large = to_integer(time_ratio * samples / workers)
    else:
        large, small, batch = _solve(
            samples, workers, small_workers, large_batch_size, time_model, time_ratio, to_integer
        )
        if batch > large_batch_size:  # whole samples may use up a ratio close to 1
            raise NoPlanError(
                f"the solved small batch must be at most large_batch_size={large_batch_size}, got "
                f"{batch} (time_ratio {time_ratio:g} leaves too little to {samples} samples)"
            )
        if batch < min_batch_size:
            raise NoPlanError(
                f"the solved small batch must be at least min_batch_size={min_batch_size}, got "
                f"{batch} (time_ratio {time_ratio:g}, slope {time_model.slope:g}, "
                f"intercept {time_model.intercept:g})"
            )
        shares = np.empty(workers, dtype=np.int64)
        shares[small_workers:] = large
        rest = samples - large * large_workers
        shares[:small_workers] = largest_remainder(np.ones(small_workers), rest)

    if small_workers < workers:
        _check_fits("large_batch_size", large_batch_size, int(shares[-1]), rounds, ValueError)
    if small_workers:  # a given one is refused, a solved one is no plan
        kind = NoPlanError if small_batch_size is None else ValueError
        _check_fits("small_batch_size", batch, int(shares[small_workers - 1]), rounds, kind)
    f = None if small is None else update_factor(small, large, factor)
    sizes = [batch] * small_workers + [large_batch_size] * large_workers
    weights = [f] * small_workers + [1.0] * large_workers
    return Plan(
        samples=samples,
        time_ratio=float(time_ratio),
        large_batch_size=large_batch_size,
        small_batch_size=batch,
        large_samples=large,
        small_samples=small,
        update_factor=f,
        workers=tuple(
            _worker_plan(size, int(share), rounds, weight, time_model, index < small_workers)
            for index, (size, share, weight) in enumerate(zip(sizes, shares, weights, strict=True))
        ),
    )


def count_workers(
    processes: int,
    *,
    workers: int | None = None,
    small_ratio: float = 0.0,
    small_workers: int | None = None,
    dedicated_server: bool = False,
) -> tuple[int, int]:
    """Return the number of workers and of small workers among them.

    One process holds all workers (4, unless told otherwise); of several, each is one, but for a
    dedicated server. A ratio above 0 makes at least one small worker.

    Raises:
        ValueError: If a count does not match the processes or the other count.
    """
    if processes == 1:
        if dedicated_server:
            raise ValueError("dedicated_server must have at least 2 processes, got 1")
        total = 4 if workers is None else workers
    else:
        total = processes - dedicated_server
        if workers not in (None, total):
            what = "processes less the dedicated server" if dedicated_server else "processes"
            raise ValueError(f"workers must equal the number of {what} ({total}), got {workers}")
    if small_workers is None:
        small_workers = max(1, _round_half_up(small_ratio * total)) if small_ratio > 0 else 0
    if small_workers > total:
        raise ValueError(
            f"small_workers must be at most the workers ({total}), got {small_workers}"
        )
    return total, small_workers


def plan_with_fallback(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int,
    time_model: TimeModel,
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
            *counts, small_batch_size=small_batch_size, min_batch_size=min_batch_size, **options
        ), None
    except NoPlanError as error:
        if not measured:
            raise
        batch = min(max(min_batch_size, large_batch_size // 8), large_batch_size)
        plan = plan_dual_batch(*counts, small_batch_size=batch, **options)
        return plan, (
            f"the measured step times admit no plan: {error}; going on with small batches of "
            f"{batch}, which makes the time ratio {plan.time_ratio:.3f}"
        )


def steps_in_share(share: int, local_batch_size: int, rounds: int) -> int:
    """Return the steps of an epoch whose share is cut into rounds, each into batches."""
    bounds = [share * r // rounds for r in range(rounds + 1)]
    return sum(-(-(end - start) // local_batch_size) for start, end in itertools.pairwise(bounds))


def _round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _check_counts(
    samples: int, workers: int, small_workers: int, large_batch_size: int, rounds: int
) -> None:
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if samples < workers:
        raise ValueError(
            f"samples must be at least the number of workers ({workers}), got {samples}"
        )
    if not 0 <= small_workers <= workers:
        raise ValueError(f"small_workers must be in [0, workers={workers}], got {small_workers}")
    if large_batch_size < 1:
        raise ValueError(f"large_batch_size must be at least 1, got {large_batch_size}")
    if rounds < 1:
        raise ValueError(f"rounds_per_epoch must be at least 1, got {rounds}")


def _solve(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int,
    time_model: TimeModel,
    time_ratio: float,
    to_integer: Callable[[float], int],
) -> tuple[int, int, int]:
    """Return d_L, d_S and B_S by equations 4, 6 and 8."""
    large_workers = workers - small_workers
    if not (math.isfinite(time_ratio) and time_ratio > 1):
        raise ValueError(f"time_ratio must be above 1, got {time_ratio}")
    if time_model.intercept <= 0:
        raise NoPlanError(
            f"intercept must be above 0 s for a small batch to exist, got {time_model.intercept:g}"
        )
    large = to_integer(time_ratio * samples / workers)
    rest = samples - large * large_workers
    if rest < small_workers:
        raise ValueError(
            f"time_ratio must be below workers/large workers = {workers / large_workers:.4g} "
            f"(beyond it the small workers have no samples), got {time_ratio}"
        )
    small = to_integer(rest / small_workers)
    exact = time_model.intercept / (
        time_model.sample_time(large_batch_size) * large / small - time_model.slope
    )
    return large, small, to_integer(exact)


def _check_fits(
    name: str, local_batch_size: int, samples: int, rounds: int, kind: type[ValueError]
) -> None:
    if local_batch_size > samples // rounds:
        per_round = "" if rounds == 1 else f" in one of {rounds} rounds"
        raise kind(
            f"{name} must be at most {samples // rounds}, the samples of such a worker{per_round}, "
            f"got {local_batch_size}"
        )


def _worker_plan(
    local_batch_size: int,
    samples: int,
    rounds: int,
    merge_weight: float,
    time_model: TimeModel,
    small: bool,
) -> WorkerPlan:
    steps = steps_in_share(samples, local_batch_size, rounds)
    return WorkerPlan(
        local_batch_size=local_batch_size,
        samples=samples,
        steps=steps,
        merge_weight=merge_weight,
        predicted_time_s=time_model.time(samples, steps),
        small=small,
    )


@dataclass(frozen=True)
class _Arguments:
    """Solve a dual-batch plan for equal workers and print it."""

    samples: int  # training samples per epoch, d
    workers: int  # number of workers, n
    large_batch_size: int  # samples per step of a large worker, B_L
    slope: float  # seconds per sample, a
    intercept: float  # seconds per step, b
    small_workers: int = 0  # workers on the small batch, n_S
    time_ratio: float = 1.05  # k, time allowed over that of all-large
    small_batch_size: int | None = None  # B_S, if given; k then follows from it
    min_batch_size: int = 1  # smallest B_S accepted
    rounds_per_epoch: int = 1  # pushes per worker and epoch
    update_factor: UpdateFactor = "data"  # weight of small workers: d_S/d_L, its root, or 1
    rounding: Rounding = "round"  # as in the journal's tables; truncate: the conference's
    json: bool = False  # print JSON instead of a table


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``python -m dbsl.plan`` and return the exit status."""
    import tyro

    arguments = tyro.cli(_Arguments, args=argv, prog="python -m dbsl.plan")
    try:
        plan = plan_dual_batch(
            arguments.samples,
            arguments.workers,
            arguments.small_workers,
            arguments.large_batch_size,
            TimeModel(arguments.slope, arguments.intercept),
            time_ratio=arguments.time_ratio,
            small_batch_size=arguments.small_batch_size,
            min_batch_size=arguments.min_batch_size,
            rounds=arguments.rounds_per_epoch,
            factor=arguments.update_factor,
            rounding=arguments.rounding,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(asdict(plan), indent=2) if arguments.json else format_plan(plan))
    return 0


def format_plan(plan: Plan) -> str:
    """Return the plan as a table, equal workers on one line."""
    lines = [f"{'worker':>9}  {'batch':>6} {'samples':>9} {'steps':>7} {'weight':>7} {'time':>9}"]
    start = 0
    while start < len(plan.workers):
        end = start + 1
        while end < len(plan.workers) and plan.workers[end] == plan.workers[start]:
            end += 1
        name = str(start) if end == start + 1 else f"{start}-{end - 1}"
        w = plan.workers[start]
        lines.append(
            f"{name:>9}  {w.local_batch_size:>6} {w.samples:>9} {w.steps:>7} "
            f"{w.merge_weight:>7.4f} {w.predicted_time_s:>8.2f}s"
        )
        start = end
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
