"""Checkpoints on disk: a folder with a shard per process, and a manifest, written last.

A shard is a JSON tree and a safetensors file; nothing is ever unpickled. A folder without a
manifest is no checkpoint. Every file is checked against the manifest's checksum before use;
any error after that becomes a `CheckpointError` (`reading_checkpoint`).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from dbsl.base.errors import SaveError, SettingError
from dbsl.base.files import describe, write_text, write_with
from dbsl.config.settings import CHECKPOINTS
from dbsl.model import FINAL

FORMAT = 4
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"rank-\d{5}\.(json|safetensors)|model(_best)?\.safetensors|config\.json")
MODEL_FILE = f"{FINAL}.safetensors"  # only checkpoints of an epoch's end hold it
_ABANDONED = ".old"
_TENSOR, _TUPLE, _PAIRS, _DTYPE = "__tensor__", "__tuple__", "__pairs__", "__dtype__"


class CheckpointError(SettingError):
    """A checkpoint that is incomplete, damaged, or does not fit."""


@contextmanager
def reading_checkpoint(folder: Path) -> Iterator[None]:
    """Raise `CheckpointError` for any error inside except those of the disk or settings."""
    try:
        yield
    except (SettingError, SaveError, OSError):
        raise
    except Exception as error:  # the checkpoint's values may be anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise CheckpointError(f"{folder} does not fit this run ({reason[:300]})") from error


# --- state as JSON and tensors, lossless: dicts, lists, tuples, numbers, strings, dtypes, None


def pack(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return a tree for JSON and the tensors it names, copied to host memory.

    The copies are contiguous in dimension order; tensors that are the same view of the same memory
    share one copy.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[tuple, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, bool | int | float | str | None):
            return value
        if isinstance(value, np.generic):
            return walk(value.item())
        if isinstance(value, Tensor):
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)
            if not value.numel() or key not in names:
                names[key] = str(len(tensors))
                copy = torch.empty(value.shape, dtype=value.dtype)  # as safetensors requires
                tensors[names[key]] = copy.copy_(value.detach())
            return {_TENSOR: names[key]}
        if isinstance(value, torch.dtype):
            return {_DTYPE: str(value).removeprefix("torch.")}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, tuple):
            return {_TUPLE: [walk(item) for item in value]}
        if isinstance(value, dict):
            if all(isinstance(key, str) for key in value):
                return {key: walk(item) for key, item in value.items()}
            return {_PAIRS: [[walk(key), walk(item)] for key, item in value.items()]}
        raise TypeError(f"state must be of plain values and tensors, got {type(value).__name__}")

    return walk(state), tensors


def unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that `pack` received, with tensors in host memory."""
    if isinstance(tree, list):
        return [unpack(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if set(tree) == {_TENSOR}:
        return tensors[tree[_TENSOR]]
    if set(tree) == {_DTYPE}:
        return torch.empty(0, dtype=getattr(torch, tree[_DTYPE])).dtype  # else TypeError
    if set(tree) == {_TUPLE}:
        return tuple(unpack(item, tensors) for item in tree[_TUPLE])
    if set(tree) == {_PAIRS}:
        return {unpack(k, tensors): unpack(v, tensors) for k, v in tree[_PAIRS]}
    return {key: unpack(item, tensors) for key, item in tree.items()}


# --- the manifest


def versions() -> dict[str, str]:
    """Return the versions on which a checkpoint's bits may depend."""
    return {"python": sys.version.split()[0], "torch": torch.__version__}


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description of itself and its run."""

    sequence: int  # its number in the run; a higher one is newer
    epoch: int  # complete epochs
    processes: int  # of the run
    workers: int
    config: dict[str, Any]  # the run's settings
    files: dict[str, dict[str, Any]]  # length and SHA-256, by name
    classes: int  # in the data
    samples: int  # training images
    data: str = ""  # identifies the training samples; empty: their settings do
    held_out: str = ""  # which images were not trained on; see `dbsl.data.dataset.Data`
    saved_at: str = field(
        default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds")
    )
    versions: dict[str, str] = field(default_factory=versions)
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which completes a checkpoint: all its files are on the disk."""
    body = asdict(replace(manifest, files=dict(sorted(manifest.files.items()))))
    content = {"manifest": body, "sha256": _digest(body)}
    write_text(folder / MANIFEST, json.dumps(content, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; raise `CheckpointError` if it has changed."""
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = content["manifest"]
        if content["sha256"] != _digest(body):
            raise ValueError("it is not as it was written")
        if body["format"] != FORMAT:
            raise ValueError(
                f"it must be of format {FORMAT}, which this version reads, got {body['format']}"
            )
        manifest = Manifest(**body)
        for known in fields(Manifest):  # anyone can write a valid checksum
            value, kind = getattr(manifest, known.name), known.type.partition("[")[0]
            if type(value).__name__ != kind:
                raise TypeError(f"{known.name} must be of type {kind}, got {value!r}")
        # A path could lead out of the folder.
        if strange := [name for name in manifest.files if not _FILE_NAME.fullmatch(name)]:
            raise ValueError(f"it must hold a checkpoint's files only, got {strange[0]!r}")
    except FileNotFoundError:
        why = "is incomplete: it has no manifest" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {why}") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder} has a damaged manifest ({reason})") from None
    return manifest


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, indent=2).encode("utf-8")).hexdigest()


# --- shards


def shard_names(rank: int) -> list[str]:
    """Return the names of a process's files."""
    return [f"rank-{rank:05d}.{kind}" for kind in ("json", "safetensors")]


def write_shard(
    folder: Path, rank: int, tree: Any, tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Write one process's files and return their entries in the manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    text, weights = (folder / name for name in shard_names(rank))
    write_text(text, json.dumps(tree))
    write_with(weights, lambda temporary: save_file(dict(tensors), temporary))
    shutil.copymode(text, weights)  # safetensors lets only the owner read it
    return {path.name: describe(path) for path in (text, weights)}


# --- the checkpoints of a run


@dataclass(frozen=True)
class Found:
    """A checkpoint to resume from."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def at(folder: Path) -> Found:
        """Return the checkpoint in a folder without checking its files."""
        return Found(folder, read_manifest(folder))

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise `CheckpointError` if any of these files, or of all, has changed."""
        for name in self.manifest.files if names is None else names:
            path = self.folder / name
            try:
                if describe(path) == self.manifest.files[name]:
                    continue
                why = "is not as it was written"
            except OSError as error:
                why = f"({error.strerror})"
            raise CheckpointError(f"{self.folder} is damaged: {name} {why}")

    def shard(self, rank: int) -> Any:
        """Return the state that a process saved, with tensors in host memory."""
        names = shard_names(rank)
        self.check(names)
        text, weights = (self.folder / name for name in names)
        tree = json.loads(text.read_text(encoding="utf-8"))
        # A file's tensors may start anywhere; clones are aligned like a run's own. With another
        # alignment, sums may differ in their last bits.
        return unpack(tree, {name: each.clone() for name, each in load_file(weights).items()})


def newest(run_folder: Path, warn: Callable[[str], object] = lambda line: None) -> Found | None:
    """Return the newest checkpoint with all its files unchanged, or None.

    `warn` receives a line for each skipped checkpoint.
    """
    for found in checkpoints_in(run_folder, warn):
        try:
            found.check()
            return found
        except CheckpointError as error:
            warn(f"skipped: {error}")
    return None


def checkpoints_in(
    run_folder: Path, warn: Callable[[str], object] = lambda line: None
) -> list[Found]:
    """Return checkpoints with a good manifest, newest first, without checking their files."""
    complete = []
    for folder in sorted(_folders(run_folder)):
        try:
            complete.append(Found.at(folder))
        except CheckpointError as error:
            if (folder / MANIFEST).exists():
                warn(f"skipped: {error}")
    return sorted(complete, key=lambda found: found.manifest.sequence, reverse=True)


def prune(run_folder: Path, keep: int) -> None:
    """Remove all complete checkpoints except the newest `keep`.

    Incomplete ones remain: other processes may be writing the next. One that cannot be removed
    remains with a warning: that is no reason to end a run.
    """
    for folder in (found.folder for found in checkpoints_in(run_folder)[keep:]):
        try:
            remove(folder)
        except OSError as error:
            tqdm.write(f"warning: {folder} could not be removed ({error.strerror or error})")


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a partial one is never used."""
    (folder / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def set_aside_after(run_folder: Path, sequence: int) -> list[Path]:
    """Rename checkpoints newer than the one that a run resumes; return their new paths.

    Incomplete checkpoints are removed: no process may be writing one now.
    """
    sequences = {found.folder: found.manifest.sequence for found in checkpoints_in(run_folder)}
    renamed = []
    for folder in _folders(run_folder):
        if not (folder / MANIFEST).exists():
            remove(folder)
        elif sequences.get(folder, math.inf) > sequence:  # also if its manifest is damaged
            target = folder.with_name(folder.name + _ABANDONED)
            shutil.rmtree(target, ignore_errors=True)
            renamed.append(folder.replace(target))
    return renamed


def _folders(run_folder: Path) -> list[Path]:
    parent = run_folder / CHECKPOINTS
    if not parent.is_dir():
        return []
    # A link may lead out of the run folder.
    folders = (f for f in parent.iterdir() if f.is_dir() and not f.is_symlink())
    return [folder for folder in folders if folder.suffix != _ABANDONED]
