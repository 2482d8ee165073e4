"""Operators of a training step: ``python -m experiments.benchmarks.operators``.

An estimate of a GPU's kernel launches where there is none: what train.py's steps dispatch with
ResNet-18, its data path, forward and backward pass and optimizer included. Views and allocations
launch nothing. Any other operator launches one kernel or more.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from accelerate.state import AcceleratorState
from torch.utils._python_dispatch import TorchDispatchMode

from dbsl.run.turns import TurnStep, WorkerTurn
from experiments.benchmarks.record import record

ROUNDS, STEPS, BATCH = 3, 15, 4
_ALLOCATES = ("aten::empty", "aten::new_empty", "aten::detach", "aten::_unsafe_view")
_SHOWN = 12


class _Enough(Exception):
    """The round that was to be counted is over."""


class Operators(TorchDispatchMode):
    """Counts the operators that are called inside, apart those that compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.computing: Counter[str] = Counter()
        self.others: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Count one operator, and call it."""
        name = function.name().partition(".")[0]
        idle = function.is_view or name.startswith(_ALLOCATES)
        (self.others if idle else self.computing)[name.removeprefix("aten::")] += 1
        return function(*args, **(kwargs or {}))


def count(model: str, resolution: int, precision: str, dataset: str) -> Operators:
    """Return the operators of a round's steps, the run's last; none of them is a first."""
    import train
    from dbsl.config.parse import parse_config

    steps_of, calls, operators = WorkerTurn.steps, [0], Operators()

    def counted(turn: WorkerTurn, *given: object) -> Iterator[TurnStep]:
        calls[0] += 1
        steps = steps_of(turn, *given)
        if calls[0] < ROUNDS:
            yield from steps
            return
        with operators:
            yield from steps
        raise _Enough

    AcceleratorState._reset_state(True)  # it may be of another precision
    WorkerTurn.steps = counted
    try:
        with tempfile.TemporaryDirectory() as scratch:
            flags = f"--model {model} --workers 1 --local-batch-sizes {BATCH}"
            flags += f" --rounds-per-epoch {ROUNDS} --train-samples {ROUNDS * STEPS * BATCH}"
            flags += f" --resolutions {resolution} --mixed-precision {precision}"
            flags += " --slope 0.001 --intercept 0.01 --log-every 0 --no-noise-scale"
            flags += " --checkpoint-every 0 --report-to none"
            own = ["--dataset", dataset, "--output-dir", str(Path(scratch) / "run")]
            train.main(parse_config(train.Config, [*flags.split(), *own]))
    except _Enough:
        return operators
    finally:
        WorkerTurn.steps = steps_of
    raise AssertionError("the run has fewer rounds than it was given")


def main(dataset: str = "uoft-cs/cifar100") -> None:
    """Count at both resolutions, in bf16 and in float32, and write operators.csv.

    Args:
        dataset: A hub id, or a folder of CIFAR-100.
    """
    rows = []
    for precision in ("bf16", "no"):
        for resolution in (24, 32):
            found = count("resnet18", resolution, precision, dataset)
            most = found.computing.most_common(_SHOWN)
            rows.append(
                {
                    "resolution": resolution,
                    "precision": "float32" if precision == "no" else precision,
                    "computing": round(found.computing.total() / STEPS, 1),
                    "views_and_allocations": round(found.others.total() / STEPS, 1),
                    "most": ", ".join(f"{n / STEPS:g} {name}" for name, n in most),
                }
            )
    record(
        Path("experiments/results/operators.csv"),
        rows,
        "python -m experiments.benchmarks.operators",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Count what training steps give to their device.")
    parser.add_argument("--dataset", default="uoft-cs/cifar100", help="a hub id, or a folder")
    main(parser.parse_args().dataset)
