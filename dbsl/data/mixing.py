"""Mixup and CutMix of timm, drawn from a stream for each batch and for batches of any size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypedDict

import torch
from torch import Tensor

from dbsl.base.bounds import Within
from dbsl.base.lazy import lazy_import
from dbsl.base.seeds import stream_seed
from dbsl.data.streams import GlobalStreams
from dbsl.plan.sampler import Part

timm = lazy_import("timm")


class MixupKwargs(TypedDict, total=False):
    """More arguments of `Mixing`, by the names of timm's Mixup."""

    cutmix_minmax: Annotated[tuple[float, ...] | None, Within(0, 1, open_low=True)]
    prob: Annotated[float, Within(0, 1)]
    switch_prob: Annotated[float, Within(0, 1)]
    mode: Literal["batch", "pair", "elem"]
    off_epoch: Annotated[int, Within(0)]


class Mixing:
    """Mixes each image of a batch with another of it, and their labels likewise.

    One mixing is drawn for a batch, from (seed, epoch, the batch's first sample), so that
    a resumed run draws as an unbroken one. Partners are of the same batch: how an epoch is split
    into batches matters, as it does not without mixing.

    `mixup_alpha` is of mixup's Beta distribution (arXiv 1710.09412), `cutmix_alpha` of CutMix's
    areas (arXiv 1905.04899); 0: off. With both, each batch gets one of the two.
    """

    def __init__(
        self,
        mixup_alpha: float,
        cutmix_alpha: float,
        *,
        num_classes: int,
        seed: int,
        off_epoch: int = 0,
        **more: Any,
    ) -> None:
        """Take more arguments of timm's Mixup; from `off_epoch` on, if it is not 0, mix nothing."""
        self._classes, self._seed, self._off_epoch = num_classes, seed, off_epoch
        self._mix = timm.data.Mixup(
            mixup_alpha, cutmix_alpha, label_smoothing=0.0, num_classes=num_classes, **more
        )

    def mixed(
        self, batches: Iterable[tuple[Tensor, Tensor]], parts: Iterable[Part], epoch: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of these parts mixed: images [B, 3, R, R], shares of classes [B, C].

        The last image of an odd batch stays as it is: timm mixes pairs. Images are written to.
        """
        for (images, labels), part in zip(batches, parts, strict=True):
            whole = len(labels) // 2 * 2
            shares = torch.nn.functional.one_hot(labels, self._classes).to(images.dtype)
            if whole and not (self._off_epoch and epoch >= self._off_epoch):
                with GlobalStreams() as streams:
                    first = int(part.indices[0])
                    streams.seed(stream_seed(self._seed, "mixing", epoch, first))
                    _, shares[:whole] = self._mix(images[:whole], labels[:whole])
            yield images, shares
