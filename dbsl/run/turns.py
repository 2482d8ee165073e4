"""A worker's turn: the steps of one round, from a pull to a push, and its report."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dbsl.base.errors import SettingError
from dbsl.base.seeds import seed_streams, stream_seed
from dbsl.config.hooks import Extra
from dbsl.data.sources import Source
from dbsl.loss import Figures, check_figures, scalars
from dbsl.plan.sampler import Step
from dbsl.plan.types import BAD_LOSS, BAD_WEIGHTS, NO_FAULT, RoundReport, Turn

Workers = Any  # `dbsl.run.workers.Workers`, which makes these


@dataclass
class Progress:
    """How far a process is in its round."""

    steps: int = 0  # taken
    inherited: int = 0  # taken by other workers: in no report, but in the log's samples
    # Loss and figures by worker, [1 + F], summed over samples.
    sums: dict[int, Tensor] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)  # read, by worker
    # Measured by extras at the first step.
    measured: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.0  # the last step's

    def read(self, vector: Tensor) -> tuple[dict[int, list[float]], bool]:
        """Return the sums by worker, and whether the losses and a vector are finite.

        It waits for the device once, and turns measured tensors into numbers.
        """
        on_device = [name for name, value in self.measured.items() if isinstance(value, Tensor)]
        kind = torch.promote_types(vector.dtype, torch.float32)  # so that sums do not overflow
        weights = vector.sum(dtype=kind)
        tensors = [weights, *(self.measured[name] for name in on_device), *self.sums.values()]
        values = iter(torch.cat([t.to(weights).reshape(-1) for t in tensors]).tolist())
        weights = next(values)
        self.measured |= {name: next(values) for name in on_device}
        sums = {worker: list(islice(values, len(own))) for worker, own in self.sums.items()}
        return sums, all(math.isfinite(x) for x in (weights, *(own[0] for own in sums.values())))

    def load(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from the state that `asdict` returned; with {}, begin a round."""
        self.__init__(**state)
        self.sums = {worker: sums.to(device) for worker, sums in self.sums.items()}


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random streams that a loop may draw from."""
    kind, keys, *more = np.random.get_state()  # noqa: NPY002
    drawn = {"cpu": torch.get_rng_state()}  # dropout draws from it
    drawn |= {"numpy": (kind, keys.tolist(), *more), "python": random.getstate()}
    if device.type == "cuda":
        drawn["cuda"] = torch.cuda.get_rng_state(device)
    return drawn


def load_random_state(drawn: Mapping[str, Any], device: torch.device) -> None:
    """Restore the state that `random_state` returned."""
    torch.set_rng_state(drawn["cpu"])
    np.random.set_state(drawn["numpy"])  # noqa: NPY002
    random.setstate(drawn["python"])
    if device.type == "cuda" and "cuda" in drawn:
        torch.cuda.set_rng_state(drawn["cuda"], device)


def refuse_order(bad: object, must: str, got: str) -> None:
    """Refuse a loop's calls if they are out of order."""
    if bad:
        raise SettingError(f"the training loop must {must}, got {got}")


class WorkerTurn:
    """A round of one worker or, with joint steps, of all workers of this process.

    The loop calls, in this order: ``steps``, ``workers.pull(turn)``, each step, and
    ``workers.push(turn)``.
    """

    ends_epoch = False

    def __init__(self, workers: Workers, turn: Turn) -> None:
        plans, self._all_workers = workers.plans, workers
        self.plain, self.plan = turn, workers.cluster.plan(turn)  # as the cluster has it
        self.epoch, self.round, self.workers = turn.epoch, turn.round, turn.workers
        # This worker's optimizer steps; a process without workers has turns without steps.
        self.worker = next(iter(turn.workers), 0)
        self.stage = plans.stage_at(turn.epoch)
        plan, draw = self.plan, plans.sampler.batches_of
        self._steps = draw(plan, turn.workers, turn.epoch, turn.round) if turn.workers else []
        self.lr_factor = 1.0  # from the worker's batch size (`--lr-scaling`); 1 in joint steps
        if plan.global_batch_size is None and turn.workers:
            sizes = [worker.local_batch_size for worker in plan.workers]
            share = sizes[self.worker] / (plan.large_batch_size or max(sizes))
            # linear: Goyal et al., arXiv 1706.02677
            factors = {"none": 1.0, "sqrt": math.sqrt(share), "linear": share}
            self.lr_factor = factors[plans.config.lr_scaling]
        self.is_pulled = False
        stream = (self.worker, turn.epoch, turn.round, *[plans.place] * bool(plans.place))
        seed = stream_seed(plans.config.seed, "dropout", *stream)
        seed_streams(seed)  # streams that the loop may use
        if workers.accelerator.device.type != "cpu":  # else torch would look for devices
            torch.manual_seed(seed)
        workers.restore_random_state()  # if the run was stopped inside this round

    @property
    def is_over(self) -> bool:
        """Whether all steps of the round are taken."""
        return self._all_workers.progress.steps == len(self._steps)

    def steps(self, source: Source, transform: Any) -> Iterator[TurnStep]:
        """Return the remaining steps, with a source's batches; loader processes begin here."""
        workers = self._all_workers
        left = self._steps[workers.progress.steps :]
        if not left:
            return iter(())
        flat = [batch for step in left for batch in step.batches]
        batches = source.batches([batch.indices for batch in flat], transform, self.epoch)
        if workers.mixing:
            batches = workers.mixing.mixed(batches, flat, self.epoch)
        return self._in_order(TurnStep(workers, self, step, batches) for step in left)

    def _in_order(self, steps: Iterator[TurnStep]) -> Iterator[TurnStep]:
        for step in steps:
            refuse_order(not self.is_pulled, "call workers.pull(turn) before a step", "none")
            yield step
            refuse_order(not step.is_done, "call step.done(lr) after each step", "none")

    def reports(self) -> list[RoundReport]:
        """Return a report for each worker of the turn; it waits for the device once.

        With a fault, the round is refused. Measured values go with the first worker.
        """
        workers, progress = self._all_workers, self._all_workers.progress
        cluster, names = workers.cluster, workers.meter.figures or ()
        sums, finite = progress.read(cluster.outgoing)
        workers.meter.end(sums, progress.samples)
        faults = {w: BAD_LOSS for w, own in sums.items() if not math.isfinite(own[0])}
        if not finite and not faults:
            number = cluster.weights.first_not_finite(cluster.outgoing)
            faults[self.worker] = BAD_WEIGHTS + (0 if number is None else 1 + number)
        steps, reports = progress.steps - progress.inherited, []
        for worker in self.workers:
            mine, count = self.plan.workers[worker], progress.samples.get(worker, 0)
            own = sums.get(worker, [0.0] * (1 + len(names)))  # zeros: it had no samples
            loss, *means = (value / max(count, 1) for value in own)
            reports.append(
                RoundReport(
                    worker,
                    self.epoch,
                    self.round,
                    resolution=self.stage.resolution,
                    local_batch_size=mine.local_batch_size,
                    samples=count,
                    steps=steps,
                    time_s=workers.stepper.timer.take_seconds(worker),
                    loss=loss,
                    merge_weight=mine.merge_weight,
                    learning_rate=progress.learning_rate,
                    predicted_time_s=mine.predicted_time_s * count / max(mine.samples, 1),
                    refused=bool(faults),
                    fault=faults.get(worker, NO_FAULT),
                    lines=workers.meter.take_lines() if worker == self.worker else (),
                    figures=dict(zip(names, means, strict=True)),
                    **(progress.measured if worker == self.worker else {}),
                )
            )
        return reports


class WorkerPart(NamedTuple):
    """A worker's batch in a step, or a micro-batch: what one pass computes."""

    worker: int
    weight: float  # on the mean loss of the batch


class TurnStep:
    """An optimizer step of a turn: iterate over its batches, `add` each, then step, then `done`."""

    def __init__(
        self,
        workers: Workers,
        turn: WorkerTurn,
        step: Step,
        batches: Iterator[tuple[Tensor, Tensor]],
    ) -> None:
        self.progress = step.progress  # share of the epoch that the worker has finished
        self.is_done = False
        self._workers, self._turn, self._step = workers, turn, step
        self._batches = batches
        self._open: int | None = None  # samples of the batch to be added
        self._added, self._is_complete, self._timing = 0, False, ExitStack()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, WorkerPart]]:
        """Yield images [B, 3, R, R], labels [B] or shares [B, C], and their `WorkerPart`.

        Afterwards, the gradients are those of the whole step.
        """
        workers, progress, batch = self._workers, self._workers.progress, ()
        stepper = workers.stepper
        for part in self._step.batches:
            workers.is_between_steps = not self._added  # while it waits for data
            images, labels = batch = next(self._batches)
            workers.is_between_steps = False
            with stepper.micro_batch(self._step, part) as weight:
                self._open = len(labels)
                yield images, labels, WorkerPart(part.worker, weight)
            refuse_order(self._open is not None, "call step.add for each batch", "none")
        self._is_complete = True
        if progress.samples and not progress.steps:
            moment = (Extra.measure, self._turn.plain, self._step, *batch)
            for found in workers.plans.extras.each(*moment):
                progress.measured |= found or {}
        workers.meter.begin_step(self._step, stepper.complete(self._step))
        self._timing.enter_context(stepper.stepping(self._step))

    def add(self, part: WorkerPart, loss: Tensor, figures: Figures) -> None:
        """Add a batch's mean loss and figures on the device: .item() would wait for it."""
        workers, worker, samples = self._workers, part.worker, self._open
        refuse_order(samples is None, "call step.add once for each batch", "it twice")
        progress, self._open, self._added = workers.progress, None, self._added + 1
        if workers.meter.figures is None:
            check_figures(figures)
            workers.meter.figures = tuple(figures)
        means = scalars(loss, figures, workers.meter.figures)
        so_far = progress.sums.get(worker)
        means = means * samples
        progress.sums[worker] = means if so_far is None else so_far + means
        progress.samples[worker] = progress.samples.get(worker, 0) + samples

    def done(self, learning_rate: float) -> None:
        """Record the step and the learning rate that it used."""
        workers, progress, count = self._workers, self._workers.progress, len(self._step.batches)
        refuse_order(
            not self._is_complete,
            "let its loop over a step's batches come to the end, where other workers may wait",
            f"step.done after {self._added} of {count}, without that end",
        )
        self._timing.close()
        workers.meter.end_step(self._step, learning_rate, progress)
        progress.steps += 1
        workers.steps_taken += 1
        progress.learning_rate = float(learning_rate)
        self.is_done = True
