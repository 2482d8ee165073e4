"""A run brought back from its mirror: the newest whole checkpoint, and what its run needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.checkpoint.manifest import MANIFEST
from dbsl.checkpoint.mirror import NEEDED, remember_mirror
from dbsl.cluster.collectives import share_text
from dbsl.cluster.launch import remember
from dbsl.run.bucket import (
    LISTING,
    RUN,
    Bucket,
    DamagedError,
    Listing,
    refusing,
    tried,
    url_to_pull,
)
from dbsl.run.config import CHECKPOINTS, RunConfig
from dbsl.run.folder import default_folder
from dbsl.run.parse import RUN_FOLDER


def pulled(config: RunConfig, accelerator: Accelerator) -> RunConfig:
    """Bring a run that is at a URL into a new folder; return the config that goes on in there.

    Raises:
        SettingError: On every process, if the URL cannot be read or has no whole checkpoint, or the
            folder is there already.
    """
    url = url_to_pull(config.resume, config.output_dir, config.mirror)
    if url is None or config.plan_only:
        return config
    path, error = "", ""
    if accelerator.is_main_process:
        try:
            path = _pull(url, config, accelerator.print)
        except SettingError as reason:
            error = str(reason)
    if error := share_text(error, accelerator):
        raise SettingError(error)
    if not (path := share_text(path, accelerator)):
        return config  # auto, at the first start
    path = remember(RUN_FOLDER, path)  # restarted processes go on in there
    return replace(config, resume=path, output_dir=path)


def _pull(url: str, config: RunConfig, say: Callable[[str], Any]) -> str:
    """Return the folder that a run was pulled into; "": there is nothing to be pulled yet."""
    path = Path(config.output_dir or default_folder(config))
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingError(f"output_dir must be a new folder, got {path}, which exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-")
    except OSError as error:
        raise SettingError(
            f"output_dir must be a folder that can be written, got {path} ({error})"
        ) from error
    setting = "mirror" if config.resume == "auto" else "resume"
    passed_over = 0
    with scratch, refusing(setting, url, "read"):
        bucket = Bucket(url)
        for name, listing in tried(bucket.checkpoints).items():
            into = Path(scratch.name) / name
            try:
                if listing is None:
                    raise DamagedError(f"{url}/{CHECKPOINTS}/{name} is incomplete: no {LISTING}")
                tried(_get_checkpoint, bucket, name, listing, into)
            except DamagedError as error:
                say(f"warning: passed over: {error}")
                passed_over = max(passed_over, listing.sequence if listing else 0)
                continue
            tried(_get_results, bucket, listing.run, into / RUN)
            remember_mirror(into / RUN, bucket, listing, passed_over)
            os.replace(into / RUN, path)
            say(f"pulled {name} of {url} into {path}")
            return str(path)
    if setting == "resume":
        raise SettingError(f"resume must be a URL with a complete checkpoint, got {url}")
    return ""


def _get_checkpoint(bucket: Bucket, name: str, listing: Listing, into: Path) -> None:
    """Download a checkpoint to where it belongs below `into`'s run folder."""
    needed = {MANIFEST, *(f"{RUN}/{file}" for file in NEEDED)}
    bucket.get(f"{CHECKPOINTS}/{name}", listing, {*listing.files} | needed, into / name)
    os.replace(into / name / RUN, into / RUN)
    (into / RUN / CHECKPOINTS).mkdir()
    os.replace(into / name, into / RUN / CHECKPOINTS / name)


def _get_results(bucket: Bucket, run: str, folder: Path) -> None:
    """Download what else is whole of the run's own files."""
    own = bucket.listing()
    if own is None or own.run != run:
        return
    for name in own.files:
        if name not in NEEDED:
            try:
                bucket.get("", own, [name], folder)
            except DamagedError:
                (folder / name).unlink(missing_ok=True)
