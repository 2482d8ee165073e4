"""How far a process is in its round, and the reports that are pushed with its weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
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
    losses: dict[int, Tensor] = field(default_factory=dict)  # by worker, summed over samples
    samples: dict[int, int] = field(default_factory=dict)  # by worker, all that were read
    # What the first step measured (`dbsl.profile.noise_probe`).
    noise: dict[str, Any] = field(default_factory=dict)
    learning_rate: float = 0.0  # the last step's

    def clear(self) -> None:
        """Begin anew: the round was pushed."""
        self.steps, self.counted, self.learning_rate = 0, 0, 0.0
        self.losses, self.samples, self.noise = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
        self.losses = {worker: loss.to(device) for worker, loss in self.losses.items()}


def read_round(progress: Progress, vector: Tensor) -> tuple[dict[int, float], bool, dict[str, Any]]:
    """Return losses by worker, whether they and a whole vector are finite, and the noise measured.

    It waits for the device, once.
    """
    losses, noise = progress.losses, progress.noise
    on_device = [name for name, value in noise.items() if isinstance(value, Tensor)]
    tensors = [*losses.values(), *(noise[name] for name in on_device)]
    # A sum of finite weights does not overflow.
    values = torch.stack([vector.sum(), *(tensor.to(vector) for tensor in tensors)]).tolist()
    own, squares = values[: 1 + len(losses)], values[1 + len(losses) :]
    noise = noise | dict(zip(on_device, squares, strict=True))
    return dict(zip(losses, own[1:], strict=True)), all(map(math.isfinite, own)), noise


def make_reports(
    turn: Round,
    plan: Plan,
    steps: int,
    samples: Mapping[int, int],
    *,
    resolution: int,
    learning_rate: float,
    losses: Mapping[int, float],
    clock: ComputeClock,
    refused: bool = False,
    noise: Mapping[str, Any] | None = None,
    lines_of: Callable[[int], tuple[StepLine, ...]] = lambda worker: (),
) -> list[RoundReport]:
    """Return one report for each worker of a turn.

    `samples` and `losses`, by worker and summed over the samples, lack a worker without any. The
    noise goes with the first worker. `lines_of` gives the lines that the main process lacks.
    """
    reports = []
    for worker in turn.workers:
        mine, count = plan.workers[worker], samples.get(worker, 0)
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
                loss=losses.get(worker, 0.0) / max(count, 1),
                merge_weight=mine.merge_weight,
                learning_rate=learning_rate,
                predicted_time_s=mine.predicted_time_s * count / max(mine.samples, 1),
                refused=refused,
                logged=len(lines),
                lines=lines,
                **(noise or {} if worker == turn.workers[0] else {}),
            )
        )
    return reports
