"""A copy of the run folder at a URL, kept up to date, and runs that begin from one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from accelerate import Accelerator

from dbsl.base.errors import SettingError
from dbsl.checkpoint.disk import Found
from dbsl.config.fields import Role
from dbsl.config.hooks import Extra, Row
from dbsl.config.settings import RunConfig, is_url
from dbsl.extras.mirror.bucket import pull_config, url_to_pull
from dbsl.extras.mirror.mirror import Mirror, open_mirror, pulled
from dbsl.run.session import Session


@dataclass(frozen=True)
class MirrorSettings(RunConfig):
    """Where a copy of the run folder is kept."""

    # URL (s3://bucket/runs/x, gs://, hf://, file:///) that gets a copy of the run folder while the
    # run goes on; a run that is resumed keeps it; none: not this time
    mirror: Annotated[str | None, Role.FREE | Role.COMMAND] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_only and self.mirror is not None:
            raise SettingError(f"mirror must be unset with eval_only, got {self.mirror}")
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
        if self.mirror not in (None, "none") and not is_url(self.mirror):
            raise SettingError(
                f"mirror must be a URL such as s3://bucket/runs/x, or none, got {self.mirror}"
            )
        if is_url(self.resume) and (self.eval_only or self.plan_only):
            what = "eval_only" if self.eval_only else "plan_only"
            raise SettingError(f"resume must be a run folder with {what}, got {self.resume}")


class Mirroring(Extra):
    """Keeps a run's mirror, and begins from one."""

    Settings = MirrorSettings

    def __init__(self) -> None:
        self._mirror: Mirror | None = None  # None: there is none, or it has ended

    @classmethod
    def own_settings(cls, said: Mapping[str, Any], scratch: Path) -> Path | None:
        """Download the config.yaml of a run that is at a URL."""
        resume = said["resume"]
        url = url_to_pull(resume, said["output_dir"], said.get("mirror"))
        if url is None:
            return None
        own = pull_config(url, "resume" if url == resume else "mirror", scratch)
        if own is None and url == resume:
            raise SettingError(f"resume must be a URL with a complete checkpoint, got {url}")
        return own

    def config(self, config: MirrorSettings, accelerator: Accelerator) -> MirrorSettings:
        """Bring a run that is at a URL into a new folder."""
        return pulled(config, accelerator)

    def open(
        self, config: MirrorSettings, folder: Path, found: Found | None, accelerator: Accelerator
    ) -> None:
        """Take the URL for the run."""
        self._mirror = open_mirror(config, folder, found, accelerator)

    def begin(self, session: Session) -> None:
        """Note whose shards may come late."""
        if self._mirror is not None:
            self._mirror.saving = session.cluster.saving

    def report(self, folder: Path, rows: Sequence[Row]) -> None:
        """Begin to mirror."""
        if self._mirror is not None:
            self._mirror.__enter__()

    def saved(self) -> None:
        """Mirror the checkpoint."""
        if self._mirror is not None:
            self._mirror.wake()

    def keeps(self) -> Collection[str]:
        """Return the checkpoint that is on its way."""
        return [self._mirror.uploading] if self._mirror and self._mirror.uploading else []

    def summary(self) -> dict[str, Any]:
        """Wait for the mirror; return how many tries failed."""
        if self._mirror is None:
            return {}
        self._mirror.wait()
        return {"mirror_failures": self._mirror.failures} if self._mirror.failures else {}

    def close(self, kind: type[BaseException] | None) -> None:
        """Mirror the last state."""
        if self._mirror is not None:
            self._mirror.__exit__(kind)
            self._mirror = None

    def finished(self, config: MirrorSettings, folder: Path, accelerator: Accelerator) -> None:
        """Mirror what could not be when the run ended."""
        if self._mirror is not None:
            with self._mirror:
                self._mirror = None
