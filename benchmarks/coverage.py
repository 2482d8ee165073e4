"""Every sample once an epoch, in every combination: ``python -m benchmarks.coverage``.

Random runs of the simulated cluster, without training: the model is one number. Sync, balance,
rounds, pushes, uneven and noisy machines, stops, lost and joining workers are drawn by hypothesis.
The server, planner and sampler are those that train.py uses. What must hold:

- nobody trains on a sample twice in an epoch;
- without a loss every sample is trained on, and after losses those that are missing are exactly as
  many as were counted, none of them in an epoch that nobody had begun;
- a worker that joins trains in the epoch that it has joined for;
- with a quorum a round is merged from as many pushes as were asked for, or more, all of them begun
  with the same weights, and every sample that a late worker leaves out is counted;
- where nodes merge by themselves, the workers of a node begin a round alike, and all workers do
  after a merge of all nodes;
- with `ssp` nobody is further ahead than `staleness` allows;
- where gradients are pushed, each push reaches the weights once.

About 6 minutes for 3,000 cases.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from dbsl.base.errors import SyncError
from dbsl.base.serialize import pack, unpack
from dbsl.checkpoint.resume import with_lost_workers
from dbsl.cluster.membership import Change, leave_out
from dbsl.plan.emulate import Emulation, parse_disturb
from dbsl.plan.stages import make_stages
from dbsl.plan.turns import EpochEnd, Round, nodes_meet
from dbsl.plan.types import TimeModel
from dbsl.run.cluster import connect
from dbsl.run.plans import PlanMaker
from dbsl.run.prepare import make_planner, rounds_of_epoch
from dbsl.run.progress import make_reports
from dbsl.run.run import Run
from dbsl.run.workers import Workers

ROOT = Path(__file__).resolve().parent.parent
# quorum: bsp with min_workers; nodes: bsp with node_rounds
SYNCS = ("bsp", "quorum", "nodes", "ssp", "asp", "step")
BALANCES = ("none", "dynamic", "dbs")
_ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), prepare_optimizer=lambda o: o)


@dataclass(frozen=True)
class Case:
    """A run to be played.

    Attributes:
        options: Settings of train.py's `Config`.
        samples: Training samples.
        models: True and planned time models, one per worker.
        large: Largest batch of each worker.
        least: Samples of a batch at least.
        emulation: Factors on the workers' times.
        changes: Workers that are lost and that join, at virtual times.
        absent: Workers that are not there when the run begins.
        stops: Turns inside which the run is stopped and resumed.
    """

    options: dict[str, Any]
    samples: int
    models: list[TimeModel]
    large: list[int]
    least: int
    emulation: Emulation
    changes: tuple[Change, ...] = ()
    absent: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()


@dataclass
class Played:
    """What came of a case."""

    turns: int = 0
    changes: int = 0  # of plans, by measured times
    lost_workers: int = 0
    joined_workers: int = 0
    lost: int = 0  # samples that the planner counted
    missed: int = 0  # samples that were counted as of rounds merged without their worker
    late: int = 0  # pushes that were dropped
    stale: int = 0  # updates, the most that a merged push was behind
    fewest: int = 0  # pushes that a round was merged from
    expected: int = 0
    trained: int = 0
    twice: int = 0
    ahead: int = 0  # rounds, the most that a worker that began one was before the slowest
    pushed: float = 0.0  # samples in the server's weights, where gradients are pushed
    whole: bool = True  # epochs that nobody had begun when the last worker was lost
    idle: int = 0  # workers without a sample in an epoch that they joined for
    ended: bool = False  # those that were left could not carry the plan
    alike: bool = True  # workers that have merged with each other, when they begin a round
    epochs: list[int] = field(default_factory=list)  # that ended, in order


@st.composite
def cases(draw, sync: str | None = None, balance: str | None = None) -> Case:
    """Draw a case."""
    sync = sync or draw(st.sampled_from(SYNCS))
    balance = balance or draw(st.sampled_from(BALANCES))
    push = (
        "weights" if sync == "step" else draw(st.sampled_from(("weights", "weights", "gradients")))
    )
    if sync == "nodes":
        push = "weights"
    joint, alone = sync == "step" or push == "gradients", sync in ("ssp", "asp", "quorum")
    workers, epochs = draw(st.integers(2, 5)), draw(st.integers(2, 6 if alone else 4))
    least = draw(st.sampled_from((1, 1, 2)))
    rounds = 1 if push == "gradients" else draw(st.integers(1 + (sync == "nodes"), 4))
    samples = draw(st.integers(workers * rounds * least * 3, 120))
    share = samples // workers // rounds
    large = draw(st.lists(st.integers(least, min(12, share)), min_size=workers, max_size=workers))
    every = draw(st.none() | st.integers(1, 6))
    if every and sync in ("ssp", "asp") and not joint:
        every *= rounds
    options = {
        "sync": "bsp" if sync in ("quorum", "nodes") else sync,
        "balance": balance,
        "push": push,
        "workers": workers,
        "epochs": epochs,
        "rounds_per_epoch": rounds,
        "balance_every": every,
        "push_every": draw(st.integers(1, 3)) if push == "gradients" else 1,
        "drop_last": joint and draw(st.booleans()),
        "small_workers": 0 if joint else draw(st.integers(0, workers // 2)),
        "staleness": draw(st.integers(0, 3)),
        "resolutions": (8, 16) if draw(st.booleans()) and push == "weights" else (8,),
        "seed": draw(st.integers(0, 99)),
        "min_batch_size": least,
    }
    model = TimeModel(0.001, draw(st.sampled_from((0.002, 0.01))))
    speeds = [1.0] * workers
    if draw(st.booleans()):
        speeds = draw(
            st.lists(st.sampled_from((1.0, 2.0, 7.0)), min_size=workers, max_size=workers)
        )
    slow = draw(st.dictionaries(st.integers(0, workers - 1), st.sampled_from((1.5, 3.0, 20.0))))
    emulation = Emulation(
        slowdown=slow,
        disturbance=parse_disturb("0.3:1-3:4") if draw(st.booleans()) else None,
        noise=draw(st.sampled_from((0.0, 0.2, 0.8))),
        seed=options["seed"],
    )
    if sync == "quorum":
        options["min_workers"] = draw(st.integers(1, workers))
        options["grace_seconds"] = draw(st.sampled_from((0.0, 0.01, 0.05, 0.3, 2.0)))
    if sync == "nodes":
        options["node_rounds"] = draw(st.integers(2, rounds))
        first = draw(st.integers(1, workers - 1))
        options["node_workers"] = (first, workers - first)
    turns = epochs * workers * rounds
    # About the time of the run, were all as fast as the fastest: most changes come while it lasts.
    epoch_s = samples / workers * model.slope + rounds * model.intercept
    moment = st.integers(0, 99).map(lambda part: part / 66 * epochs * epoch_s)
    change = st.builds(Change, moment, st.integers(0, workers - 1), st.booleans())
    many = 4 * workers if alone and draw(st.booleans()) else 0
    changes = draw(st.lists(change, min_size=many // 2, max_size=many))
    missing = st.sets(st.integers(0, workers - 1), min_size=1, max_size=workers - 1)
    absent = draw(missing) if alone and draw(st.booleans()) else ()
    return Case(
        options,
        samples,
        [TimeModel(model.slope * s, model.intercept * s) for s in speeds],
        large if draw(st.booleans()) else [large[0]] * workers,
        least,
        emulation,
        tuple(sorted(changes)),
        tuple(absent),
        tuple(sorted(draw(st.sets(st.integers(0, turns), max_size=2)))),
    )


def prepare(case: Case) -> Run:
    """Return what `setup.prepare` makes of a config, without data and with a model of one number.

    Raises:
        ValueError: If there is no such plan.
    """
    from train import Config

    config = Config(
        **case.options, optimizer="momentum", momentum=0.0, weight_decay=0.0, noise_scale=False
    )
    resolutions = config.resolutions
    # Where all are equal, a batch and a share of a round for each is known to fit.
    known = Workers(
        models={
            r: [TimeModel(m.slope * r / 8, m.intercept) for m in case.models] for r in resolutions
        },
        large_batch_sizes=dict.fromkeys(resolutions, case.large),
        limits=dict.fromkeys(resolutions),
        measured=True,
    )
    maker = PlanMaker(config, known, case.samples, case.least)
    plans = {r: maker.first(r, lambda line: None) for r in resolutions}
    rounds = rounds_of_epoch(plans, config)
    stages = make_stages(
        config.epochs,
        resolutions,
        schedule="cyclic",
        dropout=(0.0,),
        learning_rate=1.0,
        milestones=(),
        gamma=1.0,
    )
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return Run(
        config=config,
        data=SimpleNamespace(train=range(case.samples)),
        stages=tuple(stages),
        model=model,
        plans=plans,
        planner=make_planner(config, maker, plans, stages, known.models, rounds, case.samples),
        models=known.models,
        emulation=case.emulation,
        transforms={},
        rounds=rounds,
        least=case.least,
        noise=None,
        mixing=None,
        ema=None,
        loss_of=None,
        measured=True,
    )


def play(case: Case) -> Played:
    """Play a case to its end.

    Raises:
        ValueError: If there is no such plan.
    """
    run = prepare(case)
    cluster, stepper = connect(run, _ACCELERATOR)
    cluster.changes = list(case.changes)
    if case.absent:
        leave_out(cluster.server, run.planner, case.absent)
    played, epochs = Played(), run.config.epochs
    server = cluster.server
    counts = np.zeros((epochs, case.samples), dtype=np.int64)
    missed = np.zeros(epochs, dtype=np.int64)
    pushes: Counter[tuple[int, int]] = Counter()  # in time, by epoch and round
    began: dict[int, dict[int, float]] = {}  # by round of the run and worker: the weight
    stops, untouched = list(case.stops), 0
    joined: set[tuple[int, int]] = set()  # workers, and the epochs that they joined for
    going = True
    while going:
        going = False
        for turn in _until_lost(cluster, played):
            untouched = max(untouched, _note_changes(cluster, played, joined, missed))
            if isinstance(turn, EpochEnd):
                cluster.load(turn)
                played.epochs.append(turn.epoch)
                continue
            segment = cluster.plan(turn)
            if stops and stops[0] <= played.turns:  # inside the round, whose plan is known
                stops.pop(0)
                played.changes += run.planner.changes
                changes = cluster.changes
                run, cluster, stepper = _resumed(case, run, cluster)
                cluster.changes = changes
                server, going = cluster.server, True
                run.planner.changes = 0
                break
            played.turns += 1
            steps = run.steps(segment, turn)
            own = dict.fromkeys(turn.workers, 0)
            quorum = server and server.quorum
            late = quorum and quorum.behind.intersection(turn.workers)
            played.late += bool(late)
            for part in (part for step in steps for part in step.parts):
                if not late:
                    np.add.at(counts[turn.epoch], part.indices, 1)
                own[part.worker] += len(part.indices)
                joined.discard((part.worker, turn.epoch))
            if server is not None:
                (worker,) = turn.workers
                lead = server.clocks[worker] - server.slowest()
                played.ahead = max(played.ahead, lead)
            cluster.pull(turn)
            clock = turn.epoch * run.rounds + turn.round
            began.setdefault(clock, {})[turn.workers[0]] = float(cluster.weights.vector[0])
            cluster.outgoing.fill_(-float(sum(own.values())))  # descent adds it to the weight
            cluster.push(
                make_reports(
                    turn,
                    segment.plan,
                    len(steps),
                    own,
                    resolution=run.stage_at(turn.epoch).resolution,
                    learning_rate=1.0,
                    losses={},
                    clock=stepper.clock,
                )
            )
            for report in cluster.reports():
                played.stale = max(played.stale, report.staleness)
                pushes[report.epoch, report.round] += 1
    untouched = max(untouched, _note_changes(cluster, played, joined, missed))
    played.missed = int(missed.sum())
    played.fewest = min(pushes.values(), default=0)
    played.idle = len(joined)
    if run.config.node_rounds > 1:
        played.alike = _begin_alike(run, began)
    played.changes += run.planner.changes
    of_epoch = [run.plans[run.stage_at(epoch).resolution].samples for epoch in range(epochs)]
    played.expected, played.trained = sum(of_epoch), int(counts.sum())
    played.twice = int((counts > 1).sum())
    if untouched:
        there = counts.sum(1) + missed
        played.whole = there[untouched:].tolist() == of_epoch[untouched:]
    if case.options["push"] == "gradients":
        played.pushed = float(server.snapshot()[0])  # the rest is padding
    return played


def _begin_alike(run: Run, began: dict[int, dict[int, float]]) -> bool:
    """Whether workers of a node begin each round alike, and all do after all have met."""
    nodes, every = run.worker_nodes, run.config.node_rounds
    for clock, weights in began.items():
        met = clock == 0 or nodes_meet((clock - 1) % run.rounds, every, run.rounds)
        groups: dict[int, set[float]] = {}
        for worker, weight in weights.items():
            groups.setdefault(0 if met else nodes[worker], set()).add(weight)
        if any(len(own) > 1 for own in groups.values()):
            return False
    return True


def _until_lost(cluster: Any, played: Played) -> Iterator[Round | EpochEnd]:
    """Yield a cluster's turns; where no plan is left after a loss, the run ends."""
    try:
        yield from cluster.turns()
    except SyncError:
        played.ended = True


def _note_changes(
    cluster: Any, played: Played, joined: set[tuple[int, int]], missed: np.ndarray
) -> int:
    """Count who was lost and who has joined; after a loss, return an epoch that nobody has begun.

    Args:
        cluster: That has changed.
        played: Where it is counted.
        joined: Workers and the epochs that they have joined for, without a sample of them so far.
        missed: Samples of rounds that were merged without their worker, by epoch.
    """
    server, untouched = cluster.server, 0
    for row in cluster.missed():
        missed[row.epoch] += row.samples
        joined.discard((row.worker, row.epoch))
    for loss in cluster.lost():
        played.lost, played.lost_workers = played.lost + loss.samples, played.lost_workers + 1
        untouched = max(server.clocks) // server.rounds_per_epoch + 1
        joined -= {(worker, epoch) for worker, epoch in joined if worker == loss.worker}
    for worker in cluster.joined():
        played.joined_workers += 1
        if worker.worker in server.active:
            joined.add((worker.worker, worker.epoch))
    return untouched


def check(case: Case) -> Played:
    """Play a case and assert what must hold of it."""
    played = play(case)
    assert played.twice == 0, f"{played.twice} samples trained on twice"
    assert played.alike, "workers that have merged with each other begin a round unlike"
    if case.options["sync"] == "ssp":
        assert played.ahead <= case.options["staleness"]
    if "min_workers" in case.options and not played.ended:
        assert played.fewest >= case.options["min_workers"]
        assert played.stale == 0
    out = played.lost + played.missed
    scaled = "min_workers" in case.options and out  # a step's sum is that of those who came
    if case.options["push"] == "gradients" and not played.ended and not scaled:
        assert abs(played.pushed - played.trained) < 0.01  # sums of float32
    if not played.ended:
        left = played.expected - played.trained
        assert left == out, f"{left} samples left out, {out} counted"
        assert played.idle == 0 or case.options["push"] == "gradients", (
            "a worker joined for nothing"
        )
        assert played.whole, "samples missed in an epoch that nobody had begun"
        assert played.epochs == list(range(case.options["epochs"]))
    return played


def _resumed(case: Case, run: Run, cluster: Any) -> tuple[Run, Any, Any]:
    """Return the run and its cluster as a stopped run goes on, lost workers back."""
    tree, tensors = pack({"cluster": cluster.state_dict(), "planner": run.planner.state_dict()})
    state = unpack(json.loads(json.dumps(tree)), tensors)
    run = prepare(case)
    cluster, stepper = connect(run, _ACCELERATOR)
    if cluster.server is not None:
        there, inside = state["cluster"]["server"]["active"], state["cluster"]["queue"]
        state["cluster"]["queue"] = [(time_s, w) for time_s, w in inside if w in there]
        state = with_lost_workers(state, run, run.config.epochs)
    run.planner.load_state_dict(state["planner"])
    cluster.load_state_dict(state["cluster"])
    return run, cluster, stepper


def measure(sync: str, balance: str, number: int, start: int) -> dict[str, object]:
    """Play random cases of one kind, and return a row of what came of them."""
    total, began = Counter(), time.perf_counter()

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases(sync, balance))
    def property_(case: Case) -> None:
        try:
            played = check(case)
        except ValueError:
            assume(False)
        total["cases"] += 1
        if played.ended:  # before its end: what it would have trained on is not counted
            played.expected = played.trained + played.lost + played.missed
        for name in (
            "turns",
            "changes",
            "lost_workers",
            "joined_workers",
            "lost",
            "missed",
            "late",
            "expected",
            "trained",
            "ended",
        ):
            total[name] += getattr(played, name)
        total["stops"] += len(case.stops)

    property_()
    row = {"sync": sync, "balance": balance, "cases": total["cases"]}
    row |= {"rounds": total["turns"], "plan_changes": total["changes"], "stops": total["stops"]}
    row |= {"workers_lost": total["lost_workers"], "workers_joined": total["joined_workers"]}
    row |= {"ended_by_loss": total["ended"]}
    row |= {"samples": total["expected"], "trained": total["trained"]}
    row |= {"counted_as_lost": total["lost"], "counted_as_missed": total["missed"]}
    row |= {"late_pushes": total["late"], "twice": 0, "miscounted": 0}
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    """Run all combinations and write results/coverage.csv."""
    from benchmarks.record import record

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    each = -(-arguments.cases // (len(SYNCS) * len(BALANCES)))
    rows = []
    for sync in SYNCS:
        for balance in BALANCES:
            rows.append(measure(sync, balance, each, arguments.seed))
            print(json.dumps(rows[-1]), flush=True)
    command = f"python -m benchmarks.coverage --cases {arguments.cases}"
    record(ROOT / "results/coverage.csv", rows, command)


if __name__ == "__main__":
    main()
