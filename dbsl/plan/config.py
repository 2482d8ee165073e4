"""Settings of plans: batch sizes, emulated machines, stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypedDict

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError
from dbsl.base.flags import PAIRS
from dbsl.base.kwargs import read_kwargs
from dbsl.plan.follow import Balance
from dbsl.plan.stages import LrScaling, LrSchedule, ResetMomentum, Schedule
from dbsl.plan.types import Rounding, UpdateFactor


@dataclass(frozen=True)
class BatchConfig:
    """Which worker trains in which batches."""

    # --- workers and their batch sizes
    # workers simulated in one process; unset: 1, or 4 with --small-ratio, --small-workers or
    # --local-batch-sizes; with several processes, their number
    workers: Annotated[int | None, Within(1)] = None
    # share of workers on the small batch, in [0, 1]
    small_ratio: Annotated[float, Within(0, 1)] = 0.0
    # number of workers on the small batch; wins over --small-ratio
    small_workers: Annotated[int | None, Within(0)] = None
    # time that dual batch may take over all-large, k > 1
    time_ratio: Annotated[float, Within(1, open_low=True)] = 1.05
    # share of samples trained in small batches, in (0, 1); replaces --time-ratio
    small_share: Annotated[float | None, Within(0, open_low=True)] = None
    # samples per step of a large worker; one value, one per resolution, or one per resolution and
    # worker; auto: the largest that fits; unset: up to 128
    large_batch_size: Annotated[tuple[int, ...] | Literal["auto"] | None, Within(1)] = None
    # samples per step set by hand; one value per worker, or per resolution and worker
    local_batch_sizes: Annotated[tuple[int, ...] | None, Within(1)] = None
    # samples per joint step over all workers; unset: the sum of their batches
    global_batch_size: Annotated[int | None, Within(1)] = None
    # samples per step of a small worker; one value, or one per resolution; 0 or unset: solved
    small_batch_size: Annotated[tuple[int, ...] | None, Within(0)] = None
    # most samples of a worker on its device at once: it sums the gradients of so many micro-batches
    # in each step; one value, one per resolution, or one per resolution and worker; auto: what fits
    # into memory; unset: the whole batch. Gradients are those of the whole batch, but batch norm
    # normalises by, and mixup and CutMix mix within, a micro-batch
    micro_batch_size: Annotated[tuple[int, ...] | Literal["auto"] | None, Within(1)] = None
    # smallest batch that a solved or balanced plan may give a worker
    min_batch_size: Annotated[int, Within(1)] = 2
    # GiB that a step may use with --large-batch-size or --micro-batch-size auto; unset: what is
    # free
    memory_limit: Annotated[float | None, Within(0, open_low=True)] = None
    # seconds per sample; one value, one per resolution, or one per resolution and worker; unset:
    # measured
    slope: tuple[float, ...] | None = None
    # seconds per step; one value, one per resolution, or one per resolution and worker; unset:
    # measured
    intercept: tuple[float, ...] | None = None
    # least seconds that a step takes; one value, one per resolution, or one per resolution and
    # worker; unset: measured with the slope, or 0 where that is given
    floor: tuple[float, ...] | None = None
    # file of step times from python -m dbsl.profile --output; unset: the cache, or measured
    profile: str | None = None
    # seconds to measure step times for, all resolutions together; unset: 30, or 3 for one worker
    # alone, whose batch does not depend on them
    profile_seconds: Annotated[float | None, Within(0, open_low=True)] = None
    profile_refresh: bool = False  # measure step times even if the cache has them
    # merge weight of small workers: d_S/d_L (data), its square root (sqrt) or 1 (none)
    update_factor: UpdateFactor = "data"
    # rounding of plans: to the nearest, as the journal; truncate: as the conference paper
    rounding: Rounding = "round"
    # plans stay as they are (none), follow measured times (dynamic), or follow the published rule
    # (dbs)
    balance: Balance = "none"
    # rounds between two changes of the plan; unset: an epoch
    balance_every: Annotated[int | None, Within(1)] = None


@dataclass(frozen=True)
class EmulationConfig:
    """Machines made slower than they are."""

    # --- emulation of uneven machines
    # factor on a worker's compute time as worker:factor, say 0:2.0,3:1.5
    slowdown: tuple[str, ...] | None = None
    disturb: str | None = None  # slow spells as probability:epochs[:factor], say 0.1:4-20
    # relative standard deviation of a simulated round's time
    time_noise: Annotated[float, Within(0)] = 0.0
    # Gbit/s between simulated workers, in each direction, at least 1e-6; unset: exchanges take no
    # time
    link_gbps: Annotated[float | None, Within(1e-6)] = None
    link_ms: Annotated[float, Within(0)] = 0.0  # delay of a message, milliseconds; with --link-gbps
    # share of a joint step's computing that gradients travel behind, in [0, 1]; with --link-gbps
    link_overlap: Annotated[float, Within(0, 1)] = 0.0


class LrKwargs(TypedDict, total=False):
    """More arguments of `dbsl.plan.stages.learning_rate_at`, by timm's names."""

    warmup_lr: Annotated[float | None, Within(0)]
    warmup_prefix: bool
    cooldown_epochs: Annotated[float, Within(0)]
    k_decay: Annotated[float, Within(0, open_low=True)]
    power: Annotated[float, Within(0, open_low=True)]


@dataclass(frozen=True)
class StageConfig:
    """Epochs, resolutions and learning rates."""

    # --- schedule
    # passes over the training data; all workers share each pass
    epochs: Annotated[int, Within(1, 10**6)] = 20
    # image sides in pixels, ascending, as --schedule has them; one trains at that alone; unset: 3/4
    # of the images' own side, then all of it; 160 and 224 where sides differ
    resolutions: tuple[int, ...] | None = None
    # resolution climbs in every learning-rate stage (cyclic), once (progressive), or stays (fixed)
    schedule: Schedule = "cyclic"
    # dropout before the classifier, in [0, 1); one value, or one per resolution
    dropout: Annotated[tuple[float, ...], Within(0, 1, open_high=True)] = (0.0,)
    # learning rate of the first stage; unset: 0.1 for SGD, else the optimizer's own (adamw 0.001)
    lr: Annotated[float | None, Within(0, open_low=True)] = None
    # samples a step that --lr was chosen for, as a recipe's; a run with other batches says so, with
    # timm's rule for them, and keeps --lr; unset: nothing is said
    lr_batch_size: Annotated[int | None, Within(1)] = None
    # learning rate falls at milestones (step), along a cosine, or as a power of what is left (poly)
    lr_schedule: LrSchedule = "step"
    # scale a worker's learning rate by batch / large batch (linear), or its square root (sqrt)
    lr_scaling: LrScaling = "none"
    # epochs after which a new stage begins and, with --lr-schedule step, the learning rate falls;
    # unset: 4/7 and 6/7 of the run
    lr_milestones: tuple[int, ...] | None = None
    # factor on the learning rate at each milestone, with --lr-schedule step
    lr_gamma: Annotated[float, Within(0, open_low=True)] = 0.2
    # epochs of linear rise from lr/100; unset: a tenth of the run, at most 2
    warmup_epochs: Annotated[float | None, Within(0)] = None
    # learning rate that cosine and poly end at
    min_lr: Annotated[float, Within(0)] = 0.0
    # more arguments of timm's schedulers as name=value: warmup_lr, where the warm-up starts (unset:
    # lr/100); warmup_prefix=False: cosine and poly begin with the warm-up, not after it;
    # cooldown_epochs, the last ones, at --min-lr; k_decay, above 1 for a later fall; power of poly
    lr_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
    # workers clear their optimizer's state never, where a stage (its resolution, too) begins, or
    # before every round
    reset_momentum: ResetMomentum = "never"

    @property
    def curve(self) -> dict[str, Any]:
        """What `learning_rate_at` takes of warm-up, cosine and poly."""
        more = read_kwargs("lr_kwargs", self.lr_kwargs, LrKwargs)
        return {"warmup_epochs": self.warmup_epochs, "min_lr": self.min_lr, **more}


def check_curve(config: StageConfig) -> None:
    """Raise ``SettingError`` unless the learning rate ends below its peak, and after warm-up."""
    given = config.curve
    without = {"step": LrKwargs.__annotations__.keys() - {"warmup_lr"}, "cosine": {"power"}}
    if names := sorted(given.keys() & without.get(config.lr_schedule, set())):
        raise SettingError(
            f"lr_kwargs must leave out {names[0]} with lr_schedule {config.lr_schedule}, "
            f"got {given[names[0]]}"
        )
    if config.lr is not None and config.min_lr > config.lr:
        raise SettingError(f"min_lr must be at most lr ({config.lr:g}), got {config.min_lr:g}")
    left = config.epochs - (config.warmup_epochs or 0)
    cooldown = given.get("cooldown_epochs", 0.0)
    if cooldown and cooldown >= left:
        raise SettingError(
            f"lr_kwargs cooldown_epochs must be below the {left:g} epochs after the warm-up, "
            f"got {cooldown:g}"
        )
