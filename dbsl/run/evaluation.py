"""What an evaluation finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
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
        taken = {field.name: "Evaluation itself" for field in fields(self)}
        for name in self.more:
            check_free(name, "a metric in more of Evaluation", taken)
        more = self.more.items()  # numbers of numpy and torch are made those of Python
        plain = {n: v if getattr(v, "ndim", 1) else v.item() for n, v in more}
        for name, value in plain.items():
            bad = not isinstance(value, (int, float))
            refuse([(bad, f"{name} in more of Evaluation must be a number", value)])
        object.__setattr__(self, "more", plain)

    def also(self, name: str, result: Evaluation) -> Evaluation:
        """Return this result with that of other samples or weights, as NAME_accuracy and so on."""
        found = {"accuracy": result.accuracy, "loss": result.loss, **result.more}
        more = {**self.more, **{f"{name}_{key}": value for key, value in found.items()}}
        own = {field.name: more.pop(field.name) for field in fields(self) if field.name in more}
        return replace(self, **own, more=more)


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
