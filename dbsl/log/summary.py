"""What a run shows when it begins and when it ends: its plan, its log, summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dbsl.base.machine import lazy_import
from dbsl.config.hooks import Extra
from dbsl.log.lines import print_run
from dbsl.log.log import RunLog, epochs_done
from dbsl.plan.types import Restart
from dbsl.profile.timing import device_name
from dbsl.run.session import Session

timm = lazy_import("timm")


def start_log(
    session: Session, state: Mapping[str, Any] | None = None, restart: Restart | None = None
) -> RunLog:
    """Print what the run will do, and return its log.

    `state` is that of the log that goes on; `restart` what other workers or plans have handed over.
    """
    run, folder, accelerator = session.run, session.folder, session.accelerator
    begin = min(epochs_done(state), run.config.epochs - 1)
    print_run(run, folder, accelerator, begin=begin)
    return RunLog(run, folder, accelerator, session.meter, state=state, restart=restart)


def sum_up(session: Session) -> None:
    """Write summary.json, and have extras make of the run what they do at its end."""
    run, folder, log = session.run, session.folder, session.log
    config, accelerator = run.config, session.accelerator
    if log.enabled:
        names = ("seed", "workers", "small_workers", "sync")
        found = run.extras.each(Extra.summary)
        values = {
            **log.results(),
            **{name: value for own in found for name, value in own.items()},
            "start_up_time_s": session.stopwatch.start_up_s,
            "total_time_s": session.stopwatch.total_s,
            "epochs": log.epochs_done,
            **{name: getattr(config, name) for name in names},
            "classes": run.data.num_classes,
            "device": device_name(accelerator.device),
            "precision": str(accelerator.mixed_precision),
            "torch": torch.__version__,
            "timm": timm.__version__,
            **_mishaps(session),
        }
        log.summary(values)
        session.run.extras.each(Extra.end, folder)
    log.close()


def _mishaps(session: Session) -> dict[str, Any]:
    """Return what went wrong and was coped with, if anything."""
    data = session.run.data
    sources = {"train": data.train, "evaluation": data.evaluation}
    bad = {name: sorted(source.bad) for name, source in sources.items() if source.bad}
    found = {
        "refused_rounds": session.cluster.refused,
        **session.log.members.state_dict(),
        "bad_images": bad,
    }
    return {name: value for name, value in found.items() if value}
