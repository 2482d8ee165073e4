"""The metaparameters of a study's trials, and an Optuna store that several processes work off.

A trial's values are a point of a scrambled Sobol sequence, which depends on the seed, the optimizer
and the batch size alone: not on who runs it, nor when. All trials are put into the store before the
first one runs. A process takes the next that waits and holds a lock on it, which the system lifts
when the process dies; whoever comes next then runs that trial from its start.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsl.base.lazy import lazy_import
from dbsl.base.seeds import stream_seed

filelock, optuna = lazy_import("filelock"), lazy_import("optuna")

_STORE_TIMEOUT_S = 120.0  # for the store's lock, which nobody holds for longer than a query
_ATTEMPTS = 3  # attempts at a trial whose process died; after that the trial is to blame
_ID, _SEARCHED, _ATTEMPT, _STATUS = "trial_id", "searched", "attempt", "status"


@dataclass(frozen=True)
class Range:
    """The values of one metaparameter: a range on a scale, or where both ends are equal, one."""

    low: float
    high: float
    scale: str  # LINEAR_SCALE, LOG_SCALE, or REVERSE_LOG_SCALE: 1 - value on a log scale

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to search."""
        return self.low == self.high

    def distribution(self) -> optuna.distributions.FloatDistribution:
        """Return the distribution that Optuna searches; a reversed scale has 1 - value."""
        if self.scale == "REVERSE_LOG_SCALE":
            return optuna.distributions.FloatDistribution(1 - self.high, 1 - self.low, log=True)
        return optuna.distributions.FloatDistribution(
            self.low, self.high, log=self.scale == "LOG_SCALE"
        )

    def value(self, searched: float) -> float:
        """Return the metaparameter of a value of `distribution`."""
        return 1 - searched if self.scale == "REVERSE_LOG_SCALE" else searched


@dataclass(frozen=True)
class SearchSpace:
    """Metaparameters that are tuned at every batch size.

    Attributes:
        effective_rate: Learning rate / (1 - momentum), whose best values differ less between
            momenta than those of the learning rate itself.
        momentum: Momentum in [0, 1); None for an optimizer without it.
        end_factor: Last learning rate over the first, in (0, 1].
        decay_share: Share of the step budget over which the learning rate falls, in (0, 1].
        weight_decay: Weight decay, not on biases and norms.
    """

    effective_rate: Range
    momentum: Range | None
    end_factor: Range
    decay_share: Range
    weight_decay: Range

    def ranges(self) -> dict[str, Range]:
        """Return the ranges by the names that the parameters have."""
        given = {
            "effective_learning_rate": self.effective_rate,
            "momentum": self.momentum,
            "end_learning_rate_factor": self.end_factor,
            "learning_rate_decay_share": self.decay_share,
            "weight_decay": self.weight_decay,
        }
        return {name: values for name, values in given.items() if values is not None}

    def distributions(self) -> dict[str, optuna.distributions.FloatDistribution]:
        """Return what Optuna searches."""
        return {
            name: values.distribution()
            for name, values in self.ranges().items()
            if not values.is_fixed
        }

    def parameters(self, searched: Mapping[str, float], steps: int) -> dict[str, float]:
        """Return a trial's metaparameters, under the published names where they have one.

        Args:
            searched: Values of `distributions`.
            steps: The trial's step budget.
        """
        values = {
            name: given.value(searched[name]) if name in searched else given.low
            for name, given in self.ranges().items()
        }
        momentum = values.get("momentum", 0.0)
        values["learning_rate"] = values["effective_learning_rate"] * (1 - momentum)
        share = values["learning_rate_decay_share"]
        values["learning_rate_decay_steps"] = max(1, round(share * steps))
        return values

    def entries(self) -> dict[str, dict[str, Any]]:
        """Return the entries of ``parameter_configs`` in ``study.json``."""
        entries = {}
        for name, given in self.ranges().items():
            if given.is_fixed:
                continue
            entries[name] = {
                "type": "DOUBLE",
                "scale": given.scale,
                "min_value": given.low,
                "max_value": given.high,
                # No value lies beyond such a bound, so a best value there is not on an edge.
                "fixed_bounds": [
                    *(["min"] if given.low == 0 else []),
                    *(["max"] if given.high == 1 else []),
                ],
            }
        return entries


@dataclass
class Claim:
    """A trial that this process has taken on."""

    study: str
    trial_id: int  # counts from 1
    searched: dict[str, float]
    trial: Any  # Optuna's
    lock: Any


class TrialStore:
    """The trials of all studies of a folder, in one SQLite file.

    Args:
        folder: The folder; it exists.
    """

    def __init__(self, folder: Path) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._locks = folder / "locks"
        self._locks.mkdir(exist_ok=True)
        self._lock = filelock.FileLock(self._locks / "store", timeout=_STORE_TIMEOUT_S)
        with self._lock:
            self._storage = optuna.storages.RDBStorage(f"sqlite:///{folder / 'trials.sqlite3'}")

    def fill(
        self,
        study: str,
        distributions: Mapping[str, Any],
        count: int,
        seed: int,
    ) -> None:
        """Have a study's first `count` trials in the store; those that are there stay."""
        with self._lock:
            own = optuna.create_study(storage=self._storage, study_name=study, load_if_exists=True)
            trials = own.get_trials(deepcopy=False)
            there = {trial.user_attrs[_ID] for trial in trials if not _was_killed(trial)}
            points = quasi_random_points(distributions, count, stream_seed(seed, f"search {study}"))
            for trial_id, searched in enumerate(points, 1):
                if trial_id not in there:
                    _enqueue(own, trial_id, searched, attempt=1)

    def claim(self, studies: Mapping[str, Mapping[str, Any]]) -> Claim | None:
        """Take on the next trial that waits, of the first study that has one.

        Args:
            studies: Search space of each study, by name, in the order of work.

        Returns:
            None where no trial waits; some may run in other processes.

        Raises:
            ValueError: If a trial's processes died time and again.
        """
        with self._lock:
            for name, distributions in studies.items():
                own = optuna.load_study(storage=self._storage, study_name=name)
                self._give_back_dead(own)
                waiting = optuna.trial.TrialState.WAITING
                if not own.get_trials(deepcopy=False, states=(waiting,)):
                    continue
                trial = own.ask(distributions)
                lock = self._lock_of(name, trial.number)
                lock.acquire(timeout=0)
                given = trial.user_attrs
                return Claim(name, given[_ID], given[_SEARCHED], trial, lock)
        return None

    def finish(self, claim: Claim, status: str, steps_to_result: float) -> None:
        """Record a claimed trial's end; it is then nobody's any more.

        Args:
            claim: The trial.
            status: COMPLETE, INCOMPLETE or INFEASIBLE.
            steps_to_result: inf where it did not reach the goal.
        """
        states = optuna.trial.TrialState
        state = {"COMPLETE": states.COMPLETE, "INCOMPLETE": states.PRUNED}.get(status, states.FAIL)
        with self._lock:
            own = optuna.load_study(storage=self._storage, study_name=claim.study)
            claim.trial.set_user_attr(_STATUS, status)
            own.tell(claim.trial, steps_to_result if status == "COMPLETE" else None, state)
            self._release(claim)

    def best(self, study: str) -> float:
        """Return the least steps to result among a study's complete trials so far, or inf."""
        complete = (optuna.trial.TrialState.COMPLETE,)
        with self._lock:
            own = optuna.load_study(storage=self._storage, study_name=study)
            return min((t.value for t in own.get_trials(False, complete)), default=math.inf)

    def counts(self, study: str) -> dict[str, int]:
        """Return how many of a study's trials wait, run and are finished."""
        states = optuna.trial.TrialState
        with self._lock:
            own = optuna.load_study(storage=self._storage, study_name=study)
            trials = own.get_trials(deepcopy=False)
        live = [trial for trial in trials if not _was_killed(trial)]
        return {
            "waiting": sum(t.state == states.WAITING for t in live),
            "running": sum(t.state == states.RUNNING for t in live),
            "finished": sum(t.state.is_finished() for t in live),
        }

    def give_back(self, claim: Claim) -> None:
        """Put a claimed trial back as if it had not been taken on."""
        with self._lock:
            own = optuna.load_study(storage=self._storage, study_name=claim.study)
            self._requeue(own, own.get_trials(deepcopy=False)[claim.trial.number], died=False)
            self._release(claim)

    def _give_back_dead(self, own: optuna.Study) -> None:
        running = (optuna.trial.TrialState.RUNNING,)
        for frozen in own.get_trials(deepcopy=False, states=running):
            lock = self._lock_of(own.study_name, frozen.number)
            try:
                lock.acquire(timeout=0)
            except filelock.Timeout:
                continue  # it is alive
            self._requeue(own, frozen, died=True)
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def _requeue(self, own: optuna.Study, frozen: Any, *, died: bool) -> None:
        given = frozen.user_attrs
        if died and given[_ATTEMPT] >= _ATTEMPTS:
            raise ValueError(
                f"a trial must not end its process, got {_ATTEMPTS} processes that died in trial "
                f"{given[_ID]} of {own.study_name} ({given[_SEARCHED]})"
            )
        own.tell(frozen.number, state=optuna.trial.TrialState.FAIL)  # without a status
        _enqueue(own, given[_ID], given[_SEARCHED], attempt=given[_ATTEMPT] + died)

    def _release(self, claim: Claim) -> None:
        Path(claim.lock.lock_file).unlink(missing_ok=True)
        claim.lock.release()

    def _lock_of(self, study: str, number: int) -> Any:
        return filelock.FileLock(self._locks / f"{study.replace('/', '-')}-{number}")


def _was_killed(trial: Any) -> bool:
    """Whether a trial's process died; another entry of the store has the trial again."""
    return trial.state == optuna.trial.TrialState.FAIL and _STATUS not in trial.user_attrs


def _enqueue(own: optuna.Study, trial_id: int, searched: Mapping[str, float], attempt: int) -> None:
    given = {_ID: trial_id, _SEARCHED: dict(searched), _ATTEMPT: attempt}
    own.enqueue_trial(dict(searched), user_attrs=given)


def quasi_random_points(
    distributions: Mapping[str, Any], count: int, seed: int
) -> Sequence[dict[str, float]]:
    """Return the first points of a scrambled Sobol sequence, spread over the distributions."""
    if not distributions:
        return [{} for _ in range(count)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.QMCSampler(scramble=True, seed=seed % 2**32)
        study = optuna.create_study(sampler=sampler)  # in memory; it counts the points
        return [sampler.sample_relative(study, None, dict(distributions)) for _ in range(count)]
