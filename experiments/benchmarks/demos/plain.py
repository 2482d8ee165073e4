"""The other arm: a training loop as Accelerate's documentation shows it.

    python -m experiments.benchmarks.demos.plain '{"dataset": "...", "epochs": 10, ...}'

Data-parallel. Model, initial weights, images, augmentation, optimizer and learning rate are those
of train.py, and so is what glibc does with freed memory (`keep_freed_memory`). DDP does not average
batch-norm statistics: rank 0's own are evaluated. An epoch leaves out what does not fill a batch.
Rank 0 prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

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
        batch: Samples of a step of one process.
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


def main() -> None:
    """Train, and print seconds of training and the accuracy after the last epoch."""
    settings = Settings(**json.loads(sys.argv[1]))
    keep_freed_memory()
    accelerator = Accelerator(cpu=True, mixed_precision="no")
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
    schedule = {"lr": 1.0, "lr_schedule": "cosine", "min_lr": 0.0, "epochs": settings.epochs}
    schedule = SimpleNamespace(**schedule, warmup_epochs=1.0)
    steps = len(loader) // accelerator.num_processes * accelerator.num_processes  # an epoch's

    def share_of_rate(step: int) -> float:
        return learning_rate(step / steps, schedule, schedule)

    scheduler = LambdaLR(optimizer, share_of_rate)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    transform = data.transform(side, "crop", settings.seed)
    accelerator.wait_for_everyone()
    began, ends = time.perf_counter(), []
    for epoch in range(settings.epochs):
        model.train()
        for samples in loader:
            images, labels = next(data.train.batches([samples.numpy()], transform, epoch))
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
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
