"""Settings of the network and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError
from dbsl.base.kwargs import parse_kwargs

# Arguments of timm's `create_model`, and the settings that they are here.
_SETTINGS = {
    "drop_path_rate": "drop_path",
    "drop_block_rate": "drop_block",
    "global_pool": "gp",
    "bn_momentum": "bn_momentum",
    "bn_eps": "bn_eps",
}
_ELSEWHERE = {
    "drop_rate": "dropout",
    "pretrained": "pretrained",
    "checkpoint_path": "initial_checkpoint",
    "num_classes": "the data",
    "in_chans": "the data",
}


@dataclass(frozen=True)
class ModelConfig:
    """Which network."""

    # --- model
    # timm name, local-dir:FOLDER or hf-hub:USER/NAME; the last two start from its weights
    model: str = "resnet18"
    # start from timm's weights of the model; they are downloaded unless cached
    pretrained: bool = False
    # file of weights to start from, of safetensors or torch; the classifier, and a stem for small
    # images, are new where theirs do not fit. Images are normalised as the config.json beside the
    # file says, else as timm's weights of the model are; --mean and --std win
    initial_checkpoint: str | None = None
    # rate of stochastic depth, in [0, 1); unset: the model's own
    drop_path: Annotated[float | None, Within(0, 1, open_high=True)] = None
    # rate of DropBlock, in [0, 1); unset: the model's own
    drop_block: Annotated[float | None, Within(0, 1, open_high=True)] = None
    # pooling before the classifier: avg, max, avgmax, token and others; unset: the model's own
    gp: str | None = None
    # momentum of batch norm, in (0, 1], for models that take it; unset: the model's own
    bn_momentum: Annotated[float | None, Within(0, 1, open_low=True)] = None
    # eps of batch norm, for models that take it; unset: the model's own
    bn_eps: Annotated[float | None, Within(0, open_low=True)] = None
    # more arguments of the model as name=value, say init_values=1e-6; values have no commas
    model_kwargs: tuple[str, ...] = ()
    # factor on the classifier's weights and bias at the start; unset: 1
    head_init_scale: float | None = None
    # value of the classifier's bias at the start, say -6 for --bce-loss; unset: the model's own
    head_init_bias: float | None = None
    # compute activations twice instead of keeping them: less memory, more time
    grad_checkpointing: bool = False
    # decay per epoch of averaged weights, say 0.8; they are evaluated beside the raw; 0: off
    ema_decay: Annotated[float, Within(0, 1, open_high=True)] = 0.0

    @property
    def model_settings(self) -> dict[str, Any]:
        """What timm's `create_model` takes beside the name and the number of classes.

        Raises:
            SettingError: If an argument of `model_kwargs` is another setting's.
        """
        named = {name: getattr(self, setting) for name, setting in _SETTINGS.items()}
        more = parse_kwargs("model_kwargs", self.model_kwargs)
        for name, setting in (_SETTINGS | _ELSEWHERE).items():
            if name in more:
                raise SettingError(
                    f"model_kwargs must leave {name} to {setting}, got {name}={more[name]!r}"
                )
        return {name: value for name, value in named.items() if value is not None} | more
