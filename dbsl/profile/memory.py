"""CUDA memory of a training step, ``M = p + x*q`` (eq. 9), and the largest batch that fits.

The peak of the bytes that tensors take is measured: the caching allocator reserves more, in
segments that a fuller device makes it reuse. CPU memory is not measured: the system overcommits it,
and kills the process later.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from dbsl.base.machine import local_processes
from dbsl.cluster.launch import chosen_backend

GIB = 2**30
_MARGIN = 0.03  # share of the capacity left free
# Texts of out-of-memory errors. cuDNN and cuBLAS need memory for handles and workspaces, and do not
# raise torch.OutOfMemoryError.
_SHORT_OF_MEMORY = (
    "out of memory",
    "STATUS_ALLOC_FAILED",
    "STATUS_NOT_INITIALIZED",
    "CUDNN_STATUS_INTERNAL_ERROR",
    "CUDNN_STATUS_NOT_SUPPORTED",
    "unable to find an engine to execute this computation",
)


@dataclass(frozen=True)
class MemoryModel:
    """Memory of one step with x samples: ``fixed_bytes + x * sample_bytes``."""

    fixed_bytes: float  # p: parameters, optimizer state, workspace
    sample_bytes: float  # q: activations of a sample
    state_bytes: float  # optimizer state of one model; part of p
    # Bytes available to a step. They depend on the run and the moment: a kept model is updated.
    room_bytes: float = 0.0

    def fits(self) -> int:
        """Return the largest batch that fits; 0 if no sample does."""
        return max(0, int((self.room_bytes - self.fixed_bytes) // self.sample_bytes))

    def describe(self) -> str:
        """Return the line and the largest batch that fits, as text."""
        return (
            f"memory {self.sample_bytes / 2**20:.3g} MiB * x + {self.fixed_bytes / 2**20:.4g} MiB, "
            f"batches up to {self.fits()} fit into {self.room_bytes / GIB:.1f} GiB"
        )


def peak_bytes(call: Callable[[], object], device: torch.device) -> float:
    """Return the peak bytes of tensors on a CUDA device during a call."""
    give_back(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return float(torch.cuda.max_memory_allocated(device))


def room_bytes(device: torch.device) -> float:
    """Return the bytes of a CUDA device that this process may use: its own and the free ones.

    A margin of 3 % is excluded.
    """
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    # With gloo, several processes may share a GPU of this machine; NCCL refuses.
    alone = not chosen_backend()
    sharing = 1 if alone else -(-local_processes() // torch.cuda.device_count())
    return (free / sharing + torch.cuda.memory_reserved(device)) * (1 - _MARGIN)


@contextmanager
def without_trials() -> Iterator[None]:
    """Keep cuDNN from trying algorithms inside: trials take memory that training does not."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def give_back(device: torch.device) -> None:
    """Release this process's unused memory on the CUDA device, for other processes."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def memory_in_use(device: torch.device) -> float:
    """Return the bytes in use: the peak allocated so far on CUDA, else those resident now."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return float(psutil.Process().memory_info().rss)


def confirm_batch(step: Callable[[int], object], batch: int, left: float = 0.98) -> int:
    """Return a batch with which a step runs: `batch`, or after each failure the share `left`."""
    while True:
        try:
            step(batch)
            return batch
        except RuntimeError as error:
            if batch == 1 or not is_short_of_memory(error):
                raise
        # Not in the except block: the error there still holds the failed step's tensors.
        give_back(torch.device("cuda"))
        batch = max(1, int(batch * left))


def is_short_of_memory(error: RuntimeError) -> bool:
    """Return whether an error says that the device is out of memory."""
    said = any(words in str(error) for words in _SHORT_OF_MEMORY)
    return said or isinstance(error, torch.OutOfMemoryError)
