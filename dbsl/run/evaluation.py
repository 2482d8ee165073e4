"""What an evaluation finds; and evaluation alone: weights, and the images to evaluate them on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Generic

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.base.errors import SettingError
from dbsl.base.words import px, short_loss
from dbsl.config.parse import read_settings, run_folder_of
from dbsl.config.settings import RunConfig
from dbsl.data.sources import Source, TrainingData, as_source
from dbsl.model import check_patches, check_sides, load_own_weights, load_timm_weights
from dbsl.plan.sampler import evaluation_batch_size, evaluation_batches
from dbsl.plan.types import RESERVED
from dbsl.run.replaced import Replaced
from dbsl.run.training import ConfigT


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
        taken = {field.name for field in fields(self)} | RESERVED
        if wrong := [name for name in self.more if name in taken]:
            raise SettingError(
                f"more of Evaluation must have names that no field has, got {wrong[0]!r}"
            )

    def also(self, name: str, result: Evaluation) -> Evaluation:
        """Return this result with that of other samples or weights, as NAME_accuracy and so on."""
        found = {"accuracy": result.accuracy, "loss": result.loss, **result.more}
        more = {**self.more, **{f"{name}_{key}": value for key, value in found.items()}}
        own = {field.name: more.pop(field.name) for field in fields(self) if field.name in more}
        return replace(self, **own, more=more)


_MOST_PRINTED = 8  # of your own metrics in a line


def more_in_words(evaluation: Evaluation) -> str:
    """Return your own metrics that an evaluation has, for its line."""
    sets = further_sets(evaluation.more)
    told = {f"{name}_{kind}" for name in sets for kind in ("accuracy", "loss")}
    own = [(name, value) for name, value in evaluation.more.items() if name not in told]
    left = len(own) - _MOST_PRINTED
    text = "".join(f"  {name} {short_loss(value)}" for name, value in own[:_MOST_PRINTED])
    return text + (f"  ({left} more)" if left > 0 else "")


_RESERVED = ("ema", "top5", "train")  # whose figures an evaluation has


def further_sets(row: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Return accuracy and loss of the further evaluation sets that a row of figures has."""
    names = [key.removesuffix("_accuracy") for key in row if key.endswith("_accuracy")]
    return {
        name: (row[f"{name}_accuracy"], row[f"{name}_loss"])
        for name in names
        if name not in _RESERVED and f"{name}_loss" in row
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
        config, accelerator = self.config, self.accelerator
        size = evaluation_batch_size(config.eval_batch_size, accelerator.device.type, largest=0)
        transform = self.data.transform(self.side, "none", config.seed)
        source = self.data.evaluation if source is None else source
        source = as_source(source, self.data, self.side, "source")
        return evaluation_images(source, transform, size, accelerator, self.shares_evaluation)

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
    source: Source, transform: Any, batch_size: int, accelerator: Accelerator, shared: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return a source's batches in order; where processes share them, this process's part."""
    ranks = (accelerator.process_index, accelerator.num_processes) if shared else ()
    return source.batches(evaluation_batches(len(source), batch_size, *ranks), transform)


def further_sources(
    replaced: Replaced, config: RunConfig, data: TrainingData, accelerator: Accelerator
) -> dict[str, Source]:
    """Return the further evaluation sets that a script names."""
    sources = {}
    for name, given in (replaced.evaluate_also or {}).items():
        if not re.fullmatch(r"\w+", str(name)) or name in _RESERVED:
            raise SettingError(
                f"evaluate_also must have words for names, not {' or '.join(_RESERVED)}, "
                f"got {name!r}"
            )
        if isinstance(given, str | Path):
            if replaced.data is not None:
                raise SettingError(
                    f"evaluate_also must have sources or datasets of tensors with your own data, "
                    f"got {given}"
                )
            changes = {"dataset": str(given), "train_samples": None, "eval_samples": None}
            given = replaced.load_data(replace(config, **changes), accelerator)
        sources[name] = as_source(given, data, config.resolutions[-1], f"evaluate_also {name}")
    return sources


def prepare_evaluation(
    config: ConfigT, accelerator: Accelerator, replaced: Replaced, folder: Path | None
) -> EvaluationSession[ConfigT]:
    """Load the data, and the weights in a run folder or a checkpoint; None: of `config.model`."""
    name = config.model if folder is None else f"local-dir:{folder}"
    _check_weights(config, replaced, folder, name)
    data = replaced.load_data(config, accelerator)
    if replaced.model is not None:
        side = (config.resolutions or data.resolutions)[-1]
        model = replaced.build(replace(config, resolutions=(side,)), data, accelerator)
        load_own_weights(model, folder)
    else:
        model, statistics, trained_at = load_timm_weights(name, pretrained=config.pretrained)
        side = config.resolutions[-1] if config.resolutions else trained_at
        check_patches(model, (side,))
        if model.num_classes != data.num_classes:
            raise SettingError(
                f"dataset must have the {model.num_classes} classes of {name} with eval_only, got "
                f"{data.num_classes}"
            )
        _check_names(model, data, name, accelerator)
        data = data.normalised_as(statistics)
        model = model.to(accelerator.device, memory_format=torch.channels_last)
        check_sides(name, model, data, (side,))
    also = further_sources(replaced, replace(config, resolutions=(side,)), data, accelerator)
    return EvaluationSession(config, accelerator, data, model, side, also)


def _check_weights(config: RunConfig, replaced: Replaced, folder: Path | None, name: str) -> None:
    """Raise ``SettingError`` unless there are weights, and of the model that is given."""
    if replaced.model is not None and folder is None:
        raise SettingError("resume must name the run whose weights are evaluated, got none")
    if folder is not None:
        trained = read_settings(run_folder_of(str(folder), None) / "config.yaml").get("model")
        if replaced.model is None and config.model != (trained or config.model):
            raise SettingError(
                f"model must be left out with resume and eval_only, got {config.model} and the "
                f"run's {trained}"
            )
    if ":" not in name and not config.pretrained:
        raise SettingError(
            "model must have weights with eval_only (local-dir:FOLDER, hf-hub:USER/NAME, "
            f"--pretrained, or a run's by --resume), got {name}"
        )


def _check_names(model: nn.Module, data: TrainingData, name: str, accelerator: Accelerator) -> None:
    """Warn of classes with other names than the weights', refuse the same in another order.

    The same classes may be spelled otherwise, as ImageNet's are.
    """
    trained = model.pretrained_cfg.get("label_names")
    given = getattr(data, "class_names", ())  # your own data may have none
    if not isinstance(trained, list | tuple) or len(trained) != len(given):
        return
    unlike = [n for n, (a, b) in enumerate(zip(trained, given, strict=True)) if a != b]
    if not unlike:
        return
    first = unlike[0]
    if {*trained} == {*given}:
        raise SettingError(
            f"dataset must have the classes of {name} in their order with eval_only, got "
            f"{given[first]!r} as class {first}, which is {trained[first]!r} there"
        )
    accelerator.print(
        f"warning: {len(unlike)} of {len(given)} classes have other names in the data than in "
        f"{name}, such as {given[first]!r} for {trained[first]!r}: unless they are the same "
        "classes, the accuracy says nothing"
    )
