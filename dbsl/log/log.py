"""What a run leaves: metrics.jsonl, summary.json, tracker records and lines for people.

The main process does it all; on the others the same calls do nothing. Epochs count from 0 in files
and trackers, as they do in the settings, and from 1 in the lines for people.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from accelerate import Accelerator
from PIL import Image
from tqdm import tqdm

from dbsl.base.errors import SaveError
from dbsl.base.files import write_text
from dbsl.base.words import plural, short_loss
from dbsl.log.divergence import DivergenceWarning
from dbsl.log.meter import StepMeter
from dbsl.log.trackers import tracker_id
from dbsl.plan.stages import Stage, stage_at
from dbsl.plan.turns import LostWorker, RoundReport, StepLine, report_from_plain
from dbsl.plan.types import Plan, plan_from_plain
from dbsl.profile.noise import NoiseAverage, noise_summary
from dbsl.run.folder import check_metrics

MAX_PRINTED_WORKERS = 8
PREDICTION_TOLERANCE = 0.50  # relative, of a worker's time in an epoch
PREDICTION_EPOCHS = 3  # in which a worker's time is off before anything is said
_BAR = "{percentage:3.0f} %|{bar}| {n_fmt}/{total_fmt} [<{remaining}{postfix}]"  # fits 80 columns
_STEP_CHARTS = ("loss", "learning_rate", "gradient_norm", "images_per_s", "memory_gib")
_BAR_EVERY_S, _LINE_EVERY_S = 0.5, 60.0


@dataclass(frozen=True)
class Evaluation:
    """The global weights' result on the evaluation set."""

    resolution: int
    accuracy: float  # in [0, 1]
    loss: float  # mean over the samples
    samples: int
    time_s: float
    ema_accuracy: float | None = None  # of the weights averaged over epochs, if they are kept
    ema_loss: float | None = None
    train_accuracy: float | None = None  # on the training images, without augmentation
    train_loss: float | None = None


class _Display:
    """Optimizer steps so far: a bar on a terminal; elsewhere a line about once a minute.

    Args:
        total: Steps of the run.
        done: Steps of it that earlier sessions took.
        epochs: Epochs of the run.
    """

    def __init__(self, total: int, done: int, epochs: int) -> None:
        self.total, self.done, self._epochs = total, done, epochs
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
            loss = f"loss {short_loss(self.loss)}, " if math.isfinite(self.loss) else ""
            speed = _images_per_s(self._samples / spent)
            text = f"epoch {epoch + 1}/{self._epochs}, "
            if self._bar.disable:
                whose = "" if worker is None else f" (worker {worker})"
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


class _Alarm:
    """Tells which workers' times the plan keeps missing, once for each resolution.

    Args:
        profile_command: What measures step times anew; None: nothing is ever said.
        epochs: Epochs of the run.
    """

    def __init__(self, profile_command: str | None, epochs: int) -> None:
        self.profile_command = profile_command
        self._epochs = epochs
        self._said: set[int] = set()  # resolutions
        # Epochs in a row in which a worker missed its predicted time, by resolution and worker.
        self._misses: dict[int, dict[int, int]] = {}

    def times(
        self, epoch: int, resolution: int, workers: Mapping[int, Mapping[str, float]]
    ) -> str | None:
        """Take in an epoch's times; return a warning if it is time for one."""
        # The first epoch warms caches and the device up.
        if self.profile_command is None or resolution in self._said or epoch == 0:
            return None
        errors = {
            worker: values["time_s"] / values["predicted_time_s"] - 1
            for worker, values in workers.items()
            if values["predicted_time_s"] > 0
        }
        errors = {w: error for w, error in errors.items() if abs(error) > PREDICTION_TOLERANCE}
        before = self._misses.get(resolution, {})
        self._misses[resolution] = {worker: before.get(worker, 0) + 1 for worker in errors}
        missing = [w for w, n in self._misses[resolution].items() if n >= PREDICTION_EPOCHS]
        if not missing:
            return None
        self._said.add(resolution)
        worst = max(missing, key=lambda worker: abs(errors[worker]))
        return (
            f"warning: at {resolution} px {len(missing)} of {len(workers)} workers took other "
            f"times than planned, {PREDICTION_EPOCHS} epochs in a row (worker {worst}: "
            f"{100 * errors[worst]:+.0f} %)\n  to measure again: {self.profile_command}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        misses = {resolution: dict(workers) for resolution, workers in self._misses.items()}
        return {"said": sorted(self._said), "off": misses, "profile_command": self.profile_command}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._said, self._misses = set(state["said"]), dict(state["off"])
        # A resumed run is given what it once measured.
        self.profile_command = self.profile_command or state["profile_command"]


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
        self._alarm = _Alarm(profile_command, epochs)
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
        self._display = _Display(steps, done, epochs)
        self.meter.tell, self.meter.on_step = self.step, self._display.step
        if not state:
            for stage in stages:
                self._write("plan", _plan_row(stage, plans[stage.resolution]))
        else:
            self._write_changed_stages(state)
        table = [{"resolution": r, **row} for r in plans for row in _worker_rows(plans[r])]
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
                self._write("plan", _plan_row(stage, plan) | {"from_epoch": begin})

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
            self._write("round", _round_row(report) | _given({"virtual_time_s": virtual_time_s}))
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
        self._write("plan", _plan_row(stage, plan) | {"from_epoch": epoch})
        self._print(f"from epoch {epoch + 1} on at {stage.resolution} px: {_changes(before, plan)}")

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
        workers = {worker: _together(list(group)) for worker, group in groups}
        total = _together(reports)
        resolution = stage_at(self._stages, epoch).resolution
        if self._pushes:
            for worker, values in workers.items():
                first = next(report for report in reports if report.worker == worker)
                whole = _round_row(first) | {k: v for k, v in values.items() if k in asdict(first)}
                self._write("round", whole | {"round": 0})
        _add_shares(workers)
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
            **{f"plan/{name}": v for name, v in _plan_totals(self._plans[resolution]).items()},
        }
        result = ""
        if evaluation is not None:
            self._evaluations.append(evaluation)
            so_far = {"train_time_s": train_time_s, "virtual_time_s": virtual_time_s}
            training = {"learning_rate": learning_rate, "train_resolution": resolution}
            found = _given(asdict(evaluation))
            self._write("eval", {"epoch": epoch} | found | _given(so_far) | training)
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
            f"epoch {epoch + 1:>{len(str(epochs))}}/{epochs}  {resolution} px  "
            f"lr {learning_rate:.3g}  loss {short_loss(total['loss'])}{result}  "
            f"{_images_per_s(speed)}{_times([values['time_s'] for values in workers.values()])}"
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
            **_given(optional),
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
        text = json.dumps(_strict(values), indent=2, sort_keys=True, allow_nan=False)
        write_text(self.folder / "summary.json", text + "\n")
        for tracker in self._accelerator.trackers:
            if tracker.name == "wandb":
                tracker.tracker.summary.update(dict(values))
        if "noise_advice" in values:
            self._print(values["noise_advice"])
        self._print(f"{_result(values)}; all of it in {self.folder}")

    def close(self) -> None:
        """Close the file and the progress bar; `Accelerator.end_training` closes the trackers."""
        if self.enabled:
            self._display.close()
            with suppress(OSError):  # a full disk: it was said when the line was written
                self._file.close()

    def _write(self, event: str, row: Mapping[str, Any]) -> None:
        line = json.dumps(_strict({"event": event, **row}), allow_nan=False) + "\n"
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


def _plan_row(stage: Stage, plan: Plan) -> dict[str, Any]:
    values = asdict(stage)
    row = {"stage": values.pop("index"), **values, **_plan_totals(plan), "notes": plan.notes}
    return row | {"workers": _worker_rows(plan)}


def _round_row(report: RoundReport) -> dict[str, Any]:
    row = asdict(report)
    seldom = ("refused", "micro_batch", "micro_square", "gradient_batch", "gradient_square")
    seldom += ("logged", "lines")
    return {name: value for name, value in row.items() if value or name not in seldom}


def _plan_totals(plan: Plan) -> dict[str, float]:
    return {
        "time_ratio": plan.time_ratio,
        "epoch_time_s": plan.time_s,
        "all_large_time_s": plan.all_large_time_s,
        "equal_batch_time_s": plan.equal_batch_time_s,
        "idle_share": plan.idle_share,
        "small_share": plan.small_share,
    }


def _worker_rows(plan: Plan) -> list[dict[str, Any]]:
    return [{"worker": index, **asdict(worker)} for index, worker in enumerate(plan.workers)]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _together(reports: Sequence[RoundReport]) -> dict[str, float]:
    """Return what rounds come to together; the loss is the mean over their samples."""
    samples = sum(report.samples for report in reports)
    losses = sum(report.loss * report.samples for report in reports)
    sums = ("time_s", "predicted_time_s", "compute_time_s", "wait_time_s", "steps")
    return {
        "loss": losses / samples if samples else math.nan,
        **{name: sum(getattr(report, name) for report in reports) for name in sums},
        "staleness": sum(report.staleness for report in reports) / max(len(reports), 1),
        "local_batch_size": reports[-1].local_batch_size if reports else 0,
        "samples": samples,
    }


def _add_shares(workers: Mapping[int, dict[str, float]]) -> None:
    """Add each worker's share of the samples, and of the time, waiting for the slowest."""
    longest = max((values["compute_time_s"] for values in workers.values()), default=0.0)
    samples = sum(values["samples"] for values in workers.values())
    for values in workers.values():
        values["share"] = values["samples"] / max(samples, 1)
        values["idle_time_share"] = 1 - values["compute_time_s"] / longest if longest else 0.0


def _changes(before: Plan, plan: Plan) -> str:
    """Return in words what a new plan changes."""
    if len(plan.workers) > MAX_PRINTED_WORKERS:
        moved = sum(a != b for a, b in zip(before.workers, plan.workers, strict=True))
        return f"new batches and shares for {moved} of {len(plan.workers)} workers"
    batches = " ".join(str(worker.local_batch_size) for worker in plan.workers)
    shares = " ".join(str(worker.samples) for worker in plan.workers)
    return f"batches {batches}, samples {shares}"


def _times(times_s: Sequence[float]) -> str:
    """Return the workers' times, from the shortest to the longest; nothing if none is known."""
    if not times_s or max(times_s) <= 0:
        return ""
    ends = [two_digits(min(times_s)), two_digits(max(times_s))]
    return f"  workers {'-'.join(dict.fromkeys(ends))} s"


def two_digits(value: float) -> str:
    """Return a number with two significant digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _images_per_s(speed: float) -> str:
    return f"{speed:.0f} images/s" if speed >= 10 else f"{speed:.2g} images/s"


def _result(values: Mapping[str, Any]) -> str:
    """Return what there is of the result, in one line."""
    formats = {
        "final_accuracy": "accuracy {:.2%}",
        "best_accuracy": " (best {:.2%})",
        "final_loss": ", loss {}",
        "train_time_s": ", training {:.1f} s",
        "total_time_s": " of {:.1f} s",
        "images_per_s": ", {:.0f} images/s",
    }
    shown = dict(values)
    if "final_loss" in shown:
        shown["final_loss"] = short_loss(shown["final_loss"])
    given = [text.format(shown[key]) for key, text in formats.items() if key in shown]
    return "".join(given).lstrip(", ").replace("%", " %")


def _strict(value: Any) -> Any:
    """Return `value` in JSON's own types, with null for what JSON has no number for."""
    if isinstance(value, Mapping):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if hasattr(value, "item"):  # a NumPy or torch scalar
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
