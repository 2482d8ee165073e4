"""A vector from one process to another, in chunks: what is done with one overlaps with the next."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1 << 20  # numbers, 4 MiB of float32: cache-sized, and few enough messages

Wire = Literal["float32", "bf16"]

# Timeout of an exchange, which ends earlier: a `Pulse` closes the connection after silence.
_EVER = timedelta(days=10_000)


def isend(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to send a tensor over a group of two.

    Not by `dist.isend`, which does not know groups of processes that joined a running job.
    """
    return pair.send([tensor], 1 - pair.rank(), tag)


def irecv(tensor: Tensor, pair: dist.ProcessGroup, tag: int = 0) -> dist.Work:
    """Begin to receive into a tensor over a group of two."""
    return pair.recv([tensor], 1 - pair.rank(), tag)


def send(tensor: Tensor, pair: dist.ProcessGroup) -> None:
    """Send a tensor over a group of two, however long the other process is busy."""
    isend(tensor, pair).wait(_EVER)


def receive(tensor: Tensor, pair: dist.ProcessGroup) -> None:
    """Receive into a tensor over a group of two, however long the other process is busy."""
    irecv(tensor, pair).wait(_EVER)


class Transfer:
    """Sends vectors of one length over a group of two, and receives them.

    A vector in host memory and in the wire's dtype is sent from, and received into, where it is;
    others pass a buffer, which is pinned for a CUDA device. Between `send` and `wait` the sent
    vector must stay as it is.

    Args:
        like: A vector as they are sent.
        pair: Group of this process and the other one.
        dtype: What travels.
    """

    def __init__(
        self, like: Tensor, pair: dist.ProcessGroup, dtype: torch.dtype | None = None
    ) -> None:
        self._pair = pair
        self._dtype = dtype or like.dtype
        self._buffer: Tensor | None = None
        self._length = len(like)
        self._stream = torch.cuda.Stream(like.device) if like.is_cuda else None
        self._pending: list[dist.Work] = []

    def send(
        self, vector: Tensor, *, minus: Tensor | None = None, copy: Tensor | None = None
    ) -> None:
        """Begin to send a vector, or its difference to `minus`; `copy` becomes equal to it."""
        self.wait()
        chunks = self._chunks(vector, direct=minus is None)
        arrivals = [None] * len(chunks)
        before, copies = _split(minus, len(chunks)), _split(copy, len(chunks))
        if self._stream is not None:  # all copies to the host are queued before the first is sent
            self._stream.wait_stream(torch.cuda.current_stream(vector.device))
            with torch.cuda.stream(self._stream):
                arrivals = [
                    self._stage(*both, old) for both, old in zip(chunks, before, strict=True)
                ]
        for number, (chunk, staged) in enumerate(chunks):
            if self._stream is None:  # while the chunks before it are on their way
                self._stage(chunk, staged, before[number])
            else:
                arrivals[number].synchronize()
            self._pending.append(isend(staged, self._pair))
            if copy is not None:
                copies[number].copy_(chunk)

    def _stage(
        self, chunk: Tensor, staged: Tensor, minus: Tensor | None
    ) -> torch.cuda.Event | None:
        """Copy a chunk to where it is sent from; of a CUDA device, return the copy's event."""
        if staged is not chunk:
            change = chunk if minus is None else chunk - minus
            staged.copy_(change, non_blocking=self._stream is not None)
        if self._stream is None:
            return None
        return self._stream.record_event()

    def wait(self) -> None:
        """Wait until what was sent last is on its way, and may be changed."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.wait(_EVER)

    def receive(
        self,
        vector: Tensor,
        *,
        plus: Tensor | None = None,
        copy: Tensor | None = None,
        check: bool = False,
    ) -> bool:
        """Receive into a vector; on a CUDA device its chunks are being copied when this returns.

        `plus` is added to it, and `copy` becomes equal to it. With `check`, return whether all of
        it is finite.
        """
        self.wait()
        chunks, sums = self._chunks(vector), []
        added, copies = _split(plus, len(chunks)), _split(copy, len(chunks))
        works = [irecv(staged, self._pair) for _, staged in chunks]
        for number, (work, (chunk, staged)) in enumerate(zip(works, chunks, strict=True)):
            work.wait(_EVER)
            # All of this while the next chunk comes.
            if staged is not chunk:
                chunk.copy_(staged, non_blocking=True)
            if plus is not None:
                chunk.add_(added[number])
            if copy is not None:
                copies[number].copy_(chunk)
            if check:
                sums.append(chunk.sum())  # finite ones do not overflow
        return not sums or bool(torch.stack(sums).sum().isfinite())

    def _chunks(self, vector: Tensor, *, direct: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Return chunks of the vector, each with what of it is sent or received."""
        chunks = vector.split(CHUNK)
        if direct and vector.dtype == self._dtype and vector.device.type == "cpu":
            return [(chunk, chunk) for chunk in chunks]
        if self._buffer is None:
            pinned = self._stream is not None
            self._buffer = torch.empty(self._length, dtype=self._dtype, pin_memory=pinned)
        return list(zip(chunks, self._buffer.split(CHUNK), strict=True))


def _split(vector: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """Return a vector's chunks, once for all of them; of no vector, as many times None."""
    return [None] * count if vector is None else vector.split(CHUNK)
