"""Extras: optional parts of a run in dbsl/extras, and the moments at which a run calls them.

An extra, including yours, is a class there, derived from `Extra`, alone in its file or folder. No
module of the core names it: delete its file to remove it. It imports slow libraries only when it is
used.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import dbsl

T = TypeVar("T")
Row = Mapping[str, Any]  # a line of metrics.jsonl, as `dbsl.log.rows.read_metrics` returns it
Metrics = Mapping[str, Any] | None  # of an evaluation; None: the epoch is not evaluated

_FOLDER = str(Path(dbsl.__file__).parent / "extras")


class Machine:
    """How the workers' machines and network differ from the plan: here, not at all."""

    slows = False  # whether a worker is slowed on purpose

    def factor(self, worker: int, epoch: int) -> float:
        """Return the factor on a worker's compute time in an epoch."""
        return 1.0

    def noise_factor(self, worker: int, epoch: int, round_: int) -> float:
        """Return the factor on one simulated round's time, besides `factor`."""
        return 1.0

    def exchange_s(self, times: Any, steps: int, worker: int) -> float:
        """Return the network seconds of a simulated worker's round of so many steps."""
        return 0.0


class Extra:
    """An optional part of a run; each method is a moment, at which this class does nothing.

    `Settings` is a dataclass of its flags, derived from `RunConfig`, or from `ImageConfig` if other
    programs may load data with them; None: it has none. `of` makes objects once all settings are
    known.
    """

    Settings: type | None = None

    @classmethod
    def of(cls, config: Any) -> Extra | None:
        """Return the extra for a run with these settings; None: it is not requested."""
        return cls()

    # --- before training, on every process
    def data(self, config: Any) -> Any | None:
        """Return what opens the data for `dbsl.data.dataset.load_data`; None: `datasets` does."""

    def machine(self, config: Any, accelerator: Any) -> Machine | None:
        """Return a stand-in for the machines; of several extras, the first is used."""

    # --- while it trains, on every process
    def begin(self, workers: Any, state: Mapping[str, Any], *, same: bool) -> None:
        """Begin: all is built (`dbsl.run.workers.Workers`), and saved state is loaded.

        `state` is what `state_dict` returned; empty: the run is new, or had no such extra. `same`:
        it continues in the same workers, at their steps.
        """

    def measure(self, turn: Any, step: Any, images: Any, labels: Any) -> dict[str, Any] | None:
        """Return numbers on a round's first step for its report, by `RoundReport`'s names.

        Gradients are computed and not applied. Images [B, 3, R, R] are those of the last part.
        """

    def evaluated(
        self, run: Any, end: Any, metrics: Metrics, evaluate: Callable[[], Mapping[str, Any]]
    ) -> Metrics:
        """Return the merged weights' metrics, with yours added; the weights are loaded.

        `run` is the `dbsl.runs.RunFolder`, `end` the `EpochEnd`.
        """
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run continues from."""
        return {}

    # --- on the main process
    def epoch(self, epoch: int, plan: Any, reports: Sequence[Any]) -> Iterable[tuple[str, Row]]:
        """Return an epoch's events for metrics.jsonl, from its `Plan` and `RoundReport`s.

        summary.json has the last of each by name.
        """
        return ()

    def report(
        self, folder: Path, rows: Sequence[Row]
    ) -> AbstractContextManager[Callable[[Row], object]]:
        """Return a context for reporting a run; its value is called with each row as it is written.

        Rows come only from metrics.jsonl (`python -m dbsl.report RUN` has no more), their epochs
        count from 0, and `rows` are already in it. The context ends without an exception if the run
        has finished and summary.json is written.
        """
        return nullcontext(lambda row: None)


class Extras(dict[str, Extra]):
    """The extras of a run by name, in the order of their names."""

    @classmethod
    def of(cls, config: Any) -> Extras:
        """Return the extras that these settings ask for."""
        known = found_extras().items()
        made = {n: e.of(config) for n, e in known if isinstance(config, e.Settings or object)}
        return cls({name: extra for name, extra in made.items() if extra is not None})

    def each(self, moment: Callable[..., T], *given: Any) -> list[T]:
        """Call a method of `Extra` on each; return their results."""
        return [getattr(extra, moment.__name__)(*given) for extra in self.values()]

    def first(self, moment: Callable[..., T | None], *given: Any) -> T | None:
        """Return the first of the extras' answers that is not None."""
        return next((one for one in self.each(moment, *given) if one is not None), None)

    def evaluated(self, run: Any, end: Any, metrics: Metrics, evaluate: Any) -> Metrics:
        """Pass an epoch's metrics from each extra to the next."""
        for extra in self.values():
            found = extra.evaluated(run, end, metrics, evaluate)
            metrics = metrics if found is None else found
        return metrics

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return each one's state, by name."""
        return {name: extra.state_dict() for name, extra in self.items()}

    def begin(self, workers: Any, states: Mapping[str, Any], *, same: bool) -> None:
        """Begin each one with its state, by name."""
        for name, extra in self.items():
            extra.begin(workers, states.get(name, {}), same=same)

    @contextmanager
    def report(self, folder: Path, rows: Sequence[Row]) -> Iterator[Callable[[Row], object]]:
        """Open all contexts; each receives every row."""
        with ExitStack() as contexts:
            several = [contexts.enter_context(one) for one in self.each(Extra.report, folder, rows)]
            yield lambda row: [tell(row) for tell in several]


@lru_cache
def found_extras() -> dict[str, type[Extra]]:
    """Return the extras in dbsl/extras, by the names of their files."""
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
