"""What a run's workers can do: their step times and largest batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from dbsl.base.errors import plural, px, require
from dbsl.cluster.formats import check_rank, trained_shapes
from dbsl.cluster.weights import compiles
from dbsl.cluster.wire import share_text
from dbsl.config.complete import check_lengths, for_workers, from_workers
from dbsl.config.settings import AGAIN, RunConfig, meets_at_server, shares_global_batch, wire_of
from dbsl.data.sources import TrainingData
from dbsl.loss import LossFunction, LossOf, bind_loss, check_loss, digest_of, not_a_mean
from dbsl.model import check_model
from dbsl.optimizer import BuildOptimizer, check_parameters, join_optimizers
from dbsl.plan.islands import Islands
from dbsl.plan.machines import WorkerProfiles
from dbsl.plan.sampler import Order
from dbsl.plan.types import TimeModel
from dbsl.profile.cache import Profiler
from dbsl.profile.memory import give_back, is_short_of_memory
from dbsl.profile.timing import NO_OPTIMIZER, StepSpec, setup_of

STEPS_A_ROUND = 10  # a worker takes at least this many with the batch that `auto` chooses
_SMALLEST_AUTO = 16  # samples; fewer steps are accepted instead of a smaller batch
_SAME_MACHINE = 0.10  # relative difference of step times up to which workers are treated as equal
# Measuring time for real processes, simulated workers, and a single worker (rough predictions).
_SECONDS, _SECONDS_SIMULATED, _SECONDS_OF_ONE = 30.0, 10.0, 3.0
_OF_MODELS = ("slope", "intercept", "floor")


def largest_auto_batch(round_samples: int) -> int:
    """Return the most samples a step that `auto` gives a worker with `round_samples` in a round.

    A large GPU may hold a whole small dataset, but one step a round would not train.
    """
    return max(1, min(round_samples, max(_SMALLEST_AUTO, round_samples // STEPS_A_ROUND)))


@dataclass(frozen=True)
class Times:
    """What plans are made from."""

    config: RunConfig  # with measured values filled in
    known: WorkerProfiles  # step times and bounds on batches, by resolution and worker
    samples: int  # per epoch
    least: int = 1  # fewest samples that the model trains on
    blocks: Order | None = None  # draws an epoch's order if data are read in groups


def step_times(
    config: RunConfig,
    accelerator: Accelerator,
    model: nn.Module,
    data: TrainingData,
    loss_function: LossFunction,
    build_optimizer: BuildOptimizer,
) -> Times:
    """Return each worker's step time, from the settings or measured (a collective).

    It measures steps of a copy of the model on `data.example`, with this loss and this optimizer.
    Before that, it refuses whatever cannot be trained.
    """
    check_lengths(config)
    _check_alike(data, accelerator)
    alike_models(model, accelerator)
    least = check_model(model, data, config.model, config.resolutions)
    _check_samples(data, config, least)

    @wraps(build_optimizer)  # step times are cached by its text and the loss's
    def build(model: nn.Module) -> torch.optim.Optimizer:
        return join_optimizers(build_optimizer(model))

    check_parameters(build(model), model, config.optimizer)
    loss_of = bind_loss(loss_function, config, accelerator.autocast)
    with accelerator.autocast():
        example = data.example(2, config.resolutions[0])
        unused = check_loss(loss_function, model, example, config)
    if unlike := not_a_mean(loss_function, model, example, config):
        accelerator.print(f"warning: {unlike}")
    joint = accelerator.num_processes > 1 and (config.sync == "step" or Islands.of(config).several)
    must = "loss_function must use every parameter that is trained, where several processes take "
    must += "joint steps (requires_grad_(False) freezes others)"
    require(not (joint and unused), must, f"no gradient of {', '.join(unused[:1])}")
    check_rank(wire_of(config), trained_shapes(model), config.wire)
    known, config = profile_workers(config, model, data, accelerator, loss_of, build, least)
    give_back(accelerator.device)  # memory used to measure
    blocks = getattr(data.train, "blocks", None)  # your own data may have none
    return Times(config, known, len(data.train), least, blocks)


def _check_alike(data: TrainingData, accelerator: Accelerator) -> None:
    """Refuse data of your own that differ between processes (a collective)."""
    digest = getattr(data, "digest", "")
    unlike = digest != share_text(digest, accelerator)
    ranks = accelerator.gather(torch.tensor([int(unlike)], device=accelerator.device))
    which = f"others on rank {int(ranks.argmax())}"
    require(not ranks.any(), "data must be the same in all processes", which)


def alike_models(model: nn.Module, accelerator: Accelerator) -> None:
    """Give all processes rank 0's weights, whatever they have built (a collective)."""
    with torch.no_grad():
        for value in model.state_dict().values() if accelerator.num_processes > 1 else ():
            value.copy_(broadcast(value.contiguous()))


def _check_samples(data: TrainingData, config: RunConfig, least: int) -> None:
    workers, unit = config.workers, data.unit
    rounds = 1 if shares_global_batch(config) else config.rounds_per_epoch
    needed = workers * rounds * least
    why = ", whose batch norm needs 2 at a time" if least > 1 else ""
    must = f"dataset must have at least {needed} training {unit}s for {workers} workers in "
    remedy = "lower --workers (--nproc-per-node, --num_processes) or --rounds-per-epoch, or add"
    got = f"{len(data.train)}: {remedy} {unit}s"
    require(len(data.train) >= needed, f"{must}{plural(rounds, 'round')} an epoch{why}", got)


def profile_workers(
    config: RunConfig,
    model: nn.Module,
    data: TrainingData,
    accelerator: Accelerator,
    loss_of: LossOf,
    build_optimizer: BuildOptimizer,
    least: int = 1,  # fewest samples that the model trains on
) -> tuple[WorkerProfiles, RunConfig]:
    """Return the workers' profiles, measured where not given, and the config with them."""
    on_cuda = accelerator.device.type == "cuda"
    if not on_cuda:  # memory is not measured: use the usual batch, whole
        names = ("large_batch_size", "micro_batch_size")
        config = replace(config, **{n: None for n in names if getattr(config, n) == "auto"})
    joint, auto = shares_global_batch(config), config.large_batch_size == "auto"
    share = max(1, len(data.train) // config.workers // config.rounds_per_epoch)
    given = for_workers(config, "large_batch_size", None if auto else config.large_batch_size)
    # The power of two nearest to a tenth of a round: with far fewer than ten steps a round, a
    # small dataset would have almost no updates.
    usual = min(max(_SMALLEST_AUTO, 2 ** round(math.log2(max(1, share / 10)))), 128, share)
    large = [[size or usual for size in row] for row in given]
    _check_large_batches(config, large, data)
    _check_processes(config, large, least)
    profiler = make_profiler(config, model, data, accelerator, loss_of, build_optimizer)
    measure = Measurements(config, profiler, accelerator)
    # Joint steps shift samples between workers, and no worker may have more than it can hold.
    # With micro-batches, any batch fits.
    shifting = joint and config.balance != "none" and config.micro_batch_size is None
    limits, most = None, largest_auto_batch(share)
    if auto or (shifting and on_cuda):
        # If a worker is lost, the others also take its part of the joint batch.
        moves = shifting or meets_at_server(config.sync)
        whole = joint and (moves or config.global_batch_size is not None)
        limits = measure.largest_batches([len(data.train) if whole else most] * len(large))
    if auto:
        large = [[min(size, most) for size in row] for row in limits]
    elif joint and config.large_batch_size and config.global_batch_size is not None:
        limits = large
    micro = None
    if config.micro_batch_size == "auto":
        at_most = [_largest_of(config, row, number) for number, row in enumerate(large)]
        micro = measure.largest_batches(at_most)
    elif config.micro_batch_size is not None:
        micro = for_workers(config, "micro_batch_size", config.micro_batch_size)
    islands, measured = Islands.of(config), config.slope is None
    models, fits = measure.models(large, micro) if measured else (_given_models(config), None)

    def by_resolution(rows: Sequence | None) -> dict | None:
        return rows and dict(zip(config.resolutions, rows, strict=True))

    known = WorkerProfiles(
        models=by_resolution([islands.join(one) for one in models]),
        processes=by_resolution(models) if islands.several else None,
        large_batch_sizes=by_resolution(large),
        limits=by_resolution(limits),
        measured=measured,
        micro_batch_sizes=by_resolution(micro),
        fits=by_resolution(fits),
    )
    return known, _with_known(config, known)


def _check_large_batches(config: RunConfig, large: list[list[int]], data: TrainingData) -> None:
    """Refuse batches that no plan can have, before measuring them."""
    joint, samples = shares_global_batch(config), len(data.train)
    limits = joint and config.global_batch_size is not None  # sizes then say what a worker can hold
    if not isinstance(config.large_batch_size, tuple) or config.local_batch_sizes or limits:
        return
    size = max(sum(row) if joint else max(row) for row in large)
    most, what = (samples, "joint step") if joint else (samples // config.rounds_per_epoch, "round")
    must = f"large_batch_size must come to at most {most}, the training {data.unit}s of a {what}"
    require(size <= most, must, size)


def _check_processes(config: RunConfig, large: list[list[int]], least: int) -> None:
    """Refuse a batch that is too small to give each process of its worker a part."""
    name = "local_batch_sizes" if config.local_batch_sizes else "large_batch_size"
    sizes = config.local_batch_sizes or itertools.chain(*large)
    for batch, count in zip(sizes, itertools.cycle(Islands.of(config).sizes), strict=False):
        must = f"{name} must be at least {count * least} for a worker of {count} processes"
        require(count == 1 or batch >= count * least, must, batch)


def _given_models(config: RunConfig) -> list[TimeModel]:
    given = (config.slope, config.intercept, config.floor or (0.0,))
    islands = Islands.of(config)
    count = len(islands.owners) if islands.several else None
    columns = (for_workers(config, *c, count) for c in zip(_OF_MODELS, given, strict=True))
    return [TimeModel(*map(np.array, rows)) for rows in zip(*columns, strict=True)]


def _with_known(config: RunConfig, known: WorkerProfiles) -> RunConfig:
    joint, large = shares_global_batch(config), known.large_batch_sizes
    if joint and config.global_batch_size is not None:
        large = known.limits or large  # it then says what a worker can hold
    if joint and config.large_batch_size is None:
        large = None  # it would be a limit that nobody set
    models = (known.processes or known.models).values()
    coefficients = (
        from_workers([getattr(model, name).tolist() for model in models]) for name in _OF_MODELS
    )
    found = dict(zip(_OF_MODELS, coefficients, strict=True))
    found["floor"] = found["floor"] if any(found["floor"]) else config.floor
    for name, sizes in (("large_batch_size", large), ("micro_batch_size", known.micro_batch_sizes)):
        found[name] = sizes and from_workers([*sizes.values()])
    return replace(config, **found, profile=None)


def make_profiler(
    config: RunConfig,
    model: nn.Module,
    data: TrainingData,
    accelerator: Accelerator,
    loss_of: LossOf,
    build_optimizer: BuildOptimizer,
) -> Profiler:
    """Return a profiler of this process's workers, for the steps that they will take."""
    pushes = config.push != "weights"
    setup = setup_of(
        *(_profiled_name(config, model, data), model, data.num_classes, accelerator),
        optimizer=NO_OPTIMIZER if pushes else config.optimizer,
        momentum=config.momentum > 0,
        weight_decay=config.weight_decay > 0,
        # The server clips pushed gradients, so a worker's step does not.
        clip=bool(config.clip_grad) and not pushes,
        compile=compiles(config, accelerator.device),
        loss=digest_of(loss_of, build_optimizer),
    )
    build = None if pushes else build_optimizer
    spec = StepSpec(setup, model, accelerator, loss_of, data.example, build)
    rough = config.workers == 1 and not config.small_workers
    several = _SECONDS if accelerator.num_processes > 1 else _SECONDS_SIMULATED
    seconds, again = _SECONDS_OF_ONE if rough else several, config.profile == AGAIN
    return Profiler(
        spec,
        seconds=seconds / len(config.resolutions),
        rough=rough,
        refresh=again,
        file=Path(config.profile) if config.profile and not again else None,
        reserve=partial(_reserve_bytes, config, model, accelerator.num_processes),
    )


def _profiled_name(config: RunConfig, model: nn.Module, data: TrainingData) -> str:
    """Return the name under which step times are cached; your own model's includes its inputs."""
    if hasattr(model, "created_with"):
        more = [f"{name}={value}" for name, value in model.settings.items()]
        more += ["grad_checkpointing"] * config.grad_checkpointing
        return " ".join([config.model, *more, *config.opt_kwargs])
    inputs, _ = data.example(1, config.resolutions[-1])
    own = [type(model).__name__, str(inputs.dtype), *map(str, inputs.shape[1:])]
    return "-".join([*own, *config.opt_kwargs])


def _reserve_bytes(
    config: RunConfig, model: nn.Module, processes: int, state_bytes: float
) -> float:
    """Return the most bytes that a run holds on the device besides one worker's step.

    These are the weights that each worker here has pulled, their optimizers' states, the global
    weights, and a wire format's remainders: those of each worker and of their sum, or PowerSGD's
    plus a copy of the gradients. Joint steps share one optimizer, and pull only if gradients are
    pushed. A merge uses the memory of a step's activations for its temporary tensors.
    """
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    here = config.workers if processes == 1 else 1
    pulled = 0 if config.sync == "step" else here
    rounds = (here + 1) * (config.wire != "float32")
    left = 2 * bool(wire_of(config).rank) if config.sync == "step" else rounds
    optimizers = 1 if shares_global_batch(config) else here
    return float(weights * (pulled + 1 + left) + state_bytes * optimizers)


class Measurements:
    """Measurements of this process's workers, shared with all processes."""

    def __init__(self, config: RunConfig, profiler: Profiler, accelerator: Accelerator) -> None:
        self.config, self.profiler, self.accelerator = config, profiler, accelerator
        self._islands = Islands.of(config)
        owners = self._islands.owners  # the worker of each process
        # The workers of this process; a dedicated server measures as the first process does.
        own = max(0, accelerator.process_index - config.dedicated_server)
        self._here = owners if accelerator.num_processes == 1 else owners[own : own + 1]

    def largest_batches(self, most: Sequence[int]) -> list[list[int]]:
        """Return the largest batches that fit in memory, at most `most`: [resolution][worker]."""
        bounds = zip(self.config.resolutions, most, strict=True)
        found = [[self.profiler.largest_batch(*bound)] * len(self._here) for bound in bounds]
        return [[int(size) for size in row] for row in self._of_all(found)]

    def models(
        self, large: list[list[int]], micro: list[list[int]] | None
    ) -> tuple[list[TimeModel], list[list[int | None]]]:
        """Return time models of all processes, by resolution, and the batches that fit.

        The batches are [resolution][worker]; None if the memory of whole batches was not measured
        or a worker has several processes.
        """
        config, found = self.config, []
        for number, resolution in enumerate(config.resolutions):
            largest, at_once = max(self._of_process(large[number])), [None] * len(self._here)
            if micro is not None:
                largest = max(largest, _largest_of(config, large[number], number))
                sizes = (micro[number][worker] for worker in self._here)
                at_once = [size if size < largest else None for size in sizes]
            measure = partial(self.profiler.profile, resolution, largest)
            try:
                profiles = {size: measure(size) for size in dict.fromkeys(at_once)}
            except RuntimeError as error:
                must = f"large_batch_size must fit into memory{px(resolution, ' at ')}"
                got = f"{largest}: set --micro-batch-size auto"
                require(not is_short_of_memory(error), must, got)
                raise
            whole = profiles.get(None)
            fits = whole.memory.fits() if whole and whole.memory else -1
            own = (profiles[size] for size in at_once)
            found.append([(*(getattr(p, name) for name in _OF_MODELS), fits) for p in own])
        models, all_fit = [], []
        for rows, row in zip(self._of_all(found), large, strict=True):
            *columns, fits = np.array(rows).T
            batch = min(self._of_process(row))
            models.append(equal_but_for_noise(TimeModel(*columns), batch))
            told = not self._islands.several
            all_fit.append([int(n) if told and n >= 0 else None for n in fits[: config.workers]])
        return models, all_fit

    def _of_process(self, row: Sequence[int]) -> list[int]:
        """Return a process's equal part of each worker's batch, rounded up."""
        return [-(-size // n) for size, n in zip(row, self._islands.sizes, strict=True)]

    def _of_all(self, values: list[list[Any]]) -> list[list[Any]]:
        """Return the values of all processes, [resolution][process], from those here."""
        accelerator = self.accelerator
        if accelerator.num_processes == 1:
            return values
        # As integers: not every device has float64.
        here = torch.tensor(values, dtype=torch.float64).view(torch.int64).to(accelerator.device)
        rows = accelerator.gather(here.transpose(0, 1).contiguous())
        # A dedicated server, rank 0, has no worker.
        rows = rows.cpu().view(torch.float64)
        return rows[int(self.config.dedicated_server) :].transpose(0, 1).tolist()


def _largest_of(config: RunConfig, row: Sequence[int], number: int) -> int:
    """Return the most that a worker may have in a step; `row`: large batches at a resolution."""
    if sizes := config.local_batch_sizes:
        if len(sizes) == config.workers:  # they hold for all resolutions
            sizes = sizes * len(config.resolutions)
        row = for_workers(config, "local_batch_sizes", sizes)[number]
    if shares_global_batch(config):
        return config.global_batch_size or sum(row)
    return max(row)


def equal_but_for_noise(model: TimeModel, batch: int) -> TimeModel:
    """Return the mean model for all workers if step times at `batch` differ only by noise."""
    times, workers = model.time(batch), len(model)
    if times.max() > (1 + _SAME_MACHINE) * times.min():
        return model
    means = (sum(getattr(model, name).tolist()) / workers for name in _OF_MODELS)
    return TimeModel.of(TimeModel(*means), workers)
