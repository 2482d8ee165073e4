"""The cluster and the stepper that a run's processes, `--sync` and `--push` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from dbsl.base.errors import SettingError, one_of_several
from dbsl.cluster.alive import ControlGroup, Heartbeats
from dbsl.cluster.barrier import BarrierCluster
from dbsl.cluster.gradients import GradientServer, ServerOptimizer
from dbsl.cluster.joint import JointCluster
from dbsl.cluster.launch import Door, RunningJob
from dbsl.cluster.merges import MergeRule, choose_rule
from dbsl.cluster.protocol import Cluster
from dbsl.cluster.served import through_server
from dbsl.cluster.server import Server
from dbsl.cluster.simulated import SimulatedCluster
from dbsl.cluster.steps import (
    ComputeClock,
    DistributedSteps,
    JointSteps,
    OwnSteps,
    PushedGradients,
    Stepper,
)
from dbsl.cluster.weights import FlatWeights, make_ready
from dbsl.cluster.wire import CPU, SERVER_RANK
from dbsl.config.settings import RunConfig, meets_at_server
from dbsl.model import join_batch_norm
from dbsl.optimizer import Clip, make_clip
from dbsl.run.folder import SUMS
from dbsl.run.training import Run, SimulatedTimes


def connect(
    run: Run,
    accelerator: Accelerator,
    merge: MergeRule | None = None,
    job: RunningJob | None = None,
    sums: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Cluster, Stepper]:
    """Build this process's cluster (how weights move) and stepper (what a step is).

    From here on the model's state is one vector, which is what workers push and pull. Into a
    running job the process is taken in here. `sums` are those of the code (`Code`), which one that
    joins later must have.

    Raises:
        NothingLeft: If the running job has no round left for this process.
        SettingError: If there is a merge rule of one's own, and weights are not merged as they are.
    """
    if merge is not None:
        _check_merge(run.config)
    builder = _Builder(run, accelerator, job, sums)
    return builder.joint() if run.config.sync == "step" else builder.rounds(merge)


class _Builder:
    """What clusters and steppers of all kinds are built from."""

    def __init__(
        self,
        run: Run,
        accelerator: Accelerator,
        job: RunningJob | None,
        sums: Mapping[str, str],
    ) -> None:
        config, self._job, self._sums = run.config, job, sums
        self._run, self._config, self._accelerator = run, config, accelerator
        self._alone = not one_of_several()
        rank = 0 if self._alone else job.rank if job else dist.get_rank()
        own = rank - config.dedicated_server
        self._rank = rank
        self._workers = tuple(range(config.workers)) if self._alone else (own,) * (own >= 0)
        self._clock = ComputeClock(accelerator.device, None if self._alone else run.machine)
        self._wire = torch.bfloat16 if config.wire == "bf16" else None
        self._common = {
            "planner": run.planner,
            "epochs": config.epochs,
            "rounds_per_epoch": run.rounds,
            "workers": self._workers,
            "figures": run.figures,
        }

    def joint(self) -> tuple[Cluster, Stepper]:
        """Return what takes joint steps."""
        run, config, model = self._run, self._config, self._run.model
        control = None if self._alone else self._control()
        weights = self._flattened()
        times = SimulatedTimes(run)
        self._common |= {"duration": times.duration, "exchange": times.exchange}
        if control is None:
            stepper = JointSteps(model, weights, self._clock, self._prepared, self._workers)
            stepper.clip = self._clip()
            return JointCluster(weights, **self._common), stepper
        if config.sync_batch_norm:
            model = join_batch_norm(model)
        images, labels = run.data.example(2, config.resolutions[0])
        stepper = DistributedSteps(
            *(model, weights, self._clock, self._prepared, *self._workers),
            example_loss=lambda parallel: run.loss_of(parallel, images, labels),
            on_exchange=control.enter,
            wire=self._wire,
        )
        stepper.clip = self._clip()
        finish = stepper.average_buffers
        return JointCluster(weights, finish_round=finish, control=control, **self._common), stepper

    def rounds(self, merge: MergeRule | None) -> tuple[Cluster, Stepper]:
        """Return what takes rounds, after which weights or gradients are pushed."""
        config, common = self._config, self._common
        meets = not self._alone and not meets_at_server(config.sync)
        control = self._control() if meets else None
        device = self._accelerator.device if self._alone or meets else CPU  # the server's
        if config.push == "gradients":
            server = self._gradient_server(device)
            weights = self._flattened()
            stepper = PushedGradients(self._run.model, weights, self._clock)
            common["outgoing"] = stepper.vector
        else:
            weights = self._flattened()
            common_of = (self._run.model, self._clock, self._prepared, self._workers)
            stepper = OwnSteps(*common_of, weights.buffers)
            stepper.clip = self._clip()
            server = self._server(weights, device, merge)
        if self._alone:
            for name in ("workers", "rounds_per_epoch"):  # which the server has
                del common[name]
            times = SimulatedTimes(self._run)
            common |= {"duration": times.duration, "exchange": times.exchange}
            return SimulatedCluster(weights, server, **common), stepper
        common["wire"] = self._wire
        if meets:
            common |= {"at_server": config.merge == "delta", "gathers": merge is not None}
            return BarrierCluster(weights, server, control=control, **common), stepper
        common["timeout_s"] = timeout_s = config.worker_timeout
        if self._job is not None:
            common["admission"] = admission = self._job.enter(timeout_s)
            begins = admission.clock // self._run.rounds + 1
            print(f"rank {self._rank} has joined, its share begins in epoch {begins}", flush=True)
        elif server is not None:
            trained_by = asdict(config) | {SUMS: dict(self._sums)}
            common["door"] = Door(trained_by, dist.get_world_size(), timeout_s)
        return through_server(weights, server, **common), stepper

    def _control(self) -> ControlGroup:
        timeout_s = self._config.worker_timeout
        return ControlGroup(timeout_s, Heartbeats(timeout_s))

    def _flattened(self) -> FlatWeights:
        run, weights = self._run, FlatWeights(self._run.model)
        compiled = self._config.compile
        if compiled or torch.backends.cudnn.benchmark:  # only now: graphs keep weights' addresses
            dropout = {stage.resolution: stage.dropout for stage in run.stages}
            sizes, example = run.batch_sizes(self._workers), run.data.example
            make_ready(
                *(run.model, weights, sizes, dropout, self._accelerator, example, run.loss_of),
                compiled=compiled,
                sums=run.known.micro_batch_sizes is not None,
            )
        return weights

    def _clip(self) -> Clip:
        return make_clip(self._run.model, self._config.clip_grad, self._config.clip_mode)

    def _prepared(self, module: nn.Module) -> torch.optim.Optimizer:
        return self._accelerator.prepare_optimizer(self._run.build_optimizer(module))

    def _gradient_server(self, device: torch.device) -> GradientServer | None:
        if self._rank != SERVER_RANK:
            return None
        config = self._config
        owner = ServerOptimizer(
            *(self._run.model, device, self._run.build_optimizer),
            clip=config.clip_grad,
            clip_mode=config.clip_mode,
        )
        return GradientServer(owner, config.workers, **self._counted())

    def _server(
        self, weights: FlatWeights, device: torch.device, merge: MergeRule | None
    ) -> Server | None:
        if self._rank != SERVER_RANK:
            return None
        rule = choose_rule(self._config, weights, merge)
        together = self._config.sync == "bsp"
        vector, workers = weights.vector.to(device), self._config.workers
        return Server(vector, workers, rule, together=together, **self._counted())

    def _counted(self) -> dict[str, Any]:
        config = self._config
        return {
            "staleness": {"bsp": 0, "ssp": config.staleness, "asp": None}[config.sync],
            "rounds_per_epoch": self._run.rounds,
            "observe": self._run.planner.observe,
            "members": self._run.planner.members,
        }


def _check_merge(config: RunConfig) -> None:
    """Raise ``SettingError`` where a merge rule of one's own would not be asked."""
    for name, fits in (("sync", "step"), ("push", "gradients")):
        if getattr(config, name) == fits:
            raise SettingError(
                f"{name} must not be {fits} with a merge rule of one's own, since no weights are "
                f"merged, got {fits}"
            )
    for name, must in (("merge", None), ("wire", "float32")):
        if getattr(config, name) != must:
            raise SettingError(
                f"{name} must be {must or 'unset'} with a merge rule of one's own, "
                f"got {getattr(config, name)}"
            )
