"""Images by sample number: decoded once and kept, or by loader processes as they are read.

The caller says which samples make a batch, so that every worker may have a batch size of its own.
No source here may pass through `accelerator.prepare`, which would shard its batches once more.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import datasets
import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader

from dbsl.seeds import sample_seeds, stream_seed
from dbsl.transforms import Transform, to_device

_Request = tuple[np.ndarray, Transform, int]  # samples, transform, epoch: one batch


class ImageSource(ABC):
    """Images and labels of one split, read by sample number.

    Attributes:
        labels: Class of each sample, int64 [N], on the host.
        device: Where batches are made.
    """

    def __init__(self, labels: np.ndarray, device: torch.device) -> None:
        self.labels = labels
        self.device = device

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield images, float32 [B, 3, R, R], and labels, int64 [B], on the device.

        Args:
            index_batches: Sample numbers of each batch, int64 [B]; B may differ between them.
            transform: What the images pass.
            epoch: Epoch that the augmentation is drawn for.
        """


class PixelStore(ImageSource):
    """Small images of one size, decoded and kept on the device: a batch is one gather."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, device: torch.device) -> None:
        """Keep `pixels`, uint8 [N, S, S, 3]: whole pixels together, as resizing likes them."""
        super().__init__(labels, device)
        self._pixels = torch.from_numpy(pixels).to(device)

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `ImageSource.batches`."""
        for samples in index_batches:
            pixels = self._pixels.index_select(0, to_device(samples, self.device))
            images = transform(pixels.permute(0, 3, 1, 2), samples, epoch)
            yield images, to_device(self.labels[samples], self.device)


class ImageLoader(ImageSource):
    """Large or uneven images, decoded and cut to size in loader processes as they are needed.

    The processes start with the first batch and stay until this object goes. A fork server makes
    them, because the fork of a process that has CUDA or gloo threads may hang. Each therefore
    imports the main script, which needs its ``if __name__ == "__main__":``.
    """

    def __init__(self, split: ImageSplit, device: torch.device, loader_workers: int) -> None:
        super().__init__(split.labels, device)
        self._calls = 0  # of `batches`
        self._requests: list[_Request] = []  # of the latest call
        self._loader = DataLoader(
            split,
            batch_size=None,  # a request is a whole batch, of any size
            sampler=self._requests,
            num_workers=loader_workers,
            multiprocessing_context=_process_context() if loader_workers else None,
            worker_init_fn=_end_with_parent,
            persistent_workers=loader_workers > 0,
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # or each call would advance torch's own
        )

    def batches(
        self, index_batches: Iterable[np.ndarray], transform: Transform, epoch: int = 0
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """See `ImageSource.batches`; a new call ends an earlier one that is still under way."""
        self._calls += 1
        call = self._calls
        requests = [(samples, transform, epoch) for samples in index_batches]
        self._requests[:] = requests
        for (samples, _, _), images in zip(requests, self._loader, strict=True):
            if isinstance(images, str):
                raise ValueError(images)
            images = images.to(self.device, non_blocking=True)
            images = transform(images, samples, epoch, prepared=True)
            yield images, to_device(self.labels[samples], self.device)
            if call != self._calls:
                raise RuntimeError("a later call of batches() took over the loader processes")


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Encoded images and labels of one split; what loader processes receive.

    Attributes:
        table: Rows as `datasets` reads them, images not decoded.
        rows: Row of each sample in `table`, int64 [N].
        labels: Class of each sample, int64 [N].
        image_column: Column of the images.
        label_column: Column that the labels came from.
        dataset: What the user called the dataset.
        name: Name of the split.
    """

    table: datasets.Dataset
    rows: np.ndarray
    labels: np.ndarray
    image_column: str
    label_column: str
    dataset: str
    name: str

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, samples: np.ndarray) -> ImageSplit:
        """Return the split of these samples."""
        return replace(self, rows=self.rows[samples], labels=self.labels[samples])

    def decode(self, samples: np.ndarray) -> Iterator[Image.Image]:
        """Yield the RGB images of these samples."""
        feature = datasets.Image(mode="RGB")  # which also applies EXIF orientation
        rows = self.rows[samples]
        for row, value in zip(rows, self.table[rows][self.image_column], strict=True):
            try:
                yield feature.decode_example(value)
            except Exception as error:  # Pillow raises OSError, SyntaxError, its own and more
                where = f"image {row} of split {self.name!r} of dataset {self.dataset!r}"
                raise ValueError(f"{where} cannot be decoded ({error})") from error

    def __getitem__(self, request: _Request) -> torch.Tensor | str:
        """Return a whole batch, uint8 [B, 3, R, R], or which image it failed on.

        An exception would reach the trainer as a loader process's traceback in a message.
        """
        try:
            return self._prepare(*request)
        except ValueError as error:
            return str(error)

    def _prepare(self, samples: np.ndarray, transform: Transform, epoch: int) -> torch.Tensor:
        host_transform = transform.host_transform()
        seeds = sample_seeds(stream_seed(transform.seed, "host augment", epoch), samples)
        images = []
        with torch.random.fork_rng(devices=[]):  # without loader processes this is the trainer's
            for image, seed in zip(self.decode(samples), seeds.tolist(), strict=True):
                torch.default_generator.manual_seed(seed)  # torch.manual_seed is the GPUs' as well
                images.append(host_transform(image))
        return torch.stack(images)


def _process_context() -> multiprocessing.context.BaseContext:
    """Return a way to start processes that does not copy this one's threads and locks."""
    if "forkserver" not in multiprocessing.get_all_start_methods():  # Windows
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports torch and datasets once for all
    return context


def _end_with_parent(_: int) -> None:
    """End this loader process when the one that it serves is gone, also if that was killed.

    DataLoader's own watch is on the fork server, which in turn lives as long as its processes.
    """
    parent = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)  # sys.exit would end the thread alone

    threading.Thread(target=wait, daemon=True).start()
