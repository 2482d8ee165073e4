"""A copy of the run folder at a URL, kept while the run goes on, and a run brought back from there.

The folder on disk is the truth. What is at the URL may lag behind or be cut off anywhere; a
checkpoint counts there once its listing does (see `bucket`). With a checkpoint's own files lies
what its run needs to go on from it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit
from uuid import uuid4

from accelerate import Accelerator
from tqdm import tqdm

from dbsl.base.errors import RunStopped, SettingError, in_line
from dbsl.base.files import describe, write_text
from dbsl.base.machine import connect_store, lower_priority, recall, remember, restarts
from dbsl.checkpoint import disk
from dbsl.checkpoint.disk import Found
from dbsl.cluster.wire import refused_by_all, share_text
from dbsl.config.fields import Excludes, Role, refuse
from dbsl.config.hooks import Extra, Row
from dbsl.config.parse import RUN_FOLDER, is_checkpoint
from dbsl.config.settings import CHECKPOINTS, RunConfig, is_url
from dbsl.extras.mirror.bucket import (
    LISTING,
    RUN,
    Bucket,
    DamagedError,
    Listing,
    pause_s,
    refusing,
    tried,
)
from dbsl.run.folder import CODE, LOCK, RESULTS, default_folder, holder_of
from dbsl.run.session import Session

OWN_FILE = "mirror.json"  # in the run folder: where it is mirrored, and the run's name for itself
NEEDED = ("config.yaml", "metrics.jsonl")  # what a checkpoint needs of its run
_PATIENCE_S = 600.0  # for the last upload, at the run's end and at a stop
_LAST_PATIENCE_S = 20.0  # the same where the run fails
_TRIES = 5  # that may fail one after the other, then
_SHARDS_S = 600.0  # for shards of workers that save in their own time
_LAST_SHARDS_S = 30.0  # the same at the run's end


@dataclass(frozen=True)
class MirrorSettings(RunConfig):
    """Where a copy of the run folder is kept."""

    # --- run
    # URL (s3://bucket/runs/x, gs://, hf://, file:///) for a copy of the run folder during the run;
    # a resumed run keeps it; none: no copy this time
    mirror: Annotated[str | None, Role.FREE | Role.COMMAND, Excludes("eval_only")] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mirror", "resume"):
            if not is_url(url := getattr(self, name)):
                continue
            parts = urlsplit(url)
            if parts.password is not None:
                raise SettingError(
                    f"{name} must have no password in it, which fsspec has settings for"
                )
            if not (parts.netloc + parts.path).strip("/"):
                raise SettingError(f"{name} must name a folder at the URL, got {url}")
        no_url = self.mirror not in (None, "none") and not is_url(self.mirror)
        refuse([(no_url, "mirror must be a URL such as s3://bucket/runs/x, or none", self.mirror)])
        if is_url(self.resume) and (self.eval_only or self.plan_only):
            what = "eval_only" if self.eval_only else "plan_only"
            raise SettingError(f"resume must be a run folder with {what}, got {self.resume}")


class Mirror(Extra):
    """Keeps a copy of a run's folder at a URL, and begins from one.

    A thread of the main process makes the copy equal to what the folder has now, so that at most
    one request waits. On other processes, and without a URL, the same calls do nothing.
    """

    Settings = MirrorSettings

    def __init__(self) -> None:
        self._bucket: Bucket | None = None  # None: there is no URL, or another process mirrors
        self._passed_over = 0  # sequence of a damaged checkpoint at the URL
        self._several = False  # processes
        self.failures = 0  # tries
        self.uploading: str | None = None  # a checkpoint that is on its way, and must stay on disk
        # The ranks whose shard of a save, by its number, is to be waited for.
        self.saving: Callable[[int], Collection[int]] = lambda sequence: ()
        self._change = threading.Condition()
        self._asked = self._done = 0  # requests
        self._failed = 0  # tries, since one did not or the end began
        self._cut = self._ending = self._over = self._closed = False

    @classmethod
    def own_settings(cls, said: Mapping[str, Any], scratch: Path) -> Path | None:
        """Download the config.yaml of the newest checkpoint at a URL."""
        resume = said["resume"]
        url = _url_to_pull(resume, said["output_dir"], said.get("mirror"))
        if url is None:
            return None
        name = f"{RUN}/config.yaml"
        with refusing("resume" if url == resume else "mirror", url, "read"):
            bucket = Bucket(url)
            for checkpoint, listing in tried(bucket.checkpoints).items():
                if listing is not None:
                    with suppress(DamagedError):
                        folder = f"{CHECKPOINTS}/{checkpoint}"
                        tried(bucket.get, folder, listing, [name], scratch)
                        return scratch / name
        if url == resume:
            raise SettingError(f"resume must be a URL with a complete checkpoint, got {url}")
        return None

    def config(self, config: MirrorSettings, accelerator: Accelerator) -> MirrorSettings:
        """Bring a run that is at a URL into a new folder; return the config that goes on there."""
        url = _url_to_pull(config.resume, config.output_dir, config.mirror)
        if url is None or config.plan_only:
            return config
        path = ""
        with refused_by_all(accelerator):
            if accelerator.is_main_process:
                path = _pull(url, config, accelerator.print)
        if not (path := share_text(path, accelerator)):
            return config  # auto, at the first start
        path = remember(RUN_FOLDER, path)  # restarted processes go on in there
        return replace(config, resume=path, output_dir=path)

    def open(
        self, config: MirrorSettings, folder: Path, found: Found | None, accelerator: Accelerator
    ) -> None:
        """Take the URL for the run, or refuse on every process."""
        kept: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            kept = json.loads((folder / OWN_FILE).read_text(encoding="utf-8"))
        url = config.mirror or kept.get("mirror", "none")
        if url == "none":
            return
        self._folder, self._several = folder, accelerator.num_processes > 1
        self._own = Listing(kept.get("run") or uuid4().hex, {}, session=uuid4().hex)
        with refused_by_all(accelerator):
            if accelerator.is_main_process:
                passed_over = kept.get("passed_over", 0) if kept.get("mirror") == url else 0
                self._bucket = _claim(url, self._own, config, found, passed_over)
                self._passed_over = passed_over

    def begin(self, session: Session) -> None:
        self.saving = session.cluster.saving

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        if self._bucket is not None:
            _remember_mirror(self._folder, self._bucket, self._own, self._passed_over)
            threading.Thread(target=self._work, name="mirror", daemon=True).start()
            self.saved()

    def saved(self) -> None:
        """Mirror what the folder has now."""
        with self._change:
            self._asked += 1
            self._change.notify_all()

    def keeps(self) -> Collection[str]:
        return {self.uploading} - {None}

    def wait(self, limit_s: float = _PATIENCE_S) -> None:
        """Mirror what the folder has now; wait until it is done, or seems not to be possible."""
        if self._bucket is None:
            return
        self._ending, self._failed = True, 0
        self.saved()
        with self._change:
            self._change.wait_for(
                lambda: self._done == self._asked or self._failed >= _TRIES or self._over, limit_s
            )

    def summary(self) -> dict[str, Any]:
        """Wait for the mirror; return how many tries failed."""
        self.wait()
        return {"mirror_failures": self.failures} if self.failures else {}

    def close(self, kind: type[BaseException] | None) -> None:
        if self._closed:
            return
        self._closed = True
        stopped = kind is not None and issubclass(kind, RunStopped)
        if self._asked:  # else it has not begun
            self.wait(_PATIENCE_S if stopped or kind is None else _LAST_PATIENCE_S)
        with self._change:
            if self._bucket is not None and self._done < self._asked and not self._over:
                tqdm.write(f"warning: {self._bucket.url} lacks the run's last state")
            self._over = True
            self._change.notify_all()
        if self._several:  # a launcher ends all processes when the first has stopped
            with suppress(RuntimeError):  # the store is gone, or the time is over
                store = connect_store(f"mirror/{restarts()}")
                if self._bucket is not None:
                    store.set("over", "")
                elif stopped:
                    store.wait(["over"], timedelta(seconds=_PATIENCE_S))

    def finished(self, config: MirrorSettings, folder: Path, accelerator: Accelerator) -> None:
        """Mirror what could not be when the run ended."""
        if not self._closed:
            self.report(folder, ())
            self.close(None)

    def _work(self) -> None:
        lower_priority()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._done < self._asked or self._over)
                asked = self._asked
            if self._over:
                return
            try:
                self._copy()
            except Exception as error:  # networks, and libraries for them, raise anything
                self._try_later(error)
                continue
            with self._change:
                if self._cut:
                    tqdm.write(f"{self._bucket.url} is up to date again")
                self._cut, self._done, self._failed = False, asked, 0
                self._change.notify_all()

    def _try_later(self, error: Exception) -> None:
        with self._change:
            if not self._cut:
                tqdm.write(
                    f"warning: {self._bucket.url} could not be written ({in_line(error)}); the run "
                    "continues and tries again"
                )
            self.failures, self._failed, self._cut = self.failures + 1, self._failed + 1, True
            failed = self._failed
            self._change.notify_all()
            self._change.wait_for(lambda: self._failed < failed or self._over, pause_s(failed))

    def _copy(self) -> None:
        """Make the copy equal to what the folder has now."""
        own, began = self._bucket.listing() or self._own, time.monotonic()
        if own.session != self._own.session:
            tqdm.write(
                f"warning: another process mirrors to {self._bucket.url} now: this one stops"
            )
            self._over = True
            return
        while True:
            local = [found.folder for found in disk.checkpoints_in(self._folder)]
            missing = next((folder for folder in local if not self._has(folder)), None)
            own = self._put_results(own)
            if missing is None:
                break
            self._put_checkpoint(missing, began)
        if local:  # and all of them are whole at the URL
            for name in set(self._bucket.names(CHECKPOINTS)) - {folder.name for folder in local}:
                self._bucket.remove(f"{CHECKPOINTS}/{name}")

    def _has(self, folder: Path) -> bool:
        listing = self._bucket.listing(f"{CHECKPOINTS}/{folder.name}")
        if listing is None:
            return False
        with suppress(FileNotFoundError):  # removed just now
            return listing.files.get(disk.MANIFEST) == describe(folder / disk.MANIFEST)
        return True

    def _put_checkpoint(self, folder: Path, began: float) -> None:
        """Upload a checkpoint, its manifest and what its run needs to go on from it."""
        self.uploading, there = folder.name, f"{CHECKPOINTS}/{folder.name}"
        try:
            manifest = self._with_late_shards(folder, began)
            # A shard that comes only now is left out, with its sums.
            sums = [(folder / name).with_suffix(disk.LATE) for name in manifest.files]
            listed = manifest.files | {path.name: describe(path) for path in sums if path.exists()}
            files = {name: folder / name for name in (*listed, disk.MANIFEST)}
            with tempfile.TemporaryDirectory() as scratch:
                for name in NEEDED:  # they may change meanwhile
                    files[f"{RUN}/{name}"] = Path(shutil.copy(self._folder / name, scratch))
                listed |= {name: describe(files[name]) for name in files.keys() - listed}
                # One of that name may be of before the run went back.
                self._bucket.remove_file(there, LISTING)
                self._bucket.put(there, files, Listing(self._own.run, listed, manifest.sequence))
        except (FileNotFoundError, disk.CheckpointError):
            if (folder / disk.MANIFEST).exists():  # else it was removed, and there is a newer one
                raise
        finally:
            self.uploading = None

    def _with_late_shards(self, folder: Path, began: float) -> disk.Manifest:
        """Return a manifest once the shards are there that are to be waited for."""
        while True:
            manifest = disk.read_manifest(folder)
            late = {disk.shard_names(rank)[0] for rank in self.saving(manifest.sequence)}
            patience = _LAST_SHARDS_S if self._ending else _SHARDS_S
            if late <= manifest.files.keys() or time.monotonic() - began > patience:
                return manifest
            time.sleep(0.1)

    def _put_results(self, own: Listing) -> Listing:
        paths = [path for pattern in (*RESULTS, CODE) for path in self._folder.glob(pattern)]
        files = {p.relative_to(self._folder).as_posix(): p for p in paths if p.is_file()}
        with tempfile.TemporaryDirectory() as scratch:
            if "metrics.jsonl" in files:  # it grows meanwhile
                files["metrics.jsonl"] = Path(shutil.copy(files["metrics.jsonl"], scratch))
            now = replace(own, files={name: describe(path) for name, path in files.items()})
            changed = {n: path for n, path in files.items() if now.files[n] != own.files.get(n)}
            if now.files != own.files:
                self._bucket.put("", changed, now)
        for name in own.files.keys() - files:
            self._bucket.remove_file("", name)
        return now


def _claim(
    url: str, own: Listing, config: RunConfig, found: Found | None, passed_over: int
) -> Bucket:
    """Take a URL for a run, which is known to have damaged checkpoints up to a number."""
    with refusing("mirror", url, "written"):
        bucket = Bucket(url)
        there = {name: one for name, one in tried(bucket.checkpoints).items() if one}
        before, names = tried(bucket.listing), tried(bucket.names)
    others = [one for one in (before, *there.values()) if one and one.files and one.run != own.run]
    finished = before is not None and "summary.json" in before.files
    lost = not there and not finished  # before its first checkpoint
    begun_again = config.resume == "auto" and lost
    strange = [n for n in names if not n.startswith(".")] if LISTING not in names else []
    if (others and not begun_again) or (strange and not there):
        other = f"another run (--resume {url} continues it)" if there else "another run's results"
        what = other if others else strange[0]
        raise SettingError(f"mirror must be empty or have this run, got {url}, which has {what}")
    sequence = max(passed_over, found.manifest.sequence if found and found.manifest else 0)
    by_name = config.resume is not None and is_checkpoint(config.resume)
    by_name |= found is not None and recall(RUN_FOLDER) == str(found.run_folder)  # or was, before
    newest = next(iter(there), None)
    if newest and there[newest].sequence > sequence and not by_name:
        raise SettingError(
            f"mirror must not be ahead of the run folder, got {newest} at {url}: go on from there "
            f"with --resume {url}, or from here with --resume and a checkpoint's folder"
        )
    files = before.files if before and before.run == own.run else {}
    with refusing("mirror", url, "written"):
        tried(bucket.put, "", {}, replace(own, files=files))
    return bucket


def _remember_mirror(folder: Path, bucket: Bucket, listing: Listing, passed_over: int = 0) -> None:
    kept = {"mirror": bucket.url, "run": listing.run, "passed_over": passed_over}
    write_text(folder / OWN_FILE, json.dumps(kept, indent=2))


def _url_to_pull(resume: str | None, output_dir: str | None, mirror: str | None) -> str | None:
    """Return the URL that a run is pulled from, if it is not to go on in a folder that is here."""
    if is_url(resume):
        return resume
    if resume != "auto" or output_dir is None or (Path(output_dir) / "config.yaml").is_file():
        return None
    return mirror if is_url(mirror) else None


def _pull(url: str, config: RunConfig, say: Callable[[str], Any]) -> str:
    """Return the folder that a run was pulled into; "": there is nothing to be pulled yet."""
    path = Path(config.output_dir or default_folder(config))
    if path.is_dir() and holder_of(path) is None:
        (path / LOCK).unlink(missing_ok=True)  # left by a start that was killed
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
                say(f"warning: skipped: {error}")
                passed_over = max(passed_over, listing.sequence if listing else 0)
                continue
            tried(_get_results, bucket, listing.run, into / RUN)
            _remember_mirror(into / RUN, bucket, listing, passed_over)
            os.replace(into / RUN, path)
            say(f"pulled {name} of {url} into {path}")
            return str(path)
    if setting == "resume":
        raise SettingError(f"resume must be a URL with a complete checkpoint, got {url}")
    return ""


def _get_checkpoint(bucket: Bucket, name: str, listing: Listing, into: Path) -> None:
    needed = {disk.MANIFEST, *(f"{RUN}/{file}" for file in NEEDED)}
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
