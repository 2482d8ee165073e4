"""Training that diverges: said as soon as it is seen, and never called a success."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from dbsl.base.errors import DivergedError
from dbsl.run.config import RunConfig

# Times the loss of guessing. A loss like that means logits wrong by thousands for most samples:
# confident or overfitted models that still tell classes apart are far below it.
_NO_RESULT = 1000.0


class DivergenceWarning:
    """Says once that a loss is not finite, or far above that of guessing.

    Guessing has ln(classes). Far above is more than twice that and 1: a first round at a high
    learning rate may well be above it. `say` takes the line.
    """

    def __init__(self, config: RunConfig, classes: int, say: Callable[[str], object]) -> None:
        self._config = config
        self._classes = classes
        self._say = say
        self._said = False

    def look(self, loss: float, what: str) -> None:
        """Take a loss, and in words what it is of, such as ``the training loss of epoch 3``."""
        guessing = math.log(self._classes)
        if self._said or loss <= 2 * guessing + 1:  # NaN is not
            return
        self._said = True
        is_what = f"is {loss:.3g}" if math.isfinite(loss) else "is not finite"
        self._say(
            f"warning: {what} {is_what}, where guessing among {self._classes} classes has "
            f"{guessing:.2f}: training diverges; lower lr ({self._config.lr:g} with "
            f"{self._config.optimizer})"
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
