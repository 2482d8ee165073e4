"""What an evaluation finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from dbsl.base.errors import short_loss
from dbsl.config.fields import refuse
from dbsl.loss import check_free

# Names of further results, the fields of which an evaluation has.
OF_EVALUATIONS = ("ema", "top5", "train")
_MOST_PRINTED = 8  # your own metrics in a line


@dataclass(frozen=True)
class Evaluation:
    """The global weights' result on the evaluation set."""

    accuracy: float  # in [0, 1]
    loss: float  # mean over the samples
    samples: int
    resolution: int
    top5_accuracy: float | None = None  # where there are more than 5 classes
    time_s: float = 0.0
    ema_accuracy: float | None = None  # weights averaged over epochs, if kept
    ema_loss: float | None = None
    train_accuracy: float | None = None  # on the training images, without augmentation
    train_loss: float | None = None
    # Your own metrics by name, which go to metrics.jsonl and, as eval/NAME, to the trackers.
    more: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        taken = {field.name: "evaluate itself" for field in fields(self)}
        for name in self.more:
            check_free(name, "a metric of evaluate", taken)
        more = self.more.items()  # numbers of numpy and torch are made those of Python
        plain = {n: v if getattr(v, "ndim", 1) else v.item() for n, v in more}
        for name, value in plain.items():
            bad = not isinstance(value, (int, float))
            refuse([(bad, f"{name} of evaluate must be a number", value)])
        object.__setattr__(self, "more", plain)

    @classmethod
    def of(cls, metrics: Mapping[str, Any], resolution: int) -> Evaluation:
        """Return what a loop's `evaluate` found; names that are no fields are metrics of yours."""
        missing = {"accuracy", "loss", "samples"} - metrics.keys()
        text = "evaluate must return accuracy, loss and samples"
        refuse([(missing, text, f"no {min(missing, default='')}")])
        known = {field.name for field in fields(cls)} - {"more", "resolution"}
        own = {name: value for name, value in metrics.items() if name in known}
        more = {name: value for name, value in metrics.items() if name not in known}
        return cls(**own, resolution=resolution, more=more)


def more_in_words(evaluation: Evaluation) -> str:
    """Return your own metrics that an evaluation has, for its line."""
    sets = further_sets(evaluation.more)
    told = {f"{name}_{kind}" for name in sets for kind in ("accuracy", "loss")}
    own = [(name, value) for name, value in evaluation.more.items() if name not in told]
    left = len(own) - _MOST_PRINTED
    text = "".join(f"  {name} {short_loss(value)}" for name, value in own[:_MOST_PRINTED])
    return text + (f"  ({left} more)" if left > 0 else "")


def further_sets(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return accuracy and loss of the further evaluation sets that a row of figures has."""
    names = [key.removesuffix("_accuracy") for key in row if key.endswith("_accuracy")]
    return {
        name: (row[f"{name}_accuracy"], row[f"{name}_loss"])
        for name in names
        if name not in OF_EVALUATIONS and f"{name}_loss" in row
    }
