"""The gradient noise scale: about how large a batch may be before more of it is wasted.

McCandlish, Kaplan, Amodei et al.: An Empirical Model of Large-Batch Training (arXiv 1812.06162).
With the gradient G of the whole data set and the covariance Sigma of single samples' gradients, a
batch of b has E|g_b|^2 = |G|^2 + tr(Sigma)/b, and B_simple = tr(Sigma)/|G|^2. Two batch sizes at
the same weights give both. Training with a batch of B_simple takes about twice the fewest steps,
and twice the fewest samples, that any batch size can do with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dbsl.lazy import lazy_import
from dbsl.machines import TimeModel
from dbsl.plan import Plan
from dbsl.sampler import Step
from dbsl.server import RoundReport

special = lazy_import("scipy.special")

Squares = Sequence[tuple[int, float]]  # batch sizes, and the squared norms of their gradients

CONFIDENCE = 0.95
_KEPT = 0.95  # of a pair's weight, when the next one comes: about the last 40 count
_COST = 0.015  # share of the compute that extra passes may take; the promise is 2 %
UNLIKE = 1.5  # ratio of batch sizes from which on they tell signal and noise apart
_MICRO = 4  # a micro-batch is this part of a batch


@dataclass(frozen=True)
class NoiseScale:
    """An estimate of B_simple, smoothed.

    Attributes:
        b_simple: tr(Sigma)/|G|^2, samples; inf where |G|^2 is not above 0.
        low: Lower end of its 95 % interval (Fieller's, for a ratio of means).
        high: Upper end; inf where |G|^2 cannot be told from 0.
        gradient_square: |G|^2.
        trace: tr(Sigma).
        pairs: Measurements so far.
    """

    b_simple: float
    low: float
    high: float
    gradient_square: float
    trace: float
    pairs: int


def separate(squares: Squares) -> tuple[float, float]:
    """Return |G|^2 and tr(Sigma) from gradients of two or more batch sizes.

    Of two these are |G|^2 = (B*|g_B|^2 - b*|g_b|^2)/(B - b) and
    tr(Sigma) = (|g_b|^2 - |g_B|^2)/(1/b - 1/B); of more, the least-squares line of the squares over
    1/b. Either may come out negative: their means do not.

    Raises:
        ValueError: If there is one batch size alone.
    """
    inverse = np.array([1 / batch for batch, _ in squares])
    values = np.array([square for _, square in squares])
    if np.ptp(inverse) == 0:
        raise ValueError(f"squares must be of two batch sizes or more, got {list(squares)}")
    centred = inverse - inverse.mean()
    trace = float(centred @ values / (centred @ centred))
    return float(values.mean() - trace * inverse.mean()), trace


class NoiseAverage:
    """Means of |G|^2 and tr(Sigma), each smoothed before they are divided, with an interval."""

    def __init__(self) -> None:
        self._weight = self._weight_squares = 0.0
        self._sums = [0.0] * 5  # of x, y, x*x, x*y, y*y, with x = |G|^2 and y = tr(Sigma)
        self.pairs = 0

    def add(self, gradient_square: float, trace: float) -> None:
        """Count a measurement in; those before it count less. What is not finite is left out."""
        x, y = gradient_square, trace
        if not (math.isfinite(x) and math.isfinite(y)):
            return
        self._weight = _KEPT * self._weight + 1
        self._weight_squares = _KEPT**2 * self._weight_squares + 1
        new = (x, y, x * x, x * y, y * y)
        self._sums = [_KEPT * old + value for old, value in zip(self._sums, new, strict=True)]
        self.pairs += 1

    def add_epoch(self, reports: Iterable[RoundReport]) -> None:
        """Count in what an epoch's rounds have measured."""
        for gradient_square, trace in pairs_of(reports):
            self.add(gradient_square, trace)

    def estimate(self) -> NoiseScale | None:
        """Return the noise scale, or None before the third measurement."""
        if self.pairs < 3:
            return None
        x, y, xx, xy, yy = (value / self._weight for value in self._sums)
        effective = self._weight**2 / self._weight_squares
        share = 1 / (effective - 1)  # unbiased variance of a weighted mean
        cov = [share * max(v, 0.0) for v in (xx - x * x, yy - y * y)]
        cov.insert(1, share * (xy - x * y))
        quantile = float(special.stdtrit(effective - 1, (1 + CONFIDENCE) / 2))
        low, high = _ratio_interval(x, y, *cov, quantile)
        return NoiseScale(max(y, 0.0) / x if x > 0 else math.inf, low, high, x, y, self.pairs)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return {
            "weight": self._weight,
            "weight_squares": self._weight_squares,
            "sums": list(self._sums),
            "pairs": self.pairs,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._weight, self._weight_squares = state["weight"], state["weight_squares"]
        self._sums, self.pairs = list(state["sums"]), state["pairs"]


def _ratio_interval(
    x: float, y: float, xx: float, xy: float, yy: float, quantile: float
) -> tuple[float, float]:
    """Return Fieller's interval of y/x within [0, inf], from means and their covariances."""
    if x <= 0:  # which |G|^2 is not: too few measurements for anything
        return 0.0, math.inf
    q = quantile**2
    a, b, c = x * x - q * xx, x * y - q * xy, y * y - q * yy
    root = b * b - a * c
    if root < 0:  # every ratio fits
        return 0.0, math.inf
    ends = sorted(((b - math.sqrt(root)) / a, (b + math.sqrt(root)) / a)) if a else (0.0, math.inf)
    if a > 0:
        return max(ends[0], 0.0), max(ends[1], 0.0)
    # The mean of x may be 0: all ratios but those between the ends fit.
    return (max(ends[1], 0.0) if ends[0] < 0 else 0.0), math.inf


def pairs_of(reports: Iterable[RoundReport]) -> list[tuple[float, float]]:
    """Return |G|^2 and tr(Sigma) of each measurement that an epoch's rounds have brought.

    A worker that measured a micro-batch beside its batch gives one by itself. Others give one a
    round together, by their batches of unlike sizes.
    """
    found, rounds = [], {}
    for report in sorted(reports, key=lambda report: (report.round, report.worker)):
        if report.refused or not report.gradient_batch:
            continue
        own = (report.gradient_batch, report.gradient_square)
        if report.micro_batch:
            found.append(separate([(report.micro_batch, report.micro_square), own]))
        else:
            rounds.setdefault(report.round, []).append(own)
    for squares in rounds.values():
        if len({batch for batch, _ in squares}) > 1:
            found.append(separate(squares))
    return found


def noise_summary(scale: NoiseScale | None, plan: Plan) -> dict[str, Any]:
    """Return what summary.json says of a run's noise scale and of its batches."""
    if scale is None:
        return {}
    joint = plan.global_batch_size
    batch = joint or max(worker.local_batch_size for worker in plan.workers)
    return {
        "noise_scale": scale.b_simple,
        "noise_scale_low": scale.low,
        "noise_scale_high": scale.high,
        "noise_advice": advise(scale, batch, "the global batch" if joint else "B_L"),
    }


def advise(scale: NoiseScale, batch: int, name: str) -> str:
    """Return what an estimate says about a batch size, in a line.

    Args:
        scale: The estimate.
        batch: Samples per step, of the largest kind in the run.
        name: What to call it: ``B_L``, or ``the global batch``.
    """
    text = f"gradient noise scale {describe(scale)}; {name} is {batch}: "
    if scale.pairs < 10 or (scale.high == math.inf and batch >= scale.low):
        return text + "too uncertain to say which batch is worth having"
    if batch < scale.low / 2:
        return text + "a larger batch would save steps at few extra samples"
    if batch > 2 * scale.high:
        return text + "a smaller batch would take hardly more steps, and far fewer samples"
    return text + "about what is worth having"


def describe(scale: NoiseScale) -> str:
    """Return an estimate and its interval in words."""
    return f"{_samples(scale.b_simple)} (95 %: {_samples(scale.low)} to {_samples(scale.high)})"


def _samples(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else "unknown" if value == math.inf else f"{value:.0f}"


class NoiseProbe:
    """Measures squared gradient norms at the first step of a round, where weights were just pulled.

    It changes nothing that is trained: gradients, batch norm's statistics and random streams are
    afterwards what they were. Nothing in it waits for the device.

    Args:
        every: Rounds from one measurement of a worker to its next; 0: none at all.
        micro: Whether a part of the batch passes once more by itself; else workers' batches of
            unlike sizes give the noise scale together.
        least: Samples of such a part at least.
        model: The model; nothing is wrapped around it.
    """

    def __init__(self, *, every: int, micro: bool, least: int, model: nn.Module) -> None:
        self._every, self._micro, self._least = every, micro, least
        self._model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def due(self, worker: int, clock: int) -> bool:
        """Whether a worker's round is measured; `clock`: rounds that it has behind it."""
        return bool(self._every) and (clock + worker) % self._every == 0

    def measure(
        self,
        step: Step,
        joint: bool,
        images: Tensor,
        labels: Tensor,
        loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    ) -> dict[str, Any]:
        """Return what a report tells of the gradients, the squares still on the device.

        Args:
            step: The step; its last part's gradients have been computed.
            joint: Whether the gradients are of all workers' batches together.
            images: The last part's images, [B, 3, R, R].
            labels: Their labels, [B].
            loss_of: Mean loss of a model on images and labels.
        """
        parts = [part for part in step.parts if len(part.indices)]
        if not parts or (joint and step.odd):  # not summed over the processes yet
            return {}
        part, found = parts[-1], {}
        size = max(self._least, -(-len(labels) // _MICRO))
        if self._micro:
            if size >= len(labels):
                return {}
            found["micro_batch"] = size
            found["micro_square"] = self._pass(images[:size], labels[:size], loss_of)
        square = _square(parameter.grad for parameter in self._parameters)
        # A joint step's gradients are those of the mean over all; others carry the part's weight.
        found["gradient_batch"] = round(len(labels) / part.weight) if joint else len(labels)
        found["gradient_square"] = square if joint else square / part.weight**2
        return found

    def _pass(
        self,
        images: Tensor,
        labels: Tensor,
        loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor],
    ) -> Tensor:
        kept = [buffer.clone() for buffer in self._model.buffers()]
        devices = [images.device] if images.is_cuda else []
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            loss = loss_of(self._model, images, labels)
            # Not backward(): DDP would take it for the step's own.
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), kept, strict=True):
                buffer.copy_(before)
        return _square(gradients)


def _square(gradients: Iterable[Tensor | None]) -> Tensor:
    there = [gradient for gradient in gradients if gradient is not None]
    return torch.nn.utils.get_total_norm(there).square()


def probe_interval(model: TimeModel, batch: int, steps: int, least: int) -> int:
    """Return the rounds from one extra pass of a micro-batch to the next, within 1.5 % of the time.

    Args:
        model: Time of a step.
        batch: Samples per step.
        steps: Steps of a round.
        least: Samples of a micro-batch at least.
    """
    step_s = model.time(batch, 1)
    extra_s = max(model.time(max(least, -(-batch // _MICRO)), 1), step_s / _MICRO)
    return max(1, math.ceil(extra_s / (_COST * steps * step_s)))
