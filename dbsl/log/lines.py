"""Lines for people: what a run will do, its steps and workers while it runs, and its result."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from dbsl.base.errors import duration, plural, px, short_loss, steadier
from dbsl.cluster.formats import joint_messages, message_bytes, numbers_of, trained_shapes
from dbsl.cluster.wire import all_reduce_time_s
from dbsl.config.settings import FLOAT32, RunConfig, Wire, shares_global_batch, wire_of
from dbsl.data.sources import TrainingData
from dbsl.log.rows import EVALUATED
from dbsl.plan.alone import epoch_times
from dbsl.plan.stages import Stage
from dbsl.plan.text import format_run, nodes_in_words, sizes_in_words
from dbsl.plan.types import BAD_LOSS, BAD_WEIGHTS, LostWorker, Plan, RoundReport
from dbsl.run.accelerator import describe_precision
from dbsl.run.meter import TakenSteps
from dbsl.run.plans import Plans

_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} [<{remaining}{postfix}]"  # fits 80 columns
_BAR_EVERY_S, _LINE_EVERY_S = 0.5, 60.0
_MAX_PRINTED_WORKERS = 8
_MOST_PRINTED = 8  # of a loop's own metrics
_TOLERANCE = 0.50  # relative, of a worker's time in an epoch


# --- before the run


def print_run(
    plans: Plans,
    data: TrainingData,
    model: nn.Module,
    accelerator: Accelerator,
    folder: Path | None = None,
    *,
    begin: int = 0,
    unset: bool = False,
) -> None:
    """Print what the run will do: the device, the data, each stage and each resolution's plan.

    Without a folder, only the plan was requested; it is then printed with timelines. `begin` is the
    epoch at which a resumed run continues; `unset`: the number of workers was not given.
    """
    config, processes = plans.config, accelerator.num_processes
    where = f"in {processes} processes"
    if processes == 1:
        where = "simulated in one process" if config.workers > 1 else "in one process"
    elif plans.nodes[-1]:
        where += f" on {nodes_in_words(plans.nodes)}"
    islands = plans.islands
    if islands.several:
        where = f"(processes: {sizes_in_words(islands.sizes)}) {where}"
    small = f", {config.small_workers} on small batches" if config.workers > 1 else ""
    sync = f", sync {config.sync}" if config.workers > 1 else ""
    threads = plural(torch.get_num_threads(), "CPU thread")
    if config.cpu_threads is None:
        threads += " on the first node, others by their cores"
    unset = " (--workers is unset)" * unset
    text = format_run(
        *(plans.stages, plans.first, config.rounds_per_epoch),
        rates=lambda stage: _rates(config, stage),
        timelines=folder is None,
        begin=begin,
        simulated=processes == 1,
    )
    lines = [
        f"{_named(model, data, config)}: {len(data.train)} training {data.unit}s, "
        f"{len(data.evaluation)} for evaluation ({data.eval_split}), {data.num_classes} classes",
        f"{plural(config.workers, 'worker')} {where}{small}{unset}{sync}; {accelerator.device}, "
        f"torch {torch.__version__}, precision {describe_precision(accelerator)}, {threads}",
        *([data.normalisation] if hasattr(data, "normalisation") else []),  # not all data have it
        *([data.train.described(config.seed)] if hasattr(data.train, "described") else []),
        f"run folder {folder}" if folder else "plan only: nothing is trained or written",
        "",
        text,
        *_on_wire(plans, model),
        *(_on_ways(plans, model, accelerator) if folder is None else []),
        "",
    ]
    accelerator.print("\n".join(lines))


def _named(model: nn.Module, data: TrainingData, config: RunConfig) -> str:
    """Return model and data, named by the settings or by a script's own objects."""
    own = config.model if hasattr(model, "created_with") else type(model).__name__
    return f"{own} on {getattr(data, 'name', config.dataset)}"


def _on_wire(plans: Plans, model: nn.Module) -> list[str]:
    """Return a line on how much workers send, if not in float32."""
    wire = wire_of(plans.config)
    if wire == FLOAT32:
        return []
    sent, whole = (_sent_bytes(plans.config, model, one) for one in (wire, FLOAT32))
    after = f", after {plural(wire.steps, 'step')} in float32" if wire.steps else ""
    joint = plans.config.sync == "step"
    what = "a joint step's gradients are" if joint else "a round's weights are"
    return [f"{what} {sent / 1e6:.3g} MB as sent (float32: {whole / 1e6:.3g} MB){after}"]


def _sent_bytes(config: RunConfig, model: nn.Module, wire: Wire) -> int:
    if config.sync == "step":
        return sum(joint_messages(wire, trained_shapes(model)))
    return message_bytes(wire.name, *numbers_of(model))


def _on_ways(plans: Plans, model: nn.Module, accelerator: Accelerator) -> list[str]:
    """Return, for each resolution, an epoch's time with all workers and with only the fastest.

    Real processes that wait for each other measure the time of one all-reduce over them.
    """
    config, known = plans.config, plans.known
    if config.workers == 1:
        return []
    joint, lines, exchange_s = shares_global_batch(config), [], 0.0
    if accelerator.num_processes > 1 and config.sync in ("bsp", "step"):
        size = _sent_bytes(config, model, wire_of(config))
        exchange_s = all_reduce_time_s(size, accelerator.device)
        lines.append(
            f"one all-reduce of {size / 1e6:.3g} MB over these processes takes "
            f"{duration(exchange_s)} (measured); the first two times below have one a "
            f"{'step' if joint else 'round'}"
        )
    for resolution, plan in plans.first.items():
        bounds = (known.limits or known.fits) if joint else known.large_batch_sizes
        most = bounds[resolution] if bounds else [None] * config.workers
        model, least = known.models[resolution], max(plans.sampler.least, config.min_batch_size)
        times = epoch_times(plan, model, most, plans.rounds, least, exchange_s)
        lines.append(f"{px(resolution, after=': ')}{times.describe()}")
    return lines


def _rates(config: RunConfig, stage: Stage) -> str:
    """Return a stage's learning rate in words."""
    falls = config.lr_schedule != "step"
    return f"{config.lr:g} to {config.min_lr:g} (cosine)" if falls else f"{stage.learning_rate:g}"


# --- during the run


class Display:
    """Steps, `done` of `total`: a bar on a terminal; elsewhere a line about once a minute."""

    def __init__(self, total: int, done: int, config: RunConfig, unit: str, whose: str) -> None:
        self.total, self.done, self._config = total, done, config
        self._unit, self._whose = unit, whose
        quiet = not sys.stderr.isatty()
        how = {"bar_format": _BAR, "dynamic_ncols": True, "disable": quiet}
        self._bar = tqdm(total=total, initial=done, **how)
        self._every_s = _LINE_EVERY_S if self._bar.disable else _BAR_EVERY_S
        self.loss = math.nan  # the latest known
        self.pause()

    def pause(self) -> None:
        """Restart the measurement of the speed, as after an evaluation."""
        self._samples, self._since = 0, time.perf_counter()

    def step(self, taken: TakenSteps) -> None:
        """Note steps taken."""
        self.done += taken.steps
        self._samples += taken.samples
        spent = time.perf_counter() - self._since
        if spent >= self._every_s:
            known = math.isfinite(self.loss)
            loss = f"loss {short_loss(self.loss)}, " if known else ""
            speed = speed_in_words(self._samples / spent, self._unit)
            text = f"{self._whose}epoch {taken.epoch + 1}/{self._config.epochs}, "
            if self._bar.disable:
                alone = taken.worker is None or self._config.workers == 1 or self._whose
                whose = "" if alone else f" (worker {taken.worker})"
                text += f"lr {taken.learning_rate:.3g}{whose}, {loss}{speed}"
                self.print(f"  {self.done}/{self.total} steps, {text}")
            else:
                self._bar.set_postfix_str(f"{text}{loss}{speed}", refresh=False)
            self.pause()
        self._bar.update(taken.steps)

    def expect(self, more: int) -> None:
        """Note that the run takes `more` steps than expected; negative: fewer."""
        self.total += more
        self._bar.total = self.total

    def print(self, line: str) -> None:
        """Print a line to stdout; the bar makes way for it."""
        tqdm.write(line)
        sys.stdout.flush()
        self.pause()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def loss_of_worker(change: LostWorker) -> str:
    """Return a line on a lost worker."""
    out = f"; {change.samples} samples of unfinished epochs are skipped" if change.samples else ""
    return (
        f"warning: rank {change.rank} (worker {change.worker}) was lost after "
        f"{plural(change.rounds, 'round')} ({change.reason}); the others share its samples from "
        f"their next round on{out}"
    )


def refusal(report: RoundReport, config: RunConfig, precision: str, weights: Sequence[str]) -> str:
    """Return why a round was refused and what to try; `weights` names the model's tensors."""
    of_loss = report.fault == BAD_LOSS
    whose = f"worker {report.worker}" if of_loss or config.sync != "step" else "all workers"
    what = "its loss is not finite"
    if not of_loss:
        number = report.fault - BAD_WEIGHTS - 1
        name = "a weight on its way to rank 0" if number < 0 else weights[number]
        gradient = "the gradient of " if config.push != "weights" else ""
        what = f"{gradient}{name} is not finite, though its loss is"
    return (
        f"warning: round {report.round + 1} of epoch {report.epoch + 1} of {whose} is refused: "
        f"{what}; {steadier(config.lr, config.optimizer, precision, finite_loss=not of_loss)}"
    )


def missed_times(workers: Mapping[int, Mapping[str, float]]) -> str | None:
    """Return a warning if a worker's time in an epoch is far from the plan's."""
    errors = {
        worker: values["time_s"] / values["predicted_time_s"] - 1
        for worker, values in workers.items()
        if values["predicted_time_s"] > 0 and len(workers) > 1  # one worker: no plan needs it
    }
    far = {worker: error for worker, error in errors.items() if abs(error) > _TOLERANCE}
    if not far:
        return None
    worst = max(far, key=lambda worker: abs(far[worker]))
    return (
        f"warning: {len(far)} of {len(workers)} workers took other times than planned (worker "
        f"{worst}: {100 * far[worst]:+.0f} %); --profile again measures them"
    )


def plan_changes(before: Plan, plan: Plan) -> str:
    """Return a new plan's changes in words."""
    if len(plan.workers) > _MAX_PRINTED_WORKERS:
        moved = sum(a != b for a, b in zip(before.workers, plan.workers, strict=True))
        return f"new batches and shares for {moved} of {len(plan.workers)} workers"
    batches = " ".join(str(worker.local_batch_size) for worker in plan.workers)
    shares = " ".join(str(worker.samples) for worker in plan.workers)
    return f"batches {batches}, samples {shares}"


def speed_in_words(speed: float, unit: str) -> str:
    """Return a speed in words."""
    return f"{speed:.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s"


def times_in_words(times_s: Sequence[float]) -> str:
    """Return the workers' times, from the shortest to the longest; empty if none is known."""
    if not times_s or max(times_s) <= 0:
        return ""
    ends = [_two_digits(min(times_s)), _two_digits(max(times_s))]
    return f"  {'worker' if len(times_s) == 1 else 'workers'} {'-'.join(dict.fromkeys(ends))} s"


def _two_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


# --- the result


def evaluation_in_words(evaluation: Mapping[str, Any] | None) -> str:
    """Return an evaluation as part of the epoch's line; empty if there was none."""
    if evaluation is None:
        return ""
    ema, top5 = evaluation.get("ema_accuracy"), evaluation.get("top5_accuracy")
    averaged = "" if ema is None else f"  EMA {100 * ema:.1f} %"
    first5 = "" if top5 is None else f" (top-5 {100 * top5:.1f} %)"
    own = [(name, value) for name, value in evaluation.items() if name not in EVALUATED]
    others = "".join(f"  {name} {short_loss(value)}" for name, value in own[:_MOST_PRINTED])
    more = len(own) - _MOST_PRINTED
    others += f"  ({more} more)" if more > 0 else ""
    result = f"  eval {100 * evaluation['accuracy']:.1f} %{first5}"
    return f"{result}, loss {short_loss(evaluation['loss'])}{averaged}{others}"


def result_in_words(values: Mapping[str, Any], samples: int, unit: str, folder: Path) -> str:
    """Return a run's result, its times, its folder and what to try next, a line each.

    `values` are those of summary.json; `samples` is the number of evaluation samples.
    """
    best, top5 = values["best_accuracy"], values.get("final_top5_accuracy")
    simulated_s = values.get("virtual_time_s", 0.0)
    first5 = "" if top5 is None else f", top-5 {100 * top5:.2f} %"
    beside = f"; side by side the workers would train in {duration(simulated_s)}"
    tries = f"python -m dbsl.predict {folder} --dataset FOLDER tries it on images of your own; "
    return (
        f"accuracy {100 * values['final_accuracy']:.2f} % (best {100 * best:.2f} %){first5}, loss "
        f"{short_loss(values['final_loss'])}, on {samples} evaluation {unit}\n"
        f"{values['total_time_s']:.1f} s in all, of them training {values['train_time_s']:.1f} s "
        f"({speed_in_words(values['images_per_s'], unit)}) and start-up "
        f"{values['start_up_time_s']:.1f} s{beside if simulated_s else ''}\n"
        f"weights, figures of each epoch and a picture are in {folder}\n"
        f"next: {tries if unit == 'images' else ''}"
        f"--resume {folder} --epochs {2 * values['epochs']} trains it for as long again"
    )
