"""Optimizer steps so far, for people: a bar on a terminal, else a line a minute.

Workers that come and go: what is recorded and said of them.

What a run will do, in lines for people before it begins.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tqdm import tqdm

from dbsl.base.words import plural, short_loss
from dbsl.cluster.protocol import Cluster
from dbsl.plan.stages import Stage, learning_rate_at
from dbsl.plan.text import format_run, nodes_in_words
from dbsl.plan.types import JoinedWorker, LostWorker
from dbsl.run.accelerator import describe_precision
from dbsl.run.training import Run

_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} [<{remaining}{postfix}]"  # fits 80 columns
_BAR_EVERY_S, _LINE_EVERY_S = 0.5, 60.0


class Display:
    """Optimizer steps so far: a bar on a terminal; elsewhere a line about once a minute.

    Args:
        total: Steps of the run.
        done: Steps of it that earlier sessions took.
        epochs: Epochs of the run.
        unit: What samples are called.
        loss_name: What the loss is called.
        alone: Whether there is one worker, which then needs no number.
    """

    def __init__(
        self,
        total: int,
        done: int,
        epochs: int,
        unit: str = "images",
        loss_name: str = "loss",
        *,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self.total, self.done, self._epochs, self._unit = total, done, epochs, unit
        self._loss_name = loss_name
        self._bar = tqdm(
            total=total,
            initial=done,
            bar_format=_BAR,
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        self._every_s = _LINE_EVERY_S if self._bar.disable else _BAR_EVERY_S
        self.loss = math.nan  # the latest that is known
        self.pause()

    def pause(self) -> None:
        """Begin to measure the speed anew: what came before was an evaluation, say."""
        self._samples, self._since = 0, time.perf_counter()

    def step(
        self, samples: int, epoch: int, learning_rate: float, worker: int | None, steps: int = 1
    ) -> None:
        """Note steps with these samples.

        The line names the worker whose learning rate it is, unless all have the same: workers are
        at different places of the schedule, and may have factors of their own.
        """
        self.done += steps
        self._samples += samples
        spent = time.perf_counter() - self._since
        if spent >= self._every_s:
            loss = (
                f"{self._loss_name} {short_loss(self.loss)}, " if math.isfinite(self.loss) else ""
            )
            speed = speed_in_words(self._samples / spent, self._unit)
            text = f"epoch {epoch + 1}/{self._epochs}, "
            if self._bar.disable:
                whose = "" if worker is None or self._alone else f" (worker {worker})"
                text += f"lr {learning_rate:.3g}{whose}, {loss}{speed}"
                self.print(f"  {self.done}/{self.total} steps, {text}")
            else:
                self._bar.set_postfix_str(f"{text}{loss}{speed}", refresh=False)
            self.pause()
        self._bar.update(steps)

    def expect(self, more: int) -> None:
        """Note that the run takes so many more steps than it was to take, or fewer."""
        self.total += more
        self._bar.total = self.total

    def print(self, line: str) -> None:
        """Print a line to stdout; the bar gets out of its way."""
        tqdm.write(line)
        sys.stdout.flush()
        self.pause()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def speed_in_words(speed: float, unit: str) -> str:
    """Return a speed in words."""
    return f"{speed:.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s"


class MemberLog:
    """Records lost and new workers, on the main process.

    Attributes:
        lost: Workers that were lost.
        joined: Workers that have joined while the others trained.
        lost_samples: Samples of epochs under way that nobody trained on: their worker was lost.
    """

    def __init__(self) -> None:
        self.lost: list[int] = []
        self.joined: list[int] = []
        self.lost_samples = 0

    def record(
        self, write: Callable[[str, Mapping[str, Any]], object], say: Callable[[str], object]
    ) -> None:
        """Record from now on: events by `write`, lines by `say`."""
        self._write, self._say = write, say

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from; summary.json has it, too."""
        return {
            "lost_workers": list(self.lost),
            "joined_workers": list(self.joined),
            "lost_samples": self.lost_samples,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self.lost = list(state["lost_workers"])
        self.joined = list(state["joined_workers"])
        self.lost_samples = state["lost_samples"]

    def hear(self, cluster: Cluster) -> None:
        """Record what the cluster has to tell of workers; elsewhere than on rank 0 it has none."""
        for change in cluster.membership():
            if isinstance(change, LostWorker):  # its process died, and the others go on
                self._lost(change)
            else:  # its process was launched again
                self._joined(change)

    def _lost(self, loss: LostWorker) -> None:
        """Record that a worker was lost, and that the others go on."""
        self.lost.append(loss.worker)
        self.lost_samples += loss.samples
        self._write("lost", asdict(loss))
        out = f"; {loss.samples} samples of epochs under way are left out" if loss.samples else ""
        self._say(
            f"warning: rank {loss.rank} (worker {loss.worker}) was lost after "
            f"{plural(loss.rounds, 'round')} ({loss.reason}); the others share its "
            f"samples from their next round on{out}"
        )

    def _joined(self, new: JoinedWorker) -> None:
        """Record that a worker has come, and that the others share with it."""
        self._write("joined", asdict(new))
        self.joined.append(new.worker)
        self._say(f"rank {new.rank} has joined, its share begins in epoch {new.epoch + 1}")


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
        *([data.train.described(config.seed)] if hasattr(data.train, "described") else []),
        f"run folder {folder}" if folder else "plan only: nothing is trained or written",
        "",
        plans,
        *run.machine.lines(run),
        *_on_rate(run),
        "",
    ]
    accelerator.print("\n".join(lines))


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
