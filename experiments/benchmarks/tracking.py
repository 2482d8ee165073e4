"""What live tracking costs: a step line on its way to the trackers, beside steps of training.

    python -m experiments.benchmarks.tracking --dataset CIFAR100 --trackers wandb tensorboard

writes experiments/results/tracking.csv. ResNet-18 at 32 px, batch 16, four workers. Lines and steps
take turns in one process. A share is a line's time over that of the 50 steps of
`--log-every`. About a minute on two cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

import train
from dbsl.base.machine import threads_of_process
from dbsl.extras.charts import Charts
from dbsl.log.rows import step_row
from dbsl.optimizer import build_optimizer
from dbsl.plan.types import StepLine
from experiments.benchmarks.record import record
from experiments.benchmarks.speed.arms import (
    LR,
    MOMENTUM,
    WEIGHT_DECAY,
    Settings,
    _batch,
    _model,
    _start,
)

ROOT = Path(__file__).resolve().parents[2]
WORKERS, EVERY, TURNS = 4, 50, 16  # workers, steps of a line, lines that are timed


def main() -> None:
    """Measure each tracker, and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="uoft-cs/cifar100")
    parser.add_argument("--trackers", nargs="+", default=["wandb", "tensorboard", "trackio"])
    parser.add_argument("--output", type=Path, default=ROOT / "experiments/results/tracking.csv")
    arguments = parser.parse_args()
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(threads_of_process())
    settings = Settings(arguments.dataset, "resnet18", 32, 16, "no")
    accelerator, data = _start(settings)
    model = _model(settings, data, accelerator)
    optimizer = build_optimizer("sgd", model, LR, MOMENTUM, WEIGHT_DECAY)
    images, labels = _batch(data, settings)

    def step() -> float:
        began = time.perf_counter()
        with accelerator.autocast():
            train.loss_function(model, images, labels, train.Config()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    def rows_of(name: str, scratch: Path) -> dict[str, object]:
        os.environ["TRACKIO_DIR"] = str(scratch / "trackio")
        (scratch / "config.yaml").write_text(f"workers: {WORKERS}\n")
        charts, lines, steps = Charts([name]), [], []
        charts.report(scratch, [])
        for turn in range(TURNS + WORKERS):
            seconds = step()
            values = StepLine(turn % WORKERS, 0, 0, turn, 0.0, 2.0, 0.1, 1.0, 100.0, 1.0)
            began = time.perf_counter()
            charts.row({"event": "step", **step_row(values)})
            if turn >= WORKERS:  # the first begin each worker's series
                lines.append(time.perf_counter() - began)
                steps.append(seconds)
        began = time.perf_counter()
        charts.close(None)  # on W&B the charts of all workers: at most once a minute
        whole = time.perf_counter() - began
        share = sum(lines) / (EVERY * sum(steps))
        return {
            "tracker": name,
            "line_ms": f"{1000 * median(lines):.2f}",
            "line_ms_high": f"{1000 * max(lines):.2f}",
            "step_ms": f"{1000 * median(steps):.1f}",
            "share": f"{share:.5f}",
            "charts_s": f"{whole:.3f}" if name == "wandb" else "",
            "charts_share_at_most": f"{whole / 60:.5f}" if name == "wandb" else "",
        }

    rows = []
    for name in arguments.trackers:
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(rows_of(name, Path(scratch)))
    record(arguments.output, rows, "python -m experiments.benchmarks.tracking")


if __name__ == "__main__":
    main()
