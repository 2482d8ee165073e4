"""What a mirror costs: ``python -m experiments.benchmarks.mirror``.

The run folder of a ResNet-18 with 100 classes and 4 simulated workers, one checkpoint in it, is
mirrored to each kind of URL a few times: seconds until it is whole there, CPU seconds of this
process, and these as a share of all cores' time where a run saves every ten minutes. With s3fs and
moto installed also to an S3 server on this machine, whose own CPU time is left out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import fsspec
from accelerate import Accelerator

from dbsl.extras.mirror import Mirror, MirrorSettings
from experiments.benchmarks.ranks import free_port
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
_SAVED_EVERY_S = 600.0


def main() -> None:
    """Train, copy, and write experiments/results/mirror.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="uoft-cs/cifar100")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, s3_server() as s3:
        folder = Path(scratch) / "run"
        train(folder, arguments.dataset)
        urls = ["memory://bucket", f"file://{scratch}/bucket", *["s3://bucket"] * s3]
        rows = [measured(folder, url, arguments.repeats) for url in urls]
    record(ROOT / "experiments/results/mirror.csv", rows, "python -m experiments.benchmarks.mirror")


def train(folder: Path, dataset: str) -> None:
    """Train for as long as it takes to have every worker's optimizer in a checkpoint."""
    command = [sys.executable, "train.py", "--dataset", dataset, "--resolutions", "32"]
    command += ["--train-samples", "200", "--eval-samples", "100", "--epochs", "1"]
    command += ["--large-batch-size", "25", "--small-workers", "1"]
    command += ["--slope", "0.01", "--intercept", "0.05", "--report-to", "none"]
    command += ["--output-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def measured(run: Path, url: str, repeats: int) -> dict[str, Any]:
    """Return what it costs to copy a run folder's newest checkpoint to a URL."""
    seconds, cpu = [], []
    accelerator = Accelerator(cpu=True)
    for number in range(repeats + 1):  # the first one is for connections and imports
        folder = run.with_name("copied")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(run, folder)
        there = f"{url}/{number}"
        mirror = Mirror()
        mirror.open(MirrorSettings(mirror=there), folder, None, accelerator)
        began, used = time.perf_counter(), time.process_time()
        mirror.report(folder, ())
        mirror.close(None)
        seconds.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
        if mirror.failures:
            raise RuntimeError(f"{mirror.failures} tries failed at {there}")
        fs, path = fsspec.url_to_fs(there)
        fs.invalidate_cache()
        size = sum(file["size"] for file in fs.find(path, detail=True).values())
        fs.rm(path, recursive=True)
    return {
        "url": url.partition(":")[0],
        "mib": round(size / 2**20),
        "copies": repeats,
        "copy_s": f"{median(seconds[1:]):.2f}",
        "copy_cpu_s": f"{median(cpu[1:]):.2f}",
        "cpu_share": f"{median(cpu[1:]) / _SAVED_EVERY_S / (os.cpu_count() or 1):.5f}",
    }


@contextmanager
def s3_server() -> Iterator[bool]:
    """Serve S3 on this machine while this is open, if it can be had."""
    if find_spec("moto") is None or find_spec("s3fs") is None:
        yield False
        return
    port = free_port()
    os.environ |= dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, **quiet) as server:
        try:
            for _ in range(60):
                time.sleep(1)
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
            fsspec.filesystem("s3").mkdir("s3://bucket")
            yield True
        finally:
            server.kill()


if __name__ == "__main__":
    main()
