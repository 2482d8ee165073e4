"""Which checkpoint a run goes on from, which settings may have changed, and what it takes over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import as_given
from dbsl.base.files import link_or_copy
from dbsl.base.machine import remember
from dbsl.checkpoint.disk import (
    MODEL_FILE,
    UNKNOWN,
    CheckpointError,
    Found,
    Manifest,
    checkpoints_in,
    newest,
    reading_checkpoint,
    set_aside_after,
    versions,
)
from dbsl.checkpoint.handover import (
    Saved,
    check_epochs_under_way,
    closed,
    complete_settings,
    make_handover,
    must_stay,
    with_lost_workers,
)
from dbsl.cluster.weights import vector_length
from dbsl.cluster.wire import SERVER_RANK, refused_by_all, share_text
from dbsl.config.complete import RESOLVED, is_as_given, set_back, with_resolved
from dbsl.config.fields import Role, refuse, with_role
from dbsl.config.hooks import found_extras
from dbsl.config.parse import (
    RUN_FOLDER,
    is_checkpoint,
    parse_config,
    run_folder_of,
)
from dbsl.config.settings import (
    CHECKPOINTS,
    FLOAT32,
    RunConfig,
    parse_wire,
    takes_joint_steps,
    without_rates,
    workers_of,
)
from dbsl.data.sources import TrainingData
from dbsl.model import BEST, EMA
from dbsl.optimizer import optimizer_class
from dbsl.plan.types import Handover
from dbsl.run.workers import Workers

Changes = dict[str, tuple[Any, Any]]  # settings that are not what they were: before, now
_TIMES = ("slope", "intercept", "floor")
_PER_WORKER = with_role(RunConfig, Role.PER_WORKER)


@dataclass(frozen=True)
class Resumed:
    """A checkpoint, read."""

    folder: Path
    sequence: int  # its number
    # This process's shard; rank 0's with a handover, and where the server's state was saved alone.
    state: Mapping[str, Any]
    handover: Handover | None  # None: workers and plans are what they were


# --- which checkpoint


def find_checkpoint(config: RunConfig, accelerator: Accelerator) -> Found | None:
    """Return what a run goes on from, the same on every process; None: it is a new run."""
    if config.resume is None:
        return None
    run_folder = run_folder_of(config.resume, config.output_dir)
    if not (run_folder / "config.yaml").is_file():
        return None  # auto, at the first start
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
            if found is None and passed_over:
                raise CheckpointError(
                    f"resume must name a run with a complete checkpoint, got {run_folder}"
                )
            name = found.folder.name if found else ""
    name = share_text(name, accelerator)
    return Found.at(run_folder / CHECKPOINTS / name) if name else Found(run_folder)


def check_newest(found: Found, config: RunConfig, accelerator: Accelerator) -> None:
    """Refuse to go on where another process has saved or finished the run since it was found."""
    sequence = found.manifest.sequence if found.manifest else -1
    with refused_by_all(accelerator):
        if accelerator.is_main_process and not is_checkpoint(config.resume):
            later = newest(found.run_folder, after=sequence)
            text = "resume must be given again, as another process was still at the run"
            changed = is_finished(found, config) or later is not None
            refuse([(changed, text, later.folder if later else found.run_folder)])


def is_finished(found: Found, config: RunConfig) -> bool:
    """Whether the run has come to its end, and is not to go on for more epochs."""
    run, trained = found.run_folder, 0
    path = run / "summary.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        trained = int(json.loads(path.read_text(encoding="utf-8"))["epochs"])
    text = f"epochs must be at least {trained}, which the finished run in {run} has trained"
    refuse([(trained > config.epochs, text, config.epochs)])
    # It has ended: it must not be overwritten.
    is_lost = found.folder is None and trained < config.epochs and path.exists()
    text = "keep_checkpoints must be at least 1 to make a run longer"
    refuse([(is_lost, text, f"a finished run without a checkpoint in {run}")])
    if is_checkpoint(config.resume) and found.manifest.epoch < trained:
        return False  # it goes back to that
    return trained == config.epochs


# --- which settings may have changed


def changed_settings(before: Mapping[str, Any], now: RunConfig) -> Changes:
    """Return the settings that are not what they were; one that was not there had its default."""
    new = {name: value for name, value in asdict(now).items() if name != RESOLVED}
    before = complete_settings(before, now)
    return {
        name: (before[name], new[name])
        for name in new
        if _in_short(name, before[name]) != _in_short(name, new[name])
    }


def _in_short(name: str, value: Any) -> Any:
    """Return a setting's value as JSON has it; one that is the same everywhere is there once."""
    if name in (*_TIMES, "large_batch_size") and value and len({*value}) == 1:
        return [value[0]]
    return list(value) if isinstance(value, tuple) else value


def _draw_another_order(changed: Changes, cls: type[RunConfig]) -> list[str]:
    """Return the changed settings by which the order of an epoch's samples is another.

    It depends on one that may be unset by whether it is set alone.
    """
    names = [name for name in with_role(cls, Role.ORDER) if name in changed]
    return [n for n in names if None in changed[n] or getattr(cls, n) is not None]


def check_changes(
    found: Found, config: RunConfig, processes: int, say: Callable[[str], object]
) -> None:
    """Say what has changed since the checkpoint; refuse what changes the mathematics."""
    manifest, cls = found.manifest, type(config)
    changed = changed_settings(manifest.config, config)
    text = f"epochs must be above the {manifest.epoch} that are complete"
    refuse([("epochs" in changed and config.epochs <= manifest.epoch, text, config.epochs)])
    free = {*with_role(cls, Role.FREE)}
    free |= {*with_role(cls, Role.ORDER)} - {*_draw_another_order(changed, cls)}
    if config.workers != manifest.workers:
        free.update(with_role(cls, Role.WORKERS | Role.PER_WORKER))
    if "epochs" in changed and config.epochs > changed["epochs"][0]:
        free.add("epochs")  # a run may always be made longer
    anew = _found_anew(changed, config, found, processes)
    why = dict.fromkeys(anew, " (not given: found anew)")
    mathematics = {n: change for n, change in changed.items() if n not in free | anew}
    if mathematics:
        # It was allowed when it came into the file, and the run was killed before it had saved.
        agreed = with_resolved(_read_own(found.run_folder, cls))
        for name in [n for n in mathematics if is_as_given(n, agreed, config)]:
            why[name] = " (as config.yaml has it)"
            del mathematics[name]
    for name, values in changed.items():
        if name not in with_role(cls, Role.COMMAND):
            say(f"changed since the checkpoint: {_change(name, *values)}{why.get(name, '')}")
    listed = ", ".join(_change(name, *values) for name, values in mathematics.items())
    text = "allow_config_change must be given for a change of what is trained"
    refuse([(mathematics and not config.allow_config_change, text, listed)])


def _found_anew(changed: Changes, now: RunConfig, found: Found, processes: int) -> set[str]:
    """Return what changed because it was found anew, where something else did.

    What is free is no such cause: step times that are measured again, or batches that are to fit
    into other memory, are no more free than if they were given.
    """
    before = found.manifest.config.get(RESOLVED, ())
    found_out = {
        name
        for name, (old, new) in changed.items()
        if (old is None or name in before) and (new is None or name in now.resolved)
    }
    moved = changed.keys() - {*with_role(type(now), Role.FREE), *found_out}
    if moved or found.manifest.processes != processes:
        return found_out
    # Unlike nodes have threads of their own: the nodes were unlike, or are so now.
    return found_out & {"cpu_threads"} if None in changed.get("cpu_threads", ()) else set()


def without_effect(run_folder: Path, given: RunConfig) -> str:
    """Return in words what is given other than a finished run was, where it was trained by that."""
    own, free = _read_own(run_folder, type(given)), with_role(type(given), Role.FREE)
    names = [field.name for field in fields(given) if field.name not in free]
    pairs = {name: (getattr(own, name), getattr(given, name)) for name in names}
    return ", ".join(_change(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1])


def _read_own(run_folder: Path, cls: type[RunConfig]) -> RunConfig:
    return parse_config(cls, ["--config", str(run_folder / "config.yaml")])


def _change(name: str, old: Any, new: Any) -> str:
    return f"{name} {as_given(old)} -> {as_given(new)}"


def adapt_to_processes(
    config: RunConfig, found: Found | None, processes: int, given: RunConfig
) -> RunConfig:
    """Return the config for as many workers as there are now, in so many processes.

    What was measured or solved for other workers is left to be found anew; the global batch of
    joint steps stays. In `config` what the run had found out is filled in, in `given` it is not.
    """
    if found is None or found.manifest is None:
        return config
    before, workers = complete_settings(found.manifest.config, config), found.manifest.workers
    now = workers_of(config, processes) or workers
    changes: dict[str, Any] = {"workers": now}
    if now != workers:
        of_workers = {*with_role(type(config), Role.WORKERS | Role.PER_WORKER)} - {"workers"}
        config = set_back(config, given, config.resolved.keys() & of_workers)
        for name in _PER_WORKER:  # what has a value for each worker, as it was, has no meaning now
            value = getattr(config, name)
            if value in (None, "auto"):
                continue
            by_worker = len(value) > len(before["resolutions"]) or name == "local_batch_sizes"
            if by_worker and _is_as_before(name, config, before):
                changes |= dict.fromkeys(_TIMES if name in _TIMES else (name,))
        if config.small_workers is not None:
            changes["small_workers"] = min(config.small_workers, now)
    # It may have been kept before, from yet other workers.
    if now != workers or "global_batch_size" in before[RESOLVED]:
        changes |= _same_global_batch(config, before, found, now)
    return replace(config, **changes)


def _same_global_batch(
    config: RunConfig, before: Mapping[str, Any], found: Found, now: int
) -> dict[str, Any]:
    """Return what keeps the global batch of joint steps, unless it or its parts are given."""
    joint = before["sync"] == "step" or before["push"] != "weights"
    by_hand = config.local_batch_sizes
    parts = by_hand is not None and len(by_hand) == now
    given = config.global_batch_size is not None or parts
    if given or not (joint and takes_joint_steps(config)):
        return {}
    if by_hand is not None and not _is_as_before("local_batch_sizes", config, before):
        return {}
    planner = found.shard(SERVER_RANK)["planner"]
    plans = [planner["plans"][number] for number in planner["current"].values()]
    sizes = {plan["global_batch_size"] for plan in plans}
    if len(sizes) > 1:
        return {}
    changes = {"global_batch_size": sizes.pop(), "local_batch_sizes": None}
    # Without a global batch it was each worker's part; with one it would be the most of each.
    if before["global_batch_size"] is None and _is_as_before("large_batch_size", config, before):
        changes["large_batch_size"] = None
    return changes


def _is_as_before(name: str, now: RunConfig, before: Mapping[str, Any]) -> bool:
    return _in_short(name, getattr(now, name)) == _in_short(name, before[name])


# --- what it takes over


def read_resumed(found: Found, workers: Workers, config: RunConfig) -> Resumed | None:
    """Read a checkpoint for this process; None: there is none yet, and the run starts again."""
    accelerator = workers.accelerator
    if found.folder is None:
        accelerator.print(f"{found.run_folder} has no checkpoint yet: the run starts again")
        return None
    manifest, classes = found.manifest, workers.data.num_classes
    processes, rank = accelerator.num_processes, accelerator.process_index
    text = "dataset must have the classes that the run began with"
    shown = f"{manifest.classes} classes in the checkpoint, {classes} in the data"
    refuse([(manifest.classes != classes, text, shown)])
    other = manifest.data != getattr(workers.data, "digest", "")
    refuse([(other, "data must be those that the run has trained on", "other samples")])
    with reading_checkpoint(found.folder):
        state, handover = found.shard(SERVER_RANK), None
        changed = changed_settings(manifest.config, config)
        _check_state(changed, state, workers)
        check_changes(found, config, processes, accelerator.print)
        saved = Saved(state, complete_settings(manifest.config, config), manifest.samples, workers)
        orders = _draw_another_order(changed, type(config))
        at_epoch_end = MODEL_FILE in manifest.files
        check_epochs_under_way(saved, orders, workers, at_epoch_end=at_epoch_end)
        for name in ("seed", "holdout") if getattr(workers.data, "held_out", "") else ():
            if name in changed:
                why = ", which has drawn the evaluation images from those to train on"
                raise must_stay(name, *changed[name], why)
        check_held_out(manifest.held_out, workers.data, config.dataset)
        if accelerator.is_main_process and state["log"] is not None:
            path, keep = found.run_folder / "metrics.jsonl", state["log"]["metrics_bytes"]
            size = path.stat().st_size if path.exists() else 0
            text = f"metrics.jsonl must have the {keep} bytes it had at the checkpoint"
            refuse([(size < keep, text, f"{size} in {path}")])
        others = _new_to_workers(changed, manifest, workers)
        if not others:
            if saved.server_alone:
                state = with_lost_workers(state, workers, saved.settings["epochs"])
            else:
                state = found.shard(rank) if rank else state
        else:
            if not saved.is_open:
                raise closed(*next(iter(others.items())), found, workers)
            handover = make_handover(saved, _optimizers(found, saved, config.workers), workers)
            if takes_joint_steps(config) and not (saved.joint or saved.pushes):
                accelerator.print("warning: optimizers of workers are dropped: all share one now")
        if saved.server_alone and not saved.pushes:
            accelerator.print("optimizer states begin empty: the checkpoint is the server's alone")
        if _drops_remainders(saved.settings, config, kept=handover is None):
            wire = saved.settings["wire"]
            accelerator.print(f"warning: what rounding to {wire} has left is dropped")
    own = {name for name, extra in state["extras"].items() if extra}
    if absent := ", ".join(sorted(own - found_extras().keys())):
        accelerator.print(f"warning: dropped the state of missing extras: {absent}")
    return Resumed(found.folder, manifest.sequence, state, handover)


def _new_to_workers(changed: Changes, manifest: Manifest, workers: Workers) -> Changes:
    """Return what has changed so that no process's own state fits: before, now."""
    config, processes = workers.config, workers.accelerator.num_processes
    others = {
        "workers": (manifest.workers, config.workers),
        "processes": (manifest.processes, processes),
        "training images": (manifest.samples, len(workers.data.train)),
    }
    others = {what: pair for what, pair in others.items() if pair[0] != pair[1]}
    anew = {*with_role(type(config), Role.MEETING | Role.PLAN)}
    if MODEL_FILE in manifest.files and manifest.processes > 1 and config.sync == "bsp":
        anew |= {"wire", "merge"}  # which decide what a barrier keeps of a round
    return others | {name: pair for name, pair in changed.items() if name in anew}


def check_trained_on(run: Path, data: TrainingData, dataset: str) -> None:
    """Refuse to evaluate a run's weights on images of its dataset that it has trained on."""
    summary, held_out = run / "summary.json", UNKNOWN
    with reading_checkpoint(run):
        if saved := checkpoints_in(run):
            held_out = saved[0].manifest.held_out
        elif summary.is_file():
            held_out = json.loads(summary.read_text(encoding="utf-8")).get("held_out", UNKNOWN)
    check_held_out(held_out, data, dataset)


def check_held_out(before: str, data: TrainingData, dataset: str) -> None:
    """Refuse other images than a run has held out: it has trained on them."""
    now = getattr(data, "held_out", "")
    text = "dataset, seed and holdout must be those that drew the run's evaluation images"
    other = now and before not in (UNKNOWN, now)
    refuse([(other, text, f"another draw, or other images, from {dataset}")])


def _drops_remainders(before: Mapping[str, Any], now: RunConfig, *, kept: bool) -> bool:
    old, new = parse_wire(before["wire"]), parse_wire(now.wire)
    left = old.rank if before["sync"] == "step" else old != FLOAT32
    return bool(left) and not (kept and new != FLOAT32 and new.rank == old.rank)


def _check_state(changed: Changes, state: Mapping[str, Any], workers: Workers) -> None:
    old, new = changed.get("optimizer", ("sgd", "sgd"))
    more, now_more = map(without_rates, changed.get("opt_kwargs", ((), ())))
    # Other arguments may need more state (amsgrad).
    name = "opt_kwargs" if more != now_more else "optimizer"
    if more != now_more or (optimizer_class(old) or old) != (optimizer_class(new) or new):
        raise must_stay(name, *changed[name], ", whose state the run has")
    name = next((name for name in ("model", "model_kwargs") if name in changed), None)
    weights = state["model"]["weights"]
    if weights is None:  # between rounds the server has them
        weights = state["cluster"]["server"]["weights"]
    if name and len(weights) != vector_length(workers.raw_model):
        raise must_stay(name, *changed[name], ", whose weights the run has")


def take_over_folder(found: Found, config: RunConfig, accelerator: Accelerator) -> None:
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
    if manifest.epoch < config.epochs:  # the next evaluation writes it, if it still has one
        (found.run_folder / f"{EMA}.safetensors").unlink(missing_ok=True)
    # A finished run that is made longer has no summary until it ends again.
    (found.run_folder / "summary.json").unlink(missing_ok=True)
    for folder in set_aside_after(found.run_folder, manifest.sequence):
        accelerator.print(f"a later checkpoint is set aside: {folder}")
    if is_checkpoint(config.resume):  # processes that are restarted go on from later ones
        remember(RUN_FOLDER, str(found.run_folder))
    epochs = f"{manifest.epoch} of {config.epochs} epochs complete"
    accelerator.print(f"resumed from {found.folder} ({epochs}, saved {manifest.saved_at})")
    for name, version in manifest.versions.items():
        if versions()[name] != version:
            accelerator.print(
                f"warning: saved with {name} {version}, now {versions()[name]}: "
                "bits may differ from an unbroken run"
            )


def _optimizers(found: Found, saved: Saved, workers: int) -> dict[int, Any]:
    """Return optimizer state by worker of so many, from all shards.

    Each is read once, and none is kept whole: together they may be larger than the memory.
    """
    optimizers: dict[int, Any] = {}
    for rank in range(0 if saved.server_alone else found.manifest.processes):
        own = (found.shard(rank) if rank else saved.state)["stepper"]["optimizers"]
        optimizers |= {w: state for w, state in own.items() if w < workers}
    return optimizers
