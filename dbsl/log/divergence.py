"""Training that diverges or learns nothing: said as soon as it is seen, and never a success."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from accelerate import Accelerator

from dbsl.base.errors import DivergedError
from dbsl.base.words import steadier
from dbsl.config.settings import RunConfig
from dbsl.plan.types import BAD_LOSS, BAD_WEIGHTS, NO_FAULT, RoundReport
from dbsl.run.evaluation import Evaluation

# An epoch's training loss above so many times the first one's, and 1, has diverged.
_RISES = 3
# Steps of a worker after the warm-up in which a network at a fit learning rate learns to do better
# than to guess, in so many epochs or steps. The first ones at the full rate are often worse.
_JUDGED_STEPS = 16
_JUDGED_EPOCHS, _MANY_STEPS = 3, 100
_NO_BETTER = 0.99  # times the cross-entropy of guessing
_CHANCE = 1.2  # times its accuracy: confident models that tell classes apart are above
_FALLS = 0.05  # share that a training loss loses from one epoch to the next, on its way down

# Times the loss of guessing. A loss like that means logits wrong by thousands for most samples:
# confident or overfitted models that still tell classes apart are far below it.
_NO_RESULT = 1000.0


class DivergenceWarning:
    """Says once that training diverges, and once that it learns nothing.

    Of a training loss, which may be anybody's function, it knows whether it is finite, rises and
    falls. An evaluation's cross-entropy is held against that of guessing. `say` takes the line.
    `precision` is that of forward passes, and `weights` are the names of the model's tensors.
    """

    def __init__(
        self,
        config: RunConfig,
        classes: int,
        say: Callable[[str], object],
        *,
        precision: str = "no",
        weights: Sequence[str] = (),
    ) -> None:
        self._config, self._classes, self._say = config, classes, say
        self._precision, self._weights = precision, weights
        self.first: float | None = None  # training loss of the run's first epoch
        self._said = self._said_none_learnt = False
        self._before = math.nan  # training loss of the epoch before
        self._epochs = self._steps = 0  # since the warm-up, or an evaluation better than guessing

    def look(self, report: RoundReport) -> None:
        """Take a round; each that is refused is told."""
        if report.fault == NO_FAULT:  # not refused, or another report of the joint steps says why
            return
        config, of_loss = self._config, report.fault == BAD_LOSS
        self._said |= of_loss
        joint = config.sync == "step" and not of_loss
        whose = "all workers" if joint else f"worker {report.worker}"
        what = "its loss is not finite"
        if not of_loss:
            number = report.fault - BAD_WEIGHTS - 1
            name = "a weight on its way to rank 0" if number < 0 else self._weights[number]
            gradient = "the gradient of " if config.push == "gradients" else ""
            what = f"{gradient}{name} is not finite, though its loss is"
        remedy = steadier(config.lr, config.optimizer, self._precision, finite_loss=not of_loss)
        self._say(
            f"warning: round {report.round + 1} of epoch {report.epoch + 1} of {whose} is refused: "
            f"{what}; {remedy}"
        )

    def look_at_epoch(
        self, epoch: int, loss: float, found: Evaluation | None, *, steps: int, batch_size: int
    ) -> None:
        """Take an epoch's training loss, its evaluation, if any, and the steps of a worker."""
        config, guessing = self._config, math.log(self._classes)
        if self.first is None and math.isfinite(loss):
            self.first = loss
        if self.first is not None and loss > _RISES * abs(self.first) + 1:
            self._diverges(epoch, f"is {loss:.3g}, and was {self.first:.3g} in the first epoch")
        falls = loss < self._before - _FALLS * abs(self._before)
        self._before, last = loss, epoch + 1 == config.epochs
        warm = last or epoch >= (config.warmup_epochs or 0)
        if self._said or self._said_none_learnt or not warm or self._classes < 2:
            return
        self._epochs, self._steps = self._epochs + 1, self._steps + steps
        if found is None:
            return
        if found.loss < _NO_BETTER * guessing or found.accuracy > _CHANCE / self._classes:
            self._epochs = self._steps = 0
            return
        enough = last or self._epochs >= _JUDGED_EPOCHS or self._steps >= _MANY_STEPS
        if falls or self._steps < _JUDGED_STEPS or not enough or not math.isfinite(found.loss):
            return
        self._said_none_learnt = True
        self._say(
            f"warning: the evaluation's cross-entropy is {found.loss:.3g} after epoch {epoch + 1}, "
            f"no better than guessing among {self._classes} classes ({guessing:.2f}): nothing is "
            f"learnt with lr {config.lr:g} ({config.optimizer}, {batch_size} samples a step); try "
            f"another, {config.lr / 10:g} first"
        )

    def _diverges(self, epoch: int, how: str) -> None:
        if not self._said:
            self._say(
                f"warning: the training loss of epoch {epoch + 1} {how}: training diverges; lower "
                f"lr ({self._config.lr:g} with {self._config.optimizer})"
            )
        self._said = True


def check_result(folder: Path, config: RunConfig, accelerator: Accelerator) -> None:
    """Raise ``DivergedError`` on the main process if a finished run's result is none."""
    if not accelerator.is_main_process:
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if why := no_result(summary):
        precision = str(accelerator.mixed_precision)
        remedy = steadier(config.lr, config.optimizer, precision, finite_loss=False)
        raise DivergedError(f"{why}: the run in {folder} diverged; {remedy}")


def no_result(summary: Mapping[str, float]) -> str | None:
    """Return why a run's summary tells of no trained model, or None."""
    loss = summary.get("final_loss", 0.0)
    if loss is None or not math.isfinite(loss):  # JSON has no number for it
        return "the loss of the final evaluation is not finite"
    classes = summary["classes"]
    if classes > 1 and loss > _NO_RESULT * math.log(classes):
        return (
            f"the loss of the final evaluation is {loss:.3g}, more than {_NO_RESULT:,.0f} times "
            f"that of guessing among {classes} classes"
        )
    if summary.get("last_epoch_refused"):
        return "every round of the last epoch was refused, since loss or weights were not finite"
    return None
