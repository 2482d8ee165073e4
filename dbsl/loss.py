"""A run's loss function, as the loop and all measurements call it."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.base.errors import SettingError, require, short_loss
from dbsl.base.seeds import global_streams, seed_streams
from dbsl.plan.types import RESERVED

Figures = Mapping[str, Tensor | float]  # means over the batch, like the loss
Loss = tuple[Tensor, Figures]  # the mean loss of a batch, and figures
# Takes a model, its inputs, their labels and the settings.
LossFunction = Callable[[nn.Module, Tensor, Tensor, Any], Loss]
_MEAN = 0.02  # relative difference allowed for rounding
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]  # the same for one run, without figures


def bind_loss(
    loss_function: LossFunction, config: Any, autocast: Callable[[], AbstractContextManager]
) -> LossOf:
    """Return a loss function for measurements, with its settings and training's precision."""

    @wraps(loss_function)  # step times are cached by its text
    def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with autocast():
            return loss_function(model, images, labels, config)[0]

    return loss_of


def check_loss(
    loss_function: LossFunction, model: nn.Module, batch: tuple[Tensor, Tensor], config: Any
) -> list[str]:
    """Return trained parameters that a loss function leaves out; refuse one that gives no mean.

    It makes one call; errors appear here and not in the first step.
    """
    model = copy.deepcopy(model)  # it may store tensors of a pass
    with without_trace(model):
        found = loss_function(model.train(), *batch, config)
        right = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
        loss = found[0] if right else found
        must = (
            "loss_function must return a pair, the mean loss as a tensor [] and a dict of figures"
        )
        require(right and isinstance(loss, Tensor) and not loss.dim(), must, _kind(loss))
        check_figures(found[1])
        loss.backward()
    return [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]


def not_a_mean(
    loss_function: LossFunction, model: nn.Module, batch: tuple[Tensor, Tensor], config: Any
) -> str:
    """Return why the loss of two samples is not the mean of their own; empty: it is.

    Workers' batches are weighted by their samples. With any other loss, training depends on the
    split of a batch.
    """
    images, labels = batch
    halves = [(images[n : n + 1], labels[n : n + 1]) for n in range(2)]
    model = copy.deepcopy(model).eval()  # in training, batch norm and dropout see the whole batch
    with without_trace(model):
        losses = []
        for own in (batch, *halves):
            seed_streams(0)  # all draw the same random numbers
            torch.manual_seed(0)
            try:
                losses.append(float(loss_function(model, *own, config)[0].detach()))
            except Exception:  # the model returns something else in evaluation: nothing is known
                return ""
    whole, mean = losses[0], sum(losses[1:]) / 2
    if abs(whole - mean) <= _MEAN * max(abs(whole), abs(mean), 1e-3):
        return ""
    return (
        f"the loss of two samples is {short_loss(whole)}, and the mean of their own losses is "
        f"{short_loss(mean)}: loss_function should return a mean over the samples"
    )


def check_figures(figures: Figures) -> None:
    """Refuse figures that are not numbers, or have names already taken."""
    for name, value in figures.items():
        check_free(name, "a figure")
        right = value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)
        require(right, f"figure {name!r} must be a mean, a number or a tensor []", _kind(value))


def check_free(name: Any, whose: str, taken: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse a figure's name that is no string, or that rows, charts or `taken` have."""
    holder = {**dict.fromkeys(RESERVED, "a row of metrics.jsonl"), **taken}.get(name)
    got = f"{name!r}, which {holder} has" if holder else repr(name)
    require(isinstance(name, str) and not holder, f"{whose} must have a unique name", got)


def _kind(value: Any) -> str:
    return f"a tensor {[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and all random streams afterwards."""
    kept = [buffer.clone() for buffer in model.buffers()]
    device = next(model.parameters()).device
    with global_streams(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)


def digest_of(*functions: Callable[..., Any]) -> str | None:
    """Return a hash of these functions' source; None: one has no readable source."""
    try:
        plain = [inspect.unwrap(one) for one in functions]
        texts = [inspect.getsource(getattr(one, "func", one)) for one in plain]  # of a partial
    except (OSError, TypeError):  # typed at a prompt, or not a plain function
        return None
    return hashlib.sha256("".join(texts).encode()).hexdigest()[:16]


def scalars(loss: Tensor, figures: Figures, names: Sequence[str]) -> Tensor:
    """Return the loss and the figures of these names on the device, [1 + F], without waiting."""
    if {*figures} != {*names}:
        must, got = (", ".join(each) or "none" for each in (names, figures))
        text = f"step.add must get the same figures each time, {must}"
        raise SettingError(f"{text}, got {got}")
    kind = {"dtype": torch.float32, "device": loss.device}
    values = [
        value.detach().to(**kind, non_blocking=True).reshape(())
        if isinstance(value, Tensor)
        else torch.full((), value, **kind)  # a copy would wait
        for value in map(figures.__getitem__, names)
    ]
    return torch.stack([loss.detach(), *values])
