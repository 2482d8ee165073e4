"""Seconds of an epoch by the rate of the link: data parallelism beside rounds, planned.

    python -m experiments.benchmarks.link_costs

Nothing is trained: plans of measured step times, plus exchanges by `dbsl.extras.emulate`, as
simulated workers wait for them. demos/link_check.py holds these
against real processes.
"""

from __future__ import annotations

from pathlib import Path

from dbsl.cluster.weights import FlatWeights
from dbsl.extras.emulate import EmulatedLink
from dbsl.model import build_model
from dbsl.plan.solve import PlanRules, plan_dual_batch, plan_steps
from dbsl.plan.types import TimeModel
from experiments.benchmarks.record import record

WORKERS = 4
LINKS = (None, 10.0, 1.0, 0.1)  # Gbit/s
# What is trained, samples, classes, side, step times, and global batches of joint steps.
SETTINGS = (
    (
        "test_resnet",
        6400,
        20,
        32,
        TimeModel(0.00037, 0.0070),
        (128, 256),
    ),  # configs/base/mini.yaml
    ("resnet18", 50000, 100, 32, TimeModel(0.00056607, 0.014041204118283607), (512,)),  # published
)
LARGE = {"test_resnet": 128, "resnet18": 500}  # samples of a worker's step in rounds


def main() -> None:
    """Plan all arms on all links."""
    rows = []
    for name, samples, classes, side, line, batches in SETTINGS:
        gradients, weights = bytes_of(name, classes, side)
        for batch in batches:
            plan = plan_steps(samples, [batch // WORKERS] * WORKERS, [line] * WORKERS)
            steps = plan.workers[0].steps
            seconds = [plan.time_s + steps * _joint_s(link, gradients) for link in LINKS]
            rows.append(_row(name, f"data parallelism, {batch} samples a step", seconds))
        for rounds in (1, 4):
            plan = plan_dual_batch(samples, WORKERS, 0, LARGE[name], line, PlanRules(rounds=rounds))
            seconds = [plan.time_s + rounds * _merge_s(link, weights) for link in LINKS]
            rows.append(_row(name, f"{rounds} merge{'s' * (rounds > 1)} an epoch", seconds))
    record(
        Path("experiments/results/link_costs.csv"),
        rows,
        "python -m experiments.benchmarks.link_costs",
    )


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


def _joint_s(gbps: float | None, size: float) -> float:
    return EmulatedLink(gbps).joint_step_s(size, WORKERS, 0.0) if gbps else 0.0


def _merge_s(gbps: float | None, size: float) -> float:
    return EmulatedLink(gbps).barrier_s(size, WORKERS, at_server=False) if gbps else 0.0


def _row(model: str, arm: str, seconds: list[float]) -> dict[str, str]:
    named = zip(LINKS, seconds, strict=True)
    return {"model": model, "arm": arm} | {
        "no cost" if gbps is None else f"{gbps:g} Gb/s": f"{value:.3g}" for gbps, value in named
    }


if __name__ == "__main__":
    main()
