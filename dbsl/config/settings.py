"""Settings of a run by group, each with its help, and what does not go with what."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import lt
from typing import Annotated, Any, Literal, NamedTuple

from dbsl.base.errors import SettingError, as_given, require
from dbsl.config.fields import (
    NO_FLAG,
    PAIRS,
    Amount,
    BelowOne,
    Choice,
    Count,
    Excludes,
    Needs,
    Number,
    Positive,
    Role,
    Share,
    Within,
    check_fields,
    check_needs,
    in_words,
    parse_kwargs,
)
from dbsl.config.image_settings import ImageConfig, check_images

Compile = Literal["auto", "cudagraphs"] | bool
Precision = Literal["auto", "no", "bf16", "fp16"]
Rounding = Literal["round", "truncate"]
UpdateFactor = Literal["data", "sqrt", "none"]
PUSH = Choice(weights={}, gradients={"STEPS": Count})
MERGE = Choice(mean={}, delta={"LR": Positive, "MOMENTUM": BelowOne}, ratio={}, half={})
BALANCE = Choice(none={}, dynamic={"ROUNDS": Count}, dbs={"ROUNDS": Count})
LR_SCHEDULE = Choice(step={}, cosine={"LAST": Amount})
Sync = Literal["bsp", "ssp", "asp", "step"]
Schedule = Literal["cyclic", "progressive", "fixed"]
Balance = Literal["none", "dynamic", "dbs"]
ResetMomentum = Literal["never", "stage", "round"]

CHECKPOINTS = "checkpoints"  # in a run folder
CHECKPOINT = re.compile(r"(epoch|save)-\d+")  # names of the folders in it
AGAIN = "again"  # --profile of a command that measures anew
NO_SIDE = 0  # the only resolution of inputs that are no images


def check_resolutions(resolutions: Sequence[int]) -> None:
    """Refuse what is no ascending sides; `NO_SIDE` alone is for whoever loads images to refuse."""
    if tuple(resolutions) != (NO_SIDE,):
        Within(1, 8192, order=lt).check("resolutions", tuple(resolutions))


_Times = Annotated[tuple[float, ...] | None, Role.PLAN | Role.WORKERS]
_Sizes = Annotated[tuple[Count, ...] | Literal["auto"] | None, Role.WORKERS]
_JOINTLY = Needs(sync="step") | Needs(push="gradients")
_SHARED = ", where all workers share each global batch (see local_batch_sizes)"
_NO_JOINTLY = Excludes(sync="step", why=_SHARED) | Excludes(push="gradients")
_SMALL = Needs("small_ratio", new=True) | Needs("small_workers")


@dataclass(frozen=True)
class TrainingConfig(ImageConfig):
    """What is trained, in which batches and for how long, and how it is averaged."""

    # --- mixing
    mixup: Amount = 0.0  # alpha of mixup, such as 0.2; 0: off
    # alpha of CutMix, such as 1.0; 0: off. With --mixup too, each batch gets one of the two
    cutmix: Amount = 0.0
    # --- model
    # timm model name; local-dir:FOLDER and hf-hub:USER/NAME start from the weights there
    model: str = "resnet18"
    # start from timm's pretrained weights of the model, which are downloaded once
    pretrained: bool = False
    # file of weights to start from (safetensors or torch). A classifier or stem of another size
    # starts at random. Images are normalised as a config.json next to the file says, else as for
    # timm's weights of the model; --preprocess wins
    initial_checkpoint: Annotated[str | None, Excludes("pretrained")] = None
    # more arguments of timm's model as name=value: drop_path_rate=0.1 (stochastic depth)
    # drop_block_rate=0.1 global_pool=avg bn_eps=1e-3 init_values=1e-6
    model_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # recompute activations in the backward pass: less memory, more time
    grad_checkpointing: bool = False
    # --- optimizer
    # an optimizer of timm.optim by name, such as adamw or lamb; sgd is SGD with Nesterov momentum,
    # momentum is SGD with plain momentum
    optimizer: str = "sgd"
    momentum: BelowOne = 0.9  # momentum of the optimizer, if it has one, in [0, 1)
    weight_decay: Amount = 5e-4  # weight decay; none on biases and norms
    # more arguments of timm's optimizer as name=value: eps=1e-8 betas=0.9,0.95 amsgrad=True.
    # layer_decay=0.75: each layer's learning rate is that of the layer above times this, and at
    # least layer_decay_min_scale=0.1 times the top one
    opt_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # clip the norm of all gradients to this before each optimizer step; unset: no clipping.
    # gradient_norm in metrics.jsonl is the norm before clipping
    clip_grad: Positive | None = None
    # --- workers and their batch sizes
    # workers that one process simulates in turn; unset: 1, or 4 with --small-ratio, --small-workers
    # or --local-batch-sizes. Several processes are the workers themselves
    workers: Annotated[int | None, Within(1, 65536), Role.WORKERS] = None
    # processes that form one worker, and average their gradients at every step: one number for all
    # workers, one for each (8,8,2), or node (all processes of a machine); unset: 1
    worker_processes: Annotated[
        tuple[Annotated[int, Within(1, 65536)], ...] | Literal["node"] | None, Role.FREE | Role.PLAN
    ] = None
    # share of workers that take small batches, in [0, 1]; rounded to whole workers, at least one if
    # above 0: 0.1 of 4 workers is one worker
    small_ratio: Annotated[Share, _NO_JOINTLY] = 0.0
    # number of workers that take small batches; wins over --small-ratio
    small_workers: Annotated[Number | None, Role.WORKERS | Role.PLAN, _NO_JOINTLY] = None
    # seconds that an epoch with some small batches may take, over those with large batches alone:
    # 1.05 allows 5 % more, and the small batch size is solved for that; above 1
    time_ratio: Annotated[float, Within(1, open_low=True), Role.PLAN, _SMALL] = 1.05
    # batch size of a worker, as in any training run; if some workers take small batches, that of
    # the others. One value, one per resolution, or one per resolution and worker; auto: the largest
    # that fits a CUDA GPU, elsewhere as unset; unset: up to 128
    large_batch_size: Annotated[_Sizes, Role.PLAN] = None
    # batch size of each worker, set by hand; one value per worker, or one per resolution and worker
    local_batch_sizes: Annotated[
        tuple[Count, ...] | None,
        Role.PLAN | Role.WORKERS,
        Excludes("small_ratio"),
        Excludes("small_workers"),
    ] = None
    # with --sync step or --push gradients: samples of a step over all workers together; unset: the
    # sum of their batch sizes
    global_batch_size: Annotated[
        Count | None,
        Role.WORKERS | Role.PLAN,
        _JOINTLY,
        Excludes("local_batch_sizes", why=", whose sum it is"),
    ] = None
    # batch size of workers with small batches; one value, or one per resolution; 0 or unset: solved
    # for --time-ratio
    small_batch_size: Annotated[tuple[Number, ...] | None, Role.PLAN | Role.WORKERS, _SMALL] = None
    # gradient accumulation: most samples of a worker on its device at once; a step sums the
    # gradients of such parts. As many values as --large-batch-size may have; auto: what fits a CUDA
    # GPU; unset: the whole batch. Batch norm and mixing see one part at a time
    micro_batch_size: Annotated[
        _Sizes,
        Excludes(compile="cudagraphs", why=", which overwrites gradients of the call before"),
    ] = None
    # smallest batch size that a computed or balanced plan gives a worker; a model with batch norm
    # wants about 8
    min_batch_size: Annotated[Count, Role.PLAN] = 2
    # step time by which batch sizes are planned: seconds of a step = slope x samples + intercept.
    # One value, one per resolution, or one per resolution and worker (with --worker-processes: and
    # process); unset: measured
    slope: Annotated[_Times, Needs("intercept")] = None
    # seconds of a step that do not depend on its samples: seconds of a step = slope x samples +
    # intercept. As many values as --slope may have; unset: measured
    intercept: Annotated[_Times, Needs("slope")] = None
    # least seconds of a step, where it was measured with the slope; no flag
    floor: _Times = field(default=None, metadata=NO_FLAG)
    # file of measured step times, written by python -m dbsl.profile --output; again: measure even
    # if the cache has them; unset: from the cache, else measured for up to 30 s (simulated: 10 s)
    profile: Annotated[str | None, Role.FREE | Role.PLAN, Excludes("slope")] = None
    # weight of a worker with small batches when weights are averaged, where a large one has 1: its
    # samples of an epoch / those of a large worker (data), the square root of that (sqrt), or 1
    # (none)
    update_factor: Annotated[UpdateFactor, Role.PLAN, _SMALL] = "data"
    # how planned batch sizes become whole numbers: to the nearest (round, as the journal paper), or
    # down (truncate, as the conference paper)
    rounding: Annotated[Rounding, Role.PLAN] = "round"
    # whether batch sizes and shares follow measured speeds: no (none), where it saves time
    # (dynamic), or by the rule of Ye et al. 2020 (dbs). They change after each epoch; with
    # dynamic:3 or dbs:3 every 3 rounds
    balance: Annotated[str, BALANCE, Role.PLAN] = "none"
    # --- averaging
    # what workers average, and when. bsp: local SGD, all average their weights after a round
    # (--rounds-per-epoch); ssp: so, but only a worker that is more than --staleness rounds ahead
    # waits; asp: so, but nobody waits; step: as DDP, gradients are averaged at every step. ssp and
    # asp survive the death of a process that was launched on its own
    sync: Annotated[Sync, Role.PLAN] = "bsp"
    # what workers send: weights after a round, or gradients to one optimizer for all; gradients:4
    # sums those of 4 steps before it sends them
    push: Annotated[
        str, PUSH, Role.PLAN, Excludes(sync="step", why=", which averages gradients itself")
    ] = "weights"
    # format of what workers send. --sync bsp takes bf16, int8, int4 or int2; --sync step takes
    # bf16, fp16 or powersgd:RANK[:STEPS], PowerSGD of that rank after STEPS steps in float32
    wire: str = "float32"
    # with --sync step or --push gradients: leave out an epoch's last samples if they do not fill a
    # global batch; otherwise an epoch's steps have equal sizes, at most the global batch
    drop_last: Annotated[bool, Role.PLAN, _JOINTLY] = False
    # with --sync ssp: rounds that a worker may be ahead of the slowest when it begins another
    staleness: Annotated[Number, Needs(sync="ssp", new=True)] = 1
    # how weights w of workers change the common weights g. With bsp, mean: g becomes their weighted
    # mean; delta:LR,MOMENTUM: Nesterov SGD moves g towards that mean (DiLoCo: delta:0.7,0.9). With
    # ssp and asp, for each w that comes, of weight f (see --update-factor), ratio: g = (g + f w) /
    # (1 + f); half: g = ((2 - f) g + f w) / 2. unset: mean or ratio
    merge: Annotated[
        str | None,
        MERGE,
        Excludes(sync="bsp", but=("mean", "delta")),
        Excludes(sync=("ssp", "asp"), but=("ratio", "half")),
        Excludes(sync="step"),
        Excludes(push="gradients"),
    ] = None
    # how often in an epoch each worker sends its weights and gets the common ones
    rounds_per_epoch: Annotated[Count, Role.PLAN, Excludes(push="gradients", why=" (see push)")] = 1
    # rank 0 averages and evaluates but does not train
    dedicated_server: Annotated[
        bool, Role.WORKERS | Role.PLAN, Excludes(sync="step", why=", which has no server")
    ] = False
    # seconds of silence after which a process counts as lost, and longest wait of one for the
    # others; with asp and ssp a process that computes is not silent
    worker_timeout: Annotated[float, Within(0, 1000000000.0, open_low=True), Role.FREE] = 1800.0
    # --- schedule
    # passes over the training data; all workers share each pass
    epochs: Annotated[int, Within(1, 10**6)] = 8
    # image sides in pixels, ascending; --schedule says when each is used, and one alone is used
    # throughout. unset: two, 3/4 of the images' side and the whole side, or 160 and 224 if images
    # differ in size
    resolutions: Annotated[tuple[int, ...] | None, Role.PLAN] = None
    # when the resolution climbs through --resolutions: in every stage of the learning rate
    # (cyclic), once in the run (progressive), or never: the last is used (fixed)
    schedule: Schedule = "cyclic"
    # dropout before the classifier, in [0, 1); one value, or one per resolution
    dropout: tuple[BelowOne, ...] = (0.0,)
    # learning rate at its highest; unset: 0.1 for SGD, else the optimizer's own (adamw 0.001)
    lr: Positive | None = None
    # how the learning rate falls: at milestones by --lr-gamma (step), along a cosine to 0 (cosine),
    # or along a cosine to LAST (cosine:1e-5)
    lr_schedule: Annotated[str, LR_SCHEDULE] = "step"
    # multiply a worker's learning rate by its batch size / the large batch size (linear), or by the
    # square root of that (sqrt)
    lr_scaling: Annotated[Literal["none", "sqrt", "linear"], _NO_JOINTLY] = "none"
    # epochs after which a new stage begins and, with --lr-schedule step, the learning rate falls;
    # unset: 4/7 and 6/7 of the run
    lr_milestones: tuple[int, ...] | None = None
    # with --lr-schedule step: factor on the learning rate at each milestone
    lr_gamma: Annotated[Positive, Needs(lr_schedule="step", new=True)] = 0.2
    # epochs in which the learning rate rises linearly from lr/100 to lr; unset: a tenth of the run,
    # at most 2
    warmup_epochs: Amount | None = None
    # when workers reset their optimizer: never, when a stage or resolution begins (stage), or
    # before each round (round)
    reset_momentum: Annotated[ResetMomentum, Excludes(push="gradients")] = "never"

    @property
    def outer(self) -> tuple[float, float]:
        """Learning rate and momentum of the server's step, with the merge rule delta."""
        given = MERGE.numbers("merge", self.merge or "delta")
        return (*given, *(0.7, 0.9)[len(given) :])

    @property
    def balance_every(self) -> int | None:
        """Rounds between two changes of the plan; None: an epoch."""
        return next(iter(BALANCE.numbers("balance", self.balance)), None)

    @property
    def min_lr(self) -> float:
        """Learning rate that the schedule ends at."""
        return next(iter(LR_SCHEDULE.numbers("lr_schedule", self.lr_schedule)), 0.0)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed."""
        return bool(self.mixup or self.cutmix)

    @property
    def model_settings(self) -> dict[str, Any]:
        """What timm's `create_model` takes besides the name and the number of classes."""
        own = {"drop_rate": "dropout", "checkpoint_path": "initial_checkpoint"}
        own |= {"pretrained": "pretrained", "num_classes": "the data", "in_chans": "the data"}
        bounds = {"drop_path_rate": Within(0, 1, open_high=True)}
        return parse_kwargs("model_kwargs", self.model_kwargs, own, bounds)

    @property
    def optimizer_settings(self) -> dict[str, Any]:
        """What the optimizer takes besides its learning rate, momentum and weight decay."""
        own = {name: name for name in ("lr", "momentum", "weight_decay")}
        bounds = {"layer_decay": Within(0, 1, open_low=True)}
        return parse_kwargs("opt_kwargs", self.opt_kwargs, own, bounds)


@dataclass(frozen=True)
class MachineConfig:
    """How a run or a study computes on its machine, and for how long."""

    # --- machine
    # seed of the split, order, weights and dropout
    seed: Annotated[int, Within(0, 2**63 - 1), Role.ORDER] = 0
    # threads of torch in each process; unset: its part of the cores, at most OMP_NUM_THREADS,
    # unless the launcher itself set that to 1
    cpu_threads: Annotated[int | None, Within(1, 1024), Role.NODE] = None
    # precision of forward passes. auto: as accelerate launch says, else bf16 if the device computes
    # it natively, else no; no: float32, with TF32 in convolutions on CUDA
    mixed_precision: Annotated[
        Precision,
        Excludes(push="gradients", but=("no", "bf16"), why=", as loss scales of fp16 would differ"),
    ] = "auto"
    # batch size of evaluation; unset: 256, on CUDA four times the largest training batch, up to
    # 2,000
    eval_batch_size: Annotated[Count | None, Role.FREE] = None
    # minutes after which the run saves and stops with status 75, as after SIGTERM; --resume goes on
    max_minutes: Annotated[Positive | None, Role.FREE] = None


@dataclass(frozen=True)
class RunConfig(MachineConfig, TrainingConfig):
    """Everything that `dbsl` reads; train.py adds what it alone reads."""

    # --- run
    # steps of a worker between two lines of its loss, speed and gradient norm in metrics.jsonl; 0:
    # no lines
    log_every: Annotated[Number, Role.FREE] = 50
    # epochs (2) or minutes (10m) between checkpoints; 0: only at the end, or when stopped
    checkpoint_every: Annotated[int | str, Role.FREE] = "10m"
    # number of newest checkpoints to keep; 0: one while the run lasts, none after it
    keep_checkpoints: Annotated[Number, Role.FREE] = 2
    # run folder or checkpoint to go on from; auto: --output-dir if it has a run, else a new run
    resume: Annotated[str | None, Role.FREE | Role.COMMAND] = None
    # print each worker's batch size and time, and stop before training
    plan_only: Annotated[bool, Role.FREE | Role.COMMAND] = False
    # rounds that are left out because loss or weights are not finite before the run ends as
    # diverged
    max_bad_rounds: Annotated[Number, Role.FREE] = 10
    # torch.compile; auto: on CUDA, if batch sizes stay; cudagraphs: record its kernels as they are
    compile: Annotated[
        Compile, Excludes("balance", why=", which changes batch sizes: each would be compiled")
    ] = "auto"
    # folder of a new run; unset: runs/<dataset>-<model>-<time>
    output_dir: Annotated[str | None, Role.FREE | Role.COMMAND] = None
    # what a run found out, as its config.yaml has it; no flag
    found: Annotated[Mapping[str, Any], Role.FREE | Role.COMMAND | Role.NODE] = field(
        default_factory=dict, metadata=NO_FLAG
    )

    def __post_init__(self) -> None:
        check_fields(self)
        parse_interval(self.checkpoint_every)
        if self.resolutions is not None:
            check_resolutions(self.resolutions)
        check_images(self)
        self._check_together()

    def _check_together(self) -> None:
        """Refuse what does not go together where the fields' types do not say so."""
        _ = self.model_settings, self.optimizer_settings  # they refuse
        lr, warmup, weights = self.lr or math.inf, self.warmup_epochs or 0, self.initial_checkpoint
        require(self.min_lr <= lr, f"lr_schedule must end at most at lr ({lr:g})", self.min_lr)
        most = f"warmup_epochs must be at most the {self.epochs} epochs of the run"
        require(warmup <= self.epochs, most, warmup)
        text = "large_batch_size must not be auto with micro_batch_size, with which any batch fits"
        require(self.micro_batch_size is None or self.large_batch_size != "auto", text, "auto")
        text = "initial_checkpoint must be unset with a model of other weights"
        require(not weights or ":" not in self.model, text, weights)
        rounds, every = self.rounds_per_epoch, self.balance_every or 0
        text = f"balance must have whole epochs of {rounds} rounds with sync {self.sync}"
        require(not meets_at_server(self.sync) or every % rounds == 0, text, every)
        # A gradient that overflowed would stay in the remainder, and the scale changes under it.
        text = "mixed_precision must not be fp16 with wire powersgd, which keeps what is not sent"
        require(not wire_of(self).rank or self.mixed_precision != "fp16", text, "fp16")


def check_effects(config: RunConfig, processes: int = 1) -> None:
    """Refuse a setting that would change nothing; a run that goes on may have begun with it."""
    check_needs(config, new=True)
    name = "small_ratio" if config.small_workers is None else "small_workers"
    small = getattr(config, name)
    text = f"{name} must be 0 with one worker, since no other is large (see large_batch_size)"
    require(workers_of(config, processes) != 1 or not small, text, small)
    climbs = config.schedule == "cyclic" and len(config.resolutions or (0, 0)) > 1
    stages = config.lr_schedule == "step" or climbs or config.reset_momentum == "stage"
    given = config.lr_milestones and "lr_milestones" not in config.found
    text = (
        f"lr_milestones must be left out with lr_schedule {config.lr_schedule}, unless resolutions "
        "climb between them (schedule cyclic) or reset_momentum is stage"
    )
    require(stages or not given, text, config.lr_milestones)


def parse_interval(value: int | str) -> tuple[int, float]:
    """Return the epochs, or else the minutes, of ``2`` and ``10m``; 0 of both is never."""
    text = str(value).strip()
    with suppress(ValueError):
        if text.isdecimal():
            return int(text), 0.0
        if text.endswith("m") and 0 < (minutes := float(text.removesuffix("m"))) < math.inf:
            return 0, minutes
    must = "checkpoint_every must be epochs (2) or minutes (10m), at least 0"
    raise SettingError(f"{must}, got {as_given(value)}")


ROUND_WIRES = ("float32", "bf16", "int8", "int4", "int2")
_JOINT_WIRES = ("float32", "bf16", "fp16", "powersgd:RANK[:STEPS]")
_ALL_WIRES = (*_JOINT_WIRES, *ROUND_WIRES[2:])


class Wire(NamedTuple):
    """What numbers are sent as; the others are of PowerSGD."""

    name: str = "float32"
    rank: int = 0
    steps: int = 0  # that go uncompressed before it


FLOAT32 = Wire()


def parse_wire(value: str, taken: Sequence[str] = _ALL_WIRES, where: str = "") -> Wire:
    """Return what ``bf16`` or ``powersgd:4:10`` is, if it is one of the formats that are taken."""
    found = re.fullmatch(r"powersgd:(\d{1,99})(?::(\d{1,99}))?", value)
    wire = Wire("powersgd", int(found[1]), int(found[2] or 0)) if found else Wire(value)
    known = (_JOINT_WIRES[-1] if found else value) in taken and value != _JOINT_WIRES[-1]
    require(known, f"wire must be {in_words(taken)}{where}", value)
    require(wire.rank or not found, "wire must be powersgd with a rank of at least 1", value)
    return wire


def wire_of(config: RunConfig) -> Wire:
    """Return what a run's workers send, or refuse what they cannot."""
    if config.push != "weights":
        return parse_wire(config.wire, ("float32",), " with push gradients")
    taken = {"bsp": ROUND_WIRES, "step": _JOINT_WIRES}.get(config.sync, ("float32",))
    return parse_wire(config.wire, taken, f" with sync {config.sync}")


def steps_of_push(push: str) -> int:
    """Return the steps whose gradients ``gradients:4`` sums in one push; of ``weights`` 0."""
    return 0 if push == "weights" else (PUSH.numbers("push", push) or [1])[0]


def workers_of(config: RunConfig, processes: int) -> int | None:
    """Return the workers that so many processes have; in one process as many as are asked for."""
    if config.worker_processes:
        return len(config.worker_processes)
    return config.workers if processes == 1 else processes - config.dedicated_server


def shares_global_batch(config: RunConfig) -> bool:
    """Whether all workers share one global batch a step, instead of rounds of their own."""
    return config.sync == "step" or config.push != "weights"


def meets_at_server(sync: Sync) -> bool:
    """Whether processes meet at a server on rank 0, each in its own time, in no collective."""
    return sync in ("ssp", "asp")


def without_rates(opt_kwargs: Sequence[str]) -> dict[str, Any]:
    """Return the optimizer's arguments but those that any step of it can take."""
    any_step = ("eps", "betas", "layer_decay", "layer_decay_min_scale")
    more = parse_kwargs("opt_kwargs", opt_kwargs)
    return {name: value for name, value in more.items() if name not in any_step}
