"""Corrupt input of every kind, 20,000 cases: ``python -m experiments.benchmarks.fuzz``.

Whatever a stranger hands over (a checkpoint, a config, a parquet file), the answer is a clean error
or none: no other exception, no case that takes longer than a minute, no half-written file. Corrupt
checkpoints also come with checksums that fit; what is loaded then is not trained on. About 10
minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import datasets
import numpy as np
import pyarrow.parquet
import yaml
from PIL import Image

from dbsl.base.errors import ReadError, RunStopped, SettingError, SyncError
from dbsl.checkpoint.disk import Manifest, newest, read_manifest, write_manifest
from dbsl.config.image_settings import ImageConfig
from dbsl.config.parse import parse_config
from dbsl.data.dataset import load_data
from dbsl.data.transforms import Transform
from experiments.benchmarks.record import record

LIMIT_S = 60
CLEAN = (SettingError, ReadError, SyncError, SystemExit)
ROOT = Path(__file__).resolve().parents[2]


def corrupt(content: bytes, rng: random.Random) -> bytes:
    """Return bytes with a few of them flipped, cut out, doubled, or replaced."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(data) + 1)
        span = rng.choice((1, 1, 4, 64, len(data) // 2))
        how = rng.randrange(5)
        if how == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif how == 1:
            del data[at : at + span]
        elif how == 2:
            data[at:at] = data[at : at + span]
        elif how == 3:
            data[at : at + span] = rng.randbytes(min(span, 64))
        else:
            del data[at:]
    return bytes(data)


ODD = (
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../../x",
    [],
    {},
    [[]],
)


def corrupt_tree(tree: object, rng: random.Random) -> object:
    """Return JSON with one value somewhere in it replaced, removed or added."""
    tree = json.loads(json.dumps(tree))
    places: list[tuple] = []

    def walk(node: object) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in items:
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(tree)
    node, key = rng.choice(places)
    how = rng.randrange(4)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[f"{key}?"] = node.pop(key)
    elif how == 2 and isinstance(node[key], int | float):
        node[key] = type(node[key])(node[key] * rng.choice((-1, 2, 1000)) + rng.choice((0, 1)))
    else:
        node[key] = rng.choice(ODD)
    return tree


def of_checkpoints(scratch: Path, rng: random.Random) -> Iterator[Callable[[], object]]:
    """Damage files of a checkpoint; with their checksums, or with sums that fit."""
    import train
    from dbsl.run.workers import Workers
    from experiments.benchmarks.kills import COMMON, ROUNDS

    folder = scratch / "run"
    flags = [*COMMON, *ROUNDS, "--epochs", "2", "--lr-milestones", "1", "--checkpoint-every", "1"]
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(parse_config(train.Config, [*flags, "--output-dir", str(folder)]))
    (folder / "summary.json").unlink()
    good = scratch / "good"
    shutil.copytree(folder, good)
    target = folder / "checkpoints/epoch-0001"
    shutil.rmtree(folder / "checkpoints/epoch-0002")
    shutil.rmtree(good / "checkpoints/epoch-0002")
    tree = json.loads((target / "rank-00000.json").read_text())

    def loaded(*_: object, **__: object) -> None:
        raise RunStopped("it was loaded, and would train")

    def resume() -> None:
        newest(folder)
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(True)
        with contextlib.redirect_stdout(io.StringIO()):
            train.main(parse_config(train.Config, ["--resume", str(folder), "--epochs", "2"]))

    with mock.patch.object(Workers, "turns", loaded):
        while True:
            for path in (good / "checkpoints/epoch-0001").iterdir():
                shutil.copy(path, target / path.name)
            shutil.copy(good / "metrics.jsonl", folder / "metrics.jsonl")
            if rng.random() < 0.3:
                path = rng.choice(sorted(target.iterdir()))
                path.write_bytes(corrupt(path.read_bytes(), rng))
            elif rng.random() < 0.8:
                (target / "rank-00000.json").write_text(json.dumps(corrupt_tree(tree, rng)))
                _sign(target)
            else:
                weights = target / "rank-00000.safetensors"
                weights.write_bytes(corrupt(weights.read_bytes()[:4000], rng))
                _sign(target)

            yield resume


def _sign(target: Path) -> None:
    """Write the manifest that fits a checkpoint's files, as one who wants them read would."""
    content = json.loads((target / "manifest.json").read_text())
    for name in content["manifest"]["files"]:
        data = (target / name).read_bytes()
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        content["manifest"]["files"][name] = entry
    body = json.dumps(content["manifest"], indent=2)
    content["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (target / "manifest.json").write_text(json.dumps(content, indent=2))


def of_manifests(scratch: Path, rng: random.Random) -> Iterator[Callable[[], object]]:
    """Damage the text of a manifest, or its values."""
    folder = scratch / "checkpoints/save-000001"
    folder.mkdir(parents=True)
    counts = {"sequence": 1, "epoch": 1, "processes": 1, "workers": 4, "classes": 3, "samples": 24}
    files = {"rank-00000.json": {"bytes": 3, "sha256": "00"}}
    settings = {"sync": "bsp", "workers": 4, "resolutions": [8, 16]}
    write_manifest(folder, Manifest(files=files, config=settings, **counts))
    good = (folder / "manifest.json").read_text()
    while True:
        if rng.random() < 0.5:
            (folder / "manifest.json").write_bytes(corrupt(good.encode(), rng))
        else:
            body = corrupt_tree(json.loads(good)["manifest"], rng)
            text = json.dumps(body, indent=2)
            signed = {"manifest": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}
            (folder / "manifest.json").write_text(json.dumps(signed))

        def case() -> None:
            newest(scratch)
            read_manifest(folder)

        yield case


def of_configs(scratch: Path, rng: random.Random) -> Iterator[Callable[[], object]]:
    """Damage a config's text, or give settings odd values."""
    from train import Config

    path = scratch / "config.yaml"
    good = (ROOT / "configs/mixed_gpus.yaml").read_bytes()
    names = list(Config.__dataclass_fields__)
    while True:
        if rng.random() < 0.5:
            path.write_bytes(corrupt(good, rng))
        else:
            chosen = rng.sample(names, 3)
            odd = {name: rng.choice((*ODD, 3, 0.5, [1, 2], "auto")) for name in chosen}
            odd.pop("resume", None)
            path.write_text(yaml.safe_dump(odd))

        def case() -> None:
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                parse_config(Config, ["--config", str(path)])

        yield case


def of_parquet_files(scratch: Path, rng: random.Random) -> Iterator[Callable[[], object]]:
    """Damage a parquet file of images, and read every image that it has left."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 70, 70, 3), dtype=np.uint8)
    table = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(p) for p in pixels], "label": [k % 3 for k in range(24)]},
        features=datasets.Features(
            {"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b", "c"])}
        ),
    )
    good = scratch / "good.parquet"
    pyarrow.parquet.write_table(table.data.table, good)
    content, transform = good.read_bytes(), Transform(8, "none", True, (0.5,) * 3, (0.5,) * 3, 0)
    datasets.disable_progress_bars()
    number = 0
    while True:
        number += 1
        path = scratch / f"{number}.parquet"
        path.write_bytes(corrupt(content, rng))
        datasets.config.HF_DATASETS_CACHE = scratch / f"cache-{number}"

        def case(path: Path = path) -> None:
            try:
                data = load_data(ImageConfig(str(path), loader_workers=0, max_bad_images=5))
                every = [np.arange(len(data.train))]
                for _ in data.train.batches(every, transform):
                    pass
            finally:
                path.unlink(missing_ok=True)
                shutil.rmtree(datasets.config.HF_DATASETS_CACHE, ignore_errors=True)

        yield case


TARGETS = {
    "checkpoints": (of_checkpoints, 400),
    "manifests": (of_manifests, 14600),
    "configs": (of_configs, 2500),
    "parquet files": (of_parquet_files, 2500),
}


def run_target(name: str, cases: int, seed: int) -> dict[str, object]:
    """Run cases of one kind; anything but a clean error, or none, is raised."""
    make, _ = TARGETS[name]
    rng, outcomes, slowest = random.Random(seed), Counter(), 0.0
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as cleanup:
        source = cleanup.enter_context(contextlib.closing(make(Path(scratch), rng)))
        for number in range(cases):
            case = next(source)
            began = time.monotonic()
            signal.alarm(LIMIT_S)  # ends the process: a hang is no case that passes
            try:
                case()
                outcomes["accepted"] += 1
            except RunStopped:  # a checkpoint whose damage does not show in its values
                outcomes["accepted"] += 1
            except CLEAN as error:
                outcomes["refused"] += 1
                if "\n" in str(error).strip():
                    raise AssertionError(f"more than one line: {error}") from error
            except BaseException:
                print(f"{name}, seed {seed}, case {number}", file=sys.stderr)
                raise
            finally:
                signal.alarm(0)
            slowest = max(slowest, time.monotonic() - began)
        half = [p for p in Path(scratch).rglob("*.tmp")]
        assert not half, f"half-written files: {half}"
    return {
        "what": name,
        "cases": cases,
        "refused": outcomes["refused"],
        "accepted": outcomes["accepted"],
        "other_errors": 0,
        "slowest_s": round(slowest, 2),
    }


def main() -> None:
    """Run all targets, or one, and write experiments/results/fuzz.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    rows = []
    for name in [arguments.only] if arguments.only else TARGETS:
        rows.append(run_target(name, arguments.cases or TARGETS[name][1], arguments.seed))
        print(json.dumps(rows[-1]), flush=True)
    if not arguments.only:
        record(ROOT / "experiments/results/fuzz.csv", rows, "python -m experiments.benchmarks.fuzz")


if __name__ == "__main__":
    main()
