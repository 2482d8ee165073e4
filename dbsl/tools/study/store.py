"""Studies on the disk, in the layout of the measurements that Shallue et al. released.

That is (github.com/google-research/google-research/tree/master/batch_science)
``dataset/model/optimizer/batch_size/study.json`` and, for every trial, ``trial_id/metadata.json``
and ``trial_id/measurements.csv``. What is written here has more entries in ``study.json`` than
those; readers of the released data ignore them. A trial whose ``metadata.json`` is written is done.
One that is run is locked; the system lifts the lock where its process dies. Steps to the goal are
in Optuna's journal, too, which all processes of a study's folder share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas
from filelock import FileLock, Timeout

from dbsl.base.errors import SettingError, in_line, plural, require
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import
from dbsl.run.folder import LOCK
from dbsl.tools.study.scaling import OBJECTIVE, Study, Trial

optuna = lazy_import("optuna")

STUDY, METADATA, MEASUREMENTS = "study.json", "metadata.json", "measurements.csv"
COLUMNS = ["step", "train/cross_entropy_error", "val/cross_entropy_error", OBJECTIVE]
_LOOK_S = 1.0  # between looks at what other processes run


def dataset_name(dataset: str) -> str:
    """Return what a dataset is called in a layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a study's or a trial's JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_trial(folder: Path, trial: Trial) -> None:
    """Write a trial into its study's folder; without ``metadata.json`` there is no trial."""
    own, table = folder / str(trial.trial_id), trial.measurements
    own.mkdir(parents=True, exist_ok=True)
    form = {"float_format": "%.7g", "na_rep": "nan", "lineterminator": "\n"}
    write_text(own / MEASUREMENTS, table.where(np.isfinite(table)).to_csv(index=False, **form))
    metadata = {name: getattr(trial, name) for name in ("status", "steps", "trial_id")}
    write_json(own / METADATA, metadata | {"parameters": dict(trial.parameters)})


def read_workloads(roots: Iterable[Path]) -> dict[str, list[Study]]:
    """Return all studies under some folders, by workload, sizes ascending."""
    workloads: dict[str, dict[int, Study]] = {}
    for root in roots:
        files = sorted(root.rglob(STUDY))
        require(files, f"folder must have a {STUDY} in it or below", str(root))
        for study in map(_read_study, files):
            sizes = workloads.setdefault(study.workload, {})
            twice = f"{study.workload} at {study.batch_size} a second time in {root}"
            text = "a workload must have one study of each batch size"
            require(study.batch_size not in sizes, text, twice)
            sizes[study.batch_size] = study
    return {name: [sizes[b] for b in sorted(sizes)] for name, sizes in sorted(workloads.items())}


def _read_study(path: Path) -> Study:
    """Return a study; trials that are being written are not there yet."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        names, trials = [values[name] for name in ("dataset", "model", "optimizer")], []
        for of_trial in path.parent.glob(f"*/{METADATA}"):
            trials.append(_read_trial(path := of_trial))
        trials.sort(key=lambda trial: trial.trial_id)
        goal = values.get("goal_error")
        ends = goal is not None and values.get("early_stopping", False)
        return Study(*names, values["batch_size"], tuple(trials), goal, ends)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        reason = f"no entry {error}" if isinstance(error, KeyError) else in_line(error)
        text = f"study files must be as a study writes them, got {path} ({reason})"
        raise SettingError(text) from None


def _read_trial(path: Path) -> Trial:
    values = json.loads(path.read_text(encoding="utf-8"))
    table = pandas.read_csv(path.with_name(MEASUREMENTS), usecols=["step", OBJECTIVE], dtype=float)
    about = (values[name] for name in ("trial_id", "status", "steps", "parameters"))
    return Trial(*about, table)


@dataclass(frozen=True)
class Search:
    """The search at one batch size: what its trials get, whoever runs them."""

    optimizer: str
    batch_size: int
    budget: int  # steps that a trial may take
    folder: Path  # its trials', in the published layout
    points: Mapping[int, Mapping[str, float]]  # metaparameters of each trial, by number

    @property
    def name(self) -> str:
        """Its name in the journal, and of its locks."""
        return f"{self.optimizer}-{self.batch_size}"


class Queue:
    """The trials of all searches of a study's folder; one whose files are written is done.

    `check_stop` is called whenever it waits, or looks at what others have found; it may raise.
    """

    def __init__(self, folder: Path, searches: list[Search], check_stop: Callable[[], Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._searches, self._check_stop = folder / "queue", searches, check_stop
        self._folder.mkdir(exist_ok=True)
        # Optuna's own lock outlives a process that is killed by half a minute.
        lock, journal = FileLock(folder / LOCK), str(self._folder / "journal")
        backend = optuna.storages.journal.JournalFileBackend(journal, lock)
        more = {"storage": optuna.storages.JournalStorage(backend), "load_if_exists": True}
        self._studies = {s.name: optuna.create_study(study_name=s.name, **more) for s in searches}

    def trials(self) -> Iterator[tuple[Search, int]]:
        """Yield trials for this process to run until all are done; wait for those of others."""
        each, told = [(search, number) for search in self._searches for number in search.points], 0
        while left := [trial for trial in each if not _is_done(*trial)]:
            others = True
            for search, number in left:
                lock = FileLock(self._folder / f"{search.name}-{number}", timeout=0)
                with suppress(Timeout), lock:
                    others = False
                    if not _is_done(search, number):  # another may have done it just now
                        yield search, number
            if others:
                self._check_stop()
                if len(left) != told:
                    told = len(left)
                    print(f"waiting for {plural(told, 'trial')} of other processes", flush=True)
                time.sleep(_LOOK_S)

    def note(self, search: Search, trial: Trial, goal: float) -> None:
        """Tell all processes of a trial that is complete: its steps to the goal, or inf."""
        about = {"trial_id": trial.trial_id, **trial.parameters}
        found = optuna.trial.create_trial(value=trial.reached_at(goal), user_attrs=about)
        self._studies[search.name].add_trial(found)

    def best(self, search: Search) -> float:
        """Return the least steps to the goal among the complete trials so far, or inf."""
        self._check_stop()
        complete = self._studies[search.name].get_trials(deepcopy=False)
        return min((trial.value for trial in complete), default=float("inf"))


def _is_done(search: Search, number: int) -> bool:
    return (search.folder / str(number) / METADATA).exists()
