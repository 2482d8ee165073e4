"""A batch size for each process in Lightning: `backward` scales, the logged loss is unscaled."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from dbsl.library.loader import UnevenLoader


class Uneven:
    """Goes before LightningModule in the base classes.

    `train_dataloader`, the module's or a data module's, returns a loader from `dbsl.uneven`, with
    `accumulate` if the trainer has `accumulate_grad_batches`.
    """

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Record the number of samples."""
        self._samples = extract_batch_size(batch)
        return super().on_train_batch_start(batch, batch_idx)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward on the loss times its scale; Lightning has divided it by the batches."""
        loader = self.trainer.train_dataloader
        if not isinstance(loader, UnevenLoader):
            raise TypeError(f"train_dataloader must return dbsl.uneven(...), got {type(loader)}")
        scale = loader.scale(self._samples) * self.trainer.accumulate_grad_batches
        super().backward(loss * scale, *args, **kwargs)
