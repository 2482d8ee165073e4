"""Settings of the network and the optimizer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from dbsl.base.bounds import Within
from dbsl.base.flags import PAIRS
from dbsl.base.kwargs import check_names, parse_kwargs

# Arguments of timm's `create_model` that settings are, or the data decide.
_ELSEWHERE = {
    "drop_path_rate": "drop_path",
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
    # more arguments of timm's model as name=value, say global_pool=avg drop_block_rate=0.1
    # bn_eps=1e-3 init_values=1e-6
    model_kwargs: tuple[str, ...] = field(default=(), metadata=PAIRS)
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
        more = parse_kwargs("model_kwargs", self.model_kwargs)
        check_names("model_kwargs", more, more, _ELSEWHERE)
        return more if self.drop_path is None else {"drop_path_rate": self.drop_path} | more
