"""Which checkpoint a run goes on from, which settings may have changed, and what it takes over."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.base.files import link_or_copy
from dbsl.base.words import as_given
from dbsl.checkpoint.disk import (
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
from dbsl.checkpoint.restart import (
    check_epochs_under_way,
    complete_settings,
    plan_restart,
    saved_ledger,
    with_lost_workers,
)
from dbsl.cluster.weights import vector_length
from dbsl.cluster.wire import SERVER_RANK, refused_by_all, share_text
from dbsl.config.complete import (
    RESOLVED,
    follow,
    is_as_given,
    set_back,
    still_true,
    with_resolved,
)
from dbsl.config.fields import NODES, PROCESSES, PerWorker, Role, markers, sources, with_role
from dbsl.config.parse import parse_config, run_folder_of
from dbsl.config.settings import CHECKPOINTS, RunConfig, meets_at_server, without_rates
from dbsl.model import BEST
from dbsl.optimizer import optimizer_class
from dbsl.plan.types import Restart
from dbsl.run.folder import SUMS, Code, check_metrics, unlike
from dbsl.run.training import Run

_TIMES = with_role(RunConfig, Role.TIMES)
_PER_WORKER = tuple(dict(markers(RunConfig, PerWorker)))


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
    if name in _TIMES and value and len(set(value)) == 1:
        return [value[0]]
    return plain(value)


def check_changes(found: Found, config: RunConfig, processes: int, say: Any) -> None:
    """Say what has changed since the checkpoint; refuse what changes the mathematics.

    Settings that weights depend on may change with `allow_config_change`.
    """
    before = found.manifest.config
    changed = changed_settings(before, config)
    cls = type(config)
    free = set(with_role(cls, Role.FREE))
    if config.workers != found.manifest.workers:
        free.update(with_role(cls, Role.WORKERS), _PER_WORKER)
    if "epochs" in changed:
        check_length(found.manifest, config.epochs)
        if config.epochs > changed["epochs"][0]:
            free.add("epochs")  # a run may always be made longer
    if None not in changed.get("cache_gib", (None,)):
        free.add("cache_gib")  # without a cache, the order is another
    others = () if found.manifest.processes == processes else (PROCESSES,)
    follows = _follows(cls, changed, before.get(RESOLVED, ()), config.resolved, *others)
    mathematics = {n: change for n, change in changed.items() if n not in free | follows.keys()}
    why = {name: f" (not given: it follows {source})" for name, source in follows.items()}
    if mathematics:
        # It was allowed when it came into the file, and the run was killed before it had saved.
        agreed = with_resolved(_read_own(found.run_folder, cls))
        for name in [n for n in mathematics if is_as_given(n, agreed, config)]:
            why[name] = " (as config.yaml has it)"
            del mathematics[name]
    for name, (old, new) in changed.items():
        if name not in with_role(cls, Role.COMMAND):
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
        if field.name not in with_role(type(given), Role.FREE)
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
        if name not in {*with_role(type(now), Role.FREE), *but}
    ]
    if listed:
        raise SettingError(f"settings must be those of the job, got {', '.join(listed)}")


def check_length(manifest: Manifest, epochs: int) -> None:
    """Raise ``SettingError`` if a run is to have no more epochs than it has trained."""
    if epochs <= manifest.epoch:
        raise SettingError(
            f"epochs must be above the {manifest.epoch} that are complete, got {epochs}"
        )


def _follows(
    cls: type[RunConfig],
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
        if name in sources(cls)
    }
    found_out = [name for name in found if found[name]]
    moved = {*others, *changed}.difference(with_role(cls, Role.FREE), found_out)
    if "cpu_threads" in found_out and None in changed["cpu_threads"]:
        moved.add(NODES)  # they were unlike, or are so now
    return follow(cls, found_out, moved)


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} {as_given(old)} -> {as_given(new)}"


def plain(value: Any) -> Any:
    """Return a tuple as the list that JSON makes of it."""
    return list(value) if isinstance(value, tuple) else value


_ROUND_ANEW = {"progress": None, "timer": {}}  # no steps taken, no time spent


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
    name = ""
    with refused_by_all(accelerator):
        if accelerator.is_main_process:
            name = _choose(Path(config.resume), run_folder, accelerator)
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
    for name in _PER_WORKER:
        value = getattr(config, name)
        if value in (None, "auto"):
            continue
        by_hand = name == "local_batch_sizes" and found.manifest.workers > 1
        per_worker = len(value) > rows or by_hand
        if per_worker and in_short(name, value) == in_short(name, before[name]):
            changes[name] = None
            if name in _TIMES:
                changes |= dict.fromkeys(_TIMES)
    joint = before["sync"] == "step" or before["push"] == "gradients"
    if joint and config.global_batch_size is None:
        state = read_shard(found.folder, found.manifest, 0)
        plans = saved_ledger(state["planner"]).current.values()
        sizes = {plan.global_batch_size for plan in plans}
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
    return alike and changed.keys().isdisjoint(with_role(type(config), Role.MEETING | Role.PLAN))


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
