"""What a run leaves: metrics.jsonl, summary.json, tracker records and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in files
and trackers, as they do in the settings, and from 1 in the lines for people.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from accelerate import Accelerator
from PIL import Image

from dbsl.base.errors import SaveError
from dbsl.base.files import write_text
from dbsl.base.words import plural, px, short_loss
from dbsl.log.alarm import Alarm
from dbsl.log.display import Display, speed_in_words
from dbsl.log.divergence import DivergenceWarning
from dbsl.log.meter import StepMeter
from dbsl.log.rows import (
    Evaluation,
    add_shares,
    given_values,
    plan_changes,
    plan_row,
    plan_totals,
    result_in_words,
    round_row,
    strict_numbers,
    times_in_words,
    together,
    worker_rows,
)
from dbsl.log.trackers import tracker_id
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.turns import LostWorker, RoundReport, StepLine, report_from_plain
from dbsl.plan.types import Plan, plan_from_plain
from dbsl.profile.noise import NoiseAverage, noise_summary
from dbsl.run.folder import check_metrics

_STEP_CHARTS = ("loss", "learning_rate", "gradient_norm", "images_per_s", "memory_gib")


class RunLog:
    """Writes a run's files, feeds its trackers, moves its progress bar and prints its epochs.

    Start the trackers before.

    Args:
        folder: The run folder; it exists.
        accelerator: Tells the main process and holds the trackers.
        stages: All stages of the run.
        plans: The plan of each resolution.
        profile_command: What measures step times anew, for the warning that they are off; None:
            they are not measured, or not expected to hold.
        pushes: Whether rounds are single pushes: they are then recorded by epoch and worker.
        meter: Makes the lines of this process's workers; None: there are none.
        counted: Workers whose steps the display counts; of joint steps one.
        by_rounds: Whether it counts them where a round is recorded, since none is taken here.
        samples: Training samples; None: those of the plans, which may leave out a last batch.
        divergence: Is shown every round's loss.
        state: Of the run that goes on here, what `state_dict` returned; metrics.jsonl then loses
            what was written later.
    """

    def __init__(
        self,
        folder: Path,
        accelerator: Accelerator,
        stages: Sequence[Stage],
        plans: Mapping[int, Plan],
        profile_command: str | None = None,
        *,
        pushes: bool = False,
        meter: StepMeter | None = None,
        counted: Sequence[int] = (0,),
        by_rounds: bool = False,
        samples: int | None = None,
        divergence: DivergenceWarning | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.lost_workers: list[int] = []
        self.enabled = accelerator.is_main_process
        self.meter = meter or StepMeter(0)
        self._accelerator = accelerator
        if not self.enabled:
            return
        self.folder = folder
        self._stages = stages
        self._plans = dict(plans)  # in force, by resolution
        self._planned_epoch = dict.fromkeys(plans, 0)  # from which it is in force
        self._pushes = pushes
        self._divergence = divergence
        self._resumed: set[int] = set()  # resolutions whose plans are those of a resumed run
        epochs = stages[-1].end_epoch
        self._alarm = Alarm(profile_command, epochs)
        self._counted, self._by_rounds = counted, by_rounds
        self._rounds: defaultdict[int, list[RoundReport]] = defaultdict(list)  # by epoch
        self._train_time_s = 0.0  # at the last epoch's end
        self._samples = 0  # trained on so far
        self._all_refused = False  # in the last epoch
        self._evaluations: list[Evaluation] = []
        self._epoch = 0  # the last that ended
        self._noise = NoiseAverage(samples or max(plan.samples for plan in plans.values()))
        if state:
            self._load_state_dict(state)
        self._file = _open_metrics(folder / "metrics.jsonl", state["metrics_bytes"] if state else 0)
        steps = sum(self._steps_of(self._plans[s.resolution]) * len(s.epochs) for s in stages)
        done = self._steps_done(state, steps) if state else 0
        self._unit = "images" if stages[-1].resolution else "samples"
        self._display = Display(steps, done, epochs, self._unit)
        self.meter.tell, self.meter.on_step = self.step, self._display.step
        if not state:
            for stage in stages:
                self._write("plan", plan_row(stage, plans[stage.resolution]))
        else:
            self._write_changed_stages(state)
        table = [{"resolution": r, **row} for r in plans for row in worker_rows(plans[r])]
        for tracker in accelerator.trackers:
            if hasattr(tracker, "log_table"):
                rows = [list(row.values()) for row in table]
                tracker.log_table("plan/table", columns=list(table[0]), data=rows)

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:  # else `Accelerator.end_training` does
            for tracker in self._accelerator.trackers:
                tracker.finish()
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run's log goes on from."""
        self._file.flush()
        return {
            "metrics_bytes": self._file.tell(),
            "planned_epoch": dict(self._planned_epoch),
            "plans": {resolution: asdict(plan) for resolution, plan in self._plans.items()},
            "alarm": self._alarm.state_dict(),
            "share_done": self._display.done / max(self._display.total, 1),
            "stages": [asdict(stage) for stage in self._stages],
            "rounds": {e: [asdict(r) for r in reports] for e, reports in self._rounds.items()},
            "train_time_s": self._train_time_s,
            "samples": self._samples,
            "evaluations": [asdict(evaluation) for evaluation in self._evaluations],
            "epoch": self._epoch,
            "lost_workers": list(self.lost_workers),
            "noise": self._noise.state_dict(),
            "tracker": tracker_id(self._accelerator),
        }

    def _load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._planned_epoch |= state["planned_epoch"]
        saved = {r: plan_from_plain(plan) for r, plan in state["plans"].items()}
        for resolution, plan in saved.items():
            now = self._plans.get(resolution)
            if now is not None and len(now.workers) == len(plan.workers):
                self._plans[resolution] = plan
                self._resumed.add(resolution)
        if "alarm" in state:  # not in checkpoints of before
            self._alarm.load_state_dict(state["alarm"])
        for epoch, reports in state["rounds"].items():
            self._rounds[epoch] = [report_from_plain(report) for report in reports]
        self._train_time_s = state["train_time_s"]
        self._samples = state["samples"]
        self._evaluations = [Evaluation(**evaluation) for evaluation in state["evaluations"]]
        self._epoch = state["epoch"]
        self.lost_workers = list(state["lost_workers"])
        if "noise" in state:  # not in checkpoints of before
            self._noise.load_state_dict(state["noise"])

    def _steps_done(self, state: Mapping[str, Any], total: int) -> int:
        """Return how many of all steps of the run, as it is now, earlier sessions took."""
        share = state.get("share_done", 0.0)
        before = state["stages"][-1]["end_epoch"] if "stages" in state else None
        if before in (None, self._stages[-1].end_epoch):
            return round(share * total)
        epochs = share * before  # done
        return round(
            sum(
                self._steps_of(self._plans[stage.resolution])
                * min(max(epochs - stage.first_epoch, 0), len(stage.epochs))
                for stage in self._stages
            )
        )

    def _write_changed_stages(self, state: Mapping[str, Any]) -> None:
        """Write the stages ahead that are new, or all if the run goes on with other workers."""
        begin = self._epoch + 1 if self._train_time_s else 0
        other_workers = self._plans.keys() - self._resumed
        before = state.get("stages")  # none in checkpoints of before
        for stage in self._stages:
            new = before is not None and stage.end_epoch > begin and asdict(stage) not in before
            if other_workers or new:
                plan = self._plans[stage.resolution]
                self._write("plan", plan_row(stage, plan) | {"from_epoch": begin})

    def step(self, line: StepLine) -> None:
        """Record what a worker says of itself every so many steps."""
        self._write("step", line._asdict())
        self._display.loss = line.loss
        own = line._asdict()
        values = {name: own[name] for name in _STEP_CHARTS if math.isfinite(own[name])}
        record = {f"step/{line.worker}/{name}": value for name, value in values.items()}
        for tracker in self._accelerator.trackers:
            step = None if tracker.name == "wandb" else line.step  # whose axis is the epoch
            tracker.log({"epoch": line.epoch + line.progress, **record}, step=step)

    def round(self, report: RoundReport, *, virtual_time_s: float | None = None) -> None:
        """Record a worker's round.

        Args:
            report: What the worker says of it.
            virtual_time_s: The simulated cluster's clock at the round's end.
        """
        if not self.enabled:
            return
        for line in report.lines:  # of a worker in another process
            self.step(line)
        self.meter.hear(report)
        if self._divergence is not None:
            self._divergence.look(report.loss, f"the training loss of epoch {report.epoch + 1}")
        report = replace(report, logged=0, lines=())
        if not self._pushes:
            self._write(
                "round", round_row(report) | given_values({"virtual_time_s": virtual_time_s})
            )
        self._rounds[report.epoch].append(report)
        self._samples += report.samples
        self._display.loss = report.loss
        if self._by_rounds:
            self._display.step(
                report.samples, report.epoch, report.learning_rate, report.worker, report.steps
            )

    def lost(self, loss: LostWorker) -> None:
        """Record that a worker was lost, and that the others go on."""
        if not self.enabled:
            return
        self.lost_workers.append(loss.worker)
        self._write("lost", asdict(loss))
        missed = (
            f"; {loss.samples} samples of epochs under way are left out" if loss.samples else ""
        )
        self._print(
            f"warning: rank {loss.rank} (worker {loss.worker}) was lost after "
            f"{plural(loss.rounds, 'round')} ({loss.reason}); the others share its "
            f"samples from their next round on{missed}"
        )

    def plan(self, epoch: int, plan: Plan) -> None:
        """Record the plan in force, if it is another than before."""
        if not self.enabled:
            return
        stage = stage_at(self._stages, epoch)
        before = self._plans[stage.resolution]
        # Without a barrier, a slow worker may still be in an epoch with an earlier plan.
        if plan is before or epoch < self._planned_epoch[stage.resolution]:
            return
        self._plans[stage.resolution] = plan
        self._planned_epoch[stage.resolution] = epoch
        if plan.workers == before.workers:
            return
        own = [s for s in self._stages if s.resolution == stage.resolution]
        left = sum(max(0, s.end_epoch - max(s.first_epoch, epoch)) for s in own)
        self._display.expect(left * (self._steps_of(plan) - self._steps_of(before)))
        self._write("plan", plan_row(stage, plan) | {"from_epoch": epoch})
        self._print(
            f"from epoch {epoch + 1} on{px(stage.resolution, ' at ')}: {plan_changes(before, plan)}"
        )

    def epoch_end(
        self,
        epoch: int,
        evaluation: Evaluation | None = None,
        *,
        train_time_s: float,
        learning_rate: float,
        virtual_time_s: float | None = None,
    ) -> None:
        """Record the end of an epoch, evaluated or not: one tracker record, one printed line.

        Args:
            epoch: The epoch; all its rounds have been recorded.
            evaluation: Its evaluation, if there was one.
            train_time_s: Seconds of training so far, without evaluation.
            learning_rate: The epoch's learning rate.
            virtual_time_s: The simulated cluster's clock.
        """
        if not self.enabled:
            return
        reports = sorted(self._rounds.pop(epoch, []), key=lambda report: report.worker)
        self._all_refused = bool(reports) and all(report.refused for report in reports)
        groups = itertools.groupby(reports, key=lambda report: report.worker)
        workers = {worker: together(list(group)) for worker, group in groups}
        total = together(reports)
        resolution = stage_at(self._stages, epoch).resolution
        if self._pushes:
            for worker, values in workers.items():
                first = next(report for report in reports if report.worker == worker)
                whole = round_row(first) | {k: v for k, v in values.items() if k in asdict(first)}
                self._write("round", whole | {"round": 0})
        add_shares(workers)
        means = self._mean_times(workers, self._plans[resolution])
        of_workers = {
            f"workers_{name}": {worker: values[name] for worker, values in workers.items()}
            for name in ("compute_time_s", "wait_time_s", "idle_time_share")
        }
        row = {"epoch": epoch, "resolution": resolution, **means, **of_workers}
        self._write("times", row)
        self._noise.add_epoch(reports)
        speed = total["samples"] / max(train_time_s - self._train_time_s, 1e-9)
        self._train_time_s, self._epoch = train_time_s, epoch
        record = {
            "epoch": epoch,
            "train/loss": total["loss"],
            "train/learning_rate": learning_rate,
            "train/resolution": resolution,
            "train/images_per_s": speed,
            "time/train_s": train_time_s,
            **{f"plan/{name}": v for name, v in plan_totals(self._plans[resolution]).items()},
        }
        result = ""
        if evaluation is not None:
            self._evaluations.append(evaluation)
            so_far = {"train_time_s": train_time_s, "virtual_time_s": virtual_time_s}
            training = {"learning_rate": learning_rate, "train_resolution": resolution}
            found = given_values(asdict(evaluation))
            self._write("eval", {"epoch": epoch} | found | given_values(so_far) | training)
            record["eval/accuracy"] = evaluation.accuracy
            record["eval/loss"] = evaluation.loss
            record["time/eval_s"] = evaluation.time_s
            result = f"  eval {100 * evaluation.accuracy:.1f} %, loss {short_loss(evaluation.loss)}"
            if evaluation.ema_accuracy is not None:
                record["eval/ema_accuracy"] = evaluation.ema_accuracy
                record["eval/ema_loss"] = evaluation.ema_loss
                result += f"  EMA {100 * evaluation.ema_accuracy:.1f} %"
        record |= {f"time/{name.removesuffix('_time_s')}_s": value for name, value in means.items()}
        if virtual_time_s is not None:
            record["time/virtual_s"] = virtual_time_s
        if (scale := self._noise.estimate()) is not None:
            self._write("noise", {"epoch": epoch, "resolution": resolution} | asdict(scale))
            finite = {name: v for name, v in asdict(scale).items() if math.isfinite(v)}
            record |= {f"noise/{name}": value for name, value in finite.items()}
        for worker, values in workers.items():
            record |= {f"worker/{worker}/{name}": value for name, value in values.items()}
        for tracker in self._accelerator.trackers:
            tracker.log(record, step=self._step(tracker))
        epochs = self._stages[-1].end_epoch
        self._print(
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {px(resolution, after='  ')}"
            f"lr {learning_rate:.3g}  loss {short_loss(total['loss'])}{result}  "
            f"{speed_in_words(speed, self._unit)}"
            f"{times_in_words([values['time_s'] for values in workers.values()])}"
        )
        if warning := self._alarm.times(epoch, resolution, workers):
            self._print(warning)
        self._display.pause()

    @staticmethod
    def _mean_times(workers: Mapping[int, Mapping[str, float]], plan: Plan) -> dict[str, float]:
        """Return the mean time of small and of large workers, as measured and as predicted."""
        means = {}
        for small, name in ((True, "small"), (False, "large")):
            # Of an epoch that a resumed run finished with fewer workers some have no plan.
            planned = dict(enumerate(plan.workers))
            own = [v for w, v in workers.items() if w in planned and planned[w].small == small]
            if own:
                means[f"{name}_workers_time_s"] = sum(v["time_s"] for v in own) / len(own)
                predicted = sum(v["predicted_time_s"] for v in own) / len(own)
                means[f"predicted_{name}_workers_time_s"] = predicted
        return means

    def metrics(self, epoch: int, values: Mapping[str, float]) -> None:
        """Record metrics of one's own at an epoch's end: in metrics.jsonl and in the tracker.

        Args:
            epoch: The epoch.
            values: Metrics by name, such as ``eval/top5``.
        """
        if not self.enabled:
            return
        self._write("metrics", {"epoch": epoch, **values})
        for tracker in self._accelerator.trackers:
            step = None if tracker.name == "wandb" else epoch
            tracker.log({"epoch": epoch, **values}, step=step)

    def images(self, files: Mapping[str, Path]) -> None:
        """Send picture files, by their names in the tracker, to the trackers that take any."""
        if not self.enabled:
            return
        for tracker in self._accelerator.trackers:
            if not hasattr(tracker, "log_images"):
                continue
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            for name, file in files.items():
                with Image.open(file) as image:
                    pixels = np.asarray(image.convert("RGB"))[None]  # [1, H, W, 3]
                tracker.log_images({name: pixels}, step=self._step(tracker), **layout)

    def is_best(self, evaluation: Evaluation) -> bool:
        """Whether an evaluation that is not recorded yet is the best, on the main process."""
        if not self.enabled:
            return False
        best = max((other.accuracy for other in self._evaluations), default=-math.inf)
        return math.isfinite(evaluation.loss) and evaluation.accuracy > best

    def results(self) -> dict[str, Any]:
        """Return what the run came to so far: accuracies, loss, time, samples, noise scale."""
        last = self._evaluations[-1]
        optional = {
            "final_ema_accuracy": last.ema_accuracy,
            "final_ema_loss": last.ema_loss,
            "train_accuracy": last.train_accuracy,
            "train_loss": last.train_loss,
        }
        return {
            **given_values(optional),
            **({"last_epoch_refused": True} if self._all_refused else {}),
            "final_accuracy": last.accuracy,
            "best_accuracy": max(evaluation.accuracy for evaluation in self._evaluations),
            "final_loss": self._evaluations[-1].loss,
            "train_time_s": self._train_time_s,
            "images_per_s": self._samples / max(self._train_time_s, 1e-9),
            "samples_seen": self._samples,
            **noise_summary(self._noise.estimate(), self._plans[self._stages[-1].resolution]),
        }

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json in one go, hand the values to the trackers and print the result."""
        if not self.enabled:
            return
        text = json.dumps(strict_numbers(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.summary.update(dict(values))
        if "noise_advice" in values:
            self._print(values["noise_advice"])
        self._print(f"{result_in_words(values, self._unit)}; all of it in {self.folder}")

    def close(self) -> None:
        """Close the file and the progress bar; `Accelerator.end_training` closes the trackers."""
        if self.enabled:
            self._display.close()
            with suppress(OSError):  # a full disk: it was said when the line was written
                self._file.close()

    def _write(self, event: str, row: Mapping[str, Any]) -> None:
        line = json.dumps(strict_numbers({"event": event, **row}), allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise SaveError(
                f"metrics.jsonl could not be written in {self.folder} ({error.strerror}); the "
                "checkpoints in it are as they were"
            ) from error

    def _print(self, line: str) -> None:
        self._display.print(line)

    def _steps_of(self, plan: Plan) -> int:
        """Return the steps of an epoch that the display counts."""
        return sum(plan.workers[worker].steps for worker in self._counted)

    def _step(self, tracker: Any) -> int | None:
        # W&B would hold a step back until a later one comes; its axis is the record's epoch.
        return None if tracker.name == "wandb" else self._epoch


def _open_metrics(path: Path, keep_bytes: int) -> TextIO:
    """Open metrics.jsonl for writing behind its first `keep_bytes` bytes.

    Raises:
        ValueError: If it is shorter than that.
    """
    check_metrics(path, keep_bytes)
    if keep_bytes:
        os.truncate(path, keep_bytes)
    # Line buffering: a killed run leaves whole lines.
    return open(path, "a" if keep_bytes else "w", encoding="utf-8", buffering=1)
