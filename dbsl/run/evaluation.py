"""What an evaluation finds; and evaluation alone: weights, and the images to evaluate them on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Generic

from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.words import px, short_loss
from dbsl.data.sources import Source, TrainingData, as_source
from dbsl.loss import check_free
from dbsl.plan.sampler import evaluation_batch_size, evaluation_batches
from dbsl.run.training import ConfigT

if TYPE_CHECKING:  # which is built on this
    from dbsl.run.session import Session

# Names of further results, the fields of which an evaluation has.
OF_EVALUATIONS = ("ema", "top5", "train")
_MOST_PRINTED = 8  # of your own metrics in a line


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


@dataclass(frozen=True)
class EvaluationSession(Generic[ConfigT]):
    """As much of a `Session` as an evaluation needs."""

    config: ConfigT
    accelerator: Accelerator
    data: TrainingData
    model: nn.Module  # with its weights, on its device
    side: int  # of images, pixels
    also: Mapping[str, Source] = field(default_factory=dict)  # further evaluation sets, by name

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.data.num_classes

    @property
    def shares_evaluation(self) -> bool:
        """Whether all processes evaluate, each its part of the images."""
        return self.accelerator.num_processes > 1

    def evaluation_images(self, source: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this process's batches; see `Session.evaluation_images`."""
        own, kind = self.config.eval_batch_size, self.accelerator.device.type
        return evaluation_images(self, self.data, source, evaluation_batch_size(own, kind, 0))

    def tell(self, result: Evaluation, further: Mapping[str, Evaluation]) -> None:
        """Print each result in a line, on the main process."""
        top5 = "" if result.top5_accuracy is None else f", top-5 {100 * result.top5_accuracy:.2f} %"
        self.accelerator.print(
            f"accuracy {100 * result.accuracy:.2f} %{top5}, loss {short_loss(result.loss)}, "
            f"{result.samples} {self.data.unit}s ({self.data.eval_split}){px(self.side, ' at ')}"
            f"{more_in_words(result)}"
        )
        for name, other in further.items():
            self.accelerator.print(
                f"{name}: accuracy {100 * other.accuracy:.2f} %, loss {short_loss(other.loss)}, "
                f"{other.samples} {self.data.unit}s{more_in_words(other)}"
            )


def evaluation_images(
    session: EvaluationSession | Session, data: TrainingData, source: Any, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a source's batches in order; where processes share them, this process's part."""
    accelerator = session.accelerator
    source = data.evaluation if source is None else source
    source = as_source(source, data, session.side, "source")
    shared = session.shares_evaluation
    ranks = (accelerator.process_index, accelerator.num_processes) if shared else ()
    transform = data.transform(session.side, "none", session.config.seed)  # nothing at random
    return source.batches(evaluation_batches(len(source), batch_size, *ranks), transform)
