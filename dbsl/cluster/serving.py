"""Rank 0 where workers meet without a barrier: the server, its own worker, who comes and goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dbsl.base.errors import SettingError
from dbsl.cluster.conversing import Conversing
from dbsl.cluster.joining import NOTHING_LEFT, greeting
from dbsl.cluster.membership import join_worker
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.turns import EpochEnd, JoinedWorker, Round, RoundReport
from dbsl.plan.types import CurrentPlan

_LOOK_S = 0.5  # after which rank 0, where it only serves, looks whether a save is due
_STOP_PATIENCE_S = 20.0  # launchers kill what has not ended 30 s after they asked it to


class ServingCluster(Conversing):
    """Rank 0: it has the server, and perhaps a worker of its own.

    A push is merged under a lock, a pull is answered as soon as the clocks allow.

    Args:
        weights: As for `Conversing`, like all that is not named here.
        server: The server, its weights in host memory.
        pairs: Connections with the other ranks.
    """

    def __init__(
        self,
        weights: FlatWeights,
        server: Server,
        *,
        pairs: Mapping[int, dist.ProcessGroup],
        **common: Any,
    ) -> None:
        super().__init__(weights, server, **common)
        self._pushed = self.outgoing  # in host memory, which a GPU copies to faster if it is pinned
        if self.outgoing.is_cuda:
            self._pushed = torch.empty_like(self.outgoing, device="cpu", pin_memory=True)
        self._threads = [self._thread_for(rank, pair) for rank, pair in pairs.items()]

    def turns(self) -> Iterator[Round | EpochEnd]:
        """Yield this process's rounds in order, and each epoch's end as it comes."""
        for thread in self._threads:  # not before a resumed run's state is here
            thread.start()
        if self._door is not None:
            self._door.open(self)
        while self.workers and self._clock < self._rounds:
            yield Round(self.workers, *divmod(self._clock, self._rounds_per_epoch))
            self._clock += 1
            yield from self._finished(wait=False)
        yield from self._finished(wait=True)

    def plan(self, turn: Round) -> CurrentPlan:
        """Return the plan in force in a turn, waiting while the worker is too far ahead.

        Until it begins, a loss may change the plan.
        """
        (worker,) = turn.workers
        began = time.perf_counter()
        with self._changed:
            if self._may_begin(worker):
                self.server.begin(worker)
            self._waited_s += time.perf_counter() - began
            return self._plans.planner.at(turn.epoch, turn.round)

    def pull(self, turn: Round) -> None:
        """Bring the global weights into the model, waiting while the worker is too far ahead."""
        (worker,) = turn.workers
        began = time.perf_counter()
        with self._changed:
            stop = not self._may_begin(worker)
            weights = None if stop else self.server.pull(worker)
        if stop:
            self.on_stop()
        else:  # a copy to a GPU takes its time, and others need not wait for it
            self.weights.load(weights)
            with self._changed:
                self.server.release(weights)
        self._waited_s += time.perf_counter() - began

    def _may_begin(self, worker: int) -> bool:
        """Wait, with the lock held, until this process's worker may begin; False: the run stops."""
        self._wait_for(lambda: self._interrupted or self.server.may_start(worker))
        return not self._interrupted

    def push(self, reports: Sequence[RoundReport]) -> bool:
        """Give the worker's weights, or gradients, to the server; True: they were refused."""
        (report,) = reports
        report = replace(report, compute_time_s=report.time_s, wait_time_s=self._waited_s)
        began = time.perf_counter()
        self._merge(self._pushed.copy_(self.outgoing), report)
        self._waited_s = time.perf_counter() - began
        return report.refused

    def is_served(self, rank: int) -> bool:
        """Whether a rank's worker is there, and has something left to do."""
        worker = self._worker_of(rank)
        with self._changed:
            return worker in self.server.active and self.server.clocks[worker] < self._rounds

    def admit(self, rank: int, pair: dist.ProcessGroup) -> None:
        """Go on with one more worker, whose process has this connection (in a thread of the door).

        Raises:
            SettingError: If there is nothing for it to do, or no plan with it.
        """
        worker = self._worker_of(rank)
        with self._changed:
            if self._stopping or self._interrupted or self._failure:
                raise SettingError("the job is stopping")
            if worker in self.server.active:
                raise SettingError(f"{NOTHING_LEFT}: worker {worker} has done all its rounds")
            clock = join_worker(self.server, self._plans.planner, worker, self._rounds)
            if clock >= self._rounds:
                raise SettingError(f"{NOTHING_LEFT}: others have begun the last epoch")
            epoch = clock // self._rounds_per_epoch
            self._membership.append(JoinedWorker(rank, worker, clock, epoch))
            thread = self._thread_for(rank, pair, greeting(clock, self._announced[0]))
            self._threads.append(thread)
            thread.start()

    def announce(self, sequence: int, epoch: int) -> tuple[int, int]:
        """Return the save to take part in; every worker is asked to when it pulls next."""
        self._announced = (sequence, epoch)
        return self._announced

    def interrupt(self) -> None:
        """End this process's waits: the run is to stop."""
        with self._changed:
            self._interrupted = True
            self._changed.notify_all()

    def leave(self, sequence: int) -> int:
        """Stop serving; return the number of the save to take part in, which is `sequence`.

        The others have until a time to leave as well: they do when they have heard of it, after a
        step or where they pull.
        """
        self._close_door()
        with self._changed:
            self._stopping = self._interrupted = True
            self._announced = (sequence, -1)
            self._changed.notify_all()
        patience = time.monotonic() + min(self._timeout_s, _STOP_PATIENCE_S)
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, patience - time.monotonic()))
        return sequence

    def finish(self) -> None:
        """See `Cluster.finish`: wait until every worker has heard of it, where it comes to pull."""
        self._close_door()
        with self._changed:
            self._stopping = self._interrupted = self.finished_early = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()  # it ends: silent workers are given up
        super().finish()
        self._interrupted = False
        self.server.finished.clear()

    def close(self) -> None:
        """Wait for the serving threads."""
        self._close_door()
        for thread in self._threads:
            thread.join(self._timeout_s)

    def __exit__(self, *error: Any) -> bool | None:
        self._close_door()
        return super().__exit__(*error)

    def held(self) -> AbstractContextManager:
        """Hold pushes up for as long as this is open."""
        return self._changed

    def state_dict(self) -> dict[str, Any]:
        """Return which round it is, and the server's state.

        This process's weights are the model's; they are not in here.

        Raises:
            Exception: What has failed in a thread, a merge rule's error for one: such a state is
                not to be gone on from.
        """
        with self._changed:
            self._raise_failure()
            server = self.server.state_dict()
            return {"clock": self._clock, "waited_s": self._waited_s, "server": server}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; the server's clock is this worker's, too."""
        self._clock, self._waited_s = state["clock"], state["waited_s"]
        server = self.server
        server.load_state_dict(state["server"])
        # The others save later than the server, perhaps in a round that they have begun since.
        there = server.active - server.newcomers
        server.inside = {w: server.clocks[w] for w in there} | server.inside

    def _close_door(self) -> None:
        if self._door is not None:
            self._door.close()

    def _finished(self, *, wait: bool) -> Iterator[EpochEnd]:
        """Yield the epochs' ends that have come; `wait`: all that are to come.

        While it waits this process has no steps after which it could save, and is asked to here.
        """
        while True:
            with self._changed:
                if wait and not self.server.finished and not self._all_done():
                    self._wait_for(lambda: self._interrupted or self.server.finished, _LOOK_S)
                self._raise_failure()
                end = self.server.finished.popleft() if self.server.finished else None
            if end is None:
                if not wait or self._all_done():
                    return
                act = self.on_stop if self._interrupted else self.idle
                act()
            else:
                yield end

    def _all_done(self) -> bool:
        return self.server.slowest() >= self._rounds
