"""What a run will do, in lines for people before it begins."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator

from dbsl.base.words import duration, plural
from dbsl.cluster.config import meets_at_server
from dbsl.plan.stages import Stage, learning_rate_at
from dbsl.plan.text import format_run, nodes_in_words
from dbsl.plan.types import CurrentPlan
from dbsl.run.accelerator import describe_precision
from dbsl.run.run import Run


def print_run(run: Run, folder: Path | None, accelerator: Accelerator, *, begin: int = 0) -> None:
    """Print what the run will do: the device, the data, each stage and each resolution's plan.

    Without a folder it is the plan alone that was asked for: then with timelines. `begin` is the
    epoch that a resumed run goes on with.
    """
    config, data, processes = run.config, run.data, accelerator.num_processes
    where, chosen = f"in {processes} processes", ""
    if processes == 1:
        where = "simulated in one process" if config.workers > 1 else "in one process"
    elif run.nodes[-1]:
        where += f" on {nodes_in_words(run.nodes)}"
    small = f", {config.small_workers} on small batches" if config.workers > 1 else ""
    sync = f", sync {config.sync}" if config.workers > 1 else ""
    threads = plural(torch.get_num_threads(), "CPU thread")
    if config.cpu_threads is None:
        threads += " on the first node, others by their cores"
    if run.default_workers:
        why = "for small or local batches" if config.workers > 1 else "which learns most per sample"
        chosen = f" (unset --workers is {config.workers}, {why})"
    plans = format_run(
        *(run.stages, run.plans, config.rounds_per_epoch),
        rates=lambda stage: _rates(run, stage),
        timelines=folder is None,
        nodes=run.worker_nodes,
        begin=begin,
    )
    lines = [
        f"{config.model} on {config.dataset}: {len(data.train)} training {data.unit}s, "
        f"{len(data.evaluation)} for evaluation ({data.eval_split}), {data.num_classes} classes",
        f"{plural(config.workers, 'worker')} {where}{small}{chosen}{sync}; {accelerator.device}, "
        f"torch {torch.__version__}, precision {describe_precision(accelerator)}, {threads}",
        *([data.normalisation] if hasattr(data, "normalisation") else []),  # not of one's own
        *_on_resolutions(run),
        *([] if config.cache_gib is None else [data.train.described(config.seed)]),
        f"run folder {folder}" if folder else "plan only: nothing is trained or written",
        "",
        plans,
        *_on_link(run),
        *_on_rate(run),
        "",
    ]
    accelerator.print("\n".join(lines))


def _on_link(run: Run) -> list[str]:
    """Return a line on the emulated link, if there is one."""
    config = run.config
    if config.link_gbps is None:
        return []
    at_first = CurrentPlan(run.plans[run.stage_at(0).resolution])  # nothing is to be decided yet
    exchange_s = run.exchange(config.workers - 1, 0, 0, at_first)
    link = f"emulated link of {config.link_gbps:g} Gbit/s"
    if config.workers == 1:
        return [f"{link}: one worker, nothing goes over it"]
    each = "each push of gradients" if config.push == "gradients" else "each round"
    at_server = ""
    if meets_at_server(config.sync):
        at_server = ", but not for worker 0: the server is there"
    return [
        f"{link}: {each} takes {duration(exchange_s)} longer on the virtual clock than predicted "
        f"above{at_server}"
    ]


def _on_resolutions(run: Run) -> list[str]:
    """Return a line if images are trained on at several resolutions that nobody has asked for."""
    sides = sorted({stage.resolution for stage in run.stages})
    if not run.default_resolutions or len(sides) < 2:
        return []
    often = {"cyclic": "in every learning-rate stage", "progressive": "once"}[run.config.schedule]
    return [
        f"trains at {', then '.join(map(str, sides))} px {often}, which saves time (unset "
        f"--resolutions, --schedule {run.config.schedule}); --resolutions {sides[-1]} trains at "
        f"{sides[-1]} px alone"
    ]


def _on_rate(run: Run) -> list[str]:
    """Return a line if the learning rate was chosen for other batches, with timm's rule for these.

    The rule is linear, or the root for optimizers that divide by the gradients' size.
    """
    config, plan = run.config, run.plans[run.stages[-1].resolution]
    own = plan.global_batch_size or max(worker.local_batch_size for worker in plan.workers)
    if config.lr_batch_size in (None, own):
        return []
    adaptive = any(part in config.optimizer.lower() for part in ("ada", "lamb"))
    rate = config.lr * (own / config.lr_batch_size) ** (0.5 if adaptive else 1)
    return [
        f"warning: lr {config.lr:g} was chosen for {config.lr_batch_size} samples a step, which "
        f"are {own} here; it is kept. timm's rule ({'root' if adaptive else 'linear'}) gives "
        f"--lr {rate:.3g} --lr-batch-size {own}"
    ]


def _rates(run: Run, stage: Stage) -> str:
    """Return a stage's learning rate in words; one that falls inside it, from where to where."""
    config = run.config
    if config.lr_schedule == "step":
        return f"{stage.learning_rate:g}"
    moments = [stage.first_epoch, stage.end_epoch]
    if stage.first_epoch < config.warmup_epochs < stage.end_epoch:
        moments.insert(1, config.warmup_epochs)  # its highest
    rates = (
        learning_rate_at(
            moment,
            stages=run.stages,
            base=config.lr,
            schedule=config.lr_schedule,
            **config.curve,
        )
        for moment in moments
    )
    return " to ".join(f"{rate:.3g}" for rate in rates)
