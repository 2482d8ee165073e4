"""Real processes on several nodes: each node merges by itself, and all where they are to meet."""

import math

import pytest
import torch

from dbsl.cluster.collectives import ControlGroup
from dbsl.cluster.node_barrier import NodeBarrier
from dbsl.cluster.node_server import NodeServer
from dbsl.cluster.outer import OuterOptimizer
from dbsl.cluster.server import Server
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.dual_batch import TimeModel, plan_dual_batch
from dbsl.plan.follow import Planner
from dbsl.plan.turns import EpochEnd, RoundReport

FAST = TimeModel(0.001, 0.01)
EPOCHS, ROUNDS, EVERY = 2, 3, 2
FACTORS = (0.3, 1.0, 0.7)
# Rounds of the run that a worker is refused in: its node's only one, then a node's both.
REFUSED = {(2, 1), (0, 3), (1, 3), (2, 4)}


def pushed(worker, clock):
    return math.nan if (worker, clock) in REFUSED else (1 + worker) * (1.0 + 0.1 * clock)


def report_of(worker, clock):
    epoch, round_ = divmod(clock, ROUNDS)
    refused = (worker, clock) in REFUSED
    return RoundReport(
        worker, epoch, round_, 8, 1, 1, 1, 0.0, 0.5, FACTORS[worker], refused=refused
    )


def merge_of(merge):
    outer = OuterOptimizer(8, 0.5, 0.5) if merge == "delta" else None
    return {"rule": merge, "outer": outer, "staleness": 0, "rounds_per_epoch": ROUNDS}


def make(rank, nodes, merge, dedicated):
    torch.manual_seed(rank)  # ranks start unlike: the first pull must make them alike
    weights = FlatWeights(torch.nn.Linear(3, 2).double())
    weights.vector.fill_(float(rank))
    plan = plan_dual_batch(100, 3, 1, 10, FAST, time_ratio=1.05)
    server = Server(weights.vector, 3, **merge_of(merge)) if rank == 0 else None
    own = rank - dedicated
    cluster = NodeBarrier(
        weights,
        server,
        nodes=nodes,
        node_rounds=EVERY,
        timeout_s=20.0,
        at_server=merge == "delta",
        control=ControlGroup(20.0),
        planner=Planner({8: plan}, lambda epoch: 8, {8: [FAST] * 3}),
        workers=(own,) * (own >= 0),
        epochs=EPOCHS,
        rounds_per_epoch=ROUNDS,
    )
    return weights, cluster


def play(rank, merge, dedicated, moved_at):
    """Return what this rank pulled by round, the ends, and the worker of each report."""
    nodes, moved = (0, 0, 1), (0, 1, 2)
    weights, cluster = make(rank, nodes, merge, dedicated)
    own, clock, pulled, ends, reports = rank - dedicated, 0, [], [], []
    going = True
    while going:
        going = False
        for turn in cluster.turns():
            reports += [(r.worker, r.epoch, r.round) for r in cluster.reports()]
            if isinstance(turn, EpochEnd):
                ends.append(turn.weights[0].item())
                continue
            cluster.pull(turn)
            if moved_at == clock:  # stopped, and resumed where each process is a node
                state, vector = cluster.state_dict(), weights.vector.clone()
                weights, cluster = make(rank, moved, merge, dedicated)
                cluster.load_state_dict(state)
                weights.load(vector)
                moved_at, going = None, True
                break
            pulled.append(weights.vector[0].item())
            weights.vector.fill_(pushed(own, clock))
            cluster.push([report_of(own, clock)])
            clock += 1
    return pulled, ends, reports


def simulated(merge, nodes_from_second_meeting=None):
    """Return what each worker pulls by round, and the ends, by the server of simulated workers."""
    options = merge_of(merge)
    make_server = lambda nodes: NodeServer(  # noqa: E731
        torch.zeros(128, dtype=torch.float64), 3, nodes=nodes, node_rounds=EVERY, **options
    )
    server, pulled = make_server((0, 0, 1)), [[], [], []]
    for clock in range(EPOCHS * ROUNDS):
        if clock == 2 and nodes_from_second_meeting:
            after, server = server.state_dict(), make_server(nodes_from_second_meeting)
            server.load_state_dict(after)
        for worker in range(3):
            pulled[worker].append(server.pull(worker)[0].item())
        for worker in range(3):
            weights = torch.full((128,), pushed(worker, clock), dtype=torch.float64)
            server.push(weights, report_of(worker, clock))
    return pulled, [end.weights[0].item() for end in server.finished]


@pytest.mark.parametrize(("merge", "dedicated"), [("mean", False), ("delta", True)])
def test_processes_merge_by_node_as_simulated_workers_do(run_ranks, merge, dedicated):
    results = run_ranks(play, merge, dedicated, None, world_size=3 + dedicated)
    pulled, ends = simulated(merge)
    for (own, own_ends, _), expected in zip(results[dedicated:], pulled, strict=True):
        assert own == pytest.approx(expected, rel=1e-14)
        assert own_ends == pytest.approx(ends, rel=1e-14)
    assert results[0][1] == pytest.approx(ends, rel=1e-14)
    order = [(w, *divmod(clock, ROUNDS)) for clock in range(EPOCHS * ROUNDS) for w in range(3)]
    assert results[0][2] == order  # of every round, as it is over


def test_processes_that_are_on_other_nodes_after_a_resume_keep_theirs_until_all_have_met(
    run_ranks,
):
    results = run_ranks(play, "mean", False, 1, world_size=3)
    pulled, ends = simulated("mean", nodes_from_second_meeting=(0, 1, 2))
    for (own, own_ends, _), expected in zip(results, pulled, strict=True):
        assert own == pytest.approx(expected, rel=1e-14)
        assert own_ends == pytest.approx(ends, rel=1e-14)


class Told:
    """Heartbeats that count the exchanges which they are told of."""

    entered = 0

    def enter(self):
        self.entered += 1


def rank_that_counts(rank):
    """Return what heartbeats were told when weights were made ready, and by the end of a round."""
    _, cluster = make(rank, (0, 0, 1), "mean", False)
    told = cluster.control.heartbeats = Told()
    weigh, ready, over = cluster._weigh, [], []

    def note(*what):
        ready.append(told.entered)
        weigh(*what)

    cluster._weigh = note
    for turn in cluster.turns():
        if not isinstance(turn, EpochEnd):
            cluster.pull(turn)
            cluster.push([RoundReport(rank, turn.epoch, turn.round, 8, 1, 1, 1, 0.0, 0.5, 1.0)])
            over.append(told.entered)
    return ready, over


def test_heartbeats_are_told_of_every_sum_and_on_all_ranks_alike(run_ranks):
    (ready, over), (_, of_mate), (_, of_other) = run_ranks(rank_that_counts, world_size=3)
    assert over == of_mate == of_other  # else who waits would count as who hangs
    assert len(ready) == len(over) == EPOCHS * ROUNDS
    assert all(before < after for before, after in zip(ready, over, strict=True))
