"""The cluster and stepper for the launched processes, `--sync` and `--push`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import one_of_several
from dbsl.cluster.alive import ControlGroup, Watch
from dbsl.cluster.cluster import Cluster, WorkerGroup
from dbsl.cluster.formats import WorkerSum
from dbsl.cluster.launch import group_timeout
from dbsl.cluster.meeting import BarrierCluster, JointCluster, SimulatedCluster
from dbsl.cluster.merges import Delta, MergeRule, choose_rule
from dbsl.cluster.server import GradientServer, Server
from dbsl.cluster.serving import through_server
from dbsl.cluster.steps import (
    ComputeTimer,
    DistributedSteps,
    JointSteps,
    PushedGradients,
    Stepper,
)
from dbsl.cluster.weights import FlatWeights, compile_in_place, compiles, graphs_made
from dbsl.cluster.wire import CPU, SERVER_RANK
from dbsl.config.settings import FLOAT32, RunConfig, meets_at_server, wire_of
from dbsl.loss import LossOf
from dbsl.model import train_mode
from dbsl.optimizer import BuildOptimizer, make_clip
from dbsl.run.plans import Plans, SimulatedTimes

# Calls of each graph before training. The first warms a CUDA graph up, the second records it, and
# the third checks that the recording runs.
_CALLS = 3


class Parts(Protocol):
    """What `Workers` provides to `connect`."""

    plans: Plans
    config: RunConfig
    accelerator: Accelerator
    raw_model: nn.Module
    data: Any
    loss_of: LossOf
    graphs: int  # graphs compiled before training


def connect(
    parts: Parts, build_optimizer: BuildOptimizer, merge: MergeRule | None = None
) -> tuple[Cluster, Stepper]:
    """Build this process's cluster (how weights move) and stepper (how a step is taken).

    From here on, the model's state is one vector, which workers push and pull.
    """
    plans, model, accelerator = parts.plans, parts.raw_model, parts.accelerator
    config, timeout_s = plans.config, plans.config.worker_timeout
    alone = not one_of_several()
    rank = 0 if alone else dist.get_rank()
    own = rank - config.dedicated_server
    workers = tuple(range(config.workers) if alone else plans.islands.owners[own : own + 1])
    in_step = not (alone or meets_at_server(config.sync))  # all wait for each other
    control, island = _meet(plans, accelerator) if in_step else (None, WorkerGroup())
    weights, server = FlatWeights(model), None
    takes_gradients = config.sync == "step" or config.push != "weights"
    rule = None if takes_gradients else choose_rule(config, weights, merge)
    if rank == SERVER_RANK and config.sync != "step":
        device = accelerator.device if alone or in_step else CPU
        server = _server(plans, model, weights, device, build_optimizer, rule, alone)
    compiled = compiles(config, accelerator.device)
    if compiled or torch.backends.cudnn.benchmark:  # not earlier: graphs keep weights' addresses
        make_ready(parts, weights, workers, compiled)
    stepper = _stepper(parts, build_optimizer, weights, workers, control, island)
    common = {
        "planner": plans.planner,
        "epochs": config.epochs,
        "workers": workers,
        "outgoing": stepper.vector if config.push != "weights" else None,
        "control": control,
        "times": SimulatedTimes(plans, model) if alone else None,
        "finish_round": stepper.finish_round,
    }
    if config.sync == "step":
        cluster = JointCluster(weights, **common)
    elif alone:
        cluster = SimulatedCluster(weights, server, **common)
    elif in_step:
        common["delta"] = rule if isinstance(rule, Delta) else None
        common |= {"gathers": merge is not None, "served": config.dedicated_server}
        common |= {"island": island, "wire": config.wire}
        cluster = BarrierCluster(weights, server, **common)
    else:
        cluster = through_server(weights, server, timeout_s=timeout_s, **common)
    return cluster, stepper


def _meet(plans: Plans, accelerator: Accelerator) -> tuple[ControlGroup, WorkerGroup]:
    """Return the control group, and this process's group within its worker (a collective).

    A device mesh would not do: worker sizes may differ, and a dedicated server has no worker.
    """
    config, timeout_s = plans.config, plans.config.worker_timeout
    if not plans.islands.several:
        _say_hello(accelerator.device, None)
        return ControlGroup(timeout_s, Watch()), WorkerGroup()
    owners = {p + config.dedicated_server: w for p, w in enumerate(plans.islands.owners)}
    together = ControlGroup(timeout_s, Watch())
    islands = [[rank for rank in owners if owners[rank] == w] for w in range(config.workers)]
    timeout = group_timeout(timeout_s, cpu=accelerator.device.type == "cpu")
    inside, _ = dist.new_subgroups_by_enumeration(islands, timeout=timeout)
    firsts = [*range(config.dedicated_server), *(ranks[0] for ranks in islands)]
    between = dist.new_group(firsts, timeout=timeout)
    control = ControlGroup(timeout_s, islands=islands)
    own = dist.get_rank()
    groups = [None, *[inside] * (own in owners), *[between] * (own in firsts)]
    _say_hello(accelerator.device, *groups)
    if inside is None or dist.get_world_size(inside) == 1:  # nobody to wait for in a step
        return together, WorkerGroup(0, None, between)
    return together, WorkerGroup(plans.place or 0, inside, between, control)


def _say_hello(device: torch.device, *groups: dist.ProcessGroup | None) -> None:
    """Exchange a number: NCCL connects a group at its first sum, else during training time."""
    for group in groups:
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _server(
    plans: Plans,
    model: nn.Module,
    weights: FlatWeights,
    device: torch.device,
    build_optimizer: BuildOptimizer,
    rule: MergeRule | None,
    alone: bool,
) -> Server:
    config, members = plans.config, plans.planner.members
    staleness = {"bsp": 0, "ssp": config.staleness, "asp": None}[config.sync]
    common = {"staleness": staleness, "observe": plans.planner.observe}
    if config.push != "weights":
        common["build_clip"] = partial(make_clip, bound=config.clip_grad)
        return GradientServer(model, device, build_optimizer, members, **common)
    together = config.sync == "bsp"
    if alone and together and config.wire != "float32":
        common["rounded"] = WorkerSum(config.wire, weights, simulated=config.workers)
    return Server(weights.vector.to(device), members, rule, together=together, **common)


def _stepper(
    parts: Parts,
    build_optimizer: BuildOptimizer,
    weights: FlatWeights,
    workers: tuple[int, ...],
    control: ControlGroup | None,
    island: WorkerGroup,
) -> Stepper:
    config, model, accelerator = parts.config, parts.raw_model, parts.accelerator
    # Simulated machines are slowed down in simulated time only.
    timer = ComputeTimer(accelerator.device, parts.plans.machine if one_of_several() else None)
    if config.push != "weights":
        return PushedGradients(model, weights, timer, {})
    joint, wire = config.sync == "step", wire_of(config)
    optimizers = {
        worker: accelerator.prepare_optimizer(build_optimizer(model))
        for worker in (workers[:1] if joint else workers)  # joint steps share one
    }
    common = (model, weights, timer, optimizers)
    inside = island.inside is not None
    if inside or (joint and control is not None):
        images, labels = parts.data.example(2, config.resolutions[0])
        return DistributedSteps(
            *common,
            example_loss=lambda parallel: parts.loss_of(parallel, images, labels),
            wire=FLOAT32 if inside else wire,  # else for the exchange between workers
            group=island.inside,
        )
    return JointSteps(*common, wire=wire) if joint else Stepper(*common)


def make_ready(
    parts: Parts, weights: FlatWeights, workers: Sequence[int], compiled: bool | str
) -> None:
    """Run a batch of each shape that these workers will use, before training time begins.

    A compiled model builds its graphs here. For an eager model, cuDNN tries its algorithms, which
    also takes seconds per shape. Weights, statistics and random streams do not change.
    """
    plans, model, device = parts.plans, parts.raw_model, parts.accelerator.device
    if compiled:
        compile_in_place(model, device, compiled, sums=plans.known.micro_batch_sizes is not None)
    dropout = {stage.resolution: stage.dropout for stage in plans.stages}
    began, shapes = time.perf_counter(), 0
    with weights.kept(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        for resolution, sizes in plans.batch_sizes(workers).items():
            train_mode(model, dropout[resolution])
            for size in sorted(sizes):
                images, labels = parts.data.example(size, resolution)
                for _ in range(_CALLS if compiled else 1):
                    parts.loss_of(model, images, labels).backward()
                    # Gradients are in the graph's memory, which its next call overwrites.
                    model.zero_grad(set_to_none=True)
                shapes += 1
    took, what = time.perf_counter() - began, "cuDNN has chosen"
    if compiled:
        parts.graphs, what = graphs_made(), "compiled"
    parts.accelerator.print(
        f"{what} for {shapes} pairs of resolution and batch size in {took:.0f} s"
    )
