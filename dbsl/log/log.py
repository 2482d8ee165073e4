"""The plans that a run's log has recorded: which holds when, and how many steps it takes.

Where a run's records go: metrics.jsonl.

Training that diverges or learns nothing: said as soon as it is seen, and never a success.

What a run leaves: metrics.jsonl, summary.json, tracker records and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in the
code, and from 1 in all that is written: files, trackers, lines for people.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator

from dbsl.base.errors import DivergedError, SaveError
from dbsl.base.files import write_text
from dbsl.base.words import duration, plural, px, short_loss, steadier
from dbsl.config.settings import RunConfig
from dbsl.extras.charts import Charts, tracker_ids
from dbsl.extras.noise import NoiseAverage, noise_summary
from dbsl.log.lines import Display, MemberLog, speed_in_words
from dbsl.log.meter import StepMeter
from dbsl.log.rows import (
    STEPS,
    WORKERS,
    add_shares,
    epoch_charts,
    evaluation_charts,
    evaluation_in_words,
    figures_together,
    for_people,
    given_values,
    last_learning_rate,
    mean_times,
    missed_times,
    of_workers,
    plan_changes,
    plan_row,
    pushes_row,
    read_metrics,
    result_in_words,
    round_row,
    step_charts,
    step_row,
    strict_numbers,
    times_by_worker,
    times_in_words,
    together,
    worker_rows,
)
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.types import (
    BAD_LOSS,
    BAD_WEIGHTS,
    NO_FAULT,
    Plan,
    Restart,
    RoundReport,
    StepLine,
    plan_from_plain,
    report_from_plain,
)
from dbsl.run.evaluation import Evaluation
from dbsl.run.folder import check_metrics


class Planned:
    """Stages and the plan in force at each resolution.

    Attributes:
        stages: All stages of the run.
        first: The plan that each resolution starts with.

    Args:
        stages: All stages of the run.
        plans: The plan of each resolution.
        counted: Workers whose steps count; for joint steps one.
    """

    def __init__(
        self, stages: Sequence[Stage], plans: Mapping[int, Plan], counted: Sequence[int]
    ) -> None:
        self.stages = stages
        self.first, self._plans = dict(plans), dict(plans)
        self._from = dict.fromkeys(plans, 0)  # epochs from which they are in force
        self._counted = counted
        self._last = dict.fromkeys(plans, (0, 0))  # epochs and rounds of the last change

    @property
    def epochs(self) -> int:
        """Epochs of the run."""
        return self.stages[-1].end_epoch

    @property
    def steps(self) -> int:
        """Steps of the run."""
        return sum(self._steps_of(self._plans[s.resolution]) * len(s.epochs) for s in self.stages)

    @property
    def latest(self) -> dict[int, tuple[int, Plan]]:
        """Since which epoch the plan in force holds, and that plan, where it is not the first."""
        return {
            resolution: (self._from[resolution], plan)
            for resolution, plan in self._plans.items()
            if plan.workers != self.first[resolution].workers
        }

    def at(self, epoch: int) -> Plan:
        """Return the plan of an epoch."""
        return self._plans[stage_at(self.stages, epoch).resolution]

    def change(self, epoch: int, round_: int, plan: Plan) -> tuple[Plan, int] | None:
        """Take the plan of a round; return the one before, and the steps that the run gains.

        None: nothing has changed.
        """
        resolution = stage_at(self.stages, epoch).resolution
        before = self._plans[resolution]
        # Without a barrier, a slow worker may still be in a round with an earlier plan.
        if plan is before or (epoch, round_) < self._last[resolution]:
            return None
        self._plans[resolution], self._from[resolution] = plan, epoch
        self._last[resolution] = (epoch, round_)
        if plan.workers == before.workers:
            return None
        own = [stage for stage in self.stages if stage.resolution == resolution]
        left = sum(max(0, s.end_epoch - max(s.first_epoch, epoch)) for s in own)
        return before, left * (self._steps_of(plan) - self._steps_of(before))

    def new_rows(
        self, state: Mapping[str, Any] | None, begin: int, *, anew: bool
    ) -> list[dict[str, Any]]:
        """Return a row for each stage; of a resumed run for those not over that are new.

        All are where plans were made anew. `begin` is the epoch that the run goes on with.
        """
        rows = [plan_row(stage, self._plans[stage.resolution]) for stage in self.stages]
        if state is None:
            return rows
        return [
            row | {"from_epoch": begin}
            for stage, row in zip(self.stages, rows, strict=True)
            if stage.end_epoch > begin and (anew or asdict(stage) not in state["stages"])
        ]

    def steps_done(self, state: Mapping[str, Any]) -> int:
        """Return how many of all steps of the run, as it is now, earlier sessions took."""
        share, before = state["share_done"], state["stages"][-1]["end_epoch"]
        if before == self.epochs:
            return round(share * self.steps)
        epochs = share * before  # done
        return round(
            sum(
                self._steps_of(self._plans[stage.resolution])
                * min(max(epochs - stage.first_epoch, 0), len(stage.epochs))
                for stage in self.stages
            )
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "planned_epoch": dict(self._from),
            "plans": {resolution: asdict(plan) for resolution, plan in self._plans.items()},
            "stages": [asdict(stage) for stage in self.stages],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the plans that `state_dict` returned."""
        self._from |= state["planned_epoch"]
        self._last |= {resolution: (epoch, 0) for resolution, epoch in self._from.items()}
        self._plans |= {r: plan_from_plain(values) for r, values in state["plans"].items()}

    def _steps_of(self, plan: Plan) -> int:
        return sum(plan.workers[worker].steps for worker in self._counted)


def epochs_done(state: Mapping[str, Any] | None) -> int:
    """Return the complete epochs of a log's state; None: of a run that begins."""
    return state["epoch"] + 1 if state and state["train_time_s"] else 0


class Sink:
    """A run's metrics.jsonl, on the main process.

    Epochs count from 1 in it.

    Args:
        folder: The run folder; it exists.
        keep_bytes: Bytes of metrics.jsonl to go on behind.

    Raises:
        SettingError: If the file is shorter than that.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self._folder = folder
        self._file = _open_metrics(folder / "metrics.jsonl", keep_bytes)

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl."""
        self._file.flush()
        return self._file.tell()

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a record, whose epochs count from 0 as in the code."""
        row = strict_numbers({"event": event, **for_people(row)})
        line = json.dumps(row, allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise SaveError(
                f"metrics.jsonl could not be written in {self._folder} ({error.strerror}); the "
                "checkpoints in it are as they were"
            ) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # a full disk: it was said when the line was written
            self._file.close()


def _open_metrics(path: Path, keep_bytes: int) -> TextIO:
    check_metrics(path, keep_bytes)
    if keep_bytes:
        os.truncate(path, keep_bytes)
    # Line buffering: a killed run leaves whole lines.
    return open(path, "a" if keep_bytes else "w", encoding="utf-8", buffering=1)


# An epoch's training loss above so many times the first one's, and 1, has diverged.
_RISES = 3
# Steps of a worker after the warm-up in which a network at a fit learning rate learns to do better
# than to guess, in so many epochs or steps. The first ones at the full rate are often worse.
_JUDGED_STEPS = 16
_JUDGED_EPOCHS, _MANY_STEPS = 3, 100
_NO_BETTER = 0.99  # times the cross-entropy of guessing
_CHANCE = 1.2  # times its accuracy: confident models that tell classes apart are above
_FALLS = 0.05  # share that a training loss loses from one epoch to the next, on its way down

# Times the loss of guessing. A loss like that means logits wrong by thousands for most samples:
# confident or overfitted models that still tell classes apart are far below it.
_NO_RESULT = 1000.0


class DivergenceWarning:
    """Says once that training diverges, and once that it learns nothing.

    Of a training loss, which may be anybody's function, it knows whether it is finite, rises and
    falls. An evaluation's cross-entropy is held against that of guessing. `say` takes the line.
    `precision` is that of forward passes, and `weights` are the names of the model's tensors.
    """

    def __init__(
        self,
        config: RunConfig,
        classes: int,
        say: Callable[[str], object],
        *,
        precision: str = "no",
        weights: Sequence[str] = (),
    ) -> None:
        self._config, self._classes, self._say = config, classes, say
        self._precision, self._weights = precision, weights
        self.first: float | None = None  # training loss of the run's first epoch
        self._said = self._said_none_learnt = False
        self._before = math.nan  # training loss of the epoch before
        self._epochs = self._steps = 0  # since the warm-up, or an evaluation better than guessing

    def look(self, report: RoundReport) -> None:
        """Take a round; each that is refused is told."""
        if report.fault == NO_FAULT:  # not refused, or another report of the joint steps says why
            return
        config, of_loss = self._config, report.fault == BAD_LOSS
        self._said |= of_loss
        joint = config.sync == "step" and not of_loss
        whose = "all workers" if joint else f"worker {report.worker}"
        what = "its loss is not finite"
        if not of_loss:
            number = report.fault - BAD_WEIGHTS - 1
            name = "a weight on its way to rank 0" if number < 0 else self._weights[number]
            gradient = "the gradient of " if config.push == "gradients" else ""
            what = f"{gradient}{name} is not finite, though its loss is"
        remedy = steadier(config.lr, config.optimizer, self._precision, finite_loss=not of_loss)
        self._say(
            f"warning: round {report.round + 1} of epoch {report.epoch + 1} of {whose} is refused: "
            f"{what}; {remedy}"
        )

    def look_at_epoch(
        self, epoch: int, loss: float, found: Evaluation | None, *, steps: int, batch_size: int
    ) -> None:
        """Take an epoch's training loss, its evaluation, if any, and the steps of a worker."""
        config, guessing = self._config, math.log(self._classes)
        if self.first is None and math.isfinite(loss):
            self.first = loss
        if self.first is not None and loss > _RISES * abs(self.first) + 1:
            self._diverges(epoch, f"is {loss:.3g}, and was {self.first:.3g} in the first epoch")
        falls = loss < self._before - _FALLS * abs(self._before)
        self._before, last = loss, epoch + 1 == config.epochs
        warm = last or epoch >= (config.warmup_epochs or 0)
        if self._said or self._said_none_learnt or not warm or self._classes < 2:
            return
        self._epochs, self._steps = self._epochs + 1, self._steps + steps
        if found is None:
            return
        if found.loss < _NO_BETTER * guessing or found.accuracy > _CHANCE / self._classes:
            self._epochs = self._steps = 0
            return
        enough = last or self._epochs >= _JUDGED_EPOCHS or self._steps >= _MANY_STEPS
        if falls or self._steps < _JUDGED_STEPS or not enough or not math.isfinite(found.loss):
            return
        self._said_none_learnt = True
        self._say(
            f"warning: the evaluation's cross-entropy is {found.loss:.3g} after epoch {epoch + 1}, "
            f"no better than guessing among {self._classes} classes ({guessing:.2f}): nothing is "
            f"learnt with lr {config.lr:g} ({config.optimizer}, {batch_size} samples a step); try "
            f"another, {config.lr / 10:g} first"
        )

    def _diverges(self, epoch: int, how: str) -> None:
        if not self._said:
            self._say(
                f"warning: the training loss of epoch {epoch + 1} {how}: training diverges; lower "
                f"lr ({self._config.lr:g} with {self._config.optimizer})"
            )
        self._said = True


def check_result(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``DivergedError`` on the main process if a finished run's result is none."""
    if not accelerator.is_main_process:
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if why := no_result(summary):
        precision = str(accelerator.mixed_precision)
        remedy = steadier(config.lr, config.optimizer, precision, finite_loss=False)
        raise DivergedError(f"{why}: the run in {folder} diverged; {remedy}")


def no_result(summary: Mapping[str, Any]) -> str | None:
    """Return why a run's summary tells of no trained model, or None."""
    loss = summary.get("final_loss", 0.0)
    if loss is None or not math.isfinite(loss):  # JSON has no number for it
        return "the loss of the final evaluation is not finite"
    classes = summary["classes"]
    if classes > 1 and loss > _NO_RESULT * math.log(classes):
        return (
            f"the loss of the final evaluation is {loss:.3g}, more than {_NO_RESULT:,.0f} times "
            f"that of guessing among {classes} classes"
        )
    if summary.get("last_epoch_refused"):
        return "every round of the last epoch was refused, since loss or weights were not finite"
    return None


_FEW = 4  # samples: fewer give batch norm no mean and deviation to speak of
_JUDGED_EPOCH = 2  # whose times are held against the plan: caches and the device are warm


class RunLog:
    """Writes a run's files, feeds its trackers, moves its progress bar and prints its epochs.

    Start the trackers before.

    Args:
        folder: The run folder; it exists.
        accelerator: Tells the main process and holds the trackers.
        stages: All stages of the run.
        plans: The plan of each resolution.
        expects_times: Whether workers are to take the times of the plan, or a warning is said.
        pushes: Whether rounds are single pushes: they are then recorded by epoch and worker.
        meter: Makes the lines of this process's workers; None: there are none.
        counted: Workers whose steps the display counts; of joint steps one.
        plan_of: Where this process takes no steps: the plan of a recorded round, from (epoch,
            round). Steps are then counted, and new plans told, where a round is recorded.
        samples: Training samples; None: those of the plans, which may leave out a last batch.
        evaluated: Evaluation samples that were told; a line says if fewer can be read.
        normalises: Whether batch norm takes each worker's batch by itself: a line says so if one
            becomes small.
        bce: Whether training's loss is binary cross-entropy: evaluation's is cross-entropy.
        divergence: Is shown every round's loss, and every epoch's with its evaluation.
        state: Of the run that goes on here, what `state_dict` returned; metrics.jsonl then loses
            what was written later.
        restart: What other workers or plans have handed over; None: it goes on as it was.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        stages: Sequence[Stage],
        plans: Mapping[int, Plan],
        expects_times: bool = False,
        *,
        pushes: bool = False,
        meter: StepMeter | None = None,
        counted: Sequence[int] = (0,),
        plan_of: Callable[[int, int], Plan | None] | None = None,
        samples: int | None = None,
        evaluated: int = 0,
        normalises: bool = False,
        bce: bool = False,
        divergence: DivergenceWarning | None = None,
        state: Mapping[str, Any] | None = None,
        restart: Restart | None = None,
    ) -> None:
        self.members = MemberLog()
        self.enabled = accelerator.is_main_process
        self.meter = meter or StepMeter(0)
        if not self.enabled:
            return
        self.folder = folder
        self._planned = Planned(stages, plans, counted)
        self._pushes = pushes
        self._divergence = divergence
        self._evaluated = evaluated
        self._normalises = normalises
        self._loss, self._eval_loss = ("BCE", "cross-entropy") if bce else ("loss", "loss")
        self._expects_times = expects_times
        self._plan_of = plan_of
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._train_time_s = 0.0  # at the last epoch's end
        self._samples = 0  # trained on so far
        self._all_refused = False  # in the last epoch
        self._evaluations: list[Evaluation] = []
        self._evaluated_epoch = -1  # the last that was, in this session
        self._epochs_done = 0
        self._noise = NoiseAverage(samples or max(plan.samples for plan in plans.values()))
        if state:
            self._load_state_dict(state)
            if restart is None:  # else plans are made anew
                self._planned.load_state_dict(state)
        self._accelerator = accelerator
        self._sink = Sink(folder, state["metrics_bytes"] if state else 0)
        most = max(len(plan.workers) for plan in plans.values())
        before = state["trackers"] if state else {}
        self._charts = Charts(accelerator, most, folder.name, before)
        if state and accelerator.trackers:
            self._charts.resume(read_metrics(folder / "metrics.jsonl"))
        done = self._planned.steps_done(state) if state else 0
        self._unit = "images" if stages[-1].resolution else "samples"
        steps, epochs = self._planned.steps, self._planned.epochs
        self._display = Display(steps, done, epochs, self._unit, self._loss, alone=most == 1)
        self.meter.tell, self.meter.on_step = self.step, self._display.step
        self.members.record(self._sink.write, self._display.print)
        if restart is not None:
            self._recount(restart)
        new = self._planned.new_rows(state, self._epochs_done, anew=restart is not None)
        for row in new:
            self._sink.write("plan", row)
        table = [{"resolution": r, **row} for r in plans for row in worker_rows(plans[r])]
        self.has_new_plans = bool(new)
        self._charts.table("plan/table", table, again=self.has_new_plans)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self.enabled:
            self._charts.close(failed=kind is not None)
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run's log goes on from."""
        return {
            "metrics_bytes": self._sink.size,
            **self._planned.state_dict(),
            "share_done": self._display.done / max(self._display.total, 1),
            "rounds": {e: [asdict(r) for r in reports] for e, reports in self._rounds.items()},
            "train_time_s": self._train_time_s,
            "samples": self._samples,
            "evaluations": [asdict(evaluation) for evaluation in self._evaluations],
            "epoch": self._epochs_done - 1,
            **self.members.state_dict(),
            "noise": self._noise.state_dict(),
            "first_loss": self._divergence and self._divergence.first,
            "trackers": tracker_ids(self._accelerator),
        }

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        for epoch, reports in state["rounds"].items():
            self._rounds[epoch] = [report_from_plain(report) for report in reports]
        self._train_time_s = state["train_time_s"]
        self._samples = state["samples"]
        self._evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        self._epochs_done = epochs_done(state)
        self.members.load_state_dict(state)
        if self._divergence is not None:
            self._divergence.first = state["first_loss"]
        self._noise.load_state_dict(state["noise"])

    def _recount(self, restart: Restart) -> None:
        """Count what other workers had done as what they hand over of it.

        Their rounds of epochs under way get numbers below 0: those of the new workers may begin
        anew.
        """
        for report in restart.reports:
            self.round(report)
        for worker, epoch, round_ in restart.again:
            for report in list(self._rounds[epoch]):
                if (report.worker, report.round) == (worker, round_):
                    self._rounds[epoch].remove(report)
                    self._samples -= report.samples
                    place = {"worker": worker, "epoch": epoch, "round": round_}
                    self._sink.write("undone", {**place, "samples": report.samples})
        self._samples += restart.samples_under_way
        taken = {"steps": restart.steps_under_way, "samples": restart.samples_under_way}
        under_way = {epoch for epoch, reports in self._rounds.items() if reports} | {*restart.left}
        under_way |= {self._epochs_done} if restart.steps else set()
        for epoch in sorted(under_way.difference(end.epoch for end in restart.finished)):
            joint = taken if epoch == self._epochs_done else dict.fromkeys(taken, 0)
            self._sink.write("restart", {"epoch": epoch, **joint})
            past = 1 + max((report.round for report in self._rounds[epoch]), default=0)
            self._rounds[epoch] = [replace(r, round=r.round - past) for r in self._rounds[epoch]]

    def started(self, start_up_s: float) -> None:
        """Say how long it took until training began."""
        if self.enabled:
            self._display.print(f"start-up {duration(start_up_s)}, not counted as training")

    def step(self, line: StepLine) -> None:
        """Record what a worker says of itself every so many steps."""
        self._sink.write("step", step_row(line))
        self._display.loss = line.loss
        self._charts.workers(STEPS, {line.worker: step_charts(line)}, line.epoch + line.progress)

    def round(self, report: RoundReport, *, virtual_time_s: float | None = None) -> None:
        """Record what a worker says of its round, and the simulated clock at its end."""
        if not self.enabled:
            return
        for line in report.lines:  # a worker in another process has sent them
            self.step(line)
        self.meter.hear(report)
        if self._divergence is not None:
            self._divergence.look(report)
        report = replace(report, logged=0, lines=())
        if not self._pushes:
            self._sink.write(
                "round", round_row(report) | given_values({"virtual_time_s": virtual_time_s})
            )
        self._rounds[report.epoch].append(report)
        self._samples += report.samples
        self._display.loss = report.loss
        if self._plan_of is not None:
            if (plan := self._plan_of(report.epoch, report.round)) is not None:
                self.plan(report.epoch, report.round, plan)
            self._display.step(
                report.samples, report.epoch, report.learning_rate, report.worker, report.steps
            )

    def plan(self, epoch: int, round_: int, plan: Plan) -> None:
        """Record the plan in force in a round, if it is another than before."""
        if not self.enabled:
            return
        self._look_at_batches(plan)
        if (change := self._planned.change(epoch, round_, plan)) is None:
            return
        before, more_steps = change
        stage = stage_at(self._planned.stages, epoch)
        self._display.expect(more_steps)
        self._sink.write("plan", plan_row(stage, plan) | {"from_epoch": epoch})
        self._display.print(
            f"from epoch {epoch + 1} on{px(stage.resolution, ' at ')}: {plan_changes(before, plan)}"
        )

    def _look_at_batches(self, plan: Plan) -> None:
        """Say once that a worker has fewer samples a step than the others, and too few."""
        sizes = [worker.local_batch_size or math.inf for worker in plan.workers]
        least = min(sizes)
        if self._normalises and least < min(_FEW, max(s for s in sizes if s < math.inf)):
            self._normalises = False
            self._display.print(
                f"warning: worker {sizes.index(least)} has batches of {least}, of which batch norm "
                "has no good statistics; --min-batch-size 8 plans larger ones"
            )

    def epoch_end(
        self,
        epoch: int,
        evaluation: Evaluation | None = None,
        *,
        train_time_s: float,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record the end of an epoch, evaluated or not: one tracker record, one printed line.

        All its rounds have been recorded. `train_time_s` has no evaluation in it; `virtual_time_s`
        is the simulated cluster's clock. The learning rate is that of the epoch's last step.
        """
        if not self.enabled:
            return
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        self._all_refused = bool(reports) and all(report.refused for report in reports)
        plan, resolution = self._planned.at(epoch), stage_at(self._planned.stages, epoch).resolution
        workers, total, figures = of_workers(reports), together(reports), figures_together(reports)
        learning_rate = last_learning_rate(reports)
        if self._pushes:
            for worker, values in workers.items():
                first = next(report for report in reports if report.worker == worker)
                self._sink.write("round", pushes_row(first, values))
        add_shares(workers)
        times = mean_times(workers, plan)
        by_worker = times_by_worker(workers)
        row = {"epoch": epoch, "resolution": resolution, **times, **by_worker, **figures}
        self._sink.write("times", row)
        self._noise.add_epoch(reports)
        speed = total["samples"] / max(train_time_s - self._train_time_s, 1e-9)
        self._train_time_s, self._epochs_done = train_time_s, epoch + 1
        clocks = given_values({"train_time_s": train_time_s, "virtual_time_s": virtual_time_s})
        training = {
            "loss": total["loss"],
            "learning_rate": learning_rate,
            "resolution": resolution,
            "images_per_s": speed,
            **figures,
        }
        record = epoch_charts(training, clocks | times, plan)
        if evaluation is not None:
            self._evaluations.append(evaluation)
            self._evaluated_epoch = epoch
            found = given_values(asdict(evaluation))
            found |= found.pop("more") | clocks
            found |= {"learning_rate": learning_rate, "train_resolution": resolution}
            self._sink.write("eval", {"epoch": epoch} | found)
            record |= evaluation_charts(evaluation)
        if (scale := self._noise.estimate()) is not None:
            values = asdict(scale)
            self._sink.write("noise", {"epoch": epoch, "resolution": resolution} | values)
            record |= {f"noise/{name}": v for name, v in values.items() if math.isfinite(v)}
        self._charts.record(record, epoch + 1)
        self._charts.workers(WORKERS, workers, epoch + 1)
        epochs = self._planned.epochs
        # Other workers may have taken all of its steps: their losses are not known.
        told = {self._loss: total["loss"]} | figures if total["samples"] else {}
        loss = "".join(f"  {name} {short_loss(value)}" for name, value in told.items())
        found = evaluation_in_words(evaluation, self._eval_loss)
        self._display.print(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {px(resolution, after='  ')}"
            f"lr {learning_rate:.3g}{loss}{found}  {speed_in_words(speed, self._unit)}"
            f"{times_in_words([values['time_s'] for values in workers.values()])}"
        )
        judged = epoch == _JUDGED_EPOCH and self._expects_times
        if judged and (warning := missed_times(workers)):
            self._display.print(warning)
        if evaluation is not None and evaluation.samples < self._evaluated:
            left_out, self._evaluated = self._evaluated - evaluation.samples, evaluation.samples
            self._display.print(
                f"warning: evaluations are of {plural(evaluation.samples, self._unit[:-1])}: "
                f"{left_out} of {left_out + evaluation.samples} cannot be decoded"
            )
        if self._divergence is not None and total["samples"]:
            self._divergence.look_at_epoch(
                epoch,
                total["loss"],
                evaluation,
                steps=max(values["steps"] for values in workers.values()),
                batch_size=plan.global_batch_size
                or max(worker.local_batch_size for worker in plan.workers),
            )
        self._display.pause()

    @property
    def latest_plans(self) -> dict[int, tuple[int, Plan]]:
        """Plans in force that are not the first, on the main process: since when, and which."""
        return self._planned.latest

    def images(self, files: Mapping[str, Path], *, again: bool = True) -> None:
        """Send picture files, by their names in the tracker, to the trackers that take any.

        Not `again`: not to those that a session before has shown the run to.
        """
        if self.enabled:
            self._charts.images(files, self._epochs_done, again=again)

    @property
    def epochs_done(self) -> int:
        """Epochs that are complete, on the main process."""
        return self._epochs_done

    def is_evaluated(self, epoch: int) -> bool:
        """Whether an epoch was evaluated, on the main process."""
        return self.enabled and self._evaluated_epoch == epoch

    def is_best(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation that is not recorded yet is the best, on the main process."""
        if not self.enabled:
            return False
        best = max((other.accuracy for other in self._evaluations), default=-math.inf)
        return math.isfinite(evaluation.loss) and evaluation.accuracy > best

    def results(self) -> dict[str, Any]:
        """Return what the run came to so far: accuracies, loss, time, samples, noise scale."""
        last = self._evaluations[-1]
        values = {
            "final_accuracy": last.accuracy,
            "best_accuracy": max(evaluation.accuracy for evaluation in self._evaluations),
            "final_loss": last.loss,
            "final_top5_accuracy": last.top5_accuracy,
            "final_ema_accuracy": last.ema_accuracy,
            "final_ema_loss": last.ema_loss,
            "train_accuracy": last.train_accuracy,
            "train_loss": last.train_loss,
            **{f"final_{name}": value for name, value in last.more.items()},
            "last_epoch_refused": self._all_refused or None,
            "train_time_s": self._train_time_s,
            "images_per_s": self._samples / max(self._train_time_s, 1e-9),
            "samples_seen": self._samples,
        }
        last_plan = self._planned.at(self._epochs_done - 1)
        return given_values(values) | noise_summary(self._noise.estimate(), last_plan)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json in one go, hand the values to the trackers and print the result."""
        if not self.enabled:
            return
        text = json.dumps(strict_numbers(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        self._charts.summary(values)
        if "noise_advice" in values:
            self._display.print(values["noise_advice"])
        self._display.print(
            f"{result_in_words(values, self._unit, self._eval_loss)}; all of it in {self.folder}"
        )

    def close(self) -> None:
        """Close the file and the progress bar; `Accelerator.end_training` closes the trackers."""
        if self.enabled:
            self._display.close()
            self._sink.close()
