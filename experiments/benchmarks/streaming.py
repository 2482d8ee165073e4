"""Data larger than the disk: speed, coverage, disk and memory of images that come by row group.

    nice -n 10 python -m experiments.benchmarks.streaming

makes 200,000 JPEGs in parquet shards under a temporary folder, with a cache of a tenth of them, and
writes experiments/results/streaming.csv. What is compared:

- two processes with unequal shares that read all images in each of three epochs, at the same time,
  through one cache: which images are met how often, bytes on the disk, memory, bytes read. Nothing
  is decoded here;
- how well blocks are shuffled, and the cache that they need;
- images per second of CPU time, decoded and cropped to 128 px by turns in one process: from the
  cache, with the CPU time of the threads that fill it, from what `datasets` has on the disk, and
  from torchvision's ImageFolder.

The JPEGs are some thousands of noisy pictures; a number in each makes all of them differ. A
quarter of an hour on two idle cores; 4 GB of disk, which are free afterwards.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import datasets
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from dbsl.base.seeds import generator
from dbsl.config.image_settings import ImageConfig
from dbsl.data import images
from dbsl.data.dataset import Data, load_data
from dbsl.data.transforms import Transform
from dbsl.extras.streaming import Blocks
from dbsl.extras.streaming.groups import GroupCache
from dbsl.extras.streaming.shards import ShardedSplit
from dbsl.plan.sampler import EpochSampler
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
SIDE, PICTURES, CLASSES = 192, 4000, 1000
GROUP, SHARD = 100, 10_000  # images of a row group, as `datasets` writes them; of a shard
BATCH, TURNS, BATCHES = 64, 9, 12
SHARES, EPOCHS = (0.65, 0.35), 3
BLOCKS = (1024, 4096, 8192, 32768)

Row = dict[str, Any]


def make(folder: Path, count: int) -> int:
    """Write the shards, and one of them as files too; return the bytes of all images."""
    rng, bytes_ = np.random.default_rng(0), 0
    pictures = [_jpeg(rng) for _ in range(min(PICTURES, count))]
    labels = rng.permutation(np.arange(count) % CLASSES)
    names = [str(number) for number in range(CLASSES)]
    features = datasets.Features(
        image=datasets.Image(),
        label=datasets.ClassLabel(names=names),
        number=datasets.Value("int64"),
    )
    (folder / "shards").mkdir(parents=True)
    for shard, numbers in enumerate(np.array_split(np.arange(count), -(-count // SHARD))):
        contents = [_numbered(pictures[n % len(pictures)], n) for n in numbers]
        bytes_ += sum(map(len, contents))
        columns = {
            "image": [{"bytes": content, "path": None} for content in contents],
            "label": labels[numbers],
            "number": numbers,
        }
        table = pa.table(columns, schema=features.arrow_schema)
        path = folder / f"shards/train-{shard:05d}-of-{-(-count // SHARD):05d}.parquet"
        pq.write_table(table, path, row_group_size=GROUP, compression="none", use_dictionary=False)
        if shard == 0:
            (folder / "one").mkdir()
            shutil.copy(path, folder / "one/train.parquet")
            for number, content, label in zip(numbers, contents, labels[numbers], strict=True):
                file = folder / f"files/{label:04d}/{number:06d}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
    return bytes_


def _jpeg(rng: np.random.Generator) -> bytes:
    """Return a picture of a few colours and noise, 10 to 20 KB."""
    coarse = Image.fromarray(rng.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), dtype=np.float32)
    noise = rng.normal(0, rng.uniform(8, 24), (SIDE, SIDE, 1))
    out = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=80)
    return out.getvalue()


def _numbered(jpeg: bytes, number: int) -> bytes:
    """Return a JPEG with its number in a comment."""
    return jpeg[:2] + b"\xff\xfe" + struct.pack(">Hq", 10, number) + jpeg[2:]


def _number_of(jpeg: bytes) -> int:
    return struct.unpack(">q", jpeg[6:14])[0]


def _streamed(folder: Path, gib: float, block: int) -> ImageConfig:
    settings = {"cache_gib": gib, "shuffle_block": block, "loader_workers": 0, "holdout": 0.001}
    return ImageConfig(str(folder / "shards"), **settings)


def speed_rows(folder: Path, gib: float, block: int) -> Iterator[Row]:
    """Yield images per second of CPU time of the three ways, taken by turns in one process."""
    torch.set_num_threads(1)
    streamed = load_data(_streamed(folder, gib, block))
    stored = load_data(ImageConfig(str(folder / "one"), loader_workers=0, holdout=0.01))
    ours = Transform(128, "crop", True, streamed.mean, streamed.std, 0)
    theirs = v2.Compose(
        [
            v2.RandomResizedCrop(128),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(streamed.mean, streamed.std),
        ]
    )
    files = ImageFolder(str(folder / "files"), theirs)

    def loader(data: Data) -> Callable[[int], None]:
        count = len(data.train)
        order = EpochSampler([count], blocks=data.train.blocks).indices(0, 0, 0)
        whole = order[: count // BATCH * BATCH].reshape(-1, BATCH)
        # One call, as in an epoch: row groups come while batches are made.
        batches = data.train.batches(list(whole), ours)

        def turn(_: int) -> None:
            for _ in range(BATCHES):
                next(batches)

        return turn

    shuffled = np.random.default_rng(0).permutation(len(files))

    def torchvision(number: int) -> None:
        for batch in range(number * BATCHES, (number + 1) * BATCHES):
            places = np.arange(batch * BATCH, (batch + 1) * BATCH) % len(files)
            torch.stack([files[place][0] for place in shuffled[places]])

    ways = {
        f"cache of {gib:.2f} GiB": loader(streamed),
        "datasets, all on the disk": loader(stored),
        "torchvision ImageFolder": torchvision,
    }
    streamed_way = next(iter(ways))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    clock = _fill_clock()
    for number in range(TURNS + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            began = time.thread_time()
            ways[name](number)
            if number:  # the first warms up, and fills a block
                rates[name].append(BATCH * BATCHES / (time.thread_time() - began))
    per_image = clock["seconds"] / clock["row groups"] / GROUP
    rates[streamed_way] = [1 / (1 / rate + per_image) for rate in rates[streamed_way]]
    yield _row("speed", "filling the cache", "ms of a core for an image", [1000 * per_image])
    for name, values in rates.items():
        pairs = zip(values, rates["torchvision ImageFolder"], strict=True)
        yield _row(
            "speed", name, "images/s of a core", values, f"{median(a / b for a, b in pairs):.3f}"
        )


def _row(part: str, what: str, unit: str, values: list[float], beside: object = "") -> Row:
    found = [f"{number:.6g}" for number in (median(values), min(values), max(values))]
    return {
        "part": part,
        "what": what,
        **dict(zip(("median", "low", "high"), found, strict=True)),
        "unit": unit,
        "beside": beside,
    }


def _fill_clock() -> dict[str, float]:
    """Return what counts from now on: row groups that are fetched, and their seconds of CPU."""
    spent, lock = {"seconds": 0.0, "row groups": 0}, threading.Lock()

    def timed(name: str, groups: int) -> None:
        function = getattr(GroupCache, name)

        def call(self: GroupCache, *arguments: Any) -> Any:
            began = time.thread_time()
            result = function(self, *arguments)
            with lock:
                spent["seconds"] += time.thread_time() - began
                spent["row groups"] += groups
            return result

        setattr(GroupCache, name, call)

    timed("hold", 0)
    timed("fetch", 1)
    return spent


def epochs_rows(folder: Path, gib: float, block: int, count: int) -> Iterator[Row]:
    """Yield what two processes met in each epoch, and what disk and memory they took."""
    command = [
        sys.executable,
        "-m",
        "experiments.benchmarks.streaming",
        "--worker",
        str(folder),
        str(gib),
        str(block),
    ]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": str(len(SHARES))}
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment) for rank in range(len(SHARES))
    ]
    if any(worker.wait(timeout=6 * 3600) for worker in workers):
        raise SystemExit("a process failed")
    notes = [json.loads((folder / f"notes-{rank}.json").read_text()) for rank in range(len(SHARES))]
    for epoch in range(EPOCHS):
        met = np.zeros(count, np.int64)
        for rank in range(len(SHARES)):
            np.add.at(met, np.load(folder / f"met-{rank}-{epoch}.npy"), 1)
        held_out = count - notes[0][epoch]["images"] - notes[1][epoch]["images"]
        of_epoch = [note[epoch] for note in notes]
        name = f"epoch {epoch + 1}"
        yield _row("coverage", f"{name}, images never met", "images", [(met == 0).sum() - held_out])
        yield _row("coverage", f"{name}, images met twice", "images", [(met > 1).sum()])
        for key, unit in (("disk", "MiB, at most"), ("memory", "MiB"), ("read", "MiB from shards")):
            values = [note[key] for note in of_epoch]
            beside = f"{1024 * gib:.0f}" if key == "disk" else ""
            yield _row(key, name, unit, values if key != "read" else [sum(values)], beside)


def work(folder: Path, gib: float, block: int, rank: int) -> None:
    """Be one of the processes."""
    torch.set_num_threads(1)
    datasets.config.HF_DATASETS_CACHE = folder / "hf"
    met: list[int] = []
    open_, read = ShardedSplit._open, [0]

    def opened(self: ShardedSplit, value: Any) -> Any:
        met.append(_number_of(value["bytes"]))
        return open_(self, value)

    write = ShardedSplit.write

    def written(self: ShardedSplit, place: int, path: Path) -> None:
        write(self, place, path)
        read[0] += path.stat().st_size

    ShardedSplit._open, ShardedSplit.write = opened, written
    images.cut = lambda image, box, side, *_: np.zeros((side, side, 3), np.uint8)
    data = load_data(_streamed(folder, gib, block))
    data.train.check_room(BATCH)
    count = len(data.train)
    first = int(count * SHARES[0])
    sampler = EpochSampler([first, count - first], blocks=data.train.blocks)
    transform = Transform(16, "crop", True, data.mean, data.std, 0)
    notes, cache = [], folder / "hf/dbsl/row-groups"
    for epoch in range(EPOCHS):
        met.clear()
        read[0] = 0
        with _Watch(cache) as watch:
            steps = sampler.steps(rank, epoch, 0, BATCH)
            for _ in data.train.batches([s.parts[0].indices for s in steps], transform, epoch):
                pass
        np.save(folder / f"met-{rank}-{epoch}.npy", np.array(met))
        notes.append(
            {
                "images": len(sampler.indices(rank, epoch, 0)),
                "disk": watch.most / 2**20,
                "memory": psutil.Process().memory_info().rss / 2**20,
                "read": read[0] / 2**20,
            }
        )
        (folder / f"notes-{rank}.json").write_text(json.dumps(notes))


class _Watch:
    """Looks all the time how many bytes a folder has."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._over, self.most = folder, threading.Event(), 0
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.2):
            total = 0
            for file in self._folder.iterdir():
                try:
                    total += file.stat().st_size
                except FileNotFoundError:
                    continue
            self.most = max(self.most, total)


def shuffle_rows(count: int, bytes_: int) -> Iterator[Row]:
    """Yield how well an epoch is mixed, in blocks of several sizes and without blocks."""
    sizes = np.full(count // GROUP, GROUP)
    for block in (*BLOCKS, None):
        rng = generator(0, "shuffle", 0)
        order = rng.permutation(count) if block is None else Blocks(sizes, block).order(rng)
        batches = order[: count // BATCH * BATCH].reshape(-1, BATCH) // GROUP
        same = sum(
            float((np.unique(batch, return_counts=True)[1] ** 2).sum() - BATCH) for batch in batches
        )
        pairs = len(batches) * BATCH * (BATCH - 1)
        moved = np.abs(order - np.arange(count)).mean() / count
        name = "all images" if block is None else f"blocks of {block}"
        needed = "" if block is None else f"{2 * block * bytes_ / count / 2**30:.2f} GiB for two"
        yield _row(
            "shuffle",
            f"{name}: pairs of a batch of one row group",
            "%",
            [100 * same / pairs],
            needed,
        )
        yield _row("shuffle", f"{name}: mean distance moved", "of the data set", [moved])


def main() -> None:
    """Make the data, measure, write the CSV, and remove the data."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=200_000)
    parser.add_argument("--share", type=float, default=0.1, help="of the data, in the cache")
    parser.add_argument("--block", type=int, default=4096, help="images that are shuffled together")
    parser.add_argument("--output", type=Path, default=ROOT / "experiments/results/streaming.csv")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        folder, gib, block, rank = arguments.worker
        work(Path(folder), float(gib), int(block), int(rank))
        return
    with tempfile.TemporaryDirectory(prefix="dbsl-streaming-") as scratch:
        folder = Path(scratch)
        bytes_ = make(folder, arguments.images)
        gib, block = round(arguments.share * bytes_ / 2**30, 3), arguments.block
        datasets.config.HF_DATASETS_CACHE = folder / "hf"
        size = bytes_ / 2**30
        rows = [_row("data", f"{arguments.images} JPEGs", "GiB", [size], f"{gib} GiB of cache")]
        for part in (
            epochs_rows(folder, gib, block, arguments.images),
            shuffle_rows(arguments.images, bytes_),
            speed_rows(folder, gib, block),
        ):
            rows += part
            record(arguments.output, rows, "python -m experiments.benchmarks.streaming")


if __name__ == "__main__":
    main()
