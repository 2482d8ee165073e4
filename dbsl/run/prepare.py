"""From settings, and what a script gives in place of them, to all that a run trains with."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn

from dbsl.base.errors import SettingError, plural
from dbsl.base.seeds import stream_seed
from dbsl.cluster.formats import check_rank, trained_shapes
from dbsl.cluster.merges import MergeRule
from dbsl.config.complete import says_unlike
from dbsl.config.fields import Role, refuse, with_role
from dbsl.config.hooks import Extra, Extras, Machine
from dbsl.config.image_settings import ImageConfig
from dbsl.config.settings import (
    NO_SIDE,
    RunConfig,
    steps_of_push,
    takes_joint_steps,
    wire_of,
    workers_of,
)
from dbsl.data.dataset import load_data
from dbsl.data.sources import Source, TrainingData, as_source
from dbsl.data.transforms import Mixing
from dbsl.loss import Figures, LossFunction, figure_names, with_figures
from dbsl.model import (
    batch_norms,
    build_model,
    check_sides,
    count_once,
    load_initial,
    try_out,
)
from dbsl.optimizer import build_optimizer, join_optimizers, keep_ratios
from dbsl.plan.follow import PlanMaker, Planner
from dbsl.plan.islands import Islands
from dbsl.plan.ledger import Members, TurnSampler
from dbsl.plan.machines import KnownWorkers
from dbsl.plan.sampler import Order
from dbsl.plan.solve import round_half_up
from dbsl.plan.stages import Stage, default_milestones, make_stages, stage_at, unused_resolutions
from dbsl.plan.text import with_notes
from dbsl.plan.types import Plan
from dbsl.profile.memory import give_back
from dbsl.run.accelerator import first_on_node, nodes_of
from dbsl.run.evaluation import OF_EVALUATIONS
from dbsl.run.training import ConfigT, Run
from dbsl.run.workers import know_workers

ModelOrBuilder = nn.Module | Callable[[], nn.Module]
OptimizerBuilder = Callable[
    [nn.Module, RunConfig], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]

# Settings that say which data, model or optimizer; with your own they have nothing to say.
_OF_DATA = (*(f.name for f in fields(ImageConfig) if f.name != "dataset"), "resolutions")
# A function may read momentum and weight_decay of the settings that it is given.
_OF_OPTIMIZER = ("opt_kwargs",)
_OF_MERGE = ("merge", "push", "wire")


@dataclass(frozen=True)
class Replaced:
    """What a script gives in place of what its settings name; see `dbsl.open.open_session`."""

    data: TrainingData | None = None
    model: ModelOrBuilder | None = None
    optimizer: OptimizerBuilder | None = None
    merge: MergeRule | None = None
    evaluate_also: Mapping[str, Any] | None = None
    figures: Sequence[str] = ()

    def named(self, given: RunConfig) -> RunConfig:
        """Return the settings with the names of what is replaced; refuse those that name others."""
        if self.data is not None:
            names = (*TrainingData.__annotations__, "on", "transform", "example")
            if missing := [name for name in names if not hasattr(self.data, name)]:
                raise SettingError(
                    "data must have what dbsl.data.sources.TrainingData names, got "
                    f"{type(self.data).__name__} without {missing[0]!r}"
                )
            sources = self.data.train, self.data.evaluation
            for source, name in itertools.product(sources, ("__len__", "batches", "bad")):
                must = f"sources of data must have {name}, as dbsl.data.sources.Source says"
                refuse([(not hasattr(source, name), must, type(source).__name__)])
            if self.model is None:
                raise SettingError("model must be given with your own data, got none")
            void = (*_OF_DATA, *with_role(type(given), Role.DATA))
            given = _named(given, "dataset", self.data.name, void)
        of_model = with_role(type(given), Role.MODEL)
        for setting, value, kind, void in (
            ("model", self.model, "module or a function that builds one", of_model),
            ("optimizer", self.optimizer, "function of model and settings", _OF_OPTIMIZER),
        ):
            if value is None:
                continue
            if not callable(value):
                raise SettingError(f"{setting} must be a {kind}, got {type(value).__name__}")
            called = None if isinstance(value, nn.Module) else getattr(value, "__name__", None)
            given = _named(given, setting, (called or type(value).__name__).strip("<>"), void)
        if self.model is not None and "layer_decay" in given.optimizer_settings:
            raise SettingError("opt_kwargs must leave out layer_decay with your own model")
        if self.merge is not None:
            _refuse_others(given, _OF_MERGE, "merge")
            if given.sync == "step":
                raise SettingError("sync must not be step with your own merge, got step")
        return given

    def load_data(self, config: RunConfig, accelerator: Accelerator) -> TrainingData:
        """Return your own data, or the images that the settings name."""
        if self.data:
            return self.data.on(accelerator.device)
        if config.resolutions == (NO_SIDE,):
            raise SettingError(f"resolutions must be positive for images, got {NO_SIDE}")
        with first_on_node(accelerator):  # one process decodes, the others read its cache
            return load_data(config, config.seed, accelerator.device)

    def build_model(
        self, config: RunConfig, data: TrainingData, accelerator: Accelerator
    ) -> nn.Module:
        """Return your own model on the device, with the same weights in all processes."""
        model = self.model
        if not isinstance(model, nn.Module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stream_seed(config.seed, "initial weights"))
                model = model()
        if not isinstance(model, nn.Module):
            raise SettingError(f"model must build a module, got {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            name = type(model).__name__
            raise SettingError(f"model must have parameters to train, got {name} without any")
        inputs, _ = data.example(2, config.resolutions[-1])
        channels_last = inputs.dim() == 4 and inputs.stride(1) == 1 < inputs.shape[1]
        layout = torch.channels_last if channels_last else torch.preserve_format
        model = model.to(accelerator.device, memory_format=layout)
        with torch.no_grad():
            for value in model.state_dict().values():  # rank 0's, whatever the others built
                value.copy_(broadcast(value.contiguous()))
        # What `dbsl.model.build_model` notes of timm's models.
        model.created_with, model.small_stem, model.input_statistics = None, False, None
        model.head_dropouts = None
        try_out(model, inputs, type(model).__name__, data.num_classes, several=True)
        return model

    def build_optimizer(self, config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return what steps on a model; its groups keep their rates in proportion to `lr`."""
        if self.optimizer is not None:
            built = join_optimizers(self.optimizer(model, config))
        else:
            rates = (config.lr, config.momentum, config.weight_decay)
            built = build_optimizer(config.optimizer, model, *rates, **config.optimizer_settings)
        return keep_ratios(built, config.lr)

    def check_optimizer(self, config: RunConfig, model: nn.Module) -> None:
        """Refuse an optimizer that cannot take this run's steps.

        Building may freeze parameters, which all that follows is to know.
        """
        optimizer = self.build_optimizer(config, model)
        frozen = not any(p.requires_grad for p in model.parameters())
        text = "optimizer must leave parameters that are trained"
        refuse([(frozen, text, f"all frozen by {config.optimizer}")])
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise SettingError(
                "optimizer must have all parameters that are trained (requires_grad_(False) "
                f"freezes others), got none for {left[0]}{more}"
            )

    def further_sources(
        self, config: RunConfig, data: TrainingData, accelerator: Accelerator
    ) -> dict[str, Source]:
        """Return the further evaluation sets, by name."""
        sources = {}
        for name, given in (self.evaluate_also or {}).items():
            text = f"evaluate_also must have words for names, not {' or '.join(OF_EVALUATIONS)}"
            taken = not re.fullmatch(r"\w+", str(name)) or name in OF_EVALUATIONS
            refuse([(taken, text, repr(name))])
            if isinstance(given, str | Path):
                text = "evaluate_also must have sources or datasets of tensors with your own data"
                refuse([(self.data is not None, text, given)])
                cut = dict.fromkeys(("train_samples", "eval_samples", "holdout"))
                own = replace(config, **cut, dataset=str(given))
                with first_on_node(accelerator):
                    given = _load_further(name, own, accelerator.device)
            sources[name] = as_source(given, data, config.resolutions[-1], f"evaluate_also {name}")
        return sources


def _refuse_others(given: RunConfig, names: Sequence[str], own: str) -> None:
    defaults = {field.name: field.default for field in fields(given)}
    for name in names:
        if (value := getattr(given, name)) != defaults[name]:
            raise SettingError(f"{name} must be left out with your own {own}, got {value}")


def _named(given: RunConfig, setting: str, name: str, void: Sequence[str]) -> RunConfig:
    own = "data" if setting == "dataset" else setting
    _refuse_others(given, void, own)
    if (value := getattr(given, setting)) not in (getattr(type(given), setting), name):
        raise SettingError(f"{setting} must be left out or {name} with your own {own}, got {value}")
    return replace(given, **{setting: name})


def _load_further(name: str, config: ConfigT, device: torch.device) -> TrainingData:
    """Load a further evaluation set, whose columns may have names of their own."""
    given = [name for name in ("image_column", "label_column") if getattr(config, name)]
    try:
        return load_data(config, config.seed, device, only_evaluate=True)
    except SettingError as error:
        several = [[n for n in given if n != kept] for kept in (*given[::-1], None)]
        for others in filter(None, several):
            with suppress(SettingError):
                own = replace(config, **dict.fromkeys(others))
                return load_data(own, config.seed, device, only_evaluate=True)
        raise SettingError(f"{error} (evaluate_also {name})") from None


# --- a run


def prepare(
    given: ConfigT,
    accelerator: Accelerator,
    loss_function: LossFunction,
    replaced: Replaced | None = None,
    extras: Extras | None = None,
) -> Run[ConfigT]:
    """Load the data, build the model, measure step times unless given, and plan the run."""
    nodes, processes = nodes_of(accelerator), accelerator.num_processes
    given = settle_islands(given, processes, nodes)
    config = count_workers(given, processes)
    replaced, extras = replaced or Replaced(), extras or Extras.of(config)
    machine = extras.first(Extra.machine, config, accelerator) or Machine()
    data = replaced.load_data(config, accelerator)
    config, stages = _make_stages(config, data, accelerator)
    model, least = _build_model(config, data, replaced, accelerator)
    cumulative = any(n.momentum is None and n.track_running_stats for n in batch_norms(model))
    text = "model must have batch norm whose statistics have a momentum, and can be merged"
    refuse([(cumulative, text, "momentum=None")])
    also = replaced.further_sources(config, data, accelerator)
    if model.input_statistics:  # what its weights were trained with
        data = data.normalised_as(model.input_statistics)

    def found(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Figures]:
        with accelerator.autocast():  # `config` as it is at the call: complete, once it trains
            return with_figures(loss_function(model, images, labels, config))

    @wraps(loss_function)  # whose text step times are kept by
    def loss_of(*batch: Any) -> Tensor:
        return found(*batch)[0]

    _check_samples(data, config, least)
    joint = processes > 1 and (config.sync == "step" or Islands.of(config).several)
    example = data.example(2, config.resolutions[0])
    replaced.check_optimizer(config, model)  # it may freeze parameters
    figures = figure_names(found, model, *example, replaced.figures, joint=joint)
    check_rank(wire_of(config), trained_shapes(model), config.wire)
    build = replaced.optimizer and partial(replaced.build_optimizer, config)
    known, config = know_workers(config, model, data, accelerator, loss_of, build, least)
    give_back(accelerator.device)  # what measuring took
    blocks = getattr(data.train, "blocks", None)  # your own data may not know of them
    how = {"blocks": blocks, "say": accelerator.print}
    config, plans, planner, sampler = plan_run(config, known, stages, len(data.train), least, **how)
    return Run(
        config=config,
        data=data,
        stages=stages,
        model=model,
        plans=plans,
        planner=planner,
        known=known,
        sampler=sampler,
        machine=machine,
        mixing=_make_mixing(config, data),
        loss_of=loss_of,
        build_optimizer=partial(replaced.build_optimizer, config),
        default_workers=given.workers is None and processes == 1,
        nodes=nodes,
        islands=Islands.of(config),
        place=_place(config, accelerator),
        figures=figures,
        also=also,
        extras=extras,
    )


def settle_islands(config: ConfigT, processes: int, nodes: Sequence[int]) -> ConfigT:
    """Return the config with the processes of each worker by number; None: each has one.

    `nodes` has the node of each process.
    """
    given, served = config.worker_processes, config.dedicated_server
    if given is None:
        return config
    alone, total, less = processes == 1, processes - served, " less the dedicated server" * served
    if given == "node":
        sizes = tuple(Counter(nodes[served:]).values())
    elif len(given) == 1:
        sizes = given * (_simulated_workers(config) if alone else max(1, total // given[0]))
    else:
        sizes = given
    several, workers, unlike = max(sizes, default=1) > 1, len(sizes), sum(sizes) != total
    numbers = "worker_processes must be numbers in one process"
    added = f"worker_processes must add up to the {total} processes{less}"
    number = f"workers must equal those of worker_processes ({workers})"
    one = " with several processes a worker"
    refuse(
        [
            (alone and given == "node", numbers, given),
            (not alone and unlike, added, given),
            (config.workers not in (None, workers), number, config.workers),
            (several and config.sync != "bsp", f"sync must be bsp{one}", config.sync),
            (several and config.push != "weights", f"push must be weights{one}", config.push),
            *(
                (several and getattr(config, n) == "auto", f"{n} must not be auto{one}", "auto")
                for n in ("large_batch_size", "micro_batch_size")
            ),
        ]
    )
    return replace(config, worker_processes=sizes if several else None, workers=workers)


def _place(config: RunConfig, accelerator: Accelerator) -> int | None:
    """Return this process's place among those of its worker; None: it takes the whole batch."""
    islands = Islands.of(config)
    if not islands.several or accelerator.num_processes == 1:
        return None
    return islands.place(accelerator.process_index - config.dedicated_server)


def count_workers(config: ConfigT, processes: int) -> ConfigT:
    """Return the config with its number of workers and of small workers among them.

    One process holds all workers; of several, each is one, but for a dedicated server, or a part of
    one. Unless told otherwise one process has 4 workers where something is said of unlike ones,
    else 1: on equal samples several workers cost accuracy. A ratio above 0 makes at least one small
    worker.
    """
    alone, small_workers, ratio = processes == 1, config.small_workers, config.small_ratio
    total = workers_of(config, processes) or _simulated_workers(config)
    if small_workers is None:
        small_workers = max(1, round_half_up(ratio * total)) if ratio > 0 else 0
    other, less = config.workers not in (None, total), " less the dedicated server"
    number = f"workers must equal the number of processes{less * config.dedicated_server} ({total})"
    served = "dedicated_server must have at least 2 processes"
    most = f"small_workers must be at most the workers ({total})"
    sent = "wire must be float32 with one worker, which sends nothing"
    wired = config.wire != "float32"
    real = "wire must not be powersgd with simulated workers: it needs real processes"
    refuse(
        [
            (other, number, config.workers),
            (alone and config.dedicated_server, served, processes),
            (small_workers > total, most, small_workers),
            (alone and total == 1 and wired, sent, config.wire),
            (alone and wire_of(config).rank, real, config.wire),
        ]
    )
    return replace(config, workers=total, small_workers=small_workers)


def _simulated_workers(config: RunConfig) -> int:
    return config.workers or (4 if says_unlike(config) else 1)


def _make_stages(
    config: ConfigT, data: TrainingData, accelerator: Accelerator
) -> tuple[ConfigT, tuple[Stage, ...]]:
    asked_for = config.resolutions is not None and "resolutions" not in config.resolved
    epochs, milestones, warmup = config.epochs, config.lr_milestones, config.warmup_epochs
    config = replace(
        config,
        resolutions=tuple(config.resolutions or data.resolutions),
        lr_milestones=tuple(default_milestones(epochs) if milestones is None else milestones),
        warmup_epochs=min(epochs / 10, 2.0) if warmup is None else warmup,
    )
    stages = make_stages(
        epochs,
        config.resolutions,
        schedule=config.schedule,
        dropout=config.dropout,
        learning_rate=config.lr,
        milestones=config.lr_milestones,
        gamma=config.lr_gamma if config.lr_schedule == "step" else 1.0,
    )
    unused = unused_resolutions(stages, config.resolutions, config.schedule)
    if unused and asked_for:
        # With more epochs a resumed run has some there, and goes by what was measured at the start.
        more = "; measured all the same, for a resume with more epochs" * (config.slope is None)
        accelerator.print(f"warning: {unused}{more}")
    return config, tuple(stages)


def _build_model(
    config: RunConfig, data: TrainingData, replaced: Replaced, accelerator: Accelerator
) -> tuple[nn.Module, int]:
    """Return the model on the device, your own or timm's, and the fewest samples it trains on."""
    if replaced.model is not None:
        model = replaced.build_model(config, data, accelerator)
        inputs, _ = data.example(1, config.resolutions[0])
        return model, try_out(model, inputs, type(model).__name__, data.num_classes, several=True)
    model = build_model(
        config.model,
        data.num_classes,
        config.resolutions,
        pretrained=config.pretrained,
        seed=config.seed,
        say=accelerator.print,
        settings=config.model_settings,
    ).to(accelerator.device, memory_format=torch.channels_last)
    least = check_sides(config.model, model, data, config.resolutions)
    if config.initial_checkpoint is not None:
        load_initial(model, config.initial_checkpoint, accelerator.print)
    if config.grad_checkpointing:
        try:
            model.set_grad_checkpointing()
            count_once(model)
        except (AttributeError, AssertionError) as error:
            raise SettingError(
                f"grad_checkpointing must be false with {config.model}, which does not know it"
            ) from error
    return model, least


def _check_samples(data: TrainingData, config: RunConfig, least: int) -> None:
    samples = len(data.train)
    rounds = 1 if takes_joint_steps(config) else config.rounds_per_epoch
    if samples < (needed := config.workers * rounds * least):
        why = ", whose batch norm needs 2 at a time" if least > 1 else ""
        raise SettingError(
            f"dataset must have at least {needed} training {data.unit}s for {config.workers} "
            f"workers in {plural(rounds, 'round')} an epoch{why}, got {samples}: lower --workers "
            f"(--nproc-per-node, --num_processes) or --rounds-per-epoch, or add {data.unit}s"
        )


def plan_run(
    config: ConfigT,
    known: KnownWorkers,
    stages: Sequence[Stage],
    samples: int,
    least: int,
    *,
    blocks: Order | None,
    say: Callable[[str], object],
) -> tuple[ConfigT, dict[int, Plan], Planner, TurnSampler]:
    """Return the config with its small batches, the first plan by resolution, and what follows it.

    `least` is the fewest samples that the model trains on, `blocks` draws the order of epochs.
    """
    fewest = min(itertools.chain(*(known.micro_batch_sizes or {}).values()), default=least)
    why = "since batch norm sees one value a channel of a single sample"
    refuse([(fewest < least, f"micro_batch_size must be at least {least}, {why}", fewest)])
    maker = PlanMaker(config, known, samples, least)
    plans = {r: with_notes(maker.first(r, say), known, r) for r in config.resolutions}
    rounds = _rounds_of_epoch(plans, config)
    config = replace(config, small_batch_size=maker.small_batch_size())
    sampler = TurnSampler(config, samples, rounds, least, blocks)
    planner = Planner(
        plans,
        lambda epoch: stage_at(stages, epoch).resolution,
        known.models,
        members=Members(config.workers, rounds),
        balance=config.balance,
        every=config.balance_every or rounds,
        maker=maker,
        sampler=sampler,
    )
    return config, plans, planner, sampler


def _rounds_of_epoch(plans: Mapping[int, Plan], config: RunConfig) -> int:
    """Return the rounds of an epoch: as configured, or a round for each push of gradients."""
    steps = {p.workers[0].steps for p in plans.values() if p.global_batch_size is not None}
    pushes, rounds = steps_of_push(config.push), config.rounds_per_epoch
    fewest, sizes = min(steps, default=rounds), (str(p.global_batch_size) for p in plans.values())
    most = f"rounds_per_epoch must be at most the {fewest} joint steps of an epoch"
    unlike = "global_batch_size must be one for all resolutions with push gradients"
    refuse(
        [
            (not pushes and rounds > fewest, most, rounds),
            (pushes and len(steps) > 1, unlike, ", ".join(sizes)),
        ]
    )
    return -(-fewest // pushes) if pushes else rounds


def _make_mixing(config: RunConfig, data: TrainingData) -> Mixing | None:
    if not config.mixes:
        return None
    classes = data.num_classes
    return Mixing(config.mixup, config.cutmix, num_classes=classes, seed=config.seed)
