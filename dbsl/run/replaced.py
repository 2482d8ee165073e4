"""Data, a model and an optimizer of your own, in place of those that settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.seeds import stream_seed
from dbsl.cluster.steps import takes_fractions
from dbsl.config.fields import Role, with_role
from dbsl.config.image_settings import DataConfig
from dbsl.config.settings import NO_SIDE, RunConfig, steps_in_parts
from dbsl.data.dataset import load_data
from dbsl.data.sources import TrainingData
from dbsl.model import check_scores, try_out
from dbsl.optimizer import build_optimizer, join_optimizers, keep_ratios
from dbsl.run.accelerator import first_on_node

OptimizerBuilder = Callable[
    [nn.Module, RunConfig], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
]

# Settings that say which data, model or optimizer; with your own they have nothing to say.
_OF_DATA = (*(field.name for field in fields(DataConfig) if field.name != "dataset"), "resolutions")
# A function may read momentum and weight_decay of the settings that it is given.
_OF_OPTIMIZER = ("opt_kwargs",)


@dataclass(frozen=True)
class Replaced:
    """What a script gives in place of what its settings name; see `dbsl.open.open_session`."""

    data: TrainingData | None = None
    model: nn.Module | Callable[[], nn.Module] | None = None
    optimizer: OptimizerBuilder | None = None
    evaluate_also: Mapping[str, Any] | None = None
    figures: Sequence[str] = ()

    def named(self, given: RunConfig) -> RunConfig:
        """Return the settings with the names of what is replaced; refuse those that name others."""
        if self.data is not None:
            names = (*TrainingData.__annotations__, "on", "transform", "example")
            if missing := [name for name in names if not hasattr(self.data, name)]:
                raise SettingError(
                    "data must have what dbsl.data.sources.TrainingData names, got "
                    f"{type(self.data).__name__} without {missing[0]!r}"
                )
            if self.model is None:
                raise SettingError("model must be given with your own data, got none")
            given = _named(
                given, "dataset", self.data.name, (*_OF_DATA, *with_role(type(given), Role.DATA))
            )
        of_model = with_role(type(given), Role.MODEL)
        for setting, value, kind, void in (
            ("model", self.model, "module or a function that builds one", of_model),
            ("optimizer", self.optimizer, "function of model and settings", _OF_OPTIMIZER),
        ):
            if value is None:
                continue
            if not callable(value):
                raise SettingError(f"{setting} must be a {kind}, got {type(value).__name__}")
            given = _named(given, setting, _name(value), void)
        if self.model is not None and "layer_decay" in given.optimizer_settings:
            raise SettingError("opt_kwargs must leave out layer_decay with your own model")
        return given

    def load_data(self, config: RunConfig, accelerator: Accelerator) -> TrainingData:
        """Return your own data, or the images that the settings name."""
        if self.data:
            return self.data.on(accelerator.device)
        if config.resolutions == (NO_SIDE,):
            raise SettingError(f"resolutions must be positive for images, got {NO_SIDE}")
        with first_on_node(accelerator):  # one process decodes, the others read its cache
            return load_data(config, config.seed, accelerator.device)

    def build_optimizer(self, config: RunConfig, model: nn.Module) -> torch.optim.Optimizer:
        """Return what steps on a model; its groups keep their rates in proportion to `lr`."""
        if self.optimizer is not None:
            built = join_optimizers(self.optimizer(model, config))
        else:
            built = build_optimizer(
                config.optimizer,
                model,
                config.lr,
                config.momentum,
                config.weight_decay,
                **config.optimizer_settings,
            )
        return keep_ratios(built, config.lr)

    def check_optimizer(self, config: RunConfig, model: nn.Module) -> None:
        """Raise ``SettingError`` if what is built cannot take this run's steps.

        Building may freeze parameters, which all that follows is to know.
        """
        optimizer = self.build_optimizer(config, model)
        if not any(p.requires_grad for p in model.parameters()):
            raise SettingError(
                "optimizer must leave parameters that are trained, got all frozen by "
                f"{config.optimizer}"
            )
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in stepped]
        if left:
            raise SettingError(
                "optimizer must have all parameters that are trained (requires_grad_(False) "
                f"freezes others), got none for {left[0]}"
                + (f" and {len(left) - 1} more" if left[1:] else "")
            )
        if steps_in_parts(config) and not takes_fractions(optimizer):
            built = getattr(optimizer, "optimizers", [optimizer])
            kinds = ", ".join(type(one).__name__ for one in built)
            raise SettingError(
                "optimizer must be one SGD, without dampening and maximize, Adam or AdamW of torch "
                f"with push gradients and sync {config.sync}, where each push is part of a step, "
                f"got {kinds} of {config.optimizer}"
            )

    def build(self, config: RunConfig, data: TrainingData, accelerator: Accelerator) -> nn.Module:
        """Return the model on the device, with the same weights in all processes."""
        model = self.model
        if not isinstance(model, nn.Module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(stream_seed(config.seed, "initial weights"))
                model = model()
        if not isinstance(model, nn.Module):
            raise SettingError(f"model must build a module, got {type(model).__name__}")
        if not any(p.requires_grad for p in model.parameters()):
            raise SettingError(
                f"model must have parameters to train, got {_name(model)} without any"
            )
        inputs, _ = data.example(2, config.resolutions[-1])
        channels_last = inputs.dim() == 4 and inputs.stride(1) == 1 < inputs.shape[1]
        layout = {"memory_format": torch.channels_last} if channels_last else {}
        model = model.to(accelerator.device, **layout)
        with torch.no_grad():
            for value in model.state_dict().values():  # rank 0's, whatever the others built
                value.copy_(broadcast(value.contiguous()))
        # What `build_model` notes of timm's models.
        model.created_with, model.small_stem, model.input_statistics = None, False, None
        model.head_dropouts = []
        _, scores = try_out(model, inputs)
        check_scores(scores, _name(model), inputs, data.num_classes, several=True)
        return model


def _named(given: RunConfig, setting: str, name: str, void: tuple[str, ...]) -> RunConfig:
    """Return the settings with a name; refuse another one, and settings without a meaning."""
    defaults = {field.name: field.default for field in fields(given)}
    own = f"with your own {'data' if setting == 'dataset' else setting}"
    for other in void:
        value = getattr(given, other)
        if value != defaults[other]:
            raise SettingError(f"{other} must be left out {own}, got {value}")
    if getattr(given, setting) not in (defaults[setting], name):
        raise SettingError(
            f"{setting} must be left out or {name} {own}, got {getattr(given, setting)}"
        )
    return replace(given, **{setting: name})


def _name(model: nn.Module | Callable[[], nn.Module]) -> str:
    if isinstance(model, nn.Module):
        return type(model).__name__
    return getattr(model, "__name__", type(model).__name__).strip("<>")
