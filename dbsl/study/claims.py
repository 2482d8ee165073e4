"""Who runs which trial of a study: a lock a trial, which any number of processes try.

A trial whose ``metadata.json`` is written is done. The process that runs a trial holds its lock,
which the system lifts when the process dies; the next process runs that trial from its start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from dbsl.base.errors import SettingError
from dbsl.study.files import is_written, read_trial
from dbsl.study.scaling import reached_at

_ATTEMPTS = 3  # processes that may die in a trial; after that the trial is to blame
_PROBE_S = 0.1  # longest for which one that counts what others run may hold a lock


@dataclass
class Claim:
    """A trial that this process has taken on."""

    study: str
    trial_id: int  # counts from 1
    lock: FileLock
    attempts: Path  # holds how many processes have begun it


class Claims:
    """The trials of all studies of a folder.

    Args:
        folder: The folder; it exists.
        studies: Folder of each study by its name, in the order of work.
        trials: Trials of each study.
        goal: Error to fall under.
    """

    def __init__(self, folder: Path, studies: Mapping[str, Path], trials: int, goal: float) -> None:
        self._locks = folder / "locks"
        self._locks.mkdir(exist_ok=True)
        self._studies, self._trials, self._goal = studies, trials, goal
        self._reached: defaultdict[str, dict[int, float]] = defaultdict(dict)  # by trial

    def claim(self) -> Claim | None:
        """Take on the next trial that is neither done nor under way.

        Returns:
            None where there is none; some may run in other processes.

        Raises:
            SettingError: If a trial's processes died time and again.
        """
        for study in self._studies:
            for trial_id in self._open(study):
                claim = self._take(study, trial_id)
                if claim is not None:
                    return claim
        return None

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
        for study in self._studies:
            for trial_id in self._open(study):
                lock = self._lock(study, trial_id)
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
