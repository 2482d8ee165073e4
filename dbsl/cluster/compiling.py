"""What each resolution and batch size needs before training: a graph, or cuDNN's choice."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.architecture import set_dropout
from dbsl.cluster.weights import FlatWeights
from dbsl.data.sources import Batch
from dbsl.loss import LossOf

_MOST_GRAPHS = 64  # in a run; further shapes run uncompiled
# Calls of each graph before training. CUDA graphs warm up in the first and are recorded in the
# second; the third shows that the recording runs.
_CALLS = 3


def compile_in_place(model: nn.Module, device: torch.device, *, sums: bool = False) -> None:
    """Compile a model's calls, anew for each shape of its input.

    On CUDA the graphs are recorded as CUDA graphs, which spare small batches the launch of every
    kernel. Not where gradients of several calls are to be summed (`sums`): a recorded graph's next
    call overwrites what its last one returned.
    """
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    records = device.type == "cuda" and not sums
    model.compile(dynamic=False, mode="reduce-overhead" if records else "default")


def uncompiled(model: nn.Module) -> AbstractContextManager:
    """Return what keeps a compiled model from being compiled for yet another batch size."""
    if all(module._compiled_call_impl is None for module in model.modules()):
        return nullcontext()  # the other one takes a second to import
    return torch.compiler.set_stance("force_eager")


def make_ready(
    model: nn.Module,
    weights: FlatWeights,
    batch_sizes: Mapping[int, Collection[int]],
    dropout: Mapping[int, float],
    accelerator: Accelerator,
    example: Callable[[int, int], Batch],
    loss_of: LossOf,
    *,
    compiled: bool,
    sums: bool = False,
) -> None:
    """Pass a batch of each shape that training will have, before its clock starts.

    A compiled model makes its graphs here. An eager one has cuDNN try its algorithms, which takes
    seconds for each shape as well. Weights, statistics and random streams stay as they are.

    Args:
        model: The model, on its device.
        weights: Its weights, where they will stay: graphs keep their addresses.
        batch_sizes: Samples of the batches that are trained on, by resolution.
        dropout: Before the classifier, by resolution.
        accelerator: Tells the device, and prints.
        example: Batch of a size at a resolution, on the device.
        loss_of: Mean loss of the model on a batch.
        compiled: Whether to compile the model in place first.
        sums: Whether an optimizer sums the gradients of several calls, of micro-batches.
    """
    device = accelerator.device
    if compiled:
        compile_in_place(model, device, sums=sums)
    began, shapes = time.perf_counter(), 0
    model.train()
    with weights.kept(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for resolution, sizes in batch_sizes.items():
            set_dropout(model, dropout[resolution])
            for size in sorted(sizes):
                images, labels = example(size, resolution)
                for _ in range(_CALLS if compiled else 1):
                    loss_of(model, images, labels).backward()
                    # Gradients lie in the graph's memory, which its next call overwrites.
                    model.zero_grad(set_to_none=True)
                shapes += 1
    took, what = time.perf_counter() - began, "compiled" if compiled else "cuDNN has chosen"
    accelerator.print(f"{what} for {shapes} pairs of resolution and batch size in {took:.0f} s")
