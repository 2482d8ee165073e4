"""When what changes: an epoch's stage, resolution, dropout and learning rate.

Pure functions. A *stage* is the epochs between two learning-rate milestones. Cyclic progressive
learning (arXiv 2509.26092) raises the resolution from low to high inside every stage, so that high
resolutions also meet the high learning rates; one-pass progressive resizing raises it once per run.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from dbsl.config.fields import refuse
from dbsl.config.settings import LrSchedule, Schedule


@dataclass(frozen=True)
class Stage:
    """Consecutive epochs with one resolution and one batch plan (a sub-stage where it cycles)."""

    index: int  # number of the learning-rate stage
    substage: int  # number inside that stage, from 0
    first_epoch: int
    end_epoch: int  # exclusive
    resolution: int  # image side, pixels
    dropout: float
    learning_rate: float  # after the warm-up, with --lr-schedule step; others do not follow stages

    @property
    def epochs(self) -> range:
        """The epochs that the stage covers."""
        return range(self.first_epoch, self.end_epoch)


def default_resolutions(image_side: int | None) -> tuple[int, ...]:
    """Return 3/4 of the images' side and the side itself; 160 and 224 px where sides differ.

    Sides below 16 px count as 16, since a ResNet divides the side by 8 after its stem; the lower
    resolution is rounded down to a multiple of 8, on which convolutions run fastest (32: 24).
    """
    if image_side is None:
        return (160, 224)
    side = max(image_side, 16)
    return (side * 3 // 4 // 8 * 8, side)


def default_milestones(epochs: int) -> tuple[int, ...]:
    """Return milestones after 4/7 and 6/7 of the run, the published 80 and 120 of 140 epochs."""
    return tuple(sorted({m for n in (4, 6) if 0 < (m := round(epochs * n / 7)) < epochs}))


def make_stages(
    epochs: int,
    resolutions: Sequence[int],
    *,
    schedule: Schedule = "cyclic",
    dropout: Sequence[float] = (0.0,),
    learning_rate: float = 0.1,
    milestones: Sequence[int] = (),
    gamma: float = 0.2,
) -> tuple[Stage, ...]:
    """Return the stages of a run in order; together they cover each epoch once.

    A span of epochs is shared equally by the resolutions, low to high; where it does not divide,
    the higher ones get the extra epochs, and a span too short for all drops the lowest.

    `resolutions` are image sides in pixels, of which `fixed` uses the last. `dropout` is one
    probability per resolution, or one for all. At each of the `milestones`, epochs, a new stage
    starts, and `gamma` multiplies the learning rate.
    """
    bounds = [0, *milestones, epochs]
    falls = any(a >= b for a, b in itertools.pairwise(bounds))
    inside = f"lr_milestones must ascend inside (0, epochs={epochs})"
    each = f"dropout must have 1 value or one per resolution ({len(resolutions)})"
    unlike = len(dropout) not in (1, len(resolutions))
    refuse([(falls, inside, milestones), (unlike, each, f"{len(dropout)} values")])
    rates = dict(zip(resolutions, dropout, strict=True)) if len(dropout) > 1 else {}
    used = resolutions[-1:] if schedule == "fixed" else resolutions
    # One-pass progressive resizing climbs over the whole run, cyclic over each stage.
    spans = [(0, epochs)] if schedule == "progressive" else list(itertools.pairwise(bounds))
    keys = [  # each epoch's learning-rate stage and resolution
        (bisect_right(milestones, e), used[len(used) - 1 - (end - 1 - e) * len(used) // (end - a)])
        for a, end in spans
        for e in range(a, end)
    ]
    stages: list[Stage] = []
    for (index, resolution), group in itertools.groupby(range(epochs), keys.__getitem__):
        covered, substage = list(group), sum(stage.index == index for stage in stages)
        rate, share = learning_rate * gamma**index, rates.get(resolution, dropout[0])
        span = covered[0], covered[-1] + 1
        stages.append(Stage(index, substage, *span, resolution, dropout=share, learning_rate=rate))
    return tuple(stages)


def unused_resolutions(
    stages: Sequence[Stage], resolutions: Sequence[int], schedule: Schedule
) -> str | None:
    """Return in words which resolutions get no epoch, and why; None: all get one."""
    used = {stage.resolution for stage in stages}
    unused = [str(resolution) for resolution in resolutions if resolution not in used]
    if not unused:
        return None
    why = {
        "cyclic": f"every learning-rate stage is shorter than {len(resolutions)} epochs",
        "progressive": f"the run is shorter than {len(resolutions)} epochs",
        "fixed": "schedule fixed uses only the highest resolution",
    }[schedule]
    return f"no epoch is at {' and '.join(unused)} px: {why}"


def stage_at(stages: Sequence[Stage], epoch: int) -> Stage:
    """Return the stage that covers `epoch`."""
    return next(stage for stage in stages if epoch in stage.epochs)


def learning_rate_at(
    progress: float,
    stages: Sequence[Stage],
    *,
    base: float,
    schedule: LrSchedule = "step",
    warmup_epochs: float = 0.0,
    min_lr: float = 0.0,
) -> float:
    """Return the learning rate `progress` epochs after the start, fractions of an epoch counted.

    `step` holds each stage's rate. `cosine` falls from `base` to `min_lr` along half a cosine over
    the epochs after the warm-up. Warm-up rises linearly, and stays above `base`/100.
    """
    if progress < warmup_epochs:
        return base * max(progress / warmup_epochs, 0.01)
    if schedule == "step":
        return stage_at(stages, int(progress)).learning_rate
    share = (progress - warmup_epochs) / max(stages[-1].end_epoch - warmup_epochs, 1e-9)
    return min_lr + (base - min_lr) * 0.5 * (1.0 + math.cos(math.pi * share))
