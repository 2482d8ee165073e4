"""Who runs which trial: Optuna's journal, which all processes of a study's folder share."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from dbsl.base.errors import SettingError, in_line
from dbsl.base.machine import lazy_import
from dbsl.run.folder import LOCK
from dbsl.tools.study.store import is_written

optuna = lazy_import("optuna")
if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

_FOLDER, _JOURNAL = "queue", "journal"


@dataclass(frozen=True)
class Search:
    """The search at one batch size: what its trials get, whoever runs them."""

    optimizer: str
    batch_size: int
    budget: int  # steps that a trial may take
    folder: Path  # its trials', in the published layout
    points: Sequence[Mapping[str, float]]  # metaparameters of the trials from 1 on

    @property
    def name(self) -> str:
        """Its name in the journal."""
        return f"{self.optimizer}/{self.batch_size}"


class Queue:
    """The trials of all searches of a study's folder; files in the layout say which are done.

    A process holds a lock of its own for as long as it lives. Where the system has lifted that
    lock, the process's trial is enqueued again. Optuna's heartbeats would tell later, and not at
    all of a process that died before its first.
    """

    def __init__(self, folder: Path, searches: Sequence[Search]) -> None:
        try:
            optuna.logging.set_verbosity(optuna.logging.WARNING)
        except ModuleNotFoundError as error:
            raise SettingError(f"a study needs Optuna, got {in_line(error)}") from None
        self._folder, self._searches, self._name = folder / _FOLDER, searches, uuid.uuid4().hex
        self._folder.mkdir(exist_ok=True)
        self._alive = FileLock(self._folder / self._name)
        self._alive.acquire()
        # Optuna's own lock outlives a process that is killed by half a minute.
        self._lock, journal = FileLock(folder / LOCK), self._folder / _JOURNAL
        backend = optuna.storages.journal.JournalFileBackend(str(journal), self._lock)
        try:
            storage = optuna.storages.JournalStorage(backend)
            with self._lock:
                self._studies: dict[str, Study] = {
                    own.name: optuna.create_study(
                        storage=storage, study_name=own.name, load_if_exists=True
                    )
                    for own in searches
                }
        except (KeyError, ValueError) as error:
            raise SettingError(
                f"the journal must be readable, got {journal} ({in_line(error)}); remove it: "
                "finished trials are kept"
            ) from None

    def take(self) -> tuple[Search, Trial] | None:
        """Take on the next trial that is neither done nor under way, if there is one."""
        with self._lock:
            for search in self._searches:
                study = self._studies[search.name]
                self._enqueue(search, study)
                while _trials(study, "WAITING"):
                    trial = study.ask()
                    trial.set_user_attr("process", self._name)
                    if trial.user_attrs["trial_id"] <= len(search.points):
                        return search, trial
                    self.give_back(search, trial)  # an earlier launch had more trials
        return None

    def _enqueue(self, search: Search, study: Study) -> None:
        """Enqueue all trials that are not done, nor waiting, nor run by a process that lives."""
        under_way = {trial.user_attrs["trial_id"] for trial in _trials(study, "WAITING")}
        for trial in _trials(study, "RUNNING"):
            if self._is_run(trial):
                under_way.add(trial.user_attrs["trial_id"])
            else:
                study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
        for number, point in enumerate(search.points, 1):
            if number not in under_way and not is_written(search.folder, number):
                study.enqueue_trial(dict(point), {"trial_id": number})

    def finish(self, search: Search, trial: Trial, status: str, steps: float) -> None:
        """Note how a trial ended whose files are written; `steps` to the goal, or inf."""
        state = {"INCOMPLETE": "PRUNED", "INFEASIBLE": "FAIL"}.get(status, status)
        values = steps if status == "COMPLETE" else None
        self._studies[search.name].tell(trial, values, optuna.trial.TrialState[state])

    def give_back(self, search: Search, trial: Trial) -> None:
        """Leave a trial to whoever takes the next."""
        self._studies[search.name].tell(trial, state=optuna.trial.TrialState.FAIL)

    def best(self, search: Search) -> float:
        """Return the least steps to the goal among the complete trials so far, or inf."""
        complete = _trials(self._studies[search.name], "COMPLETE")
        return min((trial.value for trial in complete), default=float("inf"))

    def running(self) -> int:
        """Return how many trials other processes run."""
        with self._lock:
            running = (t for own in self._studies.values() for t in _trials(own, "RUNNING"))
            return sum(map(self._is_run, running))

    def _is_run(self, trial: FrozenTrial) -> bool:
        """Whether a trial's process lives; it may have died before it gave its name."""
        try:
            with FileLock(self._folder / trial.user_attrs.get("process", "none"), timeout=0):
                return False
        except Timeout:
            return True


def _trials(study: Study, state: str) -> list[FrozenTrial]:
    return study.get_trials(deepcopy=False, states=(optuna.trial.TrialState[state],))
