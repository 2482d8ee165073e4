"""Several processes of one command on the CUDA devices that there are."""

from __future__ import annotations

import os

import torch


def of_one_device(number: int) -> dict[str, str]:
    """Return the environment of one of several processes, to which CUDA devices are dealt out."""
    if (devices := torch.cuda.device_count()) < 2:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # a scheduler's choice, say
    names = visible.split(",") if visible else list(map(str, range(devices)))
    return {"CUDA_VISIBLE_DEVICES": names[number % devices]}
