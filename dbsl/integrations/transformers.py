"""A batch size for each process in transformers' `Trainer`, and in trainers built on it.

    class UnevenTrainer(UnevenTrainerMixin, Trainer):
        local_batch_sizes = [1, 7]

Everything else remains Trainer's: its sampler (`group_by_length`), unused columns, workers and
resuming. Losses that a model divides by the tokens of all processes are right as they are.
Others, such as a classifier's, are means over a process's own samples; they are multiplied by the
scale. Stock Trainer (5.23) multiplies those by n, even with equal batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils import find_batch_size, gather
from torch import nn

from dbsl.base.errors import SettingError, require
from dbsl.cluster.weights import kept_modes
from dbsl.library.loader import uneven

# Losses of sentence-transformers that compare the samples of a batch with each other.
_IN_BATCH = ("Ranking", "Contrastive", "GIST", "MegaBatch", "CoSENT", "AnglE", "BatchHard")
_IN_BATCH += ("BatchAll", "BatchSemiHard", "DenoisingAutoEncoder", "Symmetric")


class UnevenTrainerMixin:
    """Goes before Trainer, SFTTrainer or another trainer in the base classes.

    `local_batch_sizes` are the samples in each process's batch, by rank. With `balance` "dynamic"
    they follow the measured speed. The others are as in `dbsl.uneven`. A subclass's own
    `compute_loss` is taken as a mean over samples unless it divides by `num_items_in_batch`.
    """

    local_batch_sizes: Sequence[int] | None = None
    balance: str | None = None
    balance_every: int | None = None
    lengths: Sequence[int] | None = None
    least: int = 1
    limits: Sequence[int] | None = None
    _divides: bool | None = None  # whether the model divides its loss by the items of all processes

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        before = cls.__mro__[: cls.__mro__.index(UnevenTrainerMixin)]
        late = [base.__name__ for base in before if base.__module__.startswith("transformers.")]
        require(not late, "base classes must begin with UnevenTrainerMixin", late)

    def get_train_dataloader(self) -> Any:
        """Return Trainer's own loader, with this process's part of each joint batch."""
        loss = type(getattr(self, "loss", None)).__name__
        if any(word in loss for word in _IN_BATCH):
            raise SettingError(
                f"loss must be a mean over samples, got {loss}: it compares the samples of a batch "
                "with each other, which batches of unlike sizes cannot have alike"
            )
        args, accelerator = self.args, self.accelerator
        asked = self.local_batch_sizes or self.balance or self.lengths is not None
        must = f"local_batch_sizes, balance or lengths of {type(self).__name__} must be set"
        require(asked, must, self.local_batch_sizes)
        together = args.average_tokens_across_devices or args.world_size == 1
        must = "average_tokens_across_devices must be True"
        require(together, must, args.average_tokens_across_devices)
        accelerator.prepare = lambda loader, *_, **__: loader  # it would split the loader
        try:
            loader = super().get_train_dataloader()
        finally:
            del accelerator.prepare
        self.uneven_loader = uneven(
            loader,
            self.local_batch_sizes,
            global_batch_size=None if self.local_batch_sizes else self._joint_batch(),
            balance=self.balance,
            balance_every=self.balance_every,
            accumulate=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            lengths=self.lengths,
            least=self.least,
            limits=self.limits,
        )
        self.uneven_loader.sampler.expects_scale = False  # a language model's loss needs none
        self.loss_is_scaled_for_ga = True  # the scale covers the whole window
        return self.uneven_loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Take Trainer's own step; averaged over processes, its gradient is the joint batch's."""
        own_loss = self.compute_loss  # Trainer's, or that of a subclass on either side of this one

        def weighted(model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
            if self.balance and self._divides is None:
                self.uneven_loader.watch(model)
            if self._divides is None:
                self._divides = self._model_divides(own_loss, model, inputs, num_items_in_batch)
            scale = self.uneven_loader.scale(find_batch_size(inputs))
            if self._divides:
                return own_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return own_loss(model, inputs, num_items_in_batch=None) * scale

        self.compute_loss = weighted
        try:
            return super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.compute_loss = own_loss  # not del: it may have been set on this object

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of an optimizer step, which Trainer prints."""
        return self._joint_batch() * args.gradient_accumulation_steps

    def _joint_batch(self) -> int:
        args = self.args
        return sum(self.local_batch_sizes or [args.train_batch_size] * args.world_size)

    def _model_divides(
        self, own_loss: Callable[..., Any], model: nn.Module, inputs: Any, items: Any
    ) -> bool:
        """Return whether the loss is divided by a batch's items: the test doubles them."""
        if items is None:
            return False
        with torch.no_grad(), torch.random.fork_rng(), kept_modes(model):
            model.eval()  # no dropout
            losses = [
                own_loss(model, dict(inputs), num_items_in_batch=items * times) for times in (1, 2)
            ]
        return bool(torch.isclose(losses[0], 2 * losses[1], rtol=1e-3))

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        # Else the loss not yet logged is that of one process.
        self._tr_loss = gather(self._tr_loss.reshape(1)).mean()
        return super()._finalize_training(*args, **kwargs)
