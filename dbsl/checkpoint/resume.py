"""Which checkpoint a run resumes, which settings may change, and what it takes over."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import as_given, require
from dbsl.base.files import link_or_copy
from dbsl.base.machine import remember
from dbsl.checkpoint.disk import (
    MODEL_FILE,
    Found,
    checkpoints_in,
    newest,
    reading_checkpoint,
    set_aside_after,
    versions,
)
from dbsl.checkpoint.handover import (
    Saved,
    check_epochs_under_way,
    for_others,
    must_stay,
    with_lost_workers,
    without_workers,
)
from dbsl.cluster.weights import vector_length
from dbsl.cluster.wire import SERVER_RANK, refused_by_all, share_text
from dbsl.config.complete import FOUND
from dbsl.config.fields import Role, with_role
from dbsl.config.parse import RUN_FOLDER, is_checkpoint
from dbsl.config.settings import (
    CHECKPOINTS,
    RunConfig,
    shares_global_batch,
    without_rates,
    workers_of,
)
from dbsl.data.sources import TrainingData
from dbsl.model import BEST, EMA
from dbsl.optimizer import optimizer_class
from dbsl.run.workers import Workers

Changes = dict[str, tuple[Any, Any]]  # changed settings: before, now
_TIMES = ("slope", "intercept", "floor")


@dataclass(frozen=True)
class Resumed:
    """A checkpoint that was read."""

    found: Found
    state: Mapping[str, Any]
    same: bool  # this process's workers continue at their steps, else begin from rank 0's state


# --- which checkpoint


def find_checkpoint(run_folder: Path, config: RunConfig, accelerator: Accelerator) -> Found | None:
    """Return the checkpoint to resume, the same on every process; None: there is none yet."""
    resume, name = Path(config.resume), ""
    with refused_by_all(accelerator):
        if accelerator.is_main_process and is_checkpoint(config.resume):
            Found.at(resume).check()
            name = resume.name
        elif accelerator.is_main_process:
            passed_over: list[str] = []
            found = newest(run_folder, passed_over.append)
            for line in passed_over:
                accelerator.print(f"warning: {line}")
            text = "resume must name a run with a complete checkpoint"
            require(found or not passed_over, text, run_folder)
            name = found.folder.name if found else ""
    name = share_text(name, accelerator)
    return Found.at(run_folder / CHECKPOINTS / name) if name else None


def is_finished(run: Path, found: Found | None, config: RunConfig) -> bool:
    """Return whether the run has finished and is not to train more epochs."""
    path = run / "summary.json"
    if not path.exists():
        return False
    trained = json.loads(path.read_text(encoding="utf-8"))["epochs"]
    text = f"epochs must be at least {trained}, which the finished run in {run} has trained"
    require(trained <= config.epochs, text, config.epochs)
    text = "keep_checkpoints must be at least 1 to make a run longer"
    got = f"a finished run without a checkpoint in {run}"  # do not overwrite it
    require(found or trained == config.epochs, text, got)
    if is_checkpoint(config.resume) and found.manifest.epoch < trained:
        return False  # it resumes from that
    return trained == config.epochs


# --- which settings may have changed


def complete_settings(before: Mapping[str, Any], now: RunConfig) -> dict[str, Any]:
    """Return saved settings, with defaults for settings that did not exist yet."""
    return {field.name: field.default for field in fields(now)} | dict(before)


def changed_settings(before: Mapping[str, Any], now: RunConfig) -> Changes:
    """Return the changed settings; one that did not exist before had its default."""
    before = complete_settings(before, now)
    names = (name for name in asdict(now) if name != FOUND)
    return {n: (before[n], getattr(now, n)) for n in names if not _is_as_before(n, now, before)}


def _is_as_before(name: str, now: RunConfig, before: Mapping[str, Any]) -> bool:
    return _in_short(name, getattr(now, name)) == _in_short(name, before[name])


def _in_short(name: str, value: Any) -> Any:
    """Return a setting's value as in JSON; a value that is the same everywhere appears once."""
    if name in (*_TIMES, "large_batch_size") and value and len({*value}) == 1:
        return [value[0]]
    return list(value) if isinstance(value, tuple) else value


def _draw_another_order(changed: Changes, cls: type[RunConfig]) -> list[str]:
    """Return the changed settings that alter the order of an epoch's samples.

    For a setting that may be unset, only whether it is set matters.
    """
    names = [name for name in with_role(cls, Role.ORDER) if name in changed]
    return [n for n in names if None in changed[n] or getattr(cls, n) is not None]


def changes_for(
    config: RunConfig, found: Found | None, processes: int, given: RunConfig
) -> dict[str, Any]:
    """Return the settings to change for the current number of workers and processes.

    Values measured or solved for other workers are found anew; the global batch size of joint
    steps remains, unless it or its parts are given. `config` includes what the run had found;
    `given` does not.
    """
    if found is None:
        return {}
    of_workers, workers = with_role(type(config), Role.WORKERS), found.manifest.workers
    before = complete_settings(found.manifest.config, config)
    changes = {"workers": workers_of(config, processes) or workers}
    if changes["workers"] != workers:
        anew = config.found.keys() & {*of_workers} - {"workers"}
        anew |= {"profile"} if "slope" in anew else set()
        changes |= {name: getattr(given, name) for name in anew}
        config = replace(config, **changes)
        for name in of_workers:  # values per worker have no meaning now
            value = getattr(config, name)
            several = isinstance(value, tuple) and len(value) > len(before["resolutions"])
            by_worker = several or (value and name == "local_batch_sizes")
            if by_worker and _is_as_before(name, config, before):
                changes |= dict.fromkeys(_TIMES if name in _TIMES else (name,))
        if config.small_workers:
            changes["small_workers"] = min(config.small_workers, config.workers)
    config, shared = replace(config, **changes), before["sync"] == "step"
    shared = (shared or before["push"] != "weights") and shares_global_batch(config)
    # An earlier resume may have kept it, from yet other workers.
    kept = config.workers != workers or "global_batch_size" in before[FOUND]
    if not (shared and kept) or config.global_batch_size or config.local_batch_sizes:
        return changes
    planner = found.shard(SERVER_RANK)["planner"]
    sizes = {plan["global_batch_size"] for plan in planner["last"].values()}
    if len(sizes) == 1:
        changes["global_batch_size"] = sizes.pop()
        # Without a global batch size it was each worker's part; with one it would be a maximum.
        alone = before["global_batch_size"] is None and config.large_batch_size is not None
        if alone and _is_as_before("large_batch_size", config, before):
            changes["large_batch_size"] = None
    return changes


# --- what it takes over


def read_resumed(found: Found, workers: Workers, config: RunConfig) -> Resumed:
    """Read a checkpoint for this process."""
    say, data, rank = workers.accelerator.print, workers.data, workers.accelerator.process_index
    manifest, changed = found.manifest, changed_settings(found.manifest.config, config)
    with reading_checkpoint(found.folder):
        state = found.shard(SERVER_RANK)
        settings = complete_settings(manifest.config, config)
        ended = MODEL_FILE in manifest.files
        saved = Saved(state, settings, manifest.samples, workers, at_epoch_end=ended)
        _check_state(found, changed, state, workers)
        for name, pair in changed.items():
            if name not in with_role(type(config), Role.COMMAND):
                say(f"changed since the checkpoint: {name} {' -> '.join(map(as_given, pair))}")
        others = {  # changes after which no process's own state fits
            "workers": (manifest.workers, workers.config.workers),
            "processes": (manifest.processes, workers.accelerator.num_processes),
            "training images": (manifest.samples, len(data.train)),
        }
        others = {what: pair for what, pair in others.items() if pair[0] != pair[1]}
        anew = {*with_role(type(config), Role.PLAN)}
        if manifest.processes > 1 and config.sync == "bsp":
            anew |= {"wire", "merge"}  # they decide what a barrier keeps of a round
        others |= {name: pair for name, pair in changed.items() if name in anew}
        for what, pair in {} if saved.others_may_go_on else others.items():
            must_stay(what, *pair, " until all workers have pushed the same rounds")
        epochs = saved.under_way
        if others:
            epoch, *inside = saved.position
            epochs = range(epoch, epoch + any(inside))
        orders = _draw_another_order(changed, type(config))
        check_epochs_under_way(saved, orders, workers, epochs, others=bool(others))
        same = not (others or saved.server_alone)
        if others:
            state = for_others(saved, workers)
        elif saved.server_alone:
            state = with_lost_workers(state, workers, settings["epochs"])
            state = without_workers(state, workers)
        elif rank:
            state = found.shard(rank)
    if not (same or saved.in_step or saved.pushes):
        say("optimizer states begin empty, as do remainders of rounding")
    return Resumed(found, state, same)


def check_trained_on(run: Path, data: TrainingData, dataset: str) -> None:
    """Refuse to evaluate a run's weights on images of its dataset on which it trained."""
    summary, held_out = run / "summary.json", None
    with reading_checkpoint(run):
        if saved := checkpoints_in(run):
            held_out = saved[0].manifest.held_out
        elif summary.is_file():
            held_out = json.loads(summary.read_text(encoding="utf-8")).get("held_out")
    if held_out is not None:
        check_held_out(held_out, data, dataset)


def check_held_out(before: str, data: TrainingData, dataset: str) -> None:
    """Refuse images other than those that a run held out: it has trained on them."""
    now = getattr(data, "held_out", "")
    text = "dataset, seed and holdout must be those that drew the run's evaluation images"
    require(now in ("", before), text, f"another draw, or other images, from {dataset}")


def _check_state(
    found: Found, changed: Changes, state: Mapping[str, Any], workers: Workers
) -> None:
    """Refuse a model, optimizer or data that do not fit the state, and too few epochs."""
    manifest, data = found.manifest, workers.data
    text = "dataset must have the classes that the run began with"
    shown = f"{manifest.classes} classes in the checkpoint, {data.num_classes} in the data"
    require(manifest.classes == data.num_classes, text, shown)
    same = manifest.data == getattr(data, "digest", "")
    require(same, "data must be those that the run has trained on", "other samples")
    # Two names may mean one optimizer; arguments other than rates may need more state (amsgrad).
    kinds = {"optimizer": lambda name: optimizer_class(name) or name, "opt_kwargs": without_rates}
    for name in kinds.keys() & changed.keys():
        old, new = map(kinds[name], changed[name])
        if old != new:
            must_stay(name, *changed[name], ", whose state the run has")
    weights = state["model"]["weights"]
    if weights is None:  # between rounds, the server has them
        weights = state["cluster"]["server"]["weights"]
    fits = len(weights) == vector_length(workers.raw_model)
    for name in ("model", "model_kwargs") if not fits else ():
        must_stay(name, *changed.get(name, ("", "")), ", whose weights the run has")
    check_held_out(manifest.held_out, data, workers.config.dataset)
    epochs = workers.config.epochs
    text = f"epochs must be above the {manifest.epoch} that are complete"
    require("epochs" not in changed or epochs > manifest.epoch, text, epochs)


def take_over_folder(found: Found, config: RunConfig, accelerator: Accelerator) -> None:
    """Restore the run folder as it was at the checkpoint, which was read and fits."""
    manifest, run, best = found.manifest, found.folder.parent.parent, f"{BEST}.safetensors"
    if not accelerator.is_main_process:
        return
    (run / best).unlink(missing_ok=True)
    if best in manifest.files:
        link_or_copy(found.folder / best, run / best)
    if manifest.epoch < config.epochs:  # the next evaluation writes it, if still used
        (run / f"{EMA}.safetensors").unlink(missing_ok=True)
    # A finished run that is extended has no summary until it ends again.
    (run / "summary.json").unlink(missing_ok=True)
    for folder in set_aside_after(run, manifest.sequence):
        accelerator.print(f"a later checkpoint is set aside: {folder}")
    if is_checkpoint(config.resume):  # restarted processes resume from later ones
        remember(RUN_FOLDER, str(run))
    epochs = f"{manifest.epoch} of {config.epochs} epochs complete"
    accelerator.print(f"resumed from {found.folder} ({epochs}, saved {manifest.saved_at})")
    for name, version in versions().items():
        if version != manifest.versions[name]:
            was = f"saved with {name} {manifest.versions[name]}, now {version}"
            accelerator.print(f"warning: {was}: bits may differ from an unbroken run")
