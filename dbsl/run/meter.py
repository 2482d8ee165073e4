"""A worker's log line every `--log-every` optimizer steps.

Only a line waits for the device: it reads the loss and the gradient norm in one transfer.
Everything else is counted on the host.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from dbsl.plan.sampler import Step
from dbsl.plan.types import RoundReport, StepLine, Turn
from dbsl.profile.memory import GIB, memory_in_use
from dbsl.run.turns import Progress

MEASURED = ("images_per_s", "memory_gib")  # fields of a line that differ from run to run


@dataclass
class _Window:
    """A worker's steps since its last line.

    `sums` (of loss and figures) and `samples`, plus the running sums of the current round, give the
    totals since the last line. They are negative if that line was in this round.
    """

    steps: int = 0  # the worker's steps in the run
    sums: list[float] = field(default_factory=list)  # empty: zeros
    samples: int = 0
    seconds: float = 0.0  # until time was last counted


class TakenSteps(NamedTuple):
    """Steps taken: their number, samples, and the last one's epoch, learning rate and worker."""

    steps: int = 0
    samples: int = 0
    epoch: int = 0
    learning_rate: float = 0.0
    worker: int | None = None  # None: a joint step


class StepMeter:
    """Counts the steps of this process's workers, and makes a line every `every` steps of each.

    With `every` 0 it makes none. The main process logs its own lines at once; other processes send
    theirs with the round's report, as do all processes if a worker `shares_batch` with further
    processes.
    """

    def __init__(
        self,
        every: int,
        workers: Iterable[int],
        model: nn.Module,
        accelerator: Accelerator,
        *,
        shares_batch: bool = False,
    ) -> None:
        self._every, self.shares_batch = every, shares_batch
        # Names of the figures that the loop logs besides the loss; None before the first batch.
        self.figures: tuple[str, ...] | None = None
        self._windows = {worker: _Window() for worker in workers}
        self._kept: list[StepLine] = []
        self._taken = TakenSteps()
        self._heard: defaultdict[int, int] = defaultdict(int)  # steps by worker, from reports
        self._due: list[int] = []  # workers with a line at the current step
        self._square: Tensor | None = None  # its gradient's squared norm
        self._began: float | None = None  # in a round: when it began or time was last counted
        self._parameters = list(model.parameters())
        self._device, self._scaler = accelerator.device, accelerator.scaler
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # profiling ran before

    def begin(self, turn: Turn, *, anew: bool) -> None:
        """Begin a round or, if not `anew`, continue the one in which the run was stopped."""
        self._turn, self._began = turn, time.perf_counter()
        if anew:
            self._kept.clear()

    def begin_step(self, step: Step, weight: float) -> None:
        """Begin an optimizer step; its gradients are those of the mean loss times `weight`.

        If a line is due, their norm is measured, unless the weight is 0.
        """
        workers = [part.worker for part in step.parts]
        for worker in workers:
            self._windows[worker].steps += 1
        if self._every:
            self._due = [w for w in workers if self._windows[w].steps % self._every == 0]
        if self._due and weight:
            self._measure(weight)

    def end_step(self, step: Step, learning_rate: float, progress: Progress) -> None:
        """Count a step that was taken; make a line if one is due."""
        if self._due:
            self._write(step, learning_rate, progress)
        self._due, self._square = [], None
        workers = [part.worker for part in step.parts]
        samples = sum(len(part.indices) for part in step.parts)
        if self.shares_batch and samples:  # the worker's other processes have the rest
            samples = round(samples / step.parts[0].weight)
        worker = workers[0] if len(workers) == 1 else None
        more = self._taken.steps + 1, self._taken.samples + samples
        self._taken = TakenSteps(*more, self._turn.epoch, learning_rate, worker)

    @torch.no_grad()
    def _measure(self, weight: float) -> None:
        square = gradient_square([p.grad for p in self._parameters if p.grad is not None])
        scale = torch.full_like(square, weight)
        if self._scaler is not None:
            scale = self._scaler.scale(scale)
        self._square = square / scale**2

    def end(self, sums: Mapping[int, Sequence[float]], samples: Mapping[int, int]) -> None:
        """End a round with the workers' losses and figures, summed over their samples."""
        self._count_time()
        self._began = None
        for worker in self._turn.workers:
            window = self._windows[worker]
            window.sums = _added(window.sums, sums.get(worker, ()))
            window.samples += samples.get(worker, 0)
            if not math.isfinite(sum(window.sums[:1])):  # the round is not merged
                self._windows[worker] = replace(window, sums=[], samples=0)

    def take_lines(self) -> tuple[StepLine, ...]:
        """Return the lines since the last call."""
        kept, self._kept = self._kept, []
        return tuple(kept)

    def take_steps(self) -> TakenSteps:
        """Return the steps taken since the last call."""
        taken, self._taken = self._taken, TakenSteps()
        return taken

    def hear(self, report: RoundReport) -> None:
        """Count the steps of a report: its worker may be lost, or replaced on resume."""
        self._heard[report.worker] += report.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, also in the middle of a round."""
        self._count_time()
        return {
            "figures": self.figures,
            "windows": {worker: asdict(window) for worker, window in self._windows.items()},
            "kept": [tuple(line) for line in self._kept],
            "heard": dict(self._heard),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned."""
        self.figures = state["figures"] and tuple(state["figures"])
        for worker, window in state["windows"].items():
            self._windows[worker] = _Window(**window)
        self._kept = [StepLine(*line) for line in state["kept"]]
        self._heard.update(state["heard"])

    def _count_time(self) -> None:
        if self._began is None:
            return
        now = time.perf_counter()
        for worker in self._turn.workers:
            self._windows[worker].seconds += now - self._began
        self._began = now

    def _write(self, step: Step, learning_rate: float, progress: Progress) -> None:
        """Make a line for each worker that is due; only this waits for the device."""
        square = torch.full((), math.nan) if self._square is None else self._square
        figures = self.figures or ()
        zeros = square.new_zeros(1 + len(figures))
        running = [progress.sums.get(worker, zeros).to(square) for worker in self._due]
        *found, (square, *_) = torch.stack([*running, square.expand_as(zeros)]).tolist()
        # Six digits: the last ones of its float64 sum may differ.
        norm = float(f"{math.sqrt(square):.6g}") if square >= 0 else math.nan
        self._count_time()
        memory_gib = memory_in_use(self._device) / GIB
        for worker, sums in zip(self._due, found, strict=True):
            window, counted = self._windows[worker], progress.samples.get(worker, 0)
            samples = window.samples + counted
            total = _added(window.sums, sums)
            loss, *means = (value / samples if samples else math.nan for value in total)
            line = StepLine(
                worker=worker,
                epoch=self._turn.epoch,
                round=self._turn.round,
                step=window.steps,
                progress=round(step.progress, 4),
                loss=loss,
                learning_rate=learning_rate,
                gradient_norm=norm,
                images_per_s=round(samples / max(window.seconds, 1e-9), 1),
                memory_gib=round(memory_gib, 3),
                figures=dict(zip(figures, means, strict=True)),
            )
            self._windows[worker] = _Window(window.steps, [-value for value in sums], -counted)
            self._kept.append(line)


def _added(sums: Sequence[float], more: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip_longest(sums, more, fillvalue=0.0)]


@torch.no_grad()
def gradient_square(gradients: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of all gradients together, on their device.

    It uses float64 to hide the order of the sums, which depends on memory addresses.
    """
    if not gradients:  # the loop left out the step's batch
        return torch.zeros(())
    exact = gradients[0].device.type in ("cpu", "cuda")  # mps has no float64, nor all of xpu
    dtype = torch.float64 if exact else None
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    return torch.stack(norms).square().sum()
