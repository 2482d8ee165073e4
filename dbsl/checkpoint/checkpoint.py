"""Checkpoints of a run: what is saved, when, and where a resumed run continues.

State is copied to host memory after an optimizer step or at an epoch's end, and written at once:
every process writes its own shard, then rank 0 writes the manifest. If real workers do not wait
for each other, only rank 0 writes: the server's state.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.utils import reduce
from torch import Tensor

from dbsl.base.errors import (
    BadRoundsError,
    NothingLeft,
    RunStopped,
    SaveError,
    SettingError,
    require,
    steadier,
)
from dbsl.base.files import describe, link_or_copy, sync_file
from dbsl.checkpoint.disk import (
    MODEL_FILE,
    CheckpointError,
    Found,
    Manifest,
    newest,
    pack,
    prune,
    reading_checkpoint,
    remove,
    write_manifest,
    write_shard,
)
from dbsl.checkpoint.resume import Resumed, read_resumed
from dbsl.cluster.wire import SERVER_RANK
from dbsl.config.settings import CHECKPOINTS, RunConfig, parse_interval
from dbsl.model import BEST, save_model
from dbsl.plan.types import Action, EpochEnd
from dbsl.run.turns import WorkerTurn, random_state, refuse_order
from dbsl.run.workers import Workers

T = TypeVar("T")
_BEST_FILE = f"{BEST}.safetensors"
_SEEN_S = 30.0  # time for a shared disk to show rank 0 another node's files


def _wait_for(paths: Iterable[Path]) -> None:
    """Wait until this process sees files that others wrote, or raise."""
    deadline = time.monotonic() + _SEEN_S
    for path in paths:
        while not path.exists():
            if time.monotonic() > deadline:
                raise FileNotFoundError(f"all nodes must see it, but rank 0 sees no {path.name}")
            time.sleep(0.1)


def _tried(act: Callable[..., T], *given: Any) -> tuple[T | None, str]:
    """Call a function; return its result, or why it failed."""
    try:
        return act(*given), ""
    except Exception as error:
        return None, getattr(error, "strerror", None) or str(error) or type(error).__name__


class PlainFolder:
    """A folder with only checkpoints; a run resumes the newest. `dbsl.runs.RunFolder` has more."""

    found: Found | None  # checkpoint to resume
    log: Any = None  # None: there is none
    stop_reason: str | None = None  # why the run must stop now

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, newest(folder)

    def complete(self, config: RunConfig) -> RunConfig:
        """Return the settings with the values that were found, by name."""
        return config

    def log_rounds(self) -> None:
        """Record the workers' reports of their rounds, and lost workers."""


class Checkpoint:
    """Saves and restores a run; a context manager around its turns.

    `run` is the run's folder, or the path of any folder. `states` are your own objects by name,
    which are saved and restored, too: by `state_dict`, which returns tensors, numbers, strings,
    and lists and dicts of them, and `load_state_dict`. If a checkpoint does not fit
    the run of one process, every process refuses it.
    """

    def __init__(self, run: PlainFolder | Path, workers: Workers, **states: Any) -> None:
        run = PlainFolder(run) if isinstance(run, Path) else run
        self._run, self._workers, self._states = run, workers, states
        self._config = config = run.complete(workers.config)
        self._cluster, self._accelerator = workers.cluster, workers.accelerator
        self._progress = workers.progress
        self._rank = workers.accelerator.process_index
        self._every, self._minutes = parse_interval(config.checkpoint_every)
        self.resumed = resumed = run.found and read_resumed(run.found, workers, config)
        # Whether this process leaves saves and epochs' ends to rank 0.
        self._served = not workers.cluster.saves_workers and self._rank != SERVER_RANK
        manifest = resumed and resumed.found.manifest
        self._sequence = manifest.sequence if manifest else 0  # number of the last save
        self._epochs_done, self._is_asked = manifest.epoch if manifest else 0, False
        self._end: EpochEnd | None = None  # the epoch just ended, until the next step
        self._saved_epoch = -1  # last epoch saved at its end
        self._saved_at = time.monotonic()
        self._last_good = resumed and resumed.found.folder  # the last complete checkpoint
        if resumed:
            self._load_all(resumed)
        else:
            workers.plans.extras.begin(workers, {}, same=True)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Save a run that must stop, has finished, or has no workers left."""
        if kind is not None and issubclass(kind, RunStopped):
            self._stop()
        if over := kind is None or issubclass(kind, NothingLeft):
            self._finish()
        return over

    def after_step(self, turn: WorkerTurn) -> None:
        """Save if a save is due; raise `RunStopped`, which saves, if the run must stop."""
        self._is_asked = True
        self._run.log_rounds()  # others', too: at once, not at the end of a long round
        self._after_step(round_over=turn.is_over)

    def _after_step(self, *, round_over: bool) -> None:
        self._end = None
        self._check()
        action = self._cluster.agree(self._due(), round_over=round_over)
        if action == Action.SAVE:
            self._save()
        elif action == Action.STOP:
            raise RunStopped

    def after_epoch(self, end: EpochEnd) -> None:
        """Save after this epoch if a save is due, and end the run if it is to finish.

        All processes that receive the epoch's end call it.
        """
        forgotten = self._workers.steps_taken and not self._is_asked
        refuse_order(forgotten, "call checkpoint.after_step(turn) after each step", "none")
        self._check()
        self._epochs_done, self._end = end.epoch + 1, end
        last, keeps = self._epochs_done == self._config.epochs, self._config.keep_checkpoints
        if not last and self._finishes(self._workers.finishing):
            self._finish_early()
        elif keeps if last else self._every and self._epochs_done % self._every == 0:
            self._save(end)

    def _finish(self) -> None:
        """Finish a run that ends early, after all turns of this process."""
        epochs = self._config.epochs
        over = self._cluster.is_over if self._served else self._epochs_done == epochs
        if not (over or self._cluster.finished_early):
            if self._end is None or not self._finishes(True):
                raise SettingError(
                    "a loop must take all turns, or end after checkpoint.after_epoch of an epoch "
                    f"that was evaluated, got a return after {self._epochs_done} of {epochs} epochs"
                )
            self._finish_early()

    def clean_up(self) -> None:
        """Remove a finished run's checkpoints beyond those to keep."""
        if self._rank == SERVER_RANK:
            prune(self._run.folder, self._config.keep_checkpoints)

    def _finishes(self, wish: bool) -> bool:
        """Return whether any process asked to end and this epoch was evaluated.

        If one asked but this epoch was not evaluated, the next epoch is the last.
        """
        log = self._run.log
        evaluated = log is None or log.evaluated_epoch == self._end.epoch
        wish, evaluated = self._cluster.highest(wish, evaluated)
        self._workers.finishes_next = bool(wish and not evaluated)
        return bool(wish and evaluated)

    def _finish_early(self) -> None:
        if self._rank == SERVER_RANK:
            workers = self._workers
            save_model(workers.raw_model, self._run.folder, workers.side, workers.data)
        if self._config.keep_checkpoints and self._saved_epoch != self._end.epoch:
            self._save(self._end)
        self._cluster.finish()

    def _check(self) -> None:
        most = self._config.max_bad_rounds
        if self._cluster.refused > most:
            config, precision = self._config, str(self._accelerator.mixed_precision)
            remedy = steadier(config.lr, config.optimizer, precision, finite_loss=True)
            raise BadRoundsError(
                f"max_bad_rounds must be at least the {self._cluster.refused} rounds whose loss or "
                f"weights were not finite, got {most}: {remedy}; {self._good()}"
            )

    def _due(self) -> Action:
        if self._run.stop_reason:
            return Action.STOP
        due = self._minutes and time.monotonic() - self._saved_at >= 60 * self._minutes
        wanted = due and self._rank == SERVER_RANK  # its clock decides
        return Action.SAVE if wanted else Action.GO_ON

    def _good(self) -> str:
        """Return a text that names the last good checkpoint."""
        if self._last_good is None:
            return "there is no checkpoint"
        return f"the last good checkpoint is {self._last_good}"

    def _save(self, end: EpochEnd | None = None) -> None:
        """Write this process's shard and, on rank 0, the manifest (a collective).

        If any process cannot write, all processes that wait for each other raise `SaveError`.
        """
        self._sequence += 1
        name = f"save-{self._sequence:06d}" if end is None else f"epoch-{end.epoch + 1:04d}"
        target, control = self._run.folder / CHECKPOINTS / name, self._cluster.control
        manifest, packed = self._copy()
        files, failed = _tried(self._write_own, target, packed, end is not None)
        if control is not None:  # gather what every process wrote, once all have
            written = map(json.loads, control.gather_texts(json.dumps([files, failed])))
            several, reasons = zip(*written, strict=True)
            files = {name: about for own in several for name, about in (own or {}).items()}
            failed = next(filter(None, reasons), "")
        if self._rank == SERVER_RANK and not failed:
            _, failed = _tried(self._complete, target, replace(manifest, files=files))
        if failed:
            if self._rank == SERVER_RANK:
                remove(target)
            where = f"a checkpoint could not be written to {self._run.folder}"
            raise SaveError(f"{where} ({failed}); {self._good()}")
        self._last_good = target  # complete: it remains whatever fails from here on
        if self._rank == SERVER_RANK:
            prune(self._run.folder, max(1, self._config.keep_checkpoints))
        self._saved_at = time.monotonic()
        if end is not None:
            self._saved_epoch = end.epoch

    def _write_own(
        self, target: Path, packed: tuple[Any, dict[str, Tensor]], with_model: bool
    ) -> dict[str, dict[str, Any]]:
        """Write this process's files; return their entries in the manifest."""
        files, workers = write_shard(target, self._rank, *packed), self._workers
        if self._rank != SERVER_RANK:
            return files
        if with_model:
            save_model(workers.raw_model, target, workers.side, workers.data)
        if (best := self._run.folder / _BEST_FILE).exists():
            link_or_copy(best, target / _BEST_FILE)
        paths = (target / name for name in (MODEL_FILE, "config.json", _BEST_FILE))
        # Your own model has no config.json.
        return files | {path.name: describe(path) for path in paths if path.exists()}

    def _complete(self, target: Path, manifest: Manifest) -> None:
        """Write the manifest once the files of all processes exist."""
        _wait_for(target / name for name in manifest.files)
        if self._run.log is not None:  # metrics.jsonl is as long as the shard says
            sync_file(self._run.folder / "metrics.jsonl")
        write_manifest(target, manifest)

    def _stop(self) -> None:
        """Save, and raise `RunStopped` with the reason and how to resume."""
        why = self._run.stop_reason or "another process was asked to stop"
        resume = f"to go on: --resume {self._run.folder}"
        self._cluster.leave()
        if self._served:
            raise RunStopped(f"stopped ({why}), and rank 0 saves; {resume}")
        self._save()
        raise RunStopped(f"stopped ({why}) and saved as {self._last_good}; {resume}")

    def _copy(self) -> tuple[Manifest, tuple[Any, dict[str, Tensor]]]:
        """Return a manifest without files, and the packed state of one moment in host memory."""
        workers, log, cluster = self._workers, self._run.log, self._cluster
        scaler = self._accelerator.scaler
        with cluster.held():  # also while copying: other threads push meanwhile
            self._run.log_rounds()  # workers lost and rounds pushed until now
            if cluster.saves_workers:
                counts = self._progress.steps or cluster.holds_weights
                vector = cluster.weights.vector if counts else None
                of_workers = self._of_workers()
            else:
                vector, of_workers = cluster.server.snapshot(), {}
            state = {
                "model": {"weights": vector, "counters": cluster.weights.counters},
                **of_workers,
                "scaler": scaler.state_dict() if scaler else None,
                "meter": workers.meter.state_dict(),
                "extras": workers.plans.extras.state_dict(),
                "stages": [asdict(stage) for stage in workers.plans.stages],
                **workers.stopwatch.state_dict(),
                "log": log.state_dict() if log is not None and log.enabled else None,
                "cluster": cluster.state_dict(),
                "planner": workers.plans.planner.state_dict(),
                "states": {name: own.state_dict() for name, own in self._states.items()},
            }
            packed = pack(state)
        config, data = self._config, workers.data
        manifest = Manifest(
            sequence=self._sequence,
            epoch=self._epochs_done,
            processes=self._accelerator.num_processes,
            workers=config.workers,
            config=asdict(config),
            classes=data.num_classes,
            samples=len(data.train),
            data=getattr(data, "digest", ""),
            held_out=getattr(data, "held_out", ""),
            files={},
        )
        return manifest, packed

    def _of_workers(self) -> dict[str, Any]:
        """Return the state from which this process's workers continue at their steps."""
        progress, stepper = self._progress if self._progress.steps else None, self._workers.stepper
        return {
            "stepper": stepper.state_dict(),
            "timer": stepper.timer.state_dict() if progress else {},
            "progress": progress and asdict(progress),
            "random": random_state(self._accelerator.device) if progress else None,
        }

    def _load_all(self, resumed: Resumed) -> None:
        """Restore everything in every process, or raise in every process."""
        error = None
        try:
            with reading_checkpoint(resumed.found.folder):
                self._load(resumed)
        except SettingError as reason:
            error = reason
        failed = torch.tensor(int(error is not None), device=self._accelerator.device)
        if int(reduce(failed, "sum")):
            raise error or CheckpointError(
                f"{self._last_good} does not fit this run: another process could not read its shard"
            )

    def _load(self, resumed: Resumed) -> None:
        """Restore the state that `_copy` packed."""
        workers, weights, plans = self._workers, self._cluster.weights, self._workers.plans
        state = resumed.state
        self._cluster.load_state_dict(state["cluster"])
        plans.planner.load_state_dict(state["planner"])
        workers.stepper.load_state_dict(state["stepper"])
        workers.stepper.timer.load_state_dict(state["timer"])
        if state["progress"] is not None:
            self._progress.load(state["progress"], weights.vector.device)
            workers.go_on_with(state["random"])
        workers.meter.load_state_dict(state["meter"])
        if self._accelerator.scaler and state["scaler"]:
            self._accelerator.scaler.load_state_dict(state["scaler"])
        if (vector := state["model"]["weights"]) is not None:  # else the next pull loads them
            weights.load(vector)
        for counter, saved in zip(weights.counters, state["model"]["counters"], strict=True):
            counter.copy_(saved)
        plans.extras.begin(workers, state["extras"], same=resumed.same)
        for name, own in self._states.items():
            text = "resume must be of a run that saved the same states"
            require(name in state["states"], text, f"none of {name}")
            own.load_state_dict(state["states"][name])
        workers.stopwatch.load_state_dict(state)
