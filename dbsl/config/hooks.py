"""Extras: parts of a run that lie in dbsl/extras, and the moments at which a run calls them.

An extra, yours too, is a class there, derived from `Extra`, alone in its file or folder. No module
of the core names it: deleting its file is all it takes to be rid of it. What it needs of slow
libraries it imports when it is used.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import dbsl

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

    from dbsl.plan.sampler import Step
    from dbsl.plan.types import EpochEnd, Plan, RoundReport, Turn
    from dbsl.run.plans import SimulatedTimes
    from dbsl.run.workers import Workers
    from dbsl.runs import RunFolder

    Metrics = Mapping[str, Any] | None
    Evaluate = Callable[[], Mapping[str, Any]]

T = TypeVar("T")
Row = Mapping[str, Any]  # a line of metrics.jsonl, as `dbsl.log.rows.read_metrics` returns it

_FOLDER = str(Path(dbsl.__file__).parent / "extras")


class Machine:
    """How the workers' machines and network differ from what is planned: not at all."""

    slows = False  # whether a worker is slowed on purpose

    def factor(self, worker: int, epoch: int) -> float:
        """Return the factor on a worker's compute time in an epoch."""
        return 1.0

    def noise_factor(self, worker: int, epoch: int, round_: int) -> float:
        """Return the factor on one simulated round's time, besides `factor`."""
        return 1.0

    def exchange_s(self, times: SimulatedTimes, steps: int, worker: int) -> float:
        """Return the seconds that a simulated worker's round of so many steps is on the network."""
        return 0.0


class Extra:
    """A part that a run can do without; each method is a moment, at which it does nothing.

    `Settings` is a dataclass of its flags, derived from `RunConfig`, or from `ImageConfig` where
    other programs may load data by them; None: it has none. Objects are made where all settings are
    known, by `of`.
    """

    Settings: type | None = None

    @classmethod
    def of(cls, config: Any) -> Extra | None:
        """Return the extra of a run with these settings; None: it is not asked for."""
        return cls()

    # --- before training, on every process
    def data(self, config: Any) -> Any | None:
        """Return what opens the data, as `dbsl.data.dataset.load_data` has it; else datasets do."""

    def machine(self, config: Any, accelerator: Accelerator) -> Machine | None:
        """Return what stands for the machines; of several extras the first counts."""

    # --- while it trains, on every process
    def begin(self, workers: Workers) -> None:
        """All is built; what was saved is not brought back yet."""

    def measure(
        self, turn: Turn, step: Step, images: Tensor, labels: Tensor
    ) -> dict[str, Any] | None:
        """Return numbers of a round's first step for its report, by the names of `RoundReport`.

        Gradients are there and not applied. Images [B, 3, R, R] are those of the last part.
        """

    def evaluated(
        self, run: RunFolder, end: EpochEnd, metrics: Metrics, evaluate: Evaluate
    ) -> Metrics:
        """Called with the merged weights loaded: return their metrics, with yours added.

        `metrics` is None where the epoch is not evaluated.
        """
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run goes on from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any], *, same: bool) -> None:
        """Go on from what `state_dict` returned; `same`: in the same workers, at their steps."""

    # --- on the main process
    def epoch(
        self, epoch: int, plan: Plan, reports: Sequence[RoundReport]
    ) -> Iterable[tuple[str, Row]]:
        """Return events for metrics.jsonl of an epoch, from the reports of its rounds.

        summary.json has the last of each, by its name.
        """
        return ()

    # --- what only reports: the main process, from rows alone (`python -m dbsl.report RUN`, too)
    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        """Begin to report on a run; these rows are in its metrics.jsonl already."""

    def row(self, row: Row) -> None:
        """A row was written. Its epochs count from 0."""

    def close(self, kind: type[BaseException] | None) -> None:
        """Let go of what is open; `kind` is what ended the run.

        None: it has come to its end, and summary.json is written.
        """


class Extras(dict[str, Extra]):
    """The extras of a run by name, in the order of their names."""

    @classmethod
    def of(cls, config: Any) -> Extras:
        """Return the extras that these settings ask for."""
        known = found_extras().items()
        made = {n: e.of(config) for n, e in known if isinstance(config, e.Settings or object)}
        return cls({name: extra for name, extra in made.items() if extra is not None})

    def __enter__(self) -> Extras:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.each(Extra.close, kind)

    def each(self, moment: Callable[..., T], *given: Any) -> list[T]:
        """Call a method of `Extra` of each; return what they return."""
        return [getattr(extra, moment.__name__)(*given) for extra in self.values()]

    def first(self, moment: Callable[..., T | None], *given: Any) -> T | None:
        """Return the first answer of an extra that is not None."""
        return next((one for one in self.each(moment, *given) if one is not None), None)

    def evaluated(
        self, run: RunFolder, end: EpochEnd, metrics: Metrics, evaluate: Evaluate
    ) -> Metrics:
        """Hand an epoch's metrics from one to the next."""
        for extra in self.values():
            found = extra.evaluated(run, end, metrics, evaluate)
            metrics = metrics if found is None else found
        return metrics

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return each one's state, by name."""
        return {name: extra.state_dict() for name, extra in self.items()}

    def load_state_dict(self, states: Mapping[str, Any], *, same: bool) -> None:
        """Give each its state; one that is new to the run has none."""
        for name in states.keys() & self.keys():
            self[name].load_state_dict(states[name], same=same)


@lru_cache
def found_extras() -> dict[str, type[Extra]]:
    """Return the extras that lie in dbsl/extras, by the names of their files."""
    found = {}
    for name in sorted(module.name for module in pkgutil.iter_modules([_FOLDER])):
        module = importlib.import_module(f"dbsl.extras.{name}")
        for one in vars(module).values():
            own = isinstance(one, type) and one.__module__.startswith(module.__name__)
            found |= {name: one} if own and issubclass(one, Extra) else {}
    return found


def settings_of_extras() -> tuple[type, ...]:
    """Return the settings of all extras, as bases of a config."""
    return tuple(extra.Settings for extra in found_extras().values() if extra.Settings)


def defaults_of_extras() -> dict[str, Any]:
    """Return the defaults of the extras' settings, by name."""
    several = ((cls, name) for cls in settings_of_extras() for name in inspect.get_annotations(cls))
    return {name: getattr(cls, name) for cls, name in several}
