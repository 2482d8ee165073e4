"""A run under way in this process: what train.py's loop works with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import torch
from accelerate import Accelerator
from torch import Tensor

from dbsl.base.seeds import stream_seed
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.steps import Stepper
from dbsl.cluster.weights import uncompiled
from dbsl.config.hooks import Extra
from dbsl.config.settings import meets_at_server
from dbsl.data.sources import as_source
from dbsl.data.transforms import seed_streams
from dbsl.loss import Figures, scalars
from dbsl.model import kept_modes, save_model, set_dropout, set_training
from dbsl.plan.sampler import Part, Step, evaluation_batches
from dbsl.plan.stages import Stage
from dbsl.plan.types import BAD_LOSS, BAD_WEIGHTS, NO_FAULT, EpochEnd, RoundReport, Segment, Turn
from dbsl.run.stopping import Stopping, Stopwatch
from dbsl.run.training import ConfigT, Run

if TYPE_CHECKING:  # rooms above this one
    from dbsl.checkpoint.checkpointer import Checkpointer
    from dbsl.log.log import RunLog
    from dbsl.log.meter import StepMeter


@dataclass
class Progress:
    """How far a process is in its round."""

    steps: int = 0  # taken
    counted: int = 0  # those that earlier workers took: in no report, but in the log's samples
    # By worker the loss and its figures, [1 + F], summed over samples.
    sums: dict[int, Tensor] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)  # by worker, all that were read
    # What extras measured at the first step.
    measured: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.0  # the last step's

    def read(self, vector: Tensor) -> tuple[dict[int, list[float]], bool]:
        """Return the sums by worker, and whether losses and a vector are finite.

        It waits for the device, once, and has what was measured as numbers from then on.
        """
        on_device = [name for name, value in self.measured.items() if isinstance(value, Tensor)]
        kind = torch.promote_types(vector.dtype, torch.float32)  # whose sums do not overflow
        weights = vector.sum(dtype=kind)
        tensors = [weights, *(self.measured[name] for name in on_device), *self.sums.values()]
        values = iter(torch.cat([t.to(weights).reshape(-1) for t in tensors]).tolist())
        weights = next(values)
        self.measured |= {name: next(values) for name in on_device}
        sums = {worker: list(islice(values, len(own))) for worker, own in self.sums.items()}
        return sums, all(math.isfinite(x) for x in (weights, *(own[0] for own in sums.values())))

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `asdict` returned; from {}: begin a round."""
        self.__init__(**state)
        self.sums = {worker: sums.to(device) for worker, sums in self.sums.items()}


class Session(Generic[ConfigT]):
    """A run under way in this process."""

    log: RunLog  # metrics, lines, trackers
    checkpointer: Checkpointer
    finishing = False  # this process wishes that the run ends early, by `finish`
    finishes_next = False  # all processes know that the next epoch's end is the last

    def __init__(
        self,
        run: Run[ConfigT],
        folder: Path,
        accelerator: Accelerator,
        cluster: Cluster,
        stepper: Stepper,
        stopping: Stopping,
        stopwatch: Stopwatch,
        meter: StepMeter,
    ) -> None:
        self.run, self.folder, self.accelerator = run, folder, accelerator
        self.config, self.data = run.config, run.data
        self.model = run.model  # on its device; nothing is wrapped around it
        self.side = run.config.resolutions[-1]  # of evaluation images, in pixels
        self.also = run.also  # further evaluation sets: `open_session(evaluate_also=...)`
        self.num_classes = run.data.num_classes
        self.cluster = cluster  # how the weights of this process's workers meet the others'
        self.stepper = stepper  # what an optimizer step is
        self.stopping, self.stopwatch, self.meter = stopping, stopwatch, meter
        self.progress = Progress()
        # Whether all processes evaluate at a time, each its part of the images.
        together = not meets_at_server(self.config.sync)
        self.shares_evaluation = accelerator.num_processes > 1 and together

    def start_training(self) -> None:
        """Have ready what the first batches need, and begin to count the time of training."""
        sources = [self.data.train] * bool(self.cluster.workers)
        evaluates = self.accelerator.is_main_process or self.shares_evaluation
        sources += [self.data.evaluation, *self.also.values()] if evaluates else []
        for source in sources:
            if start := getattr(source, "start", None):  # your own data may not know of it
                start()
        if self.cluster.control is not None:  # they would wait for each other on the clock
            self.cluster.control.highest(0)
        self.log.started(self.stopwatch.start_training())

    def save_model(self, name: str) -> None:
        """Write the model's weights as they are now into the run folder, on the main process."""
        if self.accelerator.is_main_process:
            save_model(self.model, self.folder, self.side, self.data, name=name)

    def finish(self) -> None:
        """End the run with this epoch; to be called before `checkpointer.after_epoch`.

        One process is enough, of those that epochs end on: all learn of it there. An epoch that is
        not evaluated is followed by one that is. Model and summary are of what was trained,
        and `--resume` goes on.
        """
        self.finishing = True

    def is_last(self, end: EpochEnd) -> bool:
        """Whether the run is known to end with this epoch."""
        return end.epoch + 1 == self.config.epochs or self.finishes_next

    def train_time_s(self, end: EpochEnd) -> float:
        """Return the seconds of training up to an epoch's end."""
        return self.stopwatch.train_s(end.ended_at)

    @contextmanager
    def round(self, turn: Turn) -> Iterator[Work]:
        """Enclose a turn: on entering the global weights are pulled, on leaving work is pushed.

        That is weights, or with `--push gradients` the sum of the turn's weighted gradients. Joint
        steps pull and push none: all have the same, of which a copy is kept. Work that is not
        finite is refused: weights stay as they were, and the optimizer's state is cleared.
        """
        run, cluster, stepper, progress = self.run, self.cluster, self.stepper, self.progress
        stage, segment = run.stage_at(turn.epoch), cluster.segment(turn)
        self.log.plan(turn.epoch, turn.round, segment.plan)
        set_dropout(run.model, stage.dropout)
        place = (turn.workers[0], turn.epoch, turn.round, *[run.place] * bool(run.place))
        seed = stream_seed(run.config.seed, "dropout", *place)
        seed_streams(seed)  # what the loop may draw from
        torch.manual_seed(seed)
        self.checkpointer.restore_random_state()  # if the run was stopped inside this round
        anew = not progress.steps
        work = Work(self, turn, stage, segment)  # loader processes begin, while the weights come
        if anew:
            cluster.pull(turn)
            when = run.config.reset_momentum
            begins = (turn.epoch, turn.round) == (stage.first_epoch, 0)
            if when == "round" or (when == "stage" and begins):
                work.forget()
        stepper.begin(turn, anew=anew)
        self.meter.begin(turn, anew=anew)
        set_training(stepper.model)
        # No steps are left to ask in: it was stopped at the barrier, or has no samples this round.
        # The others may have steps, and ask.
        if work.over:
            self.checkpointer.after_step(round_over=True)
        yield work
        cluster.weights.check_views()
        if cluster.push(work.reports()):  # refused: the next pull brings good weights
            work.forget()
            stepper.drop_remainders()  # they may not be finite
        progress.load({}, self.accelerator.device)

    @contextmanager
    def evaluating(self) -> Iterator[Callable[[], float]]:
        """Enclose an evaluation; gives what tells the seconds so far.

        A compiled model runs uncompiled: graphs of an evaluation's few batches would never pay.
        Its modules are in the same modes afterwards: a round may go on.
        """
        pauses = self.accelerator.num_processes == 1 or self.shares_evaluation  # nobody trains
        with (
            self.stopwatch.evaluating(pauses=pauses) as spent,
            uncompiled(self.model),
            kept_modes(self.model),
        ):
            yield spent

    def evaluation_images(self, source: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of images [B, 3, R, R] and labels [B], of the evaluation images if unset.

        Where processes evaluate together, they are this process's part. A source may be a map-style
        dataset of (input tensor, label), too, or data with evaluation samples.
        """
        source = self.data.evaluation if source is None else source
        source = as_source(source, self.data, self.side, "source")
        ranks = (self.accelerator.process_index, self.accelerator.num_processes)
        own = ranks if self.shares_evaluation else ()
        parts = evaluation_batches(len(source), self.run.evaluation_batch, *own)
        transform = self.data.transform(self.side, "none", self.config.seed)  # nothing at random
        yield from source.batches(parts, transform)
        if self.shares_evaluation:  # what they found is added up next
            self.cluster.control.enter()


class Work:
    """The optimizer steps of a turn, those that a resumed run took before left out."""

    def __init__(self, session: Session, turn: Turn, stage: Stage, segment: Segment) -> None:
        run, self._session = session.run, session
        self._turn, self._stage, self._segment = turn, stage, segment
        self._all = run.steps(segment, turn)
        self._left = self._all[session.progress.steps :]
        parts = [part for step in self._left for part in run.micro_parts(step, stage.resolution)]
        self._batches = run.batches(parts, stage.resolution, turn.epoch)
        self.lr_factor = 1.0  # by the worker's batch (`--lr-scaling`); joint steps have one for all
        if (plan := segment.plan).global_batch_size is None:
            sizes = [worker.local_batch_size for worker in plan.workers]
            share = sizes[turn.workers[0]] / (plan.large_batch_size or max(sizes))
            # linear: Goyal et al., arXiv 1706.02677
            factors = {"none": 1.0, "sqrt": math.sqrt(share), "linear": share}
            self.lr_factor = factors[run.config.lr_scaling]
        self._zeros = torch.zeros(1 + len(run.figures), device=session.accelerator.device)

    @property
    def over(self) -> bool:
        """Whether all steps of the round are taken."""
        return self._session.progress.steps == len(self._all)

    def steps(self) -> Iterator[Step]:
        """Return the steps that are left."""
        return iter(self._left)

    def parts(self, step: Step) -> Iterator[tuple[Part, Tensor, Tensor]]:
        """Yield a step's parts with their images [B, 3, R, R] and labels, [B] or shares [B, C].

        With `micro_batch_size` they are micro-batches, each with its part of the weight.
        """
        for part in self._session.run.micro_parts(step, self._stage.resolution):
            self._batch = next(self._batches)
            yield part, *self._batch

    def add(self, part: Part, samples: int, loss: Tensor, figures: Figures) -> None:
        """Count a part's mean loss and figures, on the device: .item() would wait for it."""
        progress = self._session.progress
        means = scalars(loss, figures, self._session.run.figures)
        so_far = progress.sums.get(part.worker, self._zeros)
        progress.sums[part.worker] = so_far + means * samples
        progress.samples[part.worker] = progress.samples.get(part.worker, 0) + samples

    @contextmanager
    def stepping(self, step: Step, learning_rate: float) -> Iterator[None]:
        """Enclose an optimizer step: its gradients are measured, and it is counted."""
        session, progress = self._session, self._session.progress
        if progress.samples and not progress.steps:
            for found in session.run.extras.each(Extra.measure, self._turn, step, *self._batch):
                progress.measured |= found or {}
        with session.meter.step(step, learning_rate, progress):
            yield
        progress.steps += 1
        progress.learning_rate = float(learning_rate)
        session.log.hear(session.cluster)  # at once, not at the end of a long round

    def forget(self) -> None:
        """Clear the optimizer state of the turn's workers."""
        for worker in self._turn.workers:
            self._session.stepper.forget(worker)

    def reports(self) -> list[RoundReport]:
        """Return a report for each worker of the turn; it waits for the device, once.

        With a fault the round is refused. What was measured goes with the first worker.
        """
        session, turn, progress = self._session, self._turn, self._session.progress
        cluster, names = session.cluster, session.run.figures
        sums, finite = progress.read(cluster.outgoing)
        session.meter.end(sums, progress.samples)
        faults = {w: BAD_LOSS for w, own in sums.items() if not math.isfinite(own[0])}
        if not finite and not faults:
            number = cluster.weights.first_not_finite(cluster.outgoing)
            faults[turn.workers[0]] = BAD_WEIGHTS + (0 if number is None else 1 + number)
        steps, reports = progress.steps - progress.counted, []
        for worker in turn.workers:
            mine, count = self._segment.plan.workers[worker], progress.samples.get(worker, 0)
            own = sums.get(worker, [0.0] * (1 + len(names)))  # none: it had no samples
            loss, *means = (value / max(count, 1) for value in own)
            reports.append(
                RoundReport(
                    worker,
                    turn.epoch,
                    turn.round,
                    resolution=self._stage.resolution,
                    local_batch_size=mine.local_batch_size,
                    samples=count,
                    steps=steps,
                    time_s=session.stepper.timer.take_seconds(worker),
                    loss=loss,
                    merge_weight=mine.merge_weight,
                    learning_rate=progress.learning_rate,
                    predicted_time_s=mine.predicted_time_s * count / max(mine.samples, 1),
                    refused=bool(faults),
                    fault=faults.get(worker, NO_FAULT),
                    lines=session.meter.take_lines(worker, steps),
                    figures=dict(zip(names, means, strict=True)),
                    **(progress.measured if worker == turn.workers[0] else {}),
                )
            )
        return reports
