"""From a config to what its run trains with: data, stages, model and a plan per resolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.errors import SettingError
from dbsl.base.words import plural
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.config.settings import RunConfig, takes_joint_steps
from dbsl.data.augment import Mixing
from dbsl.data.sources import TrainingData
from dbsl.loss import Figures, LossFunction, LossOf, figure_names, with_figures
from dbsl.model import build_model, check_patches, check_sides, load_initial, try_out
from dbsl.plan.follow import PlanMaker, Planner
from dbsl.plan.ledger import Members, TurnSampler
from dbsl.plan.machines import Workers
from dbsl.plan.solve import check_parts, count_workers
from dbsl.plan.stages import (
    Stage,
    default_milestones,
    default_warmup,
    make_stages,
    stage_at,
    unused_resolutions,
)
from dbsl.plan.text import with_notes
from dbsl.plan.types import Plan
from dbsl.profile.memory import give_back
from dbsl.run.accelerator import nodes_of
from dbsl.run.evaluation import further_sources
from dbsl.run.replaced import Replaced
from dbsl.run.training import ConfigT, Run
from dbsl.run.workers import know_workers

_NOTHING = Replaced()


def prepare(
    config: ConfigT,
    accelerator: Accelerator,
    loss_function: LossFunction,
    replaced: Replaced = _NOTHING,
    extras: Extras | None = None,
) -> Run[ConfigT]:
    """Load the data, build the model, measure step times unless given, and plan the run.

    Without `extras` the settings say which. A first call of the loss function names its figures.
    """
    given = config
    config, nodes = _count_workers(config, accelerator)
    extras = Extras.of(config) if extras is None else extras
    machine = extras.first(Extra.machine, config) or Machine()
    data = replaced.load_data(config, accelerator)
    config, stages = _make_stages(config, data, accelerator)
    model, least = _build_model(config, data, replaced, accelerator)
    also = further_sources(replaced, config, data, accelerator)
    if model.input_statistics:  # what its weights were trained with
        data = data.normalised_as(model.input_statistics)
    found, loss_of = _losses(loss_function, config, accelerator)
    _check_samples(data, config, least)
    figures = figure_names(found, model, *data.example(2, config.resolutions[0]), replaced.figures)
    replaced.check_optimizer(config, model)
    builder = replaced.optimizer and partial(replaced.build_optimizer, config)
    known, config = know_workers(config, model, data, accelerator, loss_of, builder)
    give_back(accelerator.device)  # what measuring took
    _check_micro_batches(known, least)
    maker = PlanMaker(config, known, len(data.train), least)
    plans = _first_plans(config, maker, known, len(data.train), accelerator)
    rounds = rounds_of_epoch(plans, config)
    mixing = _make_mixing(config, data)
    config = replace(config, small_batch_size=maker.small_batch_size())
    _, loss_of = _losses(loss_function, config, accelerator)  # the config is complete now
    blocks = getattr(data.train, "blocks", None)  # your own data may not know of them
    sampler = TurnSampler(config, len(data.train), rounds, least, blocks)
    run = Run(
        config=config,
        data=data,
        stages=stages,
        model=model,
        plans=plans,
        planner=make_planner(maker, known, plans, stages, sampler),
        known=known,
        sampler=sampler,
        machine=machine,
        mixing=mixing,
        loss_of=loss_of,
        build_optimizer=partial(replaced.build_optimizer, config),
        default_workers=given.workers is None and accelerator.num_processes == 1,
        default_resolutions=given.resolutions is None or "resolutions" in given.resolved,
        nodes=nodes,
        figures=figures,
        also=also,
        extras=extras,
    )
    return run


def _losses(
    loss_function: LossFunction, config: RunConfig, accelerator: Accelerator
) -> tuple[Callable[..., tuple[Tensor, Figures]], LossOf]:
    """Return what gives the loss and its figures, and what gives the loss, in the precision."""

    def found(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Figures]:
        with accelerator.autocast():
            return with_figures(loss_function(model, images, labels, config))

    @wraps(loss_function)  # whose text step times are kept by
    def loss_of(*batch: Any) -> Tensor:
        return found(*batch)[0]

    return found, loss_of


def _count_workers(
    config: RunConfig, accelerator: Accelerator
) -> tuple[RunConfig, tuple[int, ...]]:
    """Return the config with its workers, small ones among them, and the node of each process."""
    workers, small_workers = count_workers(
        accelerator.num_processes,
        workers=config.workers,
        small_ratio=config.small_ratio,
        small_workers=config.small_workers,
        local_batch_sizes=config.local_batch_sizes,
        dedicated_server=config.dedicated_server,
    )
    _check_processes(config, accelerator)
    return replace(config, workers=workers, small_workers=small_workers), nodes_of(accelerator)


def _make_mixing(config: RunConfig, data: TrainingData) -> Mixing | None:
    if not config.mixes:
        return None
    ends = config.mixing.get("cutmix_minmax")
    for side in config.resolutions if ends else ():
        if int(side * ends[0]) == int(side * ends[1]):
            raise SettingError(
                f"mixup_kwargs cutmix_minmax must be a pixel or more apart at {side} px, got "
                f"{','.join(map(str, ends))}"
            )
    return Mixing(
        config.mixup,
        config.cutmix,
        num_classes=data.num_classes,
        seed=config.seed,
        **config.mixing,
    )


def _first_plans(
    config: RunConfig, maker: PlanMaker, known: Workers, samples: int, accelerator: Accelerator
) -> dict[int, Plan]:
    """Return the plan that each resolution starts with."""
    plans = {r: maker.first(r, accelerator.print) for r in config.resolutions}
    if config.sync_batch_norm:
        for plan in plans.values():
            check_parts(
                *(samples, plan.global_batch_size, config.workers),
                least=maker.least,
                drop_last=config.drop_last,
            )
    return {resolution: with_notes(plan, known, resolution) for resolution, plan in plans.items()}


def _make_stages(
    config: RunConfig, data: TrainingData, accelerator: Accelerator
) -> tuple[RunConfig, tuple[Stage, ...]]:
    """Return the config with its schedule complete, and the stages."""
    asked_for = config.resolutions is not None and "resolutions" not in config.resolved
    milestones, warmup = config.lr_milestones, config.warmup_epochs
    config = replace(
        config,
        resolutions=tuple(config.resolutions or data.resolutions),
        lr_milestones=(
            default_milestones(config.epochs) if milestones is None else tuple(milestones)
        ),
        warmup_epochs=default_warmup(config.epochs) if warmup is None else warmup,
    )
    stages = make_stages(
        config.epochs,
        config.resolutions,
        schedule=config.schedule,
        dropout=config.dropout,
        learning_rate=config.lr,
        milestones=config.lr_milestones,
        gamma=config.lr_gamma if config.lr_schedule == "step" else 1.0,
    )
    unused = unused_resolutions(stages, config.resolutions, config.schedule)
    if unused and asked_for:
        accelerator.print(f"warning: {unused}")
    return config, tuple(stages)


def _build_model(
    config: RunConfig, data: TrainingData, replaced: Replaced, accelerator: Accelerator
) -> tuple[nn.Module, int]:
    """Return the model on the device, your own or timm's, and the fewest samples it trains on."""
    if replaced.model is not None:
        model = replaced.build(config, data, accelerator)
        least, _ = try_out(model, data.example(1, config.resolutions[0])[0])
        return model, least
    model = build_model(
        config.model,
        data.num_classes,
        final_resolution=config.resolutions[-1],
        resolutions=config.resolutions,
        pretrained=config.pretrained,
        seed=config.seed,
        say=accelerator.print,
        settings=config.model_settings,
    ).to(accelerator.device, memory_format=torch.channels_last)
    check_patches(model, config.resolutions)
    least = check_sides(config.model, model, data, config.resolutions)
    if config.initial_checkpoint is not None:
        load_initial(model, config.initial_checkpoint, accelerator.print)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
        except (AttributeError, AssertionError) as error:
            raise SettingError(
                f"grad_checkpointing must be false with {config.model}, which does not know it"
            ) from error
    return model, least


def make_planner(
    maker: PlanMaker,
    known: Workers,
    plans: Mapping[int, Plan],
    stages: Sequence[Stage],
    sampler: TurnSampler,
) -> Planner:
    """Return what gives each epoch its plan, of a run with these plans at the start."""
    config = sampler.config
    return Planner(
        plans,
        lambda epoch: stage_at(stages, epoch).resolution,
        known.models,
        members=Members(config.workers, sampler.rounds),
        balance=config.balance,
        every=config.balance_every or sampler.rounds,
        maker=maker,
        sampler=sampler,
    )


def rounds_of_epoch(plans: Mapping[int, Plan], config: RunConfig) -> int:
    """Return the rounds of an epoch: as configured, or a round for each push of gradients."""
    steps = {p.workers[0].steps for p in plans.values() if p.global_batch_size is not None}
    if config.push != "gradients":
        if steps and config.rounds_per_epoch > min(steps):
            raise SettingError(
                f"rounds_per_epoch must be at most the {min(steps)} joint steps of an epoch, "
                f"got {config.rounds_per_epoch}"
            )
        return config.rounds_per_epoch
    if len(steps) > 1:
        sizes = ", ".join(str(plan.global_batch_size) for plan in plans.values())
        raise SettingError(
            f"global_batch_size must be one for all resolutions with push gradients, got {sizes}"
        )
    return -(-steps.pop() // config.push_every)


# --- what a run must meet once launch, data, workers and plans are known


def _check_processes(config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``SettingError`` for a setting that goes with another number of processes."""
    processes = accelerator.num_processes
    if config.wire != "float32" and processes == 1:
        raise SettingError(
            f"wire must be float32 in one process, where nothing is sent, got {config.wire}"
        )
    if config.sync_batch_norm and (processes == 1 or accelerator.device.type != "cuda"):
        raise SettingError(
            f"sync_batch_norm must be false except with a process per worker on CUDA devices, got "
            f"true in {processes} processes on {accelerator.device.type}"
        )


def _check_micro_batches(known: Workers, least: int) -> None:
    """Raise ``SettingError`` for micro-batches smaller than `least` samples."""
    sizes = [size for row in (known.micro_batch_sizes or {}).values() for size in row]
    if sizes and min(sizes) < least:
        raise SettingError(
            f"micro_batch_size must be at least {least}, since batch norm sees one value a channel "
            f"of a single sample, got {min(sizes)}"
        )


def _check_samples(data: TrainingData, config: RunConfig, least: int) -> None:
    """Raise ``SettingError`` unless each worker can have `least` samples in each round."""
    samples = len(data.train)
    rounds = 1 if takes_joint_steps(config) else config.rounds_per_epoch
    needed = config.workers * rounds * least
    if samples < needed:
        why = ", whose batch norm needs 2 at a time" if least > 1 else ""
        raise SettingError(
            f"dataset must have at least {needed} training {data.unit}s for {config.workers} "
            f"workers in {plural(rounds, 'round')} an epoch{why}, got {samples}: lower --workers "
            f"(--nproc-per-node, --num_processes) or --rounds-per-epoch, or add {data.unit}s"
        )
