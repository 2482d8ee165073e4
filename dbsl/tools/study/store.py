"""Studies on disk, in the layout of the measurements that Shallue et al. released.

It is (github.com/google-research/google-research/tree/master/batch_science)
``dataset/model/optimizer/batch_size/study.json`` and, for every trial, ``trial_id/metadata.json``
and ``trial_id/measurements.csv``. Our ``study.json`` has more entries than the released ones;
readers of the released data ignore them. A trial is done once its ``metadata.json`` is written. A
running trial is locked; the system releases the lock if its process dies. Optuna's journal, which
all processes of a study's folder share, also has the steps to the goal.
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
_LOOK_S = 1.0  # between checks of what other processes run


def dataset_name(dataset: str) -> str:
    """Return a dataset's name in the layout: a path's last part; a hub id without slashes."""
    path = Path(dataset).expanduser()
    return path.resolve().stem if path.exists() else dataset.replace("/", "--")


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a study's or a trial's JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")


def write_trial(folder: Path, trial: Trial) -> None:
    """Write a trial into its study's folder; ``metadata.json`` comes last, and completes it."""
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
    """Return a study, without trials that are still being written."""
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
    """The search at one batch size: the inputs of its trials, in any process."""

    optimizer: str
    batch_size: int
    budget: int  # steps that a trial may take
    folder: Path  # of its trials, in the published layout
    points: Mapping[int, Mapping[str, float]]  # metaparameters of each trial, by number

    @property
    def name(self) -> str:
        """Its name in the journal and in its locks."""
        return f"{self.optimizer}-{self.batch_size}"


class Queue:
    """The trials of all searches in a study's folder; one is done once its files are written.

    `check_stop` is called before each wait, and each look at what others found; it may raise.
    """

    def __init__(self, folder: Path, searches: list[Search], check_stop: Callable[[], Any]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._searches, self._check_stop = folder / "queue", searches, check_stop
        self._folder.mkdir(exist_ok=True)
        # Optuna's own lock remains for half a minute after its process is killed.
        lock, journal = FileLock(folder / LOCK), str(self._folder / "journal")
        backend = optuna.storages.journal.JournalFileBackend(journal, lock)
        more = {"storage": optuna.storages.JournalStorage(backend), "load_if_exists": True}
        self._studies = {s.name: optuna.create_study(study_name=s.name, **more) for s in searches}

    def trials(self) -> Iterator[tuple[Search, int]]:
        """Yield trials for this process to run until all are done; wait for other processes'."""
        each, told = [(search, number) for search in self._searches for number in search.points], 0
        while left := [trial for trial in each if not _is_done(*trial)]:
            others = True
            for search, number in left:
                lock = FileLock(self._folder / f"{search.name}-{number}", timeout=0)
                with suppress(Timeout), lock:
                    others = False
                    if not _is_done(search, number):  # another may have just finished it
                        yield search, number
            if others:
                self._check_stop()
                if len(left) != told:
                    told = len(left)
                    print(f"waiting for {plural(told, 'trial')} of other processes", flush=True)
                time.sleep(_LOOK_S)

    def note(self, search: Search, trial: Trial, goal: float) -> None:
        """Record a complete trial for all processes: its steps to the goal, or inf."""
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
