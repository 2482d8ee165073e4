"""Compute time of a training step in any loop, excluding waits for other processes.

The clock runs from the model's forward pass to the end of its backward pass. A callback of the
autograd engine stops it before DDP's own callback, which waits for the others' gradients. No
communication hook is used.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dbsl.base.errors import require
from dbsl.base.machine import moment, seconds_between

CPU = torch.device("cpu")


class Watch:
    """Measures each pass of a model with gradients on, several forward passes as one."""

    def __init__(self, model: nn.Module) -> None:
        # DDP's own module, even if it is compiled or wrapped again.
        wrapped = [m.module for m in model.modules() if isinstance(m, DistributedDataParallel)]
        inner = wrapped[0] if len(wrapped) == 1 else model
        refuse_sharded(model, "; it waits in both passes: set local_batch_sizes instead")
        self.samples = 0  # of the current batch; the caller sets them
        parameters = inner.parameters()
        device = next((p.device for p in parameters if p.device.type != "cpu"), CPU)
        self._now = partial(moment, device)
        self._began: Any = None
        self._ending = False
        self._pauses: list[tuple[Any, Any]] = []  # of the current step
        self._finished: deque[tuple[int, list[tuple[Any, Any]]]] = deque(maxlen=4096)
        inner.register_forward_pre_hook(self._begin)
        inner.register_forward_hook(self._catch_backward)

    def read(self) -> list[tuple[int, float]]:
        """Return samples and seconds of each step since the last call; waits for the device."""
        finished = [*self._finished]
        self._finished.clear()
        found = []
        for samples, spans in finished:
            whole, *pauses = itertools.starmap(seconds_between, spans)
            found.append((samples, whole - sum(pauses)))
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude time spent inside from the current step."""
        began = self._now()
        yield
        if self._began is not None:
            self._pauses.append((began, self._now()))

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        if self._ending and torch._C._current_graph_task_id() < 0:
            self._began, self._ending = None, False  # an error ended the last backward pass
        if torch.is_grad_enabled() and self._began is None:
            self._began, self._pauses = self._now(), []

    def _catch_backward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for leaf in _tensors(output):
            if leaf.grad_fn is not None:  # a parameter that the model returns would gather hooks
                leaf.register_hook(self._backward_begins)

    def _backward_begins(self, gradient: Tensor) -> None:
        if not self._ending and self._began is not None:
            self._ending = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._finished.append((self.samples, [(self._began, self._now()), *self._pauses]))
        self._began, self._ending = None, False


def _tensors(output: Any, inside: tuple[int, ...] = ()) -> Iterator[Tensor]:
    """Yield an output's tensors, including those in objects that are not torch's containers."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, type) or id(leaf) in inside:
            continue
        elif is_dataclass(leaf):
            own = [*getattr(leaf, "__dict__", {}).values()]
            own = own or [getattr(leaf, each.name, None) for each in fields(leaf)]
            yield from _tensors(own, (*inside, id(leaf)))
        elif hasattr(leaf, "__dict__"):
            yield from filter(torch.is_tensor, tree_leaves([*vars(leaf).values()]))


def refuse_sharded(model: nn.Module, why: str = "") -> None:
    """Refuse a model with parameters that FSDP shards."""
    sharded = any(isinstance(m, FSDPModule | FullyShardedDataParallel) for m in model.modules())
    require(not sharded, "model must have its parameters whole", f"one that FSDP shards{why}")


def alone(model: nn.Module) -> ExitStack:
    """Keep each DDP in a model from exchanging gradients and buffers until the result is closed."""
    inside = ExitStack()
    for ddp in model.modules():
        if isinstance(ddp, DistributedDataParallel):
            inside.enter_context(ddp.no_sync())
            # Else it broadcasts process 0's buffers before the first forward pass.
            sync = ddp.require_forward_param_sync
            inside.callback(setattr, ddp, "require_forward_param_sync", sync)
            ddp.require_forward_param_sync = False
    return inside
