"""Which checkpoint a run goes on from, whether it may, and what it takes over."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.files import link_or_copy
from dbsl.checkpoint.on_disk import (
    CheckpointError,
    Manifest,
    check_files,
    newest,
    read_manifest,
    read_shard,
    reading_checkpoint,
    remove_incomplete,
    set_aside_after,
    versions,
)
from dbsl.checkpoint.restart import plan_restart
from dbsl.cluster.messages import SERVER_RANK, share_text
from dbsl.model import BEST
from dbsl.plan.stages import Schedule, make_stages
from dbsl.plan.turns import Restart
from dbsl.run.config import CHECKPOINTS, in_todays_words, run_folder_of
from dbsl.run.folder import check_metrics
from dbsl.run.resolved import PROCESSES, RESOLVED, SOURCES
from dbsl.run.run import Run

Config = Any  # train.py's

# What may change freely: no weight depends on it.
_FREE = {
    *("resume", "allow_config_change", "output_dir", "report_to", "plan_only", "max_minutes"),
    *("checkpoint_every", "keep_checkpoints", "save_best", "worker_timeout", "max_bad_rounds"),
    *("max_bad_images", "loader_workers", "eval_every", "eval_batch_size", "memory_limit"),
    "log_every",
    *("profile", "profile_seconds", "profile_refresh", "push_to_hub"),
}
# What follows from the number of workers, which may change as well.
_WORKERS = {"workers", "small_workers", "slope", "intercept", "floor", "dedicated_server"}
_TIMES = ("slope", "intercept", "floor")
_LISTS = (*_TIMES, "large_batch_size", "small_batch_size", "local_batch_sizes")
_ROUND_ANEW = {"progress": None, "clock": {}}  # of a process's state: neither steps nor their time


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Attributes:
        run_folder: The run it is of.
        folder: The checkpoint; None: the run was killed before its first, and starts again.
        manifest: The checkpoint's.
    """

    run_folder: Path
    folder: Path | None = None
    manifest: Manifest | None = None


@dataclass(frozen=True)
class Resumed:
    """A checkpoint, read.

    Attributes:
        folder: The checkpoint.
        sequence: Its number.
        state: This process's piece; with a restart that of rank 0.
        restart: What is taken over where workers are not what they were; None: they are.
    """

    folder: Path
    sequence: int
    state: Mapping[str, Any]
    restart: Restart | None

    @property
    def log(self) -> Mapping[str, Any] | None:
        """State of the run's log; None on processes that have none."""
        return self.state.get("log")


def find_checkpoint(config: Config, accelerator: Accelerator) -> Found | None:
    """Return what a run goes on from, the same on every process; None: it is a new run.

    Raises:
        ValueError: On every process, if the checkpoint that was named is not whole, or a run has
            none.
    """
    if config.resume is None:
        return None
    run_folder = run_folder_of(config.resume, config.output_dir)
    if not (run_folder / "config.yaml").is_file():
        return None  # auto, at the first start
    error, name = None, ""
    if accelerator.is_main_process:
        try:
            name = _choose(Path(config.resume), run_folder, accelerator)
        except ValueError as reason:
            error = str(reason)
    error = share_text(error or "", accelerator)
    if error:
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


def is_finished(found: Found, config: Config) -> bool:
    """Whether the run has come to its end, and is not to go on for more epochs.

    Raises:
        ValueError: If it is to go on, and there is no checkpoint to go on from, or if it is longer
            than it is to be.
    """
    path = found.run_folder / "summary.json"
    trained = 0
    with suppress(OSError, ValueError, KeyError, TypeError):
        trained = int(json.loads(path.read_text(encoding="utf-8"))["epochs"])
    if trained > config.epochs:
        raise ValueError(
            f"epochs must be at least {trained}, which the finished run in {found.run_folder} has "
            f"trained, got {config.epochs}"
        )
    if trained == config.epochs:
        return True
    if found.folder is None and path.exists():  # it has ended: it must not be overwritten
        raise ValueError(
            "keep_checkpoints must be at least 1 in a run that is to be made longer, got a "
            f"finished run without a checkpoint in {found.run_folder}"
        )
    return False


def adapt_to_processes(config: Config, found: Found | None, processes: int) -> Config:
    """Return the config for as many workers as there are now.

    What was measured or solved for other workers is left to be found anew; the global batch of
    joint steps stays.
    """
    if found is None or found.manifest is None:
        return config
    before = found.manifest.config
    alone = config.workers or found.manifest.workers
    workers = alone if processes == 1 else processes - config.dedicated_server
    if workers == found.manifest.workers:
        return replace(config, workers=workers)
    changes: dict[str, Any] = {"workers": workers}
    if config.small_workers is not None:
        changes["small_workers"] = min(config.small_workers, workers)
    rows = len(before["resolutions"])
    for name in _LISTS:
        value = getattr(config, name)
        per_worker = value is not None and len(value) > rows and value != "auto"
        if per_worker and _plain(value) == _plain(before.get(name)):
            changes[name] = None
            if name in _TIMES:
                changes |= dict.fromkeys(_TIMES)
    joint = before["sync"] == "step" or before["push"] == "gradients"
    if joint and config.global_batch_size is None:
        state = read_shard(found.folder, found.manifest, 0)
        sizes = {plan["global_batch_size"] for plan in state["planner"]["current"].values()}
        by_hand = config.local_batch_sizes
        if len(sizes) == 1 and (by_hand is None or len(by_hand) != workers):
            changes |= {"global_batch_size": sizes.pop(), "local_batch_sizes": None}
    return replace(config, **changes)


def changed_settings(before: Mapping[str, Any], now: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that are not what they were, as (before, now) by name."""
    new = {name: value for name, value in asdict(now).items() if name != RESOLVED}
    before = _complete(before, now)
    return {
        name: (before[name], new[name]) for name in new if _plain(before[name]) != _plain(new[name])
    }


def _complete(before: Mapping[str, Any], now: Config) -> dict[str, Any]:
    """Return a checkpoint's settings; one of before a setting was there has its default."""
    return {field.name: field.default for field in fields(now)} | in_todays_words(before)


def check_changes(found: Found, config: Config, processes: int, say: Any) -> None:
    """Say what has changed since the checkpoint; refuse what changes the mathematics.

    Raises:
        ValueError: If a setting that weights depend on has changed and `allow_config_change` is
            not given.
    """
    before = found.manifest.config
    changed = changed_settings(before, config)
    free = set(_FREE)
    if config.workers != found.manifest.workers:
        free |= _WORKERS | {"global_batch_size", *_LISTS}
    if "epochs" in changed:
        _check_length(found.manifest, config.epochs)
        if config.epochs > changed["epochs"][0]:
            free.add("epochs")  # a run may always be made longer
    sources = set(changed)
    if found.manifest.processes != processes:
        sources.add(PROCESSES)
    # Found out then and now, and from something that has changed: that is to be agreed to.
    follows = {
        name
        for name in changed
        if name in before.get(RESOLVED, ()) and name in config.resolved
        if sources.intersection(SOURCES[name])
    }
    mathematics = {n: change for n, change in changed.items() if n not in free | follows}
    for name, (old, new) in changed.items():
        if name not in ("resume", "output_dir", "allow_config_change"):
            why = f" (not given: it follows {_first(sources, name)})" if name in follows else ""
            say(f"changed since the checkpoint: {name} {_show(old)} -> {_show(new)}{why}")
    if mathematics and not config.allow_config_change:
        listed = ", ".join(f"{n} {_show(a)} -> {_show(b)}" for n, (a, b) in mathematics.items())
        raise ValueError(
            f"allow_config_change must be given for a change of what is trained, got {listed}"
        )


def _check_length(manifest: Manifest, epochs: int) -> None:
    if epochs <= manifest.epoch:
        raise ValueError(
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
    rounds = before["rounds_per_epoch"]
    if before["push"] == "gradients":
        plan = next(iter(planner["current"].values()))
        rounds = -(-plan["workers"][0]["steps"] // before["push_every"])
    server = cluster.get("server") or {"clocks": [cluster["clock"]], "active": [0]}
    clocks, slowest = server["clocks"], min(server["clocks"][w] for w in server["active"])
    if "queue" in cluster:  # simulated: it is known who is in a round
        inside = {worker for _, worker in cluster["queue"]} | {cluster["turn"]} - {None}
    elif at_epoch_end and before["sync"] in ("bsp", "step"):
        inside = set()
    else:  # only the workers know whether they have taken a step: all that may have
        ahead = {"ssp": before["staleness"], "asp": math.inf}.get(before["sync"], 0)
        inside = {w for w in server["active"] if clocks[w] <= slowest + ahead}
    begun = max(clock + (worker in inside) for worker, clock in enumerate(clocks))
    stop = -(-min(begun, before["epochs"] * rounds) // rounds)
    decided = (epoch + 1 for epoch in (*planner["segments"], *planner["fixed"]))
    return range(slowest // rounds, max(stop, *decided, 0))


def _check_epochs_under_way(found: Found, run: Run) -> None:
    """Refuse another resolution, and so other plans, inside an epoch.

    What its workers have trained on is told by the plan of the resolution that it began with.
    """
    config, manifest = run.config, found.manifest
    before = _complete(manifest.config, config)
    epochs, milestones = before["epochs"], before["lr_milestones"]
    old = _resolutions(before["resolutions"], before["schedule"], epochs, milestones)
    new = _resolutions(config.resolutions, config.schedule, config.epochs, config.lr_milestones)
    moved = [e for e, sides in enumerate(zip(old, new, strict=False)) if sides[0] != sides[1]]
    if not moved or moved[-1] < manifest.epoch:
        return
    with reading_checkpoint(found.folder):
        under_way = epochs_under_way(
            read_shard(found.folder, manifest, SERVER_RANK),
            before,
            at_epoch_end="model.safetensors" in manifest.files,  # saved nowhere else
        )
    epoch = next((e for e in moved if e in under_way), None)
    if epoch is None:
        return
    advice = f"go on with epochs {epochs} first"
    if config.epochs > epochs:
        kept = (*milestones, epochs)
        longer = _resolutions(config.resolutions, config.schedule, config.epochs, kept)
        if longer[:epochs] == old:
            given = ",".join(map(str, kept))
            advice += f", or give --lr-milestones {given} --allow-config-change"
    raise ValueError(
        f"resolution of epoch {epoch + 1}, which is under way, must stay {old[epoch]} px, "
        f"got {new[epoch]} px: {advice}"
    )


def _resolutions(
    resolutions: Sequence[int], schedule: Schedule, epochs: int, milestones: Sequence[int]
) -> list[int]:
    """Return the resolution of each epoch."""
    stages = make_stages(epochs, resolutions, schedule=schedule, milestones=milestones)
    return [stage.resolution for stage in stages for _ in stage.epochs]


def _first(sources: Collection[str], name: str) -> str:
    return next(source for source in SOURCES[name] if source in sources)


def read_resumed(found: Found, run: Run, accelerator: Accelerator) -> Resumed | None:
    """Read a checkpoint for this process; None: there is none yet, and the run starts again.

    Raises:
        CheckpointError: If it is not whole or does not fit the run.
        ValueError: If a setting has changed that must not.
    """
    if found.folder is None:
        accelerator.print(f"{found.run_folder} has no checkpoint yet: the run starts again")
        return None
    manifest, before = found.manifest, found.manifest.config
    classes = run.data.num_classes
    if manifest.classes not in (None, classes):
        raise ValueError(
            f"dataset must have the classes that the run began with, got {manifest.classes} "
            f"classes in the checkpoint, {classes} in the data"
        )
    check_changes(found, run.config, accelerator.num_processes, accelerator.print)
    _check_epochs_under_way(found, run)
    same = (
        manifest.processes == accelerator.num_processes
        and manifest.workers == run.config.workers
        and all(
            before[name] == getattr(run.config, name)
            for name in ("sync", "push", "push_every", "rounds_per_epoch", "dedicated_server")
        )
    )
    restart, refused, rank = None, None, accelerator.process_index
    with reading_checkpoint(found.folder):
        if same:
            state = _own_piece(found, rank, run)
        else:
            state = read_shard(found.folder, manifest, 0)
            try:
                restart = plan_restart(state, _optimizers(found, run), run, before)
            except ValueError as error:
                refused = error
        if accelerator.is_main_process:
            tracker = state["log"]["tracker"]
            if not isinstance(tracker, str | None):
                raise TypeError(f"tracker must be a name, got {tracker!r}")
            check_metrics(found.run_folder / "metrics.jsonl", state["log"]["metrics_bytes"])
    if refused is not None:
        raise refused  # of a setting that must stay as it was
    return Resumed(found.folder, manifest.sequence, state, restart)


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


def _own_piece(found: Found, rank: int, run: Run) -> Any:
    """Return a process's state; where workers go by themselves, as of the server's clocks."""
    config, manifest = found.manifest.config, found.manifest
    if manifest.processes == 1 or config["sync"] in ("bsp", "step"):
        return read_shard(found.folder, manifest, rank)
    first = read_shard(found.folder, manifest, SERVER_RANK)
    first = with_lost_workers(first, run, config["epochs"])
    if rank == SERVER_RANK:
        return first
    clock = first["cluster"]["server"]["clocks"][rank - config["dedicated_server"]]
    try:
        state = read_shard(found.folder, manifest, rank)
    except CheckpointError:  # it was lost, or had not come to save
        state = first | {"stepper": {**first["stepper"], "optimizers": {}}} | _ROUND_ANEW
    if state["cluster"]["clock"] != clock:  # saved in another round than the server was in
        state = state | _ROUND_ANEW
    return state | {"cluster": {"clock": clock, "waited_s": 0.0, "server": None}}


def with_lost_workers(state: Mapping[str, Any], run: Run, epochs: int) -> Mapping[str, Any]:
    """Return rank 0's state with the workers back that were lost.

    They begin with the first epoch that nobody has begun. Those under way keep the plans that were
    made without them.

    Args:
        state: As it was saved.
        run: The run that goes on.
        epochs: That the run was to have when it was saved.
    """
    server, planner, rounds = state["cluster"]["server"], state["planner"], run.rounds
    there = set(server["active"])
    if len(there) == len(server["clocks"]):
        return state
    active = [clock for w, clock in enumerate(server["clocks"]) if w in there]
    last = min(epochs, run.config.epochs) * rounds  # that anybody could have begun
    begun = max(min(max(active) + 1, last), planner.get("begun", 0))
    first, begin = min(active) // rounds, -(-begun // rounds)  # epochs
    fixed = {
        epoch: [{"plan": planner["current"][run.stage_at(epoch).resolution]}]
        for epoch in range(first, begin)
    }
    fixed |= planner["segments"] | planner["fixed"]
    clocks = [c if w in there else begin * rounds for w, c in enumerate(server["clocks"])]
    server = server | {"clocks": clocks, "active": list(range(len(clocks)))}
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


def _optimizers(found: Found, run: Run) -> dict[int, Any]:
    """Return the optimizer state of all workers that the new run has, from all pieces."""
    optimizers: dict[int, Any] = {}
    for rank in range(found.manifest.processes):
        with suppress(CheckpointError):  # of a worker that was lost there is none
            piece = read_shard(found.folder, found.manifest, rank)
            optimizers |= piece["stepper"]["optimizers"]
    return {w: state for w, state in optimizers.items() if w < run.config.workers}


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _show(value: Any) -> str:
    if value is None:
        return "unset"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
