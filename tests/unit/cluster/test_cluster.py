"""The simulated cluster: order in simulated time, and equality with one process."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dbsl.cluster.launch import _interface_to
from dbsl.cluster.merges import mean, ratio
from dbsl.cluster.server import Server
from dbsl.cluster.simulated import SimulatedCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.ledger import Members
from dbsl.plan.sampler import EpochSampler, split_evenly
from dbsl.plan.types import EpochEnd, RoundReport


def make_cluster(model, durations, *, sync, epochs, rounds=1, staleness=1):
    weights, members = FlatWeights(model), Members(len(durations), rounds)
    server = Server(
        weights.vector,
        members,
        mean if sync == "bsp" else ratio,
        together=sync == "bsp",
        staleness={"bsp": 0, "ssp": staleness, "asp": None}[sync],
    )
    cluster = SimulatedCluster(
        weights,
        server,
        planner=SimpleNamespace(members=members),  # nothing here asks for a plan
        workers=range(len(durations)),
        epochs=epochs,
        times=lambda worker, epoch, round_: (durations[worker], 0.0),
    )
    return cluster, server


def play(cluster, train=lambda turn: None, weight=1.0):
    """Run a cluster to its end; return (virtual time, turn) pairs."""
    history = []
    for turn in cluster.turns():
        history.append((cluster.time_s, turn))
        if isinstance(turn, EpochEnd):
            continue
        cluster.pull(turn)
        train(turn)
        report = RoundReport(turn.workers[0], turn.epoch, turn.round, 8, 1, 1, 1, 0.0, 0.0, weight)
        cluster.push([report])
    return history


def rounds_of(history):
    return [(time, t.workers[0], t.epoch) for time, t in history if not isinstance(t, EpochEnd)]


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_barrier_makes_everyone_wait_for_the_slowest_in_the_round_it_has_ended(tiny_model, sync):
    cluster, _ = make_cluster(tiny_model, [1.0, 3.0], sync=sync, epochs=2, staleness=0)
    history = play(cluster)
    assert rounds_of(history) == [(1.0, 0, 0), (3.0, 1, 0), (4.0, 0, 1), (6.0, 1, 1)]
    ends = [(time, t.epoch) for time, t in history if isinstance(t, EpochEnd)]
    assert ends == [(3.0, 0), (6.0, 1)]
    waits = [(report.worker, report.wait_time_s) for report in cluster.reports()]
    assert waits == [(0, 2.0), (1, 0.0)] * 2


def test_asynchronous_workers_wait_for_nobody(tiny_model):
    cluster, server = make_cluster(tiny_model, [1.0, 3.5], sync="asp", epochs=3)
    history = play(cluster)
    assert rounds_of(history)[:4] == [(1.0, 0, 0), (2.0, 0, 1), (3.0, 0, 2), (3.5, 1, 0)]
    assert cluster.time_s == 10.5
    assert server.clocks == [3, 3]
    assert [t.epoch for _, t in history if isinstance(t, EpochEnd)] == [0, 1, 2]


@pytest.mark.parametrize("staleness", [0, 2])
def test_stale_synchronous_leader_stays_within_the_bound(tiny_model, staleness):
    cluster, server = make_cluster(
        tiny_model, [1.0, 4.2, 1.5], sync="ssp", epochs=12, staleness=staleness
    )
    lead = []

    def observe(turn):  # the clock of a worker in its round against the slowest
        lead.append(server.clocks[turn.workers[0]] - min(server.clocks))

    play(cluster, observe)
    assert max(lead) == staleness  # reached, never passed
    assert server.clocks == [12, 12, 12]


def test_a_round_starts_from_the_weights_pulled_when_it_began(tiny_model):
    cluster, _ = make_cluster(tiny_model, [1.0, 2.5], sync="asp", epochs=2)
    seen = []

    def train(turn):
        seen.append((turn.workers[0], cluster.weights.vector[0].item()))
        cluster.weights.vector.fill_(10.0 * (turn.workers[0] + 1))

    start = cluster.weights.vector[0].item()
    play(cluster, train)
    first = (start + 10.0) / 2  # ratio merge with f=1
    second = (first + 10.0) / 2
    assert seen[0] == (0, pytest.approx(start))
    assert seen[1] == (0, pytest.approx(first))
    assert seen[2] == (1, pytest.approx(start))  # pulled at time 0, though merges came since
    third = (second + 20.0) / 2
    assert seen[3] == (1, pytest.approx(third))


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

    cluster, _ = make_cluster(tiny_model, [1.0] * workers, sync="bsp", epochs=epochs, rounds=rounds)
    play(
        cluster,
        lambda turn: sgd_steps(
            tiny_model,
            images,
            labels,
            split_evenly(sampler.indices(turn.workers[0], turn.epoch, turn.round), share),
        ),
    )
    cluster.weights.load(cluster.server.snapshot())

    for epoch in range(epochs):
        for round_ in range(rounds):
            joined = [i for w in range(workers) for i in sampler.indices(w, epoch, round_)]
            sgd_steps(alone, images, labels, [joined])
    expected = torch.cat([p.detach().flatten() for p in alone.parameters()])
    found = torch.cat([tensor.flatten() for tensor in cluster.weights.tensors()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_a_thousand_workers_are_scheduled_without_training(tiny_model):
    durations = [1.0 + w / 7000 for w in range(1000)]
    cluster, server = make_cluster(tiny_model, durations, sync="ssp", epochs=2)
    assert len(rounds_of(play(cluster))) == 2000
    assert set(server.clocks) == {2}


def test_processes_talk_on_the_interface_that_reaches_the_launcher():
    assert _interface_to("127.0.0.1") == "lo"
