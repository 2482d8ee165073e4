"""Settings of how weights move between workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from dbsl.base.bounds import Within
from dbsl.cluster.transfer import Wire
from dbsl.plan.turns import Merge, Push, Sync


@dataclass(frozen=True)
class SyncConfig:
    """How the weights of workers meet."""

    # --- how workers meet
    # how workers exchange what they learn: all wait for each other every round (bsp), fast workers
    # run at most --staleness rounds ahead (ssp), nobody waits (asp), or gradients are averaged at
    # every step (step). With ssp and asp the run survives the death of a process that was launched
    # on its own
    sync: Sync = "bsp"
    # what workers send: their weights, or gradients for an optimizer at the server
    push: Push = "weights"
    # steps whose gradients are summed in one push, with --push gradients
    push_every: Annotated[int, Within(1)] = 1
    wire: Wire = "float32"  # number format of pushes between processes; bf16 halves their size
    # give each joint step the whole global batch, and leave out the samples of an epoch that are
    # too few for another; else an epoch's steps have equal sizes, at most the global batch
    drop_last: bool = False
    # batch-norm statistics over the global batch, with --sync step on GPUs
    sync_batch_norm: bool = False
    # rounds that a worker may be ahead of the slowest when it begins another, with --sync ssp
    staleness: Annotated[int, Within(0)] = 1
    # merge rule: mean or delta with bsp, ratio or half with ssp and asp; unset: mean or ratio
    merge: Merge | None = None
    # learning rate of the server's step, with --merge delta
    outer_lr: Annotated[float, Within(0, open_low=True)] = 0.7
    # Nesterov momentum of the server's step, with --merge delta; in [0, 1)
    outer_momentum: Annotated[float, Within(0, 1, open_high=True)] = 0.9
    rounds_per_epoch: Annotated[int, Within(1)] = 1  # pushes per worker and epoch
    dedicated_server: bool = False  # rank 0 serves and evaluates but does not train
    # seconds of silence after which a process counts as lost, and longest wait at a barrier; with
    # asp and ssp a process that computes is not silent
    worker_timeout: Annotated[float, Within(0, 1e9, open_low=True)] = 1800.0


def meets_at_server(sync: Sync) -> bool:
    """Whether processes meet at a server on rank 0, each in its own time, in no collective."""
    return sync in ("ssp", "asp")
