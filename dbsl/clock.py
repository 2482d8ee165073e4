"""Compute time by the device's own clock, waiting for other workers left out."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dbsl.emulate import Emulation


class ComputeClock:
    """Adds up what each worker computes, and makes slowed workers as slow as they are meant to be.

    On CUDA the moments are events in the stream, so that measuring waits for nothing until the
    times are read; elsewhere they are the host's, whose calls return when the work is done.

    Args:
        device: Device of the computation.
        emulation: Factors on workers' compute times; above 1 the process sleeps for the rest.
    """

    def __init__(self, device: torch.device, emulation: Emulation | None = None) -> None:
        self.epoch = 0  # that the emulation is asked for
        self._device = device
        self._cuda = device.type == "cuda"
        self._emulation = emulation
        self._spans: defaultdict[int, list[tuple]] = defaultdict(list)
        self._slept_s: defaultdict[int, float] = defaultdict(float)
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
        spans, slept = self._spans.pop(worker, []), self._slept_s.pop(worker, 0.0)
        if self._cuda and spans:
            torch.cuda.synchronize(self._device)
        return sum(self._between(start, end) for start, end in spans) + slept

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
