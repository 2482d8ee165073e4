"""Which settings a resumed run may change, and which epochs are under way."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dbsl.base.errors import SettingError
from dbsl.base.words import as_given
from dbsl.checkpoint.manifest import Manifest
from dbsl.checkpoint.on_disk import MODEL_FILE, Found, read_shard, reading_checkpoint
from dbsl.checkpoint.restart import advice_inside, pushes_per_epoch
from dbsl.cluster.config import meets_at_server
from dbsl.cluster.messages import SERVER_RANK
from dbsl.plan.stages import Schedule, make_stages
from dbsl.run.code import SUMS, Code, unlike
from dbsl.run.config import RunConfig
from dbsl.run.parse import parse_config
from dbsl.run.resolved import NODES, PROCESSES, RESOLVED, SOURCES, is_as_given, with_resolved
from dbsl.run.run import Run

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

    Raises:
        SettingError: If a setting that weights depend on has changed and `allow_config_change` is
            not given.
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

    Args:
        job: The settings that the job trains with, and the sums of its code.
        now: Those of the process.
        but: Settings that are left out, since the process has not found them out yet.
        code: Its code, to be held against the job's.
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
    into other memory, are no more free than if they were given.

    Args:
        changed: Values then and now, by name.
        before: Names of what was found out then.
        now: Names of what was found out now.
        others: Sources that have changed and are no settings.
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
