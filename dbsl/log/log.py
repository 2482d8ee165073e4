"""What a run leaves: metrics.jsonl, summary.json and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in the
code, and from 1 in all that is written: files and lines for people.
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

from dbsl.base.errors import DivergedError, SaveError, duration, plural, px, short_loss, steadier
from dbsl.base.files import write_text
from dbsl.base.machine import lazy_import
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.weights import names_of
from dbsl.config.fields import refuse
from dbsl.config.hooks import Extra
from dbsl.config.settings import RunConfig
from dbsl.log import lines, rows
from dbsl.log.evaluation import Evaluation
from dbsl.model import has_batch_norm
from dbsl.plan.types import (
    NO_FAULT,
    Handover,
    Plan,
    RoundReport,
    StepLine,
    plan_from_plain,
    report_from_plain,
)
from dbsl.profile.timing import device_name
from dbsl.run.folder import commit_of, started_script
from dbsl.run.workers import Workers

timm = lazy_import("timm")

_FINAL = ("accuracy", "loss", "top5_accuracy", "ema_accuracy", "ema_loss")
_MISHAPS = "lost_"  # fields of `_SoFar` that summary.json has only if not empty
_FEW = 4  # samples: fewer give batch norm no mean and deviation to speak of
_RISES = 3  # times the first epoch's training loss, and 1: above it has diverged
_JUDGED_EPOCH = 2  # whose times are held against the plan: caches and the device are warm


@dataclass
class _SoFar:
    """What a run has come to, over all its sessions."""

    epochs: int = 0
    train_time_s: float = 0.0  # at the last epoch's end
    samples: int = 0  # trained on
    first_loss: float = math.nan  # training loss of the first epoch; infinite: a rise was told
    lost_workers: list[int] = field(default_factory=list)  # whose processes died
    lost_samples: int = 0  # samples that nobody trained on because a worker was lost
    unreported: int = 0  # samples of the epoch under way that were handed over without a report
    all_refused: bool = False  # rounds of the last epoch
    last_events: dict[str, Any] = field(default_factory=dict)  # of extras, by name


class RunLog:
    """Writes a run's files, moves its progress bar and prints its epochs; extras get every row.

    `state` is what `state_dict` of the run that goes on here returned: metrics.jsonl loses what was
    written later. `handover` is of other workers or plans, if they were others.
    """

    def __init__(
        self,
        folder: Path,
        workers: Workers,
        state: Mapping[str, Any] | None = None,
        handover: Handover | None = None,
    ) -> None:
        self._workers, self.meter = workers, workers.meter
        self._all_plans = plans = workers.plans
        self._config = config = plans.config
        self.folder, self.enabled = folder, workers.accelerator.is_main_process
        self.evaluated_epoch = -1  # the last that was, in this session and on the main process
        self._exits, self._tell = ExitStack(), None  # hands rows to extras, once it is entered
        if not self.enabled:
            return
        simulated = workers.accelerator.num_processes == 1 and config.sync != "step"
        all_count = config.dedicated_server or simulated
        self._counted = range(config.workers) if all_count else (0,)  # a joint step is counted once
        self._plans = dict(plans.first)  # in force, by resolution, as far as the log has been told
        self._since = dict.fromkeys(plans.first, (0, 0))  # epoch and round of the last change
        self._unit = "images" if plans.stages[-1].resolution else "samples"
        self._evaluated = len(workers.data.evaluation)  # that were told
        self._normalises = config.local_batch_sizes is None and has_batch_norm(workers.raw_model)
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._so_far = _SoFar()
        self._evaluations: list[Evaluation] = []
        if state:
            self._load_state_dict(state, same=handover is None)
        done = self._so_far.epochs
        # Line buffering: a killed run leaves whole lines. Others may write lines of theirs, too.
        path = self.folder / "metrics.jsonl"
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        os.truncate(path, state["metrics_bytes"] if state else 0)
        self._display = self._begin_display()
        self._say = self._display.print
        self.meter.on_step = self._display.step
        if not self.meter.shares_batch:  # else reports have the lines of a worker's processes
            self.meter.tell = self.step
        if handover is not None:
            self._count_steps_of(handover)
        for stage in plans.stages:  # a resumed run's that are not over and are new
            known = state and handover is None and asdict(stage) in state["stages"]
            if not known and (state is None or stage.end_epoch > done):
                row = rows.plan_row(stage, self._plans[stage.resolution])
                self.write("plan", row | ({"from_epoch": done} if state else {}))

    def _plan_at(self, epoch: int) -> Plan:
        return self._plans[self._all_plans.stage_at(epoch).resolution]

    def _steps_of(self, plan: Plan) -> int:
        return sum(plan.workers[worker].steps for worker in self._counted)

    def _begin_display(self) -> lines.Display:
        config, done = self._config, self._workers.progress.steps
        steps = [self._steps_of(self._plan_at(epoch)) for epoch in range(config.epochs)]
        under_way = chain(*self._rounds.values())
        done += sum(report.steps for report in under_way if report.worker in self._counted)
        done += sum(steps[: self._so_far.epochs])
        return lines.Display(sum(steps), done, config, self._unit)

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, its epochs counted from 0; extras get it."""
        if not self.enabled:
            return
        row = rows.strict_numbers({"event": event, **row})
        try:
            self._file.write(json.dumps(rows.for_people(row), allow_nan=False) + "\n")
        except OSError as error:
            what = f"metrics.jsonl could not be written in {self.folder} ({error.strerror})"
            raise SaveError(f"{what}; the checkpoints in it are as they were") from error
        if self._tell:
            self._tell(row)

    def __enter__(self) -> RunLog:
        if self.enabled:
            before = rows.read_metrics(self.folder / "metrics.jsonl")
            report = self._all_plans.extras.report(self.folder, before)
            self._tell = self._exits.enter_context(report)
        return self

    def __exit__(self, *error: Any) -> None:
        if self.enabled:
            self._display.close()
            with suppress(OSError):  # a full disk: it was said when the line was written
                self._file.close()
        self._exits.__exit__(*error)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run's log goes on from."""
        self._file.flush()
        return {
            "metrics_bytes": os.path.getsize(self._file.name),
            "planned_since": dict(self._since),
            "plans": {resolution: asdict(plan) for resolution, plan in self._plans.items()},
            "rounds": {e: [asdict(r) for r in reports] for e, reports in self._rounds.items()},
            "evaluations": [asdict(evaluation) for evaluation in self._evaluations],
            "so_far": asdict(self._so_far),
        }

    def _load_state_dict(self, state: Mapping[str, Any], *, same: bool) -> None:
        if same:  # else new plans are made
            self._since |= state["planned_since"]
            self._plans |= {r: plan_from_plain(values) for r, values in state["plans"].items()}
        for epoch, reports in state["rounds"].items():
            self._rounds[epoch] = [report_from_plain(report) for report in reports]
        self._evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        self._so_far = _SoFar(**state["so_far"])

    def _count_steps_of(self, handover: Handover) -> None:
        """Count joint steps that other workers took of the round under way: no report has them."""
        if handover.samples:
            self._so_far.samples += handover.samples
            self._so_far.unreported += handover.samples
            self.write("restart", {"epoch": self._so_far.epochs, "samples": handover.samples})

    def started(self, start_up_s: float) -> None:
        """Say how long it took until training began."""
        if self.enabled:
            self._say(f"start-up {duration(start_up_s)}, not counted as training")

    def step(self, line: StepLine) -> None:
        """Record what a worker says of itself every so many steps."""
        self.write("step", rows.step_row(line))
        self._display.loss = line.loss

    def round(self, report: RoundReport, *, virtual_time_s: float | None = None) -> None:
        """Record what a worker says of its round, and the simulated clock at its end."""
        if not self.enabled:
            return
        for line in report.lines:  # a worker in another process has sent them
            self.step(line)
        self.meter.hear(report)
        if report.fault != NO_FAULT:  # without: another report of the joint steps says why
            precision = str(self._workers.accelerator.mixed_precision)
            self._say(
                lines.refusal(report, self._config, precision, names_of(self._workers.raw_model))
            )
        report = replace(report, lines=())
        if self._config.push == "weights":  # else by epoch and worker, at its end
            clock = rows.given_values({"virtual_time_s": virtual_time_s})
            self.write("round", rows.round_row(report) | clock)
        self._rounds[report.epoch].append(report)
        self._so_far.samples += report.samples
        self._display.loss = report.loss
        # A dedicated server takes no steps: they are counted, and new plans told, here.
        if self._config.dedicated_server:
            plan = self._all_plans.planner.at(report.epoch, report.round)
            if plan is not None:
                self.plan(report.epoch, report.round, plan)
            self._display.step(
                report.samples, report.epoch, report.learning_rate, report.worker, report.steps
            )

    def hear(self, cluster: Cluster) -> None:
        """Record lost workers; elsewhere than on rank 0 the cluster tells of none."""
        for lost in cluster.losses():
            self._so_far.lost_workers.append(lost.worker)
            self._so_far.lost_samples += lost.samples
            self.write("lost", asdict(lost))
            self._say(lines.loss_of_worker(lost))

    def plan(self, epoch: int, round_: int, plan: Plan) -> None:
        """Record the plan in force in a round, if it is another than before."""
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
        stage, before = self._all_plans.stage_at(epoch), self._plan_at(epoch)
        resolution = stage.resolution
        # Without a barrier, a slow worker may still be in a round with an earlier plan.
        if plan is before or (epoch, round_) < self._since[resolution]:
            return
        self._plans[resolution], self._since[resolution] = plan, (epoch, round_)
        if plan.workers == before.workers:
            return
        later = (self._all_plans.stage_at(other) for other in range(epoch, self._config.epochs))
        epochs = sum(other.resolution == resolution for other in later)
        self._display.expect(epochs * (self._steps_of(plan) - self._steps_of(before)))
        self.write("plan", rows.plan_row(stage, plan) | {"from_epoch": epoch})
        where = px(resolution, " at ")
        self._say(f"from epoch {epoch + 1} on{where}: {lines.plan_changes(before, plan)}")

    def epoch_end(
        self,
        epoch: int,
        evaluation: Evaluation | None = None,
        *,
        train_time_s: float,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record the end of an epoch, whose rounds have been recorded; print a line.

        `train_time_s` has no evaluation in it; `virtual_time_s` is the simulated cluster's clock.
        """
        if not self.enabled:
            return
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        workers, plan = rows.of_workers(reports), self._plan_at(epoch)
        clocks = rows.given_values({"train_time_s": train_time_s, "virtual_time_s": virtual_time_s})
        found, figures = rows.together(reports), rows.figures_together(reports)
        rate = rows.last_learning_rate(reports)
        samples, self._so_far.unreported = found["samples"] + self._so_far.unreported, 0
        speed = samples / max(train_time_s - self._so_far.train_time_s, 1e-9)
        self._so_far.all_refused = bool(reports) and all(report.refused for report in reports)
        self._so_far.train_time_s, self._so_far.epochs = train_time_s, epoch + 1
        config, resolution = self._config, self._all_plans.stage_at(epoch).resolution
        place = {"epoch": epoch, "resolution": resolution}
        # A worker's pushes of an epoch are one round: its last report, with their sums.
        for worker, values in workers.items() if config.push != "weights" else ():
            last = next(report for report in reversed(reports) if report.worker == worker)
            names = {**asdict(last), **last.figures}
            own = {name: value for name, value in values.items() if name in names}
            refused = all(report.refused for report in reports if report.worker == worker)
            row = rows.round_row(replace(last, refused=refused))
            self.write("round", row | own | {"round": 0})
        times = rows.times_row(workers, plan) | figures | clocks | {"images_per_s": speed}
        self.write("times", place | times)
        if evaluation is not None:
            self._evaluations.append(evaluation)
            self.evaluated_epoch = epoch
            row = {"epoch": epoch} | rows.given_values(asdict(evaluation))
            row |= row.pop("more") | clocks
            self.write("eval", row | {"learning_rate": rate, "train_resolution": resolution})
        for event, values in chain(*self._all_plans.extras.each(Extra.epoch, epoch, plan, reports)):
            self.write(event, place | values)
            self._so_far.last_events[event] = dict(values)
        # Other workers may have taken all of its steps: their losses are not known.
        told = {"loss": found["loss"]} | figures if found["samples"] else {}
        loss = "".join(f"  {name} {short_loss(value)}" for name, value in told.items())
        epochs = config.epochs
        self._say(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {px(resolution, after='  ')}"
            f"lr {rate:.3g}{loss}{lines.evaluation_in_words(evaluation)}  "
            f"{lines.speed_in_words(speed, self._unit)}"
            f"{lines.times_in_words([values['time_s'] for values in workers.values()])}"
        )
        self._warn(epoch, workers, evaluation, found["loss"])
        self._display.pause()

    def _warn(
        self,
        epoch: int,
        workers: Mapping[int, Mapping[str, float]],
        evaluation: Evaluation | None,
        loss: float,
    ) -> None:
        plans, config, so_far = self._all_plans, self._config, self._so_far
        # Plans that follow measured times, and workers slowed on purpose, are not warned of.
        expected = plans.known.measured and config.balance == "none" and not plans.machine.slows
        if expected and epoch == _JUDGED_EPOCH and (warning := lines.missed_times(workers)):
            self._say(warning)
        if evaluation is not None and evaluation.samples < self._evaluated:
            left_out, self._evaluated = self._evaluated - evaluation.samples, evaluation.samples
            self._say(
                f"warning: evaluations are of {plural(evaluation.samples, self._unit[:-1])}: "
                f"{left_out} of {left_out + evaluation.samples} cannot be decoded"
            )
        # A training loss may be anybody's function: it is only known to fall.
        if math.isnan(so_far.first_loss) and math.isfinite(loss):
            so_far.first_loss = loss
        if loss > _RISES * abs(so_far.first_loss) + 1:
            self._say(
                f"warning: the training loss of epoch {epoch + 1} is {loss:.3g}, and was "
                f"{so_far.first_loss:.3g} in the first epoch: training diverges; lower lr "
                f"({config.lr:g} with {config.optimizer})"
            )
            so_far.first_loss = math.inf  # said once

    def is_best(self, accuracy: float, loss: float) -> bool:
        """Whether an evaluation that is not recorded yet is the best; only the main process knows.

        The others say yes: who asks for an early end leaves it to the main process.
        """
        if not self.enabled:
            return True
        better = all(accuracy > other.accuracy for other in self._evaluations)
        return better and math.isfinite(loss)

    def results(self) -> dict[str, Any]:
        """Return what the run came to so far: accuracies, loss, time, samples."""
        last, so_far = self._evaluations[-1], self._so_far
        values = {
            **{f"final_{name}": getattr(last, name) for name in _FINAL},
            **{f"final_{name}": value for name, value in last.more.items()},
            "best_accuracy": max(evaluation.accuracy for evaluation in self._evaluations),
            "train_accuracy": last.train_accuracy,
            "train_loss": last.train_loss,
            "last_epoch_refused": so_far.all_refused or None,
            "train_time_s": so_far.train_time_s,
            "images_per_s": so_far.samples / max(so_far.train_time_s, 1e-9),
            "samples_seen": so_far.samples,
        }
        return rows.given_values(values)

    def sum_up(self) -> None:
        """Write summary.json in one go, print the result, and have extras report on the run."""
        if not self.enabled:
            return
        must = "end_epoch must call run.epoch with the metrics of the last epoch"
        refuse([(not self._evaluations, must, "none")])
        workers, config, data = self._workers, self._config, self._workers.data
        simulated_s = workers.cluster.time_s
        sources = (("train", data.train), ("evaluation", data.evaluation))
        mishaps = {
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
        result = lines.result_in_words(values, self._unit)
        self._say(f"{result}; all of it in {self.folder}")


def check_result(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``DivergedError`` on the main process if a finished run's result is none."""
    if not accelerator.is_main_process:
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if why := rows.no_result(summary):
        precision = str(accelerator.mixed_precision)
        remedy = steadier(config.lr, config.optimizer, precision, finite_loss=False)
        raise DivergedError(f"{why}: the run in {folder} diverged; {remedy}")
