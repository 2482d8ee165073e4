"""Studies on the disk: what was measured, and who runs which trial.

The layout is that of the measurements that Shallue et al. released
(github.com/google-research/google-research/tree/master/batch_science):
``dataset/model/optimizer/batch_size/study.json`` and, for every trial, ``trial_id/metadata.json``
and ``trial_id/measurements.csv``. What is written here has more entries in ``study.json`` than
those; readers of the released data ignore them.

A trial whose ``metadata.json`` is written is done. The process that runs a trial holds its lock,
which the system lifts when the process dies; the next process runs that trial from its start.
"""

from __future__ import annotations

import csv
import itertools
import json
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from filelock import FileLock, Timeout

from dbsl.base.errors import SettingError, in_line
from dbsl.base.files import write_table, write_text
from dbsl.config.fields import refuse
from dbsl.tools.study.scaling import Status, Study, Trial, reached_at

STUDY, METADATA, MEASUREMENTS = "study.json", "metadata.json", "measurements.csv"
COLUMNS = ("step", "train/cross_entropy_error", "val/cross_entropy_error")
COLUMNS += ("val/classification_error",)
_STATES = get_args(Status)
_ATTEMPTS = 3  # processes that may die in a trial; after that the trial is to blame
_PROBE_S = 0.1  # longest for which one that counts what others run may hold a lock


def dataset_name(dataset: str) -> str:
    """Return what a dataset is called in a layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")


def write_study(folder: Path, values: Mapping[str, Any]) -> None:
    """Write a study's ``study.json``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / STUDY, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_trial(folder: Path, trial: Trial) -> None:
    """Write a trial into its study's folder; without ``metadata.json`` there is no trial."""
    own, rows = folder / str(trial.trial_id), zip(*trial.measurements.values(), strict=True)
    texts = ([f"{value:.7g}" if np.isfinite(value) else "nan" for value in row] for row in rows)
    table = [dict(zip(trial.measurements, row, strict=True)) for row in texts]
    write_table(own / MEASUREMENTS, table)
    metadata = {name: getattr(trial, name) for name in ("status", "steps", "trial_id")}
    metadata["parameters"] = dict(trial.parameters)
    write_text(own / METADATA, json.dumps(metadata, indent=2, sort_keys=True) + "\n")


def read_workloads(roots: Iterable[Path]) -> dict[str, list[Study]]:
    """Return all studies under some folders or in tar archives, by workload, sizes ascending."""
    workloads: dict[str, dict[int, Study]] = {}
    for root in roots:
        for study in _read_root(root):
            sizes = workloads.setdefault(study.workload, {})
            shown = f"{study.workload} at {study.batch_size} a second time in {root}"
            text = "a workload must have one study of each batch size"
            refuse([(study.batch_size in sizes, text, shown)])
            sizes[study.batch_size] = study
    return {name: [sizes[b] for b in sorted(sizes)] for name, sizes in sorted(workloads.items())}


def _read_root(root: Path) -> list[Study]:
    if not root.is_file():
        folders = sorted(path.parent for path in root.rglob(STUDY)) if root.is_dir() else []
        if not folders:
            raise SettingError(f"folder must have a {STUDY} in it or below, got {root}")
        return [read_study(folder) for folder in folders]
    # The published measurements are such an archive.
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with tarfile.open(root) as archive:
                archive.extractall(scratch, filter="data")
        except (tarfile.TarError, OSError, EOFError, TypeError) as error:  # an old Python's: filter
            reason = str(error).partition(":")[0]
            raise SettingError(
                f"an archive must be a readable tar, got {root} ({reason})"
            ) from None
        return _read_root(Path(scratch))


def read_study(folder: Path) -> Study:
    """Return a study; trials that are being written are not there yet."""
    try:
        return _read_study(folder)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, SettingError):
            raise
        what = f"study files must be as a study writes them, got {folder} ({in_line(error)})"
        raise SettingError(what) from None


def _read_study(folder: Path) -> Study:
    path = folder / STUDY
    values = _read_json(path)
    numbers = sorted(int(own.name) for own in folder.iterdir() if own.name.isdecimal())
    trials = [read_trial(folder / str(n)) for n in numbers if is_written(folder, n)]
    goal = values.get("goal_error")
    search = _entry(values, "parameter_configs", path)
    for entry in search.values():
        if entry.get("type") != "DISCRETE":
            _ = float(entry["min_value"]), float(entry["max_value"])
    batch_size = int(_entry(values, "batch_size", path))
    refuse([(batch_size < 1, f"batch_size must be at least 1 in {path}", batch_size)])
    return Study(
        dataset=str(_entry(values, "dataset", path)),
        model=str(_entry(values, "model", path)),
        optimizer=str(_entry(values, "optimizer", path)),
        batch_size=batch_size,
        trials=tuple(trials),
        search=search,
        goal=None if goal is None else float(goal),
        ends_at_goal=goal is not None and bool(values.get("early_stopping")),
    )


def is_written(folder: Path, trial_id: int) -> bool:
    """Whether a study's folder has a trial, whole."""
    return (folder / str(trial_id) / METADATA).exists()


def read_trial(folder: Path) -> Trial:
    """Return a trial from its own folder."""
    path = folder / METADATA
    values = _read_json(path)
    status = _entry(values, "status", path)
    if status not in _STATES:
        raise SettingError(f"status must be one of {', '.join(_STATES)}, got {status!r} in {path}")
    return Trial(
        trial_id=int(_entry(values, "trial_id", path)),
        status=status,
        steps=int(_entry(values, "steps", path)),
        parameters=_entry(values, "parameters", path),
        measurements=_read_measurements(folder / MEASUREMENTS),
    )


def _read_measurements(path: Path) -> dict[str, np.ndarray]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"measurements must be readable, got {path} ({error})") from None
    if "step" not in header:
        raise SettingError(f"measurements must have a column step, got {header} in {path}")
    try:
        values = np.array([[float(v or "nan") for v in row] for row in rows], dtype=np.float64)
        values = values.reshape(len(rows), len(header))
    except ValueError:
        raise SettingError(
            f"measurements must be rows of {len(header)} numbers in {path}"
        ) from None
    return dict(zip(header, values.T, strict=True))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"study files must be readable JSON, got {path} ({error})") from None
    if not isinstance(values, dict):
        raise SettingError(f"study files must hold a JSON object, got another value in {path}")
    return values


def _entry(values: Mapping[str, Any], name: str, path: Path) -> Any:
    if name not in values:
        raise SettingError(f"study files must have an entry {name!r}, got {path} without it")
    return values[name]


@dataclass
class Claim:
    """A trial that this process has taken on."""

    study: str
    trial_id: int  # counts from 1
    lock: FileLock
    attempts: Path  # holds how many processes have begun it


class Claims:
    """The trials of all studies of a folder that exists.

    `studies` are the folders by name, in the order of work, each with so many `trials`; `goal` is
    the error to fall under.
    """

    def __init__(self, folder: Path, studies: Mapping[str, Path], trials: int, goal: float) -> None:
        self._locks = folder / "locks"
        self._locks.mkdir(exist_ok=True)
        self._studies, self._trials, self._goal = studies, trials, goal
        self._reached: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by trial

    def claim(self) -> Claim | None:
        """Take on the next trial that is neither done nor under way, if there is one.

        A trial whose processes died time and again is refused.
        """
        open_ = ((study, number) for study in self._studies for number in self._open(study))
        return next(filter(None, itertools.starmap(self._take, open_)), None)

    def finish(self, claim: Claim) -> None:
        """Release a trial whose files are written."""
        claim.attempts.unlink(missing_ok=True)
        claim.lock.release()

    def give_back(self, claim: Claim) -> None:
        """Release a trial as if it had not been taken on."""
        claim.attempts.write_text(str(int(claim.attempts.read_text()) - 1))
        claim.lock.release()

    def best(self, study: str) -> float:
        """Return the least steps to the goal among a study's complete trials so far, or inf."""
        folder, reached = self._studies[study], self._reached[study]
        for trial_id in range(1, self._trials + 1):
            if trial_id not in reached and is_written(folder, trial_id):
                trial = read_trial(folder / str(trial_id))
                complete = trial.status == "COMPLETE"
                reached[trial_id] = reached_at(trial, self._goal) if complete else float("inf")
        return min(reached.values(), default=float("inf"))

    def running(self) -> int:
        """Return how many trials other processes run."""
        taken = 0
        for lock in (self._lock(study, n) for study in self._studies for n in self._open(study)):
            try:
                lock.acquire(timeout=0)
            except Timeout:
                taken += 1
            else:
                lock.release()
        return taken

    def _open(self, study: str) -> list[int]:
        folder = self._studies[study]
        return [n for n in range(1, self._trials + 1) if not is_written(folder, n)]

    def _take(self, study: str, trial_id: int) -> Claim | None:
        lock = self._lock(study, trial_id)
        try:
            lock.acquire(timeout=_PROBE_S, poll_interval=_PROBE_S / 5)
        except Timeout:
            return None
        if is_written(self._studies[study], trial_id):  # since we looked
            lock.release()
            return None
        attempts = Path(f"{lock.lock_file}.attempts")
        begun = int(attempts.read_text() or 0) if attempts.exists() else 0
        if begun >= _ATTEMPTS:
            lock.release()
            raise SettingError(
                f"a trial must not end its process, got {begun} processes that died in trial "
                f"{trial_id} of {study}; to try it again remove {attempts}"
            )
        attempts.write_text(str(begun + 1))
        return Claim(study, trial_id, lock, attempts)

    def _lock(self, study: str, trial_id: int) -> FileLock:
        return FileLock(self._locks / f"{study.replace('/', '-')}-{trial_id}")
