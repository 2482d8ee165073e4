"""Gradient clipping of whole optimizer steps, by timm's own functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from dbsl.base.lazy import lazy_import
from dbsl.optimizer import ClipMode

timm = lazy_import("timm")

Clip = Callable[[torch.optim.Optimizer], object]


def keep_whole(optimizer: torch.optim.Optimizer) -> None:
    """Clip nothing."""


def make_clip(model: nn.Module, bound: float | None, mode: ClipMode) -> Clip:
    """Return what clips the gradients of a model right before its optimizer steps.

    Args:
        model: The model that the optimizer steps on.
        bound: What gradients are clipped to; None: they are not.
        mode: As timm's ``--clip-mode``. ``agc`` leaves out the last two parameters, the classifier.
    """
    if bound is None:
        return keep_whole
    parameters = list(timm.models.model_parameters(model, exclude_head=mode == "agc"))

    def clip(optimizer: torch.optim.Optimizer) -> None:
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:  # fp16: the bound is that of the gradients themselves
            scaler.unscale_(optimizer.optimizer)
        timm.utils.dispatch_clip_grad(parameters, bound, mode=mode)

    return clip
