"""What each cluster offers the training loop and the checkpointer, wherever its workers run.

When workers leave or return, the server's clocks and the planner's shares change together.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import SERVER_RANK, encode, read_plan
from dbsl.plan.follow import Planner
from dbsl.plan.types import (
    Action,
    EpochEnd,
    LostWorker,
    Plan,
    RoundReport,
    Turn,
)


class WorkerGroup(NamedTuple):
    """This process's place among its worker's processes, which take joint steps together."""

    place: int = 0  # in its worker; the first exchanges with other workers
    inside: dist.ProcessGroup | None = None  # its worker's processes; None: only this one
    between: dist.ProcessGroup | None = None  # each worker's first process; None: all processes
    control: ControlGroup | None = None  # agreement of its worker's processes


class Cluster(ABC):
    """Exchange of weights between this process's workers and the others.

    The loop takes `turns`; in each round it asks for the `plan`, calls `pull`, trains, and calls
    `push`. Methods that are not abstract here suit clusters with nothing to do in them.

    `weights` are this process's model, as one vector, and `workers` its workers, none on a
    dedicated server. A push sends `outgoing`, in the layout of the weights; None: the weights. The
    server's process has a `server`, and the `planner` may change plans there. Processes that meet
    use `control` to agree on actions. For simulated workers, `times` gives the seconds that a
    worker's round takes to compute and to exchange, from (worker, epoch, round).
    `finish_round` is called before reports are exchanged.
    """

    holds_weights: bool = True  # whether the model's weights matter between two turns
    # Whether a checkpoint has the workers' full state, to resume at their steps; else it has only
    # the server's.
    saves_workers: bool = True

    def __init__(
        self,
        weights: FlatWeights,
        server: Server | None = None,
        *,
        planner: Planner,
        workers: Sequence[int],
        epochs: int,
        times: Callable[[int, int, int], tuple[float, float]] | None = None,
        outgoing: Tensor | None = None,
        control: ControlGroup | None = None,
        finish_round: Callable[[], object] = lambda: None,
    ) -> None:
        self.weights, self.server, self.workers = weights, server, tuple(workers)
        self._finish_round = finish_round
        self.outgoing = weights.vector if outgoing is None else outgoing
        self.planner, self.control, self._times = planner, control, times
        self.time_s = 0.0 if times else None  # the virtual clock; None: workers are real
        self._rounds_per_epoch = planner.members.rounds
        self._rounds = epochs * self._rounds_per_epoch
        self._clock = 0  # completed rounds of this process's workers
        self._waited_s = 0.0  # since the last report
        self._refused = 0
        self._reports: deque[RoundReport] = deque()  # used without a server
        self.interrupted = False  # whether the run must stop
        self.finished_early = False  # whether `finish` ended the run before its last epoch
        # Epoch ends not yet told to the loop; a server, if there is one, adds them here.
        self._untold: deque[EpochEnd] = deque() if server is None else server.finished
        self._losses: deque[LostWorker] = deque()  # not yet logged
        self._exits = ExitStack()

    def __enter__(self) -> Cluster:
        if self.control is not None:
            self._exits.enter_context(self.control.watch.watching())
        return self

    @property
    def refused(self) -> int:
        """Rounds with a loss or weights not finite, so far; without a barrier: on rank 0."""
        return self._refused if self.server is None else self.server.refused

    def __exit__(self, *error: Any) -> bool | None:
        return self._exits.__exit__(*error)

    def turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield the rounds of this process's workers, and the end of each epoch.

        While others take steps, a process without a step has turns of no worker, in which it may
        save. `RunStopped`: the run must stop while this process waits. Here all wait for each
        other: rounds and ends are the same in every process.
        """
        yield from self._ends()
        while self._clock < self._rounds:
            # Even without a worker: a dedicated server takes part in every collective.
            turn = Turn(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            yield turn
            self._clock += 1
            if self._clock % self._rounds_per_epoch == 0:
                self._receive()
                yield EpochEnd(turn.epoch, self.weights.vector, time.perf_counter())

    def _receive(self) -> None:  # noqa: B027
        """Load the global weights into the model; after joint steps they are there."""

    def plan(self, turn: Turn) -> Plan:
        """Return the plan of a turn, and decide it if necessary (a collective if processes meet).

        Then the server rank decides wherever it may change: two kinds of CPU may round equal
        measurements to different plans.
        """
        planner, at = self.planner, (turn.epoch, turn.round)
        if self.control is not None and planner.is_boundary(*at):
            decides = dist.get_rank() == SERVER_RANK
            text = self.control.share(encode(planner.decide(*at)) if decides else "")
            planner.adopt(*at, read_plan(text))
        return planner.decide(*at)

    @abstractmethod
    def pull(self, turn: Turn) -> None:
        """Load the weights that a round starts from into the model."""

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Send a round's result; True: it was refused, because it was not finite."""
        waited_s, self._waited_s = self._waited_s, 0.0  # later waiting belongs to the next round
        report = None
        for own in reports:  # one; none in a turn of no worker
            report = replace(own, compute_time_s=own.time_s, wait_time_s=waited_s)
        self._finish_round()
        with self._waiting():
            return self._hand_over(report)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - began

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every worker, for `load_state_dict`.

        The model's own weights are not included.
        """
        return {
            "clock": self._clock,
            "refused": self.refused,
            "time_s": self.time_s,
            "waited_s": self._waited_s,
            "untold": [dict(vars(end)) for end in self._untold],
            "server": self.server and self.server.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._clock, self._refused = state["clock"], state["refused"]
        self.time_s = state["time_s"] if self._times else None
        self._waited_s = state["waited_s"]
        now = {"ended_at": time.perf_counter()}  # relative to this process's start
        self._untold.clear()
        self._untold.extend(EpochEnd(**end | now) for end in state["untold"])
        if self.server is not None:
            self.server.load_state_dict(state["server"])

    def _round_of(self, worker: int) -> tuple[int, int]:
        """Return the epoch and the round that a worker is in (in the server's process)."""
        return divmod(self.server.clocks[worker], self._rounds_per_epoch)

    def reports(self) -> Iterator[RoundReport]:
        """Yield the reports of rounds pushed since the last call, if this process has them."""
        reports = self._reports if self.server is None else self.server.reports
        while reports:
            yield reports.popleft()  # a deque's ends are safe between threads

    def load(self, end: EpochEnd) -> None:
        """Load the global weights of an epoch's end into the model, unless it has them."""
        if end.weights is not self.weights.vector:
            self.weights.load(end.weights)

    def losses(self) -> Iterator[LostWorker]:
        """Yield the workers lost since the last call, in order."""
        while self._losses:
            yield self._losses.popleft()

    def agree(self, action: Action, *, round_over: bool) -> Action:
        """Return this process's action after a step: its own, or the one all agree on."""
        return Action.STOP if self.interrupted else action

    def leave(self) -> None:  # noqa: B027
        """Stop taking turns, and make the others stop."""

    @property
    def is_over(self) -> bool:
        """Whether this process's workers have no round left."""
        return self._clock >= self._rounds

    def highest(self, *values: int) -> list[int]:
        """Return the maximum of each value over the processes that meet at an epoch's end."""
        return [*values] if self.control is None else self.control.highest(*values)

    def finish(self) -> None:
        """End the turns of all processes: the run ends with the epoch that has just ended.

        All processes that meet there call it.
        """
        self.finished_early, self._rounds = True, 0
        self._untold.clear()

    def _ends(self) -> Iterator[EpochEnd]:
        """Yield the epoch ends not yet told; each may be put back."""
        while self._untold:
            yield self._untold.popleft()

    def put_back(self, end: EpochEnd) -> None:
        """Requeue an epoch's end for the resumed run: its evaluation was interrupted."""
        self._untold.appendleft(end)

    def interrupt(self) -> None:
        """Stop after this step, and wait for nobody: the run must stop."""
        self.interrupted = True

    def held(self) -> AbstractContextManager:
        """Block all other changes of the state while this is open."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Release what the cluster holds; its turns are over."""
