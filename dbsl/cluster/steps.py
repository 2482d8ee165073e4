"""What one optimizer step is: a worker's own, one of all workers together, or the server's.

Each stepper has the model to call, `part` around a worker's forward and backward pass, and `step`.
The loop that uses them is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from dbsl.cluster.clipping import Clip, keep_whole
from dbsl.cluster.clock import ComputeClock
from dbsl.cluster.compiling import uncompiled
from dbsl.cluster.part_of_step import begin_thawed, take_step
from dbsl.cluster.statistics import RunningStatistics
from dbsl.cluster.weights import FlatWeights
from dbsl.optimizer import BuildOptimizer, load_optimizer
from dbsl.plan.sampler import Part, Step
from dbsl.plan.turns import Round

# Older and newer versions of torch name it differently.
_SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "forward_sync_buffers"


class _Stepper:
    """What steppers have in common: optimizers by worker, and their state.

    Args:
        model: To be called.
        clock: Counts what workers compute.
        optimizers: Of this process's workers.
        buffers: The model's floating-point buffers, [S].

    Attributes:
        joint: Whether, by the time of a step, gradients are those of all workers' batches.
        on_gradients: Called in `step` while its gradients are whole, with the weight of their loss.
        clip: Called after that, right before an optimizer of this process steps.
    """

    joint = False
    clip: Clip = staticmethod(keep_whole)
    on_gradients: Callable[[float], object] = staticmethod(lambda weight: None)

    def __init__(
        self,
        model: nn.Module,
        clock: ComputeClock,
        optimizers: dict[int, torch.optim.Optimizer],
        buffers: Tensor,
    ) -> None:
        self._buffers, self._statistics = buffers, RunningStatistics(buffers)
        self.model, self.clock, self.optimizers = model, clock, optimizers

    def begin(self, turn: Round, *, anew: bool = True) -> None:
        """Note which epoch it is, for emulated slowness; not `anew`: inside a resumed round."""
        self.clock.epoch = turn.epoch
        for optimizer in self.optimizers.values():
            begin_thawed(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state, and what else lasts from step to step inside a round."""
        return {"optimizers": {w: o.state_dict() for w, o in self.optimizers.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned; workers that are not in it start anew."""
        for worker, saved in state["optimizers"].items():
            if worker in self.optimizers:
                load_optimizer(self.optimizers[worker], saved)

    def forget(self, worker: int) -> None:
        """Clear a worker's optimizer state."""
        if worker in self.optimizers:
            self.optimizers[worker].state.clear()


class OwnSteps(_Stepper):
    """Each worker steps by itself, with an optimizer of its own; its weights are pushed later.

    `buffers` may be left out where there are no micro-batches.
    """

    def __init__(
        self,
        model: nn.Module,
        clock: ComputeClock,
        build_optimizer: BuildOptimizer,
        workers: Sequence[int],
        buffers: Tensor | None = None,
    ) -> None:
        optimizers = {worker: build_optimizer(model) for worker in workers}
        super().__init__(model, clock, optimizers, torch.empty(0) if buffers is None else buffers)

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """Enclose a worker's forward and backward pass; gives the factor on its mean loss."""
        with self.clock.running((part.worker,)), self._statistics.of_micro_batch(part):
            yield part.weight

    def step(self, step: Step, learning_rate: float) -> None:
        """Take the optimizer step."""
        (part,) = step.parts
        self.on_gradients(part.weight)
        with self.clock.running((part.worker,)):
            self.clip(self.optimizers[part.worker])
            take_step(self.optimizers[part.worker], learning_rate)


class JointSteps(_Stepper):
    """All workers of one process step together: parts are accumulated, then one step is taken.

    Each part normalises by its own statistics; the running statistics become those of the parts,
    weighted as their losses. Gradients have one place for the whole run: what a CUDA graph returns
    is overwritten by its next call, so that sums must not lie there.
    """

    joint = True

    def __init__(
        self,
        model: nn.Module,
        weights: FlatWeights,
        clock: ComputeClock,
        build_optimizer: BuildOptimizer,
        workers: Sequence[int],
    ) -> None:
        super().__init__(model, clock, {0: build_optimizer(model)}, weights.buffers)
        self._weights, self._gradients = weights, torch.zeros_like(weights.vector)
        self._workers = tuple(workers)

    def begin(self, turn: Round, *, anew: bool = True) -> None:
        """Note the statistics that all parts of the next step start from."""
        super().begin(turn, anew=anew)
        self._weights.attach_gradients(self._gradients)  # of what is trained now
        self._statistics.begin()

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """Enclose a worker's forward and backward pass; gives the factor on its mean loss."""
        with self._statistics.passing(part.weight), self.clock.running((part.worker,)):
            yield part.weight

    def step(self, step: Step, learning_rate: float) -> None:
        """Take the optimizer step on the sum of all parts' gradients."""
        self._statistics.end()
        self.on_gradients(1.0)
        with self.clock.running(self._workers):  # in real processes each would take it
            self.clip(self.optimizers[0])
            take_step(self.optimizers[0], learning_rate, keep_gradients=True)
            self._gradients.zero_()
        self._statistics.begin()


class DistributedSteps(_Stepper):
    """All processes step together: DDP sums weighted gradients while they are computed.

    DDP averages, so that the loss is multiplied by the number of workers as well. A step of which
    some worker has no sample goes without DDP, which waits for a backward pass of every process:
    its gradients are summed afterwards. Running statistics are local, and averaged with the parts'
    weights before such a step, where weights change and where a round ends (their update is linear:
    averaging later gives the same).
    """

    joint = True

    def __init__(
        self,
        model: nn.Module,
        weights: FlatWeights,
        clock: ComputeClock,
        build_optimizer: BuildOptimizer,
        worker: int,
        example_loss: Callable[[nn.Module], Tensor],  # of a model, as in training
        on_exchange: Callable[[], object] = lambda: None,
        wire: torch.dtype | None = None,  # that gradients are rounded to on their way
    ) -> None:
        self._world_size = dist.get_world_size()
        super().__init__(model, clock, {worker: build_optimizer(model)}, weights.buffers)
        self._raw, self._weights, self._example_loss = model, weights, example_loss
        self.on_exchange = on_exchange
        self.exchange = allreduce_hook if wire is None else bf16_compress_hook
        self._wire = wire
        self._worker = worker
        self._weight = 1 / self._world_size  # this worker's, in an average
        self._wrap()

    def begin(self, turn: Round, *, anew: bool = True) -> None:
        """Wrap the model again where other parameters are trained than in the round before."""
        super().begin(turn, anew=anew)
        if self._wrapped != [p.requires_grad for p in self._raw.parameters()]:
            self._wrap()

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """Enclose a worker's forward and backward pass; gives the factor on its mean loss."""
        if (step.odd or step.reweighted) and part.begins:
            self.average_buffers()
        self._weight = step.parts[0].weight  # all its micro-batches have the same
        # What is computed without DDP stays here until its last micro-batch sums it all.
        no_sync = self.model.no_sync() if step.odd or not part.ends else nullcontext()
        with self.clock.running((part.worker,)), no_sync, self._statistics.of_micro_batch(part):
            yield part.weight if step.odd else part.weight * self._world_size

    def step(self, step: Step, learning_rate: float) -> None:
        """Take the optimizer step, the same in every process."""
        if step.odd:
            if not len(step.parts[0].indices):  # nothing was computed here
                self.average_buffers()
                self._weight = 0.0
            self._sum_gradients()
            self.average_buffers()
        self.on_gradients(1.0)
        with self.clock.running((self._worker,)):
            self.clip(self.optimizers[self._worker])
            take_step(self.optimizers[self._worker], learning_rate)

    def state_dict(self) -> dict[str, Any]:
        """See `OwnSteps.state_dict`."""
        return super().state_dict() | {"weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `OwnSteps.load_state_dict`."""
        super().load_state_dict(state)
        self._weight = state["weight"]

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average running statistics over processes, weighted as their parts."""
        if self._buffers.numel():
            self._buffers.mul_(self._weight)
            dist.all_reduce(self._buffers)
        self._weight = 1 / self._world_size  # equal now: any weights that sum to 1 keep them

    def _wrap(self) -> None:
        """Wrap the model for DDP, which shares the gradients of what is trained at that time."""
        self.model, self.warm = self._raw, False  # the hooks of a wrapper before go with it
        self._raw.zero_grad(set_to_none=True)
        self._wrapped = [p.requires_grad for p in self._raw.parameters()]
        device, weights = self._weights.vector.device, self._weights
        with weights.kept():  # DDP would share rank 0's statistics, and each has its own
            self.model = DistributedDataParallel(
                self._raw,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                **{_SYNC_BUFFERS: False},  # in forward passes: statistics stay local
            )
        self.model.register_comm_hook(self, _timed_allreduce)
        self._warm_up()

    def _warm_up(self) -> None:
        """Take one step's forward and backward pass and forget it.

        After the first one DDP orders its buckets anew, and a sum over three ranks rounds by the
        buckets: a resumed run would differ from an unbroken one, which has that behind it.
        """
        vector = self._weights.vector
        devices = [vector.device] if vector.is_cuda else []
        with self._weights.kept(), torch.random.fork_rng(devices), uncompiled(self._raw):
            self._example_loss(self.model).backward()
        self.warm = True
        self._raw.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        parameters = [p for p in self._raw.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in parameters])
        if self._wire is not None:
            flat = flat.to(self._wire)
        dist.all_reduce(flat)
        summed = flat.split([parameter.numel() for parameter in parameters])
        for parameter, gradient in zip(parameters, summed, strict=True):
            parameter.grad.copy_(gradient.view_as(parameter))


class PushedGradients(_Stepper):
    """Workers sum weighted gradients; the step is taken by the server's optimizer.

    `vector` is what a worker pushes: gradients, then the change of its floating-point buffers,
    weighted alike.
    """

    def __init__(self, model: nn.Module, weights: FlatWeights, clock: ComputeClock) -> None:
        super().__init__(model, clock, {}, weights.buffers)
        self._weights, self.vector = weights, torch.zeros_like(weights.vector)
        self._changes = self.vector[len(self.vector) - len(self._buffers) :]
        self._weight = 0.0  # sum over the losses so far

    def begin(self, turn: Round, *, anew: bool = True) -> None:
        """Start a push from zero, or, not anew, go on with the one that a stopped run was in."""
        super().begin(turn, anew=anew)
        self._weights.attach_gradients(self.vector)  # of what is trained now
        if anew:
            self.vector.zero_()
            self._weight = 0.0

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """Enclose a worker's forward and backward pass; gives the factor on its mean loss."""
        if part.begins:
            self._before = self._buffers.clone()
        with self.clock.running((part.worker,)), self._statistics.of_micro_batch(part):
            yield part.weight
        if part.ends:
            self._changes.add_(self._buffers - self._before, alpha=part.weight / part.share)
        self._weight += part.weight

    def step(self, step: Step, learning_rate: float) -> None:
        """Leave the step to the server."""
        if self._weight:
            self.on_gradients(self._weight)

    def state_dict(self) -> dict[str, Any]:
        """See `OwnSteps.state_dict`."""
        return super().state_dict() | {"gradients": self.vector, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `OwnSteps.load_state_dict`."""
        super().load_state_dict(state)
        self.vector.copy_(state["gradients"])
        self._weight = state["weight"]


# Without annotations: DDP compares them with types, and here they would be strings.
def _timed_allreduce(stepper, bucket):
    stepper.on_exchange()
    if stepper.warm:
        # After the last only waiting for the others follows.
        stepper.clock.mark(last=bucket.is_last())
    return stepper.exchange(None, bucket)
