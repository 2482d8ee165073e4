"""Compute time of a training step in any loop, without what it waits for other processes.

The clock runs from the model's forward pass to the end of its backward pass, where a callback of
the autograd engine stops it: before DDP's own, which waits for the gradients of the others. It
takes no communication hook. FSDP2 communicates inside both passes: its collectives are timed and
left out.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from dbsl.base.errors import SettingError


class Watch:
    """Measures every pass of a model for which gradients are on, several forward passes as one.

    Attributes:
        samples: Samples of the batch under way; set by whoever knows them.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = getattr(model, "module", model)
        self.samples = 0
        self._cuda = any(parameter.is_cuda for parameter in inner.parameters())
        self._collectives = _timed_collectives(inner, self._cuda)
        self._began: Any = None
        self._ending = False
        self._finished: list[tuple[int, Any, Any, float]] = []
        inner.register_forward_pre_hook(self._begin)
        inner.register_forward_hook(self._catch_backward)

    def read(self) -> list[tuple[int, float]]:
        """Return samples and seconds of each step since the last call; waits for the device."""
        finished, self._finished = self._finished, []
        if self._cuda:
            torch.cuda.synchronize()
        return [
            (samples, (a.elapsed_time(b) / 1000 if self._cuda else b - a) - waited)
            for samples, a, b, waited in finished
        ]

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled() and self._began is None:
            self._began, self._collectives.seconds = self._now(), 0.0

    def _catch_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in tree_leaves(output if isinstance(output, Tensor) else _plain(output)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if not self._ending and self._began is not None:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._finished.append((self.samples, self._began, self._now(), self._collectives.seconds))
        self._began, self._ending = None, False

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _plain(output: Any) -> Any:
    """Return the tensors of an output that torch does not know as a container."""
    return list(vars(output).values()) if hasattr(output, "__dict__") else output


def _timed_collectives(model: nn.Module, cuda: bool) -> SimpleNamespace:
    """Have FSDP2's collectives add up the seconds that they take, as `seconds` of the result."""
    spent = SimpleNamespace(seconds=0.0)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return spent
    if cuda:
        raise SettingError(
            "watch needs a model on the CPU where FSDP2 shards it: on CUDA its collectives are "
            "not told apart from computing, got a CUDA model"
        )
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp

    gather, scatter = (
        _timed(kind, spent)() for kind in (fsdp.DefaultAllGather, fsdp.DefaultReduceScatter)
    )
    for module in sharded:
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(scatter)
    return spent


def _timed(collective: type, spent: SimpleNamespace) -> type:
    class Timed(collective):
        def __call__(self, *args: Any, async_op: bool = False, **kwargs: Any) -> None:
            began = time.perf_counter()
            super().__call__(*args, async_op=False, **kwargs)  # whose waiting has an end to measure
            spent.seconds += time.perf_counter() - began

    return Timed
