"""Rounds of nodes: who merges with whom after a round, in which weights, at which cost."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from benchmarks.coverage.cases import cases
from benchmarks.coverage.check import check_drawn
from dbsl.base.serialize import pack, unpack
from dbsl.checkpoint.restart import apart
from dbsl.cluster.node_server import NodeServer
from dbsl.cluster.outer import OuterOptimizer
from dbsl.cluster.server import Server
from dbsl.plan.link import Link
from dbsl.plan.turns import Restart, RoundReport, nodes_meet
from tests.helpers import run

START = torch.zeros(64, dtype=torch.float64)


def make(nodes, node_rounds, rounds=4, **options):
    options = {"rule": "mean", "staleness": 0, "rounds_per_epoch": rounds, **options}
    return NodeServer(START, len(nodes), nodes=nodes, node_rounds=node_rounds, **options)


def push(server, worker, value, factor=1.0, refused=False):
    epoch, round_ = divmod(server.clocks[worker], server.rounds_per_epoch)
    report = RoundReport(worker, epoch, round_, 8, 1, 1, 1, 0.0, 0.5, factor, refused=refused)
    weights = value if torch.is_tensor(value) else START + value
    server.push(weights, report)


def pulled(server):
    """What each worker would begin a round with."""
    return [server.pull(worker)[0].item() for worker in range(len(server.clocks))]


def test_nodes_merge_by_themselves_until_all_meet():
    server = make((0, 0, 1), node_rounds=2)
    for worker, value in enumerate((1.0, 3.0, 10.0)):
        push(server, worker, value)
    assert pulled(server) == [2.0, 2.0, 10.0]
    assert server.snapshot()[0] == 0.0  # the global weights have not moved
    for worker, value in enumerate((2.0, 4.0, 12.0)):
        push(server, worker, value)
    assert pulled(server) == [6.0] * 3  # (2 nodes' 3 of 2 workers + 12 of one) / 3
    assert server.snapshot()[0] == 6.0


def test_all_nodes_meet_at_every_so_many_rounds_and_at_an_epochs_end():
    assert [nodes_meet(r, 2, 5) for r in range(5)] == [False, True, False, True, True]
    assert [nodes_meet(r, 5, 5) for r in range(5)] == [False] * 4 + [True]
    assert all(nodes_meet(r, 1, 5) for r in range(5))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.data(),
)
def test_where_all_meet_the_mean_of_nodes_is_the_mean_of_workers(sizes, data):
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    factors = data.draw(st.lists(st.sampled_from((1.0, 0.5, 0.3)), min_size=len(nodes)))
    factors = (factors * len(nodes))[: len(nodes)]
    node_rounds = data.draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(len(nodes))
    server = make(nodes, node_rounds)
    flat = Server(START, len(nodes), rule="mean", staleness=0, rounds_per_epoch=4)
    for round_ in range(4):
        weights = torch.randn(len(nodes), 64, dtype=torch.float64, generator=generator)
        for worker, factor in enumerate(factors):
            push(server, worker, weights[worker], factor)
            push(flat, worker, weights[worker], factor)
        if nodes_meet(round_, node_rounds, 4):
            torch.testing.assert_close(server.snapshot(), flat.snapshot(), rtol=1e-14, atol=1e-15)
        elif len(sizes) > 1:
            assert not torch.equal(server.pull(0), flat.snapshot())


def test_with_equal_samples_the_two_levels_are_the_flat_mean_to_the_bit():
    server = make((0, 0, 1, 1), node_rounds=2)
    for value in (8.0, 0.0):
        for worker in range(4):
            push(server, worker, value + worker)  # sums and halves of these are exact
    assert server.snapshot()[0] == (0 + 1 + 2 + 3) / 4


def test_a_node_counts_by_what_its_workers_have_merged_since_all_met():
    server = make((0, 1, 1), node_rounds=2)
    push(server, 0, 0.0, factor=0.5)
    push(server, 1, 0.0, refused=True)
    push(server, 2, 0.0, refused=True)  # nothing of this node counts in this round
    push(server, 0, 1.0, factor=0.5)
    push(server, 1, 4.0, factor=1.0)
    push(server, 2, 8.0, refused=True)
    assert server.snapshot()[0] == 2.5  # (1 * (0.5 + 0.5) + 4 * 1.0) / 2
    assert server.refused == 3


def test_what_a_node_has_merged_before_all_met_counts_no_more():
    server = make((0, 1), node_rounds=2)
    for factors in ((1.0, 0.5), (1.0, 0.5), (1.0, 1.0), (1.0, 1.0)):
        push(server, 0, 2.0, factors[0])
        push(server, 1, 8.0, factors[1])
    assert server.snapshot()[0] == 5.0


def test_a_node_whose_last_round_was_refused_counts_with_what_it_had():
    server = make((0, 1), node_rounds=2)
    push(server, 0, 2.0)
    push(server, 1, 6.0)
    push(server, 0, 4.0)
    push(server, 1, torch.nan, refused=True)
    assert server.snapshot()[0] == pytest.approx((2 * 4.0 + 1 * 6.0) / 3)


def test_where_all_was_refused_the_weights_stay():
    server = make((0, 1), node_rounds=2)
    for _ in range(2):
        push(server, 0, torch.nan, refused=True)
        push(server, 1, torch.nan, refused=True)
    assert pulled(server) == [0.0, 0.0]


def test_a_lost_worker_is_not_waited_for_and_what_its_node_had_counts():
    server = make((0, 1), node_rounds=2)
    push(server, 0, 2.0)
    push(server, 1, 6.0)
    push(server, 0, 4.0)
    server.drop(1)
    assert server.snapshot()[0] == pytest.approx((2 * 4.0 + 1 * 6.0) / 3)
    push(server, 0, 5.0)
    push(server, 0, 7.0)
    assert server.snapshot()[0] == 7.0
    assert [end.epoch for end in server.finished] == [0]


def test_the_outer_optimizer_steps_where_all_meet():
    server = make((0, 1), node_rounds=2, rule="delta", outer=OuterOptimizer(64, 0.5, 0.0))
    for value in (2.0, 4.0):
        push(server, 0, value)
        push(server, 1, value + 4.0)
        assert server.snapshot()[0] == (0.0 if value == 2.0 else 3.0)  # half way to 6


def test_state_between_two_meetings_goes_on_to_the_same_bits():
    def play(server, pushes):
        for number, (worker, value) in enumerate(pushes):
            push(server, worker, value / 3, factor=(0.3, 0.7, 1.0)[worker])
            if number == 4:
                tree, tensors = pack(server.state_dict())
                again = make((0, 0, 1), node_rounds=3)
                again.load_state_dict(unpack(json.loads(json.dumps(tree)), tensors))
                assert pulled(again) == pulled(server)
                server = again
        return server.snapshot()

    pushes = [(w, 1.0 + 7 * r + w) for r in range(3) for w in range(3)]
    unbroken = make((0, 0, 1), node_rounds=3)
    for worker, value in pushes:
        push(unbroken, worker, value / 3, factor=(0.3, 0.7, 1.0)[worker])
    assert torch.equal(play(make((0, 0, 1), node_rounds=3), pushes), unbroken.snapshot())


def test_what_nodes_have_merged_apart_goes_with_other_workers():
    server = make((0, 0, 1), node_rounds=4)
    assert apart([{"cluster": {"server": server.state_dict()}}]) is None
    for worker, value in enumerate((1.0, 3.0, 10.0)):
        push(server, worker, value)
    assert apart([{"cluster": {"server": server.state_dict()}}])[0] == pytest.approx(14 / 3)
    processes = [  # a dedicated server's, then those of the workers
        {"cluster": {"server": {}, "pulled": START + value, "nodes": nodes}}
        for nodes in [{"of": [0, 0, 1], "counted": {0: 2.0, 1: 1.0}}]
        for value in (99.0, 2.0, 2.0, 10.0)
    ]
    assert apart(processes)[0] == pytest.approx(14 / 3)


def test_workers_of_another_number_begin_alike():
    server = make((0, 1), node_rounds=4)
    push(server, 0, 2.0)
    push(server, 1, 6.0)
    server.restart(Restart(START + 5.0, version=1, clock=1))
    assert pulled(server) == [5.0, 5.0]


@settings(max_examples=40, suppress_health_check=list(HealthCheck), deadline=None)
@given(cases("nodes"))
def test_every_sample_is_trained_on_once_an_epoch_whatever_the_nodes(case):
    check_drawn(case)


FOUR = {"workers": 4, "large_batch_size": (3,), "rounds_per_epoch": 4, "epochs": 2}
NODES = {**FOUR, "node_workers": (3, 1), "node_rounds": 2}


def times_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["virtual_time_s"] for row in rows if row["event"] == "eval"]


def test_a_link_costs_where_all_nodes_meet_and_as_much_as_nodes_make_it(tmp_path):
    run(tmp_path / "free", **NODES)
    config = run(tmp_path / "link", **NODES, link_gbps=0.1, link_ms=2.0)
    model = tmp_path / "link" / "model.safetensors"
    assert (tmp_path / "free" / "model.safetensors").read_bytes() == model.read_bytes()
    size = 4 * sum(t.numel() for t in load_file(model).values() if t.is_floating_point())
    cost = Link(0.1, 2.0).barrier_s(size, 2, at_server=False)
    free_s, link_s = (times_of(tmp_path / name)[-1] for name in ("free", "link"))
    assert link_s - free_s == pytest.approx(config.epochs * 2 * cost, rel=1e-6)


def test_nodes_that_meet_after_every_round_are_workers_of_one(tmp_path):
    run(tmp_path / "flat", **FOUR)
    run(tmp_path / "nodes", **{**NODES, "node_rounds": 1, "link_gbps": 1000.0})
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("flat", "nodes")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({**NODES, "sync": "asp"}, "node_rounds must be 1 except with sync bsp and push weights"),
        (
            {**NODES, "push": "gradients", "rounds_per_epoch": 1, "node_rounds": 2},
            "node_rounds must be 1 except with sync bsp and push weights, got 2",
        ),
        (
            {**NODES, "min_workers": 2, "grace_seconds": 1.0},
            "node_rounds must be 1 with min_workers, where processes meet at a server, got 2",
        ),
        ({**NODES, "wire": "bf16"}, "wire must be float32 with node_rounds"),
        ({**NODES, "node_rounds": 5}, "node_rounds must be at most the 4 rounds_per_epoch"),
        ({**NODES, "node_workers": (2, 1)}, "node_workers must add up to the 4 workers, got 2, 1"),
        ({**NODES, "node_workers": (4,)}, "node_rounds must be 1 on one node"),
        ({**NODES, "node_workers": None}, "node_workers must be given with node_rounds 2 in one"),
        ({**NODES, "node_rounds": 1}, "node_workers must be unset except with node_rounds above 1"),
        ({**NODES, "node_workers": (4, 0)}, "node_workers must"),
    ],
)
def test_nodes_out_of_place_are_refused(tmp_path, settings_, message):
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "run", **settings_)
    assert not (tmp_path / "run").exists()
