"""The simulated cluster: order in simulated time, and equality with one process."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dbsl.cluster.meeting import SimulatedCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.members import Members
from dbsl.plan.sampler import EpochSampler, split_evenly
from dbsl.plan.types import EpochEnd, RoundReport
from tests.ranks.test_sync import server_of


def make_cluster(model, durations, *, sync, epochs, rounds=1, staleness=1):
    weights, members = FlatWeights(model), Members(len(durations), rounds)
    server = server_of(weights, members, sync, staleness)
    planner = SimpleNamespace(members=members, decide=lambda *place: None)
    how = {"planner": planner, "workers": range(len(durations)), "epochs": epochs}
    return SimulatedCluster(
        weights, server, times=lambda worker, *_: (durations[worker], 0.0), **how
    )


def play(cluster, train=lambda turn: None):
    """Run a cluster to its end; return (virtual time, turn) pairs."""
    history = []
    for turn in cluster.turns():
        history.append((cluster.time_s, turn))
        if isinstance(turn, EpochEnd):
            continue
        cluster.pull(turn)
        train(turn)
        report = RoundReport(turn.workers[0], turn.epoch, turn.round, 8, 1, 1, 1, 0.0, 0.0, 1.0)
        cluster.push([report])
    return history


def rounds_of(history):
    return [(time, t.workers[0], t.epoch) for time, t in history if not isinstance(t, EpochEnd)]


BARRIER = (
    *([1.0, 3.0], [(1.0, 0, 0), (3.0, 1, 0), (4.0, 0, 1), (6.0, 1, 1)]),
    *([(3.0, 0), (6.0, 1)], [2.0, 0.0, 2.0, 0.0]),
)


@pytest.mark.parametrize(
    ("sync", "durations", "rounds", "ends", "waits"),
    [
        ("bsp", *BARRIER),
        ("ssp", *BARRIER),
        (
            *("asp", [1.0, 2.5], [(1.0, 0, 0), (2.0, 0, 1), (2.5, 1, 0), (5.0, 1, 1)]),
            *([(2.5, 0), (5.0, 1)], [0.0] * 4),
        ),
    ],
)
def test_rounds_and_epochs_end_in_order_and_workers_wait_only_at_a_barrier(
    tiny_model, sync, durations, rounds, ends, waits
):
    cluster = make_cluster(tiny_model, durations, sync=sync, epochs=2, staleness=0)
    history = play(cluster)
    assert rounds_of(history) == rounds
    assert [(time, t.epoch) for time, t in history if isinstance(t, EpochEnd)] == ends
    reports = [(report.worker, report.wait_time_s) for report in cluster.reports()]
    assert reports == [(worker, wait) for (_, worker, _), wait in zip(rounds, waits, strict=True)]
    assert cluster.server.clocks == [2, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_stale_synchronous_leader_stays_within_the_bound(tiny_model, staleness):
    how = {"sync": "ssp", "epochs": 12, "staleness": staleness}
    cluster, lead = make_cluster(tiny_model, [1.0, 4.2, 1.5], **how), []
    clocks = cluster.server.clocks
    # The clock of a worker in its round against the slowest.
    play(cluster, lambda turn: lead.append(clocks[turn.workers[0]] - min(clocks)))
    assert max(lead) == staleness  # reached, never passed
    assert clocks == [12, 12, 12]


def test_a_round_starts_from_the_weights_pulled_when_it_began(tiny_model):
    cluster = make_cluster(tiny_model, [1.0, 2.5], sync="asp", epochs=2)
    seen, start = [], cluster.weights.vector[0].item()

    def train(turn):
        seen.append((turn.workers[0], cluster.weights.vector[0].item()))
        cluster.weights.vector.fill_(10.0 * (turn.workers[0] + 1))

    play(cluster, train)
    first = (start + 10.0) / 2  # ratio merge with f=1
    third = ((first + 10.0) / 2 + 20.0) / 2
    # Worker 1 pulled at time 0, though merges came since.
    assert [worker for worker, _ in seen] == [0, 0, 1, 1]
    assert [weight for _, weight in seen] == pytest.approx([start, first, start, third])


def sgd_steps(model, images, labels, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for batch in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_equal_workers_with_a_step_a_round_equal_one_process_on_the_joined_batch(
    tiny_model, workers
):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(24, 3, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (24,), generator=generator)
    alone = copy.deepcopy(tiny_model)
    share, rounds, epochs = 24 // workers, 3, 2
    sampler = EpochSampler([share] * workers, rounds=rounds, seed=5)

    cluster = make_cluster(tiny_model, [1.0] * workers, sync="bsp", epochs=epochs, rounds=rounds)

    def train(turn):
        indices = sampler.indices(turn.workers[0], turn.epoch, turn.round)
        sgd_steps(tiny_model, images, labels, split_evenly(indices, share))

    play(cluster, train)
    cluster.weights.load(cluster.server.snapshot())
    for place in itertools.product(range(epochs), range(rounds)):
        joined = [i for worker in range(workers) for i in sampler.indices(worker, *place)]
        sgd_steps(alone, images, labels, [joined])
    expected = [parameter.detach() for parameter in alone.parameters()]
    torch.testing.assert_close(cluster.weights.tensors, expected, rtol=1e-12, atol=1e-14)
