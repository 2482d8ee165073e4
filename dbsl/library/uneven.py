"""A batch size for each process, and the scale that corrects the averaged gradient.

Data-parallel training averages gradients over n processes. With b_i samples on process i and B in
total, the mean over the joint batch needs the loss of process i times n * b_i / B (Ye, Zhou, Shi,
Sun, Lv, arXiv 2007.11831). The sampler knows every b_i in advance, so no exchange is needed.
"""

from __future__ import annotations

import statistics
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from dbsl.base.errors import SettingError, require, require_whole
from dbsl.library.processes import USED, compare, gather, world_size
from dbsl.library.watch import Watch
from dbsl.plan.machines import SpeedEstimate, balanced_sizes
from dbsl.plan.sampler import ends_of_parts, ordered, whole_steps
from dbsl.plan.types import TimeModel

_MOST_AHEAD = 1024  # batches that a loader may draw before training begins
_WARM_UP = 2  # first steps of a run, which allocate and compile: not measured
_INTERCEPT = 0.1  # share of the first measured step assumed not to depend on the batch
# What a refused loop may have missed.
_CALLS = (
    ": call scale for each batch, in order, and skip() for batches that the script leaves out; "
    "interleave must be True for a loader that goes through accelerator.prepare, else False; the "
    "collate function must keep all samples"
)


@dataclass(eq=False)
class _Epoch:
    """How far drawing and training are in an epoch."""

    number: int
    start: int  # samples left out: those before a loaded state
    cuts: np.ndarray  # where its joint batches begin and end, int64 [steps + 1]
    skipped: int  # batches that the script leaves out
    sizes: list[tuple[int, list[int]]]  # first step, and sizes from there on
    taken: int  # batches trained on or skipped
    drawn: int  # steps with a drawn batch
    trains: bool  # whether gradients were on when it began; else it is an evaluation
    # This process's batches drawn but not trained on: samples, all samples of the window, cost.
    ahead: deque[tuple[int, int, float]] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.cuts) - 1

    @property
    def exhausted(self) -> bool:
        """Whether every step has a drawn batch."""
        return self.drawn == len(self)


class UnevenBatchSampler:
    """A batch sampler with its own batch size on each process.

    Pass it to a DataLoader as `batch_sampler`. Over all processes, an epoch has each sample once;
    all take the same number of steps, each with at least `least` samples. A joint batch has
    `global_batch_size` samples, and the last has the rest; if that is too few for all processes,
    the last two share their samples. The split does not change which samples a joint batch has.

    Build it with the same arguments on every process, after the process group. Processes compare
    them, unless `rank` is given.

    Args:
        num_samples: Samples in the dataset, at least one for each process.
        global_batch_size: Samples of a joint batch, over all processes, at least one for each.
        local_batch_sizes: Samples of a joint batch that each process takes, by rank; None: equal.
        balance: "dynamic": sizes follow the measured speed of the processes, at a constant global
            batch size. It needs `watch`; `scale` then communicates with the other processes.
        balance_every: Batches between two changes of the sizes; None: only between epochs.
        accumulate: Batches per optimizer step on each process.
        drop_last: Leave out the samples that do not fill a joint batch.
        shuffle: Draw another order each epoch, from `seed` and the epoch.
        seed: Seed of the order, at least 0.
        rank: This process's rank among the replicas; None: that of torch.distributed.
        num_replicas: n, processes with batches of their own. Tensor- and context-parallel
            processes share one. None: the world size.
        least: Minimum samples of each process in a step, such as 2 for batch norm.
        limits: Most samples of a joint batch that each process can hold, by rank; None: any number.
            An epoch's last step may exceed them if a process would otherwise have under `least`.
        interleave: Yield the batches of all processes in turn, for a loader that gives each process
            every n-th batch: Accelerate's ``prepare`` and transformers' ``Trainer``.

    Raises:
        SettingError: Names the argument, its bound and its value, on every process.
    """

    _draws_skipped = True  # a script that skips batches draws them

    def __init__(
        self,
        num_samples: int,
        global_batch_size: int | None = None,
        local_batch_sizes: Sequence[int] | None = None,
        *,
        balance: str | None = None,
        balance_every: int | None = None,
        accumulate: int = 1,
        drop_last: bool = False,
        shuffle: bool = True,
        seed: int = 0,
        rank: int | None = None,
        num_replicas: int | None = None,
        least: int = 1,
        limits: Sequence[int] | None = None,
        interleave: bool = False,
    ) -> None:
        own = ("self", "rank", "num_replicas")
        asked = {name: plain(value) for name, value in dict(locals()).items() if name not in own}
        rank, num_replicas = plain(rank), plain(num_replicas)  # uint8 would overflow
        self._alone = rank is not None and num_replicas is not None
        self.num_replicas = num_replicas if self._alone else world_size()
        self.rank = rank if self._alone else dist.get_rank() if dist.is_initialized() else 0
        problem = ""
        try:
            _check(asked, rank, num_replicas, self.num_replicas)
        except SettingError as refused:
            problem = str(refused)
        if not self._alone:
            compare(asked, problem)
        elif problem:
            raise SettingError(problem)
        sizes = asked["local_batch_sizes"]
        total = sum(sizes) if sizes else asked["global_batch_size"]
        self._bounds = np.array(asked["limits"] or [total] * self.num_replicas), asked["least"]
        even = TimeModel(np.ones(self.num_replicas), np.zeros(self.num_replicas))
        self.local_batch_sizes = sizes or balanced_sizes(total, even, *self._bounds).tolist()
        self.global_batch_size, self.accumulate = total, asked["accumulate"]
        self.balance, self.balance_every = asked["balance"], asked["balance_every"]
        self.num_samples, self.interleave = asked["num_samples"], interleave
        self._drop_last, self._seed = drop_last, asked["seed"] if shuffle else None
        self.epoch = 0
        self.expects_scale = self.num_replicas > 1  # whether to warn a loop that does not call it
        self._scaled = 0  # calls of `scale`
        self._start = 0  # samples of the epoch already trained on
        self._iterator: _Epoch | None = None  # drawn from last
        self._trained: _Epoch | None = None  # scale was last called for it
        # Whether set_epoch chose the next epoch; None: it is the first, or a state's.
        self._chosen: bool | None = None
        self._skips = 0  # next batches, drawn but not trained on
        self._watch: Watch | None = None
        self._warm = 0  # steps measured so far
        self._estimates = [SpeedEstimate() for _ in range(self.num_replicas)]
        self._usual: TimeModel | None = None  # reference of each estimate

    @property
    def sampler(self) -> UnevenBatchSampler:
        """This object: Lightning calls `set_epoch` on a batch sampler's `sampler`."""
        return self

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, on each process."""
        return len(self._cuts(0)) - 1

    def __len__(self) -> int:
        """Return the batches in an epoch, or those left if it began with a loaded state.

        They are this process's, or all with `interleave`.
        """
        epoch = self._iterator
        under_way = epoch is not None and epoch.number == self.epoch
        begun = self._start if self._chosen else 0  # before set_epoch: a whole epoch
        steps = len(epoch) if under_way else len(self._cuts(begun)) - 1
        return steps * self.num_replicas if self.interleave else steps

    def parts(self, number: int) -> list[list[int]]:
        """Return the samples of each process in a joint batch; numbers wrap around."""
        sizes, number = self.local_batch_sizes, number % self.batches_per_epoch
        ends = self._cuts(0)[number : number + 2].tolist()
        return [self._part(self.epoch, *ends, sizes, rank)[0] for rank in range(len(sizes))]

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, or continue the one of a loaded state."""
        now = self.num_replicas if self._alone else world_size()
        must = f"the sampler must be built after the process group, which has {now} processes"
        require(now == self.num_replicas, must, self.num_replicas)
        skipped, self._skips = self._skips, 0
        batches = self._batches(skipped)
        weakref.finalize(batches, self.let_go).atexit = False
        return batches

    def _batches(self, skipped: int) -> Iterator[list[int]]:
        """Yield an epoch's batches; until the first is drawn, `set_epoch` may be called.

        Loaders create iterators that they never draw from.
        """
        must = "skip must be left out inside the epoch of a loaded state, else both skip"
        whole = f"skip must be a multiple of accumulate ({self.accumulate})"
        require(not (skipped and self._start), must, skipped)
        require(skipped % self.accumulate == 0, whole, skipped)
        if self._iterator is not None:
            self._end(self._iterator)
        sizes, trains = [(0, self.local_batch_sizes)], torch.is_grad_enabled()
        drawn, cuts = 0 if self._draws_skipped else skipped, self._cuts(self._start)
        epoch = _Epoch(self.epoch, self._start, cuts, skipped, sizes, skipped, drawn, trains)
        self._iterator, self._start, self._chosen = epoch, 0, False
        turns = [*range(self.num_replicas)] if self.interleave else [self.rank]
        for number in range(epoch.drawn, len(epoch)):
            for rank in turns:
                self._iterator = epoch  # again, if another was drawn from meanwhile
                yield self._drawn(epoch, number, rank)

    def _end(self, before: _Epoch) -> None:
        """Classify the epoch last drawn from, now that another begins."""
        same, begun = before.number == self.epoch, before.taken > before.skipped
        if same and self._looked_at(before) and len(before):
            self._start, self._chosen = before.start, True
        elif before.exhausted and len(before):
            self._warn_of_no_scale(before)
            missed = self._scaled and before.trains and before.taken < len(before)
            if missed and before is not self._trained:  # else it is a preview
                calls = f"{before.taken} calls for the {len(before)} batches of an epoch"
                raise SettingError(f"scale must be called for each batch, got {calls}{_CALLS}")
        left_early = begun and before.taken < len(before)
        if left_early and not same and self._watch and not self.balance_every:
            warn("balance_every must be given where epochs are left early: no sizes have moved")
        if self._chosen is False and same:
            if before.exhausted and begun:
                # An endless loader asks for the next while batches of this one are left.
                self.epoch, self._start = self.epoch + 1, 0
            else:
                warn(f"set_epoch was not called: epoch {self.epoch} comes in the same order again")

    def _drawn(self, epoch: _Epoch, number: int, rank: int) -> list[int]:
        """Return a process's batch of a step; record it if it is this process's own."""
        cut = epoch.cuts.item  # returns a Python number, quickly
        begin, end = cut(number), cut(number + 1)
        sizes = next(sizes for first, sizes in reversed(epoch.sizes) if first <= number)
        part, cost = self._part(epoch.number, begin, end, sizes, rank)
        epoch.drawn = number + 1
        if rank == self.rank and number >= epoch.skipped:
            first = number - number % self.accumulate
            last = min(first + self.accumulate, len(epoch))
            epoch.ahead.append((len(part), cut(last) - cut(first), cost))
            if len(epoch.ahead) == _MOST_AHEAD:
                self._warn_of_no_scale(epoch)
        return part

    def _looked_at(self, epoch: _Epoch) -> bool:
        """Whether batches were drawn but not trained on, as for a summary or an evaluation."""
        if self._scaled or not epoch.trains:
            return epoch.taken == epoch.skipped
        return epoch.taken < len(epoch) and (bool(epoch.start) or not epoch.exhausted)

    def count(self, epoch: _Epoch, batches: int) -> None:
        """Count the batches of an epoch that a loop received, unless it calls `scale`."""
        if epoch.trains and not self._scaled:
            epoch.taken, self._trained = epoch.skipped + batches, epoch

    def let_go(self) -> None:
        """Warn of an epoch without `scale` once its loop has ended."""
        epoch = self._iterator  # the loop may have fetched a window and one batch more
        if epoch is not None and epoch.exhausted and len(epoch) > self.accumulate + 1:
            self._warn_of_no_scale(epoch)

    def _warn_of_no_scale(self, epoch: _Epoch) -> None:
        if self.expects_scale and epoch.trains and not self._scaled and not USED:
            self.expects_scale = False
            warn(
                "scale was not called for any batch: multiply each loss by it, or call it to count "
                "the batch alone where the loop divides by the samples or tokens of all processes"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the next epoch, and with it the order.

        It begins at its first sample, unless a loaded state is inside it. Call it after `scale` of
        the last batch before: a loader that draws ahead must not yet draw the next epoch's.
        """
        require_whole("epoch", epoch, 0)
        trained = self._trained
        if trained is not None and trained.taken == len(trained):
            self._trained = None
        if epoch != self.epoch:
            if self._start and len(self._cuts(self._start)) > 1:
                warn(f"set_epoch({epoch}) leaves epoch {self.epoch}, inside which the state was")
            self._start, self._trained = 0, None
        drawn = self._iterator
        begun = drawn is not None and drawn.number == epoch
        ahead = begun and drawn.ahead and self._looked_at(drawn)  # drawn before the call
        self.epoch, self._chosen = int(epoch), not ahead

    def scale(self, count: int) -> float:
        """Return n * count / B, the factor for the mean loss of this process's next batch.

        Call it once for each batch, in order. B has the samples of all processes in this step,
        or in the `accumulate` steps of this window: do not divide by `accumulate` as well. It
        raises `SettingError` if `count`, the batch's samples, is not as planned, or if no drawn
        batch is left.
        """
        epoch, before = self._iterator, self._trained if self._scaled else None
        other = before is not None and before is not epoch
        if other and before.exhausted and before.ahead and self._looked_at(epoch):
            epoch = before  # it draws no more: the other was a preview
        if epoch is None or not epoch.ahead:
            calls = f"another call after {epoch.taken if epoch else 0} batches"
            raise SettingError(f"scale must be called once for each batch, got {calls}{_CALLS}")
        planned, window, cost = epoch.ahead[0]
        if count != planned:
            at = f"as planned for batch {epoch.taken} of rank {self.rank}"
            raise SettingError(f"count must be {planned}, {at}, got {count}{_CALLS}")
        if self.balance and self._watch is None:
            raise SettingError("balance must be None without watch(model), got 'dynamic'")
        if not self._scaled:
            epoch.taken = epoch.skipped  # from here on, count calls, not fetched batches
        epoch.ahead.popleft()
        epoch.taken += 1
        self._scaled += 1
        self._trained = epoch
        if self._watch is not None:
            self._watch.samples = cost
            now = self.balance_every and epoch.taken % self.balance_every == 0
            if now or epoch.taken == len(epoch):
                epoch.sizes.append(self._move(epoch.drawn))
        return self.num_replicas * planned / window

    def skip(self, batches: int) -> None:
        """Count batches of the next iterator that the script itself skips.

        Call it alongside Accelerate's `skip_first_batches`, which draws them: `scale` is not called
        for them.
        """
        require_whole("batches", batches, 0)
        self._skips = int(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of training, the same on every process.

        A batch is done once `scale` was called for every batch of its window of `accumulate`
        batches. If it is never called, a loader from `uneven` counts the batches that the loop
        received: save after a batch's step. A sampler by itself then knows only whole epochs.
        """
        number, start, epoch = self.epoch, self._start, self._iterator
        if epoch is not None and self._looked_at(epoch):
            epoch = self._trained or epoch
        if epoch is not None and (epoch is self._trained or epoch.number == self.epoch):
            window = epoch.taken % self.accumulate if epoch.taken < len(epoch) else 0
            number, start = epoch.number, int(epoch.cuts[epoch.taken - window])
        return {
            "epoch": number,
            "samples": start,
            "num_samples": self.num_samples,
            "seed": self._seed,
            "local_batch_sizes": self.local_batch_sizes,
            "speeds": {
                "usual": self._usual and [self._usual.slope, self._usual.intercept],
                "estimates": [estimate.state_dict() for estimate in self._estimates],
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the next sample not yet trained on; the loop begins at `epoch`.

        The number of processes and their batch sizes may differ from the saved ones.
        """
        for name, mine in (("num_samples", self.num_samples), ("seed", self._seed)):
            require(
                state[name] == mine, f"{name} must be {state[name]}, as in the state", f"{mine}"
            )
        left = self.num_samples - state["samples"]
        must = f"samples of a state must be in [0, {self.num_samples}]"
        require(0 <= left <= self.num_samples, must, state["samples"])
        least = self._bounds[1]
        if 0 < left < least * self.num_replicas and not self._drop_last:
            raise SettingError(
                f"num_replicas must be at most {left // least}, for which samples are left of "
                f"epoch {state['epoch']}, got {self.num_replicas}: begin the next epoch instead "
                f"(in the state, 'epoch' {state['epoch'] + 1} and 'samples' 0)"
            )
        self.epoch, self._start = state["epoch"], state["samples"]
        self._iterator, self._trained, self._chosen = None, None, None
        # Dynamic sizes are restored if they fit the processes and bounds.
        sizes, speeds, limits = state["local_batch_sizes"], state["speeds"], self._bounds[0]
        alike = len(sizes) == self.num_replicas and sum(sizes) == self.global_batch_size
        if self.balance and alike and ((limits >= sizes) & (least <= np.array(sizes))).all():
            self.local_batch_sizes = [*sizes]
            self._usual = speeds["usual"] and TimeModel(*speeds["usual"])
            for estimate, of_state in zip(self._estimates, speeds["estimates"], strict=True):
                estimate.load_state_dict(of_state)

    def watch(self, model: nn.Module) -> None:
        """Measure the compute time of this process's steps, for ``balance="dynamic"``.

        Waiting for other processes is excluded. `model` may be wrapped in DDP or compiled. FSDP2 is
        refused: it waits inside both passes. Without `balance` nothing is measured.
        """
        require(self._watch is None, "watch must be called once", "another call")
        if self.balance:
            self._watch = Watch(model)

    def _move(self, drawn: int) -> tuple[int, list[int]]:
        """Return the first step no process has drawn, and sizes with which all finish together.

        Every process calls it at the same step, with the number of steps `drawn`.
        """
        steps = self._watch.read()
        steps, self._warm = steps[max(0, _WARM_UP - self._warm) :], self._warm + len(steps)
        if not self._warm and self._scaled > self.accumulate:
            warn("watch saw no step of its model: pass the model that the loop calls")
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
                # Rank 0's result: another processor may round differently.
                model = TimeModel.of([e.model(self._usual) for e in self._estimates], len(rows))
                sizes = balanced_sizes(sum(self.local_batch_sizes), model, *self._bounds)
                self.local_batch_sizes = gather(sizes.tolist())[0]
        return max(drawn for *_, drawn in rows), self.local_batch_sizes

    def _part(
        self, epoch: int, begin: int, end: int, sizes: Sequence[int], rank: int
    ) -> tuple[list[Any], float]:
        """Return a process's samples of a joint batch, and their cost in samples."""
        ends = ends_of_parts(end - begin, tuple(sizes), self._bounds[1])
        part = self._samples(epoch, begin + ends[rank], begin + ends[rank + 1])
        return part, len(part)

    def _samples(self, epoch: int, begin: int, end: int) -> list[Any]:
        """Return the samples at these places of an epoch's order."""
        return ordered(self.num_samples, self._seed, None, epoch, begin, end).tolist()

    def _cuts(self, start: int) -> np.ndarray:
        """Return where an epoch's joint batches begin and end, from this sample on."""
        fewest, how = self._bounds[1] * self.num_replicas, {"drop_last": self._drop_last}
        return whole_steps(self.num_samples, self.global_batch_size, fewest, start=start, **how)


def plain(value: Any) -> Any:
    """Return numbers of numpy and torch as Python's, which can be compared and saved."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [*map(plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def warn(message: str) -> None:
    """Warn the caller of the caller."""
    warnings.warn(message, stacklevel=3)


def _check(asked: Mapping[str, Any], rank: Any, num_replicas: Any, replicas: Any) -> None:
    """Refuse bad sampler arguments: name, bound and value."""
    mine = 0 if rank is None else rank
    whole = isinstance(mine, Integral) and isinstance(replicas, Integral)
    fits = (rank is None) == (num_replicas is None) and whole and 0 <= mine < replicas
    must = "rank and num_replicas must be given together, rank in [0, num_replicas)"
    require(fits, must, f"rank {rank} and num_replicas {num_replicas}")
    for name in ("drop_last", "shuffle", "interleave"):
        require(isinstance(asked[name], bool), f"{name} must be True or False", repr(asked[name]))
    total, sizes, limits = (asked[n] for n in ("global_batch_size", "local_batch_sizes", "limits"))
    given = total is not None or sizes is not None
    require(given, "global_batch_size or local_batch_sizes must be given", "neither")
    least, optional = asked["least"], ("global_batch_size", "balance_every")
    for name in ("least", "accumulate", "balance_every", "seed", "num_samples", optional[0]):
        value, lowest, why = asked[name], int(name != "seed"), ""
        if name in ("num_samples", "global_batch_size"):
            lowest, why = least * replicas, f", {least} for each process" * (replicas > 1)
        if value is not None or name not in optional:
            require_whole(name, value, lowest, why)
    for name, values in (("local_batch_sizes", sizes), ("limits", limits)):
        if values is not None:
            one_each = isinstance(values, list) and len(values) == replicas
            must = f"{name} must have one value for each process ({replicas})"
            require(one_each, must, str(values))
            require_whole(name, values, least)
    if sizes is not None:
        must = f"local_batch_sizes must sum to global_batch_size ({total})"
        require(total in (None, sum(sizes)), must, sum(sizes))
        total = sum(sizes)
        fits = not limits or all(size <= limit for size, limit in zip(sizes, limits, strict=True))
        require(fits, f"local_batch_sizes must be within limits ({limits})", str(sizes))
    enough = not limits or sum(limits) >= total
    must = f"limits must sum to at least the global batch size ({total})"
    require(enough, must, str(limits))
    must = f"drop_last must be False where a joint batch ({total}) has all samples"
    require(not asked["drop_last"] or total <= asked["num_samples"], must, "True")
    balance = asked["balance"]
    require(balance in (None, "dynamic"), "balance must be None or 'dynamic'", repr(balance))
    must = (
        "num_replicas must be the world size with balance='dynamic', which compares all processes"
    )
    require(not balance or replicas == world_size(), must, f"{replicas} of {world_size()}")
    every = asked["balance_every"]
    require(balance or not every, "balance_every needs balance='dynamic'", every)
