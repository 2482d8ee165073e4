"""One trial of a study: steps at one batch size, with measurements in between.

The loop has a task take steps and measure. `ImageTask` uses train.py's data, model and
optimizer. A trial's metaparameters are a point of a scrambled Sobol sequence: they depend on
the seed, the optimizer and the batch size, not on the process that runs it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pandas
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor

from dbsl.base.machine import lazy_import
from dbsl.base.seeds import stream_seed
from dbsl.cluster.steps import begin_thawed, take_step
from dbsl.config.fields import Within
from dbsl.data.dataset import load_data
from dbsl.model import build_model, check_model, set_dropout
from dbsl.optimizer import create_optimizer
from dbsl.plan.sampler import StepSampler, evaluation_batch_size, evaluation_batches
from dbsl.tools.study.scaling import Trial
from dbsl.tools.study.store import COLUMNS, Search

qmc = lazy_import("scipy.stats.qmc")

# Maps to a scale on which a range is searched evenly, and back.
_SCALES = {
    "LINEAR_SCALE": (float, float),
    "LOG_SCALE": (math.log, math.exp),
    "REVERSE_LOG_SCALE": (lambda value: math.log(1 - value), lambda place: 1 - math.exp(place)),
}
_KEPT = 2**30  # most bytes of evaluation images to keep as model inputs
# timm's names for the optimizers of Shallue et al.; sgd is momentum at 0.
TIMM_NAMES = {"sgd": "momentum", "momentum": "momentum", "nesterov": "sgd"}


def decayed_rate(step: int, parameters: Mapping[str, float]) -> float:
    """Return the learning rate of a step, counted from 0: it decays linearly, then is constant.

    It goes from ``learning_rate`` to ``end_learning_rate_factor`` times that, over
    ``learning_rate_decay_steps``, as for the image models of Shallue et al.
    """
    factor = parameters.get("end_learning_rate_factor", 1.0)
    fallen = min(step / parameters.get("learning_rate_decay_steps", math.inf), 1.0)
    return parameters["learning_rate"] * (1 - fallen * (1 - factor))


def measured_steps(budget: int, spacing: float) -> Iterator[int]:
    """Yield the steps after which to measure, each later than the last by the share `spacing`.

    Near the start, that is every step. The last is the budget.
    """
    step = 0
    while step < budget:
        step = min(budget, max(step + 1, math.floor(step * (1 + spacing))))
        yield step


def run_trial(
    task: ImageTask,
    search: Search,
    number: int,
    spacing: float,
    goal: float = 0.0,
    most_steps: Callable[[], float] = lambda: math.inf,
) -> Trial:
    """Train for at most the search's budget, and return the measurements, `spacing` apart.

    A trial ends as INFEASIBLE at the first measurement with a loss that is not finite. It also
    ends where the error falls under a `goal` (COMPLETE), or before it would go past `most_steps()`
    (INCOMPLETE). If that returns the steps of the best trial so far, neither changes the least
    steps to result, nor which trials have them.
    """
    rows, status, done = [(0, math.nan, *task.measure())], "COMPLETE", 0
    parameters = search.points[number]
    for step in measured_steps(search.budget, spacing):
        if step > most_steps():
            status = "INCOMPLETE"
            break
        loss = task.advance([decayed_rate(s, parameters) for s in range(done, step)])
        done = step
        own_loss, error = task.measure() if math.isfinite(loss) else (math.nan, math.nan)
        rows.append((step, loss, own_loss, error))
        if not (math.isfinite(loss) and math.isfinite(own_loss)):
            status = "INFEASIBLE"
            break
        if error < goal:
            break
    table = pandas.DataFrame(rows, columns=COLUMNS, dtype=float)
    return Trial(number, status, done, parameters, table)


class ImageTask:
    """A timm model on a data set's images, trained as by train.py with one worker.

    Initial weights, order, augmentation and dropout depend only on `seed`. Every batch has the
    search's size; an epoch's remainder is dropped.
    """

    def __init__(self, images: Images, search: Search, number: int, seed: int) -> None:
        self._images, self._seed, self._model = images, seed, images.build(seed)
        name, parameters = search.optimizer, search.points[number]
        built = create_optimizer(
            TIMM_NAMES.get(name, name),
            self._model,
            parameters["learning_rate"],
            parameters.get("momentum", 0.0),
            parameters["weight_decay"],
        )
        begin_thawed(built)
        self._optimizer = images.accelerator.prepare_optimizer(built)
        self._batches = self._all_batches(search.batch_size)
        torch.manual_seed(stream_seed(seed, "dropout"))

    def _all_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        train = self._images.data.train
        transform = replace(self._images.transform, seed=self._seed)
        sampler = StepSampler(
            len(train), batch_size, seed=self._seed, drop_last=True, blocks=train.blocks
        )
        for epoch in itertools.count():
            steps = [sampler.step(epoch, n, [batch_size]) for n in range(sampler.steps_per_epoch)]
            yield from train.batches([step.parts[0].indices for step in steps], transform, epoch)

    def advance(self, rates: list[float]) -> float:
        """Take a step with each learning rate; return the mean training loss, as a number."""
        accelerator, smoothing = self._images.accelerator, self._images.config.label_smoothing
        total = torch.zeros((), device=accelerator.device)
        self._model.train()
        for rate, (pixels, labels) in zip(rates, self._batches, strict=False):
            with accelerator.autocast():
                logits = self._model(pixels)
                loss = F.cross_entropy(logits, labels, label_smoothing=smoothing)
            accelerator.backward(loss)
            take_step(self._optimizer, rate)
            self._optimizer.zero_grad(set_to_none=True)
            total += loss.detach()
        return (total / len(rates)).item()

    @torch.no_grad()
    def measure(self) -> tuple[float, float]:
        """Return the evaluation set's mean cross-entropy and its error in [0, 1]."""
        model = self._model.eval()
        totals = torch.zeros(3, device=self._images.accelerator.device)  # loss, wrong, samples
        for pixels, labels in self._images.evaluation():
            with self._images.accelerator.autocast():
                logits = model(pixels).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            wrong = (logits.argmax(1) != labels).sum()
            totals += torch.stack([loss, wrong, torch.full_like(loss, len(labels))])
        loss, wrong, samples = totals.tolist()
        return loss / samples, wrong / samples


class Images:
    """The data and the way to build a model that a study's trials share."""

    def __init__(self, config: Any, accelerator: Accelerator) -> None:
        self.config, self.accelerator = config, accelerator
        self.data = data = load_data(config, config.seed, accelerator.device)
        side = config.resolution or data.resolutions[-1]
        self.transform = data.transform(side, config.augmentation, config.seed)
        least = check_model(self.build(config.seed), data, config.model, (side,))
        Within(least, len(data.train)).check("batch_sizes", config.batch_sizes)
        largest, kind = max(config.batch_sizes), accelerator.device.type
        size = evaluation_batch_size(config.eval_batch_size, kind, largest)
        batches = evaluation_batches(len(data.evaluation), size)
        # Makes the evaluation set's batches; a small set's are made once.
        plain = replace(self.transform, augment="none")
        self.evaluation = partial(data.evaluation.batches, batches, plain)
        if 12 * len(data.evaluation) * side**2 <= _KEPT:
            self.evaluation = partial(list, [*self.evaluation()])

    def build(self, seed: int) -> torch.nn.Module:
        """Return the model with fresh weights, on its device."""
        sides = (self.transform.resolution,)
        model = build_model(self.config.model, self.data.num_classes, sides, seed=seed)
        set_dropout(model, self.config.dropout)
        return model.to(self.accelerator.device, memory_format=torch.channels_last)


class Range(NamedTuple):
    """The values of one metaparameter: a range on a scale, or one value if its ends are equal."""

    low: float
    high: float
    scale: str  # one of `_SCALES`

    def value(self, share: float) -> float:
        """Return the value at a share, in [0, 1), of the range on its scale."""
        to_scale, from_scale = _SCALES[self.scale]
        low, high = sorted(map(to_scale, (self.low, self.high)))
        return min(max(from_scale(low + share * (high - low)), self.low), self.high)


def search_points(
    ranges: Mapping[str, Range], count: int, seed: int, budget: int
) -> list[dict[str, float]]:
    """Return the metaparameters of the first `count` trials, of `budget` steps each.

    They fill all ranges evenly. The learning rate and its decay also have their published names.
    """
    fixed = {name: own.low for name, own in ranges.items() if own.low == own.high}
    searched = {name: own for name, own in ranges.items() if name not in fixed}
    rows = [[]] * count
    if searched:
        sobol = qmc.Sobol(len(searched), scramble=True, seed=seed % 2**32)
        rows = sobol.random_base2(math.ceil(math.log2(count)))[:count].tolist()
    points = []
    for row in rows:
        shares = zip(searched.items(), row, strict=True)
        point = fixed | {name: own.value(share) for (name, own), share in shares}
        rate = point["effective_learning_rate"] * (1 - point.get("momentum", 0.0))
        steps = max(1, round(point["learning_rate_decay_share"] * budget))
        points.append(point | {"learning_rate": rate, "learning_rate_decay_steps": steps})
    return points
