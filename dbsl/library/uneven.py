"""Batches of another size on every process, and the weight that makes their gradients right.

Data-parallel training averages gradients over n processes. With b_i samples on process i and B on
all, the mean over the joint batch needs the loss of process i times n * b_i / B (Ye, Zhou, Shi,
Sun, Lv, arXiv 2007.11831). The sampler knows every b_i beforehand, so that no exchange is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

from dbsl.base.errors import SettingError, require
from dbsl.library.scales import USED
from dbsl.library.sizes import Sizes, plain, warn
from dbsl.plan.sampler import StepSampler

_MOST_AHEAD = 1024  # batches that a loader may draw before training begins


class UnevenBatchSampler(Sizes):
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
        own = ("self", "rank", "num_replicas", "__class__")
        asked = {name: plain(value) for name, value in dict(locals()).items() if name not in own}
        super().__init__(asked, rank, num_replicas)
        self.num_samples, self.interleave = asked["num_samples"], interleave
        self.epoch = 0
        self._drop_last, self._seed = drop_last, asked["seed"] if shuffle else None
        self._start = 0  # samples of the epoch that are trained on
        self._iterator: _Epoch | None = None  # which drew last
        self._trained: _Epoch | None = None  # of which scale was called last
        # Whether set_epoch chose the epoch that comes next; None: it is the first, or a state's.
        self._chosen: bool | None = None
        self._skips = 0  # batches that are drawn next, and not trained on

    @property
    def sampler(self) -> UnevenBatchSampler:
        """This object: Lightning calls `set_epoch` on a batch sampler's `sampler`."""
        return self

    @property
    def batches_per_epoch(self) -> int:
        """Batches of a whole epoch, on each process."""
        return self._cut(0).steps_per_epoch

    def __len__(self) -> int:
        """Return the batches of an epoch; of one that began with a loaded state, those left.

        They are this process's, or all with `interleave`.
        """
        epoch = self._iterator
        under_way = epoch is not None and epoch.number == self.epoch
        begun = self._start if self._chosen else 0  # before set_epoch: those of a whole epoch
        steps = len(epoch) if under_way else self._cut(begun).steps_per_epoch
        return steps * self.num_replicas if self.interleave else steps

    def first_parts(self) -> list[list[int]]:
        """Return the samples of each process in the first joint batch."""
        sizes, cut = self.local_batch_sizes, self._cut(0)
        return [self._part(cut, self.epoch, 0, sizes, rank)[0] for rank in range(len(sizes))]

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, or go on in the one whose state was loaded."""
        self._check_processes()
        skipped, self._skips = self._skips, 0
        return _Epoch(self, skipped)

    def _begin(self, epoch: _Epoch) -> None:
        """Note that an epoch's first batch is drawn: loaders ask for an iterator more often."""
        before, self._iterator = self._iterator, epoch
        if before is not None and before.number == self.epoch and before.looked_at and len(before):
            self._start, self._chosen = before.start, True
        elif before is not None and before.exhausted and len(before):
            if not self._scaled:
                self._warn_of_no_scale()
            elif before.taken < len(before) and before is not self._trained:  # else it is a look
                raise SettingError(
                    f"scale must be called for each batch, got {before.taken} calls for the "
                    f"{len(before)} batches of an epoch: something skips batches (see skip), or "
                    "interleave is not as accelerator.prepare needs it (True) or others (False)"
                )
        left_early = before is not None and before.skipped < before.taken < len(before)
        if left_early and before.number != self.epoch and self._watch and not self.balance_every:
            warn("balance_every must be given where epochs are left early: no sizes have moved")
        if self._chosen is False and before is not None and before.number == self.epoch:
            if before.exhausted and before.taken > before.skipped:
                # A loader that iterates for ever asks for it while batches of this one are left.
                self.epoch, self._start = self.epoch + 1, 0
            else:
                warn(f"set_epoch was not called: epoch {self.epoch} comes in the same order again")
        self._chosen = False

    def _warn_of_no_scale(self) -> None:
        if self.expects_scale and not USED:
            self.expects_scale = False
            warn(
                "scale was not called for any batch: multiply each loss by it, or call it to count "
                "the batch alone where the loop divides by the samples or tokens of all processes"
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next.

        It begins at its first sample, unless the state that was loaded is inside it. Call it after
        `scale` of the last batch before: what draws batches ahead must not draw the next epoch's.
        """
        whole = isinstance(epoch, Integral) and epoch >= 0
        require(whole, "epoch must be an integer of at least 0", epoch)
        trained = self._trained
        if trained is not None and trained.taken == len(trained):
            self._trained = None
        if epoch != self.epoch:
            if self._start and self._cut(self._start).steps_per_epoch:
                warn(f"set_epoch({epoch}) leaves epoch {self.epoch}, inside which the state was")
            self._start, self._trained = 0, None
        begun = self._iterator is not None and self._iterator.number == epoch
        ahead = begun and self._iterator.ahead and self._iterator.looked_at  # drawn before the call
        self.epoch, self._chosen = int(epoch), not ahead

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
                + " (interleave must be False without accelerator.prepare)"
                * self.interleave
            )
        planned, window, cost = epoch.ahead[0]
        if count != planned:
            raise SettingError(
                f"count must be {planned}, as planned for batch {epoch.taken} of rank {self.rank}, "
                f"got {count}: call scale for each batch, in order, and skip() for batches that "
                "the script leaves out; interleave must be True for a loader that goes through "
                "accelerator.prepare, else False; the collate function must keep all samples"
            )
        if self.balance and self._watch is None:
            raise SettingError("balance must be None without watch(model), got 'dynamic'")
        epoch.ahead.popleft()
        epoch.taken += 1
        self._scaled += 1
        self._trained = epoch
        if self._watch is not None:
            self._watch.samples = cost
            now = self.balance_every and epoch.taken % self.balance_every == 0
            if now or epoch.taken == len(epoch):
                epoch.sizes.append(self._move(epoch.steps_drawn))
        return self.num_replicas * planned / window

    def skip(self, batches: int) -> None:
        """Count batches of the next iterator that the script itself leaves out.

        Call it beside Accelerate's `skip_first_batches`, which draws them: `scale` is not called
        for them.
        """
        whole = isinstance(batches, Integral) and batches >= 0
        require(whole, "batches must be an integer of at least 0", batches)
        self._skips = int(batches)

    def state_dict(self) -> dict[str, Any]:
        """Return how far training is, alike on every process.

        A batch counts once `scale` was called for it, and for all others of its window of
        `accumulate` batches. A loop that does not call it saves between epochs.
        """
        number, start, epoch = self.epoch, self._start, self._iterator
        if epoch is not None and epoch.looked_at:
            epoch = self._trained or epoch
        if epoch is not None and (epoch is self._trained or epoch.number == self.epoch):
            window = epoch.taken % self.accumulate if epoch.taken < len(epoch) else 0
            number, start = epoch.number, epoch.cut.begin(epoch.taken - window)
        return {
            "epoch": number,
            "samples": start,
            "num_samples": self.num_samples,
            "seed": self._seed,
            **self._sizes_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at the next sample not yet trained on; the loop begins at `epoch`.

        The number of processes and their batch sizes may be others than when it was saved.
        """
        for name, mine in (("num_samples", self.num_samples), ("seed", self._seed)):
            if state[name] != mine:
                raise SettingError(f"{name} must be {state[name]}, as in the state, got {mine}")
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
        self._load_sizes(state)

    def _part(
        self, cut: StepSampler, epoch: int, number: int, sizes: Sequence[int], rank: int
    ) -> tuple[list[int], float]:
        """Return a process's samples of a joint batch, and their cost in samples."""
        (part,) = cut.step(epoch, number, sizes, (rank,)).parts
        return part.indices.tolist(), len(part.indices)

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


class _Epoch:
    """The batches of one epoch."""

    def __init__(self, sampler: UnevenBatchSampler, skipped: int) -> None:
        self._of = sampler
        self.number: int | None = None  # known once a batch is drawn: set_epoch may come until then
        self.skipped = self.taken = skipped
        # This process's batches that are drawn but not trained on: samples, their windows', cost.
        self.ahead: deque[tuple[int, int, float]] = deque()
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
            must = "skip must be left out inside the epoch of a loaded state, else both skip"
            whole = f"skip must be a multiple of accumulate ({of.accumulate})"
            require(not (self.skipped and of._start), must, self.skipped)
            require(self.skipped % of.accumulate == 0, whole, self.skipped)
            of._begin(self)
            self._open(of._start)
            self.number, of._start = of.epoch, 0
            self.drawn = 0 if of._draws_skipped else self.skipped
        if self.ahead or not self.exhausted:
            of._iterator = self  # again, where another one was drawn from meanwhile
        number, rank = self.drawn, of.rank
        if of.interleave:
            number, rank = divmod(self.drawn, of.num_replicas)
        if number == len(self):
            self.exhausted = True
            raise StopIteration
        sizes = next(sizes for first, sizes in reversed(self.sizes) if first <= number)
        part, cost = of._part(self.cut, self.number, number, sizes, rank)
        self.drawn += 1
        if rank == of.rank and number >= self.skipped:
            begin = number - number % of.accumulate
            end = min(begin + of.accumulate, len(self))
            window = self.cut.begin(end) - self.cut.begin(begin)
            self.ahead.append((len(part), window, cost))
            if len(self.ahead) == _MOST_AHEAD and not of._scaled:
                of._warn_of_no_scale()
        self.exhausted = self.steps_drawn == len(self)
        return part
