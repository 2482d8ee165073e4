"""A run that goes on with other workers, or other plans: the weights, and what is left of epochs.

The workers' own state has no place in the new run, but for optimizer state by worker. Shares are
planned anew; what the old workers had left of an epoch is covered exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.words import as_given, px
from dbsl.config.fields import Role, with_role
from dbsl.config.settings import meets_at_server, takes_joint_steps
from dbsl.plan.ledger import Ledger, Members, left_of_epochs
from dbsl.plan.types import EpochEnd, Handover, Segment, Turn, report_from_plain
from dbsl.run.training import Run


def must_stay(what: str, old: Any, new: Any, why: str, advice: str = "") -> SettingError:
    """Return the refusal of a change."""
    then = f": {advice}" if advice else ""
    return SettingError(f"{what} must stay {as_given(old)}{why}, got {as_given(new)}{then}")


class Saved:
    """A run as it was saved: rank 0's state, its complete settings, its number of samples.

    `run` is the one that goes on; it has the same order of resolutions in epochs under way.
    """

    def __init__(
        self, state: Mapping[str, Any], settings: Mapping[str, Any], samples: int, run: Run
    ) -> None:
        self.state, self.settings, self.samples = state, settings, samples
        self.ledger = Ledger({}, lambda epoch: run.stage_at(epoch).resolution)
        self.ledger.load_state_dict(state["planner"])
        self.joint, self.pushes = settings["sync"] == "step", settings["push"] == "gradients"
        # When a change may be made that is refused inside an epoch.
        self.advice = "resume a checkpoint of an epoch's end"
        if meets_at_server(settings["sync"]):
            self.advice = "it may change where no worker is inside an epoch"

    @property
    def rounds(self) -> int:
        """Rounds of an epoch."""
        if not self.pushes:
            return self.settings["rounds_per_epoch"]
        plan = next(iter(self.ledger.current.values()))
        steps = max(worker.steps for worker in plan.workers)  # a lost worker has none
        return -(-steps // self.settings["push_every"])

    @property
    def members(self) -> Members:
        """Who was there, and how far; joint steps are those of one."""
        cluster = self.state["cluster"]
        members = Members(1, self.rounds)
        if server := cluster["server"]:
            members.load_state_dict(server)
        else:
            members.clocks = [cluster["clock"]]
        return members

    def under_way(self, *, at_epoch_end: bool) -> range:
        """Return the epochs that a worker may have begun and that are not complete.

        `at_epoch_end`: it was saved where all meet at an epoch's end, not inside a round.
        """
        cluster, members = self.state["cluster"], self.members
        sync = self.settings["sync"]
        if "queue" in cluster:  # simulated: it is known who is in a round
            members.inside = {worker for _, worker in cluster["queue"]} | {cluster["turn"]} - {None}
        elif at_epoch_end and not meets_at_server(sync):
            members.inside = set()
        else:  # only the workers know whether they have taken a step: all that may have
            ahead = {"ssp": self.settings["staleness"], "asp": math.inf}.get(sync, 0)
            furthest = members.slowest() + ahead
            members.inside = {w for w in members.active if members.clocks[w] <= furthest}
        return self.ledger.under_way(members, self.settings["epochs"] * self.rounds)


def make_handover(saved: Saved, optimizers: Mapping[int, Any], run: Run) -> Handover:
    """Return what a run takes over from one whose workers had `optimizers`; refuse what is lost."""
    if saved.joint:
        return _joint_handover(saved, optimizers, run)
    cluster, members, rounds = saved.state["cluster"], saved.members, saved.rounds
    server = cluster["server"]
    at_barrier = saved.settings["sync"] == "bsp"  # what it has collected is not merged
    ahead = list(saved.ledger.ahead(members, again=at_barrier))
    if ahead:
        _check_inside_epoch({turn.epoch for turn, _ in ahead}, saved, run)
    epoch, round_ = lowest = divmod(members.slowest(), rounds)
    again = [w for w in members.active if at_barrier and members.clocks[w] > members.slowest()]
    if saved.pushes:
        _check_whole_steps(ahead, saved, run, inside_epoch=round_ > 0)
        more = _optimizer_of_all(server["optimizer"], run)
    else:
        left = left_of_epochs(ahead, replace(run.sampler, rounds=rounds))
        if takes_joint_steps(run.config):  # whose optimizers must be alike in all processes
            optimizers = {}
        more = {"left": left, "optimizers": optimizers, "outer": server["outer"]}
    return Handover(
        weights=server["weights"],
        version=server["version"],
        refused=cluster["refused"],
        clock=epoch * run.rounds + (round_ if rounds == run.rounds else 0),
        time_s=cluster["time_s"] or 0.0,
        reports=tuple(
            report
            for report in map(report_from_plain, server["reports"])
            if report.worker not in again or (report.epoch, report.round) != lowest
        ),
        finished=tuple(EpochEnd(**end) for end in server["finished"]),
        again=tuple((worker, *lowest) for worker in sorted(again)),
        **more,
    )


def _joint_handover(saved: Saved, optimizers: Mapping[int, Any], run: Run) -> Handover:
    cluster, progress = saved.state["cluster"], saved.state["progress"] or {}
    steps, counted = progress.get("steps", 0), progress.get("counted", 0)
    handover = Handover(
        weights=saved.state["model"]["weights"],
        version=0,
        refused=cluster["refused"],
        clock=cluster["clock"],
        time_s=cluster["time_s"] or 0.0,
        **_optimizer_of_all(next(iter(optimizers.values()), None), run),
    )
    epoch, round_ = divmod(cluster["clock"], saved.rounds)
    if not round_ and not steps:
        return replace(handover, clock=epoch * run.rounds)
    _check_inside_epoch({epoch}, saved, run)
    turn = Turn(tuple(range(run.config.workers)), epoch, round_)
    ahead = run.sampler.steps(Segment(run.plans[run.stage_at(epoch).resolution]), turn)
    return replace(
        handover,
        steps=steps,
        learning_rate=progress.get("learning_rate", 0.0),
        steps_under_way=steps - counted,
        samples_under_way=sum(
            len(part.indices) for step in ahead[counted:steps] for part in step.parts
        ),
    )


def _optimizer_of_all(state: Mapping[str, Any] | None, run: Run) -> dict[str, Any]:
    if run.config.push == "gradients":
        return {"server_optimizer": state}
    return {"optimizers": {w: state for w in range(run.config.workers) if state}}


def _check_inside_epoch(epochs: Collection[int], saved: Saved, run: Run) -> None:
    """Refuse changes after which nobody could tell which samples of these epochs are left."""
    config, kept = run.config, {"training images": (saved.samples, len(run.data.train))}
    # The place in an epoch of joint steps is a number of steps, that of rounds a number of samples
    # of each worker.
    names = ["sync", "rounds_per_epoch"] if saved.joint or config.sync == "step" else []
    if saved.joint or saved.pushes or takes_joint_steps(config):
        names += ["push", "drop_last"]
    kept |= {name: (saved.settings[name], getattr(config, name)) for name in names}
    if saved.joint or saved.pushes:
        for resolution in sorted({run.stage_at(epoch).resolution for epoch in epochs}):
            plans = saved.ledger.current[resolution], run.plans[resolution]
            what = f"global_batch_size{px(resolution, ' at ')}"
            kept[what] = tuple(plan.global_batch_size for plan in plans)
    for what, (old, new) in kept.items():
        if old != new:
            raise must_stay(what, old, new, " inside an epoch", saved.advice)


def _check_whole_steps(
    ahead: Iterable[tuple[Turn, Segment]], saved: Saved, run: Run, *, inside_epoch: bool
) -> None:
    """Refuse to go on inside an epoch of which more is gone than the pushes of all workers."""
    before, config = saved.settings, run.config
    if any(
        share.samples and worker not in turn.workers
        for turn, segment in ahead
        for worker, share in enumerate(segment.plan.workers)
    ):
        names = with_role(type(config), Role.MEETING | Role.SPLIT)
        pairs = {n: (as_given(before[n]), as_given(getattr(config, n))) for n in names}
        name = next((n for n, (old, new) in pairs.items() if old != new), "plans")
        why = " with push gradients until all have pushed the same batches, and those that a lost "
        why += "worker has left out are over"
        raise must_stay(name, *pairs.get(name, ("as they are", "others")), why)
    if inside_epoch and config.push_every != before["push_every"]:
        raise must_stay("push_every", before["push_every"], config.push_every, " inside an epoch")


def check_epochs_under_way(
    saved: Saved, orders: Collection[str], run: Run, *, at_epoch_end: bool
) -> None:
    """Refuse what epochs that are under way cannot go on with.

    What their workers have trained on is told by the plan of the resolution, and by the order, that
    they began with. A run must have the epochs that any worker has begun. `orders` are changed
    settings that draw another order.
    """
    config, before = run.config, saved.settings
    under_way = saved.under_way(at_epoch_end=at_epoch_end)
    if under_way and config.epochs < under_way.stop:
        raise SettingError(
            f"epochs must be at least {under_way.stop}, as many as workers may have begun, "
            f"got {config.epochs}"
        )
    for name in orders if under_way else ():
        advice = f"it draws the order of its samples; {saved.advice}"
        raise must_stay(name, before[name], getattr(config, name), " inside an epoch", advice)
    stages = saved.state["log"]["stages"]
    was = {e: s["resolution"] for s in stages for e in range(s["first_epoch"], s["end_epoch"])}
    for epoch in under_way:
        if was[epoch] == (now := run.stage_at(epoch).resolution):
            continue
        advice, epochs = saved.advice, before["epochs"]
        if config.epochs > epochs:
            advice = f"go on with epochs {epochs} first"
            if config.schedule == before["schedule"] == "cyclic":
                milestones = ",".join(map(str, (*before["lr_milestones"], epochs)))
                advice += f", or give --lr-milestones {milestones} --allow-config-change"
        what = f"resolution of epoch {epoch + 1}, which is under way,"
        raise must_stay(what, px(was[epoch]), px(now), "", advice)


def with_lost_workers(state: Mapping[str, Any], run: Run, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the workers back that were lost.

    They begin with the first epoch that nobody has begun, when another worker has come as far, like
    workers that join a running job. Epochs under way keep the plans that were made without them.
    The run's planner takes the state; `epochs` the run was to have when it was saved.
    """
    server, planner, members = state["cluster"]["server"], run.planner, run.planner.members
    if len(server["active"]) == len(server["clocks"]):
        return state
    members.load_state_dict(server)
    planner.load_state_dict(state["planner"])
    # Only the workers know whether they have begun a round: all that may have.
    inside, members.inside = members.inside, members.active - members.newcomers
    begin = planner.next_epoch(min(epochs, run.config.epochs) * run.rounds)
    planner.take_in(members.lost, begin)
    for worker in members.lost:
        members.join(worker, begin * run.rounds)
    members.inside = inside
    cluster = state["cluster"] | {"server": server | members.state_dict()}
    return {**state, "cluster": cluster, "planner": planner.state_dict()}
