"""Kill workers of a running job and start them again, and count its samples.

    python -m experiments.benchmarks.joins --minutes 10
    python -m experiments.benchmarks.joins --minutes 5 --jobs ssp    # rows of other jobs stay

Jobs of several processes on this machine, without a barrier. A worker at random is killed (SIGKILL)
and started again with the same command, over and over, until the job ends; then the next job
begins. What must hold: in each epoch, and over the job, the samples that were trained on and those
that were counted as lost are all samples of the data.

A row is a job: how often a worker was killed and has joined, how long it took from the kill until
rank 0 had noticed, and from the start of a process (a fork, whose imports are done) until its first
push had come.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path

import torch

from experiments.benchmarks.ranks import fork_rank, free_port, preload
from experiments.benchmarks.record import record

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 240
FLAGS = (
    f"--model test_resnet --train-samples {SAMPLES} --eval-samples 20 --resolutions 16 "
    "--large-batch-size 10 --slope 0.001 --intercept 0.01 --lr 0.02 --report-to none "
    "--cpu-threads 1 --eval-every 20 --checkpoint-every 20 --resume auto"
)
JOBS = {
    "asp": "--sync asp",
    "ssp": "--sync ssp --staleness 2",
}
_PATIENCE_S = 300.0  # for a kill to be noticed, or a worker to push


class Job:
    """A job under way.

    Args:
        folder: Its run folder, not there yet.
        flags: Of train.py.
        processes: That train.
    """

    def __init__(self, folder: Path, flags: list[str], processes: int) -> None:
        self._folder, self._flags, self._processes = folder, flags, processes
        self._port = free_port()
        self.ranks = {rank: self._start(rank) for rank in range(processes)}

    def events(self) -> list[dict]:
        """Return what metrics.jsonl has."""
        path = self._folder / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def kill(self, rank: int) -> float | None:
        """Kill a rank; return the seconds until it was noticed, None: the job has ended."""
        began, before = time.monotonic(), self._count("lost", rank)
        os.kill(self.ranks[rank], signal.SIGKILL)
        os.waitpid(self.ranks.pop(rank), 0)
        return self._wait(lambda: self._count("lost", rank) > before, began)

    def start_again(self, rank: int) -> float | None:
        """Start a rank again; return the seconds until its first push, None: the job has ended.

        Rounds that it had pushed before it was killed may be told of later than its loss.
        """
        began, before = time.monotonic(), self._count("joined", rank)
        self.ranks[rank] = self._start(rank)

        def has_pushed() -> bool:
            events = [event for event in self.events() if event.get("worker") == rank]
            joined = [event["epoch"] for event in events if event["event"] == "joined"]
            rounds = [event["epoch"] for event in events if event["event"] == "round"]
            return len(joined) > before and max(rounds, default=0) >= joined[-1]

        return self._wait(has_pushed, began)

    def ended(self) -> bool:
        """Whether rank 0 has come to the end."""
        return (self._folder / "summary.json").exists()

    def wait(self) -> list[int]:
        """Wait for all ranks that are there, and return their exit statuses."""
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.ranks.values()]

    def _start(self, rank: int) -> int:
        return fork_rank(self._flags, rank, self._processes, self._port)

    def _count(self, event: str, rank: int) -> int:
        return sum(e["event"] == event and e["worker"] == rank for e in self.events())

    def _wait(self, condition, began: float) -> float | None:
        while not condition():
            if self.ended():
                return None
            assert time.monotonic() - began < _PATIENCE_S, "a job does not go on"
            time.sleep(0.05)
        return time.monotonic() - began


def play(kind: str, epochs: int, processes: int, folder: Path, rng: random.Random) -> dict:
    """Run a job to its end, killing workers and starting them again; return its row."""
    flags = [*FLAGS.split(), *JOBS[kind].split(), "--epochs", str(epochs)]
    flags += ["--worker-timeout", "200", "--output-dir", str(folder)]
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    job = Job(folder, flags, processes)
    job._wait(
        lambda: any(e["event"] == "eval" or e["event"] == "round" for e in job.events()), began
    )
    noticed, pushed = [], []
    while not job.ended():
        rank = rng.randrange(1, processes)
        if (seconds := job.kill(rank)) is None:
            break
        noticed.append(seconds)
        if (seconds := job.start_again(rank)) is None:
            break
        pushed.append(seconds)
    statuses = job.wait()
    events = job.events()
    trained = {epoch: 0 for epoch in range(1, epochs + 1)}
    for event in events:
        if event["event"] == "round":
            trained[event["epoch"]] += event["samples"]
    lost = sum(event["samples"] for event in events if event["event"] == "lost")
    return {
        "sync": kind,
        "processes": processes,
        "epochs": epochs,
        "kills": len(noticed),
        "joins": sum(event["event"] == "joined" for event in events),
        "samples": SAMPLES * epochs,
        "trained": sum(trained.values()),
        "counted_as_lost": lost,
        "uncounted": SAMPLES * epochs - sum(trained.values()) - lost,
        "epochs_with_too_many": sum(count > SAMPLES for count in trained.values()),
        "noticed_median_s": round(statistics.median(noticed), 2) if noticed else None,
        "noticed_most_s": round(max(noticed), 2) if noticed else None,
        "first_push_median_s": round(statistics.median(pushed), 2) if pushed else None,
        "first_push_most_s": round(max(pushed), 2) if pushed else None,
        "status_of_rank_0": statuses[0],
        "job_s": round(time.monotonic() - began, 1),
    }


def main() -> None:
    """Run jobs for so many minutes and write experiments/results/joins.csv."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    preload()
    rng, rows, kinds = random.Random(arguments.seed), [], arguments.jobs
    table = ROOT / "experiments/results/joins.csv"
    command = f"python -m experiments.benchmarks.joins --minutes {arguments.minutes:g}"
    command += f" --epochs {arguments.epochs} --processes {arguments.processes}"
    command += f" --jobs {' '.join(kinds)}"
    end = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as scratch:
        while time.monotonic() < end:
            kind, folder = kinds[len(rows) % len(kinds)], Path(scratch) / "run"
            rows.append(play(kind, arguments.epochs, arguments.processes, folder, rng))
            print(json.dumps(rows[-1]), flush=True)
            record(table, rows, command, keep=lambda row: row["sync"] not in kinds)


if __name__ == "__main__":
    main()
