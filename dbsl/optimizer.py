"""timm optimizers for a run: checked before it begins, built, clipped, loaded again."""

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

# Settings of groups of parameters, besides what the optimizer's class takes. All else is state.
_SETTINGS = {"lr", "momentum", "weight_decay", "lr_scale", "eps", "betas"}
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # on the CPU and on CUDA


def check_optimizer(
    name: str,
    settings: Mapping[str, Any] = MappingProxyType({}),
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
) -> None:
    """Refuse an optimizer that timm does not have, or that takes no step with its settings."""
    known = optim.list_optimizers()
    text = f"optimizer must be a name that timm.optim.list_optimizers() knows{such_as(name, known)}"
    require(name in known, text, repr(name))
    try:
        if settings:  # timm would leave some out, and not say so
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
        if not name.startswith(("bnb", "fused")):  # these step on CUDA alone
            optimizer.step()
    except SettingError:
        raise
    except Exception as error:  # any optimizer's own checks
        how = [name, *(f"{key}={value}" for key, value in settings.items())]
        raise SettingError(
            f"optimizer must take a step here, got {' '.join(how)} ({words_of(error)})"
        ) from None


def optimizer_class(name: str) -> type | None:
    """Return the class behind one of timm's names; None: it is the name of another."""
    known = name in optim.list_optimizers()
    return optim.get_optimizer_class(name, bind_defaults=False) if known else None


def default_learning_rate(optimizer: str) -> float:
    """Return the learning rate of an optimizer where none is given.

    0.1 for SGD in all its forms, for images from scratch; of others their own in torch or timm
    (AdamW 0.001, Lion 0.0001), or 0.001 where they state none.
    """
    kind = optimizer_class(optimizer)
    if kind.__name__ in ("SGD", "SGDW", "SGDP"):
        return 0.1
    default = inspect.signature(kind).parameters["lr"].default
    return float(default) if isinstance(default, int | float) else 0.001


def create_optimizer(
    name: str, model: nn.Module, lr: float, momentum: float, weight_decay: float, **settings: Any
) -> torch.optim.Optimizer:
    """Return a timm optimizer; biases and norms are left out of weight decay, as timm does.

    It updates all parameters in one operation where torch has that for it ("fused"). With
    ``layer_decay`` each group of parameters has an ``lr_scale``, which `take_step` multiplies the
    learning rate by.
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
    """Return what bounds the norm of a model's gradients right before its optimizer steps."""
    if bound is None:
        return keep_whole
    parameters = list(model.parameters())

    def clip(optimizer: torch.optim.Optimizer) -> None:
        scaler = getattr(optimizer, "scaler", None)
        if scaler is not None:  # fp16: the bound is that of the gradients themselves
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
        """Take back what `state_dict` returned; each optimizer gets its groups of parameters."""
        super().load_state_dict(state_dict)
        groups = iter(self.param_groups)
        for one in self.optimizers:
            its_groups = list(islice(groups, len(one.param_groups)))
            one.__setstate__({"state": self.state, "param_groups": its_groups})


def join_optimizers(
    built: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return one optimizer of what a function has built: one, or several."""
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
    """Refuse an optimizer without parameters, or without one of those that are trained."""
    frozen = not any(p.requires_grad for p in model.parameters())
    text = "optimizer must leave parameters that are trained"
    require(not frozen, text, f"all frozen by {name}")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
    text = "optimizer must have all parameters that are trained (requires_grad_(False) freezes "
    require(not left, f"{text}others)", f"{len(left)} without, such as {''.join(left[:1])}")


def keep_ratios(optimizer: torch.optim.Optimizer, lr: float) -> torch.optim.Optimizer:
    """Have each group of parameters keep its proportion to the run's rate: timm's ``lr_scale``."""
    for group in optimizer.param_groups:
        group["lr_scale"] = group["lr"] / lr * group.get("lr_scale", 1.0)
    return optimizer


def first_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, Any]:
    """Return a copy of the state that an optimizer is built with, which most have none of."""
    return {
        parameter: deepcopy(values)
        for parameter, values in optimizer.state.items()
        if not values.get("step")  # else it was loaded
    }


def begin_again(optimizer: torch.optim.Optimizer, first: Mapping[Tensor, Any]) -> None:
    """Give an optimizer its `first_state` back."""
    optimizer.state.clear()
    optimizer.state.update({parameter: deepcopy(values) for parameter, values in first.items()})
    for group in optimizer.param_groups:
        group.pop("step", None)  # timm's lamb and adan count there


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load an optimizer's state, but not the settings that a run's config has."""
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
                # In the parameter's own memory order, or other kernels would round otherwise.
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
            else:  # several workers may begin with the state of one
                state[name] = tree_map_only(Tensor, torch.clone, value)
