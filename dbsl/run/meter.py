"""What a worker says of itself every so many optimizer steps: the lines of `--log-every`.

Only a line waits for the device: it reads its loss and its gradient norm in one transfer. All else
is counted on the host.
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

MEASURED = ("images_per_s", "memory_gib")  # in a line: these differ from run to run


@dataclass
class _Window:
    """A worker's steps since its last line.

    Together with the running sums of the round under way, `sums`, of loss and figures, and
    `samples` are those since the last line. They are negative where that line was in this round.
    """

    steps: int = 0  # the worker's in the run
    sums: list[float] = field(default_factory=list)  # none: zeros
    samples: int = 0
    seconds: float = 0.0  # until time was last counted


class TakenSteps(NamedTuple):
    """Steps that were taken: how many, and the last one's place."""

    steps: int = 0
    samples: int = 0
    epoch: int = 0
    learning_rate: float = 0.0
    worker: int | None = None  # None: it was a joint step


class StepMeter:
    """Counts the steps of this process's workers, and makes a line of every so many of each.

    `every` 0 makes no lines. The log of the main process takes lines as they come; those of other
    processes go with the round's report, and so do all where a worker `shares_batch` with further
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
        # Names of what the loop logs besides the loss; None: no batch has told them.
        self.figures: tuple[str, ...] | None = None
        self._windows = {worker: _Window() for worker in workers}
        self._kept: list[StepLine] = []
        self._taken = TakenSteps()
        self._heard: defaultdict[int, int] = defaultdict(int)  # steps by worker, of reports
        self._due: list[int] = []  # workers for which the step under way makes a line
        self._square: Tensor | None = None  # its gradient's squared norm
        self._began: float | None = None  # inside a round: when it was, or time was last counted
        self._parameters = list(model.parameters())
        self._device, self._scaler = accelerator.device, accelerator.scaler
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)  # profiling came before

    def begin(self, turn: Turn, *, anew: bool) -> None:
        """Begin a round, or, not anew, go on in the one that a stopped run was in."""
        self._turn, self._began = turn, time.perf_counter()
        if anew:
            self._kept.clear()

    def begin_step(self, step: Step, weight: float) -> None:
        """Begin an optimizer step, whose gradients are there, of the mean loss times `weight`.

        If a line is due they are measured; a weight of 0 has none.
        """
        workers = [part.worker for part in step.parts]
        for worker in workers:
            self._windows[worker].steps += 1
        if self._every:
            self._due = [w for w in workers if self._windows[w].steps % self._every == 0]
        if self._due and weight:
            self._measure(weight)

    def end_step(self, step: Step, learning_rate: float, progress: Progress) -> None:
        """Count a step that is taken; make a line of it, if one is due."""
        if self._due:
            self._write(step, learning_rate, progress)
        self._due, self._square = [], None
        workers = [part.worker for part in step.parts]
        samples = sum(len(part.indices) for part in step.parts)
        if self.shares_batch and samples:  # the others of its worker have the rest
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
        """Return the steps that were taken since the last call."""
        taken, self._taken = self._taken, TakenSteps()
        return taken

    def hear(self, report: RoundReport) -> None:
        """Count the steps of a report: its worker may be lost, or leave the run to others."""
        self._heard[report.worker] += report.steps

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` goes on from, also in the middle of a round."""
        self._count_time()
        return {
            "figures": self.figures,
            "windows": {worker: asdict(window) for worker, window in self._windows.items()},
            "kept": [tuple(line) for line in self._kept],
            "heard": dict(self._heard),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned."""
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
        """Make a line for each worker that is due; the only wait for the device."""
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

    In float64, so that the order of its sums, which follows where memory lies, cannot be seen.
    """
    if not gradients:  # of a step whose batch the loop has left out
        return torch.zeros(())
    exact = gradients[0].device.type in ("cpu", "cuda")  # mps has no float64, nor all of xpu
    dtype = torch.float64 if exact else None
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient in gradients]
    return torch.stack(norms).square().sum()
