"""The gradient noise scale: roughly, the batch size above which more samples are wasted.

McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch Training (arXiv 1812.06162).
G is the gradient of the whole training set and Sigma the covariance of single samples' gradients;
B_simple = tr(Sigma)/|G|^2. Training with a batch of B_simple takes about twice the fewest steps
and twice the fewest samples of any batch size.

An epoch draws its batches without replacement: a batch of b out of N training samples has
E|g_b|^2 = |G|^2 + tr(Sigma) * (1/b - 1/N). Two batch sizes at the same weights give both numbers
(`NoiseProbe` measures them at the first step of a round, when a worker has just pulled its
weights). Augmentation makes new images of the same samples, so the true term lies between
1/b - 1/N and 1/b. The estimate is then too low: 1/B_simple is too large, by at most 1/N.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from dbsl.base.machine import lazy_import
from dbsl.cluster.weights import uncompiled
from dbsl.config.fields import Role
from dbsl.config.hooks import Extra, Row
from dbsl.config.settings import RunConfig, wire_of
from dbsl.loss import LossOf, without_trace
from dbsl.plan.sampler import Step
from dbsl.plan.types import Plan, RoundReport, TimeModel, Turn
from dbsl.profile.memory import without_trials
from dbsl.run.workers import Workers

special = lazy_import("scipy.special")

Squares = Sequence[tuple[int, float]]  # batch sizes, and squared norms of their gradients
Kind = Literal["micro", "joined"]

CONFIDENCE = 0.95
_KEPT = 0.95  # factor on a pair's weight at each new pair: about 40 pairs matter
_FEW = 10  # fewer measurements print no line
_MICRO = 4  # a micro-batch is this part of a batch
_COST = 0.003  # share of the compute that extra passes may take; the promise is 2 %


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of B_simple, smoothed."""

    b_simple: float  # tr(Sigma)/|G|^2, samples; inf where |G|^2 is not above 0
    low: float  # lower end of its 95 % interval (Fieller's, for a ratio of means)
    high: float  # upper end; inf where |G|^2 cannot be told from 0
    gradient_square: float  # |G|^2
    trace: float  # tr(Sigma)
    pairs: int  # measurements so far


def separate(squares: Squares, samples: int) -> tuple[float, float]:
    """Return |G|^2 and tr(Sigma) from gradients of two or more batch sizes.

    tr(Sigma) is the slope of the least-squares line of the squares over 1/b, and |G|^2 the value of
    that line at b = N, `samples`, where a batch has every training sample. Either may be
    negative; their expected values are not.
    """
    inverse = np.array([1 / batch for batch, _ in squares])
    values = np.array([square for _, square in squares])
    centred = inverse - inverse.mean()
    trace = float(centred @ values / (centred @ centred))
    return float(values.mean() - trace * (inverse.mean() - 1 / samples)), trace


@dataclass(frozen=True)
class NoiseSettings(RunConfig):
    """Whether the noise scale is estimated."""

    # --- run
    # estimate a useful batch size in under 2 % of time
    noise_scale: Annotated[bool, Role.FREE] = True


class Noise(Extra):
    """Measures gradients while a run trains, and estimates its noise scale at each epoch's end."""

    Settings = NoiseSettings
    _advice = ""  # a line for people, on the main process

    @classmethod
    def of(cls, config: NoiseSettings) -> Noise | None:
        """Return it if measurements are meaningful."""
        # Images of a mixed batch are not independent.
        return cls() if config.noise_scale and not config.mixes else None

    def begin(self, workers: Workers, state: Mapping[str, Any], *, same: bool) -> None:
        """Choose how to measure; measure nothing with fp16, which scales gradients.

        Workers that have changed begin their rounds again.
        """
        self.mean, self._samples = NoiseAverage(), len(workers.data.train)
        self._loss_of = workers.loss_of
        # Whether a step's gradients come from several workers, or from a worker's processes.
        self._joint = workers.config.sync == "step" or workers.plans.place is not None
        self.probe = None if workers.accelerator.scaler else choose_probe(workers)
        if state:
            self.mean = NoiseAverage(**state["mean"])
            if same and self.probe and state["probe"]:
                self.probe.load_state_dict(state["probe"])

    def measure(self, turn: Turn, step: Step, images: Tensor, labels: Tensor) -> dict[str, Any]:
        if self.probe is None or not self.probe.due(turn):
            return {}
        return self.probe.measure(turn, step, self._joint, images, labels, self._loss_of)

    def epoch(
        self, epoch: int, plan: Plan, reports: Sequence[RoundReport]
    ) -> Iterable[tuple[str, Row]]:
        for gradient_square, trace in pairs_of(reports, self._samples):
            self.mean.add(gradient_square, trace)
        if (scale := self.mean.estimate()) is not None:
            self._advice = advice_on(scale, plan)
            yield "noise", asdict(scale)

    @contextmanager
    def report(self, folder: Path, rows: Sequence[Row]) -> Iterator[Callable[[Row], object]]:
        """Print the advice, if any, once a run has ended."""
        yield lambda row: None
        if self._advice:
            print(self._advice, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"probe": self.probe and self.probe.state_dict(), "mean": asdict(self.mean)}


@dataclass
class NoiseAverage:
    """Means of |G|^2 and tr(Sigma), each smoothed before the division, with an interval."""

    weight: float = 0.0
    weight_squares: float = 0.0
    sums: Sequence[float] = (0.0,) * 5  # sums of x, y, xx, xy, yy; x = |G|^2, y = tr(Sigma)
    pairs: int = 0

    def add(self, gradient_square: float, trace: float) -> None:
        """Add a measurement, with less weight on earlier ones; ignore one that is not finite."""
        x, y = gradient_square, trace
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self.weight = _KEPT * self.weight + 1
        self.weight_squares = _KEPT**2 * self.weight_squares + 1
        new = (x, y, x * x, x * y, y * y)
        self.sums = [_KEPT * old + value for old, value in zip(self.sums, new, strict=True)]
        self.pairs += 1

    def estimate(self) -> NoiseScale | None:
        """Return the noise scale, or None before the third measurement."""
        if self.pairs < 3:
            return None
        x, y, xx, xy, yy = (value / self.weight for value in self.sums)
        effective = self.weight**2 / self.weight_squares
        share = 1 / (effective - 1)  # unbiased variance of a weighted mean
        cov = [share * max(v, 0.0) for v in (xx - x * x, yy - y * y)]
        cov.insert(1, share * (xy - x * y))
        quantile = float(special.stdtrit(effective - 1, (1 + CONFIDENCE) / 2))
        low, high = _ratio_interval(x, y, *cov, quantile)
        return NoiseScale(max(y, 0.0) / x if x > 0 else math.inf, low, high, x, y, self.pairs)


def _ratio_interval(
    x: float, y: float, xx: float, xy: float, yy: float, quantile: float
) -> tuple[float, float]:
    """Return Fieller's interval of y/x within [0, inf], from means and their covariances."""
    q = quantile**2
    a, b, c = x * x - q * xx, x * y - q * xy, y * y - q * yy
    root = b * b - a * c
    if x <= 0 or root < 0:  # |G|^2 is not negative: too few measurements; or every ratio fits
        return 0.0, math.inf
    ends = sorted(((b - math.sqrt(root)) / a, (b + math.sqrt(root)) / a)) if a else (0.0, math.inf)
    if a > 0:
        return max(ends[0], 0.0), max(ends[1], 0.0)
    # The mean of x may be 0: then all ratios fit, except those between the ends.
    return (max(ends[1], 0.0) if ends[0] < 0 else 0.0), math.inf


def pairs_of(reports: Iterable[RoundReport], samples: int) -> list[tuple[float, float]]:
    """Return |G|^2 and tr(Sigma) of each measurement in an epoch's rounds.

    Workers that each measured their own batch and a part of it give one pair each. Otherwise a
    round gives one pair, because its measurements are not independent: workers' parts of one
    shared batch, or workers' batches and their joint batch.
    """
    rounds: dict[int, list[RoundReport]] = {}
    for report in sorted(reports, key=lambda report: (report.round, report.worker)):
        if report.gradient_batch and not report.refused:
            rounds.setdefault(report.round, []).append(report)
    found = []
    for measured in rounds.values():
        own = [
            [(r.micro_batch, r.micro_square)] * bool(r.micro_batch)
            + [(r.gradient_batch, r.gradient_square)]
            for r in measured
        ]
        shared = any(report.gradient_batch > report.local_batch_size for report in measured)
        alone = not shared and all(len(squares) > 1 for squares in own)
        for squares in own if alone else [list(chain(*own))]:
            if len({batch for batch, _ in squares}) > 1:
                found.append(separate(squares, samples))
    return found


def advice_on(scale: NoiseScale, plan: Plan) -> str:
    """Return a line on the noise scale and the plan's largest batch, empty if too uncertain."""
    if scale.pairs < _FEW or math.isinf(scale.b_simple):
        return ""
    batch = plan.global_batch_size or max(worker.local_batch_size for worker in plan.workers)
    numbers = (scale.b_simple, scale.low, scale.high)
    value, low, high = (f"{v:.3g}" if v < 1000 else f"{v:.0f}" for v in numbers)
    upper = "or more" if math.isinf(scale.high) else f"to {high}"
    name = "global" if plan.global_batch_size else "largest"
    return (
        f"a step gains from more samples up to about {value}, the gradient noise scale "
        f"(95 %: {low} {upper}); the {name} batch is {batch}"
    )


class NoiseProbe:
    """Measures gradients of two batch sizes at the same weights, in one of two ways.

    | kind | the larger batch | the smaller | costs |
    | --- | --- | --- | --- |
    | joined | those of all workers of a round together | each worker's | a sum in memory |
    | micro | a worker's, or a joint step's global batch | a quarter of a worker's | its pass |

    `joined` is far more precise; its workers share a process and start a round from the same
    weights. A worker is measured every `every` rounds; a micro-batch has at least `least` samples.
    Gradients, batch norm's statistics and random streams are not changed. No measurement waits for
    the device.
    """

    def __init__(
        self, kind: Kind, *, every: int, workers: int, rounds: int, least: int, model: nn.Module
    ) -> None:
        self.kind, self.every, self._least = kind, every, least
        self._workers, self._rounds = workers, rounds
        self._model = model
        self._clock = -1  # clock of the round whose gradients are being joined
        self._sum: list[Tensor] = []  # by parameter, [numel]
        self._joined: dict[int, int] = {}  # batches by worker

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """The parameters trained now: layers may be frozen temporarily."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def due(self, turn: Turn) -> bool:
        """Return whether to measure a worker's turn."""
        clock = turn.epoch * self._rounds + turn.round
        own = 0 if self.kind == "joined" else turn.workers[0]  # joined: all in one round
        return (clock + own) % self.every == 0

    def measure(
        self, turn: Turn, step: Step, joint: bool, images: Tensor, labels: Tensor, loss_of: LossOf
    ) -> dict[str, Any]:
        """Return a report's entries on the gradients, with squares still on the device.

        The gradients of the step's last part have been computed; `joint` ones are of all workers'
        batches together. Images [B, 3, R, R] and labels [B] belong to that part, or to its last
        micro-batch.
        """
        parts = [part for part in step.parts if len(part.indices)]
        if not parts or (joint and step.odd):  # not summed over the processes yet
            return {}
        part, batch = parts[-1], len(parts[-1].indices)
        if not any(p.grad is not None for p in self._parameters):  # the loop skipped the batch
            return {}
        # A joint step has the gradients of the mean over all; other steps carry the part's weight.
        square = _square(p.grad for p in self._parameters if p.grad is not None)
        square = square if joint else square / part.weight**2
        whole = round(batch / part.weight) if joint else batch
        if self.kind == "micro":
            size = min(max(self._least, -(-batch // _MICRO)), len(labels))
            if size >= batch:
                return {}
            found = _named("micro", size, self._pass(images[:size], labels[:size], loss_of))
            return found | _named("gradient", whole, square)
        if self._join(turn, batch, part.weight):
            total = sum(self._joined.values())
            joined = _square(self._sum) / total**2
            return _named("micro", batch, square) | _named("gradient", total, joined)
        return _named("gradient", whole, square)

    def launch_s(self, workers: Workers) -> float:
        """Return the seconds of a pass over very few images, which are those of its launches.

        Compiled steps and CUDA graphs do not show them: a pass is neither.
        """
        batch = workers.data.example(self._least, min(workers.plans.first))
        for _ in range(2):  # the first one loads what it needs
            torch.cuda.synchronize()
            began = time.perf_counter()
            self._pass(*batch, workers.loss_of)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - began
        return seconds

    def state_dict(self) -> dict[str, Any]:
        return {"clock": self._clock, "sum": list(self._sum), "joined": dict(self._joined)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clock, self._joined = state["clock"], dict(state["joined"])
        device = next(self._model.parameters()).device
        self._sum = [_numbers(gradient.to(device)) for gradient in state["sum"]]

    @torch.no_grad()
    def _join(self, turn: Turn, batch: int, weight: float) -> bool:
        """Add a worker's gradient to its round's; return whether it was the last."""
        clock = turn.epoch * self._rounds + turn.round
        if clock != self._clock:
            self._clock, self._joined, self._sum = clock, {}, []
        gradients = [_numbers(p.grad) for p in self._parameters if p.grad is not None]
        if not self._joined:
            self._sum = list(torch._foreach_mul(gradients, batch / weight))
        else:
            torch._foreach_add_(self._sum, gradients, alpha=batch / weight)
        self._joined[turn.workers[0]] = batch
        return len(self._joined) == self._workers

    def _pass(self, images: Tensor, labels: Tensor, loss_of: LossOf) -> Tensor:
        # Trials of cuDNN's algorithms for this one size would take longer than the pass.
        with without_trace(self._model), uncompiled(self._model), without_trials():
            loss = loss_of(self._model, images, labels)
            # DDP would mistake a backward() for the step's own.
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return _square(gradient for gradient in gradients if gradient is not None)


def choose_probe(workers: Workers) -> NoiseProbe | None:
    """Return the probe for a run: joined where its workers allow it, else micro.

    None: gradients have low rank before they can be measured, as with PowerSGD.
    """
    plans, model = workers.plans, workers.raw_model
    if wire_of(plans.config).rank:
        return None
    rounds, least, count = plans.rounds, plans.sampler.least, plans.config.workers
    alone = workers.accelerator.num_processes == 1
    kind = "joined" if plans.config.sync == "bsp" and alone and count > 1 else "micro"
    probe = NoiseProbe(kind, every=1, workers=count, rounds=rounds, least=least, model=model)
    is_cuda = next(model.parameters()).is_cuda
    # On the CPU, joining gradients is a sum in memory. A fast GPU waits for its launches, which
    # cost less than a pass, but not nothing if rounds are short.
    if kind == "joined" and not is_cuda:
        return probe
    launch_s = probe.launch_s(workers) if is_cuda and kind == "micro" else 0.0
    probe.every = max(
        probe_interval(own, worker.local_batch_size, worker.steps // rounds, least, launch_s)
        for resolution, plan in plans.first.items()
        for own, worker in zip(plans.known.models[resolution], plan.workers, strict=True)
    )
    return probe


def probe_interval(
    model: TimeModel, batch: int, steps: int, least: int, launch_s: float = 0.0
) -> int:
    """Return the rounds between extra micro-batch passes that keep within 0.3 % of the time.

    A round has `steps` of `batch` samples; a micro-batch has at least `least` samples. A pass takes
    at least the `launch_s` of its launches.
    """
    step_s = model.time(batch, 1)
    extra_s = max(model.time(max(least, -(-batch // _MICRO)), 1), step_s / _MICRO, launch_s)
    return max(1, math.ceil(extra_s / (_COST * max(steps, 1) * step_s)))


def _named(name: str, batch: int, square: Tensor) -> dict[str, Any]:
    return {f"{name}_batch": batch, f"{name}_square": square}


def _numbers(gradient: Tensor) -> Tensor:
    """Return a gradient's numbers in channels_last order, [numel].

    The result is a view if the gradient has that memory layout, as in image models. One from a
    checkpoint does not.
    """
    return (gradient.permute(0, 2, 3, 1) if gradient.dim() == 4 else gradient).reshape(-1)


def _square(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of all gradients together.

    On the CPU, it is bit-identical wherever they are in memory. The order of summation, and so the
    last bits, may depend on the order of numbers in memory and on the address. The squares are new
    tensors with addresses that torch aligns. On CUDA, where bits may differ, a few launches do for
    all parameters.
    """
    numbers = [_numbers(gradient) for gradient in gradients]
    if numbers[0].is_cuda:
        return torch.stack(torch._foreach_norm(numbers)).square().sum()
    return torch.stack([own.square().sum() for own in numbers]).sum()
