"""What one server carries: seconds and bytes of a push and a pull as workers grow.

    python -m experiments.benchmarks.server_scale

A dedicated server and 1 to 64 processes on this machine, which do nothing but push and pull through
the code that train.py uses with `--sync asp`. Nobody computes, so that the server always has work:
what it then does in a second is what it can carry. All share this machine's cores and its loopback.

A row is a model and a number of workers: the seconds of a worker's push and pull, those that all
workers make in a second, the processor time that each costs the server and the cores that it kept
busy. Beside them stands the merge alone, without any transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dbsl.cluster.cluster import Cluster
from dbsl.cluster.merges import ratio
from dbsl.cluster.server import Server
from dbsl.cluster.serving import through_server
from dbsl.cluster.weights import FlatWeights
from dbsl.model import build_model
from dbsl.plan.follow import Planner
from dbsl.plan.ledger import Members
from dbsl.plan.solve import plan_dual_batch
from dbsl.plan.types import RoundReport, TimeModel, Turn
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("test_resnet", "resnet10t")
WORKERS = (1, 2, 4, 8, 16, 32, 64)
_EXCHANGES = 256  # all workers together, at least
_FEWEST = 8  # a worker's; the first two are not counted
_WARM = 2
_LINE = TimeModel(0.001, 0.01)
_PATIENCE_S = 300.0


def merge_seconds(name: str, merges: int = 50) -> float:
    """Return the median seconds of a push's merge, from weights that are there already."""
    vector = FlatWeights(build_model(name, 100, (32,))).vector
    server = Server(vector, Members(1, merges), ratio, staleness=None)
    pushed, seconds = vector.clone(), []
    for round_ in range(merges):
        server.pull(0)
        began = time.perf_counter()
        server.push(pushed, report_of(0, round_))
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def measure(name: str, workers: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """Let so many workers push and pull; return a row.

    Args:
        name: The model.
        workers: Processes beside the server's.
        rounds: Pushes and pulls of each.
        scratch: Folder for where they meet and what they found.
    """
    meeting = scratch / f"meeting-{name}-{workers}"
    files = [scratch / f"{name}-{workers}-{rank}.json" for rank in range(1 + workers)]
    children = [
        _fork(name, rank, workers, rounds, meeting, file) for rank, file in enumerate(files)
    ]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(statuses):
        raise RuntimeError(f"{workers} workers ended with {statuses}")
    server, *of_workers = [json.loads(file.read_text()) for file in files]
    seconds = [s for found in of_workers for s in found["seconds"]]
    exchanges = workers * rounds
    return {
        "model": name,
        "parameters": server["parameters"],
        "workers": workers,
        "bytes": server["bytes"],
        "push_and_pull_s": f"{median(seconds):.4g}",
        "slowest_s": f"{max(seconds):.4g}",
        "all_per_s": f"{exchanges / server['wall_s']:.4g}",
        "server_cpu_s": f"{server['cpu_s'] / exchanges:.4g}",
        "server_cores": f"{server['cpu_s'] / server['wall_s']:.2f}",
        "merge_s": f"{merge_seconds(name):.3g}",
        "load": f"{os.getloadavg()[0]:.1f}",
    }


def _fork(name: str, rank: int, workers: int, rounds: int, meeting: Path, file: Path) -> int:
    """Start a rank as a fork of this process, whose imports are done; return its id."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        torch.set_num_threads(1)  # makes torch's pool anew, before there are threads that share it
        dist.init_process_group(
            "gloo",
            init_method=f"file://{meeting}",
            rank=rank,
            world_size=1 + workers,
            timeout=timedelta(seconds=_PATIENCE_S),
        )
        file.write_text(json.dumps(_take_part(name, rank, workers, rounds)))
        dist.barrier()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _take_part(name: str, rank: int, workers: int, rounds: int) -> dict[str, Any]:
    """Serve, or push and pull; return what this rank found."""
    model = build_model(name, 100, (32,))
    weights = FlatWeights(model)
    cluster = served_cluster(weights, workers, rounds, timeout_s=_PATIENCE_S)
    dist.barrier()
    began, spent, seconds = time.perf_counter(), time.process_time(), []
    if rank == 0:
        for _ in cluster.turns():
            pass
    else:
        cluster.pull(Turn((rank - 1,), 0, 0))
        for round_ in range(rounds):
            start = time.perf_counter()
            cluster.push([report_of(rank - 1, round_)])
            if round_ + 1 < rounds:
                cluster.pull(Turn((rank - 1,), 0, round_ + 1))
                seconds.append(time.perf_counter() - start)
    found = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - spent}
    cluster.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    size = 2 * weights.vector.nbytes  # there and back
    return found | {"seconds": seconds[_WARM:], "bytes": size, "parameters": parameters}


def served_cluster(
    weights: FlatWeights,
    workers: int,
    rounds: int,
    *,
    timeout_s: float,
    wire: str = "float32",
) -> Cluster:
    """Return this rank's side of a dedicated server, rank 0, and a worker on each other rank.

    Args:
        weights: What is pushed and pulled.
        workers: Ranks beside the server's.
        rounds: Pushes of each worker, all in one epoch.
        timeout_s: Longest silence of a worker.
        wire: What pushes travel as.
    """
    rank, server = dist.get_rank(), None
    members = Members(workers, rounds)
    if rank == 0:
        server = Server(weights.vector, members, ratio, staleness=None)
    plan = plan_dual_batch(10 * workers, workers, 0, 10, _LINE)
    return through_server(
        weights,
        server,
        planner=Planner({32: plan}, lambda epoch: 32, {32: [_LINE] * workers}, members=members),
        workers=() if rank == 0 else (rank - 1,),  # the server's rank has nothing else to do
        epochs=1,
        timeout_s=timeout_s,
        wire=wire,
    )


def report_of(worker: int, round_: int) -> RoundReport:
    """Return the report of a worker that pushes and does not compute."""
    return RoundReport(worker, 0, round_, 32, 10, 10, 1, 0.1, 1.0, 1.0)


def main() -> None:
    """Measure all sizes and write experiments/results/server_scale.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in MODELS:
            for workers in options.workers:
                rounds = max(_FEWEST, _EXCHANGES // workers)
                rows.append(measure(name, workers, rounds, Path(scratch)))
                print(json.dumps(rows[-1]), flush=True)
    if tuple(options.workers) == WORKERS:
        record(
            ROOT / "experiments/results/server_scale.csv",
            rows,
            "python -m experiments.benchmarks.server_scale",
        )


if __name__ == "__main__":
    main()
