"""Writes copies of a run's state to the disk, in a thread, while training goes on.

Every process writes its own shard; rank 0 writes the manifest once all shards are on the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dbsl.base.cores import lower_priority
from dbsl.base.errors import SaveError
from dbsl.base.files import describe, link_or_copy
from dbsl.checkpoint.manifest import Manifest, write_manifest
from dbsl.checkpoint.on_disk import (
    MODEL_FILE,
    prune,
    remove,
    shard_names,
    vouch_for_shard,
    write_shard,
)
from dbsl.cluster.messages import SERVER_RANK
from dbsl.model import BEST, save_model
from dbsl.run.config import CHECKPOINTS
from dbsl.run.session import Session

_BEST_FILE = f"{BEST}.safetensors"
_LAST_PATIENCE_S = 20.0  # for a save under way when the process fails


@dataclass
class Copy:
    """State in host memory, on its way to the disk."""

    name: str
    sequence: int
    epoch: int
    tree: Any
    tensors: dict[str, Tensor]
    model: dict[str, Tensor] | None  # at an epoch's end: the merged model
    time_s: float  # that it took


class Writer:
    """Writes one checkpoint at a time.

    Args:
        session: The run under way.
        last_good: Name of the checkpoint that the run goes on from, if it does.

    Attributes:
        last_good: Name of the last checkpoint that is whole; None: there is none.
    """

    def __init__(self, session: Session, last_good: str | None) -> None:
        self._session = session
        self._run, self._folder = session.run, session.folder
        self._processes = session.accelerator.num_processes
        self._rank = session.accelerator.process_index
        self._control = session.cluster.control
        self.last_good = last_good
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def late(self) -> bool:
        """Whether this process writes in its own time, and nobody waits for its shard."""
        return self._control is None and self._rank != SERVER_RANK

    def start(self, copy: Copy) -> None:
        """Begin to write.

        Raises:
            SaveError: If the disk is full, say.
        """
        target = self._folder / CHECKPOINTS / copy.name
        try:
            self._link_best(target)
        except OSError as error:
            self._failed(target, error)
            self.raise_failure()
        self._thread = threading.Thread(target=self.write, args=(copy,), name="checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written.

        Raises:
            SaveError: If a checkpoint could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failure()

    def end(self) -> None:
        """Let a save under way finish, though the process fails."""
        if self._thread is not None:
            self._thread.join(_LAST_PATIENCE_S)

    def raise_failure(self) -> None:
        """Raise `SaveError` if a checkpoint could not be written."""
        if self._failure is None:
            return
        error, self._failure = self._failure, None
        reason = getattr(error, "strerror", None) or str(error)
        raise SaveError(
            f"a checkpoint could not be written to {self._folder} ({reason}); {self.good()}"
        ) from error

    def good(self) -> str:
        """Return in words which checkpoint there is."""
        if self.last_good is None:
            return "there is no checkpoint"
        return f"the last good checkpoint is {self._folder / CHECKPOINTS / self.last_good}"

    def write(self, copy: Copy) -> None:
        """Write this process's shard and, on rank 0, what makes it a checkpoint."""
        target, began = self._folder / CHECKPOINTS / copy.name, time.perf_counter()
        lower_priority()  # training goes first
        try:
            files = self._write_files(target, copy)
            if self._control is not None:
                files |= self._files_of_all(files)
            elif self.late:
                vouch_for_shard(target, self._rank, files)
            if self._rank == SERVER_RANK:
                manifest = Manifest(
                    sequence=copy.sequence,
                    epoch=copy.epoch,
                    processes=self._processes,
                    workers=self._run.config.workers,
                    config=asdict(self._run.config),
                    classes=self._run.data.num_classes,
                    samples=len(self._run.data.train),
                    files=files,
                    seconds={"copy": copy.time_s, "write": time.perf_counter() - began},
                )
                write_manifest(target, manifest)
        except Exception as error:
            if self.late and not target.exists():
                return  # newer checkpoints are complete, and this one was removed
            self._failed(target, error)
            return
        self.last_good = copy.name  # it is whole: whatever fails from here on, it stays
        if self._rank == SERVER_RANK:
            mirror, keep = self._session.mirror, self._run.config.keep_checkpoints
            prune(self._folder, max(1, keep), mirror.uploading)
            mirror.wake()

    def _write_files(self, target: Path, copy: Copy) -> dict[str, dict[str, Any]]:
        """Write this process's files; return what the manifest will say of them."""
        files = write_shard(target, self._rank, copy.tree, copy.tensors)
        if copy.model is not None:
            data, resolution = self._run.data, self._run.config.resolutions[-1]
            save_model(self._run.model, target, resolution, data, state=copy.model)
            for name in (MODEL_FILE, "config.json"):
                if (target / name).exists():  # a model of one's own has no config.json
                    files[name] = describe(target / name)
        if self._rank == SERVER_RANK and (target / _BEST_FILE).exists():
            files[_BEST_FILE] = describe(target / _BEST_FILE)
        return files

    def _link_best(self, target: Path) -> None:
        """Keep the best weights of now: a later epoch may replace them before all is written."""
        best = self._folder / _BEST_FILE
        if self._rank == SERVER_RANK and best.exists():
            link_or_copy(best, target / _BEST_FILE)

    def _failed(self, target: Path, error: Exception) -> None:
        self._failure = error
        if self._rank == SERVER_RANK:
            remove(target)

    def _files_of_all(self, files: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return what every process has written, once all have (a collective)."""
        own = shard_names(self._rank)
        row = [[files[name]["bytes"], *bytes.fromhex(files[name]["sha256"])] for name in own]
        rows = self._control.gather_rows(torch.tensor(row, dtype=torch.int64))
        return {
            name: {"bytes": numbers[0], "sha256": bytes(numbers[1:]).hex()}
            for rank, of_rank in enumerate(rows)
            for name, numbers in zip(shard_names(rank), of_rank.tolist(), strict=True)
        }
