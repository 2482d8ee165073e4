"""Measures squared gradient norms while a run trains, for its noise scale (`dbsl.profile.noise`).

It is done at the first step of a round, when a worker has just pulled its weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dbsl.cluster.compiling import uncompiled
from dbsl.loss import LossOf, without_trace
from dbsl.plan.sampler import Step
from dbsl.plan.turns import Round
from dbsl.plan.types import Plan, TimeModel
from dbsl.profile.memory import without_trials

Kind = Literal["micro", "joined"]

_MICRO = 4  # a micro-batch is this part of a batch
_COST = 0.015  # share of the compute that extra passes may take; the promise is 2 %


class NoiseProbe:
    """Measures gradients of two batch sizes at the same weights, in one of two ways.

    | kind | the larger batch | the smaller | costs |
    | --- | --- | --- | --- |
    | joined | those of all workers of a round together | each worker's | a sum in memory |
    | micro | a worker's, or of a joint step the global one | a quarter of a worker's | its pass |

    It leaves gradients, batch norm's statistics and random streams as they were. Nothing in it
    waits for the device.

    Args:
        kind: The way. `joined` is the most precise by far; its workers share a process and start a
            round from the same weights.
        every: Rounds from one measurement of a worker to its next; 0: none at all.
        workers: Workers that are joined.
        rounds: Rounds per epoch.
        least: Samples of a micro-batch at least.
        model: The model; nothing is wrapped around it.
    """

    def __init__(
        self, kind: Kind, *, every: int, workers: int, rounds: int, least: int, model: nn.Module
    ) -> None:
        self.kind, self._every, self._least = kind, every, least
        self._workers, self._rounds = workers, rounds
        self._model = model
        self._clock = -1  # clock of the round whose gradients are being joined
        self._sum: list[Tensor] = []  # by parameter, [numel]
        self._joined: dict[int, int] = {}  # batches by worker

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """What is trained now: layers may be frozen for a while."""
        return [p for p in self._model.parameters() if p.requires_grad]

    def due(self, turn: Round) -> bool:
        """Whether a worker's turn is to be measured."""
        clock = turn.epoch * self._rounds + turn.round
        own = 0 if self.kind == "joined" else turn.workers[0]  # joined ones are due in one round
        return bool(self._every) and (clock + own) % self._every == 0

    def measure(
        self, turn: Round, step: Step, joint: bool, images: Tensor, labels: Tensor, loss_of: LossOf
    ) -> dict[str, Any]:
        """Return what a report tells of the gradients, the squares still on the device.

        Args:
            turn: Whose turn it is.
            step: The step; its last part's gradients have been computed.
            joint: Whether the gradients are of all workers' batches together.
            images: The last part's images, or those of its last micro-batch, [B, 3, R, R].
            labels: Their labels, [B].
            loss_of: Mean loss of a model on images and labels.
        """
        parts = [part for part in step.parts if len(part.indices)]
        if not parts or (joint and step.odd):  # not summed over the processes yet
            return {}
        part, batch = parts[-1], len(parts[-1].indices)
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
        if self.kind == "joined" and self._join(turn, batch, part.weight):
            total = sum(self._joined.values())
            joined = _square(self._sum) / total**2
            return _named("micro", batch, square) | _named("gradient", total, joined)
        return _named("gradient", whole, square)

    def state_dict(self) -> dict[str, Any]:
        """Return what was joined of a round so far."""
        return {"clock": self._clock, "sum": list(self._sum), "joined": dict(self._joined)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._clock, self._joined = state["clock"], dict(state["joined"])
        device = next(self._model.parameters()).device
        self._sum = [_numbers(gradient.to(device)) for gradient in state["sum"]]

    @torch.no_grad()
    def _join(self, turn: Round, batch: int, weight: float) -> bool:
        """Add a worker's gradient to its round's; say whether that was the last."""
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
            # DDP would take a backward() for the step's own.
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        return _square(gradient for gradient in gradients if gradient is not None)


def choose_probe(
    plans: Mapping[int, Plan],
    models: Mapping[int, Sequence[TimeModel]],
    model: nn.Module,
    *,
    enabled: bool,
    sync: str,
    processes: int,
    rounds: int,
    least: int,
) -> NoiseProbe:
    """Return the probe for a run: joined where its workers allow it, else micro.

    Args:
        plans: By resolution.
        models: Planned time models of the workers, by resolution.
        model: The model.
        enabled: Whether it is to measure at all.
        sync: How workers meet.
        processes: In which they live.
        rounds: Rounds per epoch.
        least: Samples of a micro-batch at least.
    """
    workers = len(next(iter(plans.values())).workers)
    kind: Kind = "joined" if sync == "bsp" and processes == 1 and workers > 1 else "micro"
    every = int(enabled)
    # To join gradients is a sum in the CPU's memory. A fast GPU waits for its launches, which cost
    # less than a pass, but not nothing where rounds are short.
    if enabled and (kind == "micro" or next(model.parameters()).is_cuda):
        every = max(
            probe_interval(own, worker.local_batch_size, max(worker.steps // rounds, 1), least)
            for resolution, plan in plans.items()
            for own, worker in zip(models[resolution], plan.workers, strict=True)
        )
    return NoiseProbe(kind, every=every, workers=workers, rounds=rounds, least=least, model=model)


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


def _named(name: str, batch: int, square: Tensor) -> dict[str, Any]:
    return {f"{name}_batch": batch, f"{name}_square": square}


def _numbers(gradient: Tensor) -> Tensor:
    """Return a gradient's numbers in one order, that of channels_last, [numel].

    It is a view where the gradient lies in memory like that, as those of images' models do. One
    from a checkpoint does not.
    """
    return (gradient.permute(0, 2, 3, 1) if gradient.dim() == 4 else gradient).reshape(-1)


def _square(gradients: Iterable[Tensor]) -> Tensor:
    """Return the squared norm of gradients together.

    On the CPU it is to the bit the same wherever they lie. The order in which numbers are added up,
    and so the last bits, may depend on their order in memory and on the address. The squares are
    new tensors, whose address torch aligns. On CUDA, where no bits are promised, a few launches do
    for all parameters.
    """
    numbers = [_numbers(gradient) for gradient in gradients]
    if numbers[0].is_cuda:
        return torch.stack(torch._foreach_norm(numbers)).square().sum()
    return torch.stack([own.square().sum() for own in numbers]).sum()
