"""Who runs which trial: a lock for each, which the system lifts where its process dies.

What the trials came to is in Optuna's journal, which all processes of a study's folder share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dbsl.base.errors import plural
from dbsl.base.machine import lazy_import
from dbsl.run.folder import LOCK
from dbsl.tools.study.scaling import Trial
from dbsl.tools.study.store import is_written

optuna = lazy_import("optuna")

_LOOK_S = 1.0  # between looks at what other processes run
# What Optuna calls a trial that was cut short or has diverged.
_STATES = {"COMPLETE": "COMPLETE", "INCOMPLETE": "PRUNED", "INFEASIBLE": "FAIL"}


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
    """The trials of all searches of a study's folder; one whose files are written is done."""

    def __init__(self, folder: Path, searches: Sequence[Search]) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._folder, self._searches = folder / "queue", searches
        self._folder.mkdir(exist_ok=True)
        journal = optuna.storages.journal.JournalFileBackend(
            str(self._folder / "journal"),
            FileLock(folder / LOCK),  # Optuna's own outlives a process that is killed by 30 s
        )
        more = {"storage": optuna.storages.JournalStorage(journal), "load_if_exists": True}
        self._studies = {s.name: optuna.create_study(study_name=s.name, **more) for s in searches}

    def trials(self, check_stop: Callable[[], object]) -> Iterator[tuple[Search, int]]:
        """Yield trials for this process to run until all are done; wait for those of others.

        `check_stop` is called while it waits; it may raise.
        """
        told = 0
        while left := [
            (search, number)
            for search in self._searches
            for number in range(1, len(search.points) + 1)
            if not is_written(search.folder, number)
        ]:
            others = True
            for search, number in left:
                name = f"{search.optimizer}-{search.batch_size}-{number}"
                with suppress(Timeout), FileLock(self._folder / name, timeout=0):
                    others = False
                    if not is_written(search.folder, number):  # another may have done it just now
                        yield search, number
            if others:
                check_stop()
                if len(left) != told:
                    told = len(left)
                    print(f"waiting for {plural(told, 'trial')} of other processes", flush=True)
                time.sleep(_LOOK_S)

    def note(self, search: Search, trial: Trial, goal: float) -> None:
        """Tell all processes what a trial came to."""
        found = optuna.trial.create_trial(
            state=optuna.trial.TrialState[_STATES[trial.status]],
            value=trial.reached_at(goal) if trial.status == "COMPLETE" else None,
            user_attrs={"trial_id": trial.trial_id, **trial.parameters},
        )
        self._studies[search.name].add_trial(found)

    def best(self, search: Search) -> float:
        """Return the least steps to the goal among the complete trials so far, or inf."""
        states = (optuna.trial.TrialState.COMPLETE,)
        complete = self._studies[search.name].get_trials(deepcopy=False, states=states)
        return min((trial.value for trial in complete), default=float("inf"))
