"""What a run needs of its data, whatever it is: samples by number, and an example of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor]  # inputs [B, ...], labels [B]


class Source(Protocol):
    """Samples of one split, read by number.

    It may have a method ``start()``, which a run calls before its clock: it returns when the first
    batch need not wait for what makes them, such as loader processes.

    Attributes:
        bad: Samples that could not be read and are left out: their rows, and why.
    """

    bad: Mapping[int, str]

    def __len__(self) -> int: ...

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Any, epoch: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of these samples in this order, inputs and labels on the device.

        Args:
            index_batches: Sample numbers of each batch, int64 [B]; B may differ between them.
                Number ``copy * N + i`` is another copy of sample i, augmented by itself.
            transform: What `TrainingData.transform` returned.
            epoch: Epoch that anything random is drawn for.
        """


@runtime_checkable
class TrainingData(Protocol):
    """Data of one's own, for `open_session`. `dbsl.data.tensors.TensorData` is such.

    Attributes:
        name: Its name, in the settings and the run folder.
        unit: What a sample is called.
        train: Training samples.
        evaluation: Evaluation samples.
        eval_split: Where these come from, in words.
        num_classes: Number of classes; labels lie in [0, num_classes).
        resolutions: Resolutions of the stages, ascending; (0,) where inputs have no side.
    """

    name: str
    unit: str
    train: Source
    evaluation: Source
    eval_split: str
    num_classes: int
    resolutions: tuple[int, ...]

    def on(self, device: torch.device) -> TrainingData:
        """Return the data with batches on a device."""

    def transform(self, resolution: int, augment: str, seed: int) -> Any:
        """Return what `Source.batches` takes: at random as `augment` says, or not at all."""

    def example(self, size: int, resolution: int) -> Batch:
        """Return a batch on the device as training has them, of any content."""


def image_batch(size: int, side: int, classes: int, device: torch.device) -> Batch:
    """Return random images, [B, 3, side, side] in channels_last, and labels of all classes."""
    stream = torch.Generator(device).manual_seed(0)
    images = torch.randn(size, 3, side, side, device=device, generator=stream)
    labels = torch.arange(size, device=device) % classes
    return images.contiguous(memory_format=torch.channels_last), labels
