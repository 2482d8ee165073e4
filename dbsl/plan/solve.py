"""Plans from a model of step time: each worker's samples and batch size.

Dual-batch plans are those of Lu, Liu, Hong and Wu, "Dual Batch Size Learning"
(COMPSAC 2022, doi 10.1109/COMPSAC54236.2022.00110) and of its journal version (arXiv 2509.26092);
equation numbers below are theirs. Unequal workers are planned by the same balance. The small
workers come first. In joint steps a worker's weight is its part of the global batch, b_i/B, so that
the weighted gradients sum to that of the joint batch (Ye, Zhou, Shi, Sun, Lv, arXiv 2007.11831).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Annotated

import numpy as np

from dbsl.base.errors import SettingError, require
from dbsl.config.fields import Count, Within, check_fields
from dbsl.config.settings import Rounding, UpdateFactor
from dbsl.plan.machines import (
    bounded_split,
    largest_remainder,
    split_batch,
    steps_in_shares,
    zero_of,
)
from dbsl.plan.sampler import cuts_of_epoch
from dbsl.plan.types import NoPlanError, Plan, TimeModel, WorkerPlan

DEFAULT_TIME_RATIO = 1.05
# Share of the large batch above which a solved small batch is as good as large.
NEARLY_LARGE = 0.75


def round_half_up(value: float) -> int:
    """Return the nearest integer, halves rounded up, as in the journal."""
    return math.floor(value + 0.5)


@dataclass(frozen=True)
class PlanRules:
    """Rules of a plan. At most one of the first two is given; with neither, k is 1.05."""

    time_ratio: Annotated[float | None, Within(1, open_low=True)] = None  # k, relative to all-large
    small_batch_size: int | None = None  # B_S
    min_batch_size: Count = 1  # smallest B_S that may be solved for
    rounds: Count = 1  # rounds per epoch; a batch must fit into a worker's samples of one round
    factor: UpdateFactor = "data"  # rule of the model-update factor
    rounding: Rounding = "round"  # as in the journal's tables; truncate: as in the conference's
    clamp: bool = True  # raise a solved B_S below `min_batch_size` to it; else no plan exists
    least: Count = 1  # minimum samples of each worker in a round or step
    drop_last: bool = False  # joint steps have only whole global batches

    def __post_init__(self) -> None:
        check_fields(self)
        for name, value in [*vars(self).items()]:
            if isinstance(value, np.generic):  # of which uint8 overflows at 255
                object.__setattr__(self, name, value.item())

    def to_integer(self, value: float) -> int:
        """Return a size as an integer, rounded as the rules say."""
        return int(value) if self.rounding == "truncate" else round_half_up(value)

    def lowest(self, global_batch_size: int, workers: int) -> int:
        """Return the fewest samples that a worker gets in a joint step where shares move."""
        return max(self.least, min(self.min_batch_size, global_batch_size // workers))

    def lowest_shares(self, samples: int, limits: np.ndarray) -> np.ndarray:
        """Return the fewest samples that workers with these limits get in an epoch in rounds."""
        of_round = self.lowest(samples // self.rounds, len(limits))
        return self.rounds * np.minimum(of_round, np.maximum(limits, self.least))


_ANY = PlanRules()


def plan_dual_batch(
    samples: int,
    workers: int,
    small_workers: int,
    large_batch_size: int | Sequence[int],
    time_model: TimeModel | Sequence[TimeModel],
    rules: PlanRules = _ANY,
) -> Plan:
    """Plan one epoch in which some workers take small batches and all finish together.

    Equal workers: large ones get d_L = k*d/n samples (eq. 4). Small ones get the rest (eq. 6) in
    batches of B_S = b / (t/d_S - a) (eq. 8), where t = k * (a + b/B_L) * d/n is everyone's time. As
    in the published tables, d_L is rounded, and d_S is the remainder, rounded. B_S follows from
    the exact t and that d_S, and is rounded once. Unequal workers keep the same balance, each with
    its own a, b and B_L: in the common time T worker i takes T / (a_i + b_i/B_i) samples. B_S, the
    same for all small workers, makes these sum to d. If steps have a floor f, a + b/x becomes
    max(a + b/x, f/x).

    A batch size that meets a bound stays there; samples move so that all still finish together, and
    `Plan.notes` says so. The first `small_workers`, n_S, of the n workers are small. B_L, which no
    small batch exceeds, and the time model are given once for all or once for each.
    """
    require(isinstance(rules, PlanRules), "rules must be PlanRules", rules)
    models = [time_model] if isinstance(time_model, TimeModel) else time_model
    right = isinstance(models, Sequence) and all(isinstance(one, TimeModel) for one in models)
    require(right, "time_model must be a TimeModel, or one for each worker", time_model)
    limits = np.atleast_1d(np.array(large_batch_size, object)).tolist()
    whole = limits and all(isinstance(n, Integral) and not isinstance(n, bool) for n in limits)
    require(whole, "large_batch_size must be integers", str(large_batch_size))
    limits = [int(limit) for limit in limits]
    Within(1).check("large_batch_size", limits)
    given = {"samples": samples, "workers": workers, "small_workers": small_workers}
    for name, count in given.items():
        whole = isinstance(count, Integral) and not isinstance(count, bool)
        require(whole, f"{name} must be an integer", repr(count))
    # Small types of numpy, such as uint8, would overflow.
    samples, workers, small_workers = map(int, given.values())
    Within(1, 65536).check("workers", workers)
    Within().check("samples", samples)
    for name, count in (("large_batch_size", len(limits)), ("slope", len(time_model))):
        must = f"{name} must have 1 value or one per worker ({workers})"
        require(count in (1, workers), must, count)
    must = f"samples must be at least the number of workers ({workers})"
    require(samples >= workers, must, samples)
    require(
        rules.rounds <= samples, f"rounds must be at most the samples ({samples})", rules.rounds
    )
    must = f"small_workers must be in [0, workers={workers}]"
    require(0 <= small_workers <= workers, must, small_workers)
    both = rules.time_ratio is not None and rules.small_batch_size is not None
    goals = "time_ratio and small_batch_size"
    must = f"{goals} must not be given together: each follows from the other"
    require(not both, must, goals)
    model, limits = TimeModel.of(time_model, workers), np.broadcast_to(np.array(limits), workers)
    return _DualBatch(model, limits, samples, small_workers, rules).plan()


@dataclass(frozen=True)
class _DualBatch:
    """An epoch to plan, and the notes on its plan."""

    model: TimeModel  # slope, intercept and floor are arrays [n]
    limits: np.ndarray  # B_L of each, the largest batch it may take, int64 [n]
    samples: int
    small_workers: int
    rules: PlanRules
    notes: list[str] = field(default_factory=list)  # bounds that were met, and what was done

    def plan(self) -> Plan:
        model, limits, samples, rules = self.model, self.limits, self.samples, self.rules
        batch, published, ratio = rules.small_batch_size, None, 1.0
        if self.small_workers and batch is None:
            ratio = self._wanted_ratio()
            batch, published = self._small_batch(ratio)
        sizes = self._batch_sizes(batch)
        shares = largest_remainder(self._speeds(sizes), samples)
        if published:
            small, exact = self.small_workers, np.full(len(sizes), published[0])
            exact[:small] = largest_remainder(np.ones(small), samples - int(exact[small:].sum()))
            times = model.time(exact, steps_in_shares(exact, sizes, rules.rounds))
            if times.max() - times.min() <= rules.rounds * model.time(sizes).max():
                shares = exact
            else:  # rounding a B_S of a few samples has moved the times
                published = None
                note = f"small batch rounded to {batch}, samples moved to finish together"
                self.notes.append(note)
        if self._equal:
            self._check_fits(batch, shares)
        shares, sizes = self._fit_rounds(shares, sizes)
        weights, terms = merge_weights(shares / shares.max(), rules.factor), {}
        if self._equal:
            weights, terms = self._published_terms(sizes, published)
        time_s, all_large_s = self._balanced_time(sizes), self._balanced_time(limits)
        steps, speeds = steps_in_shares(shares, sizes, rules.rounds), self._speeds(sizes)
        times = model.time(shares, steps)
        return Plan(
            samples=samples,
            time_ratio=float(ratio) if published else time_s / all_large_s,
            all_large_time_s=self._epoch_time(self._speeds(limits), limits),
            # As planned by a launcher that knows one batch size.
            equal_batch_time_s=self._epoch_time(np.ones(len(sizes)), limits.min()),
            workers=rows_of(sizes, shares, steps, weights, times, shares / speeds, self._is_small),
            notes=tuple(self.notes),
            small_batch_size=batch if self.small_workers else None,
            **terms,
        )

    @property
    def _is_small(self) -> np.ndarray:
        return np.arange(len(self.limits)) < self.small_workers

    @property
    def _equal(self) -> bool:
        return self.model.equal and bool((self.limits == self.limits[0]).all())

    def _speeds(self, sizes: np.ndarray) -> np.ndarray:
        """Return samples per second in full batches of the given sizes."""
        sample_times = self.model.sample_time(sizes)
        if sample_times.min() <= 0:
            worst = int(sample_times.argmin())
            model = self.model[worst]
            raise NoPlanError(
                f"intercept must be above {-model.slope * sizes[worst]:g} s for a batch of "
                f"{sizes[worst]}, got {model.intercept:g}"
            )
        return 1.0 / sample_times

    def _balanced_time(self, sizes: np.ndarray) -> float:
        """Return the seconds of an epoch with shares such that all finish together."""
        return self.samples / float(self._speeds(sizes).sum())

    def _epoch_time(self, weights: np.ndarray, most: np.ndarray) -> float:
        """Return the predicted seconds with shares by `weights`, in batches of at most `most`."""
        shares, rounds = largest_remainder(weights, self.samples), self.rules.rounds
        steps = steps_in_shares(shares, np.clip(shares // rounds, 1, most), rounds)
        return float(self.model.time(shares, steps).max())

    def _wanted_ratio(self) -> float:
        """Return k; refuse one out of bounds."""
        model = self.model
        fixed = np.maximum(model.intercept, model.floor)[: self.small_workers]
        if (fixed <= 0).all():
            raise NoPlanError(
                "intercept must be above 0 s for a small batch to exist, "
                f"got {model.intercept[0]:g}"
            )
        speeds = self._speeds(self.limits)
        large_part = float(speeds[self.small_workers :].sum() / speeds.sum())
        ratio = DEFAULT_TIME_RATIO if self.rules.time_ratio is None else self.rules.time_ratio
        if ratio * large_part >= 1:
            raise SettingError(
                f"time_ratio must be below {1 / large_part:.4g} (beyond it the large workers take "
                f"all samples), got {ratio:g}"
            )
        return ratio

    def _small_batch(self, ratio: float) -> tuple[int, tuple[int, int] | None]:
        """Return B_S; for equal workers also the integers d_L and d_S.

        The line and the floor of a step's time both bound B_S from below: the larger bound holds.
        """
        samples, rules, published = self.samples, self.rules, None
        workers, small_workers = len(self.limits), self.small_workers
        model, limit = self.model[0], int(self.limits[:small_workers].max())
        if self._equal:
            large = rules.to_integer(ratio * samples / workers)
            rest = samples - large * (workers - small_workers)
            must = f"time_ratio must leave every small worker a sample of {samples}"
            require(rest >= small_workers, must, ratio)
            published = large, rules.to_integer(rest / small_workers)
            time_s = ratio * model.sample_time(limit) * samples / workers
            sample_time = time_s / published[1]  # small workers'
            exact = model.intercept / (sample_time - model.slope)
            if model.floor and sample_time > model.slope:
                exact = max(exact, model.floor / sample_time)
            # Whole samples may use up a ratio close to 1: then both batches are equally large.
            batch = rules.to_integer(exact) if 0 < exact <= limit else limit
        else:
            batch = rules.to_integer(self._common_batch(ratio * self._balanced_time(self.limits)))
        if batch < (least := rules.min_batch_size):
            bound = (
                f"the solved small batch must be at least min_batch_size={least}, got {batch} "
                f"(time_ratio {ratio:g}, slope {model.slope:g}, intercept {model.intercept:g})"
            )
            if not rules.clamp:
                raise NoPlanError(bound)
            batch, published = least, None
            self.notes.append(f"{bound}; set to {batch}, samples moved so that all finish together")
        if batch > NEARLY_LARGE * limit:
            self.notes.append(_nearly_large(model, batch, limit))
        return batch, published

    def _common_batch(self, time_s: float) -> float:
        """Return B with which small workers do in `time_s` seconds the samples large ones leave.

        Each takes min(B, its limit); B is at most the highest limit, and 0 if even the smallest
        batches would do more than that.
        """
        small = self.small_workers
        model, limits = self.model[:small], self.limits[:small]
        samples = self.samples - time_s * float(self._speeds(self.limits)[small:].sum())

        def surplus(batch: float) -> float:
            done = time_s / model.sample_time(np.minimum(batch, limits))
            return float(done.sum()) - samples

        return 0.0 if surplus(1e-3) >= 0 else zero_of(surplus, 1e-3, float(limits.max()))

    def _batch_sizes(self, batch: int | None) -> np.ndarray:
        limits, small = self.limits, self.small_workers
        if not small:
            return limits.copy()
        highest = int(limits[:small].max())
        name = "min" if self.rules.small_batch_size is None else "small"
        must = f"{name}_batch_size must be in [1, large_batch_size={highest}]"
        require(1 <= batch <= highest, must, batch)
        if held := int((limits[:small] < batch).sum()):
            self.notes.append(
                f"{held} of {small} small workers hold fewer than {batch} samples and take what "
                "they hold"
            )
        return np.where(self._is_small, np.minimum(batch, limits), limits)

    def _published_terms(
        self, sizes: np.ndarray, published: tuple[int, int] | None
    ) -> tuple[np.ndarray, dict[str, int | float | None]]:
        """Return equal workers' merge weights, and the papers' terms; others have none."""
        rules, time_s = self.rules, self._balanced_time(sizes)
        large_samples, small_samples = published or (
            rules.to_integer(time_s * float(self._speeds(s)[0])) for s in (self.limits, sizes)
        )
        factor = None
        if self.small_workers:
            factor = float(merge_weights(np.float64(small_samples / large_samples), rules.factor))
        terms = {
            "large_batch_size": int(self.limits[0]),
            "large_samples": large_samples,
            "small_samples": small_samples if self.small_workers else None,
            "update_factor": factor,
        }
        return np.where(self._is_small, factor or 1.0, 1.0), terms

    def _check_fits(self, batch: int | None, shares: np.ndarray) -> None:
        """Refuse batches above a worker's samples in a round; a solved one then gives no plan."""
        small, rounds = self.small_workers, self.rules.rounds
        solved = NoPlanError if self.rules.small_batch_size is None else SettingError
        for name, size, of_kind, error in (
            ("large_batch_size", self.limits[0], shares[small:], SettingError),
            ("small_batch_size", batch, shares[:small], solved),
        ):
            if len(of_kind) and size > (limit := int(of_kind[-1]) // rounds):
                raise error(
                    f"{name} must be at most {limit}, the samples of such a worker in a round, "
                    f"got {size}"
                )

    def _fit_rounds(self, shares: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lower batch sizes that exceed their worker's samples in a round; shares follow.

        A worker so slow that it would have fewer than `rules.lowest_shares` gets that many.
        """
        samples, rounds = self.samples, self.rules.rounds
        lowered = np.zeros(len(sizes), dtype=bool)
        for _ in range(32):
            over = sizes > shares // rounds
            if not over.any():
                break
            lowered |= over
            sizes = np.where(over, np.maximum(shares // rounds, 1), sizes)
            shares = largest_remainder(self._speeds(sizes), samples)
        lowest = self.rules.lowest_shares(samples, self.limits)
        slow = np.flatnonzero(shares < lowest)
        if len(slow) and lowest.sum() <= samples:
            shares = bounded_split(samples, self._speeds(sizes), lowest, samples)
            lowered |= sizes > shares // rounds
            sizes = np.where(lowered, np.clip(shares // rounds, 1, self.limits), sizes)
            self.notes.append(
                f"{len(slow)} of {len(shares)} workers are so slow that they finish late with the "
                f"{lowest[slow[0]]} samples that each takes at least (worker {slow[0]})"
            )
        slowest = int(shares.argmin())
        got = f"{samples} over {len(shares)} workers, {shares[slowest]} for worker {slowest}"
        must = f"samples must leave each worker one per round at least ({rounds} an epoch)"
        require(shares.min() >= rounds and (sizes <= shares // rounds).all(), must, got)
        if lowered.any():
            first = int(lowered.argmax())
            self.notes.append(
                f"batches of {lowered.sum()} workers lowered to their samples of a round (worker "
                f"{first}: {sizes[first]})"
            )
        return shares, sizes


def _nearly_large(model: TimeModel, batch: int, largest: int) -> str:
    why = f"a step costs {model.intercept / model.slope:.0f} samples' time before its first"
    if model.floor > model.time(batch, 1) * (1 - 1e-9):
        below = (model.floor - model.intercept) / model.slope
        why = f"a step of fewer than {below:.0f} samples takes no less time"
    return (
        f"the small batch, {batch}, is {batch / largest:.0%} of the large one, since {why}: dual "
        "batch gains next to nothing here. --compile lowers that cost on a GPU; a larger "
        "--large-batch-size or --time-ratio makes the small batch smaller; more "
        "--rounds-per-epoch merge more often instead"
    )


def merge_weights(parts: np.ndarray, rule: UpdateFactor) -> np.ndarray:
    """Return the weights of updates, f, float64 [n]: d_S/d_L, its square root, or 1.

    `parts` are the workers' samples relative to the largest share, in (0, 1].
    """
    return {"data": parts, "sqrt": np.sqrt(parts), "none": np.ones_like(parts)}[rule]


def rows_of(*columns: np.ndarray) -> tuple[WorkerPlan, ...]:
    """Return the workers' plans from the columns of their fields, each [n]."""
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(itertools.starmap(WorkerPlan, rows))


def plan_steps(
    samples: int,
    sizes: Sequence[int] | np.ndarray,
    time_models: TimeModel | Sequence[TimeModel],
    rules: PlanRules = _ANY,
) -> Plan:
    """Plan an epoch of joint steps in which worker i takes `sizes[i]` samples of each, b_i >= 1.

    Their sum is the global batch B. All workers take the same number of steps (see `StepSampler`),
    split in the same proportions. Only the rules `least` and `drop_last` apply here.
    """
    least, sizes = rules.least, np.asarray(sizes, dtype=np.int64)
    global_batch_size, smallest = int(sizes.sum()), sizes.min()
    why = ": batch norm at this resolution sees one value a channel" if least > 1 else ""
    require(smallest >= least, f"local_batch_sizes must be at least {least}", f"{smallest}{why}")
    batches = np.diff(cuts_of_epoch(samples, global_batch_size, least, rules.drop_last))
    steps, kinds = len(batches), zip(*np.unique(batches, return_counts=True), strict=True)
    shares = sum(count * split_batch(int(size), sizes, least) for size, count in kinds)
    model, all_steps = TimeModel.of(time_models, len(sizes)), np.full(len(sizes), steps)
    times, weights = model.time(shares, steps), sizes / global_batch_size
    equal = largest_remainder(np.ones(len(sizes)), int(shares.sum()))
    equal_s, small = float(model.time(equal, steps).max()), np.zeros(len(sizes), bool)
    return Plan(
        samples=int(shares.sum()),
        time_ratio=float(times.max()) / equal_s,
        all_large_time_s=equal_s,
        equal_batch_time_s=equal_s,
        workers=rows_of(sizes, shares, all_steps, weights, times, times, small),
        global_batch_size=global_batch_size,
    )
