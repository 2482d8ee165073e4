"""Training that diverges or learns nothing: said as soon as it is seen, and never a success."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import DivergedError
from dbsl.loss import first_loss, guessing_loss
from dbsl.run.config import RunConfig

# Steps of a worker after the warm-up in which a network at a fit learning rate learns to do better
# than to guess. Whole epochs are judged: they may be many more. Where they are few, the first ones
# at the full rate are often worse before they are better: it takes so many epochs, or steps.
_JUDGED_STEPS = 16
_JUDGED_EPOCHS, _MANY_STEPS = 3, 100
_NO_BETTER = 0.99  # times the loss of guessing
# A loss above guessing that has lost so much of what is above in one epoch is on its way down.
_FALLS = 0.5

# Times the loss of guessing. A loss like that means logits wrong by thousands for most samples:
# confident or overfitted models that still tell classes apart are far below it.
_NO_RESULT = 1000.0


class DivergenceWarning:
    """Says once that a loss is not finite or far above that of guessing, and once that it stays.

    Far above is more than twice that, or what it began with, and 1: a first round at a high
    learning rate may well be above it. `say` takes the line.
    """

    def __init__(self, config: RunConfig, classes: int, say: Callable[[str], object]) -> None:
        self._config = config
        self._classes = classes
        self._guessing = guessing_loss(config, classes)
        self._say = say
        self._far_above = 2 * max(self._guessing, first_loss(config, classes)) + 1
        self._shown = f"{self._guessing:{'.2f' if self._guessing >= 0.1 else '.2g'}}"
        self._said = self._said_none_learnt = False
        self._since: tuple[int, int, float, int] | None = None  # epoch, steps, loss, samples
        self._before: float | None = None  # loss of the epoch before

    def look(self, loss: float, what: str) -> None:
        """Take a loss, and in words what it is of, such as ``the training loss of epoch 3``."""
        if self._said or loss <= self._far_above:  # NaN is not
            return
        self._said = True
        is_what = f"is {loss:.3g}" if math.isfinite(loss) else "is not finite"
        self._say(
            f"warning: {what} {is_what}, where guessing among {self._classes} classes has "
            f"{self._shown}: training diverges; lower lr ({self._config.lr:g} with "
            f"{self._config.optimizer})"
        )

    def look_at_epoch(
        self, epoch: int, loss: float, *, samples: int, steps: int, batch_size: int
    ) -> None:
        """Take an epoch's training loss, mean over the samples, with the steps of a worker.

        Epochs of few steps are judged together; the warm-up is not, unless the run is over. A
        newest epoch that is better than guessing, or falls clearly, is no alarm.
        """
        config, loss_before = self._config, self._before
        self._before = loss
        last = epoch + 1 == config.epochs
        warm = last or epoch >= (config.warmup_epochs or 0)
        if self._said or self._said_none_learnt or not warm or not self._guessing:
            return
        if loss < _NO_BETTER * self._guessing:  # whatever was before, it learns
            self._since = None
            return
        first, steps_before, sum_before, before = self._since or (epoch, 0, 0.0, 0)
        steps, samples = steps + steps_before, samples + before
        total = loss * (samples - before) + sum_before
        self._since = (first, steps, total, samples)
        enough = last or epoch - first + 1 >= _JUDGED_EPOCHS or steps >= _MANY_STEPS
        if steps < _JUDGED_STEPS or not samples or not enough:
            return
        mean = total / samples
        if not math.isfinite(mean):
            return
        above = loss - self._guessing
        if loss_before is not None and above <= _FALLS * (loss_before - self._guessing):
            return
        self._said_none_learnt = True
        which = f"epoch {epoch + 1}" if first == epoch else f"epochs {first + 1} to {epoch + 1}"
        self._say(
            f"warning: the training loss of {which} is {mean:.3g}, no better than guessing among "
            f"{self._classes} classes ({self._shown}): nothing is learnt with lr "
            f"{config.lr:g} ({config.optimizer}, {batch_size} samples a step); try another, "
            f"{config.lr / 10:g} first"
        )


def check_result(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``DivergedError`` on the main process if a finished run's result is none."""
    if not accelerator.is_main_process:
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if why := no_result(summary):
        raise DivergedError(
            f"{why}: the run in {folder} diverged; lower lr ({config.lr:g} with {config.optimizer})"
        )


def no_result(summary: Mapping[str, Any]) -> str | None:
    """Return why a run's summary tells of no trained model, or None."""
    loss = summary.get("final_loss", 0.0)
    if loss is None or not math.isfinite(loss):  # JSON has no number for it
        return "the loss of the final evaluation is not finite"
    classes = summary.get("classes", 0)  # not in runs of before
    if classes > 1 and loss > _NO_RESULT * math.log(classes):
        return (
            f"the loss of the final evaluation is {loss:.3g}, more than {_NO_RESULT:,.0f} times "
            f"that of guessing among {classes} classes"
        )
    if summary.get("last_epoch_refused"):
        return "every round of the last epoch was refused, since loss or weights were not finite"
    return None
