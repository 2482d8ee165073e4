"""Charts of a run: Accelerate's trackers, and one picture in `plots/`.

All come from rows of metrics.jsonl: `python -m dbsl.report RUN` draws a finished run again,
and `--report-to NAME` sends it to a tracker. Metrics of a worker start with its name, as in
``worker 0/loss``. The x axis is epochs, 1, 2, 3 at their ends: workers with different speeds and
batch sizes share it. A tracker that counts whole steps gets thousandths of an epoch.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from tqdm import tqdm

from dbsl.base.errors import in_line, require
from dbsl.base.files import save_figure
from dbsl.base.machine import answers
from dbsl.config.fields import Role
from dbsl.config.hooks import Extra, Row
from dbsl.config.settings import RunConfig
from dbsl.extras.charts.picture import run_figure
from dbsl.log import rows as log_rows
from dbsl.run.folder import settings_in

PROJECT, PICTURE = "dbsl", "plots/run.png"
_STEP = ("loss", "learning_rate", "gradient_norm", "images_per_s", "memory_gib")
_WORKER = ("local_batch_size", "share", "compute_time_s", "wait_time_s", "idle_time_share")
_TOLD = ("plan", "lost", "restart")  # events without metrics of their own
# Not metrics of their event: its position, and what the epoch's times have.
_OF_PLACE = {"event", "epoch", "resolution", "samples", "train_resolution", "learning_rate"}
_OF_PLACE |= {"train_time_s", "virtual_time_s"}


@dataclass(frozen=True)
class ChartSettings(RunConfig):
    """Which trackers."""

    # --- run
    # comma-separated trackers that Accelerate knows and that are installed (wandb, tensorboard,
    # trackio, mlflow, comet_ml, aim, clearml, dvclive, swanlab), or all, or none; wandb works
    # offline without a login or a network
    report_to: Annotated[str, Role.FREE] = "wandb"


class Charts(Extra):
    """The trackers of a run, which all receive the same, and its picture."""

    Settings = ChartSettings

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._trackers: list[GeneralTracker] = []
        self._wandb_id: str | None = None  # for a later session to continue
        self._rounds: defaultdict[int, list[Row]] = defaultdict(list)  # by epoch, unfinished ones

    @classmethod
    def of(cls, config: ChartSettings) -> Charts:
        """Return the charts; refuse an unknown or missing tracker."""
        return cls(tracker_names(config.report_to))

    def state_dict(self) -> dict[str, Any]:
        return {"wandb": self._wandb_id}

    def begin(self, workers: Any, state: Mapping[str, Any], *, same: bool) -> None:
        self._wandb_id = state.get("wandb")

    @contextmanager
    def report(self, folder: Path, rows: Sequence[Row]) -> Iterator[Callable[[Row], object]]:
        """Send rows to each tracker; draw a run that has ended."""
        for row in rows:  # no trackers yet: nothing is sent twice
            self._row(row)
        settings = {name: _plain(value) for name, value in settings_in(folder).items()}
        try:
            for name in self._names:
                if name == "wandb":
                    self._trackers.append(start_wandb(folder, settings, self._wandb_id))
                    self._wandb_id = self._trackers[-1].tracker.id
                else:
                    self._trackers.append(start_tracker(name, PROJECT, folder, settings, {}))
            yield self._row
            try:
                self._draw(folder)
            except OSError as error:  # the run is complete without it
                tqdm.write(f"warning: {PICTURE} could not be drawn ({in_line(error)})")
        finally:
            self._each(lambda tracker: tracker.finish())
            self._trackers = []

    def _row(self, row: Row) -> None:
        event = row["event"]
        if event == "round":
            self._rounds[row["epoch"]].append(row)
        elif event == "times":
            self._epoch(row)
        elif event == "step":
            values = {name: row[name] for name in _STEP} | log_rows.figures_of(row)
            self._log(_of_worker(row["worker"], values), row["epoch"] + row["progress"])
        elif event not in _TOLD:
            values = {name: row[name] for name in row if name not in _OF_PLACE}
            spent = {"time/eval_s": values.pop("time_s")} if "time_s" in values else {}
            self._log({f"{event}/{n}": v for n, v in values.items()} | spent, row["epoch"] + 1)

    def _epoch(self, row: Row) -> None:
        reports = [log_rows.report_from_row(own) for own in self._rounds.pop(row["epoch"], [])]
        times = {n: v for n, v in row.items() if n.endswith("_time_s") and n[:8] != "workers_"}
        shown = {
            "train/loss": log_rows.together(reports)["loss"],
            "train/learning_rate": log_rows.last_learning_rate(reports),
            "train/resolution": row["resolution"],
            "train/images_per_s": row["images_per_s"],
            **{f"train/{n}": v for n, v in log_rows.figures_of(row).items() if n not in times},
            **{f"time/{name.removesuffix('_time_s')}_s": v for name, v in times.items()},
        }
        workers = log_rows.of_workers(sorted(reports, key=lambda report: report.worker))
        for worker, values in workers.items():
            shown |= _of_worker(worker, {name: values[name] for name in _WORKER})
        self._log(shown, row["epoch"] + 1)

    def _log(self, values: Mapping[str, Any], epochs: float) -> None:
        numbers = {n: v for n, v in values.items() if isinstance(v, int | float)}
        finite = {"epoch": epochs} | {n: v for n, v in numbers.items() if math.isfinite(v)}
        steps = round(1000 * epochs)  # for trackers with an integer axis
        # W&B would hold a step back until a later one arrives: its axis is `epoch`.
        self._each(lambda own: own.log(finite, step=None if own.name == "wandb" else steps))

    def _draw(self, folder: Path) -> None:
        save_figure(run_figure(log_rows.read_metrics(folder / "metrics.jsonl")), folder / PICTURE)

    def _each(self, call: Callable[[GeneralTracker], object]) -> None:
        """Call with each tracker; drop one that raises, as when its server is gone."""
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                tqdm.write(f"warning: {tracker.name} gets nothing from now on ({in_line(error)})")
                with suppress(Exception):
                    tracker.finish()


def _of_worker(worker: int, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"worker {worker}/{name}": value for name, value in values.items()}


def tracker_names(report_to: str) -> tuple[str, ...]:
    """Return the trackers that a setting names, each once; for ``all``, the installed ones."""
    installed = tuple(map(str, get_available_trackers()))
    known = sorted({*map(str, LoggerType)} - {"all"})
    names = tuple(dict.fromkeys(report_to.replace(" ", "").split(",")))
    if names in (("none",), ("all",)):
        return installed if names == ("all",) else ()
    text = f"report_to must be none, all or trackers ({', '.join(known)}) with commas between"
    missing = "report_to must name an installed tracker"
    for name in names:
        require(name in known, text, repr(name))
        require(name in installed, missing, f"{name!r} (pip install {name})")
    return names


def start_tracker(
    name: str, project: str, folder: Path, settings: dict[str, Any], own: dict[str, Any]
) -> GeneralTracker:
    """Start a tracker as Accelerate does."""
    kind = LOGGER_TYPE_TO_CLASS[name]
    where = [str(folder)] if kind.requires_logging_directory else []
    tracker = kind(project, *where, **own)
    tracker.start()
    tracker.store_init_configuration(settings)
    return tracker


def start_wandb(folder: Path, settings: dict[str, Any], resume_id: str | None) -> GeneralTracker:
    """Start W&B, offline without a login or an answer from its server.

    It never prompts or waits long. Any ``WANDB_MODE`` except ``online`` takes precedence.
    """
    import wandb

    # Seconds; by default, finishing waits for a lost server without limit. All is on disk anyway.
    quiet = wandb.Settings(silent=True, init_timeout=30, finish_timeout=120)
    mode = os.environ.get("WANDB_MODE", "online")

    def start(mode: str) -> GeneralTracker:
        own = {"dir": str(folder), "mode": mode, "settings": quiet}
        if not os.environ.get("WANDB_NAME"):
            own["name"] = folder.name
        if resume_id is not None:
            own["id"] = resume_id
            if mode == "online":  # offline, the upload joins sessions of one id
                own["resume"] = "allow"
        # W&B reads its other variables itself: entity, group, job type, tags, notes.
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        return start_tracker("wandb", project, folder, settings, own)

    tracker, why = None, f"WANDB_MODE={mode}"
    if mode == "online":
        try:
            why = _why_offline()
            tracker = None if why else start("online")
        except wandb.Error as error:
            why = str(error).partition("\n")[0]
    tracker = tracker or start("offline" if mode == "online" else mode)
    run = tracker.tracker
    run.define_metric("epoch", hidden=True)
    run.define_metric("*", step_metric="epoch")
    if not why:
        print(f"wandb: {run.url}", flush=True)
    elif run.offline:
        # The folder of all sessions of the run: a resumed run adds one.
        command = f"wandb sync {shlex.quote(os.path.relpath(folder / 'wandb'))}"
        print(f"wandb: offline ({why}); to upload: {command}", flush=True)
    return tracker


def _why_offline() -> str:
    import wandb

    session = wandb.setup(wandb.Settings(silent=True))
    if not wandb.login(prompt=False, verify=False):
        return "no login"
    url = session.settings.base_url
    return "" if answers(url) else f"no answer from {url}"


def _plain(value: Any) -> bool | int | float | str:
    """Return a setting in a type that every tracker takes."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return value if isinstance(value, bool | int | float | str) else str(value)
