"""Batches of another size on every process, and the weight that makes their gradients right.

Data-parallel training averages gradients over n processes. With b_i samples on process i and B on
all, the mean over the joint batch needs the loss of process i times n * b_i / B (Ye, Zhou, Shi,
Sun, Lv, arXiv 2007.11831). The sampler knows every b_i beforehand, so that no exchange is needed.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dbsl.base.errors import SettingError, require
from dbsl.library.watch import Watch
from dbsl.plan.machines import SpeedEstimate, balanced_sizes
from dbsl.plan.sampler import StepSampler
from dbsl.plan.types import TimeModel

_WARM_UP = 2  # first steps of a run, which allocate and compile: not measured
_MOST_AHEAD = 1024  # batches that a loader may draw before training begins
_INTERCEPT = 0.1  # share of the first measured step that is taken not to depend on the batch


class UnevenBatchSampler:
    """A batch sampler whose batches have another size on each process.

    Pass it to a DataLoader as `batch_sampler`. Over all processes an epoch has each sample once;
    all take equally many steps, and none has fewer than `least` samples. A joint batch has
    `global_batch_size` samples, the last one what is left; where that is too little for all, the
    last two share what they have. Which samples it has does not depend on how it is split.

    It is built on every process alike, after the process group: processes compare what they got,
    but not where `rank` is given.

    Args:
        num_samples: Samples of the dataset, at least one for each process.
        global_batch_size: Samples of a joint batch, over all processes, at least one for each.
        local_batch_sizes: Samples of a joint batch that each process takes, by rank; None: equal.
        balance: "dynamic": sizes follow the measured speed of the processes, at a constant global
            batch size. It needs `watch`, and meets the other processes in `scale`.
        balance_every: Batches between two such moves; None: they happen between epochs alone.
        accumulate: Batches of each process that make an optimizer step.
        drop_last: Leave out the samples that do not fill a joint batch.
        shuffle: Draw another order each epoch, from `seed` and the epoch.
        seed: Of the order, at least 0.
        rank: This process's place among the replicas; None: that of torch.distributed.
        num_replicas: n, processes with batches of their own. Tensor- and context-parallel
            processes share one. None: the world size.
        least: Samples that each process has at least in a step, such as 2 for batch norm.
        limits: Samples of a joint batch that each process can hold, by rank; None: any number. The
            last step of an epoch may exceed them where else a process would have less than `least`.
        interleave: Yield the batches of all processes in turn, for a loader that gives every n-th
            batch to a process: Accelerate's ``prepare`` and transformers' ``Trainer``.

    Raises:
        SettingError: Names the argument, its bound and its value, on every process.
    """

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
        asked = {name: _plain(value) for name, value in dict(locals()).items() if name not in own}
        alone = rank is not None and num_replicas is not None
        self.num_replicas = num_replicas if alone else world_size()
        self.rank = rank if alone else dist.get_rank() if dist.is_initialized() else 0
        problem = _problem(asked, rank, num_replicas, self.num_replicas)
        if not alone:
            problem = _first_difference(asked, problem)
        if problem:
            raise SettingError(problem)
        total, sizes = asked["global_batch_size"], asked["local_batch_sizes"]
        total = sum(sizes) if sizes else total
        least, limits = asked["least"], asked["limits"] or [total] * self.num_replicas
        self._bounds = np.array(limits), least
        even = TimeModel(np.ones(self.num_replicas), np.zeros(self.num_replicas))
        self.local_batch_sizes = sizes or balanced_sizes(total, even, *self._bounds).tolist()
        self.num_samples, self.global_batch_size = asked["num_samples"], total
        self.accumulate, self.interleave = asked["accumulate"], interleave
        self.balance, self.balance_every = balance, asked["balance_every"]
        self.epoch = 0
        self._drop_last, self._seed = drop_last, asked["seed"] if shuffle else None
        self._start = 0  # samples of the epoch that are trained on
        self._iterator: _Epoch | None = None  # which drew last
        self._trained: _Epoch | None = None  # of which scale was called last
        # Whether set_epoch chose the epoch that comes next; None: it is the first, or a state's.
        self._chosen: bool | None = None
        self._asked: int | None = None  # the epoch that set_epoch chose before a state was loaded
        self._scaled = 0  # calls of `scale`
        self._alone = alone
        self._quiet = self.num_replicas == 1  # no word of that: it was said, or need not be called
        self._watch: Watch | None = None
        self._warm = 0  # steps that were measured so far
        self._speeds = _Speeds(self.num_replicas)

    @property
    def sampler(self) -> UnevenBatchSampler:
        """This object: Lightning calls `set_epoch` on a batch sampler's `sampler`."""
        return self

    def __len__(self) -> int:
        """Return the batches of an epoch; of one that began with a loaded state, those left.

        They are this process's, or all with `interleave`.
        """
        epoch = self._iterator
        under_way = epoch is not None and epoch.number == self.epoch
        begun = self._start if self._chosen else 0  # before set_epoch: those of a whole epoch
        steps = len(epoch) if under_way else self._cut(begun).steps_per_epoch
        return steps * self.num_replicas if self.interleave else steps

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, or go on in the one whose state was loaded."""
        now = self.num_replicas if self._alone else world_size()
        must = f"the sampler must be built after the process group, which has {now} processes"
        require(now == self.num_replicas, must, self.num_replicas)
        return _Epoch(self, self._check_loader(sys._getframe(1)))

    def _begin(self, epoch: _Epoch) -> None:
        """Note that an epoch's first batch is drawn: loaders ask for an iterator more often."""
        before, self._iterator = self._iterator, epoch
        if before is not None and before.number == self.epoch and before.looked_at and len(before):
            self._start, self._chosen = before.start, True
        elif before is not None and before.exhausted and len(before):
            if not self._scaled:
                self._warn_of_no_scale()
            elif before.taken < len(before) and before is not self._trained:  # else it is a look
                what = f"{before.taken} of the {len(before)} batches of an epoch"
                _warn(f"scale was called for {what}")
        left_early = before is not None and before.skipped < before.taken < len(before)
        if left_early and before.number != self.epoch and self._watch and not self.balance_every:
            _warn("balance_every must be given where epochs are left early: no sizes have moved")
        if self._chosen is False:
            _warn(f"set_epoch was not called: epoch {self.epoch} comes in the same order again")
        self._chosen = False

    def _warn_of_no_scale(self) -> None:
        if not self._quiet:
            self._quiet = True
            _warn(
                "scale was not called for any batch: multiply each loss by it, or call it to count "
                "the batch alone where the loop divides by the samples or tokens of all processes"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next.

        It begins at its first sample, unless the state that was loaded is inside it. Call it after
        `scale` of the last batch before: what draws batches ahead must not draw the next epoch's.
        """
        bad = not isinstance(epoch, Integral) or epoch < 0
        require(not bad, "epoch must be an integer of at least 0", epoch)
        if epoch != self.epoch:
            if self._start and self._cut(self._start).steps_per_epoch:
                _warn(f"set_epoch({epoch}) leaves epoch {self.epoch}, inside which the state was")
            self._start, self._trained = 0, None
        self.epoch, self._chosen = int(epoch), True

    def scale(self, count: int) -> float:
        """Return n * count / B, by which the mean loss of this process's next batch is multiplied.

        Call it once for each batch, in their order. B are the samples of all processes in this
        step, or in the `accumulate` steps of this window: do not divide by `accumulate` as well. It
        is a `SettingError` if `count`, the batch's samples, is not what is planned, or if no batch
        is left that was drawn.
        """
        epoch, before = self._iterator, self._trained
        if before is not None and before.exhausted and before.ahead and epoch.looked_at:
            epoch = before  # it draws no more: the other one was a look
        if epoch is None or not epoch.ahead:
            raise SettingError(
                "scale must be called once for each batch, in order, got another call after "
                f"{epoch.taken if epoch else 0} batches"
            )
        planned, window = epoch.ahead[0]
        if count != planned:
            raise SettingError(
                f"count must be {planned}, as planned for batch {epoch.taken} of rank {self.rank}, "
                f"got {count}: is scale called for each batch, are none skipped or reordered "
                "(in_order=False), does the collate function keep every sample?"
            )
        if self.balance and self._watch is None:
            raise SettingError("balance must be None without watch(model), got 'dynamic'")
        epoch.ahead.popleft()
        epoch.taken += 1
        self._scaled += 1
        self._trained = epoch
        if self._watch is not None:
            self._watch.samples = planned
            now = self.balance_every and epoch.taken % self.balance_every == 0
            if now or epoch.taken == len(epoch):
                self._move(epoch)
        return self.num_replicas * planned / window

    def watch(self, model: nn.Module) -> None:
        """Measure the compute time of this process's steps, for ``balance="dynamic"``.

        What it waits for others is left out. `model` may be wrapped in DDP or compiled. FSDP2 is
        refused: it waits inside both passes. Without `balance` nothing is measured.
        """
        require(self._watch is None, "watch must be called once", "another call")
        if self.balance:
            self._watch = Watch(model)

    def state_dict(self) -> dict[str, Any]:
        """Return how far training is, alike on every process.

        A batch counts once `scale` was called for it, and for all others of its window of
        `accumulate` batches. A loop that does not call it saves between epochs, or with torchdata's
        StatefulDataLoader, which counts itself.
        """
        start, epoch = self._start, self._iterator
        if epoch is not None and epoch.looked_at:
            epoch = self._trained or epoch
        if epoch is not None and epoch.number == self.epoch:
            window = epoch.taken % self.accumulate if epoch.taken < len(epoch) else 0
            start = epoch.cut.begin(epoch.taken - window)
        return {
            "epoch": self.epoch,
            "samples": start,
            "num_samples": self.num_samples,
            "seed": self._seed,
            "local_batch_sizes": self.local_batch_sizes,
            "speeds": self._speeds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the next sample not yet trained on; the loop begins at `epoch`.

        The number of processes and their batch sizes may be others than when it was saved.
        """
        for name, mine in (("num_samples", self.num_samples), ("seed", self._seed)):
            if state[name] != mine:
                raise SettingError(f"{name} must be {state[name]}, as in the state, got {mine}")
        left = self.num_samples - state["samples"]
        outside = not 0 <= left <= self.num_samples
        must = f"samples of a state must be in [0, {self.num_samples}]"
        require(not outside, must, state["samples"])
        limits, least = self._bounds
        if 0 < left < least * self.num_replicas and not self._drop_last:
            raise SettingError(
                f"num_replicas must be at most {left // least}, for which samples are left of "
                f"epoch {state['epoch']}, got {self.num_replicas}: begin the next epoch instead "
                f"(in the state, 'epoch' {state['epoch'] + 1} and 'samples' 0)"
            )
        self._asked = self.epoch if self._chosen else None
        self.epoch, self._start = state["epoch"], state["samples"]
        self._iterator, self._trained, self._chosen = None, None, None
        sizes = state["local_batch_sizes"]
        alike = len(sizes) == self.num_replicas and sum(sizes) == self.global_batch_size
        alike = alike and bool(((limits >= sizes) & (least <= np.array(sizes))).all())
        if self.balance and alike:
            self.local_batch_sizes = [*sizes]
            self._speeds.load_state_dict(state["speeds"])

    def _cut(self, start: int) -> StepSampler:
        least = self._bounds[1]
        return StepSampler(
            self.num_samples,
            self.global_batch_size,
            seed=self._seed,
            drop_last=self._drop_last,
            least=least,
            whole=least * self.num_replicas,
            start=start,
        )

    def _check_loader(self, frame: FrameType | None) -> int:
        """Refuse a loader that deals batches out otherwise; return how many it leaves out first."""
        asking, users = frame and frame.f_globals.get("__name__", ""), {}
        while frame is not None:
            module = str(frame.f_globals.get("__name__"))
            # Before Python 3.13 reading a frame's locals keeps them alive: not the caller's.
            if module.startswith(("torch.", "torchdata.", "accelerate.")):
                user = frame.f_locals.get("self")
                users.setdefault(type(user).__name__, user)
            self._quiet |= module == "transformers.trainer"
            frame = frame.f_back
        if "DataLoaderDispatcher" in users:
            raise SettingError(
                "dispatch_batches must be False: it deals out equal parts of a batch, got True"
            )
        if any(getattr(user, "in_order", None) is False for user in users.values()):
            raise SettingError("in_order must be True: scale expects batches in order, got False")
        if "BatchSampler" in users:
            raise SettingError("the sampler must be passed as batch_sampler, got sampler")
        sharded = "BatchSamplerShard" in users  # accelerator.prepare
        stateful = any(name.startswith("_Stateful") for name in users)
        must = "use_stateful_dataloader must be False: save and load the sampler's state"
        require(not (sharded and stateful), must, True)
        direct = not sharded and str(asking).startswith(("torch.", "torchdata."))
        if self.num_replicas > 1 and (direct if self.interleave else sharded):
            raise SettingError(
                f"interleave must be {sharded} for a loader that "
                f"{'goes' if sharded else 'does not go'} through accelerator.prepare, which gives "
                f"each process every n-th batch, got {self.interleave}"
            )
        skipping = users.get("SkipBatchSampler")
        passed_on = self._chosen or self._start
        if skipping is not None and "DataLoaderShard" in users and not passed_on:
            self.set_epoch(users["DataLoaderShard"].iteration)  # which it does not pass on there
        return getattr(skipping, "skip_batches", 0)

    def _move(self, epoch: _Epoch) -> None:
        """Give all processes new sizes from the first step that none has drawn."""
        if not self._watch.called and self._scaled > self.accumulate:
            _warn("watch saw no step of its model: pass the model that the loop calls")
        steps = self._watch.read()
        steps, self._warm = steps[max(0, _WARM_UP - self._warm) :], self._warm + len(steps)
        with self._watch.paused():
            self.local_batch_sizes, first = self._speeds.balance(
                self.local_batch_sizes, steps, epoch.steps_drawn, self._bounds
            )
        epoch.sizes.append((first, self.local_batch_sizes))


class _Epoch:
    """The batches of one epoch; its state is what was drawn, the sampler's what was trained on."""

    def __init__(self, sampler: UnevenBatchSampler, skipped: int) -> None:
        self._of = sampler
        self.number: int | None = None  # known once a batch is drawn: set_epoch may come until then
        self.skipped = self.taken = skipped
        # This process's batches that are drawn but not trained on: their samples, their windows'.
        self.ahead: deque[tuple[int, int]] = deque()
        self._open(sampler._start)

    def _open(self, start: int) -> None:
        self.start, self.cut = start, self._of._cut(start)
        self.drawn = 0
        self.exhausted = False
        self.sizes = [(0, self._of.local_batch_sizes)]

    def __len__(self) -> int:
        return self.cut.steps_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        return self

    @property
    def looked_at(self) -> bool:
        """Whether batches were drawn and not trained on, such as for a summary of the model."""
        drawn_ahead = self.exhausted and not self.start and not self._of._scaled
        return self.taken == self.skipped and not drawn_ahead

    @property
    def steps_drawn(self) -> int:
        """Steps of which a batch was drawn."""
        return -(-self.drawn // self._of.num_replicas) if self._of.interleave else self.drawn

    def __next__(self) -> list[int]:
        of = self._of
        if self.number is None:
            must = "skip_first_batches must be left out inside the epoch of a loaded state"
            whole = f"skip_first_batches must skip a multiple of accumulate ({of.accumulate})"
            inside, parts = bool(self.skipped and of._start), self.skipped % of.accumulate
            require(not inside, must, self.skipped)
            require(not parts, whole, self.skipped)
            of._begin(self)
            self._open(of._start)
            self.number, of._start = of.epoch, 0
        if self.ahead or not self.exhausted:
            of._iterator = self  # again, where another one was drawn from meanwhile
        number, rank = self.drawn, of.rank
        if of.interleave:
            number, rank = divmod(self.drawn, of.num_replicas)
        if number == len(self):
            self.exhausted = True
            raise StopIteration
        sizes = next(sizes for first, sizes in reversed(self.sizes) if first <= number)
        (part,) = self.cut.step(self.number, number, sizes, (rank,)).parts
        self.drawn += 1
        if rank == of.rank and number >= self.skipped:
            begin = number - number % of.accumulate
            end = min(begin + of.accumulate, len(self))
            self.ahead.append((len(part.indices), self.cut.begin(end) - self.cut.begin(begin)))
            if len(self.ahead) == _MOST_AHEAD and not of._scaled:
                of._warn_of_no_scale()
        return part.indices.tolist()

    def state_dict(self) -> dict[str, Any]:
        of = self._of
        sizes = {"global_batch_size": of.global_batch_size, "num_replicas": of.num_replicas}
        place = {"epoch": self.number, "start": self.start, "drawn": self.drawn}
        return {**place, **sizes, "over": self.steps_drawn == len(self)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        of = self._of
        self._open(state["start"])
        self.number, self.drawn = state["epoch"], state["drawn"]
        if state["over"]:  # with other sizes it has another length
            self.drawn = len(self) * (of.num_replicas if of.interleave else 1)
        if self.drawn and state["over"] and of._asked is not None:
            # It is over: a loader that loads its state late asks for the next one's.
            self.exhausted, of._start = True, 0
            of.epoch, of._chosen, of._asked = of._asked, True, None
            return
        # What is drawn is counted in steps; interleaved, in batches of all processes.
        for name in ("global_batch_size", "num_replicas")[: 1 + of.interleave]:
            must = f"{name} must be {state[name]}, as in the loader's state inside an epoch"
            inside, mine = self.drawn and not state["over"], getattr(of, name)
            require(not (inside and state[name] != mine), must, mine)
        of._begin(self)
        self.number, self.taken = state["epoch"], self.steps_drawn
        self.skipped, of._start = self.taken, 0


class _Speeds:
    """How fast each process is, known alike to all, and the batch sizes that follow."""

    def __init__(self, processes: int) -> None:
        self._estimates = [SpeedEstimate() for _ in range(processes)]
        self._usual: TimeModel | None = None  # which each estimate is relative to

    def balance(
        self,
        sizes: list[int],
        steps: list[tuple[int, float]],
        drawn: int,
        bounds: tuple[np.ndarray, int],
    ) -> tuple[list[int], int]:
        """Return sizes with which all are done together, and the first step that has them.

        Every process calls it with its own `steps`, samples and seconds of each since the last
        call, and how many it has `drawn`. `bounds` are the most of each, and the fewest of all.
        """
        samples = Counter(count for count, _ in steps).most_common(1)[0][0] if steps else 0
        alike = [seconds for count, seconds in steps if count == samples]
        rows = _gather((samples, statistics.median(alike) if alike else 0.0, drawn))
        for estimate, (samples, seconds, _) in zip(self._estimates, rows, strict=True):
            if samples:
                self._usual = self._usual or TimeModel(
                    (1 - _INTERCEPT) * seconds / samples, _INTERCEPT * seconds
                )
                estimate.observe(self._usual, samples, seconds)
        if all(samples for samples, *_ in rows):
            # Rank 0's result: another processor may round otherwise.
            model = TimeModel.of([e.model(self._usual) for e in self._estimates], len(rows))
            sizes = _gather(balanced_sizes(sum(sizes), model, *bounds).tolist())[0]
        return sizes, max(drawn for *_, drawn in rows)

    def state_dict(self) -> dict[str, Any]:
        usual = self._usual and [self._usual.slope, self._usual.intercept]
        return {"usual": usual, "estimates": [e.state_dict() for e in self._estimates]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._usual = state["usual"] and TimeModel(*state["usual"])
        for estimate, of_state in zip(self._estimates, state["estimates"], strict=True):
            estimate.load_state_dict(of_state)


_AHEAD: dict[dist.ProcessGroup | None, tuple[int, Tensor, dist.Work]] = {}


def mean_scale(
    count: int, group: dist.ProcessGroup | None = None, *, ahead: int | None = None
) -> float:
    """Return n * count / sum of counts, for losses that are means over tokens or pixels.

    The sum is taken over the processes of `group` by an all-reduce of two numbers, which every
    process calls. With `accumulate` batches a step, pass each process's count of all of them, and
    weight the batches of a step by their share of it.

    `count` are the tokens or pixels that this process's loss is the mean of, at least 1, and
    `ahead` those of the next call, whose all-reduce begins now: that call returns at once. `group`
    are the data-parallel processes; None: all. It is a `SettingError` on every process if a count
    is below 1, and where it is not the one that `ahead` announced.
    """
    announced, counts, work = _AHEAD.pop(group, None) or _add_up(count, group)
    if work is not None:
        work.wait()
    if ahead is not None:
        _AHEAD[group] = _add_up(ahead, group)
    total, none = counts.tolist()
    if none:
        raise SettingError(
            "count must be at least 1 on every process: a mean over nothing is NaN, "
            f"got {announced} here"
        )
    if announced != count:
        raise SettingError(
            f"count must be {announced}, announced by ahead, got {count}: one is announced at a "
            "time, and none before a loop is left early"
        )
    return world_size(group) * float(count) / total


def _add_up(count: int, group: dist.ProcessGroup | None) -> tuple[int, Tensor, dist.Work | None]:
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    fits = 1 <= number < math.inf
    counts = torch.tensor([number, float(not fits)], dtype=torch.float64)
    if not dist.is_initialized():
        return count, counts, None
    if "nccl" in dist.get_backend(group):
        counts = counts.cuda()
    return count, counts, dist.all_reduce(counts, group=group, async_op=True)


def world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of processes; without a process group there must be one alone."""
    if dist.is_initialized():
        return dist.get_world_size(group)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise SettingError(
            "the process group must be there first (init_process_group or Accelerator()), got none "
            f"and WORLD_SIZE={os.environ['WORLD_SIZE']}"
        )
    return 1


def _gather(mine: Any) -> list[Any]:
    """Return what every process passes, by rank."""
    if world_size() == 1:
        return [mine]
    rows = [None] * world_size()
    dist.all_gather_object(rows, mine)
    return rows


def _plain(value: Any) -> Any:
    """Return numbers of numpy and torch as those of Python: they compare alike, and are saved."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [*map(_plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _problem(
    asked: Mapping[str, Any], rank: int | None, num_replicas: int | None, replicas: int
) -> str | None:
    """Return what is wrong with a sampler's arguments: name, bound and value."""
    total, least = asked["global_batch_size"], asked["least"]
    whole = all(isinstance(each, Integral) for each in (rank or 0, replicas))
    if (rank is None) != (num_replicas is None) or not (whole and 0 <= (rank or 0) < replicas):
        return (
            "rank and num_replicas must be given together, rank in [0, num_replicas), "
            f"got rank {rank} and num_replicas {num_replicas}"
        )
    if total is None and asked["local_batch_sizes"] is None:
        return "global_batch_size or local_batch_sizes must be given, got neither"
    fewest = {"least": 1, "accumulate": 1, "seed": 0, "balance_every": 1}
    needed = dict.fromkeys(("num_samples", "global_batch_size"), f"{least} for each process")
    for name in (*fewest, *needed):
        value, lowest = asked[name], fewest[name] if name in fewest else least * replicas
        given = value is not None or name not in ("global_batch_size", "balance_every")
        if given and not (isinstance(value, Integral) and value >= lowest):
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
    rows = _gather(({name: repr(value) for name, value in asked.items()}, problem))
    for name in () if any(problem for _, problem in rows) else asked:
        values = [row[name] for row, _ in rows]
        if len({*values}) > 1:
            rank = next(rank for rank, value in enumerate(values) if value != values[0])
            return (
                f"{name} must be the same on every process, got {values[0]} on rank 0 and "
                f"{values[rank]} on rank {rank}"
            )
    return next((problem for _, problem in rows if problem), None)
