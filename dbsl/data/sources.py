"""What a run needs from its data; and data from torch datasets with inputs of one shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dbsl.base.errors import SettingError, require
from dbsl.config.settings import NO_SIDE
from dbsl.data.transforms import padded_images, to_device
from dbsl.plan.sampler import Order

Batch = tuple[Tensor, Tensor]  # inputs [B, ...], labels [B]
_DRAWN_AT_ONCE = 32  # batches: enough to be cheap, but the first does not wait long
_READ_AGAIN = 32  # most samples that are compared with a second reading


class Source(Protocol):
    """Samples of one split, read by number.

    It may have a method ``start()``, which a run calls before its clock starts. It returns once
    whatever makes batches, such as loader processes, is ready.
    """

    bad: Mapping[int, str]  # rows of unreadable samples, which are left out, and why
    blocks: Order | None = None  # draws the order of an epoch; None: any order will do

    def __len__(self) -> int: ...

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Any, epoch: int = 0
    ) -> Iterator[Batch]:
        """Yield the batches of these sample numbers, int64 [B], inputs and labels on the device.

        B may differ between them. `transform` is what `TrainingData.transform` returned.
        """


@runtime_checkable
class TrainingData(Protocol):
    """Your own data. `dbsl.data.sources.TensorData` is an example."""

    name: str  # in the settings and the run folder
    unit: str  # what a sample is called
    train: Source
    evaluation: Source
    eval_split: str  # where `evaluation` comes from, in words
    num_classes: int  # labels lie in [0, num_classes)
    resolutions: tuple[int, ...]  # of stages, ascending; (0,) if inputs have no side

    def on(self, device: torch.device) -> TrainingData:
        """Return the data with batches on a device."""

    def normalised_for(self, model: Any) -> TrainingData:
        """Return the data with inputs as a model's pretrained weights expect them."""

    def transform(self, resolution: int, augment: str, seed: int) -> Any:
        """Return the transform for `Source.batches`, random or not, as `augment` says."""

    def example(self, size: int, resolution: int) -> Batch:
        """Return a batch on the device like those of training, with any content."""


def image_batch(size: int, side: int, classes: int, device: torch.device) -> Batch:
    """Return random images, [B, 3, side, side] in channels_last, and labels of all classes."""
    stream = torch.Generator(device).manual_seed(0)
    images = torch.randn(size, 3, side, side, device=device, generator=stream)
    labels = torch.arange(size, device=device) % classes
    return images.contiguous(memory_format=torch.channels_last), labels


class TensorSource(Source):
    """Inputs and labels of one split, kept on the device: a batch is one gather."""

    def __init__(
        self, inputs: Tensor, labels: Tensor, bad: Mapping[int, str] | None = None
    ) -> None:
        self.inputs, self.labels, self.bad = inputs, labels, bad or {}  # [N, ...], [N]
        self.device = inputs.device

    def __len__(self) -> int:
        return len(self.inputs)

    def on(self, device: torch.device) -> TensorSource:
        """Return the samples on a device."""
        return type(self)(self.inputs.to(device), self.labels.to(device), self.bad)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Any = None, epoch: int = 0
    ) -> Iterator[Batch]:
        """See `Source.batches`; inputs are ready for the model, and the transform is ignored."""
        for samples in index_batches:
            places = to_device(samples, self.device)
            yield self.inputs.index_select(0, places), self.labels.index_select(0, places)


class PixelStore(TensorSource):
    """Small images of one size, uint8 [N, S, S, 3]; their batches pass the transform."""

    _padded: Tensor | None = None  # pixels in a row, [P, 3], as "crop" reads them

    def pad(self) -> None:
        """Replace the images by padded ones, which "crop" needs: 1.6 times the memory."""
        if self._padded is None:
            side, padded = self.inputs.shape[1], padded_images(self.inputs)
            first = (padded.shape[1] - side) // 2
            self.inputs = padded[:, first : first + side, first : first + side]
            self._padded = padded.view(-1, 3)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Any, epoch: int = 0
    ) -> Iterator[Batch]:
        """See `Source.batches`. Random numbers are drawn for many batches at once."""
        index_batches, crops = [*index_batches], transform.augment == "crop"
        for first in range(0, len(index_batches), _DRAWN_AT_ONCE):
            some = index_batches[first : first + _DRAWN_AT_ONCE]
            samples, sizes = np.concatenate(some), [len(batch) for batch in some]
            places = to_device(samples, self.device)
            labels = self.labels.index_select(0, places).split(sizes)
            if crops:
                self.pad()
                windows = transform.windows(self.inputs.shape[1], samples, epoch, samples)
                rows, columns = to_device(np.stack(windows), self.device)
                rows, columns = rows[:, :, None].split(sizes), columns[:, None, :].split(sizes)
                images = (self._padded[own + of] for own, of in zip(rows, columns, strict=True))
            else:
                images = (self.inputs.index_select(0, own) for own in places.split(sizes))
            for batch, pixels, own in zip(some, images, labels, strict=True):
                yield transform(pixels, batch, epoch, prepared=crops), own


@dataclass(frozen=True)
class TensorData:
    """Two map-style datasets of (input tensor, label) as a run's data.

    Each sample is read once, checked, and kept on the device: datasets become sources.
    """

    train: Any
    evaluation: Any
    num_classes: int  # labels are whole numbers in [0, num_classes)
    name: str = "tensors"  # in the settings and the run folder
    unit: str = field(default="sample", init=False)
    eval_split: str = field(default="a dataset of its own", init=False)
    resolutions: tuple[int, ...] = field(default=(NO_SIDE,), init=False)

    def __post_init__(self) -> None:
        require(self.num_classes > 1, "num_classes must be at least 2", self.num_classes)
        first = None
        for split in ("train", "evaluation"):
            samples = getattr(self, split)
            if not isinstance(samples, TensorSource):
                samples = _read(samples, split, self.num_classes, first)
                object.__setattr__(self, split, samples)  # frozen: there is no other way
            first = samples.inputs[0]

    @cached_property
    def digest(self) -> str:
        """SHA-256 that identifies the training samples."""
        found = hashlib.sha256()
        for tensor in (self.train.inputs, self.train.labels):
            found.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
        return found.hexdigest()

    def on(self, device: torch.device) -> TensorData:
        """See `TrainingData.on`."""
        return replace(self, train=self.train.on(device), evaluation=self.evaluation.on(device))

    def normalised_for(self, model: Any) -> TensorData:
        """Return the data unchanged."""
        return self

    def transform(self, resolution: int, augment: str, seed: int) -> None:
        """Return None: samples remain unchanged."""

    def example(self, size: int, resolution: int) -> Batch:
        """Return the first training samples, repeated if there are fewer."""
        places = torch.arange(size, device=self.train.device) % len(self.train)
        return self.train.inputs[places], self.train.labels[places]


def as_source(given: Any, data: TrainingData, side: int, name: str) -> Source:
    """Return evaluation samples for a model of `data`, on its device; errors call them `name`.

    `given` is a source, data with evaluation samples, or a map-style dataset of (input tensor,
    label), with inputs as the model takes them. Images have `side` pixels a side.
    """
    classes = getattr(given, "num_classes", data.num_classes)
    names = (getattr(of, "class_names", None) for of in (given, data))
    if classes != data.num_classes or len({*names} - {None}) > 1:
        raise SettingError(
            f"{name} must have the {data.num_classes} classes of the training data, by the same "
            f"names in the same order, got {classes} of other names or number"
        )
    given = getattr(given, "evaluation", given)
    if hasattr(given, "batches") and not isinstance(given, TensorSource):
        return given
    inputs, _ = data.example(1, side)
    if not isinstance(given, TensorSource):
        given = _read(given, name, data.num_classes, inputs[0])
    return given.on(inputs.device)


def _read(
    dataset: Sequence[tuple[Tensor, int]], split: str, classes: int, first: Tensor | None
) -> TensorSource:
    """Return the samples of a dataset; all must be like `first`, or else like its first sample."""
    has_some = hasattr(dataset, "__len__") and len(dataset)
    shown = f"{type(dataset).__name__} without any"
    require(has_some, f"{split} must be a map-style dataset with samples", shown)
    inputs, labels = [], []
    for number in range(len(dataset)):
        where = f"in sample {number}"
        try:
            sample, label = dataset[number]
            if int(label) != label:
                raise ValueError(f"label {label!r}")
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"{split} must give a pair of a tensor and a whole number for each sample, "
                f"got sample {number}, which is none ({error})"
            ) from None
        kind = type(sample).__name__
        is_tensor, text = isinstance(sample, Tensor), f"{split} must have tensors for inputs"
        require(is_tensor, text, f"{kind} {where}")
        first = sample if first is None else first
        text = f"{split} must have inputs of one shape and type, {_kind(first)} as the first"
        require(_kind(sample) == _kind(first), text, f"{_kind(sample)} {where}")
        text = f"{split} must have labels in [0, {classes})"
        require(0 <= label < classes, text, f"{label} {where}")
        inputs.append(sample)
        labels.append(int(label))
    text = f"{split} must give the same tensor each time, since each sample is read once"
    for number in range(0, len(inputs), -(-len(inputs) // _READ_AGAIN)):
        alike = torch.equal(dataset[number][0], inputs[number])
        require(alike, text, f"another for sample {number}")
    return TensorSource(torch.stack(inputs), torch.tensor(labels))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
