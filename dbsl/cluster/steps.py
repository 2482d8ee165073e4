"""What an optimizer step is: a worker's own, one of all workers together, or the server's.

First what steppers are made of: a clock of compute time, batch norm's running statistics over
several passes, whole steps and parts of one. Each stepper then has the model to call, `part` around
a worker's forward and backward pass, and `step`; the loop that uses them is the same.
"""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from dbsl.cluster.weights import FlatWeights, uncompiled
from dbsl.config.hooks import Machine
from dbsl.optimizer import BuildOptimizer, Clip, keep_whole, load_optimizer
from dbsl.plan.sampler import Part, Step
from dbsl.plan.types import Turn


class ComputeClock:
    """Adds up what each worker computes, and makes slowed workers as slow as they are meant to be.

    Waiting for other workers is left out. On CUDA the moments are events in the stream, so that
    measuring waits for nothing until the times are read; elsewhere they are the host's, whose calls
    return when the work is done. Where `machine` has a factor above 1 the process sleeps.
    """

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self.epoch = 0  # the factors depend on it
        self._device = device
        self._cuda = device.type == "cuda"
        self._machine = machine
        self._spans: defaultdict[int, list[tuple]] = defaultdict(list)
        self._slept_s: defaultdict[int, float] = defaultdict(float)
        self._before_s: dict[int, float] = {}  # spent before a stopped run was resumed
        self._mark = None

    @contextmanager
    def running(self, workers: tuple[int, ...]) -> Iterator[None]:
        """Count what happens inside as computation of each of these workers.

        If `mark` was called inside, what came after its last call does not count.
        """
        start, self._mark = self._now(), None
        self._start, self._workers = start, workers
        yield
        end = self._mark or self._now()
        if not self._mark:
            self._sleep(start, end)
        for worker in workers:
            self._spans[worker].append((start, end))
        self._mark = None

    def mark(self, *, last: bool) -> None:
        """Note that the computation may end here; `last`: it does, only waiting follows."""
        self._mark = self._now()
        if last:
            self._sleep(self._start, self._mark)

    def seconds(self, worker: int) -> float:
        """Return the worker's compute time so far and start anew; waits for the device."""
        spent = self._so_far(worker)
        self._spans.pop(worker, None)
        self._slept_s.pop(worker, None)
        self._before_s.pop(worker, None)
        return spent

    def state_dict(self) -> dict[int, float]:
        """Return the workers' seconds so far; waits for the device."""
        workers = {*self._spans, *self._before_s}
        return {worker: self._so_far(worker) for worker in sorted(workers)}

    def load_state_dict(self, state: Mapping[int, float]) -> None:
        """Count on from what `state_dict` returned."""
        self._before_s = dict(state)

    def _so_far(self, worker: int) -> float:
        spans = self._spans.get(worker, [])
        if self._cuda and spans:
            torch.cuda.synchronize(self._device)
        spent = sum(self._between(start, end) for start, end in spans)
        return spent + self._slept_s.get(worker, 0.0) + self._before_s.get(worker, 0.0)

    def _sleep(self, start, end) -> None:
        for worker in self._workers if self._machine else ():
            extra = self._machine.factor(worker, self.epoch) - 1.0
            if extra > 0:
                if self._cuda:
                    torch.cuda.synchronize(self._device)
                duration = extra * self._between(start, end)
                time.sleep(duration)
                self._slept_s[worker] += duration

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start, end) -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start


class RunningStatistics:
    """A model's buffers [S], which several passes move once, by the mean of what each makes.

    Each pass starts from the same statistics, as the joined batch would, and normalises by its own.
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers = buffers
        self._start, self._mean = torch.empty_like(buffers), torch.empty_like(buffers)

    def begin(self) -> None:
        """Note what all passes start from."""
        self._start.copy_(self._buffers)
        self._mean.zero_()

    @contextmanager
    def passing(self, share: float) -> Iterator[None]:
        """Enclose a pass; `share` is its weight in the mean."""
        self._buffers.copy_(self._start)
        yield
        self._mean.add_(self._buffers, alpha=share)

    def end(self) -> None:
        """Give the model the mean of all passes."""
        self._buffers.copy_(self._mean)

    @contextmanager
    def of_micro_batch(self, part: Part) -> Iterator[None]:
        """Enclose the pass of a worker's batch, or of a micro-batch of it."""
        if part.begins and part.ends:
            yield
            return
        if part.begins:
            self.begin()
        with self.passing(part.share):
            yield
        if part.ends:
            self.end()


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
    second moment comes from the parts' own gradients. The optimizer is one that `takes_parts`, with
    mean gradients at its parameters; the learning rate is that of the whole step.
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


class Stepper(ABC):
    """What steppers have in common: optimizers by worker of this process, and their state.

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

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Note which epoch it is, for emulated slowness; not `anew`: inside a resumed round."""
        self.clock.epoch = turn.epoch
        for optimizer in self.optimizers.values():
            begin_thawed(optimizer)

    @abstractmethod
    def part(self, step: Step, part: Part) -> AbstractContextManager[float]:
        """Enclose a worker's forward and backward pass; gives the factor on its mean loss."""

    @abstractmethod
    def step(self, step: Step, learning_rate: float) -> None:
        """Take the optimizer step, or leave it to the server."""

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


class OwnSteps(Stepper):
    """Each worker steps by itself, with its own optimizer; its weights are pushed later.

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
        """See `Stepper.part`."""
        with self.clock.running((part.worker,)), self._statistics.of_micro_batch(part):
            yield part.weight

    def step(self, step: Step, learning_rate: float) -> None:
        """Take the optimizer step."""
        (part,) = step.parts
        self.on_gradients(part.weight)
        with self.clock.running((part.worker,)):
            self.clip(self.optimizers[part.worker])
            take_step(self.optimizers[part.worker], learning_rate)


class JointSteps(Stepper):
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

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Note the statistics that all parts of the next step start from."""
        super().begin(turn, anew=anew)
        self._weights.attach_gradients(self._gradients)  # of what is trained now
        self._statistics.begin()

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """See `Stepper.part`."""
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


# Older and newer versions of torch name it differently.
_SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "forward_sync_buffers"


class DistributedSteps(Stepper):
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

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Wrap the model again where other parameters are trained than in the round before."""
        super().begin(turn, anew=anew)
        if self._wrapped != [p.requires_grad for p in self._raw.parameters()]:
            self._wrap()

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """See `Stepper.part`."""
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
        """See `Stepper.state_dict`."""
        return super().state_dict() | {"weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`."""
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


class PushedGradients(Stepper):
    """Workers sum weighted gradients; the step is taken by the server's optimizer.

    `vector` is what a worker pushes: gradients, then the change of its floating-point buffers,
    weighted alike.
    """

    def __init__(self, model: nn.Module, weights: FlatWeights, clock: ComputeClock) -> None:
        super().__init__(model, clock, {}, weights.buffers)
        self._weights, self.vector = weights, torch.zeros_like(weights.vector)
        self._changes = self.vector[len(self.vector) - len(self._buffers) :]
        self._weight = 0.0  # sum over the losses so far

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Start a push from zero, or, not anew, go on with the one that a stopped run was in."""
        super().begin(turn, anew=anew)
        self._weights.attach_gradients(self.vector)  # of what is trained now
        if anew:
            self.vector.zero_()
            self._weight = 0.0

    @contextmanager
    def part(self, step: Step, part: Part) -> Iterator[float]:
        """See `Stepper.part`."""
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
        """See `Stepper.state_dict`."""
        return super().state_dict() | {"gradients": self.vector, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stepper.load_state_dict`."""
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
