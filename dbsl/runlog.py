"""What a run leaves behind: metrics.jsonl, summary.json, tracker records and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in files
and trackers, as they do in the settings, and from 1 in the lines for people.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import numpy as np
from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from PIL import Image
from tqdm import tqdm

from dbsl.checkpoint import write_text
from dbsl.plan import Plan
from dbsl.server import RoundReport
from dbsl.stages import Stage, stage_at

ReportTo = Literal["wandb", "tensorboard", "trackio", "none"]
PROJECT = "dbsl"
MAX_PRINTED_WORKERS = 8


@dataclass(frozen=True)
class Evaluation:
    """The global weights' result on the evaluation set."""

    resolution: int
    accuracy: float  # in [0, 1]
    loss: float  # mean over the samples
    samples: int
    time_s: float


class RunLog:
    """Writes a run's files, feeds its trackers, moves its progress bar and prints its epochs.

    Start the trackers before. The progress bar shows on a terminal only.

    Args:
        folder: The run folder; it exists.
        accelerator: Tells the main process and holds the trackers.
        stages: All stages of the run.
        plans: The plan of each resolution.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        stages: Sequence[Stage],
        plans: Mapping[int, Plan],
    ) -> None:
        self.enabled = accelerator.is_main_process
        if not self.enabled:
            return
        self.folder = folder
        self._accelerator = accelerator
        self._stages = stages
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._train_time_s = 0.0  # at the last epoch's end
        self._epoch = 0  # the last that ended
        # Line buffering: a killed run leaves whole lines.
        self._file = open(folder / "metrics.jsonl", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._bar = tqdm(
            total=sum(plans[stage.resolution].samples * len(stage.epochs) for stage in stages),
            unit=" images",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        for stage in stages:
            self._write("plan", _plan_row(stage, plans[stage.resolution]))
        table = [{"resolution": r, **row} for r in plans for row in _worker_rows(plans[r])]
        for tracker in accelerator.trackers:
            if hasattr(tracker, "log_table"):
                rows = [list(row.values()) for row in table]
                tracker.log_table("plan/table", columns=list(table[0]), data=rows)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def round(
        self,
        report: RoundReport,
        *,
        predicted_time_s: float | None = None,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record a worker's round.

        Args:
            report: What the worker says of it.
            predicted_time_s: The time model's compute time of the round.
            virtual_time_s: The simulated cluster's clock at the round's end.
        """
        if not self.enabled:
            return
        times = {"predicted_time_s": predicted_time_s, "virtual_time_s": virtual_time_s}
        self._write("round", asdict(report) | _given(times))
        self._rounds[report.epoch].append(report)
        self._bar.set_postfix_str(
            f"epoch {report.epoch + 1}/{self._stages[-1].end_epoch}, {report.resolution} px, "
            f"loss {report.loss:.3f}",
            refresh=False,
        )
        self._bar.update(report.samples)

    def epoch_end(
        self,
        epoch: int,
        evaluation: Evaluation | None = None,
        *,
        train_time_s: float,
        learning_rate: float,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record the end of an epoch, evaluated or not: one tracker record, one printed line.

        Args:
            epoch: The epoch; all its rounds have been recorded.
            evaluation: Its evaluation, if there was one.
            train_time_s: Seconds of training so far, without evaluation.
            learning_rate: The epoch's learning rate.
            virtual_time_s: The simulated cluster's clock.
        """
        if not self.enabled:
            return
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        groups = itertools.groupby(reports, key=lambda report: report.worker)
        workers = {worker: _together(list(group)) for worker, group in groups}
        total = _together(reports)
        resolution = stage_at(self._stages, epoch).resolution
        speed = total["samples"] / max(train_time_s - self._train_time_s, 1e-9)
        self._train_time_s, self._epoch = train_time_s, epoch
        record = {
            "epoch": epoch,
            "train/loss": total["loss"],
            "train/learning_rate": learning_rate,
            "train/resolution": resolution,
            "train/images_per_s": speed,
            "time/train_s": train_time_s,
        }
        result = ""
        if evaluation is not None:
            so_far = {"train_time_s": train_time_s, "virtual_time_s": virtual_time_s}
            training = {"learning_rate": learning_rate, "train_resolution": resolution}
            self._write("eval", {"epoch": epoch} | asdict(evaluation) | _given(so_far) | training)
            record["eval/accuracy"] = evaluation.accuracy
            record["eval/loss"] = evaluation.loss
            record["time/eval_s"] = evaluation.time_s
            result = (
                f"  eval accuracy {100 * evaluation.accuracy:.1f} %  loss {evaluation.loss:.3f}"
            )
        if virtual_time_s is not None:
            record["time/virtual_s"] = virtual_time_s
        for worker, values in workers.items():
            record |= {f"worker/{worker}/{name}": value for name, value in values.items()}
        for tracker in self._accelerator.trackers:
            tracker.log(record, step=self._step(tracker))
        epochs = self._stages[-1].end_epoch
        self._print(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {resolution} px  "
            f"lr {learning_rate:.4g}  train loss {total['loss']:.3f}{result}  "
            f"{speed:.0f} images/s  {_times([values['time_s'] for values in workers.values()])}"
        )

    def images(self, files: Mapping[str, Path]) -> None:
        """Send picture files, by their names in the tracker, to the trackers that take any."""
        if not self.enabled:
            return
        for tracker in self._accelerator.trackers:
            if not hasattr(tracker, "log_images"):
                continue
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            for name, file in files.items():
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
                tracker.log_images({name: pixels}, step=self._step(tracker), **layout)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json in one go, hand the values to the trackers and print the result."""
        if not self.enabled:
            return
        text = json.dumps(_strict(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.summary.update(dict(values))
        self._print(f"{_result(values)}  {self.folder}")

    def close(self) -> None:
        """Close the file and the progress bar; `Accelerator.end_training` closes the trackers."""
        if self.enabled:
            self._bar.close()
            self._file.close()

    def _write(self, event: str, row: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(_strict({"event": event, **row}), allow_nan=False) + "\n")

    def _print(self, line: str) -> None:
        tqdm.write(line)  # to stdout; lifts the progress bar out of the way
        sys.stdout.flush()

    def _step(self, tracker: Any) -> int | None:
        # W&B would hold a step back until a later one comes; its axis is the record's epoch.
        return None if tracker.name == "wandb" else self._epoch


def check_tracker(report_to: str) -> None:
    """Raise ``ValueError`` unless the tracker is installed or ``none``."""
    if report_to != "none" and report_to not in map(str, get_available_trackers()):
        raise ValueError(
            f"report_to must name an installed tracker, got {report_to!r} (pip install {report_to})"
        )


def start_trackers(
    accelerator: Accelerator,
    report_to: ReportTo,
    folder: Path,
    run_name: str,
    config: Mapping[str, Any],
) -> None:
    """Start the accelerator's tracker, with its files in the run folder.

    Without a login or an answer from its server W&B works offline; it never asks or waits long.
    ``WANDB_MODE`` decides instead where it is set to anything but ``online``.

    Args:
        accelerator: Gets the tracker, whatever its ``log_with`` was.
        report_to: The tracker.
        folder: The run folder; it exists.
        run_name: Name of the run in the tracker.
        config: The run's settings.
    """
    if report_to == "none" or not accelerator.is_main_process:
        return
    settings = dict(_flatten(config))
    # Not left to Accelerator(log_with=...): the run folder may be known only after that is built.
    accelerator.log_with = filter_trackers(report_to, str(folder))
    accelerator.project_configuration.logging_dir = str(folder)
    if report_to == "tensorboard":  # which uses the project's name for its sub-folder
        accelerator.init_trackers("tensorboard", settings)
    elif report_to == "trackio":
        accelerator.init_trackers(PROJECT, settings, {"trackio": {"name": run_name}})
    else:
        _start_wandb(accelerator, folder, run_name, settings)


def _start_wandb(accelerator: Accelerator, folder: Path, name: str, config: dict[str, Any]) -> None:
    import wandb

    # Seconds; by default the end waits for a lost server without limit. All is on disk anyway.
    quiet = wandb.Settings(silent=True, init_timeout=30, finish_timeout=120)
    mode = os.environ.get("WANDB_MODE", "online")

    def start(mode: str) -> None:
        kwargs = {"name": name, "dir": str(folder), "mode": mode, "settings": quiet}
        accelerator.init_trackers(PROJECT, config, {"wandb": kwargs})

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
    run.define_metric("epoch")
    run.define_metric("*", step_metric="epoch")
    if why is None:
        print(f"wandb: {run.url}", flush=True)
    elif run.offline:
        command = f"wandb sync {shlex.quote(os.path.relpath(run.sync_dir))}"
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


def _plan_row(stage: Stage, plan: Plan) -> dict[str, Any]:
    values = asdict(stage)
    row = {"stage": values.pop("index"), **values, "time_ratio": plan.time_ratio}
    return row | {"workers": _worker_rows(plan)}


def _worker_rows(plan: Plan) -> list[dict[str, Any]]:
    return [{"worker": index, **asdict(worker)} for index, worker in enumerate(plan.workers)]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return what rounds come to together; the loss is the mean over their samples."""
    samples = sum(report.samples for report in reports)
    losses = sum(report.loss * report.samples for report in reports)
    return {
        "loss": losses / samples if samples else math.nan,
        "time_s": sum(report.time_s for report in reports),
        "staleness": sum(report.staleness for report in reports) / max(len(reports), 1),
        "local_batch_size": reports[-1].local_batch_size if reports else 0,
        "samples": samples,
    }


def _times(times_s: Sequence[float]) -> str:
    if len(times_s) > MAX_PRINTED_WORKERS:
        return f"worker times {min(times_s):.1f} to {max(times_s):.1f} s ({len(times_s)} workers)"
    return f"worker times {' '.join(f'{time_s:.1f}' for time_s in times_s)} s"


def _result(values: Mapping[str, Any]) -> str:
    """Return what there is of the result, in one line."""
    formats = {
        "final_accuracy": "accuracy {:.2%}",
        "best_accuracy": "(best {:.2%})",
        "final_loss": "loss {:.3f}",
        "train_time_s": "training {:.1f} s",
        "total_time_s": "of {:.1f} s",
        "images_per_s": "{:.0f} images/s",
    }
    given = [text.format(values[key]) for key, text in formats.items() if key in values]
    return " ".join(given).replace("%", " %")


def _strict(value: Any) -> Any:
    """Return `value` in JSON's own types, with null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
