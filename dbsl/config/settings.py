"""Settings of a run by group, each with its help, and what does not go with what."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import lt
from typing import Annotated, Any, Literal, NamedTuple

from dbsl.base.errors import SettingError, require
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
    """What is trained, in which batches and for how long, and how workers meet."""

    # --- mixing
    mixup: Amount = 0.0  # alpha of mixup, say 0.2; 0: off
    # alpha of CutMix, say 1.0; 0: off; with --mixup, each batch gets one of the two
    cutmix: Amount = 0.0
    # --- model
    # timm name, local-dir:FOLDER or hf-hub:USER/NAME; the last two start from its weights
    model: str = "resnet18"
    # start from timm's weights of the model; they are downloaded unless cached
    pretrained: bool = False
    # file of initial weights (safetensors or torch); a classifier or small-image stem that does not
    # fit is new. Images are normalised as the config.json next to the file says, else as timm's
    # weights of the model; --preprocess wins
    initial_checkpoint: Annotated[str | None, Excludes("pretrained")] = None
    # more arguments of timm's model as name=value: drop_path_rate=0.1 (stochastic depth)
    # drop_block_rate=0.1 global_pool=avg bn_eps=1e-3 init_values=1e-6
    model_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # compute activations twice instead of keeping them: less memory, more time
    grad_checkpointing: bool = False
    # --- optimizer
    # name in timm.optim; sgd has Nesterov momentum, momentum is plain SGD
    optimizer: str = "sgd"
    # momentum of SGD and optimizers that have one, in [0, 1)
    momentum: BelowOne = 0.9
    weight_decay: Amount = 5e-4  # weight decay; biases and norms have none
    # more arguments of timm's optimizer as name=value: eps=1e-8 betas=0.9,0.95 amsgrad=True;
    # layer_decay=0.75 (each layer's learning rate over that of the layer above)
    # layer_decay_min_scale=0.1 (least factor of a layer)
    opt_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # bound of the norm of all gradients before each optimizer step; unset: no clipping.
    # gradient_norm in metrics.jsonl is the norm before clipping
    clip_grad: Positive | None = None
    # --- workers and their batch sizes
    # workers simulated in one process; unset: 1, or 4 with --small-ratio, --small-workers or
    # --local-batch-sizes; with several processes, their number
    workers: Annotated[Count | None, Role.WORKERS] = None
    # processes that take each worker's steps together: one number for all workers, one for each
    # (8,8,2), or node: a worker has all processes of its machine; unset: one
    worker_processes: Annotated[
        tuple[Annotated[int, Within(1, 65536)], ...] | Literal["node"] | None, Role.FREE | Role.PLAN
    ] = None
    # share of workers on the small batch, in [0, 1]; rounded to whole workers, at least one if
    # above 0: 0.1 of 4 workers is one of them, 25 percent
    small_ratio: Annotated[Share, _NO_JOINTLY] = 0.0
    # number of workers on the small batch; wins over --small-ratio
    small_workers: Annotated[Number | None, Role.WORKERS | Role.PLAN, _NO_JOINTLY] = None
    # time that an epoch of dual batch may take, over that of all-large workers: a ratio k > 1
    time_ratio: Annotated[float, Within(1, open_low=True), Role.PLAN, _SMALL] = 1.05
    # samples per step of a large worker; one value, one per resolution, or one per resolution and
    # worker; auto: the largest that fits a CUDA GPU, elsewhere as if unset; unset: up to 128
    large_batch_size: Annotated[_Sizes, Role.PLAN] = None
    # samples per step set by hand; one value per worker, or per resolution and worker
    local_batch_sizes: Annotated[
        tuple[Count, ...] | None,
        Role.PLAN | Role.WORKERS,
        Excludes("small_ratio"),
        Excludes("small_workers"),
    ] = None
    # samples per joint step over all workers; unset: the sum of their batches
    global_batch_size: Annotated[
        Count | None,
        Role.WORKERS | Role.PLAN,
        _JOINTLY,
        Excludes("local_batch_sizes", why=", whose sum it is"),
    ] = None
    # samples per step of a small worker; one value, or one per resolution; 0 or unset: solved
    small_batch_size: Annotated[tuple[Number, ...] | None, Role.PLAN | Role.WORKERS, _SMALL] = None
    # largest number of a worker's samples on its device at once: a step sums the gradients of
    # micro-batches of that size, with as many values as --large-batch-size may have; auto: what
    # fits a CUDA GPU; unset: the whole batch. Batch norm, mixup and CutMix see one at a time
    micro_batch_size: _Sizes = None
    # smallest batch that a solved or balanced plan may give a worker
    min_batch_size: Annotated[Count, Role.PLAN] = 2
    # seconds per sample; one value, one per resolution, or one per resolution and worker (of
    # --worker-processes: and process); unset: measured
    slope: Annotated[_Times, Needs("intercept")] = None
    # seconds per step, with as many values as --slope may have; unset: measured
    intercept: Annotated[_Times, Needs("slope")] = None
    # least seconds of a step, where it was measured with the slope; no flag
    floor: _Times = field(default=None, metadata=NO_FLAG)
    # file of step times from python -m dbsl.profile --output; again: measure them even if the cache
    # has them; unset: the cache, or measured for 30 s (one worker alone: 3 s)
    profile: Annotated[str | None, Role.FREE | Role.PLAN, Excludes("slope")] = None
    # merge weight of small workers: d_S/d_L (data), its square root (sqrt) or 1 (none)
    update_factor: Annotated[UpdateFactor, Role.PLAN, _SMALL] = "data"
    # rounding of plans: to the nearest, as the journal; truncate: as the conference paper
    rounding: Annotated[Rounding, Role.PLAN] = "round"
    # whether plans stay as they are (none), follow measured times (dynamic), or follow the
    # published rule (dbs); dynamic:3 or dbs:3: a change every 3 rounds instead of every epoch
    balance: Annotated[str, BALANCE, Role.PLAN] = "none"
    # --- how workers meet
    # how workers exchange what they learn: all wait for each other every round (bsp), fast workers
    # run at most --staleness rounds ahead (ssp), nobody waits (asp), or gradients are averaged at
    # every step (step). ssp and asp survive the death of a process that was launched on its own
    sync: Annotated[Sync, Role.PLAN] = "bsp"
    # what workers send: their weights, or gradients for an optimizer at the server, which
    # gradients:4 sums over 4 steps before each push
    push: Annotated[
        str, PUSH, Role.PLAN, Excludes(sync="step", why=", which averages gradients itself")
    ] = "weights"
    # format of what workers send. --sync bsp takes bf16, int8, int4 or int2. --sync step takes
    # bf16, fp16 or powersgd:RANK[:STEPS], PowerSGD of that rank after STEPS steps in float32
    wire: str = "float32"
    # give each joint step the whole global batch, and leave out an epoch's last samples if they do
    # not fill one; otherwise the steps of an epoch have equal sizes, at most the global batch
    drop_last: Annotated[bool, Role.PLAN, _JOINTLY] = False
    # rounds that a worker may be ahead of the slowest when it begins another, with --sync ssp
    staleness: Annotated[Number, Needs(sync="ssp", new=True)] = 1
    # merge rule: mean or delta with bsp, ratio or half with ssp and asp; unset: mean or ratio.
    # delta:0.7,0.9 is the server's step with its learning rate and Nesterov momentum
    merge: Annotated[
        str | None,
        MERGE,
        Excludes(sync="bsp", but=("mean", "delta")),
        Excludes(sync=("ssp", "asp"), but=("ratio", "half")),
        Excludes(sync="step"),
        Excludes(push="gradients"),
    ] = None
    # pushes per worker and epoch
    rounds_per_epoch: Annotated[Count, Role.PLAN, Excludes(push="gradients", why=" (see push)")] = 1
    # rank 0 serves and evaluates but does not train
    dedicated_server: Annotated[
        bool, Role.WORKERS | Role.PLAN, Excludes(sync="step", why=", which has no server")
    ] = False
    # seconds of silence after which a process counts as lost, and longest wait at a barrier; with
    # asp and ssp a process that computes is not silent
    worker_timeout: Annotated[float, Within(0, 1000000000.0, open_low=True), Role.FREE] = 1800.0
    # --- schedule
    # passes over the training data; all workers share each pass
    epochs: Annotated[int, Within(1, 10**6)] = 20
    # image sides in pixels, ascending; --schedule says when each is used; unset: 3/4 of the images'
    # side and the whole side, or 160 and 224 if sides differ
    resolutions: Annotated[tuple[int, ...] | None, Role.PLAN] = None
    # whether the resolution climbs in every learning-rate stage (cyclic), once (progressive), or
    # stays as it is (fixed)
    schedule: Schedule = "cyclic"
    # dropout before the classifier, in [0, 1); one value, or one per resolution
    dropout: tuple[BelowOne, ...] = (0.0,)
    # learning rate of the first stage; unset: 0.1 for SGD, else the optimizer's own (adamw 0.001)
    lr: Positive | None = None
    # how the learning rate falls: at milestones (step), or along a cosine to 0 (cosine), or to a
    # learning rate above it (cosine:1e-5)
    lr_schedule: Annotated[str, LR_SCHEDULE] = "step"
    # scale a worker's learning rate by batch / large batch (linear), or its square root (sqrt)
    lr_scaling: Annotated[Literal["none", "sqrt", "linear"], _NO_JOINTLY] = "none"
    # epochs after which a new stage begins and, with --lr-schedule step, the learning rate falls;
    # unset: 4/7 and 6/7 of the run
    lr_milestones: tuple[int, ...] | None = None
    # factor on the learning rate at each milestone, with --lr-schedule step
    lr_gamma: Annotated[Positive, Needs(lr_schedule="step", new=True)] = 0.2
    # epochs of linear rise from lr/100; unset: a tenth of the run, at most 2
    warmup_epochs: Amount | None = None
    # when workers clear their optimizer's state: never, when a stage or resolution begins (stage),
    # or before every round (round)
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
    # seed of everything random: split, order, weights, dropout
    seed: Annotated[int, Within(0, 2**63 - 1), Role.ORDER] = 0
    # torch's threads; unset: this process's part of the cores, at most OMP_NUM_THREADS, unless the
    # launcher itself set that to 1
    cpu_threads: Annotated[int | None, Within(1, 1024), Role.NODE] = None
    # precision of forward passes; auto: as accelerate launch says, else bf16 if the device computes
    # it natively, else no; no: float32, with TF32 in convolutions on CUDA
    mixed_precision: Annotated[
        Precision,
        Excludes(push="gradients", but=("no", "bf16"), why=", as loss scales of fp16 would differ"),
    ] = "auto"
    # samples per step of evaluation; unset: 256, on CUDA four times the largest batch, up to 2,000
    eval_batch_size: Annotated[Count | None, Role.FREE] = None
    # minutes after which the run saves and stops with status 75, as after SIGTERM
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
    # run folder or checkpoint to resume; auto: --output-dir, if it has a run
    resume: Annotated[str | None, Role.FREE | Role.COMMAND] = None
    # print the plan and its timeline, then stop
    plan_only: Annotated[bool, Role.FREE | Role.COMMAND] = False
    # rounds that may be refused because loss or weights are not finite
    max_bad_rounds: Annotated[Number, Role.FREE] = 10
    # use torch.compile, and compile for all batch sizes before training
    compile: Annotated[
        bool, Excludes("balance", why=", which changes batch sizes: each would be compiled")
    ] = False
    # new run folder; unset: runs/<dataset>-<model>-<time>
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
    raise SettingError(f"{must}, got {value}")


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


def takes_joint_steps(config: RunConfig) -> bool:
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
