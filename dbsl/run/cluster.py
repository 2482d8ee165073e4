"""The cluster and the stepper that a run's processes, `--sync` and `--push` ask for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import one_of_several
from dbsl.cluster.barrier import BarrierCluster
from dbsl.cluster.clock import ComputeClock
from dbsl.cluster.compiling import compile_for
from dbsl.cluster.joint import JointCluster
from dbsl.cluster.liveness import RollCall
from dbsl.cluster.messages import CPU, SERVER_RANK, ControlGroup, pairs_with_server
from dbsl.cluster.outer import OuterOptimizer
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.server import GradientServer, MergeRule, Server
from dbsl.cluster.server_optimizer import ServerOptimizer
from dbsl.cluster.simulated import SimulatedCluster
from dbsl.cluster.steps import DistributedSteps, JointSteps, OwnSteps, PushedGradients
from dbsl.cluster.through_server import ServerCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.model import build_optimizer, join_batch_norm
from dbsl.run.config import RunConfig
from dbsl.run.run import Run

Stepper = OwnSteps | JointSteps | DistributedSteps | PushedGradients


def connect(
    run: Run, accelerator: Accelerator, merge: MergeRule | None = None
) -> tuple[Cluster, Stepper]:
    """Return how this process's workers meet the others, and how they step.

    From here on the model's state is one vector, which is what workers push and pull.

    Args:
        run: What is trained.
        accelerator: Device, precision, processes.
        merge: A merge rule of one's own (see `Server`); None: the one that `merge` names.

    Raises:
        ValueError: If weights are not merged, or not as they are, but there is such a rule.
    """
    config, model = run.config, run.model
    if merge is not None:
        _check_merge(config)
    alone = not one_of_several()
    rank = 0 if alone else dist.get_rank()
    own = rank - config.dedicated_server
    workers = tuple(range(config.workers)) if alone else (own,) * (own >= 0)
    clock = ComputeClock(accelerator.device, None if alone else run.emulation)

    meets = not alone and config.sync in ("bsp", "step")
    control = None
    if meets:
        # Gloo's exchanges fail when a peer dies, NCCL's wait for it on the device.
        nccl, patience = dist.get_backend() == "nccl", timedelta(seconds=config.worker_timeout)
        pairs = pairs_with_server(patience) if nccl else None
        rollcall = RollCall(rank, dist.get_world_size(), config.worker_timeout, pairs)
        control = ControlGroup(config.worker_timeout, rollcall)

    def build(module: nn.Module) -> torch.optim.Optimizer:
        return build_optimizer(
            config.optimizer, module, config.lr, config.momentum, config.weight_decay
        )

    def prepared(module: nn.Module) -> torch.optim.Optimizer:
        return accelerator.prepare_optimizer(build(module))  # which has the scaler for fp16

    def flattened() -> FlatWeights:
        weights = FlatWeights(model)
        if config.compile:  # only now: graphs keep the weights' addresses
            dropout = {stage.resolution: stage.dropout for stage in run.stages}
            sizes = run.batch_sizes(workers)
            compile_for(model, weights, sizes, dropout, accelerator, run.data.example)
        return weights

    common = {
        "planner": run.planner,
        "epochs": config.epochs,
        "rounds_per_epoch": run.rounds,
    }
    wire = torch.bfloat16 if config.wire == "bf16" else None
    if config.sync == "step":
        weights = flattened()
        if alone:
            stepper = JointSteps(model, weights, clock, prepared, workers)
            finish = None
        else:
            if config.sync_batch_norm:
                model = join_batch_norm(model)
            example, _ = run.data.example(2, config.resolutions[0])
            stepper = DistributedSteps(
                model, weights, clock, prepared, own, example, on_exchange=control.enter, wire=wire
            )
            finish = stepper.average_buffers
        cluster = JointCluster(
            weights,
            workers=workers,
            duration=run.duration,
            finish_round=finish,
            control=control,
            **common,
        )
        return cluster, stepper

    in_host_memory = not alone and config.sync != "bsp"
    on_server = rank == SERVER_RANK
    staleness = {"bsp": 0, "ssp": config.staleness, "asp": None}[config.sync]
    counted = {
        "staleness": staleness,
        "rounds_per_epoch": run.rounds,
        "observe": run.planner.observe,
    }
    server = outgoing = None
    if config.push == "gradients":
        if on_server:
            device = CPU if in_host_memory else accelerator.device
            owner = ServerOptimizer(model, device, build)
            server = GradientServer(owner, config.workers, **counted)
        weights = flattened()
        stepper = PushedGradients(model, weights, clock)
        outgoing = stepper.vector
    else:
        weights = flattened()
        stepper = OwnSteps(model, clock, prepared, workers)
        if on_server:
            outer = None
            if config.merge == "delta":
                trained = len(weights.vector) - len(weights.buffers)
                outer = OuterOptimizer(trained, config.outer_lr, config.outer_momentum)
            server = Server(
                weights.vector.cpu() if in_host_memory else weights.vector,
                config.workers,
                rule=config.merge or ("mean" if config.sync == "bsp" else "ratio"),
                outer=outer,
                own=merge,
                **counted,
            )
    if alone:
        cluster = SimulatedCluster(
            weights,
            server,
            planner=run.planner,
            epochs=config.epochs,
            duration=run.duration,
            outgoing=outgoing,
        )
    else:
        worker = own if own >= 0 else None
        common |= {"worker": worker, "outgoing": outgoing, "wire": wire}
        if config.sync == "bsp":
            at_server = config.merge == "delta"
            gathers = merge is not None
            cluster = BarrierCluster(
                weights, server, control=control, at_server=at_server, gathers=gathers, **common
            )
        else:
            cluster = ServerCluster(weights, server, timeout_s=config.worker_timeout, **common)
    return cluster, stepper


def _check_merge(config: RunConfig) -> None:
    """Raise ``ValueError`` where a merge rule of one's own would not be asked."""
    for name, fits in (("sync", "step"), ("push", "gradients")):
        if getattr(config, name) == fits:
            raise ValueError(
                f"{name} must not be {fits} with a merge rule of one's own, since no weights are "
                f"merged, got {fits}"
            )
    for name, must in (("merge", None), ("wire", "float32")):
        if getattr(config, name) != must:
            raise ValueError(
                f"{name} must be {must or 'unset'} with a merge rule of one's own, "
                f"got {getattr(config, name)}"
            )
