"""What `--link-gbps` says a link costs, beside two real processes on one. Needs root and tc.

    sudo python -m experiments.benchmarks.demos.link_check --dataset DATASET

Predicted is the epoch on a link that is not shaped, plus the exchanges by `dbsl.extras.emulate`,
which simulated workers wait for on the virtual clock.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dbsl.cluster.weights import FlatWeights
from dbsl.extras.emulate import EmulatedLink
from dbsl.model import build_model
from experiments.benchmarks.demos.arms import run_train
from experiments.benchmarks.demos.link import ADDRESSES, link
from experiments.benchmarks.ranks import end_in_order
from experiments.benchmarks.record import record

SAMPLES, CLASSES, SIDE, EPOCHS = 5000, 20, 32, 3
BATCH = 64  # a process's
WAYS: dict[str, dict[str, Any]] = {
    "step": {"sync": "step", "local-batch-sizes": [BATCH, BATCH]},
    **{f"bsp, {n} rounds": {"large-batch-size": BATCH, "rounds-per-epoch": n} for n in (1, 4, 16)},
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every way at every rate, and print the ratio of the two."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--label-column", default="coarse_label")
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--megabits", nargs="+", type=float, default=[1000, 100, 10])
    parser.add_argument(
        "--output", type=Path, default=Path("experiments/results/demos/link_check.csv")
    )
    arguments = parser.parse_args(argv)
    data = {"dataset": arguments.dataset, "label-column": arguments.label_column}
    data |= {"train-samples": SAMPLES, "eval-samples": 100, "model": arguments.model}
    rows = []
    for way, how in WAYS.items():
        flags = {**data, **how, "lr": 0.1, "epochs": EPOCHS, "seed": 0}
        free_s = _epoch_s(None, flags)
        for megabits in arguments.megabits:
            real_s = _epoch_s(megabits, flags)
            said_s = free_s + exchanges_s(way, arguments.model, megabits)
            row = {"model": arguments.model, "sync": way, "megabits": megabits}
            row |= {"real_epoch_s": f"{real_s:.3f}", "predicted_epoch_s": f"{said_s:.3f}"}
            rows.append(row | {"predicted_over_real": f"{said_s / real_s:.3f}"})
            record(arguments.output, rows, "python -m experiments.benchmarks.demos.link_check")


def bytes_of(name: str, classes: int, side: int) -> tuple[int, int]:
    """Return the bytes of a model's gradients and of its weights as they travel, in float32.

    Args:
        name: The model.
        classes: Outputs of its last layer.
        side: Pixels of an image's side.
    """
    model = build_model(name, classes, (side,))
    gradients = 4 * sum(parameter.numel() for parameter in model.parameters())
    return gradients, 4 * len(FlatWeights(model).vector)


def exchanges_s(way: str, model: str, megabits: float) -> float:
    """Return the seconds of an epoch's exchanges between two workers by `dbsl.extras.emulate`."""
    (gradients, weights), where = bytes_of(model, CLASSES, SIDE), EmulatedLink(megabits / 1e3)
    if way == "step":
        return -(-SAMPLES // (2 * BATCH)) * where.joint_step_s(gradients, 2, 0.0)
    return WAYS[way]["rounds-per-epoch"] * where.barrier_s(weights, 2, at_server=False)


def _epoch_s(megabits: float | None, flags: dict[str, Any]) -> float:
    with link(megabits) as prefixes:
        return run_train(prefixes, ADDRESSES[0], flags)["epoch_s"]


if __name__ == "__main__":
    main()
