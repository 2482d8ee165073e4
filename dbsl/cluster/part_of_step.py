"""Optimizer steps, and parts of one: pushes of gradients that together make a step."""

from __future__ import annotations

from typing import Any

import torch


def take_step(
    optimizer: torch.optim.Optimizer, learning_rate: float, *, keep_gradients: bool = False
) -> None:
    """Take a step with this learning rate, and clear the gradients unless they are kept.

    A group of parameters may have a factor on it, ``lr_scale``; see `dbsl.optimizer.keep_ratios`.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    optimizer.step()
    if not keep_gradients:
        optimizer.zero_grad(set_to_none=True)


def begin_thawed(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that are trained from now on a momentum of 0, where others have theirs.

    Up to 2.15 torch's fused SGD fails where some have none.
    """
    for group in optimizer.param_groups:
        if not (group.get("fused") and group.get("momentum")):
            continue
        new = [
            parameter
            for parameter in group["params"]
            if parameter.requires_grad
            and "momentum_buffer" not in optimizer.state.get(parameter, {})
        ]
        for parameter in new if len(new) < len(group["params"]) else ():
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def takes_parts(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `take_part` knows what a part of this optimizer's step is."""
    if type(optimizer) is torch.optim.SGD:
        return not any(g["dampening"] or g["maximize"] for g in optimizer.param_groups)
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)


@torch.no_grad()
def take_part(optimizer: torch.optim.Optimizer, learning_rate: float, part: float) -> None:
    """Take a part of an optimizer step, in (0, 1): parts that sum to 1 come to the whole step.

    For equal gradients without weight decay this holds to rounding, with any momentum. Each part
    decays the weights that it meets, so that decay differs by the square of one step's. Adam's
    second moment comes from the parts' own gradients.

    Args:
        optimizer: SGD, Adam or AdamW of torch, with mean gradients at its parameters.
        learning_rate: Of the whole step.
        part: How much of the step.
    """
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            rate = learning_rate * group.get("lr_scale", 1.0)
            _take_part_of_sgd(optimizer, group, rate, part)
        optimizer.zero_grad(set_to_none=True)
        return
    assert isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)), type(optimizer)
    # Moments forget by the same time, which steps are counted in for their bias.
    whole = [group["betas"] for group in optimizer.param_groups]
    for group, betas in zip(optimizer.param_groups, whole, strict=True):
        group["betas"] = tuple(beta**part for beta in betas)
    for state in optimizer.state.values():
        state["step"] /= part
    take_step(optimizer, learning_rate * part)
    for state in optimizer.state.values():
        state["step"] *= part
    for group, betas in zip(optimizer.param_groups, whole, strict=True):
        group["betas"] = betas


def _take_part_of_sgd(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], learning_rate: float, part: float
) -> None:
    # A step is v <- m*v + g and w <- w - lr*v (Nesterov: w - lr*(g + m*v)). Under a constant g,
    # v - g/(1 - m) shrinks by m, which is m**part for each part; the shares of v and g in w follow.
    momentum, decay = group["momentum"], group["weight_decay"]
    kept = momentum**part
    taken = (1 - kept) / (1 - momentum)
    moved = taken * momentum ** (2 if group["nesterov"] else 1)
    direct = (part - moved) / (1 - momentum)
    for parameter in group["params"]:
        if parameter.grad is None:  # frozen
            continue
        gradient = parameter.grad.add(parameter, alpha=decay)
        if momentum:
            state = optimizer.state[parameter]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            velocity = state["momentum_buffer"]
            parameter.add_(velocity, alpha=-learning_rate * moved)
            velocity.mul_(kept).add_(gradient, alpha=taken)
        parameter.add_(gradient, alpha=-learning_rate * direct)
