"""What the host does in a step and between rounds: ``python -m experiments.benchmarks.host``.

A tiny model leaves next to nothing to compute, so that its time is that of Python and of launches:
what a fast GPU waits for. Rounds of train.py take turns with the bare loop in one process. Times
are the thread's own on the CPU, which other processes move less.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from statistics import median

import timm
from torch import Tensor, nn

from dbsl.run.turns import TurnStep, WorkerTurn
from tests.unit.cluster.test_counts import bare_steps

BATCH, SIDE, WARM = 2, 8, 5
_FLAGS = f"--workers 1 --local-batch-sizes {BATCH} --resolutions {SIDE} --epochs 3 --cpu-threads 1"
_FLAGS += " --mixed-precision no --slope 0.001 --intercept 0.01 --log-every 0 --no-noise-scale"
_FLAGS += " --checkpoint-every 0 --report-to none --eval-samples 20"


def tiny() -> nn.Module:
    """Return a model whose steps are nearly all launches."""
    layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 16), *layers, nn.Linear(16, 10))


def deep() -> nn.Module:
    """Return a ResNet-18 of few channels: as many tensors, and little to copy."""
    return timm.create_model("resnet18", num_classes=10, channels=(8, 8, 8, 8), stem_width=8)


def measure(build, rounds: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return seconds by round: of a step, of a bare one beside it, and between two rounds."""
    import train
    from dbsl.config.parse import parse_config

    own, alone, between = [], [], []
    steps_of, loss_of = WorkerTurn.steps, train.loss_function
    ended, loose = [0.0], bare_steps(build(), BATCH, SIDE)

    def timed(turn: WorkerTurn, *given: object) -> Iterator[TurnStep]:
        for number, step in enumerate(steps_of(turn, *given)):
            if number == WARM:
                began = time.thread_time()
            yield step
        now = time.thread_time()
        own.append((now - began) / (steps - WARM))
        for number in range(steps):
            if number == WARM:
                began = time.thread_time()
            next(loose)
        ended[0] = time.thread_time()
        alone.append((ended[0] - began) / (steps - WARM))

    def first(*given: object) -> tuple[Tensor, dict]:
        if ended[0]:
            between.append(time.thread_time() - ended[0])
            ended[0] = 0.0
        return loss_of(*given)

    train.build_model, train.loss_function = lambda *given: build(), first
    WorkerTurn.steps = timed
    with tempfile.TemporaryDirectory() as scratch:
        flags = f"{_FLAGS} --rounds-per-epoch {rounds} --train-samples {rounds * steps * BATCH}"
        train.main(parse_config(train.Config, f"{flags} --output-dir {scratch}/run".split()))
    return own, alone, between


def told(name: str, values: list[float], unit: str) -> None:
    """Print a median, and the middle half of the values."""
    values = sorted(values)
    low, high = values[len(values) // 4], values[-1 - len(values) // 4]
    print(f"{name}: {median(values):.3g} {unit} (middle half {low:.3g} to {high:.3g})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Time the host's work in steps and rounds.")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--model", choices=("tiny", "deep"), default="tiny")
    given = parser.parse_args()
    own, alone, between = measure(globals()[given.model], given.rounds, given.steps)
    told(f"{given.model}: a step", [1e6 * s for s in own], "us")
    told(f"{given.model}: a bare step", [1e6 * s for s in alone], "us")
    told("ratio", [a / b for a, b in zip(own, alone, strict=True)], "times the bare one's")
    told("between two rounds", [1e3 * s for s in between], "ms")
