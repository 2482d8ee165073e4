"""How far a process is in its round, and the reports that are pushed with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from dbsl.cluster.clock import ComputeClock
from dbsl.plan.turns import Round, RoundReport, StepLine
from dbsl.plan.types import Plan


@dataclass
class Progress:
    """How far a process is in its round."""

    steps: int = 0  # taken
    counted: int = 0  # those that earlier workers took: in no report, but in the log's samples
    # By worker the loss and its figures, [1 + F], summed over samples.
    sums: dict[int, Tensor] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)  # by worker, all that were read
    # What the first step measured (`dbsl.profile.noise_probe`).
    noise: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.0  # the last step's

    def clear(self) -> None:
        """Begin anew: the round was pushed."""
        self.steps, self.counted, self.learning_rate = 0, 0, 0.0
        self.sums, self.samples, self.noise = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
        self.sums = {worker: sums.to(device) for worker, sums in self.sums.items()}


def read_round(
    progress: Progress, vector: Tensor
) -> tuple[dict[int, list[float]], bool, dict[str, Any]]:
    """Return the sums by worker, whether losses and a whole vector are finite, and the noise.

    It waits for the device, once.
    """
    sums, noise = progress.sums, progress.noise
    on_device = [name for name, value in noise.items() if isinstance(value, Tensor)]
    # A sum of finite weights does not overflow.
    tensors = [vector.sum(), *(noise[name] for name in on_device), *sums.values()]
    flat = torch.cat([tensor.to(vector).reshape(-1) for tensor in tensors]).tolist()
    weights, *squares = flat[: 1 + len(on_device)]
    noise = noise | dict(zip(on_device, squares, strict=True))
    rest, found = iter(flat[1 + len(on_device) :]), {}
    for worker, own in sums.items():
        found[worker] = list(islice(rest, len(own)))
    finite = all(math.isfinite(value) for value in (weights, *(own[0] for own in found.values())))
    return found, finite, noise


def make_reports(
    turn: Round,
    plan: Plan,
    steps: int,
    samples: Mapping[int, int],
    *,
    resolution: int,
    learning_rate: float,
    sums: Mapping[int, Sequence[float]],
    clock: ComputeClock,
    figures: Sequence[str] = (),
    refused: bool = False,
    noise: Mapping[str, Any] | None = None,
    lines_of: Callable[[int], tuple[StepLine, ...]] = lambda worker: (),
) -> list[RoundReport]:
    """Return one report for each worker of a turn.

    `samples` and `sums`, of the loss and the figures over the samples, lack a worker without any.
    The noise goes with the first worker. `lines_of` gives the lines that the main process lacks.
    """
    nothing = [0.0] * (1 + len(figures))
    reports = []
    for worker in turn.workers:
        mine, count = plan.workers[worker], samples.get(worker, 0)
        loss, *means = (value / max(count, 1) for value in sums.get(worker, nothing))
        lines = lines_of(worker)[:steps]  # more are refused, and a log is not worth a worker
        reports.append(
            RoundReport(
                worker,
                turn.epoch,
                turn.round,
                resolution=resolution,
                local_batch_size=mine.local_batch_size,
                samples=count,
                steps=steps,
                time_s=clock.seconds(worker),
                loss=loss,
                merge_weight=mine.merge_weight,
                learning_rate=learning_rate,
                predicted_time_s=mine.predicted_time_s * count / max(mine.samples, 1),
                refused=refused,
                logged=len(lines),
                lines=lines,
                figures=dict(zip(figures, means, strict=True)),
                **(noise or {} if worker == turn.workers[0] else {}),
            )
        )
    return reports
