"""What is changed in timm's models for a run: stems, patches, heads, dropout, batch norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dbsl.base.errors import SettingError
from dbsl.base.lazy import lazy_import
from dbsl.data.sources import TrainingData

timm = lazy_import("timm")

SMALL_STEM_UP_TO = 64  # pixels: a stem that divides the side by 4 leaves too little of such images


class StridedConv2d(nn.Conv2d):
    """A convolution whose gradient is right also where images are narrower than its stride.

    In bfloat16 on the CPU, torch's (2.11 to 2.15, oneDNN) then has whatever was in memory in its
    weights' gradient: a ResNet's last stage at 16 px is such a case. Those are computed in float32.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `torch.nn.Conv2d`."""
        if images.device.type == "cpu" and images.shape[-1] < self.stride[1]:
            with torch.autocast("cpu", enabled=False):
                return super().forward(images.to(self.weight.dtype))
        return super().forward(images)


def check_patches(model: nn.Module, resolutions: Sequence[int]) -> None:
    """Raise ``SettingError`` unless images of each resolution are whole patches of the model's."""
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if patch is None or not model.created_with:
        return
    for resolution in resolutions:
        if any(resolution % side for side in patch):
            raise SettingError(
                f"resolutions must be multiples of {max(patch)}, the side of the model's patches, "
                f"got {resolution}"
            )


def check_sides(name: str, model: nn.Module, data: TrainingData, resolutions: Sequence[int]) -> int:
    """Return the fewest samples that a model of timm's trains on; see `least_batch`.

    Raises:
        SettingError: If images of a resolution are too small or too large for it.
    """
    least = 1
    for side in resolutions:
        try:
            least = max(least, least_batch(model, data.example(1, side)[0]))
        except Exception as error:  # of any code of timm's
            reason = " ".join(str(error).split())[:200]
            raise SettingError(
                f"model must take images of {side} px, got {name} ({reason})"
            ) from None
    return least


@torch.no_grad()
def least_batch(model: nn.Module, example: torch.Tensor) -> int:
    """Return the fewest samples that the model trains on: 2 where batch norm sees one value each.

    A ResNet's last maps are 1x1 pixel at 8 px; the variance of a single value is no statistic.
    """
    least = 1

    def look(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal least
        if inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1]:
            least = 2

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(look) for norm in norms]
    training = model.training
    model.eval()
    model(example)
    model.train(training)
    for hook in hooks:
        hook.remove()
    return least


def join_batch_norm(model: nn.Module) -> nn.Module:
    """Return the model with batch norm over the samples of all processes; parameters stay.

    Where it trains, every process must take the same passes.
    """
    # torch's converter would drop the activations that timm has in some of these layers.
    return timm.layers.convert_sync_batchnorm(model)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the model normalises what it trains on by the batch: layers that are not frozen."""
    norms = (m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return any(all(p.requires_grad for p in norm.parameters()) for norm in norms)


def set_training(model: nn.Module) -> None:
    """Put a model into training mode, but for the modules whose parameters are all frozen.

    In evaluation mode their batch norm keeps its statistics, and they drop nothing.
    """
    model.train()
    if all(parameter.requires_grad for parameter in model.parameters()):
        return
    for module in model.modules():
        trained = [parameter.requires_grad for parameter in module.parameters()]
        if trained and not any(trained):
            module.eval()


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the dropout before the classifier; weights and optimizer state stay as they are."""
    model.drop_rate = probability  # read at every forward pass where timm applies it as a function
    for module in model.head_dropouts:
        module.p = probability


def transformer_args(final_resolution: int, resolutions: Sequence[int]) -> dict[str, Any]:
    """Return what a transformer is created with, so that it takes all resolutions."""
    args = {"img_size": final_resolution, "dynamic_img_size": True}
    if final_resolution <= SMALL_STEM_UP_TO:  # patches of 16 px would leave 4 of 32 px
        common = math.gcd(*resolutions)
        most = max(1, final_resolution // 8)
        args["patch_size"] = max(side for side in range(1, most + 1) if common % side == 0)
    return args


def shrink_stem(model: nn.Module) -> bool:
    """Replace a ResNet's 7x7 stride-2 stem and its pooling; say whether there was one."""
    conv, pool = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (7, 7) or pool is None:
        return False
    model.conv1 = nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm does
    model.maxpool = nn.Identity()
    return True
