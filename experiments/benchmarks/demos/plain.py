"""The other arms: a training loop as Accelerate's documentation shows it, and with the library.

    python -m experiments.benchmarks.demos.plain '{"dataset": "...", "epochs": 10, ...}'

Data-parallel; with ``parts`` by `dbsl.uneven`, with ``merges`` in `dbsl.Rounds` without DDP. Model,
initial weights, images, augmentation, optimizer and learning rate are those of train.py, and so is
what glibc does with freed memory (`keep_freed_memory`). DDP does not average batch-norm statistics:
rank 0's own are evaluated. An epoch leaves out what does not fill a batch. Rank 0 prints one line
of JSON.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import dbsl
from dbsl.config.image_settings import ImageConfig
from dbsl.data.dataset import load_data
from dbsl.model import build_model
from dbsl.optimizer import create_optimizer
from dbsl.run.accelerator import keep_freed_memory
from experiments.benchmarks.demos.arms import half_of
from train import learning_rate


@dataclass(frozen=True)
class Settings:
    """What both arms train.

    Attributes:
        batch: Samples of a step of one process, or with ``parts`` of all.
        parts: "uneven": processes share a joint batch by the seconds that their steps take.
        merges: Of weights in the whole training, in place of DDP's sums; it needs ``parts``.
    """

    dataset: str
    label_column: str
    model: str
    train_samples: int
    eval_samples: int | None
    epochs: int
    batch: int
    lr: float
    seed: int
    precision: str = "no"
    parts: str = ""
    merges: int = 0


def main() -> None:
    """Train, and print seconds of training and the accuracy after the last epoch."""
    settings = Settings(**json.loads(sys.argv[1]))
    keep_freed_memory()
    accelerator = Accelerator(cpu=True, mixed_precision=settings.precision)
    set_seed(settings.seed)
    images = ImageConfig(
        settings.dataset,
        label_column=settings.label_column,
        train_samples=settings.train_samples,
        eval_samples=settings.eval_samples,
    )
    data = load_data(images, settings.seed)
    side = data.image_side
    model = build_model(settings.model, data.num_classes, (side,), seed=settings.seed)
    model = model.to(memory_format=torch.channels_last)
    optimizer = create_optimizer("sgd", model, settings.lr, 0.9, 5e-4)
    loader = DataLoader(range(len(data.train)), settings.batch, shuffle=True, drop_last=True)
    transform, rounds = data.transform(side, "crop", settings.seed), nullcontext()
    if settings.parts:
        batch = next(data.train.batches([np.arange(settings.batch)], transform, 0))
        sizes = _measured_sizes(accelerator, model, batch)
        loader = dbsl.uneven(loader, sizes, seed=settings.seed)
    ahead = 1 if settings.parts else accelerator.num_processes  # of a prepared scheduler's call
    schedule = {"lr": 1.0, "lr_schedule": "cosine", "min_lr": 0.0, "epochs": settings.epochs}
    schedule = SimpleNamespace(**schedule, warmup_epochs=1.0)
    steps = len(loader) // ahead * ahead  # an epoch's

    def share_of_rate(step: int) -> float:
        return learning_rate(step / steps, schedule, schedule)

    scheduler = LambdaLR(optimizer, share_of_rate)
    if settings.merges:
        weight, every = sizes[accelerator.process_index], steps * settings.epochs // settings.merges
        rounds = dbsl.Rounds(model, optimizer, every=every, weight=weight)
    else:
        model = accelerator.prepare(model)
    if not settings.parts:
        optimizer, loader, scheduler = accelerator.prepare(optimizer, loader, scheduler)
    accelerator.wait_for_everyone()
    began, ends = time.perf_counter(), []
    with rounds:
        for epoch in range(settings.epochs):
            model.train()
            if settings.parts:
                loader.set_epoch(epoch)
            for samples in loader:
                images, labels = next(data.train.batches([samples.numpy()], transform, epoch))
                with accelerator.autocast():
                    loss = F.cross_entropy(model(images), labels)
                if settings.parts and not settings.merges:
                    loss = loss * loader.scale(len(labels))
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                if settings.merges:
                    rounds.step()
            ends.append(time.perf_counter())
    accelerator.wait_for_everyone()
    seconds = time.perf_counter() - began
    if accelerator.is_main_process:
        half = half_of(settings.epochs)
        answer = {
            "train_s": seconds,
            "epoch_s": (ends[-1] - ends[half - 1]) / (settings.epochs - half),
            "accuracy": _accuracy(accelerator.unwrap_model(model), data, settings),
        }
        print(json.dumps(answer), flush=True)
    accelerator.end_training()


def _measured_sizes(accelerator: Accelerator, model: nn.Module, batch) -> list[int]:
    """Return each process's part of a joint batch, by the seconds that its steps take."""
    images, labels = batch

    def step(size: int) -> None:
        with accelerator.autocast():
            loss = F.cross_entropy(model(images[:size]), labels[:size])
        loss.backward()
        model.zero_grad()

    before = copy.deepcopy(model.state_dict())  # running statistics move
    line = dbsl.measure_step(step, [len(labels) // n for n in (8, 4, 2)], seconds=15).model
    model.load_state_dict(before)
    own = torch.tensor([float(line.slope), float(line.intercept)], dtype=torch.float64)
    rows = accelerator.gather(own).view(-1, 2).tolist()
    times = [dbsl.TimeModel(*row) for row in rows]
    return dbsl.split_batch(len(labels), times, least=2).local_batch_sizes


@torch.no_grad()
def _accuracy(model: torch.nn.Module, data, settings: Settings) -> float:
    model.eval()
    transform = data.transform(data.image_side, "none", settings.seed)
    count = len(data.evaluation)
    batches = [range(start, min(start + 256, count)) for start in range(0, count, 256)]
    right = 0
    for images, labels in data.evaluation.batches(map(_numbers, batches), transform):
        right += int((model(images).argmax(1) == labels).sum())
    return right / count


def _numbers(batch: range):
    return torch.tensor(batch).numpy()


if __name__ == "__main__":
    main()
