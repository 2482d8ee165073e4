"""A case, played in the simulated cluster to its end, and what came of it."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from dbsl.base.errors import SyncError
from dbsl.checkpoint.disk import pack, unpack
from dbsl.checkpoint.handover import Saved, for_others, with_lost_workers
from dbsl.plan.types import EpochEnd, Plan, RoundReport, Turn
from dbsl.run.workers import Workers
from experiments.benchmarks.coverage.cases import Case, Stop
from experiments.benchmarks.coverage.prepare import prepare


@dataclass
class Played:
    """What came of a case."""

    turns: int = 0
    changes: int = 0  # new plans, by measured times
    stops: int = 0
    resized: int = 0  # stops that another number of workers went on from
    lost_workers: int = 0
    lost: int = 0  # samples that the planner counted
    expected: int = 0
    trained: int = 0
    twice: int = 0
    ahead: int = 0  # rounds, the most that a worker that began one was before the slowest
    pushed: float = 0.0  # samples in the server's weights, where gradients are pushed
    whole: bool = True  # epochs that nobody had begun when the last worker was lost
    ended: bool = False  # those that were left could not carry the plan
    epochs: list[int] = field(default_factory=list)  # that ended, in order


def play(case: Case) -> Played:
    """Play a case to its end.

    Raises:
        NoSuchRunError: If it cannot begin.
    """
    return _Player(case).play()


class NoSuchRunError(ValueError):
    """A case's settings do not go together: no run begins with them."""


class _Player:
    """Plays a case: what train.py's loop does, with counts in place of training."""

    def __init__(self, case: Case) -> None:
        self._case, self.played = case, Played()
        self._losses = list(case.losses)  # still to come
        try:
            self._connect(prepare(case))
        except ValueError as error:
            raise NoSuchRunError(str(error)) from error
        epochs = self._run.config.epochs
        self._counts = np.zeros((epochs, case.samples), dtype=np.int64)
        self._untouched = 0  # epoch that nobody had begun when the last worker was lost
        self._stops = list(case.stops)

    def play(self) -> Played:
        """Play to the end."""
        while self._goes_on():
            pass
        self._hear()
        return self._result()

    def _connect(self, run: Workers) -> None:
        self._run, self._cluster = run, run.cluster
        self._cluster.to_come = self._losses

    def _goes_on(self) -> bool:
        """Play until the run is stopped, and resume it; False: it is over."""
        for turn in self._turns():
            self._hear()
            if isinstance(turn, EpochEnd):
                self._cluster.load(turn)
                self.played.epochs.append(turn.epoch)
                continue
            plan = self._cluster.plan(turn)
            if stop := next(filter(self._is_due, self._stops), None):
                self._stops.remove(stop)
                self._stop(stop.workers)  # inside the round, whose plan is known
                return True
            self._train(turn, plan)
        return False

    def _turns(self) -> Iterator[Turn | EpochEnd]:
        """Yield the cluster's turns; where no plan is left after a loss, the run ends."""
        try:
            yield from self._cluster.turns()
        except SyncError:
            self.played.ended = True

    def _train(self, turn: Turn, plan: Plan) -> None:
        """Count the samples of a turn as trained on, and push."""
        plans, cluster, played = self._run.plans, self._cluster, self.played
        server = cluster.server
        played.turns += 1
        places = range(plans.islands.sizes[turn.workers[0]]) if plans.islands.several else [None]
        at, where = plans.sampler, (turn.workers, turn.epoch, turn.round)
        several = [replace(at, place=place).batches_of(plan, *where) for place in places]
        steps = several[0]
        own = dict.fromkeys(turn.workers, 0)
        for step in zip(*several, strict=True) if len(places) > 1 else ():  # as each process has it
            assert len({(one.progress, one.odd, one.reweighted) for one in step}) == 1
            assert abs(sum(part.weight for one in step for part in one.parts) - 1) < 1e-9
        for batch in (batch for of_one in several for step in of_one for batch in step.batches):
            own[batch.worker] += len(batch.indices)
            np.add.at(self._counts[turn.epoch], batch.indices, 1)
        if server is not None:
            lead = server.clocks[turn.workers[0]] - server.members.slowest()
            played.ahead = max(played.ahead, lead)
        cluster.pull(turn)
        cluster.outgoing.fill_(-float(sum(own.values())))  # descent adds it to the weight
        reports = []
        for worker in turn.workers:
            mine = plan.workers[worker]
            values = {"resolution": plans.stage_at(turn.epoch).resolution, "steps": len(steps)}
            values |= {"local_batch_size": mine.local_batch_size, "samples": own[worker]}
            values |= {"merge_weight": mine.merge_weight, "learning_rate": 1.0}
            values |= {"time_s": 0.0, "loss": 0.0}
            values["predicted_time_s"] = mine.predicted_time_s * own[worker] / max(mine.samples, 1)
            reports.append(RoundReport(worker, turn.epoch, turn.round, **values))
        cluster.push(reports)
        deque(cluster.reports(), maxlen=0)  # as the log does

    def _hear(self) -> None:
        """Count who was lost."""
        server, played = self._cluster.server, self.played
        for loss in self._cluster.losses():
            played.lost, played.lost_workers = played.lost + loss.samples, played.lost_workers + 1
            epoch = max(server.clocks) // server.members.rounds + 1
            self._untouched = max(self._untouched, epoch)

    def _is_due(self, stop: Stop) -> bool:
        """Whether it is time for a stop; where others go on from it, as soon as they may."""
        if stop.turn > self.played.turns:
            return False
        if stop.workers in (None, self._workers):
            return True
        return self._saved(self._state(), self._run).others_may_go_on

    def _state(self) -> dict[str, Any]:
        cluster, planner = self._cluster.state_dict(), self._run.plans.planner.state_dict()
        weights = {"weights": self._cluster.weights.vector}
        own = {"progress": None, "stepper": {"optimizers": {}}, "meter": {"heard": {}}, "log": None}
        return {"cluster": cluster, "planner": planner, "model": weights, **own}

    def _saved(self, state: dict[str, Any], run: Workers) -> Saved:
        settings = asdict(self._run.config)
        return Saved(state, settings, self._case.samples, run, at_epoch_end=False)

    def _stop(self, workers: int | None) -> None:
        """Stop the run, and resume it, with another number of workers if that can be."""
        played = self.played
        played.stops += 1
        played.changes += self._run.plans.planner.changes
        tree, tensors = pack(self._state())
        state = unpack(json.loads(json.dumps(tree)), tensors)
        resized = self._resized(workers, state)
        if resized is None:
            self._resume(state)
        else:
            played.resized += 1
            self._case, run, state = resized
            self._load(run, state)
        self._losses[:] = [c for c in self._losses if c.worker < self._workers]

    @property
    def _workers(self) -> int:
        return self._case.options["workers"]

    def _resized(self, workers: int | None, state: Any) -> tuple[Case, Workers, Any] | None:
        """Return how the run goes on with so many workers; None: it does with those it has."""
        if workers in (None, self._workers):
            return None
        case = self._case.with_workers(workers)
        try:
            run = prepare(case)
        except ValueError:  # there is no plan for them
            return None
        return case, run, for_others(self._saved(state, run), run)

    def _resume(self, state: Any) -> None:
        """Go on with the same workers, lost ones back."""
        run = prepare(self._case)
        if run.cluster.server is not None:
            there, inside = state["cluster"]["server"]["active"], state["cluster"]["queue"]
            state["cluster"]["queue"] = [(time_s, w) for time_s, w in inside if w in there]
            state = with_lost_workers(state, run, run.config.epochs)
        self._load(run, state)

    def _load(self, run: Workers, state: Any) -> None:
        self._connect(run)
        run.plans.planner.load_state_dict(state["planner"])
        self._cluster.load_state_dict(state["cluster"])

    def _result(self) -> Played:
        plans, played, counts = self._run.plans, self.played, self._counts
        epochs = range(plans.config.epochs)
        of_epoch = [plans.first[plans.stage_at(epoch).resolution].samples for epoch in epochs]
        played.changes += plans.planner.changes
        played.expected, played.trained = sum(of_epoch), int(counts.sum())
        played.twice = int((counts > 1).sum())
        if first := self._untouched:
            played.whole = counts.sum(1)[first:].tolist() == of_epoch[first:]
        if plans.config.push != "weights":
            played.pushed = float(self._cluster.server.snapshot()[0])  # the rest is padding
        return played
