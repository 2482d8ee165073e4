"""What a run leaves: metrics.jsonl, summary.json and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in the
code, and from 1 in all that is written: files and lines for people.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from accelerate import Accelerator
from tqdm import tqdm

from dbsl.base.errors import SaveError
from dbsl.base.files import write_text
from dbsl.base.words import duration, plural, px, short_loss
from dbsl.cluster.weights import names_of
from dbsl.config.hooks import Extra
from dbsl.log.divergence import DivergenceWarning
from dbsl.log.lines import Display, MemberLog, speed_in_words
from dbsl.log.meter import StepMeter
from dbsl.log.rows import (
    add_shares,
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
    step_row,
    strict_numbers,
    times_by_worker,
    times_in_words,
    together,
)
from dbsl.model import has_batch_norm
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.types import (
    Plan,
    Restart,
    RoundReport,
    StepLine,
    plan_from_plain,
    report_from_plain,
)
from dbsl.run.evaluation import Evaluation
from dbsl.run.folder import check_metrics
from dbsl.run.training import Run


class Planned:
    """Stages and the plan in force at each resolution.

    `counted` are the workers whose steps count; for joint steps one.
    """

    def __init__(
        self, stages: Sequence[Stage], plans: Mapping[int, Plan], counted: Sequence[int]
    ) -> None:
        self.stages = stages
        self._plans = dict(plans)
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

    Epochs count from 1 in it. The file goes on behind `keep_bytes`, which it must have.
    """

    def __init__(self, folder: Path, keep_bytes: int = 0) -> None:
        self._folder = folder
        self._file = _open_metrics(folder / "metrics.jsonl", keep_bytes)

    @property
    def size(self) -> int:
        """Bytes of metrics.jsonl."""
        self._file.flush()
        return self._file.tell()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row, whose epochs count from 0 as in the code."""
        line = json.dumps(for_people(row), allow_nan=False) + "\n"
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


_FEW = 4  # samples: fewer give batch norm no mean and deviation to speak of
_JUDGED_EPOCH = 2  # whose times are held against the plan: caches and the device are warm


class RunLog:
    """Writes a run's files, moves its progress bar and prints its epochs; extras get every row.

    Args:
        run: The run.
        folder: The run folder; it exists.
        accelerator: Tells the main process.
        meter: Makes the lines of this process's workers; None: there are none.
        state: Of the run that goes on here, what `state_dict` returned; metrics.jsonl then loses
            what was written later.
        restart: What other workers or plans have handed over; None: it goes on as it was.
    """

    def __init__(
        self,
        run: Run,
        folder: Path,
        accelerator: Accelerator,
        meter: StepMeter | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        restart: Restart | None = None,
    ) -> None:
        self.members = MemberLog()
        self.enabled = accelerator.is_main_process
        self.meter = meter or StepMeter(0)
        if not self.enabled:
            return
        config, self.folder, self._extras = run.config, folder, run.extras
        self._reports = False  # whether extras get rows
        self._pushes = config.push == "gradients"  # rounds are recorded by epoch and worker
        apart = config.dedicated_server  # no steps here: they are counted, and new plans told,
        self._plan_of = run.planner.decided if apart else None  # where a round is recorded
        every_worker = apart or (accelerator.num_processes == 1 and config.sync != "step")
        counted = range(config.workers) if every_worker else (0,)  # of joint steps one
        self._planned = Planned(run.stages, run.plans, counted)
        self._divergence = DivergenceWarning(
            *(config, run.data.num_classes, tqdm.write),
            precision=str(accelerator.mixed_precision),
            weights=names_of(run.model),
        )
        self._evaluated = len(run.data.evaluation)  # that were told
        by_hand = config.local_batch_sizes is not None or config.sync_batch_norm
        self._normalises = not by_hand and has_batch_norm(run.model)
        bce = getattr(config, "bce_loss", False)
        self._loss, self._eval_loss = ("BCE", "cross-entropy") if bce else ("loss", "loss")
        # Plans that follow measured times, and workers slowed on purpose, are not warned of.
        self._expects_times = (
            run.known.measured and config.balance == "none" and not run.machine.slows
        )
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._train_time_s = 0.0  # at the last epoch's end
        self._samples = 0  # trained on so far
        self._all_refused = False  # in the last epoch
        self._evaluations: list[Evaluation] = []
        self._evaluated_epoch = -1  # the last that was, in this session
        self._epochs_done = 0
        if state:
            self._load_state_dict(state)
            if restart is None:  # else plans are made anew
                self._planned.load_state_dict(state)
        self._sink = Sink(folder, state["metrics_bytes"] if state else 0)
        self._begin_display(state)
        if restart is not None:
            self._recount(restart)
        new = self._planned.new_rows(state, self._epochs_done, anew=restart is not None)
        for row in new:
            self.write("plan", row)

    def _begin_display(self, state: Mapping[str, Any] | None) -> None:
        planned = self._planned
        done = planned.steps_done(state) if state else 0
        alone = all(len(planned.at(stage.first_epoch).workers) == 1 for stage in planned.stages)
        self._unit = "images" if planned.stages[-1].resolution else "samples"
        display = Display(planned.steps, done, planned.epochs, self._unit, self._loss, alone=alone)
        self._display, self.meter.tell, self.meter.on_step = display, self.step, display.step
        self.members.record(self.write, display.print)

    def write(self, event: str, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, its epochs counted from 0; extras get it."""
        row = strict_numbers({"event": event, **row})
        self._sink.write(row)
        if self._reports:
            self._extras.each(Extra.row, row)

    def __enter__(self) -> RunLog:
        if self.enabled:
            rows = read_metrics(self.folder / "metrics.jsonl")
            self._extras.each(Extra.report, self.folder, rows)
            self._reports = True
        return self

    def __exit__(self, *_: object) -> None:
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
            "first_loss": self._divergence.first,
        }

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        for epoch, reports in state["rounds"].items():
            self._rounds[epoch] = [report_from_plain(report) for report in reports]
        self._train_time_s = state["train_time_s"]
        self._samples = state["samples"]
        self._evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        self._epochs_done = epochs_done(state)
        self.members.load_state_dict(state)
        self._divergence.first = state["first_loss"]

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
                    self.write("undone", {**place, "samples": report.samples})
        self._samples += restart.samples_under_way
        taken = {"steps": restart.steps_under_way, "samples": restart.samples_under_way}
        under_way = {epoch for epoch, reports in self._rounds.items() if reports} | {*restart.left}
        under_way |= {self._epochs_done} if restart.steps else set()
        for epoch in sorted(under_way.difference(end.epoch for end in restart.finished)):
            joint = taken if epoch == self._epochs_done else dict.fromkeys(taken, 0)
            self.write("restart", {"epoch": epoch, **joint})
            past = 1 + max((report.round for report in self._rounds[epoch]), default=0)
            self._rounds[epoch] = [replace(r, round=r.round - past) for r in self._rounds[epoch]]

    def started(self, start_up_s: float) -> None:
        """Say how long it took until training began."""
        if self.enabled:
            self._display.print(f"start-up {duration(start_up_s)}, not counted as training")

    def step(self, line: StepLine) -> None:
        """Record what a worker says of itself every so many steps."""
        self.write("step", step_row(line))
        self._display.loss = line.loss

    def round(self, report: RoundReport, *, virtual_time_s: float | None = None) -> None:
        """Record what a worker says of its round, and the simulated clock at its end."""
        if not self.enabled:
            return
        for line in report.lines:  # a worker in another process has sent them
            self.step(line)
        self.meter.hear(report)
        self._divergence.look(report)
        report = replace(report, logged=0, lines=())
        if not self._pushes:
            self.write(
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
        self.write("plan", plan_row(stage, plan) | {"from_epoch": epoch})
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
        """Record the end of an epoch, evaluated or not; print a line.

        All its rounds have been recorded. `train_time_s` has no evaluation in it; `virtual_time_s`
        is the simulated cluster's clock. The learning rate is that of the epoch's last step.
        """
        if not self.enabled:
            return
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        self._all_refused = bool(reports) and all(report.refused for report in reports)
        workers, total = of_workers(reports), together(reports)
        speed = total["samples"] / max(train_time_s - self._train_time_s, 1e-9)
        self._train_time_s, self._epochs_done = train_time_s, epoch + 1
        clocks = given_values({"train_time_s": train_time_s, "virtual_time_s": virtual_time_s})
        self._write_epoch(epoch, reports, workers, clocks | {"images_per_s": speed})
        if evaluation is not None:
            self._write_evaluation(epoch, evaluation, clocks, last_learning_rate(reports))
        plan, place = self._planned.at(epoch), self._place(epoch)
        for event, values in chain(*self._extras.each(Extra.epoch, epoch, plan, reports)):
            self.write(event, place | values)
        self._say_epoch(epoch, reports, workers, evaluation, speed)
        self._warn(epoch, workers, total, evaluation)
        self._display.pause()

    def _place(self, epoch: int) -> dict[str, int]:
        return {"epoch": epoch, "resolution": stage_at(self._planned.stages, epoch).resolution}

    def _write_epoch(
        self,
        epoch: int,
        reports: Sequence[RoundReport],
        workers: Mapping[int, dict[str, float]],
        measured: Mapping[str, float],
    ) -> None:
        """Write an epoch's times; where rounds are pushes, each worker's as one round first."""
        if self._pushes:
            for worker, values in workers.items():
                first = next(report for report in reports if report.worker == worker)
                self.write("round", pushes_row(first, values))
        add_shares(workers)
        times = mean_times(workers, self._planned.at(epoch)) | times_by_worker(workers)
        own = times | figures_together(reports) | measured
        self.write("times", self._place(epoch) | own)

    def _write_evaluation(
        self, epoch: int, evaluation: Evaluation, clocks: Mapping[str, float], rate: float
    ) -> None:
        self._evaluations.append(evaluation)
        self._evaluated_epoch = epoch
        found = given_values(asdict(evaluation))
        found |= found.pop("more") | clocks
        trained = self._place(epoch)["resolution"]
        found |= {"learning_rate": rate, "train_resolution": trained}
        self.write("eval", {"epoch": epoch} | found)

    def _say_epoch(
        self,
        epoch: int,
        reports: Sequence[RoundReport],
        workers: Mapping[int, Mapping[str, float]],
        evaluation: Evaluation | None,
        speed: float,
    ) -> None:
        total, epochs = together(reports), self._planned.epochs
        # Other workers may have taken all of its steps: their losses are not known.
        told = {self._loss: total["loss"]} | figures_together(reports) if total["samples"] else {}
        loss = "".join(f"  {name} {short_loss(value)}" for name, value in told.items())
        found = evaluation_in_words(evaluation, self._eval_loss)
        rate = f"lr {last_learning_rate(reports):.3g}"
        self._display.print(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  "
            f"{px(self._place(epoch)['resolution'], after='  ')}"
            f"{rate}{loss}{found}  {speed_in_words(speed, self._unit)}"
            f"{times_in_words([values['time_s'] for values in workers.values()])}"
        )

    def _warn(
        self,
        epoch: int,
        workers: Mapping[int, Mapping[str, float]],
        total: Mapping[str, float],
        evaluation: Evaluation | None,
    ) -> None:
        judged = epoch == _JUDGED_EPOCH and self._expects_times
        if judged and (warning := missed_times(workers)):
            self._display.print(warning)
        if evaluation is not None and evaluation.samples < self._evaluated:
            left_out, self._evaluated = self._evaluated - evaluation.samples, evaluation.samples
            self._display.print(
                f"warning: evaluations are of {plural(evaluation.samples, self._unit[:-1])}: "
                f"{left_out} of {left_out + evaluation.samples} cannot be decoded"
            )
        if total["samples"]:
            plan = self._planned.at(epoch)
            self._divergence.look_at_epoch(
                epoch,
                total["loss"],
                evaluation,
                steps=max(values["steps"] for values in workers.values()),
                batch_size=plan.global_batch_size
                or max(worker.local_batch_size for worker in plan.workers),
            )

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
        return given_values(values)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json in one go, and print the result."""
        if not self.enabled:
            return
        text = json.dumps(strict_numbers(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        if "noise_advice" in values:
            self._display.print(values["noise_advice"])
        self._display.print(
            f"{result_in_words(values, self._unit, self._eval_loss)}; all of it in {self.folder}"
        )

    def close(self) -> None:
        """Close the file and the progress bar."""
        if self.enabled:
            self._display.close()
            self._sink.close()
