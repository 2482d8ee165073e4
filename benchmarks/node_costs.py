"""Seconds of an epoch on 2 to 64 nodes: joint steps, rounds that all merge, rounds of nodes.

    python -m benchmarks.node_costs

Nothing is trained: plans of measured step times, plus exchanges by `dbsl.plan.link`, as simulated
workers wait for them with `--node-workers`. A worker has the same batch in all arms, so that arms
differ in what travels alone. Inside a node an exchange takes no time, messages have no delay.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.link_costs import bytes_of
from benchmarks.record import record
from dbsl.plan.dual_batch import plan_dual_batch
from dbsl.plan.joint_steps import plan_steps
from dbsl.plan.link import Link
from dbsl.plan.turns import nodes_meet
from dbsl.plan.types import TimeModel

NODES = (2, 4, 8, 16, 32, 64)
WORKERS = 4  # on a node
LINKS = (1.0, 10.0)  # Gbit/s, of a node
ROUNDS = 8  # an epoch
EVERY = (1, 4, 8)  # rounds after which all nodes merge
OVERLAPS = (0.0, 0.5)  # share of a joint step's computing that gradients travel behind
# What is trained, samples, classes, side, step times, and samples of a worker's step.
SETTINGS = (
    ("resnet18", 1281167, 1000, 224, TimeModel(5.6838e-4, 0.01705), 128),  # published, a GPU
    ("test_resnet", 50000, 20, 32, TimeModel(0.00037, 0.0070), 16),  # configs/base/mini.yaml, a CPU
)


def main() -> None:
    """Plan all arms on all links and numbers of nodes."""
    rows = []
    for name, samples, classes, side, line, batch in SETTINGS:
        gradients, weights = bytes_of(name, classes, side)
        for gbps in LINKS:
            for overlap in OVERLAPS:
                hidden = f", {overlap:.0%} of computing hides exchanges" if overlap else ""
                link, seconds = Link(gbps, overlap=overlap), []
                for nodes in NODES:
                    workers = nodes * WORKERS
                    plan = plan_steps(samples, [batch] * workers, [line] * workers)
                    steps = plan.workers[0].steps
                    step_s = link.joint_step_s(gradients, nodes, plan.time_s / steps)
                    seconds.append(plan.time_s + steps * step_s)
                rows.append(_row(name, batch, gbps, f"joint steps{hidden}", seconds))
            for every in EVERY:
                arm = "all merge" if every == 1 else f"nodes merge, all after {every}"
                meetings = sum(nodes_meet(r, every, ROUNDS) for r in range(ROUNDS))
                link, seconds = Link(gbps), []
                for nodes in NODES:
                    workers = nodes * WORKERS
                    plan = plan_dual_batch(samples, workers, 0, batch, line, rounds=ROUNDS)
                    meeting_s = link.barrier_s(weights, nodes, at_server=False)
                    seconds.append(plan.time_s + meetings * meeting_s)
                rows.append(_row(name, batch, gbps, f"{ROUNDS} rounds, {arm}", seconds))
    record(Path("results/node_costs.csv"), rows, "python -m benchmarks.node_costs")


def _row(model: str, batch: int, gbps: float, arm: str, seconds: list[float]) -> dict[str, str]:
    row = {"model": model, "batch": str(batch), "gbps": f"{gbps:g}", "arm": arm}
    return row | {f"{n} nodes": f"{s:.3g}" for n, s in zip(NODES, seconds, strict=True)}


if __name__ == "__main__":
    main()
