"""Two processes on two network namespaces, joined by a link of a given rate. Needs root and tc.

    sudo python -m experiments.benchmarks.demos.slow_link --dataset DATASET --turns 5

The link is a veth pair shaped on both ends (``tbf``), so that every byte between the processes
really waits for it. Arms in turn, the same images and annealed learning rate: Accelerate's
documented data-parallel loop, its LocalSGD, and train.py with one and four merges an epoch.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.benchmarks.demos.arms import run_plain, run_train
from experiments.benchmarks.demos.table import Table

BATCH = 64  # a process's
ADDRESSES = ("10.87.0.1", "10.87.0.2")
ARMS = ("accelerate_ddp", "accelerate_local_sgd", "rounds_1", "rounds_4")
EPOCHS = {"test_resnet": 8, "resnet10t": 4}
LOCAL_STEPS = 8  # as in the documentation of LocalSGD


@contextmanager
def link(megabits: float | None) -> Iterator[list[list[str]]]:
    """Make two namespaces and a link between them; gives what commands inside begin with.

    Args:
        megabits: Rate of each direction, per second; None: as fast as the machine is.

    Raises:
        RuntimeError: If namespaces cannot be made, as without root.
    """
    names = [f"dbsl{side}-{os.getpid()}" for side in range(2)]
    ends = [f"dbv{side}-{os.getpid()}"[:15] for side in range(2)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            if megabits is not None:
                shape = ("rate", f"{megabits}mbit", "burst", "64kb", "latency", "200ms")
                _command("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *shape)
        cores = sorted(os.sched_getaffinity(0))
        yield [
            [
                *("ip", "netns", "exec", name, "taskset", "-c", str(cores[side % len(cores)])),
                *("env", f"GLOO_SOCKET_IFNAME={ends[side]}"),
            ]
            for side, name in enumerate(names)
        ]
    finally:
        for name in names:  # the pair goes with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run all arms in turn at each rate; rows of an earlier call stay."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--turns", type=int, default=5, help="each with a seed of its own")
    parser.add_argument("--models", nargs="+", default=["test_resnet"], choices=list(EPOCHS))
    parser.add_argument("--megabits", nargs="+", type=float, default=[1000, 100, 10])
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS)
    parser.add_argument(
        "--output", type=Path, default=Path("experiments/results/demos/slow_link.csv")
    )
    arguments = parser.parse_args(argv)
    table = Table(
        arguments.output,
        ("arm", "model", "megabits", "turn"),
        "experiments.benchmarks.demos.slow_link",
    )
    data = {"dataset": arguments.dataset, "label_column": arguments.label_column}
    for turn in range(arguments.turns):
        for model in arguments.models:
            settings = {**data, "model": model, "train_samples": 5000, "eval_samples": 5000}
            settings |= {"lr": 0.1, "epochs": EPOCHS[model], "seed": turn}
            for megabits in arguments.megabits:
                for arm in arguments.arms:
                    if not table.has(arm, model, megabits, turn):
                        with link(megabits) as prefixes:
                            found = measure(arm, prefixes, settings)
                        table.add(arm, model, megabits, turn, found)
    for model in arguments.models:
        for megabits in arguments.megabits:
            print(f"{model}, {megabits:g} Mb/s")
            table.report("train_s", ARMS[0], {"model": model, "megabits": str(megabits)})


def measure(
    arm: str, prefixes: Sequence[Sequence[str]], settings: dict[str, Any]
) -> dict[str, float]:
    """Return seconds and accuracy of one run of an arm."""
    if arm.startswith("accelerate"):
        local_steps = LOCAL_STEPS if arm == "accelerate_local_sgd" else 1
        return run_plain(prefixes, ADDRESSES[0], **settings, batch=BATCH, local_steps=local_steps)
    flags: dict[str, Any] = {name.replace("_", "-"): value for name, value in settings.items()}
    flags |= {"large-batch-size": BATCH, "rounds-per-epoch": int(arm.removeprefix("rounds_"))}
    return run_train(prefixes, ADDRESSES[0], flags)


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed (it needs root): {done.stderr.strip()}")


if __name__ == "__main__":
    main()
