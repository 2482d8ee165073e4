"""Pushes and pulls per second through the server, against bare gloo transfers of the same bytes.

Two processes; in each, both ways take turns. Run through `rows`, which launches it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dbsl.cluster.weights import FlatWeights
from dbsl.model import build_model
from dbsl.plan.types import Turn
from experiments.benchmarks.server_scale import report_of, served_cluster

ROOT = Path(__file__).resolve().parents[3]
TURNS, TRANSFERS = 15, 8


def rows() -> list[dict[str, Any]]:
    """Measure with ResNet-18's weights; return a row for each way."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "experiments.benchmarks.speed.wire"]
    found = {}
    for wire in ("float32", "bf16"):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DBSL_BENCHMARK_WIRE": wire}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found[wire] = json.loads(done.stdout.splitlines()[-1])
    return [
        {
            "part": "push and pull",
            "what": f"{name}, {wire}",
            "median": f"{median(rates):.1f}",
            "low": f"{min(rates):.1f}",
            "high": f"{max(rates):.1f}",
            "unit": "push+pull/s",
            "of_bare": f"{_ratio(rates, values['bare gloo']):.3f}",
            "mib": f"{values['mib']:.1f}",
        }
        for wire, values in found.items()
        for name, rates in values.items()
        if name != "mib"
    ]


def _ratio(rates: Sequence[float], others: Sequence[float]) -> float:
    return median(a / b for a, b in zip(rates, others, strict=True))


def measure(wire: str) -> dict[str, Any]:
    """Let bare transfers and the server take turns; return the rates of both."""
    rank = dist.get_rank()
    weights = FlatWeights(build_model("resnet18", 100, (32,)))
    rounds = TURNS * (1 + TRANSFERS)
    sync = served_cluster(weights, 1, rounds, timeout_s=60.0, wire=wire)
    pair = dist.new_group([0, 1], backend="gloo")
    there = weights.vector.clone().to(torch.bfloat16 if wire == "bf16" else torch.float32)
    back = weights.vector.clone()

    def bare() -> None:
        if rank == 1:
            dist.send(there, 0, group=pair)
            dist.recv(back, 0, group=pair)
        else:
            dist.recv(there, 1, group=pair)
            dist.send(back, 1, group=pair)

    if rank == 0:
        thread = threading.Thread(target=lambda: [bare() for _ in range(rounds)])
        thread.start()  # it waits for its messages, as the serving thread does
        for _ in sync.turns():
            pass
        thread.join()
        sync.close()
        return {}

    done = 0

    def push_and_pull() -> None:
        nonlocal done
        sync.push([report_of(0, done)])
        done += 1
        if done < rounds:
            sync.pull(Turn((0,), 0, done))

    rates: dict[str, list[float]] = {"bare gloo": [], "server": []}
    sync.pull(Turn((0,), 0, 0))
    for _ in range(TURNS):
        for name, exchange in (("bare gloo", bare), ("server", push_and_pull)):
            exchange()
            began = time.perf_counter()
            for _ in range(TRANSFERS):
                exchange()
            rates[name].append(TRANSFERS / (time.perf_counter() - began))
    sync.close()
    return rates | {"mib": weights.vector.nbytes / 2**20}


def main() -> None:
    """Take part as one of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measure(os.environ["DBSL_BENCHMARK_WIRE"])
    if found:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
