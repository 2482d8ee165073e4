"""A run's records: metrics.jsonl, summary.json and lines for people.

Only the main process writes them; on the others, the same calls do nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from dbsl.base.errors import DivergedError, SaveError, duration, px, require, short_loss, steadier
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.weights import graphs_made, names_of
from dbsl.config.hooks import Extra
from dbsl.config.settings import RunConfig
from dbsl.log import lines, rows
from dbsl.model import has_batch_norm
from dbsl.plan.types import (
    NO_FAULT,
    Plan,
    RoundReport,
    StepLine,
    report_from_plain,
)
from dbsl.profile.timing import device_name
from dbsl.run.folder import commit_of, started_script
from dbsl.run.meter import TakenSteps
from dbsl.run.workers import Workers

timm = lazy_import("timm")

_TRAINED = ("train_accuracy", "train_loss")  # of an evaluation: summary.json keeps these names
_OF_ROWS = ("samples", "resolution", "time_s")  # of an evaluation: summary.json omits these
_MISHAPS = "lost_"  # fields of `_SoFar` that summary.json has only if not empty
_FEW = 4  # samples: fewer give batch norm a poor mean and deviation
_RISES = 3  # times the first epoch's training loss, plus 1: a higher loss has diverged
_JUDGED_EPOCH = 2  # compared with the plan's times: caches and the device are warm


def _clocks(**seconds: float | None) -> dict[str, float]:
    """Return the clocks that are given."""
    return {name: value for name, value in seconds.items() if value is not None}


@dataclass
class _SoFar:
    """A run's totals over all its sessions."""

    epochs: int = 0
    train_time_s: float = 0.0  # at the last epoch's end
    samples: int = 0  # trained on
    first_loss: float = math.nan  # training loss of the first epoch; infinite: a rise was reported
    lost_workers: list[int] = field(default_factory=list)  # their processes died
    lost_samples: int = 0  # samples that nobody trained on because a worker was lost
    unreported: int = 0  # samples of the current epoch that were handed over without a report
    all_refused: bool = False  # rounds of the last epoch
    last_events: dict[str, Any] = field(default_factory=dict)  # of extras, by name


class RunLog:
    """Writes a run's files, moves its progress bar and prints its epochs; extras get every row.

    `state` is the resumed run's `state_dict`: metrics.jsonl loses what was written later. Its
    `taken` is the number of samples in the current round's joint steps that other workers took: no
    report has them.
    """

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self._workers, self._plans, self._config = workers, workers.plans, workers.plans.config
        self.folder, self.enabled = folder, workers.accelerator.is_main_process
        self.evaluated_epoch = -1  # the last in this session, on the main process
        self._exits = ExitStack()
        if not self.enabled:
            return
        plans, config = self._plans, self._config
        simulated = workers.accelerator.num_processes == 1 and config.sync != "step"
        all_count = config.dedicated_server or simulated
        self._counted = range(config.workers) if all_count else (0,)  # a joint step is counted once
        self._told = dict(plans.planner.plans.last)  # by resolution: the last one recorded
        self._unit = "images" if plans.stages[-1].resolution else "samples"
        self._normalises = config.local_batch_sizes is None and has_batch_norm(workers.raw_model)
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._so_far = _SoFar()
        self._evaluations: list[dict[str, Any]] = []  # rows
        if state:
            for epoch, reports in state["rounds"].items():
                self._rounds[epoch] = [report_from_plain(report) for report in reports]
            self._evaluations, self._so_far = state["evaluations"], _SoFar(**state["so_far"])
        # Line buffering: a killed run leaves whole lines. Others may also write lines.
        path = self.folder / "metrics.jsonl"
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        os.truncate(path, state["metrics_bytes"] if state else 0)
        self._display = self._begin_display()
        self._say = self._display.print
        self._state = state

    def __enter__(self) -> RunLog:
        if not self.enabled:
            return self
        state, done = self._state, self._so_far.epochs
        before = rows.read_metrics(self.folder / "metrics.jsonl")
        self._tell = self._exits.enter_context(self._plans.extras.report(self.folder, before))
        if samples := state and state.get("taken", 0):
            self._so_far.samples += samples
            self._so_far.unreported += samples
            self.write("restart", {"epoch": done, "samples": samples})
        for stage in self._plans.stages:  # of a resumed run: those new and not over
            known = state and asdict(stage) in state["stages"]
            if not known and (state is None or stage.end_epoch > done):
                row = rows.plan_row(stage, self._told[stage.resolution])
                self.write("plan", row | ({"from_epoch": done} if state else {}))
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._display.close()
            with suppress(OSError):  # a full disk: reported when the line was written
                self._file.close()
        self._exits.__exit__(*error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run's log continues from."""
        self._file.flush()
        return {
            "metrics_bytes": os.path.getsize(self._file.name),
            "rounds": {e: [asdict(r) for r in reports] for e, reports in self._rounds.items()},
            "evaluations": self._evaluations,
            "so_far": asdict(self._so_far),
        }

    def _plan_at(self, epoch: int) -> Plan:
        return self._told[self._plans.stage_at(epoch).resolution]

    def _steps_of(self, plan: Plan) -> int:
        return sum(plan.workers[worker].steps for worker in self._counted)

    def _begin_display(self) -> lines.Display:
        config, done = self._config, self._workers.progress.steps
        steps = [self._steps_of(self._plan_at(epoch)) for epoch in range(config.epochs)]
        under_way = chain(*self._rounds.values())
        done += sum(report.steps for report in under_way if report.worker in self._counted)
        done += sum(steps[: self._so_far.epochs])
        real = self._workers.accelerator.num_processes > 1 and not config.dedicated_server
        whose = "worker 0: " if real else ""  # this process's: others report at a round's end
        return lines.Display(sum(steps), done, config, self._unit, whose)

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a row, its epochs counted from 0, to metrics.jsonl; pass it to extras."""
        if not self.enabled:
            return
        row = rows.strict_numbers({"event": event, **row})
        try:
            self._file.write(json.dumps(rows.for_people(row), allow_nan=False) + "\n")
        except OSError as error:
            what = f"metrics.jsonl could not be written in {self.folder} ({error.strerror})"
            raise SaveError(f"{what}; the checkpoints in it are as they were") from error
        self._tell(row)

    def started(self, start_up_s: float) -> None:
        """Print how long it took until training began."""
        if self.enabled:
            self._say(f"start-up {duration(start_up_s)}, not counted as training")

    def hear(self, cluster: Cluster) -> None:
        """Record the workers' reports of steps and rounds since the last call, and lost workers.

        On other processes than the main one, the cluster reports nobody.
        """
        reports = [*cluster.reports()]
        if not self.enabled:
            return
        meter = self._workers.meter
        for line in () if meter.shares_batch else meter.take_lines():
            self.step(line)
        if (taken := meter.take_steps()).steps:
            self._display.step(taken)
        for report in reports:
            self.round(report, virtual_time_s=cluster.time_s)
        for lost in cluster.losses():
            self._so_far.lost_workers.append(lost.worker)
            self._so_far.lost_samples += lost.samples
            self.write("lost", asdict(lost))
            self._say(lines.loss_of_worker(lost))

    def step(self, line: StepLine) -> None:
        """Record a line that a worker reports every few steps."""
        self.write("step", rows.step_row(line))
        self._display.loss = line.loss

    def round(self, report: RoundReport, *, virtual_time_s: float | None = None) -> None:
        """Record a worker's report of its round, and the simulated clock at its end."""
        workers, config = self._workers, self._config
        for line in report.lines:  # from a worker in another process
            self.step(line)
        workers.meter.hear(report)
        if report.fault != NO_FAULT:  # else another report of the joint steps says why
            precision, names = workers.accelerator.mixed_precision, names_of(workers.raw_model)
            self._say(lines.refusal(report, config, str(precision), names))
        report = replace(report, lines=())
        if config.push == "weights":  # else by epoch and worker, at the epoch's end
            self.write("round", rows.round_row(report) | _clocks(virtual_time_s=virtual_time_s))
        self._rounds[report.epoch].append(report)
        self._so_far.samples += report.samples
        self._display.loss = report.loss
        # A dedicated server takes no steps: count them, and record new plans, here.
        if config.dedicated_server:
            plan = self._plans.planner.at(report.epoch, report.round)
            if plan is not None:
                self.plan(report.epoch, plan)
            place = report.epoch, report.learning_rate, report.worker
            self._display.step(TakenSteps(report.steps, report.samples, *place))

    def plan(self, epoch: int, plan: Plan) -> None:
        """Record the plan in force in a round of an epoch, if it has changed."""
        if not self.enabled:
            return
        sizes = [worker.local_batch_size or math.inf for worker in plan.workers]
        least = min(sizes)
        if self._normalises and least < min(_FEW, max(s for s in sizes if s < math.inf)):
            self._normalises = False
            self._say(
                f"warning: worker {sizes.index(least)} has batches of {least}, too few for batch "
                "norm's statistics; --min-batch-size 8 makes planned ones larger"
            )
        stage, before = self._plans.stage_at(epoch), self._plan_at(epoch)
        resolution = stage.resolution
        # Without a barrier, a slow worker may still be in a round with an earlier plan.
        newest = self._plans.planner.plans.last[resolution]
        if plan.workers == before.workers or plan.workers != newest.workers:
            return
        self._told[resolution] = plan
        later = (self._plans.stage_at(other) for other in range(epoch, self._config.epochs))
        epochs = sum(other.resolution == resolution for other in later)
        self._display.expect(epochs * (self._steps_of(plan) - self._steps_of(before)))
        self.write("plan", rows.plan_row(stage, plan) | {"from_epoch": epoch})
        where = px(resolution, " at ")
        self._say(f"from epoch {epoch + 1} on{where}: {lines.plan_changes(before, plan)}")

    def epoch_end(
        self,
        epoch: int,
        evaluation: Mapping[str, Any] | None = None,
        *,
        train_time_s: float,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record the end of an epoch after its rounds, and print a line.

        `evaluation` is a row; `train_time_s` excludes evaluation; `virtual_time_s` is the simulated
        cluster's clock.
        """
        if not self.enabled:
            return
        config, so_far, stage = self._config, self._so_far, self._plans.stage_at(epoch)
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        workers, plan = rows.of_workers(reports), self._plan_at(epoch)
        clocks = _clocks(train_time_s=train_time_s, virtual_time_s=virtual_time_s)
        found, figures = rows.together(reports), rows.figures_together(reports)
        rate = rows.last_learning_rate(reports)
        samples, so_far.unreported = found["samples"] + so_far.unreported, 0
        speed = samples / max(train_time_s - so_far.train_time_s, 1e-9)
        so_far.all_refused = bool(reports) and all(report.refused for report in reports)
        so_far.train_time_s, so_far.epochs = train_time_s, epoch + 1
        place = {"epoch": epoch, "resolution": stage.resolution}
        if config.push != "weights":  # a worker's pushes of an epoch are one round
            for worker, values in workers.items():
                own = [report for report in reports if report.worker == worker]
                self.write("round", rows.joined_row(own, values))
        times = rows.times_row(workers, plan) | figures | clocks | {"images_per_s": speed}
        self.write("times", place | times)
        if evaluation is not None:
            self._evaluations.append(dict(evaluation))
            self.evaluated_epoch = epoch
            trained = {"learning_rate": rate, "train_resolution": stage.resolution}
            self.write("eval", {"epoch": epoch, **evaluation, **clocks, **trained})
        for event, values in chain(*self._plans.extras.each(Extra.epoch, epoch, plan, reports)):
            self.write(event, place | values)
            so_far.last_events[event] = dict(values)
        # Other workers may have taken all of its steps: their losses are unknown.
        told = {"loss": found["loss"]} | figures if found["samples"] else {}
        loss = "".join(f"  {name} {short_loss(value)}" for name, value in told.items())
        epochs, side = config.epochs, px(stage.resolution, after="  ")
        self._say(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {side}"
            f"lr {rate:.3g}{loss}{lines.evaluation_in_words(evaluation)}  "
            f"{lines.speed_in_words(speed, self._unit)}"
            f"{lines.times_in_words([values['time_s'] for values in workers.values()])}"
        )
        self._warn(epoch, workers, found["loss"])
        self._display.pause()

    def _warn(self, epoch: int, workers: Mapping[int, Mapping[str, float]], loss: float) -> None:
        plans, config, so_far = self._plans, self._config, self._so_far
        # No warning for plans that follow measured times, or for workers slowed on purpose.
        expected = plans.known.measured and config.balance == "none" and not plans.machine.slows
        if expected and epoch == _JUDGED_EPOCH and (warning := lines.missed_times(workers)):
            self._say(warning)
        # A training loss may be any function: it is only known to fall.
        if math.isnan(so_far.first_loss) and math.isfinite(loss):
            so_far.first_loss = loss
        if loss > _RISES * abs(so_far.first_loss) + 1:
            self._say(
                f"warning: the training loss of epoch {epoch + 1} is {loss:.3g}, and was "
                f"{so_far.first_loss:.3g} in the first epoch: training diverges; lower lr "
                f"({config.lr:g} with {config.optimizer})"
            )
            so_far.first_loss = math.inf  # warn once

    def is_best(self, accuracy: float, loss: float) -> bool:
        """Whether a not yet recorded evaluation is the best; only the main process knows.

        The others return True: they leave an early end to the main process.
        """
        if not self.enabled:
            return True
        better = all(accuracy > other["accuracy"] for other in self._evaluations)
        return better and math.isfinite(loss)

    def results(self) -> dict[str, Any]:
        """Return the run's results so far: accuracies, loss, time, samples."""
        last, so_far = self._evaluations[-1], self._so_far
        trained = {name: value for name, value in last.items() if name in _TRAINED}
        final = {name: v for name, v in last.items() if name not in (*_TRAINED, *_OF_ROWS)}
        return {
            **{f"final_{name}": value for name, value in final.items()},
            "best_accuracy": max(evaluation["accuracy"] for evaluation in self._evaluations),
            **trained,
            **({"last_epoch_refused": True} if so_far.all_refused else {}),
            "train_time_s": so_far.train_time_s,
            "images_per_s": so_far.samples / max(so_far.train_time_s, 1e-9),
            "samples_seen": so_far.samples,
        }

    def sum_up(self) -> None:
        """Write summary.json atomically, print the result, and have extras report on the run."""
        if not self.enabled:
            return
        must = "end_epoch must call run.epoch with the metrics of the last epoch"
        require(self._evaluations, must, "none")
        workers, config, data = self._workers, self._config, self._workers.data
        simulated_s = workers.cluster.time_s
        late = graphs_made() - workers.graphs if workers.graphs else 0
        if late:
            self._say(f"{late} graphs were compiled while it trained (--no-compile compiles none)")
        sources = (("train", data.train), ("evaluation", data.evaluation))
        mishaps = {
            "recompilations": late,
            "refused_rounds": workers.cluster.refused,
            **{name: v for name, v in vars(self._so_far).items() if name.startswith(_MISHAPS)},
            "bad_images": {name: sorted(each.bad) for name, each in sources if each.bad},
        }
        values = {
            **self.results(),
            **({"virtual_time_s": simulated_s} if simulated_s and config.workers > 1 else {}),
            "start_up_time_s": workers.stopwatch.start_up_s,
            "total_time_s": workers.stopwatch.total_s,
            "epochs": self._so_far.epochs,
            **{n: getattr(config, n) for n in ("seed", "workers", "small_workers", "sync")},
            "classes": data.num_classes,
            "held_out": getattr(data, "held_out", ""),  # which images; see `dbsl.data.dataset.Data`
            "device": device_name(workers.accelerator.device),
            "precision": str(workers.accelerator.mixed_precision),
            "torch": torch.__version__,
            "timm": timm.__version__,
            **{name: value for name, value in mishaps.items() if value},
            **self._so_far.last_events,
            **({"commit": commit} if (commit := commit_of(started_script())) else {}),
        }
        text = json.dumps(rows.strict_numbers(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        samples = len(data.evaluation)
        self._say(lines.result_in_words(values, samples, self._unit, self.folder))


def check_result(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``DivergedError`` on the main process if a finished run has no usable result."""
    if not accelerator.is_main_process:
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if why := rows.no_result(summary):
        precision = str(accelerator.mixed_precision)
        remedy = steadier(config.lr, config.optimizer, precision, finite_loss=False)
        raise DivergedError(f"{why}: the run in {folder} diverged; {remedy}")
