"""Trackers: one chart for each figure of a run and of its workers.

Every chart's x axis is epochs: an epoch's figures stand at its number, what a worker says on the
way at the share of the epoch that it has done. So workers of unlike speed, and of unlike batches,
share an axis. Where a tracker's axis has whole numbers alone, it counts thousandths of an epoch.

All that is shown comes from rows of metrics.jsonl: `python -m dbsl.report RUN --report-to NAME`
sends a finished run to a tracker.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from PIL import Image
from tqdm import tqdm

from dbsl.base.errors import in_line
from dbsl.base.machine import answers
from dbsl.config.fields import Role, refuse
from dbsl.config.hooks import Extra, Row
from dbsl.config.settings import RunConfig
from dbsl.log import rows as log_rows
from dbsl.plan.types import RESERVED
from dbsl.run.folder import settings_in

PROJECT = "dbsl"
THOUSANDTHS = 1000  # a tracker whose axis has whole numbers alone counts thousandths of an epoch
_STEP = ("loss", "learning_rate", "gradient_norm", "images_per_s", "memory_gib")
# Charts of all workers on W&B, with a line each.
_OVERLAID = {
    "steps": _STEP,
    "workers": ("local_batch_size", "share", "compute_time_s", "wait_time_s", "idle_time_share"),
}
_LINES = 10  # workers of such a chart; of more, as many are shown, evenly spaced
_POINTS = 64  # at most, of a line
# They are sent whole: at intervals that grow with the run.
_OVERLAID_EVERY_S, _OVERLAID_GROWTH = 60.0, 0.1
_TOLD = ("plan", "lost", "joined", "undone", "restart")  # events without figures of their own
# Not figures of their event: where it stands, and what the epoch's times have.
_OF_PLACE = {"event", "epoch", "resolution", "samples", "train_resolution", "learning_rate"}
_OF_PLACE |= {"train_time_s", "virtual_time_s"}


@dataclass(frozen=True)
class ChartSettings(RunConfig):
    """Which trackers."""

    # --- run
    # comma-separated trackers that Accelerate knows and that are installed (wandb, tensorboard,
    # trackio, mlflow, comet_ml, aim, clearml, dvclive, swanlab), all of those, or none; wandb works
    # offline without a login or a network
    report_to: Annotated[str, Role.FREE] = "wandb"


class Charts(Extra):
    """The trackers of a run, each shown the same."""

    Settings = ChartSettings

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._before: Mapping[str, str] = {}  # trackers of the session before, with their ids
        self._shown: list[_Tracker] = []
        self._ids: dict[str, str | None] = {}
        self._totals: dict[int, dict[str, float]] = {}  # plans', by resolution
        self._rounds: defaultdict[int, list[Row]] = defaultdict(list)  # by epoch
        self._epochs, self._live, self._begun = 0, False, False

    @classmethod
    def of(cls, config: ChartSettings) -> Charts | None:
        """Return the charts, unless there are to be none; refuse a tracker that is not there."""
        names = tracker_names(config.report_to)
        return cls(names) if names else None

    def state_dict(self) -> dict[str, Any]:
        return {"trackers": {**self._before, **self._ids}}

    def load_state_dict(self, state: Mapping[str, Any], *, same: bool) -> None:
        self._before = state["trackers"]

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        self._folder = folder
        settings = {name: _plain(value) for name, value in settings_in(folder).items()}
        known = (row for row in rows if row["event"] in ("step", "times"))
        done = max((row["epoch"] + row.get("progress", 1.0) for row in known), default=0.0)
        workers = max((len(row["workers"]) for row in rows if row["event"] == "plan"), default=1)
        last = max(min(workers, _LINES) - 1, 1)
        for name in self._names:
            kind = _WandB if name == "wandb" else _Tracker
            self._shown.append(kind(name, folder, settings, self._before.get(name), done))
            self._ids[name] = self._shown[-1].id
            self._shown[-1].lines = {n * (workers - 1) // last for n in range(last + 1)}
        for row in rows:
            self.row(row)
        self._live = True
        plans = [row for row in rows if row["event"] == "plan" and "from_epoch" not in row]
        table = {r["resolution"]: r["workers"] for r in reversed(plans)}
        own = [{"resolution": r, **worker} for r, each in table.items() for worker in each]
        for shown in self._shown:
            if not shown.resumed:
                shown.table("plan/table", own)

    def row(self, row: Row) -> None:
        if self._live and not self._begun:  # by now the plan is drawn
            self._begun = True
            self._pictures(0.0, again=False)
        event = row["event"]
        if event == "plan":
            self._totals[row["resolution"]] = {name: row[name] for name in log_rows.PLAN_TOTALS}
        elif event == "step":
            values = {name: row[name] for name in _STEP} | log_rows.figures_of(row)
            self._workers("steps", {row["worker"]: values}, row["epoch"] + row["progress"])
        elif event == "round":
            self._rounds[row["epoch"]].append(row)
        elif event == "times":
            self._epoch(row)
        elif event not in _TOLD:
            values = {name: row[name] for name in row if name not in _OF_PLACE}
            spent = {"time/eval_s": values.pop("time_s")} if "time_s" in values else {}
            self._log({f"{event}/{n}": v for n, v in values.items()} | spent, row["epoch"] + 1)

    def _epoch(self, row: Row) -> None:
        reports = [log_rows.report_from_row(own) for own in self._rounds.pop(row["epoch"], [])]
        self._epochs = row["epoch"] + 1
        workers = log_rows.of_workers(sorted(reports, key=lambda report: report.worker))
        times = {n: v for n, v in row.items() if n.endswith("_time_s") and n[:8] != "workers_"}
        values = {
            "loss": log_rows.together(reports)["loss"],
            "learning_rate": log_rows.last_learning_rate(reports),
            "resolution": row["resolution"],
            "images_per_s": row["images_per_s"],
            **{n: v for n, v in log_rows.figures_of(row).items() if n not in times},
        }
        totals = self._totals.get(row["resolution"], {})
        shown = {f"train/{name}": value for name, value in values.items()}
        shown |= {f"time/{name.removesuffix('_time_s')}_s": v for name, v in times.items()}
        shown |= {f"plan/{name}": value for name, value in totals.items()}
        self._log(shown, row["epoch"] + 1)
        self._workers("workers", workers, row["epoch"] + 1)

    def _log(self, values: Mapping[str, Any], epochs: float) -> None:
        if self._live:
            self._each(lambda shown: shown.log(_numbers(values), epochs))

    def _workers(self, kind: str, values: Mapping[int, Mapping[str, Any]], epochs: float) -> None:
        finite = {worker: _numbers(own) for worker, own in values.items()}
        self._each(lambda shown: shown.workers(kind, finite, epochs, live=self._live))

    def _pictures(self, epochs: float, *, again: bool = True) -> None:
        files = {f"plots/{f.stem}": f for f in sorted(self._folder.glob("plots/*.png"))}
        self._each(lambda shown: (again or not shown.resumed) and shown.images(files, epochs))

    def end(self, folder: Path) -> None:
        values = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        self._each(lambda shown: shown.summary(values))

    def close(self, kind: type[BaseException] | None) -> None:
        """Send the pictures of a run that has come to its end, and end the trackers."""
        if kind is None and self._shown:
            self._pictures(self._epochs)
        self._each(lambda shown: shown.close())
        self._each(lambda shown: shown.tracker.finish())
        self._shown = []

    def _each(self, call: Callable[[_Tracker], object]) -> None:
        """Call with each tracker. One that raises, as where its server is gone, is left out."""
        for shown in list(self._shown):
            try:
                call(shown)
            except Exception as error:
                self._shown.remove(shown)
                reason = in_line(error)
                tqdm.write(f"warning: {shown.tracker.name} gets nothing from now on ({reason})")
                with suppress(Exception):
                    shown.tracker.finish()


class _Tracker:
    """A tracker of which nothing is known but that it takes numbers.

    `before` is the id of the session before, if there was one, whose rows reach to `epochs`.
    """

    id = ""  # a later session goes on by it
    lines: Set[int] = frozenset()  # workers that a chart of all of them shows

    def __init__(
        self, name: str, folder: Path, settings: dict[str, Any], before: str | None, epochs: float
    ) -> None:
        self.resumed = before is not None
        own: dict[str, dict[str, Any]] = {
            "dvclive": {"dir": str(folder / "dvclive")},
            "mlflow": {"run_name": folder.name},
            "swanlab": {"experiment_name": folder.name, "logdir": str(folder / "swanlog")},
            # What a session that was killed has shown after its checkpoint is shown no more.
            "tensorboard": {"purge_step": round(THOUSANDTHS * epochs) + self.resumed},
            "trackio": {"name": folder.name} | ({"resume": "allow"} if self.resumed else {}),
        }
        # TensorBoard uses the project's name for its folder.
        project = name if name == "tensorboard" else PROJECT
        self.tracker = start_tracker(name, project, folder, settings, own.get(name, {}))

    def log(self, values: Mapping[str, Any], epochs: float) -> None:
        self.tracker.log({"epoch": epochs, **values}, step=self._step(epochs))

    def workers(
        self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float, *, live: bool
    ) -> None:
        if live:
            self.log(_flat(kind, values), epochs)

    def table(self, name: str, rows: Sequence[Row]) -> None:
        if rows and hasattr(self.tracker, "log_table"):
            data = [list(row.values()) for row in rows]
            self.tracker.log_table(name, columns=list(rows[0]), data=data)

    def images(self, files: Mapping[str, Path], epochs: float) -> None:
        if not hasattr(self.tracker, "log_images"):
            return
        layout = {"dataformats": "NHWC"} if self.tracker.name == "tensorboard" else {}
        for name, file in files.items():
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
            self.tracker.log_images({name: pixels}, step=self._step(epochs), **layout)

    def summary(self, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def _step(self, epochs: float) -> int | None:
        return round(THOUSANDTHS * epochs)


class _WandB(_Tracker):
    """W&B: figures of workers are hidden from automatic charts, and drawn in charts of all."""

    def __init__(
        self, name: str, folder: Path, settings: dict[str, Any], before: str | None, epochs: float
    ) -> None:
        self.resumed, self.tracker = before is not None, start_wandb(folder, settings, before)
        self._points: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(dict)
        self._began = self._sent = time.monotonic()
        self._hidden, self._epochs = set[str](), 0.0
        run = self.tracker.tracker
        self.id = run.id
        run.define_metric("epoch", hidden=True)
        run.define_metric("*", step_metric="epoch")
        for shown in ("eval/accuracy", "eval/ema_accuracy"):
            run.define_metric(shown, step_metric="epoch", summary="max,last")

    def workers(
        self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float, *, live: bool
    ) -> None:
        for worker in values.keys() & self.lines:
            for name, value in values[worker].items():
                if name in _OVERLAID[kind] or name not in RESERVED:  # or a loss function's figure
                    line = self._points[f"{kind}/{name}"].setdefault(worker, [])
                    line.append((epochs, value))
                    if len(line) > 2 * _POINTS:
                        del line[1:-1:2]
        self._epochs = max(self._epochs, epochs)
        if not live:
            return
        flat = _flat(kind, values)
        for name in flat.keys() - self._hidden:  # by its whole name, before any pattern
            self.tracker.tracker.define_metric(name, step_metric="epoch", hidden=True)
        self._hidden |= flat.keys()
        self.log(flat, epochs)
        now = time.monotonic()
        if now - self._sent >= max(_OVERLAID_EVERY_S, _OVERLAID_GROWTH * (now - self._began)):
            self._send()

    def _send(self) -> None:
        import wandb

        charts = {}
        for name, lines in self._points.items():
            thin = {}
            for worker, line in sorted(lines.items()):
                every = -(-len(line) // _POINTS)
                thin[worker] = [*line[:-1:every], line[-1]]
            charts[f"all {name.replace('/', ': ', 1)}"] = wandb.plot.line_series(
                xs=[[x for x, _ in line] for line in thin.values()],
                ys=[[y for _, y in line] for line in thin.values()],
                keys=[f"worker {worker}" for worker in thin],
                title=name.partition("/")[2].replace("_", " "),
                xname="epoch",
            )
        self.log(charts, self._epochs)
        self._sent = time.monotonic()

    def summary(self, values: Mapping[str, Any]) -> None:
        self.tracker.tracker.summary.update(dict(values))

    def close(self) -> None:
        if self._points:
            self._send()

    def _step(self, epochs: float) -> None:
        """W&B would hold a step back until a later one comes."""


def tracker_names(report_to: str) -> tuple[str, ...]:
    """Return the trackers that a setting names, each once; of ``all`` those that are installed."""
    installed = tuple(map(str, get_available_trackers()))
    known = sorted({*map(str, LoggerType)} - {"all"})
    names = tuple(dict.fromkeys(report_to.replace(" ", "").split(",")))
    if names in (("none",), ("all",)):
        return installed if names == ("all",) else ()
    text = f"report_to must be none, all or trackers ({', '.join(known)}) with commas between"
    missing = "report_to must name an installed tracker"
    for name in names:
        refuse([(name not in known, text, repr(name))])
        refuse([(name not in installed, missing, f"{name!r} (pip install {name})")])
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
    """Start W&B; without a login or an answer from its server it works offline.

    It never asks or waits long. ``WANDB_MODE`` decides where it is set to anything but ``online``.
    """
    import wandb

    # Seconds; by default the end waits for a lost server without limit. All is on disk anyway.
    quiet = wandb.Settings(silent=True, init_timeout=30, finish_timeout=120)
    mode = os.environ.get("WANDB_MODE", "online")

    def start(mode: str) -> GeneralTracker:
        own = {"dir": str(folder), "mode": mode, "settings": quiet}
        if not os.environ.get("WANDB_NAME"):
            own["name"] = folder.name
        if resume_id is not None:
            own["id"] = resume_id
            if mode == "online":  # offline, the upload puts sessions of one id together
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
    if not why:
        print(f"wandb: {run.url}", flush=True)
    elif run.offline:
        # The folder of all sessions of the run: a resumed one adds to those before.
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


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {n: v for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}


def _flat(kind: str, values: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return workers' figures by one name each; what is to be compared stands side by side."""
    return {
        f"{kind}/{name}/{worker}": value
        for worker, own in values.items()
        for name, value in own.items()
    }
