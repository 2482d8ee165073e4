"""What is timed, each arm in a process of its own that runs only when it is told to.

    python -m experiments.benchmarks.speed.arms NAME SETTINGS-AS-JSON

An arm says "ready", and then for each number of images that it reads on a line trains on
about as many and answers with what that took. All arms have the same data, model,
batch and precision, so that they may take turns on a noisy machine.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torchvision.transforms import v2

from dbsl.base.machine import threads_of_process
from dbsl.cluster.weights import compile_in_place
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import Data, load_data
from dbsl.data.transforms import Transform
from dbsl.model import build_model
from dbsl.optimizer import create_optimizer
from dbsl.plan.sampler import evaluation_batches
from dbsl.run.accelerator import start_accelerator

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 5e-4


@dataclass(frozen=True)
class Settings:
    """What arms have in common."""

    dataset: str
    model: str
    resolution: int
    batch: int
    precision: str
    workers: int = 1  # train.py's, simulated
    loader_workers: int = 0  # the plain loop's
    compiled: bool = False  # both train.py and the bare step
    probe: bool = True  # train.py's of the noise scale
    round_steps: int = 8  # train.py's worker may be told to stop only between rounds


class Pace:
    """Lets an arm go on when it is told to, and says what it did."""

    def __init__(self, answers: TextIO) -> None:
        self._answers = answers
        self._left = 0
        self._done = 0
        self._began = 0.0
        self._started = False

    def __call__(self, images: int) -> None:
        """Note that so many images are done, or at the start of a loop none; wait when due."""
        self._done += images
        if self._done < self._left:
            return
        synchronize()  # a device is handed its work long before it is done
        if self._started:
            answer = {
                "images": self._done,
                "seconds": time.perf_counter() - self._began,
                "peak_mib": _peak_mib(),
            }
            print(json.dumps(answer), file=self._answers, flush=True)
        else:
            print("ready", file=self._answers, flush=True)
            self._started = True
        line = sys.stdin.readline()
        if not line:
            os._exit(0)  # the loops below have no end
        self._left, self._done, self._began = int(line), 0, time.perf_counter()


def rounds(settings: Settings, pace: Pace) -> None:
    """train.py itself: its whole loop, with a pause before a round."""
    import train

    train_turn, done = train.train_turn, [0]

    def paced(turn, training):
        pace(done[0])
        train_turn(turn, training)
        done[0] = round_images

    train.train_turn = paced
    # About what a step takes: what is measured in training is bounded by its share of that.
    slope, intercept = (1.6e-5, 5e-4) if torch.cuda.is_available() else (0.01, 0.05)
    round_images = settings.round_steps * settings.batch
    samples = len(load_data(ImageConfig(settings.dataset)).train)
    count = max(1, samples // (settings.workers * round_images))
    samples = count * settings.workers * round_images
    with tempfile.TemporaryDirectory() as scratch:
        train.main(
            train.Config(
                dataset=settings.dataset,
                train_samples=samples,
                model=settings.model,
                resolutions=(settings.resolution,),
                local_batch_sizes=(settings.batch,) * settings.workers,
                workers=settings.workers,
                rounds_per_epoch=count,
                slope=(slope,),
                intercept=(intercept,),
                epochs=1000,
                eval_every=1000,
                lr=LR,
                checkpoint_every=0,
                noise_scale=settings.probe,
                mixed_precision=settings.precision,
                compile=settings.compiled,
                report_to="none",
                output_dir=f"{scratch}/run",
            )
        )


def bare(settings: Settings, pace: Pace) -> None:
    """The limit: the model's step on one batch that lies ready."""
    accelerator, data = _start(settings)
    model = _model(settings, data, accelerator)
    if settings.compiled:
        compile_in_place(model, accelerator.device)
    optimizer = create_optimizer("sgd", model, LR, MOMENTUM, WEIGHT_DECAY)
    images, labels = _batch(data, settings)
    pace(0)
    while True:
        with accelerator.autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        pace(len(labels))


def plain(settings: Settings, pace: Pace) -> None:
    """A loop as in Accelerate's examples: a DataLoader, torchvision's transforms, all prepared."""
    data = load_data(ImageConfig(settings.dataset))
    transforms = [v2.RandomCrop(data.image_side, padding=data.image_side // 8)]
    transforms += [v2.RandomHorizontalFlip()]
    if settings.resolution != data.image_side:
        transforms += [v2.Resize(settings.resolution)]
    transforms += [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    transforms += [v2.Normalize(data.mean, data.std)]
    dataset = _Images(data, v2.Compose(transforms))
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), mixed_precision=settings.precision
    )
    loader = torch.utils.data.DataLoader(
        dataset,
        settings.batch,
        shuffle=True,
        num_workers=settings.loader_workers,
        drop_last=True,
        pin_memory=torch.cuda.is_available(),
    )
    model = build_model(settings.model, data.num_classes, (settings.resolution,))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    pace(0)
    while True:
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            pace(len(labels))


ARMS = {arm.__name__: arm for arm in (rounds, bare, plain)}


class _Images(torch.utils.data.Dataset):
    """Decoded images in memory, as torchvision's CIFAR classes keep them."""

    def __init__(self, data: Data, transform: Any) -> None:
        from PIL import Image

        raw = Transform(data.image_side, "none", False, (0.0,) * 3, (1 / 255,) * 3, 0)
        batches = evaluation_batches(len(data.train), 1000)
        pixels = [images for images, _ in data.train.batches(batches, raw)]
        array = torch.cat(pixels).permute(0, 2, 3, 1).to(torch.uint8).numpy()
        self._images = [Image.fromarray(image) for image in array]
        self._labels = data.train.labels
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._transform(self._images[index]), int(self._labels[index])


def _start(settings: Settings) -> tuple[Accelerator, Data]:
    """Return the accelerator, and the data on its device, as train.py has them."""
    accelerator = start_accelerator(settings.precision, timeout_s=60.0)
    return accelerator, load_data(ImageConfig(settings.dataset), device=accelerator.device)


def _model(settings: Settings, data: Data, accelerator: Accelerator) -> torch.nn.Module:
    model = build_model(settings.model, data.num_classes, (settings.resolution,))
    return model.to(accelerator.device, memory_format=torch.channels_last).train()


def _batch(data: Data, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    transform = Transform(settings.resolution, "none", False, data.mean, data.std, 0)
    return next(data.train.batches([np.arange(settings.batch)], transform))


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _peak_mib() -> int:
    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20)
    # Not getrusage, whose maximum a process inherits from the one that started it.
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) >> 10


def main() -> None:
    """Run the arm that the command line names."""
    settings = Settings(**json.loads(sys.argv[2]))
    torch.set_num_threads(threads_of_process())
    answers, sys.stdout = sys.stdout, sys.stderr  # what an arm prints is no answer
    pace = Pace(answers)
    ARMS[sys.argv[1]](settings, pace)


if __name__ == "__main__":
    main()
