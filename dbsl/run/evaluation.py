"""What an evaluation finds; and evaluation alone: weights, and the images to evaluate them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic

from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.errors import px, short_loss
from dbsl.config.fields import refuse
from dbsl.data.sources import Source, TrainingData, as_source
from dbsl.loss import check_free
from dbsl.plan.sampler import evaluation_batch_size, evaluation_batches
from dbsl.run.training import ConfigT

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


@dataclass(eq=False)
class EvaluationSession(Generic[ConfigT]):
    """As much of a `Session` as an evaluation needs."""

    config: ConfigT
    accelerator: Accelerator
    data: TrainingData
    model: nn.Module  # with its weights, on its device; nothing is wrapped around it
    side: int  # side of the images, in pixels
    also: Mapping[str, Source]  # further evaluation sets: `open_session(evaluate_also=...)`

    def __post_init__(self) -> None:
        self.num_classes, kind = self.data.num_classes, self.accelerator.device.type
        self.batch_size = evaluation_batch_size(self.config.eval_batch_size, kind, 0)
        # Whether all processes evaluate at a time, each its part of the images.
        self.shares_evaluation = self.accelerator.num_processes > 1

    def evaluation_images(self, source: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Return batches of images [B, 3, R, R] and labels [B], of the evaluation images if unset.

        Where processes evaluate together, they are this process's part. A source may be a map-style
        dataset of (input tensor, label), too, or data with evaluation samples.
        """
        source = self.data.evaluation if source is None else source
        source = as_source(source, self.data, self.side, "source")
        ranks = (self.accelerator.process_index, self.accelerator.num_processes)
        own = ranks if self.shares_evaluation else ()
        parts = evaluation_batches(len(source), self.batch_size, *own)
        transform = self.data.transform(self.side, "none", self.config.seed)  # nothing at random
        return source.batches(parts, transform)

    def tell(self, result: Evaluation, further: Mapping[str, Evaluation]) -> None:
        """Print each result in a line, on the main process."""
        for name, found in {"": result, **further}.items():
            where = "" if name else f" ({self.data.eval_split}){px(self.side, ' at ')}"
            top5 = found.top5_accuracy
            self.accelerator.print(
                f"{name and f'{name}: '}accuracy {100 * found.accuracy:.2f} %"
                f"{'' if top5 is None else f', top-5 {100 * top5:.2f} %'}, loss "
                f"{short_loss(found.loss)}, {found.samples} {self.data.unit}s{where}"
                f"{more_in_words(found)}"
            )
