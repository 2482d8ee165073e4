"""Handing weights and the rest of an epoch over to other workers or plans.

The result is a state of the new workers, loaded like any saved state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from typing import Any

from dbsl.base.errors import as_given, px, require
from dbsl.config.settings import meets_at_server, shares_global_batch
from dbsl.plan.members import EpochPlans, Members
from dbsl.run.workers import Workers


def must_stay(what: str, old: Any, new: Any, why: str) -> None:
    """Refuse a change of a setting."""
    require(old == new, f"{what} must stay {as_given(old)}{why}", new)


class Saved:
    """A saved run: rank 0's state, its complete settings, its number of samples.

    `workers` are those that continue, with the same order of resolutions in epochs in progress.
    `at_epoch_end`: it was saved at an epoch's end, where all wait, not inside a round.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        settings: Mapping[str, Any],
        samples: int,
        workers: Workers,
        *,
        at_epoch_end: bool,
    ) -> None:
        self.state, self.settings, self.samples = state, settings, samples
        self.plans = EpochPlans({}, lambda epoch: workers.plans.stage_at(epoch).resolution)
        self.plans.load_state_dict(state["planner"])
        self.in_step, self.pushes = settings["sync"] == "step", settings["push"] != "weights"
        self.simulated = "queue" in state["cluster"]
        # Real workers that do not wait save only the server's state, not their own.
        self.server_alone = meets_at_server(settings["sync"]) and not self.simulated
        self.rounds = state["planner"]["rounds"]  # of an epoch
        # The workers and their progress; joint steps are treated as one worker's.
        self.members = members = Members(1, self.rounds)
        if server := state["cluster"]["server"]:
            members.load_state_dict(server)
        else:
            members.clocks = [state["cluster"]["clock"]]
        if not self.simulated:  # only workers know whether they have taken a step
            members.inside = set() if at_epoch_end or self.server_alone else members.active
        # Incomplete epochs that a worker may have begun.
        self.under_way = self.plans.under_way(members, settings["epochs"] * self.rounds)

    @property
    def others_may_go_on(self) -> bool:
        """Whether other workers or plans may continue from here.

        Every epoch's end must have been yielded. Except with joint steps, all workers must also
        have pushed the same rounds, none lost with a worker that was ahead. Steps of a round that a
        worker has not pushed are repeated.
        """
        if self.state["cluster"]["untold"]:
            return False
        if self.in_step:
            return True
        members = self.members
        clocks = {members.clocks[worker] for worker in members.active}
        begun = self.state["planner"]["begun"]  # rounds whose plan was kept when a worker was lost
        return len(clocks) == 1 and max(clocks) >= begun

    @property
    def position(self) -> tuple[int, int, int]:
        """Return the epoch, round and joint step that every worker has reached, if open."""
        steps = ((self.in_step and self.state["progress"]) or {}).get("steps", 0)
        return *divmod(self.members.slowest(), self.rounds), steps


def for_others(saved: Saved, workers: Workers) -> dict[str, Any]:
    """Return an open run's state for other workers; each process has its own.

    They take over the weights, the position in the epoch, the shared optimizer (of joint steps, or
    the server's) and that of `merge` delta. Everything else begins anew.
    """
    state, before, plans = saved.state, saved.state["cluster"], workers.plans
    cluster, planner, log = workers.cluster.state_dict(), plans.planner.state_dict(), state["log"]
    epoch, round_, steps = saved.position
    first, count = plans.first[plans.stage_at(epoch).resolution], workers.config.workers
    server = before["server"] or {"weights": state["model"]["weights"], "outer": None}
    weights, clock = server["weights"], epoch * plans.rounds + round_
    moment = {"clock": clock, "refused": before["refused"], "time_s": before["time_s"] or 0.0}
    kept = {"outer": server["outer"], "optimizer": server.get("optimizer")}
    if saved.in_step:
        kept["optimizer"] = next(iter(state["stepper"]["optimizers"].values()), None)
    kept = {name: value for name, value in kept.items() if value is not None}
    owner = {"weights": weights, "refused": before["refused"], "clocks": [clock] * count, **kept}
    cluster |= {**moment, "server": (cluster["server"] or {}) | owner}
    cluster |= {"inherited": steps, "start": weights if steps else None}  # of joint steps
    cluster |= {"ended": [moment["time_s"]] * count}  # of simulated workers
    if "outer" in kept:
        cluster["delta"] = kept["outer"]  # of a barrier
    if round_ and first.global_batch_size is None:  # joint steps have the same samples in any plan
        sampler = replace(plans.sampler, rounds=saved.rounds)
        taken = sampler.taken_before(saved.plans.at(epoch, round_), round_)
        rest = replace(first, first_round=round_, taken=taken)
        planner |= {"epochs": {epoch: [asdict(rest)]}, "decided": {epoch: plans.rounds}}
    if steps and log:
        ahead = plans.sampler.steps(first, range(count), epoch, round_)
        ahead = ahead[state["progress"]["inherited"] : steps]
        log = {**log, "taken": sum(len(part.indices) for step in ahead for part in step.parts)}
    state = {**state, "cluster": cluster, "planner": planner, "log": log, "stages": []}
    state["model"] = {**state["model"], "weights": weights}
    return without_workers(state, workers, kept.get("optimizer"), steps)


def without_workers(
    state: Mapping[str, Any], workers: Workers, shared: Any = None, steps: int = 0
) -> dict[str, Any]:
    """Return a state in which this process's workers begin a round with `steps` already taken.

    Their optimizers have the `shared` state, or begin anew. Each worker continues its count from
    the steps that it has pushed, a new one from the highest count.
    """
    heard = state["meter"]["heard"]
    most = max(heard.values(), default=0)
    heard = {worker: heard.get(worker, most) for worker in range(workers.config.workers)}
    windows = {worker: {"steps": heard[worker] + steps} for worker in workers.cluster.workers}
    optimizers = {} if shared is None else dict.fromkeys(workers.optimizers, shared)
    progress = None
    if steps:
        rate = state["progress"]["learning_rate"]  # perhaps no step is left to set it
        progress = {"steps": steps, "inherited": steps, "learning_rate": rate}
    return {
        **state,
        "stepper": {**workers.stepper.state_dict(), "optimizers": optimizers},
        "timer": {},
        "progress": progress,
        "random": None,
        "meter": {"figures": None, "kept": [], "heard": heard, "windows": windows},
    }


def check_epochs_under_way(
    saved: Saved, orders: Collection[str], workers: Workers, epochs: range, *, others: bool
) -> None:
    """Refuse changes that would leave the remaining samples of these epochs unknown.

    The epochs have begun but are not complete. `orders` are changed settings that draw another
    order. `others`: other workers or plans take over.
    """
    config, before, plans = workers.config, saved.settings, workers.plans
    if not epochs:
        return
    text = f"epochs must be at least {epochs.stop}, as many as workers may have begun"
    require(config.epochs >= epochs.stop, text, config.epochs)
    names, kept = list(orders), {}
    for epoch in epochs:
        rows = (s for s in saved.state["stages"] if s["first_epoch"] <= epoch < s["end_epoch"])
        sides = (next(rows)["resolution"], plans.stage_at(epoch).resolution)
        kept[f"resolution of epoch {epoch + 1}"] = tuple(map(px, sides))
    if others:
        kept["training images"] = saved.samples, len(workers.data.train)
        # The position in an epoch is counted in rounds; for joint steps, in steps.
        names += ["sync"] if saved.in_step or config.sync == "step" else []
        if saved.in_step or saved.pushes or shares_global_batch(config):
            names += ["push", "drop_last"]
        names.append("rounds_per_epoch")
    kept |= {name: (before[name], getattr(config, name)) for name in names}
    for what, pair in kept.items():
        must_stay(what, *pair, " inside an epoch")
    if others and (saved.in_step or saved.pushes):
        resolution = plans.stage_at(epochs.start).resolution
        both = saved.plans.last[resolution], plans.first[resolution]
        what = f"global_batch_size{px(resolution, ' at ')}"
        must_stay(what, *(plan.global_batch_size for plan in both), " inside an epoch")


def with_lost_workers(state: Mapping[str, Any], workers: Workers, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the lost workers restored.

    They begin with the first epoch that no worker has begun. Epochs in progress keep the plans made
    without them. The state is loaded into the run's planner. `epochs` is the saved setting.
    """
    server, planner = state["cluster"]["server"], workers.plans.planner
    members = planner.members
    if len(server["active"]) == len(server["clocks"]):
        return state
    members.load_state_dict(server)
    planner.load_state_dict(state["planner"])
    begin = planner.bring_back(min(epochs, workers.config.epochs) * workers.plans.rounds)
    for worker in members.lost:
        members.clocks[worker] = begin * workers.plans.rounds
    members.active = set(range(len(members.clocks)))
    cluster = state["cluster"] | {"server": server | members.state_dict()}
    return {**state, "cluster": cluster, "planner": planner.state_dict()}
