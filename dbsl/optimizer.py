"""timm's optimizers by name: which there are, their learning rates, and how they are built."""

from __future__ import annotations

import inspect

import torch
from torch import nn

_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # on the CPU and on CUDA


def check_optimizer(name: str) -> None:
    """Raise ``ValueError`` unless timm has an optimizer of that name."""
    from timm.optim import list_optimizers  # slow to import, as timm is

    if name not in list_optimizers():
        raise ValueError(
            f"optimizer must be a name that timm.optim.list_optimizers() knows, got {name!r}"
        )


def default_learning_rate(optimizer: str) -> float:
    """Return the learning rate of an optimizer where none is given.

    0.1 for SGD in all its forms, for images from scratch; of others their own in torch or timm
    (AdamW 0.001, Lion 0.0001), or 0.001 where they state none.
    """
    from timm.optim import get_optimizer_class

    kind = get_optimizer_class(optimizer, bind_defaults=False)
    if kind.__name__ in ("SGD", "SGDW", "SGDP"):
        return 0.1
    own = inspect.signature(kind).parameters["lr"].default
    return float(own) if isinstance(own, int | float) else 0.001


def build_optimizer(
    name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Return a timm optimizer; biases and norms are left out of weight decay, as timm does.

    It updates all parameters in one operation where torch has that for it ("fused").
    """
    from timm.optim import create_optimizer_v2, get_optimizer_class

    if name in ("sgd", "nesterov") and momentum == 0:
        name = "momentum"  # without momentum Nesterov's form is not defined
    settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    if get_optimizer_class(name, bind_defaults=False) in _FUSED:
        settings["fused"] = next(model.parameters()).device.type in ("cpu", "cuda")
    return create_optimizer_v2(model, opt=name, **settings)
