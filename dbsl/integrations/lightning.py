"""A batch size for each process in Lightning: `backward` multiplies, the logged loss stays."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from dbsl.library.loader import UnevenLoader


class Uneven:
    """Stands before LightningModule among the base classes.

    `train_dataloader`, the module's or a data module's, returns a loader of `dbsl.uneven`, with
    `accumulate` where the trainer has `accumulate_grad_batches`.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Note how many samples the batch has."""
        self._samples = extract_batch_size(batch)
        return super().on_train_batch_start(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Go backward from the loss times its scale; Lightning has divided it by the batches."""
        loader = self.trainer.train_dataloader
        if not isinstance(loader, UnevenLoader):
            raise TypeError(f"train_dataloader must return dbsl.uneven(...), got {type(loader)}")
        scale = loader.scale(self._samples) * self.trainer.accumulate_grad_batches
        super().backward(loss * scale, *args, **kwargs)
