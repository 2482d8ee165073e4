"""A run that goes on with other workers than before: the weights, and what is left of the epochs.

Pure. The workers' own state has no place in the new run, but for optimizer state by worker. Shares
are planned anew; what the old workers had left of an epoch is covered exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dbsl.base.words import px
from dbsl.cluster.node_server import mean_of_nodes
from dbsl.plan.turns import Restart
from dbsl.plan.types import CurrentPlan, plan_from_plain, segments_from_plain
from dbsl.run.run import Run, round_sampler

Ranges = tuple[tuple[int, int], ...]


def plan_restart(
    state: Mapping[str, Any],
    optimizers: Mapping[int, Any],
    run: Run,
    before: Mapping[str, Any],
    of_nodes: Tensor | None = None,
) -> Restart:
    """Return what a run takes over from another one's state.

    Args:
        state: Of the old run's rank 0.
        optimizers: Optimizer state of the old workers, by worker.
        run: The new run.
        before: The old run's settings.
        of_nodes: The mean of nodes that have merged apart from each other (`apart`).

    Raises:
        ValueError: If what is left of the epoch cannot be told.
    """
    joint = before["sync"] == "step"
    if joint or before["push"] == "gradients":
        _check_same_steps(state, run, before)
    if joint:
        return _joint_restart(state, optimizers, run)
    cluster, rounds = state["cluster"], run.rounds
    server = cluster["server"]
    there = set(server["active"])
    last = max(server["clocks"][w] for w in there)
    over = -(-last // before["rounds_per_epoch"]) * before["rounds_per_epoch"]
    # What a lost worker had left was counted as lost: nothing of it is to come.
    clocks = [clock if w in there else over for w, clock in enumerate(server["clocks"])]
    lowest = min(clocks[w] for w in there)
    common = {
        "weights": server["weights"] if of_nodes is None else of_nodes,
        "version": server["version"],
        "time_s": cluster.get("time_s", 0.0),
    }
    if before["push"] == "gradients":
        if before["sync"] != "bsp" and len(set(clocks)) > 1:
            raise ValueError(
                f"workers must stay {before['workers']} with push gradients and sync "
                f"{before['sync']}, got {run.config.workers}: pushes of single batches do not add "
                "up to an epoch's beginning"
            )
        return Restart(clock=lowest, server_optimizer=server["optimizer"], **common)
    if of_nodes is not None and server.get("outer") is not None:
        raise ValueError(
            f"workers must stay {before['workers']} with merge delta until all nodes have merged, "
            f"got {run.config.workers}"
        )
    if before["sync"] == "bsp":
        # What part of the workers have pushed is not merged yet. Others may have joined for later.
        came = (server.get("quorum") or {"came": range(len(clocks))})["came"]
        clocks = [lowest if w in came else clock for w, clock in enumerate(clocks)]
    left = left_of_epochs(state["planner"], clocks, run, before["rounds_per_epoch"])
    epoch, round_ = divmod(lowest, before["rounds_per_epoch"])
    if before["rounds_per_epoch"] != rounds:
        round_ = 0
    clock, outer = epoch * rounds + round_, server.get("outer")
    return Restart(clock=clock, left=left, optimizers=optimizers, outer=outer, **common)


def apart(states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """Return the mean of nodes that have merged since all have met; None: they are alike.

    Args:
        states: Of all processes, in order.
    """
    first = states[0]["cluster"]
    simulated = first["server"].get("nodes")
    if simulated is not None:
        held, counted = simulated["held"], simulated["counted"]
    else:
        of, counted = first["nodes"]["of"], first["nodes"]["counted"]
        trained = states[len(states) - len(of) :]  # a dedicated server comes before
        pulled = {n: s["cluster"]["pulled"] for n, s in zip(of, trained, strict=True)}
        held = {node: pulled[node] for node in counted}
    return mean_of_nodes(held, counted) if held else None


def _joint_restart(state: Mapping[str, Any], optimizers: Mapping[int, Any], run: Run) -> Restart:
    """Return what joint steps take over: all workers had the same weights and optimizer state."""
    cluster, progress = state["cluster"], state["progress"]
    any_worker = next(iter(optimizers.values()), None)
    return Restart(
        weights=state["model"]["weights"],
        version=0,
        clock=cluster["clock"],
        steps=progress["steps"] if progress else 0,
        optimizers={w: any_worker for w in range(run.config.workers) if any_worker},
        time_s=cluster["time_s"] or 0.0,
    )


def left_of_epochs(
    planner: Mapping[str, Any], clocks: Sequence[int], run: Run, rounds: int
) -> dict[int, Ranges]:
    """Return what workers had left of the epochs that any of them had begun.

    Args:
        planner: State of the planner that they worked by.
        clocks: Rounds that each had pushed.
        run: The new run, of the same samples and seed.
        rounds: Rounds per epoch, of the old run.
    """
    current = {r: plan_from_plain(plan) for r, plan in planner["current"].items()}
    known = segments_from_plain(planner["segments"]) | segments_from_plain(planner["fixed"])
    samples = len(run.data.train)
    left = {}
    for epoch in range(min(clocks) // rounds, -(-max(clocks) // rounds)):
        whole = [CurrentPlan(current[run.stage_at(epoch).resolution])]
        ranges = []
        for round_ in range(rounds):
            segments = known.get(epoch, whole)
            segment = next(s for s in reversed(segments) if s.first_round <= round_)
            sampler = round_sampler(segment, rounds, samples, run.config.seed, run.least)
            for worker, clock in enumerate(clocks):
                if clock <= epoch * rounds + round_:
                    ranges += sampler.places(worker, round_)
        left[epoch] = _joined(ranges)
    return left


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return ranges in order, touching ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _check_same_steps(state: Mapping[str, Any], run: Run, before: Mapping[str, Any]) -> None:
    """Refuse joint steps of another size: a place in the epoch is a number of these."""
    for resolution, plan in state["planner"]["current"].items():
        new = run.plans[resolution].global_batch_size if resolution in run.plans else None
        if new != plan["global_batch_size"]:
            raise ValueError(
                f"global_batch_size must stay {plan['global_batch_size']}"
                f"{px(resolution, ' at ')} when a run is resumed, got {new}"
            )
    rounds = before["rounds_per_epoch"]
    if before["sync"] == "step" and rounds != run.rounds:
        raise ValueError(
            f"rounds_per_epoch must stay {rounds} when joint steps are resumed, got {run.rounds}"
        )
