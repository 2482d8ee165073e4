"""Where a run's records go: metrics.jsonl, and the trackers that Accelerate has started."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from accelerate import Accelerator
from PIL import Image

from dbsl.base.errors import SaveError
from dbsl.log.rows import strict_numbers
from dbsl.log.trackers import tracker_id
from dbsl.run.folder import check_metrics


class Sink:
    """A run's metrics.jsonl and its trackers, on the main process.

    Args:
        folder: The run folder; it exists.
        accelerator: Holds the trackers.
        keep_bytes: Bytes of metrics.jsonl to go on behind.

    Raises:
        ValueError: If the file is shorter than that.
    """

    def __init__(self, folder: Path, accelerator: Accelerator, keep_bytes: int = 0) -> None:
        self._folder, self._accelerator = folder, accelerator
        self._file = _open_metrics(folder / "metrics.jsonl", keep_bytes)

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl."""
        self._file.flush()
        return self._file.tell()

    @property
    def tracker_id(self) -> str | None:
        """What a later session needs to go on in the same charts."""
        return tracker_id(self._accelerator)

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl."""
        line = json.dumps(strict_numbers({"event": event, **row}), allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise SaveError(
                f"metrics.jsonl could not be written in {self._folder} ({error.strerror}); the "
                "checkpoints in it are as they were"
            ) from error

    def chart(self, values: Mapping[str, Any], step: int) -> None:
        """Give the trackers values; they have ``epoch``, which is W&B's axis."""
        for tracker in self._accelerator.trackers:
            tracker.log(dict(values), step=_step(tracker, step))

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Give a table to the trackers that take any."""
        for tracker in self._accelerator.trackers:
            if hasattr(tracker, "log_table"):
                data = [list(row.values()) for row in rows]
                tracker.log_table(name, columns=list(rows[0]), data=data)

    def images(self, files: Mapping[str, Path], step: int) -> None:
        """Give picture files, by their names in the tracker, to the trackers that take any."""
        for tracker in self._accelerator.trackers:
            if not hasattr(tracker, "log_images"):
                continue
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            for name, file in files.items():
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
                tracker.log_images({name: pixels}, step=_step(tracker, step), **layout)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Give the result to the trackers that keep one."""
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.summary.update(dict(values))

    def finish_trackers(self) -> None:
        """End the trackers of a run that ends before its time."""
        for tracker in self._accelerator.trackers:
            tracker.finish()

    def close(self) -> None:
        """Close the file; `Accelerator.end_training` closes the trackers."""
        with suppress(OSError):  # a full disk: it was said when the line was written
            self._file.close()


def _step(tracker: Any, step: int) -> int | None:
    # W&B would hold a step back until a later one comes; its axis is the record's epoch.
    return None if tracker.name == "wandb" else step


def _open_metrics(path: Path, keep_bytes: int) -> TextIO:
    check_metrics(path, keep_bytes)
    if keep_bytes:
        os.truncate(path, keep_bytes)
    # Line buffering: a killed run leaves whole lines.
    return open(path, "a" if keep_bytes else "w", encoding="utf-8", buffering=1)
