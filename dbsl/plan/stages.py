"""The schedule of a run: each epoch's stage, resolution, dropout and learning rate.

Functions are pure. A *stage* is the epochs between two learning-rate milestones. Cyclic progressive
learning (arXiv 2509.26092) raises the resolution from low to high inside every stage, so that high
resolutions also get high learning rates; one-pass progressive resizing raises it once per run.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dbsl.base.errors import require
from dbsl.config.settings import NO_SIDE, RunConfig, Schedule


@dataclass(frozen=True)
class Stage:
    """Consecutive epochs with one resolution and one batch plan (a sub-stage if it cycles)."""

    index: int  # number of the learning-rate stage
    substage: int  # number inside that stage, from 0
    first_epoch: int
    end_epoch: int  # exclusive
    resolution: int  # image side, pixels
    dropout: float
    learning_rate: float  # after the warm-up, with --lr-schedule step; others ignore stages

    @property
    def epochs(self) -> range:
        """The epochs that the stage covers."""
        return range(self.first_epoch, self.end_epoch)


class Stages(Sequence[Stage]):
    """The stages of a run, in order, and the settings that determine them.

    `resolutions` are those of the data, for a run that names none; `say` receives a warning.
    """

    def __init__(
        self, config: RunConfig, resolutions: Sequence[int], say: Callable[[str], object] = print
    ) -> None:
        asked_for = config.resolutions is not None and "resolutions" not in config.found
        given = tuple(config.resolutions or resolutions)
        sideless = given == (NO_SIDE,)
        must = "be positive for images" if sideless else "be left out with inputs that have no side"
        alike = sideless == (tuple(resolutions) == (NO_SIDE,))
        require(alike, f"resolutions must {must}", given)
        epochs, milestones, warmup = config.epochs, config.lr_milestones, config.warmup_epochs
        # Open settings are fixed here; the rest of the run reads them from this config.
        self.config = config = replace(
            config,
            resolutions=given,
            lr_milestones=tuple(default_milestones(epochs) if milestones is None else milestones),
            warmup_epochs=min(epochs / 10, 2.0) if warmup is None else warmup,
        )
        self.resolutions, self.warmup_epochs = config.resolutions, config.warmup_epochs
        self._stages = make_stages(
            epochs,
            config.resolutions,
            schedule=config.schedule,
            dropout=config.dropout,
            learning_rate=config.lr,
            milestones=config.lr_milestones,
            gamma=config.lr_gamma if config.lr_schedule == "step" else 1.0,
        )
        unused = unused_resolutions(self._stages, config.resolutions, config.schedule)
        if unused and asked_for:
            say(f"warning: {unused}")

    def at(self, epoch: int) -> Stage:
        """Return the stage that covers an epoch."""
        return stage_at(self._stages, epoch)

    def __len__(self) -> int:
        return len(self._stages)

    def __getitem__(self, number: int) -> Stage:
        return self._stages[number]


def default_resolutions(image_side: int | None) -> tuple[int, ...]:
    """Return 3/4 of the images' side and the side itself; 160 and 224 px if sides differ.

    Sides below 16 px become 16, since a ResNet divides the side by 8 after its stem; the lower
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

    Resolutions share a span of epochs equally, low to high. If it does not divide evenly, the
    higher ones get the extra epochs. A span too short for all drops the lowest.

    `resolutions` are image sides in pixels; `fixed` uses only the last. `dropout` is one
    probability per resolution, or one for all. At each epoch in `milestones`, a new stage starts,
    and `gamma` multiplies the learning rate.
    """
    bounds = [0, *milestones, epochs]
    ascends = all(a < b for a, b in itertools.pairwise(bounds))
    require(ascends, f"lr_milestones must ascend inside (0, epochs={epochs})", milestones)
    must = f"dropout must have 1 value or one per resolution ({len(resolutions)})"
    require(len(dropout) in (1, len(resolutions)), must, f"{len(dropout)} values")
    rates = dict(zip(resolutions, dropout, strict=True)) if len(dropout) > 1 else {}
    used = resolutions[-1:] if schedule == "fixed" else resolutions
    # One-pass progressive resizing rises over the whole run, cyclic over each stage.
    spans = [(0, epochs)] if schedule == "progressive" else itertools.pairwise(bounds)
    sides: list[int] = []  # of each epoch
    for first, end in spans:
        each, more = divmod(end - first, len(used))
        for number, side in enumerate(used):
            sides += [side] * (each + (number >= len(used) - more))
    keys = [(bisect_right(milestones, epoch), side) for epoch, side in enumerate(sides)]
    stages: list[Stage] = []
    for (index, side), group in itertools.groupby(range(epochs), keys.__getitem__):
        covered, substage = list(group), sum(stage.index == index for stage in stages)
        rate, share = learning_rate * gamma**index, rates.get(side, dropout[0])
        span = covered[0], covered[-1] + 1
        stages.append(Stage(index, substage, *span, side, dropout=share, learning_rate=rate))
    return tuple(stages)


def unused_resolutions(
    stages: Sequence[Stage], resolutions: Sequence[int], schedule: Schedule
) -> str | None:
    """Return in words which resolutions get no epoch, and why; None: all get one."""
    used = {stage.resolution for stage in stages}
    unused = " and ".join(str(side) for side in resolutions if side not in used)
    why = {
        "cyclic": f"every learning-rate stage is shorter than {len(resolutions)} epochs",
        "progressive": f"the run is shorter than {len(resolutions)} epochs",
        "fixed": "schedule fixed uses only the highest resolution",
    }[schedule]
    return f"no epoch is at {unused} px: {why}" if unused else None


def stage_at(stages: Sequence[Stage], epoch: int) -> Stage:
    """Return the stage that covers `epoch`."""
    return next(stage for stage in stages if epoch in stage.epochs)
