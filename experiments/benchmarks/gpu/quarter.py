"""What the quarter of an hour has beside other stages: a bare loop in all ways, and the library."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import dbsl
from dbsl.cluster.weights import compile_in_place
from dbsl.data.sources import image_batch
from dbsl.model import build_model
from dbsl.optimizer import create_optimizer
from experiments.benchmarks.gpu.child import Settings
from experiments.benchmarks.speed.arms import synchronize

WAYS = ("eager", "fp16", "callables", "cudagraphs", "graph", "compiled", "compiled-graph")
_SLEEP = 200_000_000  # cycles, 0.1 s, in which the host hands over two steps
_WARM = 4  # steps before a graph: by then kernels are chosen, and the optimizer has its state


def bare(settings: Settings, resolution: int, batch: int) -> Iterator[dict[str, Any]]:
    """Time a bare loop in each way, and say whether its weights are then the eager one's."""
    batch, times, eager = (8, 2, None) if settings.dry else (batch, 10, None)
    # All ways have the same kernels, which are chosen once.
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    for way in WAYS:
        try:
            step, model = _step(way, settings, resolution, batch)
            found = _time(step, batch, times)
        except RuntimeError as error:  # of this way; the next ones count
            yield {way: str(error).strip().partition("\n")[0]}
            continue
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        eager = weights if eager is None else eager
        yield {way: found | {"eager_bits": torch.equal(weights, eager)}}


def _step(
    way: str, settings: Settings, resolution: int, batch: int
) -> tuple[Callable[[], object], torch.nn.Module]:
    """Return a step on a batch that lies ready, and its model; on a CPU all ways are eager."""
    torch.manual_seed(0)
    cuda, side = torch.cuda.is_available(), 16 if settings.dry else resolution
    device = torch.device("cuda" if cuda else "cpu")
    images, labels = image_batch(batch, side, 100, device)
    model = build_model("test_resnet" if settings.dry else "resnet18", 100, (side,))
    called = model.to(device, memory_format=torch.channels_last).train()
    optimizer = create_optimizer("sgd", model, 0.01, 0.9, 5e-4)
    dtype = torch.float16 if cuda and way == "fp16" else torch.bfloat16
    cast = torch.autocast(device.type, dtype, cache_enabled=False)  # a cache outlives no graph
    if cuda and way.startswith(("compiled", "cudagraphs")):  # with sums: not as CUDA graphs
        how = way if way == "cudagraphs" else True
        compile_in_place(model, device, how, sums=way != "compiled")
    if cuda and way == "callables":
        with cast:
            called = torch.cuda.make_graphed_callables(model, (images,))

    def step() -> None:
        with cast:
            loss = F.cross_entropy(called(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if cuda else None):
        for _ in range(_WARM):
            step()
    synchronize()
    if not (cuda and way.endswith("graph")):
        return step, model
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, model


def _time(step: Callable[[], object], batch: int, times: int) -> dict[str, float]:
    """Return images a second, and of a step the milliseconds of host and device."""
    found: dict[str, list[float]] = {"host_ms": [], "device_ms": []}
    for _ in range(times):
        synchronize()
        if cuda := torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(_SLEEP)
            start.record()
        began = time.perf_counter()
        step()
        step()
        found["host_ms"].append(500 * (time.perf_counter() - began))
        if cuda:
            end.record()
            end.synchronize()
            found["device_ms"].append(start.elapsed_time(end) / 2)
    began = time.perf_counter()
    for _ in range(10 * times):
        step()
    synchronize()
    rate = 10 * times * batch / (time.perf_counter() - began)
    milliseconds = {name: round(median(own), 3) for name, own in found.items() if own}
    return {"images_per_s": round(rate, 1), **milliseconds}


def library(settings: Settings) -> Iterator[dict[str, Any]]:
    """Train a compiled model in DDP, over NCCL, with `scale`, `watch` and `Rounds` in int4."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.randn(512, 3, 16, 16, device=device)
    y = (x.mean((1, 2, 3)) > 0).long()
    with tempfile.TemporaryDirectory() as scratch:
        store, backend = f"file://{scratch}/store", "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        model = DistributedDataParallel(build_model("test_resnet", 2, (16,)).to(device))
        sampler = dbsl.UnevenBatchSampler(len(x), 32, balance="dynamic")
        sampler.watch(model)
        if not settings.dry:
            model.compile()
        optimizer, losses = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), []
        with dbsl.Rounds(model, optimizer, every=4, wire="int4") as rounds:
            for epoch in range(4):
                sampler.set_epoch(epoch)
                for batch in sampler:
                    loss = F.cross_entropy(model(x[batch]), y[batch])
                    (loss * sampler.scale(len(batch))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                    rounds.step()
        dist.destroy_process_group()
    yield {"losses": losses[::16] + losses[-1:], "merges": rounds.merges}
    if not losses[-1] < losses[0]:
        raise RuntimeError(f"losses must fall, got {losses}")
