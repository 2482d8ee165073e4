"""What a step's time depends on: the device, the model, and how it is trained."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from dbsl.base.cores import local_processes
from dbsl.base.lazy import lazy_import
from dbsl.optimizer import ClipMode

timm = lazy_import("timm")


@dataclass(frozen=True)
class Setup:
    """Everything that a step's time depends on, but its resolution and its batch size.

    Of a loss function it has the text, not that of what it calls.
    """

    device: str  # name of the device
    model: str
    parameters: int
    trained: int  # parameters that are not frozen
    num_classes: int
    precision: str
    optimizer: str
    momentum: bool  # whether the optimizer has momentum
    weight_decay: bool  # whether the optimizer decays weights
    compile: bool
    cpu_threads: int
    local_processes: int  # processes that run on the machine at the same time
    torch: str
    timm: str
    clip: ClipMode | None = None  # how gradients are clipped
    micro_batch: int | None = None  # samples that are computed at once
    loss: str | None = None  # digest of the loss function's text; None: cross-entropy

    @staticmethod
    def of(
        name: str,
        model: nn.Module,
        num_classes: int,
        accelerator: Accelerator,
        *,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
        compiled: bool = False,
        clip: ClipMode | None = None,
        micro_batch: int | None = None,
        loss: str | None = None,
    ) -> Setup:
        """Return the setup of this process."""
        return Setup(
            device=device_name(accelerator.device),
            model=name,
            parameters=sum(p.numel() for p in model.parameters()),
            trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
            num_classes=num_classes,
            precision=str(accelerator.mixed_precision),
            optimizer=optimizer,
            momentum=momentum > 0,
            weight_decay=weight_decay > 0,
            compile=compiled,
            cpu_threads=torch.get_num_threads(),
            local_processes=local_processes(),
            torch=torch.__version__,
            timm=timm.__version__,
            clip=clip,
            micro_batch=micro_batch,
            loss=loss,
        )


def device_name(device: torch.device) -> str:
    """Return the name of a device's hardware."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "cpu"
