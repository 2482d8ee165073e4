"""Trackers: which are there, and how to start one that never keeps a run waiting.

What trackers show: one chart for each figure of the workers, with a line for each worker.

Every chart's x axis is epochs: an epoch's figures stand at its number, what a worker says on the
way at the share of the epoch that it has done. So workers of unlike speed, and of unlike batches,
share an axis. Where a tracker's axis has whole numbers alone, it counts thousandths of an epoch.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import math
import os
import shlex
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, filter_trackers, get_available_trackers
from accelerate.utils import LoggerType
from PIL import Image

from dbsl.base.errors import SettingError
from dbsl.log.rows import STEP_CHARTS, STEPS, WORKERS, figures_of_workers
from dbsl.plan.types import RESERVED

PROJECT = "dbsl"


def check_tracker(report_to: str) -> None:
    """Raise ``SettingError`` unless it names installed trackers of Accelerate's, or ``none``."""
    tracker_names(report_to)


def tracker_names(report_to: str) -> tuple[str, ...]:
    """Return the trackers that a setting names, each once; of ``all`` those that are installed.

    Raises:
        SettingError: If it names one that Accelerate does not know, or that is not installed.
    """
    installed = tuple(map(str, get_available_trackers()))
    known = sorted({*map(str, LoggerType)} - {"all"})
    names = tuple(dict.fromkeys(report_to.replace(" ", "").split(",")))
    if names in (("none",), ("all",)):
        return installed if names == ("all",) else ()
    for name in names:
        if name not in known:
            raise SettingError(
                f"report_to must be none, all or trackers ({', '.join(known)}) with commas "
                f"between, got {name!r}"
            )
        if name not in installed:
            raise SettingError(
                f"report_to must name an installed tracker, got {name!r} (pip install {name})"
            )
    return names


def start_trackers(
    accelerator: Accelerator,
    report_to: str,
    folder: Path,
    run_name: str,
    config: Mapping[str, Any],
    *,
    resumed: Mapping[str, str] | None = None,
    epochs: int = 0,
) -> None:
    """Start the accelerator's trackers, with their files in the run folder.

    Without a login or an answer from its server W&B works offline; it never asks or waits long.
    ``WANDB_MODE`` decides instead where it is set to anything but ``online``.

    Args:
        accelerator: Gets the trackers, whatever its ``log_with`` was.
        report_to: The trackers, as `check_tracker` takes them.
        folder: The run folder; it exists.
        run_name: Name of the run in the trackers.
        config: The run's settings.
        resumed: What `tracker_ids` returned in the session before, whose charts go on.
        epochs: Epochs that are complete.
    """
    if not accelerator.is_main_process:
        return
    settings, started, resumed = dict(_flatten(config)), [], resumed or {}
    accelerator.project_configuration.logging_dir = str(folder)
    for name in tracker_names(report_to):
        # Not left to Accelerator(log_with=...): the run folder may be known only after that is
        # built. One after the other: it would start those that are there once more.
        accelerator.log_with = filter_trackers(name, str(folder))
        accelerator.trackers = []
        if name == "tensorboard":  # which uses the project's name for its sub-folder
            # What a session that was killed has shown after its checkpoint is shown no more.
            own = {"purge_step": THOUSANDTHS * epochs + (name in resumed)}
            accelerator.init_trackers("tensorboard", settings, {name: own})
        elif name == "trackio":
            own = {
                "name": run_name,
                "group": run_name,
            }  # with its workers: see `dbsl.extras.charts`
            own |= {"resume": "allow"} if name in resumed else {}
            accelerator.init_trackers(PROJECT, settings, {name: own})
        elif name == "wandb":
            _start_wandb(accelerator, folder, run_name, settings, resumed.get(name))
        else:
            own = {
                "dvclive": {"dir": str(folder / "dvclive")},
                "mlflow": {"run_name": run_name},
                "swanlab": {"experiment_name": run_name, "logdir": str(folder / "swanlog")},
            }
            accelerator.init_trackers(PROJECT, settings, {name: own.get(name, {})})
        started += accelerator.trackers
    accelerator.trackers = started


def tracker_ids(accelerator: Accelerator) -> dict[str, str]:
    """Return the trackers' names, with what a later session needs to go on in their charts."""
    trackers = accelerator.trackers
    return {own.name: own.tracker.id if own.name == "wandb" else "" for own in trackers}


def _start_wandb(
    accelerator: Accelerator,
    folder: Path,
    name: str,
    config: dict[str, Any],
    resume_id: str | None,
) -> None:
    import wandb

    # Seconds; by default the end waits for a lost server without limit. All is on disk anyway.
    quiet = wandb.Settings(silent=True, init_timeout=30, finish_timeout=120)
    mode = os.environ.get("WANDB_MODE", "online")

    def start(mode: str) -> None:
        kwargs = {"dir": str(folder), "mode": mode, "settings": quiet}
        if not os.environ.get("WANDB_NAME"):
            kwargs["name"] = name
        if resume_id is not None:
            kwargs["id"] = resume_id
            if mode == "online":  # offline, the upload puts sessions of one id together
                kwargs["resume"] = "allow"
        # W&B reads its other variables itself: entity, group, job type, tags, notes.
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        accelerator.init_trackers(project, config, {"wandb": kwargs})

    why = f"WANDB_MODE={mode}" if mode != "online" else _why_offline()
    if why is None:
        try:
            start("online")
        except wandb.Error as error:
            accelerator.trackers.clear()
            why = str(error).partition("\n")[0]
    if why is not None:
        start("offline" if mode == "online" else mode)
    run = accelerator.get_tracker("wandb", unwrap=True)
    if why is None:
        print(f"wandb: {run.url}", flush=True)
    elif run.offline:
        # The folder of all sessions of the run: a resumed one adds to those before.
        command = f"wandb sync {shlex.quote(os.path.relpath(folder / 'wandb'))}"
        print(f"wandb: offline ({why}); to upload: {command}", flush=True)


def _why_offline() -> str | None:
    """Return why W&B cannot be reached, or None; asks nothing, waits 2 s at most."""
    import wandb

    session = wandb.setup(wandb.Settings(silent=True))
    try:
        if not wandb.login(prompt=False, verify=False):
            return "no login"
    except wandb.Error as error:
        return str(error).partition("\n")[0]
    url = session.settings.base_url
    return None if _answers(url, timeout_s=2.0) else f"no answer from {url}"


def _answers(url: str, timeout_s: float) -> bool:
    """Whether a connection to the URL's host, or to the proxy in front of it, opens in time."""
    host = urlsplit(url)
    proxy = getproxies().get(host.scheme)
    if proxy and not proxy_bypass(host.hostname):
        host = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    address = (host.hostname, host.port or (443 if host.scheme == "https" else 80))
    answered = threading.Event()

    def connect() -> None:
        with suppress(OSError), socket.create_connection(address, timeout_s):
            answered.set()

    # Looking a name up has no timeout: a thread that may be left behind bounds it.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return answered.is_set()


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings in the types that every tracker takes: bool, int, float, str."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list | tuple):
            yield f"{prefix}{key}", ",".join(map(str, value))
        else:
            plain = isinstance(value, bool | int | float | str)
            yield f"{prefix}{key}", value if plain else str(value)


THOUSANDTHS = 1000  # a tracker whose axis has whole numbers alone counts thousandths of an epoch
_LINES = 10  # workers of a chart; of more, as many are shown, evenly spaced
# Charts of all workers on W&B, whose own have a line each. They are sent whole, so that they come
# at intervals that grow with the run, and their cost stays below this share of its time.
OVERLAID = {
    STEPS: STEP_CHARTS,
    WORKERS: ("local_batch_size", "share", "compute_time_s", "wait_time_s", "idle_time_share"),
}
_OVERLAID_EVERY_S, _OVERLAID_COST, _OVERLAID_GROWTH = 60.0, 0.002, 0.1
_POINTS = 64  # at most, of a line of such a chart


class Charts:
    """The trackers of a run, each shown the same.

    Args:
        accelerator: Has the trackers; they are started.
        workers: Workers of the run.
        group: The run's name, of which each worker's series are a part.
        resumed: Names of those that a session before has shown the run to.
    """

    def __init__(
        self, accelerator: Accelerator, workers: int, group: str, resumed: Collection[str] = ()
    ) -> None:
        self._trackers = [
            _KINDS.get(own.name, _Tracker)(own, _spread(workers), group, own.name in resumed)
            for own in accelerator.trackers
        ]

    def record(self, values: Mapping[str, float], epochs: float) -> None:
        """Record figures of the run at a moment, in epochs since its start."""
        for tracker in self._trackers:
            tracker.log(values, epochs)

    def workers(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        """Record figures of workers, by worker and name; what is not finite is left out."""
        finite = {
            worker: {name: value for name, value in own.items() if math.isfinite(value)}
            for worker, own in values.items()
        }
        for tracker in self._trackers:
            tracker.workers(kind, finite, epochs)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the workers' figures of the sessions before from the records of metrics.jsonl."""
        for tracker in self._trackers:
            tracker.resume(records)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]], *, again: bool = True) -> None:
        """Send a table, a mapping for each row, to the trackers that take any.

        Not `again`: not to those that a session before has shown the run to.
        """
        for tracker in self._trackers:
            if again or not tracker.resumed:
                tracker.table(name, rows)

    def images(self, files: Mapping[str, Path], epochs: float, *, again: bool = True) -> None:
        """Send picture files, by their names in the tracker, to the trackers that take any.

        `again` is as with tables.
        """
        for tracker in self._trackers:
            if again or not tracker.resumed:
                tracker.images(files, epochs)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Send what the run came to, to the trackers that have a place for it."""
        for tracker in self._trackers:
            tracker.summary(values)

    def close(self, *, failed: bool = False) -> None:
        """End what was begun here; of a run that failed the trackers themselves, too.

        `Accelerator.end_training` ends those of a run that did not.
        """
        for tracker in self._trackers:
            # What ended the run is to be told, not what a tracker says then.
            with contextlib.suppress(Exception) if failed else contextlib.nullcontext():
                tracker.close()
                if failed:
                    tracker.tracker.finish()


class _Tracker:
    """A tracker of which nothing is known but that it takes numbers."""

    def __init__(
        self, tracker: GeneralTracker, shown: Sequence[int], group: str, resumed: bool
    ) -> None:
        self.tracker, self.resumed = tracker, resumed
        self._shown, self._group = shown, group

    def log(self, values: Mapping[str, Any], epochs: float) -> None:
        step = round(THOUSANDTHS * epochs)
        self.tracker.log({"epoch": epochs, **values}, step=step)

    def workers(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        self.log(_flat(kind, values), epochs)

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None: ...

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        if hasattr(self.tracker, "log_table"):
            columns = list(rows[0])
            self.tracker.log_table(name, columns=columns, data=[list(r.values()) for r in rows])

    def images(self, files: Mapping[str, Path], epochs: float, **layout: str) -> None:
        if not hasattr(self.tracker, "log_images"):
            return
        for name, file in files.items():
            with Image.open(file) as image:
                pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
            self.tracker.log_images({name: pixels}, step=self._step(epochs), **layout)

    def summary(self, values: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...

    def _step(self, epochs: float) -> int | None:
        return round(THOUSANDTHS * epochs)


class _TensorBoard(_Tracker):
    """TensorBoard overlays runs: each worker is one, in a folder of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._writers: dict[int, Any] = {}
        self._last: dict[int, int] = {}  # step of a worker that sessions before have shown

    def log(self, values: Mapping[str, Any], epochs: float) -> None:
        self.tracker.log(dict(values), step=self._step(epochs))

    def workers(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        for worker in values.keys() & {*self._shown}:
            if worker not in self._writers:
                main = self.tracker.tracker
                folder = f"{main.log_dir}/worker-{worker}"
                # What a session that was killed has shown after its checkpoint is shown no more.
                own = {"purge_step": self._last.get(worker, -1) + 1}
                self._writers[worker] = type(main)(folder, flush_secs=10, **own)
            for name, value in values[worker].items():
                self._writers[worker].add_scalar(f"{kind}/{name}", value, self._step(epochs))

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        for _, worker, _, epochs in figures_of_workers(records):
            self._last[worker] = max(self._last.get(worker, 0), self._step(epochs))

    def images(self, files: Mapping[str, Path], epochs: float, **_: str) -> None:
        super().images(files, epochs, dataformats="NHWC")

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class _Trackio(_Tracker):
    """trackio overlays runs: each worker is one, in a group with the run's own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._runs: dict[int, Any] = {}

    def workers(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        for worker in sorted(values.keys() & {*self._shown}):
            if worker not in self._runs:
                self._runs[worker] = self._begin(f"{self.tracker.tracker.name} worker {worker}")
            record = {f"{kind}/{name}": value for name, value in values[worker].items()}
            self._runs[worker].log({"epoch": epochs, **record}, step=self._step(epochs))

    def _begin(self, name: str) -> Any:
        import trackio

        # trackio ends the run of its context when another begins: this one has its own context.
        begin = contextvars.Context().run
        with contextlib.redirect_stdout(io.StringIO()):
            return begin(
                trackio.init,
                project=self.tracker.run_name,
                name=name,
                group=self._group,
                resume="allow" if self.resumed else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        import trackio

        table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.tracker.tracker.log({name: table}, step=0)

    def images(self, files: Mapping[str, Path], epochs: float, **_: str) -> None:
        import trackio

        pictures = {name: trackio.Image(str(file)) for name, file in files.items()}
        self.tracker.tracker.log(pictures, step=self._step(epochs))

    def close(self) -> None:
        for run in self._runs.values():
            with contextlib.redirect_stdout(io.StringIO()):
                run.finish()


class _WandB(_Tracker):
    """W&B: figures of workers are hidden from automatic charts, and drawn in charts of all."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lines: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(dict)
        self._began = self._sent = time.monotonic()
        self._spent_s, self._new, self._epochs = 0.0, False, 0.0
        self._hidden: set[str] = set()
        run = self.tracker.tracker
        run.define_metric("epoch", hidden=True)
        run.define_metric("*", step_metric="epoch")
        for name in ("eval/accuracy", "eval/ema_accuracy"):
            run.define_metric(name, step_metric="epoch", summary="max,last")

    def log(self, values: Mapping[str, Any], epochs: float) -> None:
        # Without a step: W&B would hold one back until a later one comes.
        self.tracker.log({"epoch": epochs, **values})

    def workers(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        flat = _flat(kind, values)
        for name in flat.keys() - self._hidden:  # by its whole name, before any pattern
            self.tracker.tracker.define_metric(name, step_metric="epoch", hidden=True)
        self._hidden |= flat.keys()
        self.log(flat, epochs)
        self._keep(kind, values, epochs)
        now = time.monotonic()
        wait = max(
            _OVERLAID_EVERY_S,
            self._spent_s / _OVERLAID_COST,
            _OVERLAID_GROWTH * (now - self._began),
        )
        if now - self._sent >= wait:
            self._send()

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        for kind, worker, values, epochs in figures_of_workers(records):
            self._keep(kind, {worker: values}, epochs)

    def _keep(self, kind: str, values: Mapping[int, Mapping[str, float]], epochs: float) -> None:
        for worker in values.keys() & {*self._shown}:
            for name in values[worker]:
                if name in OVERLAID[kind] or name not in RESERVED:  # or a loss function's figure
                    line = self._lines[f"{kind}/{name}"].setdefault(worker, [])
                    line.append((epochs, values[worker][name]))
                    if len(line) > 2 * _POINTS:
                        del line[1:-1:2]
        self._new, self._epochs = True, max(self._epochs, epochs)

    def _send(self) -> None:
        """Send each figure's chart of all workers."""
        import wandb

        began, charts = time.monotonic(), {}
        for name, lines in self._lines.items():
            thin = {worker: _thinned(lines[worker]) for worker in sorted(lines)}
            charts[f"all {name.replace('/', ': ', 1)}"] = wandb.plot.line_series(
                xs=[[x for x, _ in line] for line in thin.values()],
                ys=[[y for _, y in line] for line in thin.values()],
                keys=[f"worker {worker}" for worker in thin],
                title=name.partition("/")[2].replace("_", " "),
                xname="epoch",
            )
        self.log(charts, self._epochs)
        self._sent, self._new = time.monotonic(), False
        self._spent_s = self._sent - began

    def images(self, files: Mapping[str, Path], epochs: float, **_: str) -> None:
        super().images(files, epochs)

    def summary(self, values: Mapping[str, Any]) -> None:
        self.tracker.tracker.summary.update(dict(values))

    def close(self) -> None:
        if self._new:
            self._send()

    def _step(self, epochs: float) -> int | None:
        return None


_KINDS = {"tensorboard": _TensorBoard, "trackio": _Trackio, "wandb": _WandB}


def _flat(kind: str, values: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Return workers' figures by one name each; what is to be compared stands side by side."""
    return {
        f"{kind}/{name}/{worker}": value
        for worker, own in values.items()
        for name, value in own.items()
    }


def _spread(workers: int) -> list[int]:
    """Return the workers that charts have lines for: all, or of many some, evenly spaced."""
    count = min(workers, _LINES)
    return [index * (workers - 1) // max(count - 1, 1) for index in range(count)]


def _thinned(line: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    every = -(-len(line) // _POINTS)
    return [*line[:-1:every], line[-1]]
