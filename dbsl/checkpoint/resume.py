"""Which checkpoint a run goes on from, whether its settings may, and what it takes over.

With other workers, or other plans, a run takes over the weights, optimizer state by worker, and
what is left of epochs: shares are planned anew, and every sample left is covered exactly once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.base.files import link_or_copy
from dbsl.base.words import as_given, px
from dbsl.checkpoint.disk import (
    MODEL_FILE,
    CheckpointError,
    Found,
    Manifest,
    MissingShardError,
    check_files,
    newest,
    read_manifest,
    read_shard,
    reading_checkpoint,
    remove_incomplete,
    set_aside_after,
    versions,
)
from dbsl.cluster.weights import vector_length
from dbsl.cluster.wire import SERVER_RANK, share_text
from dbsl.config.complete import (
    NODES,
    PROCESSES,
    RESOLVED,
    SOURCES,
    is_as_given,
    set_back,
    still_true,
    with_resolved,
)
from dbsl.config.parse import parse_config, run_folder_of
from dbsl.config.settings import (
    CHECKPOINTS,
    RunConfig,
    Schedule,
    meets_at_server,
    takes_joint_steps,
    without_rates,
)
from dbsl.model import BEST
from dbsl.optimizer import optimizer_class
from dbsl.plan.ledger import Members
from dbsl.plan.stages import make_stages
from dbsl.plan.types import (
    CurrentPlan,
    EpochEnd,
    Restart,
    Round,
    plan_from_plain,
    report_from_plain,
    segment_at,
    segments_from_plain,
)
from dbsl.run.code import SUMS, Code, unlike
from dbsl.run.folder import check_metrics
from dbsl.run.training import Run, round_sampler, steps_of

# What may change freely: no weight depends on it.
_FREE = {
    *("resume", "allow_config_change", "output_dir", "report_to", "plan_only", "max_minutes"),
    *("checkpoint_every", "keep_checkpoints", "save_best", "worker_timeout", "max_bad_rounds"),
    *("max_bad_images", "loader_workers", "eval_every", "eval_batch_size", "memory_limit"),
    *("log_every", "lr_batch_size", "noise_scale", "eval_samples", "eval_train"),
    *("profile", "profile_seconds", "profile_refresh", "push_to_hub", "mirror"),
}
# What follows from the number of workers, which may change as well.
TIMES = ("slope", "intercept", "floor")
_WORKERS = {"workers", "small_workers", "dedicated_server", *TIMES}
# What the order of an epoch is drawn by.
_ORDER = ("seed", "aug_repeats", "shuffle_block", "cache_gib")
PER_WORKER = (
    *(*TIMES, "large_batch_size", "small_batch_size", "local_batch_sizes", "micro_batch_size"),
)


def changed_settings(before: Mapping[str, Any], now: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings that are not what they were, as (before, now) by name."""
    new = {name: value for name, value in asdict(now).items() if name != RESOLVED}
    before = complete_settings(before, now)
    return {
        name: (before[name], new[name])
        for name in new
        if in_short(name, before[name]) != in_short(name, new[name])
    }


def in_short(name: str, value: Any) -> Any:
    """Return a setting's value as JSON has it; times that are the same everywhere are one time."""
    if name in TIMES and value and len(set(value)) == 1:
        return [value[0]]
    return plain(value)


def complete_settings(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """Return a checkpoint's settings; a setting that it does not know has its default."""
    return {field.name: field.default for field in fields(now)} | dict(before)


def check_changes(found: Found, config: RunConfig, processes: int, say: Any) -> None:
    """Say what has changed since the checkpoint; refuse what changes the mathematics.

    Settings that weights depend on may change with `allow_config_change`.
    """
    before = found.manifest.config
    changed = changed_settings(before, config)
    free = set(_FREE)
    if config.workers != found.manifest.workers:
        free |= _WORKERS | {"global_batch_size", *PER_WORKER}
    if "epochs" in changed:
        check_length(found.manifest, config.epochs)
        if config.epochs > changed["epochs"][0]:
            free.add("epochs")  # a run may always be made longer
    if None not in changed.get("cache_gib", (None,)):
        free.add("cache_gib")  # without a cache, the order is another
    others = () if found.manifest.processes == processes else (PROCESSES,)
    follows = _follows(changed, before.get(RESOLVED, ()), config.resolved, *others)
    mathematics = {n: change for n, change in changed.items() if n not in free | follows.keys()}
    why = {name: f" (not given: it follows {source})" for name, source in follows.items()}
    if mathematics:
        # It was allowed when it came into the file, and the run was killed before it had saved.
        agreed = with_resolved(_read_own(found.run_folder, type(config)))
        for name in [n for n in mathematics if is_as_given(n, agreed, config)]:
            why[name] = " (as config.yaml has it)"
            del mathematics[name]
    for name, (old, new) in changed.items():
        if name not in ("resume", "output_dir", "allow_config_change", "mirror"):
            say(f"changed since the checkpoint: {_change(name, old, new)}{why.get(name, '')}")
    if mathematics and not config.allow_config_change:
        listed = ", ".join(_change(name, *values) for name, values in mathematics.items())
        raise SettingError(
            f"allow_config_change must be given for a change of what is trained, got {listed}"
        )


def without_effect(run_folder: Path, given: RunConfig) -> str:
    """Return in words what is given other than a finished run was, where it was trained by that."""
    own = _read_own(run_folder, type(given))
    changes = {
        field.name: (getattr(own, field.name), getattr(given, field.name))
        for field in fields(given)
        if field.name not in _FREE | {RESOLVED}
    }
    return ", ".join(_change(name, *pair) for name, pair in changes.items() if pair[0] != pair[1])


def _read_own(run_folder: Path, cls: type[RunConfig]) -> RunConfig:
    """Return the settings in a run's config.yaml."""
    return parse_config(cls, ["--config", str(run_folder / "config.yaml")])


def check_joining(
    job: Mapping[str, Any], now: RunConfig, *, but: Collection[str] = (), code: Code | None = None
) -> None:
    """Raise ``SettingError`` unless a process that joins a running job trains as the job does.

    `job` has the job's settings and the sums of its code. Settings in `but` are left out: the
    process has not found them out yet.
    """
    if code and (files := unlike(job.get(SUMS, {}), code.sums)):
        raise SettingError(f"code must be that of the job, got another {files} here")
    changed = changed_settings(job, now)
    listed = [
        f"{name} {as_given(job)} there, {as_given(own)} here"
        for name, (job, own) in changed.items()
        if name not in _FREE.union(but)
    ]
    if listed:
        raise SettingError(f"settings must be those of the job, got {', '.join(listed)}")


def check_length(manifest: Manifest, epochs: int) -> None:
    """Raise ``SettingError`` if a run is to have no more epochs than it has trained."""
    if epochs <= manifest.epoch:
        raise SettingError(
            f"epochs must be above the {manifest.epoch} that are complete, got {epochs}"
        )


def epochs_under_way(
    state: Mapping[str, Any], before: Mapping[str, Any], *, at_epoch_end: bool
) -> range:
    """Return the epochs that a worker may have begun and that are not complete.

    Args:
        state: Of rank 0.
        before: The settings that it was saved with.
        at_epoch_end: Whether it was saved where all meet at an epoch's end, not inside a round.
    """
    cluster, planner = state["cluster"], state["planner"]
    rounds = pushes_per_epoch(planner, before)
    server = cluster.get("server") or {"clocks": [cluster["clock"]], "active": [0]}
    clocks, slowest = server["clocks"], min(server["clocks"][w] for w in server["active"])
    if "queue" in cluster:  # simulated: it is known who is in a round
        inside = {worker for _, worker in cluster["queue"]} | {cluster["turn"]} - {None}
    elif at_epoch_end and not meets_at_server(before["sync"]):
        inside = set()
    else:  # only the workers know whether they have taken a step: all that may have
        ahead = {"ssp": before["staleness"], "asp": math.inf}.get(before["sync"], 0)
        inside = {w for w in server["active"] if clocks[w] <= slowest + ahead}
    begun = max(clock + (worker in inside) for worker, clock in enumerate(clocks))
    stop = -(-min(begun, before["epochs"] * rounds) // rounds)
    decided = (epoch + 1 for epoch in (*planner["segments"], *planner["fixed"]))
    return range(slowest // rounds, max(stop, *decided, 0))


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
        for name in _ORDER
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


def _follows(
    changed: Mapping[str, tuple[Any, Any]],
    before: Collection[str],
    now: Collection[str],
    *others: str,
) -> dict[str, str]:
    """Return what changed because something else did, which is to be agreed to: name and source.

    What is free is no such source: step times that are measured again, or batches that are to fit
    into other memory, are no more free than if they were given. `before` and `now` name what was
    found out then and now; `others` are sources that have changed and are no settings.
    """
    found = {
        name: (old is None or name in before) and (new is None or name in now)
        for name, (old, new) in changed.items()
        if name in SOURCES
    }
    sources = {*others, *changed} - _FREE - {name for name in found if found[name]}
    if found.get("cpu_threads") and None in changed["cpu_threads"]:
        sources.add(NODES)  # they were unlike, or are so now
    follows = {}
    for name in SOURCES:  # sources come first
        if found.get(name) and (own := [s for s in SOURCES[name] if s in sources]):
            follows[name] = own[0]
            sources.add(name)
    return follows


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} {as_given(old)} -> {as_given(new)}"


def plain(value: Any) -> Any:
    """Return a tuple as the list that JSON makes of it."""
    return list(value) if isinstance(value, tuple) else value


# What a state is of: a refusal names the first of these that has changed.
_TRAINING = (
    *("workers", "sync", "push", "push_every", "rounds_per_epoch", "balance"),
    *("local_batch_sizes", "global_batch_size"),
)

Ranges = tuple[tuple[int, int], ...]


class RoundAhead(NamedTuple):
    """A round that workers had ahead of them, its plan, and who it was to come of."""

    epoch: int
    round: int
    segment: CurrentPlan
    workers: list[int]


def plan_restart(
    state: Mapping[str, Any],
    optimizers: Mapping[int, Any],
    run: Run,
    before: Mapping[str, Any],
    samples: int,
) -> Restart:
    """Return what a run takes over from another one's state.

    Args:
        state: Of the old run's rank 0.
        optimizers: Optimizer state of the old workers, by worker.
        run: The new run.
        before: The old run's settings.
        samples: Training images of the old run.

    Raises:
        SettingError: If what is left of the epoch cannot be told.
    """
    if before["sync"] == "step":
        return _joint_restart(state, optimizers, run, before, samples)
    cluster, rounds = state["cluster"], run.rounds
    server, rounds_before = cluster["server"], pushes_per_epoch(state["planner"], before)
    clocks, again = _rounds_behind(server, at_barrier=before["sync"] == "bsp")
    ahead = list(rounds_ahead(state["planner"], clocks, run, rounds_before, again))
    if ahead:
        _check_inside_epoch({each.epoch for each in ahead}, state, run, before, samples)
    epoch, round_ = lowest = divmod(min(clocks), rounds_before)
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
    left = left_of_epochs(ahead, run, rounds_before)
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
    _check_inside_epoch({epoch}, state, run, before, samples)
    turn = Round(tuple(range(run.config.workers)), epoch, round_)
    segment = CurrentPlan(run.plans[run.stage_at(epoch).resolution])
    counted = progress["counted"] if progress else 0
    ahead = steps_of(segment, turn, run.config, run.rounds, len(run.data.train), run.least)
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


def _rounds_behind(
    server: Mapping[str, Any], *, at_barrier: bool
) -> tuple[list[float], Collection[int]]:
    """Return the rounds that each worker has behind it, and who has to do the lowest one again.

    A lost worker has all behind it: what it had left was counted as lost, and is not to come. What
    a barrier has collected is not merged: it is to be trained on again.
    """
    there = server["active"]
    clocks = [clock if w in there else math.inf for w, clock in enumerate(server["clocks"])]
    lowest = min(clocks)
    return clocks, [w for w in there if at_barrier and clocks[w] > lowest]


def left_of_epochs(ahead: Iterable[RoundAhead], run: Run, rounds: int) -> dict[int, Ranges]:
    """Return what workers had left of the epochs that any of them had begun.

    Args:
        ahead: All that they had ahead (`rounds_ahead`).
        run: The new run, of the same samples and seed.
        rounds: Rounds per epoch, of the old run.
    """
    samples = len(run.data.train)
    left: dict[int, list[tuple[int, int]]] = {}
    for epoch, round_, segment, workers in ahead:
        sampler = round_sampler(segment, rounds, samples, run.config.seed, run.least)
        ranges = left.setdefault(epoch, [])
        for worker in workers:
            ranges += sampler.places(worker, round_)
    return {epoch: _joined(ranges) for epoch, ranges in left.items()}


def rounds_ahead(
    planner: Mapping[str, Any],
    clocks: Sequence[float],
    run: Run,
    rounds: int,
    again: Collection[int] = (),
) -> Iterator[RoundAhead]:
    """Yield each round from the lowest on.

    It goes on to the end of the epochs that any worker has begun, or that keep the plan of before
    a loss.

    Args:
        planner: State of the planner that they worked by.
        clocks: Rounds that each has behind it; infinite: nothing of its share is to come.
        run: The new run, of the same samples and seed.
        rounds: Rounds per epoch, of the old run.
        again: Workers that have to do the lowest of these rounds again.
    """
    current = {r: plan_from_plain(plan) for r, plan in planner["current"].items()}
    fixed = segments_from_plain(planner["fixed"])
    known = segments_from_plain(planner["segments"]) | fixed
    lowest = min(clocks)
    begun = max(clock for clock in clocks if clock < math.inf)
    stop = max(-(-begun // rounds), *(epoch + 1 for epoch in fixed), 0)
    for moment in range(lowest, stop * rounds):
        epoch, round_ = divmod(moment, rounds)
        segments = known.get(epoch) or [CurrentPlan(current[run.stage_at(epoch).resolution])]
        segment = segment_at(segments, round_)
        workers = [
            worker
            for worker, clock in enumerate(clocks)
            if clock <= moment or (moment == lowest and worker in again)
        ]
        yield RoundAhead(epoch, round_, segment, workers)


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """Return ranges in order, touching ones joined."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return tuple(joined)


def _check_inside_epoch(
    epochs: Collection[int],
    state: Mapping[str, Any],
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
        old = state["planner"]["current"][resolution]["global_batch_size"]
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


def advice_inside(before: Mapping[str, Any]) -> str:
    """Return when a change may be made that is refused inside an epoch."""
    if meets_at_server(before["sync"]):
        return "it may change where no worker is inside an epoch"
    return "resume a checkpoint of an epoch's end"


def _changed(run: Run, before: Mapping[str, Any]) -> tuple[str, str]:
    """Return the first words of a refusal, and its last ones."""
    for name in _TRAINING:
        old, now = (as_given(value) for value in (before[name], getattr(run.config, name)))
        if old != now:
            return f"{name} must stay {old}", f"got {now}"
    return "plans must stay as they are", "got others"


def pushes_per_epoch(planner: Mapping[str, Any], before: Mapping[str, Any]) -> int:
    """Return the rounds of an epoch, of a run with this planner's state and these settings."""
    if before["push"] != "gradients":
        return before["rounds_per_epoch"]
    plan = next(iter(planner["current"].values()))
    steps = max(worker["steps"] for worker in plan["workers"])  # a lost worker has none
    return -(-steps // before["push_every"])


_ROUND_ANEW = {"progress": None, "clock": {}}  # no steps taken, no time spent
# How workers meet: where one of these has changed, no process's own state fits.
_MEETING = {"sync", "push", "push_every", "rounds_per_epoch", "dedicated_server"}
# What plans are made from: where one of these has changed, the plans that were saved do not hold.
_PLANS = {
    *("small_workers", "time_ratio", "small_share", "update_factor", "rounding"),
    *("large_batch_size", "small_batch_size", "local_batch_sizes", "global_batch_size"),
    *("resolutions", "drop_last", "min_batch_size", "slope", "intercept", "floor", "balance"),
}


@dataclass(frozen=True)
class Resumed:
    """A checkpoint, read."""

    folder: Path
    sequence: int  # its number
    state: Mapping[str, Any]  # this process's shard; rank 0's with a restart
    restart: Restart | None  # None: workers and plans are what they were

    @property
    def log(self) -> Mapping[str, Any] | None:
        """State of the run's log; None on processes that have none."""
        return self.state.get("log")


def find_checkpoint(config: RunConfig, accelerator: Accelerator) -> Found | None:
    """Return what a run goes on from, the same on every process; None: it is a new run."""
    if config.resume is None:
        return None
    run_folder = run_folder_of(config.resume, config.output_dir)
    if not (run_folder / "config.yaml").is_file():
        return None  # auto, at the first start
    error = name = ""
    if accelerator.is_main_process:
        try:
            name = _choose(Path(config.resume), run_folder, accelerator)
        except SettingError as reason:
            error = str(reason)
    if error := share_text(error, accelerator):  # in every process, or the others would wait
        raise CheckpointError(error)
    name = share_text(name, accelerator)
    if not name:
        return Found(run_folder)
    folder = run_folder / CHECKPOINTS / name
    return Found(run_folder, folder, read_manifest(folder))


def _choose(resume: Path, run_folder: Path, accelerator: Accelerator) -> str:
    if resume.parent.name == CHECKPOINTS:
        check_files(resume, read_manifest(resume))
        return resume.name
    found = newest(run_folder, lambda line: accelerator.print(f"warning: {line}"))
    if found is None and str(resume) != "auto":
        raise CheckpointError(f"resume must name a run with a complete checkpoint, got {resume}")
    return found[0].name if found else ""


def is_finished(found: Found, config: RunConfig) -> bool:
    """Whether the run has come to its end, and is not to go on for more epochs."""
    path = found.run_folder / "summary.json"
    trained = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        trained = int(json.loads(path.read_text(encoding="utf-8"))["epochs"])
    if trained > config.epochs:
        raise SettingError(
            f"epochs must be at least {trained}, which the finished run in {found.run_folder} has "
            f"trained, got {config.epochs}"
        )
    if trained == config.epochs:
        return True
    if found.folder is None and path.exists():  # it has ended: it must not be overwritten
        raise SettingError(
            "keep_checkpoints must be at least 1 in a run that is to be made longer, got a "
            f"finished run without a checkpoint in {found.run_folder}"
        )
    return False


def adapt_to_processes(
    config: RunConfig, found: Found | None, processes: int, given: RunConfig
) -> RunConfig:
    """Return the config for as many workers as there are now.

    What was measured or solved for other workers is left to be found anew; the global batch of
    joint steps stays.

    Args:
        config: With what the run had found out filled in.
        found: What it goes on from; None: it is new.
        processes: Of this launch.
        given: The settings as they were given.
    """
    if found is None or found.manifest is None:
        return config
    before = complete_settings(found.manifest.config, config)
    alone = config.workers or found.manifest.workers
    workers = alone if processes == 1 else processes - config.dedicated_server
    if workers == found.manifest.workers:
        return replace(config, workers=workers)
    same = config.resolved.get(PROCESSES)  # a launch of other processes has dropped its own
    kept = still_true(config.resolved, config, replace(config, workers=workers), same)
    config = set_back(config, given, config.resolved.keys() - kept.keys() - {"workers"})
    changes: dict[str, Any] = {"workers": workers}
    if config.small_workers is not None:
        changes["small_workers"] = min(config.small_workers, workers)
    rows = len(before["resolutions"])
    for name in PER_WORKER:
        value = getattr(config, name)
        if value in (None, "auto"):
            continue
        by_hand = name == "local_batch_sizes" and found.manifest.workers > 1
        per_worker = len(value) > rows or by_hand
        if per_worker and in_short(name, value) == in_short(name, before[name]):
            changes[name] = None
            if name in TIMES:
                changes |= dict.fromkeys(TIMES)
    joint = before["sync"] == "step" or before["push"] == "gradients"
    if joint and config.global_batch_size is None:
        state = read_shard(found.folder, found.manifest, 0)
        sizes = {plan["global_batch_size"] for plan in state["planner"]["current"].values()}
        by_hand = config.local_batch_sizes
        if len(sizes) == 1 and (by_hand is None or len(by_hand) != workers):
            changes |= {"global_batch_size": sizes.pop(), "local_batch_sizes": None}
    return replace(config, **changes)


def read_resumed(found: Found, run: Run, accelerator: Accelerator) -> Resumed | None:
    """Read a checkpoint for this process; None: there is none yet, and the run starts again."""
    if found.folder is None:
        accelerator.print(f"{found.run_folder} has no checkpoint yet: the run starts again")
        return None
    manifest, classes = found.manifest, run.data.num_classes
    if manifest.classes != classes:
        raise SettingError(
            f"dataset must have the classes that the run began with, got {manifest.classes} "
            f"classes in the checkpoint, {classes} in the data"
        )
    _check_state(found, run)
    check_changes(found, run.config, accelerator.num_processes, accelerator.print)
    check_epochs_under_way(found, run)
    before = complete_settings(manifest.config, run.config)
    restart, refused, rank = None, None, accelerator.process_index
    with reading_checkpoint(found.folder):
        samples = manifest.samples
        alike = goes_on_alike(manifest, run.config, accelerator.num_processes)
        if alike and samples == len(run.data.train):
            state = _own_shard(found, before, rank, run)
        else:
            state = read_shard(found.folder, manifest, 0)
            optimizers = _of_all_shards(found, state, run.config.workers)
            try:
                restart = plan_restart(state, optimizers, run, before, samples)
            except SettingError as error:
                refused = error
        if accelerator.is_main_process:
            check_metrics(found.run_folder / "metrics.jsonl", state["log"]["metrics_bytes"])
    if refused is not None:
        raise refused
    return Resumed(found.folder, manifest.sequence, state, restart)


def _check_state(found: Found, run: Run) -> None:
    """Refuse another model, or kind of optimizer, into which the state does not go."""
    changed = changed_settings(found.manifest.config, run.config)
    old, new = changed.get("optimizer", ("sgd", "sgd"))
    more, now_more = map(without_rates, changed.get("opt_kwargs", ((), ())))
    more = more != now_more  # which may need more state (amsgrad)
    kinds = {optimizer_class(old) or old, optimizer_class(new) or new}
    if more or len(kinds) > 1:
        name = "opt_kwargs" if more else "optimizer"
        before, now = map(as_given, changed[name])
        raise SettingError(f"{name} must stay {before}, whose state the run has, got {now}")
    name = next((name for name in ("model", "model_kwargs") if name in changed), None)
    if name is None:
        return
    with reading_checkpoint(found.folder):
        state = read_shard(found.folder, found.manifest, SERVER_RANK)
        weights = state["model"]["weights"]
        if weights is None:  # between rounds the server has them
            weights = state["cluster"]["server"]["weights"]
    if len(weights) != vector_length(run.model):
        before, now = map(as_given, changed[name])
        raise SettingError(f"{name} must stay {before}, whose weights the run has, got {now}")


def goes_on_alike(manifest: Manifest, config: RunConfig, processes: int) -> bool:
    """Whether each process goes on from its own state: plans are as they were, and how all meet."""
    changed = changed_settings(manifest.config, config)
    alike = (manifest.processes, manifest.workers) == (processes, config.workers)
    return alike and changed.keys().isdisjoint(_MEETING | _PLANS)


def take_over_folder(found: Found, run: Run, accelerator: Accelerator) -> None:
    """Make the run folder what it was at the checkpoint; all has been read, and fits."""
    manifest, best = found.manifest, f"{BEST}.safetensors"
    if not accelerator.is_main_process:
        return
    if manifest is not None and best in manifest.files:
        link_or_copy(found.folder / best, found.run_folder / best)
    else:
        (found.run_folder / best).unlink(missing_ok=True)
    if manifest is None:
        return
    # Of a finished run that is made longer: until that ends it is not finished.
    (found.run_folder / "summary.json").unlink(missing_ok=True)
    remove_incomplete(found.run_folder)
    for folder in set_aside_after(found.run_folder, manifest.sequence):
        accelerator.print(f"a later checkpoint is set aside: {folder}")
    epochs = f"{manifest.epoch} of {run.config.epochs} epochs complete"
    accelerator.print(f"resumed from {found.folder} ({epochs}, saved {manifest.saved_at})")
    for name, version in manifest.versions.items():
        if versions()[name] != version:
            accelerator.print(
                f"warning: saved with {name} {version}, now {versions()[name]}: "
                "bits may differ from an unbroken run"
            )


def _own_shard(found: Found, before: Mapping[str, Any], rank: int, run: Run) -> Any:
    """Return a process's state; where workers go by themselves, as of the server's clocks."""
    manifest = found.manifest
    if manifest.processes == 1 or not meets_at_server(before["sync"]):
        return read_shard(found.folder, manifest, rank)
    first = read_shard(found.folder, manifest, SERVER_RANK)
    first = with_lost_workers(first, run, before["epochs"])
    if rank == SERVER_RANK:
        return first
    clock = first["cluster"]["server"]["clocks"][rank - before["dedicated_server"]]
    try:
        state = read_shard(found.folder, manifest, rank)
    except MissingShardError:  # it was lost, or had not come to save
        state = first | {"stepper": {**first["stepper"], "optimizers": {}}} | _ROUND_ANEW
    if state["cluster"]["clock"] != clock:  # saved in another round than the server was in
        state = state | _ROUND_ANEW
    return state | {"cluster": {"clock": clock, "waited_s": 0.0, "server": None}}


def with_lost_workers(state: Mapping[str, Any], run: Run, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the workers back that were lost.

    They begin with the first epoch that nobody has begun, when another worker has come as far, like
    workers that join a running job. Epochs under way keep the plans that were made without them.

    Args:
        state: As it was saved.
        run: The run that goes on.
        epochs: That the run was to have when it was saved.
    """
    server, planner, rounds = state["cluster"]["server"], state["planner"], run.rounds
    there = set(server["active"])
    if len(there) == len(server["clocks"]):
        return state
    last = min(epochs, run.config.epochs) * rounds  # that anybody could have begun
    clocks = dict(enumerate(server["clocks"]))
    newcomers = set(server["newcomers"])
    # Only the workers know whether they have begun a round: all that may have.
    inside = {w: clocks[w] for w in there - newcomers}
    members = Members(clocks, there, last, inside, newcomers)
    kept = segments_from_plain(planner["fixed"])
    first = members.slowest // rounds
    begin = members.next_epoch(planner["begun"], rounds, kept)
    fixed = {
        epoch: [{"plan": planner["current"][run.stage_at(epoch).resolution]}]
        for epoch in range(first, begin)
    }
    fixed |= planner["segments"] | planner["fixed"]
    clocks = [c if w in there else begin * rounds for w, c in enumerate(server["clocks"])]
    back = set(range(len(clocks))) - there
    server = server | {
        "clocks": clocks,
        "active": list(range(len(clocks))),
        "newcomers": sorted(back | newcomers),
    }
    changes = {
        "current": {resolution: asdict(plan) for resolution, plan in run.plans.items()},
        "fixed": {epoch: rows for epoch, rows in fixed.items() if epoch < begin},
        "segments": {},
        "asked": {},
        "active": server["active"],
        "begun": begin * rounds,
        "since": {},
    }
    return {
        **state,
        "cluster": state["cluster"] | {"server": server},
        "planner": planner | changes,
    }


def _of_all_shards(found: Found, first: Mapping[str, Any], workers: int) -> dict[int, Any]:
    """Return optimizer state by worker, from all shards.

    Each is read once, and none is kept whole: together they may be larger than the memory. `first`
    is rank 0's. State of others than the new run's workers is left out.
    """
    optimizers: dict[int, Any] = {}
    for rank in range(found.manifest.processes):
        with suppress(MissingShardError):  # a lost worker has none
            shard = read_shard(found.folder, found.manifest, rank) if rank else first
            own = shard["stepper"]["optimizers"]
            optimizers |= {w: state for w, state in own.items() if w < workers}
    return optimizers
