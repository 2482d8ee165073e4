"""A run that goes on with other workers, or other plans: the weights, and what is left of epochs.

The workers' own state has no place in the new run, but for optimizer state by worker. Shares are
planned anew; what the old workers had left of an epoch is covered exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.words import as_given, px
from dbsl.checkpoint.disk import MODEL_FILE, Found, read_shard, reading_checkpoint
from dbsl.cluster.wire import SERVER_RANK
from dbsl.config.fields import Role, with_role
from dbsl.config.settings import RunConfig, Schedule, meets_at_server, takes_joint_steps
from dbsl.plan.ledger import Ledger, Members, RoundAhead, left_of_epochs
from dbsl.plan.stages import make_stages
from dbsl.plan.types import (
    EpochEnd,
    Restart,
    Segment,
    Turn,
    report_from_plain,
)
from dbsl.run.training import Run


def complete_settings(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """Return a checkpoint's settings; a setting that it does not know has its default."""
    return {field.name: field.default for field in fields(now)} | dict(before)


def saved_ledger(planner: Mapping[str, Any], run: Run | None = None) -> Ledger:
    """Return the ledger in a planner's state; of a run, also for epochs that nobody has begun."""
    ledger = Ledger({}, lambda epoch: run.stage_at(epoch).resolution)
    ledger.load_state_dict(planner)
    return ledger


def plan_restart(
    state: Mapping[str, Any],
    optimizers: Mapping[int, Any],
    run: Run,
    before: Mapping[str, Any],
    samples: int,
) -> Restart:
    """Return what a run takes over from another one's state; refuse what cannot be told.

    `state` is that of the old run's rank 0, `optimizers` are of its workers. It had the settings
    `before`, and so many training samples.
    """
    if before["sync"] == "step":
        return _joint_restart(state, optimizers, run, before, samples)
    cluster, rounds = state["cluster"], run.rounds
    server, ledger = cluster["server"], saved_ledger(state["planner"], run)
    members = Members.of(server, rounds_before := pushes_per_epoch(ledger, before))
    at_barrier = before["sync"] == "bsp"  # what it has collected is not merged
    ahead = list(ledger.ahead(members, again=at_barrier))
    if ahead:
        _check_inside_epoch({each.epoch for each in ahead}, ledger, run, before, samples)
    epoch, round_ = lowest = divmod(members.slowest(), rounds_before)
    again = [w for w in members.active if at_barrier and members.clocks[w] > members.slowest()]
    if rounds_before != rounds:
        round_ = 0
    common = {
        "weights": server["weights"],
        "version": server["version"],
        "refused": cluster.get("refused", server["refused"]),
        "clock": epoch * rounds + round_,
        "time_s": cluster.get("time_s", 0.0),
        "reports": tuple(
            report
            for report in map(report_from_plain, server["reports"])
            if report.worker not in again or (report.epoch, report.round) != lowest
        ),
        "finished": tuple(EpochEnd(**end) for end in server["finished"]),
        "again": tuple((worker, *lowest) for worker in sorted(again)),
    }
    if before["push"] == "gradients":
        _check_whole_steps(ahead, run, before, inside_epoch=lowest[1] > 0)
        return Restart(**_optimizer_of_all(server["optimizer"], run), **common)
    left = left_of_epochs(ahead, replace(run.sampler, rounds=rounds_before))
    if takes_joint_steps(run.config):  # whose optimizers must be alike in all processes
        optimizers = {}
    return Restart(left=left, optimizers=optimizers, outer=server["outer"], **common)


def _joint_restart(
    state: Mapping[str, Any],
    optimizers: Mapping[int, Any],
    run: Run,
    before: Mapping[str, Any],
    samples: int,
) -> Restart:
    """Return what joint steps leave: all workers had the same weights and optimizer state."""
    cluster, progress = state["cluster"], state["progress"]
    steps = progress["steps"] if progress else 0
    any_worker = next(iter(optimizers.values()), None)
    common = {
        "weights": state["model"]["weights"],
        "version": 0,
        "refused": cluster["refused"],
        "time_s": cluster["time_s"] or 0.0,
        **_optimizer_of_all(any_worker, run),
    }
    epoch, round_ = divmod(cluster["clock"], before["rounds_per_epoch"])
    if not round_ and not steps:
        return Restart(clock=epoch * run.rounds, **common)
    ledger = saved_ledger(state["planner"], run)
    _check_inside_epoch({epoch}, ledger, run, before, samples)
    turn = Turn(tuple(range(run.config.workers)), epoch, round_)
    segment = Segment(run.plans[run.stage_at(epoch).resolution])
    counted = progress["counted"] if progress else 0
    ahead = run.sampler.steps(segment, turn)
    return Restart(
        clock=cluster["clock"],
        steps=steps,
        learning_rate=progress["learning_rate"] if progress else 0.0,
        steps_under_way=steps - counted,
        samples_under_way=sum(
            len(part.indices) for step in ahead[counted:steps] for part in step.parts
        ),
        **common,
    )


def _optimizer_of_all(state: Mapping[str, Any] | None, run: Run) -> dict[str, Any]:
    """Return what a restart takes over of an optimizer that stepped for all workers."""
    if run.config.push == "gradients":
        return {"server_optimizer": state}
    return {"optimizers": {w: state for w in range(run.config.workers) if state}}


def _check_inside_epoch(
    epochs: Collection[int],
    ledger: Ledger,
    run: Run,
    before: Mapping[str, Any],
    samples: int,
) -> None:
    """Refuse changes after which nobody could tell which samples of these epochs are left.

    The place in an epoch of joint steps is a number of steps, that of rounds a number of samples of
    each worker.
    """
    config, advice = run.config, advice_inside(before)
    if samples != len(run.data.train):
        raise SettingError(
            f"training images must stay {samples} inside an epoch, got {len(run.data.train)}: "
            f"{advice}"
        )
    joint = before["sync"] == "step"
    names = []
    if joint or config.sync == "step":
        names += ["sync", "rounds_per_epoch"]
    if joint or takes_joint_steps(config) or before["push"] == "gradients":
        names += ["push", "drop_last"]
    for name in names:
        if before[name] != (now := getattr(config, name)):
            raise SettingError(
                f"{name} must stay {as_given(before[name])} inside an epoch, got {as_given(now)}: "
                f"{advice}"
            )
    if not joint and before["push"] != "gradients":
        return
    for resolution in sorted({run.stage_at(epoch).resolution for epoch in epochs}):
        old = ledger.current[resolution].global_batch_size
        if (new := run.plans[resolution].global_batch_size) != old:
            raise SettingError(
                f"global_batch_size must stay {old}"
                f"{px(resolution, ' at ')} inside an epoch, got {new}: {advice}"
            )


def _check_whole_steps(
    ahead: Iterable[RoundAhead], run: Run, before: Mapping[str, Any], *, inside_epoch: bool
) -> None:
    """Refuse to go on inside an epoch of which more is gone than the pushes of all workers."""
    for _, _, segment, workers in ahead:
        shares = enumerate(segment.plan.workers)
        if any(share.samples and worker not in workers for worker, share in shares):
            stay, got = _changed(run, before)
            raise SettingError(
                f"{stay} with push gradients until all have pushed the same batches, and those "
                f"that a lost worker has left out are over, {got}"
            )
    if run.config.push_every != before["push_every"] and inside_epoch:
        raise SettingError(
            f"push_every must stay {before['push_every']} inside an epoch, "
            f"got {run.config.push_every}"
        )


def _changed(run: Run, before: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first words of a refusal, and its last ones."""
    for name in with_role(type(run.config), Role.MEETING | Role.SPLIT):
        old, now = (as_given(value) for value in (before[name], getattr(run.config, name)))
        if old != now:
            return f"{name} must stay {old}", f"got {now}"
    return "plans must stay as they are", "got others"


def advice_inside(before: Mapping[str, Any]) -> str:
    """Return when a change may be made that is refused inside an epoch."""
    if meets_at_server(before["sync"]):
        return "it may change where no worker is inside an epoch"
    return "resume a checkpoint of an epoch's end"


def pushes_per_epoch(ledger: Ledger, before: Mapping[str, Any]) -> int:
    """Return the rounds of an epoch, of a run with this ledger and these settings."""
    if before["push"] != "gradients":
        return before["rounds_per_epoch"]
    plan = next(iter(ledger.current.values()))
    steps = max(worker.steps for worker in plan.workers)  # a lost worker has none
    return -(-steps // before["push_every"])


def epochs_under_way(
    state: Mapping[str, Any], before: Mapping[str, Any], *, at_epoch_end: bool
) -> range:
    """Return the epochs that a worker may have begun and that are not complete.

    Args:
        state: Of rank 0.
        before: The settings that it was saved with.
        at_epoch_end: Whether it was saved where all meet at an epoch's end, not inside a round.
    """
    cluster, ledger = state["cluster"], saved_ledger(state["planner"])
    rounds = pushes_per_epoch(ledger, before)
    joint = {"clocks": [cluster["clock"]], "active": [0], "newcomers": [], "inside": []}
    members = Members.of(cluster.get("server") or joint, rounds)
    if "queue" in cluster:  # simulated: it is known who is in a round
        members.inside = {worker for _, worker in cluster["queue"]} | {cluster["turn"]} - {None}
    elif at_epoch_end and not meets_at_server(before["sync"]):
        members.inside = set()
    else:  # only the workers know whether they have taken a step: all that may have
        ahead = {"ssp": before["staleness"], "asp": math.inf}.get(before["sync"], 0)
        furthest = members.slowest() + ahead
        members.inside = {w for w in members.active if members.clocks[w] <= furthest}
    return ledger.under_way(members, before["epochs"] * rounds)


def check_epochs_under_way(found: Found, run: Run) -> None:
    """Refuse what epochs that are under way cannot go on with.

    What their workers have trained on is told by the plan of the resolution, and by the order, that
    they began with. A run must have the epochs that any worker has begun.
    """
    config, manifest = run.config, found.manifest
    before = complete_settings(manifest.config, config)
    epochs, milestones = before["epochs"], before["lr_milestones"]
    old = _resolutions(before["resolutions"], before["schedule"], epochs, milestones)
    new = _resolutions(config.resolutions, config.schedule, config.epochs, config.lr_milestones)
    moved = [e for e, sides in enumerate(zip(old, new, strict=False)) if sides[0] != sides[1]]
    moved = [epoch for epoch in moved if epoch >= manifest.epoch]
    orders = [
        name
        for name in with_role(type(config), Role.ORDER)
        if _order_of(name, before[name]) != _order_of(name, getattr(config, name))
    ]
    if not moved and not orders and config.epochs >= epochs:
        return
    with reading_checkpoint(found.folder):
        under_way = epochs_under_way(
            read_shard(found.folder, manifest, SERVER_RANK),
            before,
            at_epoch_end=MODEL_FILE in manifest.files,
        )
    if under_way and config.epochs < under_way.stop:
        raise SettingError(
            f"epochs must be at least {under_way.stop}, as many as workers may have begun, "
            f"got {config.epochs}"
        )
    advice = advice_inside(before)
    if under_way and orders:
        name = orders[0]
        raise SettingError(
            f"{name} must stay {as_given(before[name])} inside an epoch, "
            f"got {as_given(getattr(config, name))}: it draws the order of its samples; {advice}"
        )
    epoch = next((e for e in moved if e in under_way), None)
    if epoch is None:
        return
    if config.epochs > epochs:
        advice = f"go on with epochs {epochs} first"
        kept = (*milestones, epochs)
        longer = _resolutions(config.resolutions, config.schedule, config.epochs, kept)
        if longer[:epochs] == old:
            given = ",".join(map(str, kept))
            advice += f", or give --lr-milestones {given} --allow-config-change"
    raise SettingError(
        f"resolution of epoch {epoch + 1}, which is under way, must stay {old[epoch]} px, "
        f"got {new[epoch]} px: {advice}"
    )


def _order_of(name: str, value: Any) -> Any:
    """Return as much of a setting as an epoch's order depends on."""
    return value is not None if name == "cache_gib" else value


def _resolutions(
    resolutions: Sequence[int], schedule: Schedule, epochs: int, milestones: Sequence[int]
) -> list[int]:
    """Return the resolution of each epoch."""
    stages = make_stages(epochs, resolutions, schedule=schedule, milestones=milestones)
    return [stage.resolution for stage in stages for _ in stage.epochs]


def with_lost_workers(state: Mapping[str, Any], run: Run, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the workers back that were lost.

    They begin with the first epoch that nobody has begun, when another worker has come as far, like
    workers that join a running job. Epochs under way keep the plans that were made without them.

    Args:
        state: As it was saved.
        run: The run that goes on; its planner takes the state.
        epochs: That the run was to have when it was saved.
    """
    server, planner, members = state["cluster"]["server"], run.planner, run.planner.members
    if len(server["active"]) == len(server["clocks"]):
        return state
    members.load_state_dict(server)
    planner.load_state_dict(state["planner"])
    # Only the workers know whether they have begun a round: all that may have.
    there = members.active - members.newcomers
    members.inside = set(there)
    last = min(epochs, run.config.epochs) * run.rounds  # that anybody could have begun
    begin = planner.next_epoch(last)
    planner.take_in(members.lost, begin)
    for worker in members.lost:
        members.join(worker, begin * run.rounds)
    members.inside = set(server["inside"])
    return {
        **state,
        "cluster": state["cluster"] | {"server": server | members.state_dict()},
        "planner": planner.state_dict(),
    }
