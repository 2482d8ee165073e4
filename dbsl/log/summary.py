"""What a run shows when it begins and when it ends: trackers, log, pictures, summary.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from tqdm import tqdm

from dbsl.base.machine import lazy_import
from dbsl.cluster.weights import names_of
from dbsl.config.complete import RESOLVED
from dbsl.config.hooks import Extra
from dbsl.extras.charts import start_trackers
from dbsl.log.lines import print_run
from dbsl.log.log import DivergenceWarning, RunLog, epochs_done
from dbsl.log.rows import read_metrics
from dbsl.model import has_batch_norm
from dbsl.plan.types import Restart
from dbsl.profile.timing import device_name
from dbsl.run.session import Session

timm = lazy_import("timm")


def start_log(
    session: Session, state: Mapping[str, Any] | None = None, restart: Restart | None = None
) -> RunLog:
    """Print what the run will do, start its tracker and its log.

    Args:
        session: The run.
        state: Of the log that they go on from.
        restart: What other workers or plans have handed over.
    """
    run, folder, accelerator = session.run, session.folder, session.accelerator
    config = run.config
    print_run(run, folder, accelerator, begin=min(epochs_done(state), config.epochs - 1))
    start_trackers(
        accelerator,
        config.report_to,
        folder,
        folder.name,
        {name: value for name, value in asdict(config).items() if name != RESOLVED},
        resumed=state["trackers"] if state else {},
        epochs=epochs_done(state),
    )
    # Plans that follow measured times, and workers slowed on purpose, are not to be warned of.
    slowed = config.slowdown or config.disturb
    expects = run.known.measured and config.balance == "none" and not slowed
    alone, apart = accelerator.num_processes == 1, config.dedicated_server
    every_worker = (alone and config.sync != "step") or apart
    log = RunLog(
        folder,
        accelerator,
        run.stages,
        run.plans,
        expects,
        pushes=config.push == "gradients",
        meter=session.meter,
        counted=range(config.workers) if every_worker else (0,),
        plan_of=run.planner.decided if apart else None,
        samples=len(run.data.train),
        evaluated=len(run.data.evaluation),
        normalises=config.local_batch_sizes is None
        and not config.sync_batch_norm
        and has_batch_norm(run.model),
        bce=getattr(config, "bce_loss", False),
        divergence=DivergenceWarning(
            *(config, run.data.num_classes, tqdm.write),
            precision=str(accelerator.mixed_precision),
            weights=names_of(run.model),
        ),
        state=state,
        restart=restart,
    )
    if log.enabled:
        from dbsl.extras.pictures import plan_timeline  # slow to import, and only one process draws

        picture = folder / "plots/plan.png"
        plan_timeline(run.stages, run.plans, config.rounds_per_epoch, picture)
        log.images({"plots/plan": picture}, again=log.has_new_plans)
    return log


def sum_up(session: Session) -> None:
    """Draw what came of the run, and write summary.json."""
    run, folder, log = session.run, session.folder, session.log
    accelerator = session.accelerator
    if log.enabled:
        from dbsl.extras.pictures import accuracy_and_loss, plan_timeline, worker_history

        metrics = read_metrics(folder / "metrics.jsonl")
        bce = getattr(run.config, "bce_loss", False)
        falling = run.config.lr_schedule != "step"
        pictures = {f"plots/{n}": folder / f"plots/{n}.png" for n in ("accuracy", "workers")}
        accuracy_and_loss(metrics, pictures["plots/accuracy"], bce=bce, falling=falling)
        worker_history(metrics, pictures["plots/workers"])
        config = run.config
        if latest := log.latest_plans:
            pictures |= {"plots/plan": folder / "plots/plan.png"}
            plan_timeline(
                *(run.stages, run.plans, config.rounds_per_epoch, pictures["plots/plan"], latest)
            )
        log.images(pictures)
        names = ("seed", "workers", "small_workers", "sync")
        values = {
            **log.results(),
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
        "mirror_failures": session.mirror.failures,
    }
    return {name: value for name, value in found.items() if value}
