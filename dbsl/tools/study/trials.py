"""One training of a study: so many steps at one batch size, measured on the way.

The loop has a task take steps and measure itself. `ImageTask` does so with train.py's data, model,
optimizer and step. A trial's metaparameters are a point of a scrambled Sobol sequence: they depend
on the seed, the optimizer and the batch size, not on who runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from dbsl.base.machine import lazy_import
from dbsl.base.seeds import stream_seed
from dbsl.cluster.steps import ComputeTimer, Stepper, begin_thawed
from dbsl.data.dataset import Data
from dbsl.data.transforms import Transform
from dbsl.model import build_model, set_dropout
from dbsl.optimizer import build_optimizer
from dbsl.plan.sampler import StepSampler, evaluation_batch_size, evaluation_batches
from dbsl.tools.study.scaling import Trial
from dbsl.tools.study.store import COLUMNS

if TYPE_CHECKING:
    from dbsl.tools.study.study import StudyConfig

qmc = lazy_import("scipy.stats.qmc")

_CACHED_EVALUATION = 2**30  # bytes of evaluation images that are kept as they go into the model
# Optimizers as Shallue et al. call them, by timm's names; sgd is momentum with none.
TIMM_NAMES = {"sgd": "momentum", "momentum": "momentum", "nesterov": "sgd"}


class Measurement(NamedTuple):
    """The evaluation set's result at one moment."""

    loss: float  # cross-entropy, mean over the samples
    error: float  # in [0, 1]


def decayed_rate(step: int, parameters: Mapping[str, float]) -> float:
    """Return the learning rate of a step, counted from 0: it falls in a line, then stays.

    From ``learning_rate`` to ``end_learning_rate_factor`` times that, over
    ``learning_rate_decay_steps``; as Shallue et al. have it for their image models.
    """
    factor = parameters.get("end_learning_rate_factor", 1.0)
    fallen = min(step / parameters.get("learning_rate_decay_steps", math.inf), 1.0)
    return parameters["learning_rate"] * (1 - fallen * (1 - factor))


def measured_steps(budget: int, spacing: float) -> Iterator[int]:
    """Yield the steps after which to measure: each `spacing` times later than the one before.

    Near the start that is after every step. The last is the budget.
    """
    step = 0
    while step < budget:
        step = min(budget, max(step + 1, math.floor(step * (1 + spacing))))
        yield step


def run_trial(
    task: ImageTask,
    trial_id: int,
    parameters: Mapping[str, float],
    *,
    budget: int,
    goal: float,
    spacing: float,
    best: Callable[[], float] = lambda: math.inf,
    early_stopping: bool = True,
    may_go_on: Callable[[], object] = lambda: None,
) -> Trial:
    """Train for at most `budget` steps, and return the measurements, `spacing` apart.

    A trial whose loss is not finite at any measurement is INFEASIBLE and ends there. With
    `early_stopping` it ends where the error falls under the goal (COMPLETE), or where it cannot
    before the best trial did, in so many steps (INCOMPLETE): neither changes the least steps to
    result. `may_go_on` is called at every measurement; it may raise.
    """
    rows = [(0, math.nan, *task.measure())]
    status, done = "COMPLETE", 0
    for step in measured_steps(budget, spacing):
        may_go_on()
        if early_stopping and step >= best():
            status = "INCOMPLETE"
            break
        loss = task.advance([decayed_rate(s, parameters) for s in range(done, step)])
        done = step
        measured = task.measure() if math.isfinite(loss) else Measurement(math.nan, math.nan)
        rows.append((step, loss, *measured))
        if not (math.isfinite(loss) and math.isfinite(measured.loss)):
            status = "INFEASIBLE"
            break
        if early_stopping and measured.error < goal:
            break
    columns = np.array(rows, dtype=np.float64).T
    return Trial(trial_id, status, done, dict(parameters), dict(zip(COLUMNS, columns, strict=True)))


class ImageTask:
    """A timm model on a data set's images, trained as train.py does with one worker.

    Initial weights, order, augmentation and dropout depend on `seed` alone. Every batch has
    `batch_size` samples; the rest of an epoch is left out. `optimizer` is one of `TIMM_NAMES`, or a
    name that timm.optim knows.
    """

    def __init__(
        self,
        images: Images,
        optimizer: str,
        batch_size: int,
        parameters: Mapping[str, float],
        seed: int,
    ) -> None:
        self._images, self._seed = images, seed
        accelerator = images.accelerator
        model = images.build(seed)
        built = build_optimizer(
            TIMM_NAMES.get(optimizer, optimizer),
            model,
            parameters["learning_rate"],
            parameters.get("momentum", 0.0),
            parameters.get("weight_decay", 0.0),
        )
        begin_thawed(built)
        prepared = {0: accelerator.prepare_optimizer(built)}
        self._stepper = Stepper(model, None, ComputeTimer(accelerator.device), prepared)
        self._sampler = StepSampler(
            len(images.data.train),
            batch_size,
            seed=seed,
            drop_last=True,
            least=1,
            blocks=images.data.train.blocks,
        )
        self._batch_size = batch_size
        self._transform = replace(images.transform, seed=seed)
        self._taken = 0
        torch.manual_seed(stream_seed(seed, "dropout"))

    def advance(self, rates: list[float]) -> float:
        """Take a step with each learning rate; return the mean training loss, as a number."""
        total = torch.zeros((), device=self._images.accelerator.device)
        per_epoch = self._sampler.steps_per_epoch
        first, last = self._taken, self._taken + len(rates)
        for epoch in range(first // per_epoch, -(-last // per_epoch)):
            start = max(first, epoch * per_epoch)
            end = min(last, (epoch + 1) * per_epoch)
            total += self._advance(epoch, start, end, rates[start - first : end - first])
        self._taken = last
        self._stepper.timer.take_seconds(0)  # or it would remember each step
        return (total / len(rates)).item()

    def _advance(self, epoch: int, first: int, last: int, rates: list[float]) -> Tensor:
        images, stepper = self._images, self._stepper
        smoothing = images.config.label_smoothing
        offset = epoch * self._sampler.steps_per_epoch
        steps = self._sampler.steps((0,), epoch, first - offset, last - offset, [self._batch_size])
        batches = images.data.train.batches(
            [step.parts[0].indices for step in steps], self._transform, epoch
        )
        total = torch.zeros((), device=images.accelerator.device)
        stepper.model.train()
        for step, rate, (pixels, labels) in zip(steps, rates, batches, strict=True):
            (part,) = step.parts
            with stepper.micro_batch(step, part) as weight:
                with images.accelerator.autocast():
                    logits = stepper.model(pixels)
                    loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
                images.accelerator.backward(loss * weight)
            stepper.step(step, rate)
            total += loss.detach()
        return total

    @torch.no_grad()
    def measure(self) -> Measurement:
        """Evaluate, which changes nothing."""
        model = self._stepper.model.eval()
        totals = torch.zeros(3, device=self._images.accelerator.device)  # loss, wrong, samples
        for pixels, labels in self._images.evaluation():
            with self._images.accelerator.autocast():
                logits = model(pixels).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            wrong = (logits.argmax(1) != labels).sum()
            totals += torch.stack([loss, wrong, torch.full_like(loss, len(labels))])
        loss, wrong, samples = totals.tolist()
        return Measurement(loss / samples, wrong / samples)


@dataclass
class Images:
    """Data and settings that a study's trials share."""

    config: StudyConfig
    data: Data
    transform: Transform  # for training images
    accelerator: Accelerator

    def __post_init__(self) -> None:
        config, kind = self.config, self.accelerator.device.type
        size = evaluation_batch_size(config.eval_batch_size, kind, max(config.batch_sizes))
        self._batches = evaluation_batches(len(self.data.evaluation), size)
        self._kept: list[tuple[Tensor, Tensor]] | None = None

    def build(self, seed: int) -> torch.nn.Module:
        """Return the model with fresh weights, on its device."""
        name, side = self.config.model, self.transform.resolution
        model = build_model(name, self.data.num_classes, (side,), seed=seed)
        set_dropout(model, self.config.dropout)
        return model.to(self.accelerator.device, memory_format=torch.channels_last)

    def evaluation(self) -> Any:
        """Return the evaluation set's batches; small ones are made once."""
        if self._kept is not None:
            return self._kept
        plain = replace(self.transform, augment="none")
        batches = self.data.evaluation.batches(self._batches, plain)
        if len(self.data.evaluation) * 12 * self.transform.resolution**2 > _CACHED_EVALUATION:
            return batches
        self._kept = list(batches)
        return self._kept


@dataclass(frozen=True)
class Range:
    """The values of one metaparameter: a range on a scale, or where both ends are equal, one."""

    low: float
    high: float
    scale: str  # LINEAR_SCALE, LOG_SCALE, or REVERSE_LOG_SCALE: 1 - value on a log scale

    def value(self, share: float) -> float:
        """Return the value at a share, in [0, 1), of the range on its scale."""
        if self.scale == "LINEAR_SCALE":
            return self.low + share * (self.high - self.low)
        is_reversed = self.scale == "REVERSE_LOG_SCALE"
        low, high = (1 - self.high, 1 - self.low) if is_reversed else (self.low, self.high)
        searched = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        searched = min(max(searched, low), high)
        return 1 - searched if is_reversed else searched


def search_points(ranges: Mapping[str, Range], count: int, seed: int) -> list[dict[str, float]]:
    """Return the first `count` points of a sequence that fills all ranges evenly."""
    searched = [name for name, own in ranges.items() if own.low < own.high]
    fixed = {name: own.low for name, own in ranges.items() if own.low == own.high}
    if not searched:
        return [fixed] * count
    sobol = qmc.Sobol(len(searched), scramble=True, seed=seed % 2**32)
    rows = sobol.random_base2(math.ceil(math.log2(count)))[:count].tolist()
    return [
        fixed | {name: ranges[name].value(v) for name, v in zip(searched, row, strict=True)}
        for row in rows
    ]


def trial_parameters(point: Mapping[str, float], steps: int) -> dict[str, float]:
    """Return a trial's metaparameters, under the published names where they have one.

    `point` is one of `search_points`, `steps` the trial's budget.
    """
    rate = point["effective_learning_rate"] * (1 - point.get("momentum", 0.0))
    decay_steps = max(1, round(point["learning_rate_decay_share"] * steps))
    return {**point, "learning_rate": rate, "learning_rate_decay_steps": decay_steps}


def search_entries(ranges: Mapping[str, Range]) -> dict[str, dict[str, Any]]:
    """Return the entries of ``parameter_configs`` in ``study.json``."""
    return {
        name: {
            "type": "DOUBLE",
            "scale": own.scale,
            "min_value": own.low,
            "max_value": own.high,
            # No value lies beyond such a bound, so a best value there is not on an edge.
            "fixed_bounds": ["min"] * (own.low == 0) + ["max"] * (own.high == 1),
        }
        for name, own in ranges.items()
        if own.low < own.high
    }
