"""The metaparameters of a study's trials: points of a scrambled Sobol sequence.

They depend on the seed, the optimizer and the batch size alone: not on who runs a trial, nor when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dbsl.base.lazy import lazy_import

qmc = lazy_import("scipy.stats.qmc")


@dataclass(frozen=True)
class Range:
    """The values of one metaparameter: a range on a scale, or where both ends are equal, one."""

    low: float
    high: float
    scale: str  # LINEAR_SCALE, LOG_SCALE, or REVERSE_LOG_SCALE: 1 - value on a log scale

    @property
    def is_fixed(self) -> bool:
        """Whether there is nothing to search."""
        return self.low == self.high

    def value(self, share: float) -> float:
        """Return the value at a share, in [0, 1), of the range on its scale."""
        if self.scale == "LINEAR_SCALE":
            return self.low + share * (self.high - self.low)
        is_reversed = self.scale == "REVERSE_LOG_SCALE"
        low, high = (1 - self.high, 1 - self.low) if is_reversed else (self.low, self.high)
        searched = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
        searched = min(max(searched, low), high)
        return 1 - searched if is_reversed else searched


def search_points(ranges: Mapping[str, Range], count: int, seed: int) -> list[dict[str, float]]:
    """Return the first `count` points of a sequence that fills all ranges evenly."""
    searched = [name for name, own in ranges.items() if not own.is_fixed]
    fixed = {name: own.low for name, own in ranges.items() if own.is_fixed}
    if not searched:
        return [fixed] * count
    sobol = qmc.Sobol(len(searched), scramble=True, seed=seed % 2**32)
    rows = sobol.random_base2(math.ceil(math.log2(count)))[:count].tolist()
    return [
        fixed | {name: ranges[name].value(v) for name, v in zip(searched, row, strict=True)}
        for row in rows
    ]


def trial_parameters(point: Mapping[str, float], steps: int) -> dict[str, float]:
    """Return a trial's metaparameters, under the published names where they have one.

    Args:
        point: One of `search_points`.
        steps: The trial's step budget.
    """
    rate = point["effective_learning_rate"] * (1 - point.get("momentum", 0.0))
    decay_steps = max(1, round(point["learning_rate_decay_share"] * steps))
    return {**point, "learning_rate": rate, "learning_rate_decay_steps": decay_steps}


def search_entries(ranges: Mapping[str, Range]) -> dict[str, dict[str, Any]]:
    """Return the entries of ``parameter_configs`` in ``study.json``."""
    return {
        name: {
            "type": "DOUBLE",
            "scale": own.scale,
            "min_value": own.low,
            "max_value": own.high,
            # No value lies beyond such a bound, so a best value there is not on an edge.
            "fixed_bounds": ["min"] * (own.low == 0) + ["max"] * (own.high == 1),
        }
        for name, own in ranges.items()
        if not own.is_fixed
    }
