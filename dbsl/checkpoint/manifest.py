"""The manifest of a checkpoint: written last, it makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from dbsl.base.errors import SettingError
from dbsl.base.files import write_text

FORMAT = 1
MANIFEST = "manifest.json"
_FILE_NAME = re.compile(r"rank-\d{5}\.(json|safetensors)|model(_best)?\.safetensors|config\.json")


class CheckpointError(SettingError):
    """A checkpoint that is incomplete, damaged, or does not fit."""


class MissingShardError(CheckpointError):
    """A process has saved no shard: it was lost, or had not come to save."""


def versions() -> dict[str, str]:
    """Return the versions that a checkpoint's bits may depend on."""
    return {"python": sys.version.split()[0], "torch": torch.__version__}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself.

    Attributes:
        sequence: Its number in the run; a later one is newer.
        epoch: Epochs that were complete.
        processes: Processes that wrote it.
        workers: Workers of the run.
        config: The run's settings.
        files: Length and SHA-256 of each file, by name.
        classes: Of the data.
        samples: Training images.
        saved_at: When, UTC.
        versions: Of Python and the libraries that wrote it.
        seconds: Seconds of rank 0: for the copy, which holds training up, and for writing.
    """

    sequence: int
    epoch: int
    processes: int
    workers: int
    config: dict[str, Any]
    files: dict[str, dict[str, Any]]
    classes: int
    samples: int
    saved_at: str = field(default_factory=_now)
    versions: dict[str, str] = field(default_factory=versions)
    seconds: dict[str, float] = field(default_factory=dict)
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint count: all its files are there and on the disk."""
    manifest = replace(manifest, files=dict(sorted(manifest.files.items())))
    body = json.dumps(asdict(manifest), indent=2)
    lines = {"manifest": json.loads(body), "sha256": _digest(body)}
    write_text(folder / MANIFEST, json.dumps(lines, indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest.

    Raises:
        CheckpointError: If there is none, or it is not as it was written.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        body = content["manifest"]
        if content["sha256"] != _digest(json.dumps(body, indent=2)):
            raise CheckpointError(f"{folder} is damaged: its manifest is not as it was written")
        if body["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} must be of format {FORMAT}, which this version reads, "
                f"got {body['format']}"
            )
        manifest = Manifest(**body)
        _check_types(manifest)
    except FileNotFoundError:
        why = "is incomplete: it has no manifest" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {why}") from None
    except CheckpointError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{folder} has a damaged manifest ({reason})") from None
    strange = [name for name in manifest.files if not _FILE_NAME.fullmatch(name)]
    if strange:  # a path that leads out of the folder, for one
        raise CheckpointError(f"{folder} must hold a checkpoint's files only, got {strange[0]!r}")
    return manifest


def _check_types(manifest: Manifest) -> None:
    """Raise ``TypeError`` unless a manifest's values are of the types that they are read as."""
    counts = (manifest.sequence, manifest.epoch, manifest.processes, manifest.workers)
    counts += (manifest.classes, manifest.samples)
    if not all(type(count) is int and 0 <= count < 2**31 for count in counts):
        raise TypeError(f"counts must be whole numbers, got {counts}")
    mappings = (manifest.config, manifest.files, manifest.versions)
    if not all(isinstance(mapping, dict) for mapping in mappings):
        raise TypeError("config, files and versions must be objects")
    if not isinstance(manifest.config.get("resolutions"), list):
        raise TypeError("config must have a list of resolutions")


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode("utf-8")).hexdigest()
