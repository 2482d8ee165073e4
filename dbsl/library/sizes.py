"""What each process takes of a joint batch: sizes that are given, or that follow its speed."""

from __future__ import annotations

import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import nn

from dbsl.base.errors import SettingError, require
from dbsl.config.fields import LARGEST
from dbsl.library.processes import gather, world_size
from dbsl.library.watch import Watch
from dbsl.plan.machines import SpeedEstimate, balanced_sizes
from dbsl.plan.types import TimeModel

_WARM_UP = 2  # first steps of a run, which allocate and compile: not measured
_INTERCEPT = 0.1  # share of the first measured step that is taken not to depend on the batch


class Sizes:
    """The processes' parts of a joint batch; base of what gives them out."""

    def __init__(
        self, asked: Mapping[str, Any], rank: int | None, num_replicas: int | None
    ) -> None:
        self._alone = rank is not None and num_replicas is not None
        rank, num_replicas = plain(rank), plain(num_replicas)  # uint8 would overflow
        self.num_replicas = num_replicas if self._alone else world_size()
        self.rank = rank if self._alone else dist.get_rank() if dist.is_initialized() else 0
        problem = _problem(asked, rank, num_replicas, self.num_replicas)
        if not self._alone:
            problem = _first_difference(asked, problem)
        if problem:
            raise SettingError(problem)
        sizes = asked["local_batch_sizes"]
        total = sum(sizes) if sizes else asked["global_batch_size"]
        self._bounds = np.array(asked["limits"] or [total] * self.num_replicas), asked["least"]
        even = TimeModel(np.ones(self.num_replicas), np.zeros(self.num_replicas))
        self.local_batch_sizes = sizes or balanced_sizes(total, even, *self._bounds).tolist()
        self.global_batch_size, self.accumulate = total, asked["accumulate"]
        self.balance, self.balance_every = asked["balance"], asked["balance_every"]
        self._scaled = 0  # calls of `scale`
        self.expects_scale = self.num_replicas > 1  # whether a loop that does not call it is warned
        self._watch: Watch | None = None
        self._warm = 0  # steps that were measured so far
        self._estimates = [SpeedEstimate() for _ in range(self.num_replicas)]
        self._usual: TimeModel | None = None  # which each estimate is relative to

    def watch(self, model: nn.Module) -> None:
        """Measure the compute time of this process's steps, for ``balance="dynamic"``.

        What it waits for others is left out. `model` may be wrapped in DDP or compiled. FSDP2 is
        refused: it waits inside both passes. Without `balance` nothing is measured.
        """
        require(self._watch is None, "watch must be called once", "another call")
        if self.balance:
            self._watch = Watch(model)

    def _check_processes(self) -> None:
        now = self.num_replicas if self._alone else world_size()
        must = f"the sampler must be built after the process group, which has {now} processes"
        require(now == self.num_replicas, must, self.num_replicas)

    def _move(self, drawn: int) -> tuple[int, list[int]]:
        """Return the first step that no process has drawn, and its sizes: all are done together.

        Every process calls it at the same step, with how many it has `drawn`.
        """
        if not self._watch.called and self._scaled > self.accumulate:
            warn("watch saw no step of its model: pass the model that the loop calls")
        steps = self._watch.read()
        steps, self._warm = steps[max(0, _WARM_UP - self._warm) :], self._warm + len(steps)
        samples = Counter(count for count, _ in steps).most_common(1)[0][0] if steps else 0
        alike = [seconds for count, seconds in steps if count == samples]
        with self._watch.paused():
            rows = gather((samples, statistics.median(alike) if alike else 0.0, drawn))
            for estimate, (samples, seconds, _) in zip(self._estimates, rows, strict=True):
                if samples:
                    self._usual = self._usual or TimeModel(
                        (1 - _INTERCEPT) * seconds / samples, _INTERCEPT * seconds
                    )
                    estimate.observe(self._usual, samples, seconds)
            if all(samples for samples, *_ in rows):
                # Rank 0's result: another processor may round otherwise.
                model = TimeModel.of([e.model(self._usual) for e in self._estimates], len(rows))
                sizes = balanced_sizes(sum(self.local_batch_sizes), model, *self._bounds)
                self.local_batch_sizes = gather(sizes.tolist())[0]
        return max(drawn for *_, drawn in rows), self.local_batch_sizes

    def _sizes_state(self) -> dict[str, Any]:
        usual = self._usual and [self._usual.slope, self._usual.intercept]
        speeds = {"usual": usual, "estimates": [e.state_dict() for e in self._estimates]}
        return {"local_batch_sizes": self.local_batch_sizes, "speeds": speeds}

    def _load_sizes(self, state: Mapping[str, Any]) -> None:
        """Take over sizes that follow the machines, if they suit processes and bounds."""
        sizes, speeds, (limits, least) = state["local_batch_sizes"], state["speeds"], self._bounds
        alike = len(sizes) == self.num_replicas and sum(sizes) == self.global_batch_size
        alike = alike and bool(((limits >= sizes) & (least <= np.array(sizes))).all())
        if self.balance and alike:
            self.local_batch_sizes = [*sizes]
            self._usual = speeds["usual"] and TimeModel(*speeds["usual"])
            for estimate, of_state in zip(self._estimates, speeds["estimates"], strict=True):
                estimate.load_state_dict(of_state)


def plain(value: Any) -> Any:
    """Return numbers of numpy and torch as those of Python: they compare alike, and are saved."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [*map(plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def warn(message: str) -> None:
    """Warn whoever called the caller."""
    warnings.warn(message, stacklevel=3)


def _problem(
    asked: Mapping[str, Any], rank: int | None, num_replicas: int | None, replicas: int
) -> str | None:
    """Return what is wrong with a sampler's arguments: name, bound and value."""
    total, least = asked["global_batch_size"], asked["least"]
    mine = 0 if rank is None else rank
    whole = isinstance(mine, Integral) and isinstance(replicas, Integral)
    if (rank is None) != (num_replicas is None) or not (whole and 0 <= mine < replicas):
        return (
            "rank and num_replicas must be given together, rank in [0, num_replicas), "
            f"got rank {rank} and num_replicas {num_replicas}"
        )
    for name in {"drop_last", "shuffle", "interleave"} & asked.keys():
        if not isinstance(asked[name], bool):
            return f"{name} must be True or False, got {asked[name]!r}"
    if total is None and asked["local_batch_sizes"] is None:
        return "global_batch_size or local_batch_sizes must be given, got neither"
    fewest = {"least": 1, "accumulate": 1, "seed": 0, "balance_every": 1}
    needed = dict.fromkeys(("num_samples", "global_batch_size"), f"{least} for each process")
    for name in (*fewest, *needed):
        value, lowest = asked[name], fewest[name] if name in fewest else least * replicas
        given = value is not None or name not in ("global_batch_size", "balance_every")
        if given and not (isinstance(value, Integral) and lowest <= value <= LARGEST):
            why = f", {needed[name]}" if name in needed and replicas > 1 else ""
            return f"{name} must be an integer of at least {lowest}{why}, got {value!r}"
    for name in ("local_batch_sizes", "limits"):
        values = asked[name]
        if values is None:
            continue
        if not isinstance(values, list) or len(values) != replicas:
            return f"{name} must have one value for each process ({replicas}), got {values}"
        if not all(isinstance(each, Integral) and each >= least for each in values):
            return f"{name} must be integers of at least {least}, got {values}"
    sizes, limits = asked["local_batch_sizes"], asked["limits"]
    if sizes is not None:
        if total not in (None, sum(sizes)):
            return f"local_batch_sizes must sum to global_batch_size ({total}), got {sum(sizes)}"
        total = sum(sizes)
        if limits and any(size > limit for size, limit in zip(sizes, limits, strict=True)):
            return f"local_batch_sizes must be within limits ({limits}), got {sizes}"
    if limits and sum(limits) < total:
        return f"limits must sum to at least the global batch size ({total}), got {limits}"
    if asked["drop_last"] and total > asked["num_samples"]:
        return f"drop_last must be False where a joint batch ({total}) has all samples, got True"
    if asked["balance"] not in (None, "dynamic"):
        return f"balance must be None or 'dynamic', got {asked['balance']!r}"
    if asked["balance"] and replicas != world_size():
        return (
            "num_replicas must be the world size with balance='dynamic', which compares all "
            f"processes, got {replicas} of {world_size()}"
        )
    if asked["balance_every"] and not asked["balance"]:
        return f"balance_every needs balance='dynamic', got {asked['balance_every']}"
    return None


def _first_difference(asked: Mapping[str, Any], problem: str | None) -> str | None:
    """Return the first problem of any process, or the first argument that is not alike on all."""
    rows = gather(({name: repr(value) for name, value in asked.items()}, problem))
    for name in () if any(problem for _, problem in rows) else asked:
        values = [row[name] for row, _ in rows]
        if len({*values}) > 1:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            return (
                f"{name} must be the same on every process, got {values[0]} on rank 0 and "
                f"{values[rank]} on rank {rank}"
            )
    return next((problem for _, problem in rows if problem), None)
