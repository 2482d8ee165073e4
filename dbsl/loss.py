"""A run's loss function as the loop and all measuring call it."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.base.errors import SettingError
from dbsl.data.transforms import global_streams
from dbsl.plan.types import RESERVED

Figures = Mapping[str, Tensor | float]  # means over the batch, as the loss
Loss = Tensor | tuple[Tensor, Figures]  # the mean loss of a batch, or it and figures
# Takes a model, its inputs, their labels and the settings.
LossFunction = Callable[[nn.Module, Tensor, Tensor, Any], Loss]
LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]  # the same for one run, without figures


def with_figures(found: Loss) -> tuple[Tensor, Figures]:
    """Return what a loss function gave as a pair, also where it gave the loss alone."""
    return found if isinstance(found, tuple) and len(found) == 2 else (found, {})


def figure_names(
    found: Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Figures]],
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    more: Sequence[str] = (),
    *,
    joint: bool = False,
) -> tuple[str, ...]:
    """Return the names of a run's figures: a loss function's, from one call, and `more`.

    Processes that take `joint` steps need a loss of all parameters that are trained.
    """
    model = copy.deepcopy(model)  # it may keep tensors of a pass
    with without_trace(model):
        loss, figures = found(model.train(), images, labels)
        good = isinstance(loss, Tensor) and not loss.dim()
        if not good or not isinstance(figures, Mapping):
            got = f"{type(figures).__name__} for figures" if good else _kind(loss)
            raise SettingError(
                f"loss_function must return a mean loss, a tensor [], or (loss, figures), got {got}"
            )
        for name, value in figures.items():
            check_free(name, "a figure of loss_function")
            if not (value.numel() == 1 if isinstance(value, Tensor) else isinstance(value, Real)):
                raise SettingError(
                    f"figure {name!r} of loss_function must be a mean, a number or a tensor [], "
                    f"got {_kind(value)}"
                )
        loss.backward()  # a fault in it shows itself here, not in the first step
    unused = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if joint and unused:
        raise SettingError(
            "loss_function must use every parameter that is trained, where several processes take "
            f"joint steps, got no gradient of {unused[0]}: requires_grad_(False) freezes it"
        )
    if isinstance(more, str):
        raise SettingError(f"figures must be a list of names, got {more!r}")
    names = [*figures]
    for name in more:
        check_free(name, "one of figures", dict.fromkeys(names, "another figure"))
        names.append(name)
    return tuple(names)


def check_free(name: Any, whose: str, taken: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse a figure's name that is no text, or that rows or charts (or `taken`) have."""
    holder = {**RESERVED, **taken}.get(name)
    if holder or not isinstance(name, str):
        why = f", which {holder} has" if holder else ""
        raise SettingError(f"{whose} must have a unique name, got {name!r}{why}")


def _kind(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """Leave a model's buffers and all random streams as they were."""
    kept = [buffer.clone() for buffer in model.buffers()]
    device = next(model.parameters()).device
    with global_streams(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), kept, strict=True):
            buffer.copy_(before)


def digest_of(loss_of: LossOf) -> str | None:
    """Return what tells a loss function's text from others; None: it has none that can be read."""
    try:
        return hashlib.sha256(inspect.getsource(loss_of).encode()).hexdigest()[:16]
    except (OSError, TypeError):  # it was typed at a prompt, or is no plain function
        return None


def scalars(loss: Tensor, figures: Figures, names: tuple[str, ...]) -> Tensor:
    """Return the loss and the figures of these names on the device, [1 + F], without waiting."""
    if {*figures} != {*names}:
        every = f"the figures {', '.join(names)} in every step"
        must = every if names else "no figures, since none are named"
        new = ", ".join(repr(name) for name in figures if name not in names)
        way = f": pass open_session(figures=[{'..., ' * bool(names)}{new}])" if new else ""
        raise SettingError(f"work.add must get {must}, got {', '.join(figures) or 'none'}{way}")
    kind = {"dtype": torch.float32, "device": loss.device}
    values = [
        value.detach().to(**kind, non_blocking=True).reshape(())
        if isinstance(value, Tensor)
        else torch.full((), value, **kind)  # copied there it would wait
        for value in map(figures.__getitem__, names)
    ]
    return torch.stack([loss.detach(), *values])
