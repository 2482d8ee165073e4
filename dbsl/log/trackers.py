"""Trackers: which are there, and how to start one that never keeps a run waiting."""

from __future__ import annotations

import os
import shlex
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from accelerate import Accelerator
from accelerate.tracking import filter_trackers, get_available_trackers
from accelerate.utils import LoggerType

from dbsl.base.errors import SettingError
from dbsl.log.charts import THOUSANDTHS

PROJECT = "dbsl"


def check_tracker(report_to: str) -> None:
    """Raise ``SettingError`` unless it names installed trackers of Accelerate's, or ``none``."""
    tracker_names(report_to)


def tracker_names(report_to: str) -> tuple[str, ...]:
    """Return the trackers that a setting names, each once; of ``all`` those that are installed.

    Raises:
        SettingError: If it names one that Accelerate does not know, or that is not installed.
    """
    installed = tuple(map(str, get_available_trackers()))
    known = sorted({*map(str, LoggerType)} - {"all"})
    names = tuple(dict.fromkeys(report_to.replace(" ", "").split(",")))
    if names in (("none",), ("all",)):
        return installed if names == ("all",) else ()
    for name in names:
        if name not in known:
            raise SettingError(
                f"report_to must be none, all or trackers ({', '.join(known)}) with commas "
                f"between, got {name!r}"
            )
        if name not in installed:
            raise SettingError(
                f"report_to must name an installed tracker, got {name!r} (pip install {name})"
            )
    return names


def start_trackers(
    accelerator: Accelerator,
    report_to: str,
    folder: Path,
    run_name: str,
    config: Mapping[str, Any],
    *,
    resumed: Mapping[str, str] | None = None,
    epochs: int = 0,
) -> None:
    """Start the accelerator's trackers, with their files in the run folder.

    Without a login or an answer from its server W&B works offline; it never asks or waits long.
    ``WANDB_MODE`` decides instead where it is set to anything but ``online``.

    Args:
        accelerator: Gets the trackers, whatever its ``log_with`` was.
        report_to: The trackers, as `check_tracker` takes them.
        folder: The run folder; it exists.
        run_name: Name of the run in the trackers.
        config: The run's settings.
        resumed: What `tracker_ids` returned in the session before, whose charts go on.
        epochs: Epochs that are complete.
    """
    if not accelerator.is_main_process:
        return
    settings, started, resumed = dict(_flatten(config)), [], resumed or {}
    accelerator.project_configuration.logging_dir = str(folder)
    for name in tracker_names(report_to):
        # Not left to Accelerator(log_with=...): the run folder may be known only after that is
        # built. One after the other: it would start those that are there once more.
        accelerator.log_with = filter_trackers(name, str(folder))
        accelerator.trackers = []
        if name == "tensorboard":  # which uses the project's name for its sub-folder
            # What a session that was killed has shown after its checkpoint is shown no more.
            own = {"purge_step": THOUSANDTHS * epochs + (name in resumed)}
            accelerator.init_trackers("tensorboard", settings, {name: own})
        elif name == "trackio":
            own = {"name": run_name, "group": run_name}  # with its workers: see `dbsl.log.charts`
            own |= {"resume": "allow"} if name in resumed else {}
            accelerator.init_trackers(PROJECT, settings, {name: own})
        elif name == "wandb":
            _start_wandb(accelerator, folder, run_name, settings, resumed.get(name))
        else:
            own = {
                "dvclive": {"dir": str(folder / "dvclive")},
                "mlflow": {"run_name": run_name},
                "swanlab": {"experiment_name": run_name, "logdir": str(folder / "swanlog")},
            }
            accelerator.init_trackers(PROJECT, settings, {name: own.get(name, {})})
        started += accelerator.trackers
    accelerator.trackers = started


def tracker_ids(accelerator: Accelerator) -> dict[str, str]:
    """Return the trackers' names, with what a later session needs to go on in their charts."""
    trackers = accelerator.trackers
    return {own.name: own.tracker.id if own.name == "wandb" else "" for own in trackers}


def _start_wandb(
    accelerator: Accelerator,
    folder: Path,
    name: str,
    config: dict[str, Any],
    resume_id: str | None,
) -> None:
    import wandb

    # Seconds; by default the end waits for a lost server without limit. All is on disk anyway.
    quiet = wandb.Settings(silent=True, init_timeout=30, finish_timeout=120)
    mode = os.environ.get("WANDB_MODE", "online")

    def start(mode: str) -> None:
        kwargs = {"dir": str(folder), "mode": mode, "settings": quiet}
        if not os.environ.get("WANDB_NAME"):
            kwargs["name"] = name
        if resume_id is not None:
            kwargs["id"] = resume_id
            if mode == "online":  # offline, the upload puts sessions of one id together
                kwargs["resume"] = "allow"
        # W&B reads its other variables itself: entity, group, job type, tags, notes.
        project = os.environ.get("WANDB_PROJECT") or PROJECT
        accelerator.init_trackers(project, config, {"wandb": kwargs})

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
    if why is None:
        print(f"wandb: {run.url}", flush=True)
    elif run.offline:
        # The folder of all sessions of the run: a resumed one adds to those before.
        command = f"wandb sync {shlex.quote(os.path.relpath(folder / 'wandb'))}"
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
