"""timm optimizers for a run: checked before it begins, built, clipped and reloaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dbsl.base.errors import SettingError, require, such_as, words_of
from dbsl.base.machine import lazy_import
from dbsl.config.fields import arguments, check_names

optim = lazy_import("timm.optim")

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
Clip = Callable[[torch.optim.Optimizer], object]

# Settings of parameter groups, besides the arguments of the optimizer's class. All else is state.
_SETTINGS = {"lr", "momentum", "weight_decay", "lr_scale", "eps", "betas"}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # on the CPU and on CUDA


def check_optimizer(
    name: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> None:
    """Refuse an optimizer that timm does not have, or that cannot step with its settings."""
    known = optim.list_optimizers()
    text = f"optimizer must be a name that timm.optim.list_optimizers() knows{such_as(name, known)}"
    require(name in known, text, repr(name))
    try:
        if settings:  # timm would silently ignore some
            known = arguments(optim.create_optimizer_v2, optimizer_class(name))
            also = {"layer_decay"} - settings.keys()  # without it, its scale would have no effect
            check_names("opt_kwargs", settings, known - {f"{name}_min_scale" for name in also})
        with torch.random.fork_rng(devices=[]):
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        # Layers are distinguished as in timm's models.
        model.group_matcher = lambda coarse: {"stem": "^0", "blocks": "^1"}
        optimizer = create_optimizer(name, model, 1e-3, momentum, weight_decay, **settings)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if not name.startswith(("bnb", "fused")):  # these step only on CUDA
            optimizer.step()
    except SettingError:
        raise
    except Exception as error:  # any optimizer's own checks
        how = [name, *(f"{key}={value}" for key, value in settings.items())]
        raise SettingError(
            f"optimizer must take a step here, got {' '.join(how)} ({words_of(error)})"
        ) from None


def optimizer_class(name: str) -> type | None:
    """Return the class behind a timm name; None: timm does not have the name."""
    known = name in optim.list_optimizers()
    return optim.get_optimizer_class(name, bind_defaults=False) if known else None


def default_learning_rate(optimizer: str) -> float:
    """Return the learning rate of an optimizer if none is given.

    0.1 for SGD in all its forms, for images from scratch; for others their default in torch or timm
    (AdamW 0.001, Lion 0.0001), or 0.001 if they have none.
    """
    kind = optimizer_class(optimizer)
    if kind.__name__ in ("SGD", "SGDW", "SGDP"):
        return 0.1
    default = inspect.signature(kind).parameters["lr"].default
    return float(default) if isinstance(default, int | float) else 0.001


def create_optimizer(
    name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float, **settings: Any
) -> torch.optim.Optimizer:
    """Return a timm optimizer; biases and norms get no weight decay, as in timm.

    It updates all parameters in one operation if torch has one for it ("fused"). With
    ``layer_decay`` each parameter group has an ``lr_scale``, by which `take_step` multiplies the
    learning rate.
    """
    if name in ("sgd", "nesterov") and momentum == 0:
        name = "momentum"  # without momentum Nesterov's form is not defined
    common = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
    if name.startswith("kron"):
        common["deterministic"] = True  # else each process of a joint step draws its own numbers
    if optimizer_class(name) in _FUSED:
        has_fused = next(model.parameters()).device.type in ("cpu", "cuda")
        # `begin_thawed` cannot prepare a first step that is dampened.
        common["fused"] = has_fused and not settings.get("dampening")
    return optim.create_optimizer_v2(model, opt=name, **common | settings)


def keep_whole(optimizer: torch.optim.Optimizer) -> None:
    """Clip nothing."""


def make_clip(model: nn.Module, bound: float | None) -> Clip:
    """Return a function that clips a model's gradients by norm right before its optimizer steps."""
    if bound is None:
        return keep_whole
    parameters = list(model.parameters())

    def clip(optimizer: torch.optim.Optimizer) -> None:
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:  # fp16: the bound applies to unscaled gradients
            scaler.unscale_(optimizer.optimizer)
        nn.utils.clip_grad_norm_(parameters, bound)

    return clip


class JoinedOptimizer(torch.optim.Optimizer):
    """Several optimizers of different parameters as one: Muon for matrices, AdamW for the rest."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        super().__init__([group for one in self.optimizers for group in one.param_groups], {})
        for one in self.optimizers:
            one.state = self.state

    def step(self, closure: None = None) -> None:
        """Take a step with each; there is no closure."""
        for one in self.optimizers:
            one.step()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; each optimizer receives its parameter groups."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for one in self.optimizers:
            its_groups = list(islice(groups, len(one.param_groups)))
            one.__setstate__({"state": self.state, "param_groups": its_groups})


def join_optimizers(
    built: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return one optimizer from the one or several that a function built."""
    if isinstance(built, torch.optim.Optimizer):
        return built
    right = isinstance(built, Sequence) and built
    right = right and all(isinstance(one, torch.optim.Optimizer) for one in built)
    text = "optimizer must build an optimizer of torch or a sequence of them"
    require(right, text, type(built).__name__)
    try:
        return JoinedOptimizer(built)
    except ValueError as error:  # a parameter in two of them
        raise SettingError(f"optimizer must have each parameter once ({error})") from None


def check_parameters(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Refuse an optimizer if all parameters are frozen or it lacks a trained one."""
    frozen = not any(p.requires_grad for p in model.parameters())
    text = "optimizer must leave parameters that are trained"
    require(not frozen, text, f"all frozen by {name}")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    text = "optimizer must have all parameters that are trained (requires_grad_(False) freezes "
    require(not left, f"{text}others)", f"{len(left)} without, such as {''.join(left[:1])}")


def keep_ratios(optimizer: torch.optim.Optimizer, lr: float) -> torch.optim.Optimizer:
    """Keep each parameter group's proportion to the run's learning rate: timm's ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / lr * group.get("lr_scale", 1.0)
    return optimizer


def first_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """Return a copy of the state that an optimizer is built with; for most it is empty."""
    return {
        parameter: deepcopy(values)
        for parameter, values in optimizer.state.items()
        if not values.get("step")  # else it was loaded
    }


def begin_again(optimizer: torch.optim.Optimizer, first: Mapping[Tensor, Any]) -> None:
    """Restore an optimizer's `first_state`."""
    optimizer.state.clear()
    optimizer.state.update({parameter: deepcopy(values) for parameter, values in first.items()})
    for group in optimizer.param_groups:
        group.pop("step", None)  # timm's lamb and adan count there


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state, but not the settings in a run's config."""
    current, number = optimizer.state_dict()["param_groups"], len(saved["param_groups"])
    text = f"optimizer must have {len(current)} groups of parameters"
    require(len(current) == number, text, number)
    bare = getattr(optimizer, "optimizer", optimizer)  # without Accelerate's wrapping
    settings = _SETTINGS.union(
        *(inspect.signature(type(one)).parameters for one in getattr(bare, "optimizers", [bare]))
    ) - {"params"}
    groups = [
        old | {name: value for name, value in new.items() if name in settings}
        for old, new in zip(saved["param_groups"], current, strict=True)
    ]
    optimizer.load_state_dict({**saved, "param_groups": groups})
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim():
                # In the parameter's own memory order, or other kernels would round differently.
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            else:  # several workers may begin with the state of one
                state[name] = tree_map_only(Tensor, torch.clone, value)
