"""The random numbers that other libraries draw from, seeded for a while and then given back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


class GlobalStreams:
    """Python's, NumPy's and torch's own random numbers: seeded inside, untouched outside.

    timm and torchvision draw from these. What they draw for a sample then depends on its seed
    alone, not on the process or on what was drawn before. The generators of devices are left out.
    """

    def __enter__(self) -> GlobalStreams:
        self._before: Any = (
            random.getstate(),
            np.random.get_state(),  # noqa: NPY002
            torch.default_generator.get_state(),
        )
        return self

    def seed(self, seed: int) -> None:
        """Start all of them anew from a seed in [0, 2**63)."""
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)

    def __exit__(self, *_: object) -> None:
        python, numpy, state = self._before
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.default_generator.set_state(state)
