"""Large images: decoded, cropped, resized, normalised per second and core, against torchvision.

Both sides have one process with one thread, read the same rows in the same order and end with
float32 batches.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import torch
from torchvision.transforms import v2

from dbsl.config.image_settings import AugmentKwargs, ImageConfig
from dbsl.data.dataset import Data, choose_columns, load_data
from dbsl.data.transforms import Transform
from dbsl.run.accelerator import keep_freed_memory

BATCH, TURNS, BATCHES = 64, 9, 4
_AA = "rand-m9-mstd0.5-inc1"


def rows(dataset: str, resolutions: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each pipeline and resolution."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    data = load_data(ImageConfig(dataset, loader_workers=0))
    table = datasets.load_dataset(dataset, split="train").with_format(None)
    column, _ = choose_columns(ImageConfig(dataset), table.features)
    found = []
    for side in resolutions:
        pipelines = _pipelines(data, table, column, side)
        rates: dict[str, list[float]] = {name: [] for name in pipelines}
        for turn in range(TURNS + 1):
            first = turn * BATCH * BATCHES % (len(data.train) - BATCH * BATCHES)
            batches = list(np.arange(first, first + BATCH * BATCHES).reshape(BATCHES, BATCH))
            for name in list(pipelines)[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                pipelines[name](batches)
                if turn:  # the first warms up
                    rates[name].append(BATCH * BATCHES / (time.perf_counter() - began))
        for name, values in rates.items():
            pairs = zip(values, rates["torchvision"], strict=True)
            found.append(
                {
                    "part": "large images",
                    "what": name,
                    "resolution": side,
                    "batch": BATCH,
                    "median": f"{median(values):.0f}",
                    "low": f"{min(values):.0f}",
                    "high": f"{max(values):.0f}",
                    "unit": "images/s/core",
                    "over_torchvision": f"{median(a / b for a, b in pairs):.3f}",
                }
            )
    found += _memory(dataset, resolutions[0])
    torch.set_num_threads(threads)
    return found


def _pipelines(
    data: Data, table: datasets.Dataset, column: str, side: int
) -> dict[str, Callable[[list[np.ndarray]], None]]:
    """Return functions that read batches of samples."""
    ours = Transform(side, "crop", data.mirror, data.mean, data.std, 0)
    randaugment = replace(ours, augment="timm", pipeline=AugmentKwargs(aa=_AA))
    theirs = v2.Compose(
        [
            v2.RandomResizedCrop(side),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(data.mean, data.std),
        ]
    )

    def loader(batches: list[np.ndarray], transform: Transform = ours) -> None:
        for _ in data.train.batches(batches, transform):
            pass

    def plain(batches: list[np.ndarray]) -> None:
        for samples in batches:
            images = (row[column] for row in table.select(samples))
            torch.stack([theirs(image.convert("RGB")) for image in images])

    return {
        "loader": loader,
        f"loader, --aa {_AA}": partial(loader, transform=randaugment),
        "torchvision": plain,
    }


def _memory(dataset: str, side: int) -> list[dict[str, Any]]:
    """Read images over and over, in a process that does nothing else; return its memory."""
    command = [sys.executable, "-m", "experiments.benchmarks.speed.images", dataset, str(side)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=600)
    used = json.loads(done.stdout.splitlines()[-1])[2:]
    return [
        {
            "part": "large images",
            "what": "memory after each of epochs 3 to 12, 2 loaders",
            "resolution": side,
            "batch": BATCH,
            "median": f"{median(used):.1f}",
            "low": f"{min(used):.1f}",
            "high": f"{max(used):.1f}",
            "unit": "MiB",
        }
    ]


def main() -> None:
    """Read 960 images twelve times through loader processes; print MiB after each epoch."""
    dataset, side = sys.argv[1], int(sys.argv[2])
    keep_freed_memory()
    data = load_data(ImageConfig(dataset, train_samples=1000, loader_workers=2))
    transform = Transform(side, "crop", data.mirror, data.mean, data.std, 0)
    batches = list(np.arange(960).reshape(-1, BATCH // 2))
    used = []
    for epoch in range(12):
        for _ in data.train.batches(batches, transform, epoch):
            pass
        status = Path("/proc/self/status").read_text()
        used.append(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024)
    print(json.dumps(used))


if __name__ == "__main__":
    main()
