"""What trackers show: one chart for each figure of the workers, with a line for each worker.

Every chart's x axis is epochs: an epoch's figures stand at its number, what a worker says on the
way at the share of the epoch that it has done. So workers of unlike speed, and of unlike batches,
share an axis. Where a tracker's axis has whole numbers alone, it counts thousandths of an epoch.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from PIL import Image

from dbsl.log.rows import STEP_CHARTS, STEPS, WORKERS, figures_of_workers
from dbsl.plan.turns import RESERVED

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
