"""How much memory a training step needs: ``M = p + x*q`` (eq. 9), and the largest batch that fits.

On a CUDA device the caching allocator's reserved bytes are measured, elsewhere the peak of the
process's resident memory.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from dbsl.base.errors import SettingError
from dbsl.base.machine import local_processes
from dbsl.cluster.launch import chosen_backend

GIB = 2**30
CUDA_MARGIN, HOST_MARGIN = 0.05, 0.20  # shares of the capacity; past the host's, it kills
# Texts of errors where memory is short. cuDNN and cuBLAS need memory for handles and workspaces,
# and do not raise torch.OutOfMemoryError.
_SHORT_OF_MEMORY = (
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "unable to find an engine to execute this computation",
)
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryModel:
    """Memory of one step with x samples, ``fixed + x * per_sample`` bytes, and what there is.

    Capacity and reserve belong to the moment and the run: a cached model gets those of now.
    """

    fixed_bytes: float  # p: parameters, optimizer state, workspace
    sample_bytes: float  # q: activations of a sample
    capacity_bytes: float  # bytes that the process may use
    margin: float  # share of the capacity that is left free
    reserve_bytes: float  # for what a run holds besides one worker's training
    source: str  # the quantity that was measured
    state_bytes: float = 0.0  # optimizer state of one model; a part of p

    def fits(self) -> int:
        """Return the largest batch in the capacity; 0 if no sample fits."""
        room = self.capacity_bytes * (1 - self.margin)
        return max(0, int((room - self.reserve_bytes - self.fixed_bytes) // self.sample_bytes))

    def largest_batch(self) -> int:
        """Return the largest batch that fits; refuse what does not hold one sample."""
        if batch := self.fits():
            return batch
        need = (self.fixed_bytes + self.reserve_bytes + self.sample_bytes) / (1 - self.margin)
        raise SettingError(
            f"memory must be at least {need / GIB:.2f} GiB for a batch of one sample "
            f"({self.margin:.0%} stay free), got {self.capacity_bytes / GIB:.2f} GiB"
        )

    def describe(self) -> str:
        """Return the line, and what it admits in memory."""
        most = self.fits()
        fits = f"batches up to {most} fit" if most else "no batch fits"
        return (
            f"memory {self.sample_bytes / 2**20:.3g} MiB * x + {self.fixed_bytes / 2**20:.4g} MiB, "
            f"{fits} into {self.capacity_bytes / GIB:.1f} GiB with {self.margin:.0%} left "
            f"free ({self.source})"
        )


class PeakMemory:
    """Measures the peak memory of a call: on CUDA the allocator's, elsewhere the process's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self.source = "CUDA allocator, reserved" if self.cuda else "resident memory of the process"
        self.margin = CUDA_MARGIN if self.cuda else HOST_MARGIN

    def of(self, call: Callable[[], object]) -> float:
        """Return the peak in bytes during a call; on the host, call with ascending needs.

        What the host's allocator keeps of freed memory it gives back first where it can; else a
        small step after a large one would seem to need as much.
        """
        if self.cuda:
            give_back(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            call()
            torch.cuda.synchronize(self.device)
            return float(torch.cuda.max_memory_reserved(self.device))
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)  # glibc
        try:
            _CLEAR_REFS.write_text("5")  # resets the peak (Linux)
            call()
            line = next(x for x in _STATUS.read_text().splitlines() if x.startswith("VmHWM"))
            return float(line.split()[1]) * 1024
        except (OSError, StopIteration):
            call()
            return float(psutil.Process().memory_info().rss)

    def capacity(self) -> float:
        """Return the bytes that this process may use: its own now, and what is free."""
        if self.cuda:
            torch.cuda.empty_cache()
            free, _ = torch.cuda.mem_get_info(self.device)
            # With gloo several processes may share a GPU of this machine; NCCL refuses.
            alone = not chosen_backend()
            sharing = 1 if alone else -(-local_processes() // torch.cuda.device_count())
            return float(free / sharing + torch.cuda.memory_reserved(self.device))
        free = float(psutil.virtual_memory().available)
        used = float(psutil.Process().memory_info().rss)
        return min(free / local_processes() + used, _container_limit() / local_processes())


@contextmanager
def without_trials() -> Iterator[None]:
    """Have cuDNN try no algorithms inside: trials take memory that training does not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def give_back(device: torch.device) -> None:
    """Give memory that is free in this process back to the CUDA device, for its other processes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> float:
    """Return bytes: on CUDA the most that were allocated so far, elsewhere what is resident now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(psutil.Process().memory_info().rss)


def confirm_batch(step: Callable[[int], object], batch: int) -> int:
    """Return the largest batch, from `batch` down in steps of 5 %, with which a step runs.

    For devices whose allocator reports what it lacks; host memory would be overcommitted.
    """
    while True:
        try:
            step(batch)
            return batch
        except RuntimeError as error:
            if not is_short_of_memory(error):
                raise
            if batch == 1:
                reason = str(error).strip().partition("\n")[0]
                raise SettingError(
                    f"memory must hold a batch of one sample, got less ({reason})"
                ) from None
        # Not in the except block: the error there still holds the failed step's tensors.
        give_back(torch.device("cuda"))
        batch = max(1, batch * 19 // 20)


def is_short_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that the device's memory is short."""
    said = any(words in str(error) for words in _SHORT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError)


def _container_limit() -> float:
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            return float(Path(name).read_text())
    return float("inf")
