"""Optimizer steps: a worker's own, one of all workers together, or the server's.

The module starts with a timer of computation. Each stepper has the model to call, `micro_batch`
around a forward and backward pass, `complete`, which makes gradients those of the step, and
`stepping` around the optimizer's step.
"""

from __future__ import annotations

import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.parallel import DistributedDataParallel

from dbsl.base.errors import require
from dbsl.base.machine import moment, seconds_between
from dbsl.base.seeds import global_streams
from dbsl.cluster.formats import DTYPES, LowRank
from dbsl.cluster.weights import FlatWeights, uncompiled
from dbsl.config.hooks import Machine
from dbsl.config.settings import FLOAT32, Wire
from dbsl.optimizer import begin_again, first_state, load_optimizer
from dbsl.plan.sampler import Part, Step
from dbsl.plan.types import Turn


class ComputeTimer:
    """Adds up each worker's compute time, and delays workers that are emulated as slow.

    Waiting for other workers is excluded. On CUDA, measuring waits for nothing until the times are
    read. If `machine` has a factor above 1, the process sleeps.
    """

    def __init__(self, device: torch.device, machine: Machine | None = None) -> None:
        self.epoch = 0  # the factors depend on it
        self._now, self._machine = partial(moment, device), machine
        self._spans: defaultdict[int, list[tuple]] = defaultdict(list)
        self._more_s: defaultdict[int, float] = defaultdict(float)  # slept, or before a resumption

    @contextmanager
    def running(self, workers: tuple[int, ...]) -> Iterator[None]:
        """Measure the time inside as computation of each of these workers.

        If `mark` was called inside, the time after it is excluded.
        """
        self._workers, self._start, self._end = workers, self._now(), None
        yield
        if self._end is None:
            self.mark()
        for worker in workers:
            self._spans[worker].append((self._start, self._end))

    def mark(self) -> None:
        """Note that computation ends here, and only waiting follows."""
        self._end = self._now()
        for worker in self._workers if self._machine else ():
            extra = self._machine.factor(worker, self.epoch) - 1.0
            if extra > 0:
                duration = extra * seconds_between(self._start, self._end)
                time.sleep(duration)
                self._more_s[worker] += duration

    def take_seconds(self, worker: int) -> float:
        """Return the worker's compute time so far and start again at 0; waits for the device."""
        spent_s = self._so_far(worker)
        del self._spans[worker], self._more_s[worker]
        return spent_s

    def state_dict(self) -> dict[int, float]:
        """Return the workers' seconds so far; waits for the device."""
        return {worker: self._so_far(worker) for worker in sorted({*self._spans, *self._more_s})}

    def load_state_dict(self, state: Mapping[int, float]) -> None:
        self._more_s.update(state)

    def _so_far(self, worker: int) -> float:
        spent_s = sum(seconds_between(*span) for span in self._spans[worker])
        return spent_s + self._more_s[worker]


def take_step(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Take a step with this learning rate.

    A parameter group may scale it by its ``lr_scale``; see `dbsl.optimizer.keep_ratios`.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)
    optimizer.step()


def begin_thawed(optimizer: torch.optim.Optimizer) -> None:
    """Give newly trained parameters a momentum of 0.

    Up to 2.15, torch's fused SGD fails if some have none. If a first step is skipped, since float16
    gradients may overflow, it keeps uninitialised memory as the momentum of all.
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
        if group.get("dampening") and len(new) == len(group["params"]):
            continue  # a first step is not dampened, one after a momentum of 0 would be
        for parameter in new:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class Stepper:
    """Each worker steps by itself, with its own optimizer; its weights are pushed later.

    Each of a step's several passes (micro-batches, workers) normalises by its own statistics. The
    running ones move once, to the mean of the passes' results from the same start.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: FlatWeights,
        timer: ComputeTimer,
        optimizers: Mapping[int, torch.optim.Optimizer],
    ) -> None:
        self.model, self.timer, self.optimizers = model, timer, optimizers
        self._weights, self._buffers = weights, weights.buffers
        self._mean: Tensor | None = None  # mean of the passes' buffers, each from `_start`
        self._weight = 0.0  # weight of the loss behind this process's gradients
        self._first = {worker: first_state(own) for worker, own in optimizers.items()}

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Note the epoch, for emulated slowness; not `anew`: inside a resumed round."""
        self.timer.epoch = turn.epoch
        for optimizer in self.optimizers.values():
            begin_thawed(optimizer)

    @contextmanager
    def micro_batch(self, step: Step, part: Part) -> Iterator[float]:
        """Enclose a worker's forward and backward pass; yield the factor on its mean loss."""
        whole = part.first and part.last
        with self.timer.running((part.worker,)) if whole else self._one_of_passes(part, part.share):
            yield part.weight
        if part.last and not whole:
            self._end_passes()

    @contextmanager
    def _one_of_passes(self, part: Part, share: float) -> Iterator[None]:
        """Enclose a pass with this share of the step's running statistics."""
        if self._mean is None:
            self._start, self._mean = self._buffers.clone(), torch.zeros_like(self._buffers)
        else:
            self._buffers.copy_(self._start)
        with self.timer.running((part.worker,)):
            yield
        self._mean.add_(self._buffers, alpha=share)

    def _end_passes(self) -> None:
        self._buffers.copy_(self._mean)
        self._mean = None

    def complete(self, step: Step) -> float:
        """Make gradients those of the whole step; return the weight of their loss."""
        return 1.0

    def stepping(self, step: Step) -> AbstractContextManager:
        """Enclose an optimizer step, after which gradients are cleared."""
        # In real processes each worker takes a joint step.
        return self.timer.running(tuple(part.worker for part in step.parts))

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' state, and other state kept between steps of a round."""
        optimizers = {worker: own.state_dict() for worker, own in self.optimizers.items()}
        return {"optimizers": optimizers, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; workers not in it have no state yet."""
        for worker, saved in state["optimizers"].items():
            if worker in self.optimizers:
                load_optimizer(self.optimizers[worker], saved)
        self._weight = state["weight"]

    def finish_round(self) -> None:
        """Do the work due after a round's steps."""

    def drop_remainders(self) -> None:
        """Discard the parts of gradients that were not sent."""

    def forget(self, worker: int) -> None:
        """Clear a worker's optimizer state."""
        if worker in self.optimizers:
            begin_again(self.optimizers[worker], self._first[worker])


class SummedGradients(Stepper):
    """Gradients are summed in one place for the whole run, `vector`.

    A CUDA graph's next call overwrites what it returned, so sums must not be there.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.vector = torch.zeros_like(self._weights.vector)
        self._places: list[tuple[Tensor, Tensor]] = []  # parameters, and their places in `vector`

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Keep the gradients of currently trained parameters in the vector."""
        super().begin(turn, anew=anew)
        self._places = self._weights.attach_gradients(self.vector)

    def complete(self, step: Step) -> float:
        self._put_in_place(torch.Tensor.zero_)
        return self._weight

    @torch.no_grad()
    def _put_in_place(self, cleared: Callable[[Tensor], Tensor] = lambda place: place) -> None:
        """Copy gradients that the loop has replaced to the place they are read from.

        For parameters that the loop thawed or cleared, `cleared` gives them from their place.
        """
        for parameter, place in self._places:
            if not parameter.requires_grad:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = cleared(place)
            elif parameter.grad is not place:
                parameter.grad = place.copy_(parameter.grad)


class JointSteps(SummedGradients):
    """All workers of this process step together, with worker 0's optimizer.

    Gradients become what real processes would receive by `wire`. Each real process rounds its own
    to 16 bits; here the sum is rounded once.
    """

    def __init__(self, *arguments: Any, wire: Wire = FLOAT32) -> None:
        super().__init__(*arguments)
        self._dtype = DTYPES.get(wire.name)

    @contextmanager
    def micro_batch(self, step: Step, part: Part) -> Iterator[float]:
        self._put_in_place()
        with self._one_of_passes(part, part.weight):
            yield part.weight

    def complete(self, step: Step) -> float:
        super().complete(step)
        self._end_passes()
        if self._dtype is not None:
            self.vector.copy_(self.vector.to(self._dtype))
        return 1.0

    @contextmanager
    def stepping(self, step: Step) -> Iterator[None]:
        with super().stepping(step):
            yield
            self.vector.zero_()


class PushedGradients(SummedGradients):
    """Workers sum weighted gradients; the server's optimizer takes the step.

    `vector` is what a worker pushes: gradients, then the change of its floating-point buffers,
    weighted alike. `complete` returns the weight of the losses so far.
    """

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Start a push from zero, or, not `anew`, continue the push of a stopped run."""
        super().begin(turn, anew=anew)
        if anew:
            self.vector.zero_()
            self._weight = 0.0

    @contextmanager
    def micro_batch(self, step: Step, part: Part) -> Iterator[float]:
        self._put_in_place()
        if part.first:
            self._before = self._buffers.clone()
        with super().micro_batch(step, part) as found:
            yield found
        if part.last:
            changes = self.vector[len(self.vector) - len(self._buffers) :]
            changes.add_(self._buffers - self._before, alpha=part.weight / part.share)
        self._weight += part.weight

    def stepping(self, step: Step) -> AbstractContextManager:
        """Enclose nothing: gradients add up until they are pushed, and the server steps."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"gradients": self.vector}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.vector.copy_(state["gradients"])


# Weights compared between processes, and how far they may differ, relative to the largest:
# different processors round differently.
_COMPARED, _ALIKE = 1024, 0.01
_ONE_BUCKET_MB = 2**20  # more than any gradients
# Older and newer versions of torch name it differently.
_SYNC_BUFFERS = "broadcast_buffers"
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    _SYNC_BUFFERS = "forward_sync_buffers"


class DistributedSteps(Stepper):
    """All processes step together: DDP sums weighted gradients while they are computed.

    DDP averages, so the loss is also multiplied by the number of workers. A step in which some
    worker has no sample runs without DDP, which waits for a backward pass of every process; its
    gradients are summed afterwards. Running statistics are local. They are averaged with the
    workers' weights before such a step, when weights change and at the end of a round (their update
    is linear: averaging later gives the same).

    `example_loss` gives a model's loss, as in training; gradients are sent as `wire`. PowerSGD does
    not compress those of an odd step; its remainders wait for the next. With a `group`, only its
    processes step together.
    """

    def __init__(
        self,
        *arguments: Any,
        example_loss: Callable[[nn.Module], Tensor],
        wire: Wire = FLOAT32,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(*arguments)
        self._group, self._dtype = group, DTYPES.get(wire.name)
        self._raw, self._example_loss = self.model, example_loss
        hooks = {"bf16": bf16_compress_hook, "fp16": fp16_compress_hook}
        self._reduce = hooks.get(wire.name, allreduce_hook)
        self._world_size = dist.get_world_size(group)
        self._weight = 1 / self._world_size  # this worker's, in an average
        self._low_rank = LowRank(wire) if wire.rank else None
        self._wrap()

    def begin(self, turn: Turn, *, anew: bool = True) -> None:
        """Wrap the model again if other parameters are trained than in the last round."""
        super().begin(turn, anew=anew)
        if self._low_rank is not None:
            self._low_rank.begin([p.requires_grad for p in self._raw.parameters()])
        if anew:  # it may have taken over another process's state
            self._weight = 1 / self._world_size
        if self._trained != [p.requires_grad for p in self._raw.parameters()]:
            self._wrap()

    @contextmanager
    def micro_batch(self, step: Step, part: Part) -> Iterator[float]:
        if (step.odd or step.reweighted) and part.first:
            self.average_buffers()
        self._weight = step.parts[0].weight  # all its micro-batches have the same
        # Gradients computed without DDP remain local until the last micro-batch sums them all.
        syncs = part.last and not step.odd
        self.model.require_backward_grad_sync, self._exchanged = syncs, not syncs
        with super().micro_batch(step, part) as weight:
            yield weight if step.odd else weight * self._world_size
        self._check_exchanged()

    def _check_exchanged(self) -> None:
        """Refuse a backward pass that bypassed DDP, which sums gradients only in its own."""
        text = "the training loop must call workers.model(...), with DDP around it, and once"
        require(self._exchanged, text, "a backward pass in which no gradient was summed")

    def complete(self, step: Step) -> float:
        """Make gradients the same in every process."""
        if step.odd:
            if not len(step.parts[0].indices):  # nothing was computed here
                self.average_buffers()
                self._weight = 0.0
                for optimizer in self.optimizers.values():  # fp16: a loss would have set the scale
                    if (scaler := getattr(optimizer, "scaler", None)) is not None:
                        scaler.scale(torch.zeros((), device=self._weights.vector.device))
            self._sum_gradients()
            self.average_buffers()
        return super().complete(step)

    def state_dict(self) -> dict[str, Any]:
        kept = self._low_rank and self._low_rank.state_dict()
        return super().state_dict() | {"low_rank": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._low_rank is not None and state.get("low_rank"):
            self._low_rank.load_state_dict(state["low_rank"], self._buffers.device)

    def drop_remainders(self) -> None:
        if self._low_rank is not None:
            self._low_rank.reset()

    def finish_round(self) -> None:
        """Average running statistics, and check that processes have the same weights."""
        self.average_buffers()
        own = self._weights.vector[: len(self._weights.vector) - len(self._buffers)]
        some = own[:: max(1, len(own) // _COMPARED)]
        most = torch.stack([some, -some])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        apart, largest = torch.stack([most.sum(0).max(), most.abs().max()]).tolist()
        if apart > max(_ALIKE, 16 * torch.finfo(own.dtype).eps) * largest:  # false if one is NaN
            raise RuntimeError(
                "weights must stay the same in all processes that step together, got some that are "
                f"{apart:.2g} apart, where the largest is {largest:.2g}: add losses up for one "
                "backward pass a part, and change gradients by what is the same in all"
            )

    @torch.no_grad()
    def average_buffers(self) -> None:
        """Average running statistics over processes, weighted like their losses."""
        if self._buffers.numel():
            self._buffers.mul_(self._weight)
            dist.all_reduce(self._buffers, group=self._group)
        self._weight = 1 / self._world_size  # equal now: any weights that sum to 1 keep them

    def _wrap(self) -> None:
        """Wrap the model in DDP, which exchanges gradients of the parameters trained at that time.

        Two steps' forward and backward passes are taken and forgotten: in the second one DDP orders
        its buckets anew, and a sum over three ranks rounds by the buckets. Otherwise a resumed run
        would differ from an unbroken one, which has done that, and in an odd step processes without
        a sample would not take part.
        """
        self.model, self._warm = self._raw, False  # an earlier wrapper's hooks go with it
        self._raw.zero_grad(set_to_none=True)
        self._trained = [p.requires_grad for p in self._raw.parameters()]
        weights, device = self._weights, self._weights.vector.device
        devices = [device] if device.type == "cuda" else None
        # PowerSGD chains its three sums in callbacks. NCCL's callbacks run at once, in the order of
        # buckets, since its futures are complete when a sum is in the stream. Gloo's run when a sum
        # is over: sums of two buckets would collide, and the processes abort.
        one = {"bucket_cap_mb": _ONE_BUCKET_MB} if self._low_rank is not None else {}
        self.model = DistributedDataParallel(
            self._raw,
            device_ids=devices,
            process_group=self._group,
            gradient_as_bucket_view=True,
            init_sync=False,  # weights are the same, and statistics are local
            **{_SYNC_BUFFERS: False},  # also in forward passes
            **one,
        )
        self.model.register_comm_hook(None, self._exchange)
        drawn, self._exchanged = torch.random.fork_rng(devices or []), False
        with weights.kept(), drawn, global_streams(), uncompiled(self._raw):
            self._example_loss(self.model).backward()
        self._check_exchanged()
        # Else the next forward pass does it, and waits for processes without a sample then.
        self.model.reducer._rebuild_buckets()
        self._warm = True
        self._raw.zero_grad(set_to_none=True)

    # Without annotations: DDP compares them with types, and here they would be strings.
    def _exchange(self, _, bucket):
        self._exchanged = True
        if self._warm and bucket.is_last():
            self.timer.mark()
        if self._warm and self._low_rank is not None:
            found = dict(zip(map(id, bucket.parameters()), bucket.gradients(), strict=True))
            trained = (id(p) for p in self._raw.parameters() if p.requires_grad)
            return self._low_rank(bucket.buffer(), [found[own] for own in trained])
        return self._reduce(self._group, bucket)

    @torch.no_grad()
    def _sum_gradients(self) -> None:
        parameters = [p for p in self._raw.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [p.grad for p in parameters]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = flat.to(self._dtype or flat.dtype)
        dist.all_reduce(flat, group=self._group)
        summed = flat.split([gradient.numel() for gradient in gradients])
        views = [own.view_as(gradient) for own, gradient in zip(summed, gradients, strict=True)]
        torch._foreach_copy_(gradients, views)
