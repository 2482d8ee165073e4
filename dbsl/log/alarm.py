"""The warning that measured times are not those of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dbsl.base.words import px

PREDICTION_TOLERANCE = 0.50  # relative, of a worker's time in an epoch
PREDICTION_EPOCHS = 3  # in which a worker's time is off before anything is said


class Alarm:
    """Tells which workers' times the plan keeps missing, once for each resolution.

    Args:
        profile_command: What measures step times anew; None: nothing is ever said.
        epochs: Epochs of the run.
    """

    def __init__(self, profile_command: str | None, epochs: int) -> None:
        self.profile_command = profile_command
        self._epochs = epochs
        self._said: set[int] = set()  # resolutions
        # Epochs in a row in which a worker missed its predicted time, by resolution and worker.
        self._misses: dict[int, dict[int, int]] = {}

    def times(
        self, epoch: int, resolution: int, workers: Mapping[int, Mapping[str, float]]
    ) -> str | None:
        """Take in an epoch's times; return a warning if it is time for one."""
        # The first epoch warms caches and the device up.
        if self.profile_command is None or resolution in self._said or epoch == 0:
            return None
        errors = {
            worker: values["time_s"] / values["predicted_time_s"] - 1
            for worker, values in workers.items()
            if values["predicted_time_s"] > 0
        }
        errors = {w: error for w, error in errors.items() if abs(error) > PREDICTION_TOLERANCE}
        before = self._misses.get(resolution, {})
        self._misses[resolution] = {worker: before.get(worker, 0) + 1 for worker in errors}
        missing = [w for w, n in self._misses[resolution].items() if n >= PREDICTION_EPOCHS]
        if not missing:
            return None
        self._said.add(resolution)
        worst = max(missing, key=lambda worker: abs(errors[worker]))
        return (
            f"warning: {px(resolution, 'at ', ' ')}{len(missing)} of {len(workers)} workers took "
            f"other times than planned, {PREDICTION_EPOCHS} epochs in a row (worker {worst}: "
            f"{100 * errors[worst]:+.0f} %)\n  to measure again: {self.profile_command}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        misses = {resolution: dict(workers) for resolution, workers in self._misses.items()}
        return {"said": sorted(self._said), "off": misses, "profile_command": self.profile_command}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
        self._said, self._misses = set(state["said"]), dict(state["off"])
        # A resumed run is given what it once measured.
        self.profile_command = self.profile_command or state["profile_command"]
