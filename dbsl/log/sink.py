"""Where a run's records go: metrics.jsonl."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from dbsl.base.errors import SaveError
from dbsl.log.rows import for_people, strict_numbers
from dbsl.run.folder import check_metrics


class Sink:
    """A run's metrics.jsonl, on the main process.

    Epochs count from 1 in it.

    Args:
        folder: The run folder; it exists.
        keep_bytes: Bytes of metrics.jsonl to go on behind.

    Raises:
        SettingError: If the file is shorter than that.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self._folder = folder
        self._file = _open_metrics(folder / "metrics.jsonl", keep_bytes)

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl."""
        self._file.flush()
        return self._file.tell()

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a record, whose epochs count from 0 as in the code."""
        row = strict_numbers({"event": event, **for_people(row)})
        line = json.dumps(row, allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise SaveError(
                f"metrics.jsonl could not be written in {self._folder} ({error.strerror}); the "
                "checkpoints in it are as they were"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk: it was said when the line was written
            self._file.close()


def _open_metrics(path: Path, keep_bytes: int) -> TextIO:
    check_metrics(path, keep_bytes)
    if keep_bytes:
        os.truncate(path, keep_bytes)
    # Line buffering: a killed run leaves whole lines.
    return open(path, "a" if keep_bytes else "w", encoding="utf-8", buffering=1)
