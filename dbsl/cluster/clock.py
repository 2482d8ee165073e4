"""Compute time by the device's own clock, waiting for other workers left out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from dbsl.plan.emulate import Emulation


class ComputeClock:
    """Adds up what each worker computes, and makes slowed workers as slow as they are meant to be.

    On CUDA the moments are events in the stream, so that measuring waits for nothing until the
    times are read; elsewhere they are the host's, whose calls return when the work is done.

    Args:
        device: Device of the computation.
        emulation: Factors on workers' compute times; above 1 the process sleeps for the rest.
    """

    def __init__(self, device: torch.device, emulation: Emulation | None = None) -> None:
        self.epoch = 0  # the emulation depends on it
        self._device = device
        self._cuda = device.type == "cuda"
        self._emulation = emulation
        self._spans: defaultdict[int, list[tuple]] = defaultdict(list)
        self._slept_s: defaultdict[int, float] = defaultdict(float)
        self._before_s: dict[int, float] = {}  # spent before a stopped run was resumed
        self._mark = None

    @contextmanager
    def running(self, workers: tuple[int, ...]) -> Iterator[None]:
        """Count what happens inside as computation of each of these workers.

        If `mark` was called inside, what came after its last call does not count.
        """
        start, self._mark = self._now(), None
        self._start, self._workers = start, workers
        yield
        end = self._mark or self._now()
        if not self._mark:
            self._sleep(start, end)
        for worker in workers:
            self._spans[worker].append((start, end))
        self._mark = None

    def mark(self, *, last: bool) -> None:
        """Note that the computation may end here; `last`: it does, only waiting follows."""
        self._mark = self._now()
        if last:
            self._sleep(self._start, self._mark)

    def seconds(self, worker: int) -> float:
        """Return the worker's compute time so far and start anew; waits for the device."""
        spent = self._so_far(worker)
        self._spans.pop(worker, None)
        self._slept_s.pop(worker, None)
        self._before_s.pop(worker, None)
        return spent

    def state_dict(self) -> dict[int, float]:
        """Return the workers' seconds so far; waits for the device."""
        workers = {*self._spans, *self._before_s}
        return {worker: self._so_far(worker) for worker in sorted(workers)}

    def load_state_dict(self, state: Mapping[int, float]) -> None:
        """Count on from what `state_dict` returned."""
        self._before_s = dict(state)

    def _so_far(self, worker: int) -> float:
        spans = self._spans.get(worker, [])
        if self._cuda and spans:
            torch.cuda.synchronize(self._device)
        spent = sum(self._between(start, end) for start, end in spans)
        return spent + self._slept_s.get(worker, 0.0) + self._before_s.get(worker, 0.0)

    def _sleep(self, start, end) -> None:
        for worker in self._workers if self._emulation else ():
            extra = self._emulation.factor(worker, self.epoch) - 1.0
            if extra > 0:
                if self._cuda:
                    torch.cuda.synchronize(self._device)
                duration = extra * self._between(start, end)
                time.sleep(duration)
                self._slept_s[worker] += duration

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _between(self, start, end) -> float:
        return start.elapsed_time(end) / 1000 if self._cuda else end - start
