"""What other workers, or other plans, take over: weights, and the rest of an epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from dbsl.base.errors import SettingError, as_given, px
from dbsl.checkpoint.disk import CheckpointError, Found, checkpoints_in
from dbsl.cluster.wire import SERVER_RANK
from dbsl.config.fields import refuse
from dbsl.config.settings import RunConfig, meets_at_server, steps_of_push, takes_joint_steps
from dbsl.plan.ledger import Ledger, Members
from dbsl.plan.types import Handover, Segment, Turn, report_from_plain
from dbsl.run.workers import Workers


def complete_settings(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """Return saved settings with the defaults of those that were not there yet."""
    return {field.name: field.default for field in fields(now)} | dict(before)


def must_stay(what: str, old: Any, new: Any, why: str, advice: str = "") -> SettingError:
    """Return the refusal of a change."""
    then = f": {advice}" if advice else ""
    return SettingError(f"{what} must stay {as_given(old)}{why}, got {as_given(new)}{then}")


class Saved:
    """A run as it was saved: rank 0's state, its complete settings, its number of samples.

    `run` is the one that goes on; it has the same order of resolutions in epochs under way.
    """

    def __init__(
        self, state: Mapping[str, Any], settings: Mapping[str, Any], samples: int, workers: Workers
    ) -> None:
        self.state, self.settings, self.samples = state, settings, samples
        self.ledger = Ledger({}, lambda epoch: workers.plans.stage_at(epoch).resolution)
        self.ledger.load_state_dict(state["planner"])
        self.joint, self.pushes = settings["sync"] == "step", settings["push"] != "weights"
        # When a change may be made that is refused inside an epoch.
        self.advice = "resume a checkpoint of an epoch's end"
        # Real workers that go by themselves save the server's state, and none of theirs.
        asynchronous = meets_at_server(settings["sync"])
        self.server_alone = asynchronous and "queue" not in state["cluster"]
        if asynchronous:
            self.advice = "it may change where no worker is inside an epoch"

    @property
    def is_open(self) -> bool:
        """Whether other workers or plans may go on from here: what is left is one piece.

        Joint steps may anywhere. Else all workers must have pushed the same rounds, of which none
        is lost with a worker that was ahead, and every epoch's end must have been told.
        """
        if self.joint:
            return True
        members, server = self.members, self.state["cluster"]["server"]
        clocks = {members.clocks[worker] for worker in members.active}
        begun = self.state["planner"]["begun"]  # where a loss has left rounds as they were planned
        return len(clocks) == 1 and max(clocks) >= begun and not server["finished"]

    @property
    def rounds(self) -> int:
        """Rounds of an epoch."""
        if not self.pushes:
            return self.settings["rounds_per_epoch"]
        plan = next(iter(self.ledger.current.values()))
        steps = max(worker.steps for worker in plan.workers)  # a lost worker has none
        return -(-steps // steps_of_push(self.settings["push"]))

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
        if "queue" in cluster:  # simulated: it is known who is in a round
            members.inside = {worker for _, worker in cluster["queue"]} | {cluster["turn"]} - {None}
        elif at_epoch_end or self.server_alone:
            members.inside = set()
        else:  # only the workers know whether they have taken a step: all that may have
            slowest = members.slowest()
            members.inside = {w for w in members.active if members.clocks[w] == slowest}
        return self.ledger.under_way(members, self.settings["epochs"] * self.rounds)


def closed(what: str, pair: tuple[Any, Any], found: Found, workers: Workers) -> SettingError:
    """Return the refusal of a change at a checkpoint that is not open, which names one that is."""
    advice = "the run has no checkpoint where they have"
    for other in checkpoints_in(found.run_folder):
        with suppress(CheckpointError):
            settings = complete_settings(other.manifest.config, workers.config)
            its = Saved(other.shard(SERVER_RANK), settings, other.manifest.samples, workers)
            if its.is_open:
                advice = f"--resume {other.folder} goes on where they have"
                break
    return must_stay(what, *pair, " until all workers have pushed the same rounds", advice)


def make_handover(saved: Saved, optimizers: Mapping[int, Any], workers: Workers) -> Handover:
    """Return what a run takes over from an open one whose workers had `optimizers`."""
    if saved.joint:
        return _joint_handover(saved, optimizers, workers)
    cluster, server = saved.state["cluster"], saved.state["cluster"]["server"]
    epoch, round_ = divmod(saved.members.slowest(), saved.rounds)
    if round_:
        _check_inside_epoch(epoch, saved, workers)
    if saved.pushes:
        more = _optimizer_of_all(server["optimizer"], workers)
    else:
        sampler = replace(workers.plans.sampler, rounds=saved.rounds)
        taken = sampler.start_of(saved.ledger.at(epoch, round_), round_) if round_ else 0
        if takes_joint_steps(workers.config):  # whose optimizers must be alike in all processes
            optimizers = {}
        more = {"taken": taken, "optimizers": optimizers, "outer": server["outer"]}
    return Handover(
        weights=server["weights"],
        refused=cluster["refused"],
        clock=epoch * workers.plans.rounds + round_,
        time_s=cluster["time_s"] or 0.0,
        reports=tuple(map(report_from_plain, server["reports"])),
        **more,
    )


def _joint_handover(saved: Saved, optimizers: Mapping[int, Any], workers: Workers) -> Handover:
    cluster, progress = saved.state["cluster"], saved.state["progress"] or {}
    steps, counted = progress.get("steps", 0), progress.get("counted", 0)
    handover = Handover(
        weights=saved.state["model"]["weights"],
        refused=cluster["refused"],
        clock=cluster["clock"],
        time_s=cluster["time_s"] or 0.0,
        **_optimizer_of_all(next(iter(optimizers.values()), None), workers),
    )
    epoch, round_ = divmod(cluster["clock"], saved.rounds)
    if not round_ and not steps:
        return replace(handover, clock=epoch * workers.plans.rounds)
    _check_inside_epoch(epoch, saved, workers)
    turn, plans = Turn(tuple(range(workers.config.workers)), epoch, round_), workers.plans
    segment = Segment(plans.first[plans.stage_at(epoch).resolution])
    ahead = plans.sampler.steps(segment, turn)
    return replace(
        handover,
        steps=steps,
        learning_rate=progress.get("learning_rate", 0.0),
        samples=sum(len(part.indices) for step in ahead[counted:steps] for part in step.parts),
    )


def _optimizer_of_all(state: Mapping[str, Any] | None, workers: Workers) -> dict[str, Any]:
    if workers.config.push != "weights":
        return {"server_optimizer": state}
    return {"optimizers": {w: state for w in range(workers.config.workers) if state}}


def _check_inside_epoch(epoch: int, saved: Saved, workers: Workers) -> None:
    """Refuse changes after which nobody could tell which samples of this epoch are left."""
    config, kept = workers.config, {"training images": (saved.samples, len(workers.data.train))}
    # The place in an epoch is counted in rounds, of joint steps in steps.
    names = ["sync"] if saved.joint or config.sync == "step" else []
    if saved.joint or saved.pushes or takes_joint_steps(config):
        names += ["push", "drop_last"]
    names.append("rounds_per_epoch")
    kept |= {name: (saved.settings[name], getattr(config, name)) for name in names}
    if saved.joint or saved.pushes:
        resolution = workers.plans.stage_at(epoch).resolution
        plans = saved.ledger.current[resolution], workers.plans.first[resolution]
        what = f"global_batch_size{px(resolution, ' at ')}"
        kept[what] = tuple(plan.global_batch_size for plan in plans)
    for what, (old, new) in kept.items():
        if old != new:
            raise must_stay(what, old, new, " inside an epoch", saved.advice)


def check_epochs_under_way(
    saved: Saved, orders: Collection[str], workers: Workers, *, at_epoch_end: bool
) -> None:
    """Refuse what epochs that are under way cannot go on with.

    What their workers have trained on is told by the plan of the resolution, and by the order, that
    they began with. A run must have the epochs that any worker has begun. `orders` are changed
    settings that draw another order.
    """
    config, before = workers.config, saved.settings
    under_way = saved.under_way(at_epoch_end=at_epoch_end)
    text = f"epochs must be at least {under_way.stop}, as many as workers may have begun"
    refuse([(under_way and config.epochs < under_way.stop, text, config.epochs)])
    for name in orders if under_way else ():
        advice = f"it draws the order of its samples; {saved.advice}"
        raise must_stay(name, before[name], getattr(config, name), " inside an epoch", advice)
    stages = saved.state["stages"]
    was = {e: s["resolution"] for s in stages for e in range(s["first_epoch"], s["end_epoch"])}
    for epoch in under_way:
        if was[epoch] == (now := workers.plans.stage_at(epoch).resolution):
            continue
        advice, epochs = saved.advice, before["epochs"]
        if config.epochs > epochs:
            advice = f"go on with epochs {epochs} first"
            if config.schedule == before["schedule"] == "cyclic":
                milestones = ",".join(map(str, (*before["lr_milestones"], epochs)))
                advice += f", or give --lr-milestones {milestones} --allow-config-change"
        what = f"resolution of epoch {epoch + 1}, which is under way,"
        raise must_stay(what, px(was[epoch]), px(now), "", advice)


def with_lost_workers(state: Mapping[str, Any], workers: Workers, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the workers back that were lost.

    They begin with the first epoch that nobody has begun, when another worker has come as far.
    Epochs under way keep the plans that were made without them.
    The run's planner takes the state; `epochs` the run was to have when it was saved.
    """
    server, planner = state["cluster"]["server"], workers.plans.planner
    members = planner.members
    if len(server["active"]) == len(server["clocks"]):
        return state
    members.load_state_dict(server)
    planner.load_state_dict(state["planner"])
    begin = planner.bring_back(min(epochs, workers.config.epochs) * workers.plans.rounds)
    for worker in members.lost:
        members.join(worker, begin * workers.plans.rounds)
    cluster = state["cluster"] | {"server": server | members.state_dict()}
    return {**state, "cluster": cluster, "planner": planner.state_dict()}
