"""Merge rules: new global weights from what workers push.

Every rule is ``rule(global_ [P], pushed [n, P], factors [n]) -> [P]`` and does not change its
arguments. `mean` and `Delta` take the pushes of all workers together, the others one push at a time
(n = 1). For your own rule, copy one of these, change it, and pass it to ``Workers(merge=...)``. A
rule's state is saved with the run if it has `state_dict` and `load_state_dict`, as `Delta` does.

`mean`, `ratio`, `half`: Lu, Liu, Hong, Wu (COMPSAC 2022 and arXiv 2509.26092).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from dbsl.base.errors import SettingError
from dbsl.cluster.weights import FlatWeights
from dbsl.config.fields import word_of
from dbsl.config.settings import RunConfig

MergeRule = Callable[[Tensor, Tensor, Tensor], Tensor]


def share_of_mean(vector: Tensor, factor: float, total: float) -> Tensor:
    """Return a push's share of the weighted mean, w_i * f_i / sum(f); the mean is their sum.

    It is a new tensor of at least float32. With a factor of 0 it is zeros, whatever the vector
    holds: infinity times 0 is NaN.
    """
    exact = torch.promote_types(vector.dtype, torch.float32)
    if not factor:
        return torch.zeros_like(vector, dtype=exact)
    return vector.to(exact) * (factor / total)


def mean(global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
    """Return sum(f_i * w_i) / sum(f_i), summed in at least float32."""
    both = zip(pushed, factors.tolist(), strict=True)
    shares = (share_of_mean(weights, factor, sum(factors.tolist())) for weights, factor in both)
    return reduce(Tensor.add_, shares).to(global_.dtype)


def ratio(global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
    """Return (g + f*w) / (1 + f), as in the journal paper."""
    factor = factors.item()
    return torch.lerp(global_, pushed[0], factor / (1 + factor))


def half(global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
    """Return ((2 - f)*g + f*w) / 2, as in the conference paper."""
    return torch.lerp(global_, pushed[0], factors.item() / 2)


class Delta:
    """A step of SGD with Nesterov momentum; its gradient is the weights minus the `mean`.

    Douillard et al. (DiLoCo, arXiv 2311.08105), and local SGD before it. A learning rate of 1
    without momentum gives the mean itself. Batch norm's statistics take the mean.

    The first `parameters` numbers of the weights' vector are trained; buffers follow. Momentum does
    not move numbers that are `frozen` ([P]) now.
    """

    def __init__(
        self,
        parameters: int,
        learning_rate: float,
        momentum: float,
        frozen: Callable[[], Tensor | None] = lambda: None,
    ) -> None:
        self._parameters, self._frozen = parameters, frozen
        self._settings = {"lr": learning_rate, "momentum": momentum, "nesterov": momentum > 0}
        self._momentum: Tensor | None = None

    @torch.no_grad()
    def __call__(self, global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
        merged = mean(global_, pushed, factors)
        before, after = (vector[: self._parameters] for vector in (global_, merged))
        parameter = nn.Parameter(before.clone())
        parameter.grad = before - after
        optimizer = torch.optim.SGD([parameter], **self._settings)
        if self._momentum is not None:
            optimizer.state[parameter]["momentum_buffer"] = self._momentum.to(parameter.device)
        optimizer.step()
        self._momentum = optimizer.state[parameter].get("momentum_buffer")
        stepped, frozen = torch.cat([parameter, merged[self._parameters :]]), self._frozen()
        return stepped if frozen is None else global_.where(frozen, stepped)

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self._momentum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._momentum = state["momentum"]


def choose_rule(config: RunConfig, weights: FlatWeights, own: MergeRule | None) -> MergeRule:
    """Return a run's merge rule: its own, or that of `--merge`."""
    if own is not None:
        return _checked(own)
    name = word_of(config.merge) or ("mean" if config.sync == "bsp" else "ratio")
    if name == "delta":
        trained = len(weights.vector) - len(weights.buffers)
        # A server without a worker does not see what the loop freezes, and all must agree.
        frozen = () if config.dedicated_server else (weights.frozen,)
        return Delta(trained, *config.outer, *frozen)
    return {"mean": mean, "ratio": ratio, "half": half}[name]


def _checked(rule: MergeRule) -> MergeRule:
    """Wrap a forker's rule: check and copy its result, which may be one of the pushes."""

    def merge(global_: Tensor, pushed: Tensor, factors: Tensor) -> Tensor:
        # The exact factors are float64 in host memory, which torch does not multiply with weights.
        merged = rule(global_, pushed, factors.to(global_))
        if getattr(merged, "shape", None) != global_.shape:
            got = list(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
            raise SettingError(f"a merge rule must return weights [{len(global_)}], got {got}")
        return torch.empty_like(global_).copy_(merged)

    for name in ("state_dict", "load_state_dict"):  # if the rule keeps a state
        if hasattr(rule, name):
            setattr(merge, name, getattr(rule, name))
    return merge
