"""Binary cross-entropy as timm has it: each class is a yes or no of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch.nn.functional as F
from torch import Tensor

from dbsl.base.bounds import Within
from dbsl.base.errors import SettingError


@dataclass(frozen=True)
class BceConfig:
    """Whether the loss is binary cross-entropy, and of what kind."""

    # --- binary cross-entropy
    # binary cross-entropy instead of cross-entropy: each class is a yes or no of its own
    bce_loss: bool = False
    # share of a class above which it counts as whole, and else as absent, with --bce-loss; unset:
    # shares stay, as label smoothing and mixing make them
    bce_target_thresh: Annotated[float | None, Within(0, 1, open_high=True)] = None
    # sum the binary cross-entropy over the classes instead of its mean
    bce_sum: bool = False


def check_bce(config: BceConfig) -> None:
    """Raise ``SettingError`` if a setting of binary cross-entropy is given without it."""
    given = {"bce_sum": config.bce_sum, "bce_target_thresh": config.bce_target_thresh is not None}
    for name, is_given in given.items():
        if is_given and not config.bce_loss:
            raise SettingError(f"bce_loss must be given with {name}, got {name} alone")


def first_loss(config: object, classes: int) -> float:
    """Return the loss of a network that has learnt nothing, all of whose logits are 0."""
    if not (isinstance(config, BceConfig) and config.bce_loss):
        return math.log(classes)
    return math.log(2) * (classes if config.bce_sum else 1)


def guessing_loss(config: object, classes: int) -> float:
    """Return the loss of guessing, all classes being as likely: cross-entropy's, or of `BceConfig`.

    Smoothing and mixing leave it as it is. Shares above a threshold count as whole: mixed images
    then have two classes.
    """
    if not (isinstance(config, BceConfig) and config.bce_loss):
        return math.log(classes)
    mixed = config.bce_target_thresh is not None and getattr(config, "mixes", False)
    share = min(2 if mixed else 1, classes / 2) / classes
    loss = -share * math.log(share) - (1 - share) * math.log(1 - share)
    return loss * classes if config.bce_sum else loss


def binary_cross_entropy(
    logits: Tensor, labels: Tensor, config: BceConfig, label_smoothing: float
) -> Tensor:
    """Return the mean loss of logits [B, C] and labels, [B] or shares of classes [B, C]."""
    from timm.loss import BinaryCrossEntropy  # slow to import, and seldom needed

    shares = labels if labels.dim() == 2 else F.one_hot(labels, logits.shape[1])
    shares = (1 - label_smoothing) * shares + label_smoothing / logits.shape[1]
    loss = BinaryCrossEntropy(target_threshold=config.bce_target_thresh, sum_classes=config.bce_sum)
    return loss(logits.float(), shares)
