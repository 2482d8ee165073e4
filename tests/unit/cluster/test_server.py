import json
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dbsl.checkpoint.disk import pack, unpack
from dbsl.cluster.merges import Delta, choose_rule, half, mean, ratio
from dbsl.cluster.server import Server
from dbsl.cluster.serving import ServingCluster
from dbsl.cluster.weights import FlatWeights
from dbsl.config.settings import RunConfig
from dbsl.plan.members import Members
from dbsl.plan.types import RoundReport, Turn


def report(worker, merge_weight=1.0, round_=0, epoch=0):
    return RoundReport(worker, epoch, round_, 32, 8, 80, 10, 1.5, 0.7, merge_weight)


def broken(weights, pushed, factors):
    raise ZeroDivisionError("of the rule")


def pushes(s, *workers, numbers=(0.0, 0.0)):
    for worker in workers:
        s.push(torch.tensor(numbers), report(worker))
    return s.reports[-1]


def server(rule, workers=2, staleness=None, rounds_per_epoch=1, weights=(1.0, 2.0)):
    members, together = Members(workers, rounds_per_epoch), rule not in (ratio, half, broken)
    return Server(torch.tensor(weights), members, rule, together=together, staleness=staleness)


def may_start(s, worker):
    return s.clocks[worker] <= s.latest_start()


@pytest.mark.parametrize(
    ("rule", "factor", "expected"),
    [
        (ratio, 1.0, 3.0),  # (2 + 4) / 2
        (ratio, 0.5, 8 / 3),  # (2 + 0.5*4) / 1.5
        (half, 1.0, 3.0),  # (1*2 + 4) / 2
        (half, 0.5, 2.5),  # (1.5*2 + 0.5*4) / 2
    ],
)
def test_merge_of_one_push_is_the_published_formula(rule, factor, expected):
    weights, pushed = torch.tensor([2.0]).double(), torch.tensor([[4.0]]).double()
    merged = rule(weights, pushed, torch.tensor([factor]).double())
    assert merged.item() == pytest.approx(expected)
    assert weights.item() == 2.0


@pytest.mark.parametrize(
    "rule", [mean, Delta(2, 1.0, 0.0), choose_rule(None, None, lambda *all_: mean(*all_))]
)
def test_a_mean_waits_for_all_and_weighs_by_factor_also_as_an_outer_step_or_a_forkers(rule):
    s = server(rule, staleness=0)
    s.push(torch.tensor([3.0, 3.0]), report(0, 1.0))
    assert s.snapshot().tolist() == [1.0, 2.0]  # nothing before the barrier
    s.push(torch.tensor([9.0, 0.0]), report(1, 0.5))
    assert s.snapshot().tolist() == [5.0, 2.0]  # (3 + 0.5*9)/1.5, (3 + 0)/1.5
    assert s.version == 1
    pushes(s, 1, 0, numbers=(1.0, 1.0))
    assert s.snapshot().tolist() == [1.0, 1.0]  # nothing is left over from the round before


def test_the_mean_of_equal_bf16_weights_is_these_weights():
    weights = torch.linspace(-1, 1, 1000).bfloat16()
    merged = mean(weights, weights.expand(5, -1), torch.tensor([1, 1, 1, 0.6, 0.6]).double())
    assert merged.dtype == torch.bfloat16
    assert torch.equal(merged, weights)


@pytest.mark.parametrize("a_forkers", [False, True])  # what its rule keeps is saved alike
def test_delta_is_a_nesterov_step_on_what_the_workers_changed(a_forkers):
    def new():
        rule = Delta(2, 0.5, 0.8)  # the last of three numbers is a buffer
        rule = choose_rule(None, None, rule) if a_forkers else rule
        return server(rule, staleness=0, weights=(1.0, 2.0, 7.0))

    s = new()
    pushes = [([3.0, 2.0, 1.0], 1.0), ([0.0, 5.0, 4.0], 0.5)]
    weights, velocity = torch.tensor([1.0, 2.0]), torch.zeros(2)
    for round_ in range(4):
        if round_ == 2:  # as it is after a stop in between
            tree, tensors = pack(s.state_dict())
            s = new()
            s.load_state_dict(unpack(json.loads(json.dumps(tree)), tensors))
        elif round_ == 3:  # and where workers of another number go on
            state = s.state_dict()
            s = new()
            s.load_state_dict(s.state_dict() | {n: state[n] for n in ("weights", "outer")})
        for worker, (pushed, factor) in enumerate(pushes):
            s.push(torch.tensor(pushed), report(worker, factor))
        mean = (torch.tensor([3.0, 2.0, 1.0]) + 0.5 * torch.tensor([0.0, 5.0, 4.0])) / 1.5
        gradient = weights - mean[:2]
        velocity = 0.8 * velocity + gradient
        weights = weights - 0.5 * (gradient + 0.8 * velocity)
        assert s.snapshot().tolist() == pytest.approx([*weights.tolist(), 2.0])
    assert s.version == 1  # since others took over


def test_pulled_weights_do_not_change_under_the_worker():
    s = server(ratio)
    pulled = s.pull(0)
    assert s.pull(1).data_ptr() == pulled.data_ptr()  # all who pull a version share one tensor
    pushes(s, 1, numbers=(9.0, 9.0))
    assert pulled.tolist() == [1.0, 2.0]
    assert s.pull(1).tolist() == [5.0, 5.5]


def serving(weights, owner):
    planner = SimpleNamespace(members=owner.members, decide=lambda *place: None)
    common = {"planner": planner, "workers": (0,), "epochs": 1}
    return ServingCluster(weights, owner, pairs={}, timeout_s=1.0, **common)


def test_others_may_push_while_rank_0_copies_what_it_has_pulled(monkeypatch):
    weights = FlatWeights(torch.nn.Linear(2, 1))
    owner = Server(weights.vector + 1, Members(2), ratio, staleness=None)
    cluster = serving(weights, owner)
    load, pulled = weights.load, owner.snapshot()
    expected = pulled.clone()

    def slowly(vector):
        other = threading.Thread(target=cluster._merge, args=(pulled * 3, report(1)))
        other.start()
        other.join(20.0)
        assert not other.is_alive()
        load(vector)

    monkeypatch.setattr(weights, "load", slowly)
    cluster.plan(Turn((0,), 0, 0))
    cluster.pull(Turn((0,), 0, 0))
    assert torch.equal(weights.vector, expected)  # of the moment of the pull
    assert owner.version == 1
    assert not torch.equal(owner.snapshot(), expected)


def test_a_server_whose_rule_has_failed_keeps_its_weights_and_is_not_saved():
    weights = FlatWeights(torch.nn.Linear(2, 1))
    owner = Server(weights.vector, Members(1), broken, staleness=None)
    cluster, before = serving(weights, owner), owner.snapshot()
    cluster.state_dict()
    for act in (lambda: cluster.push([report(0)]), cluster.state_dict):
        with pytest.raises(ZeroDivisionError, match="of the rule"):
            act()
    assert owner.snapshot() is before


def test_staleness_counts_global_updates_since_the_pull():
    s = server(ratio, workers=3)
    for worker in range(3):
        s.pull(worker)
    assert [pushes(s, worker).staleness for worker in (2, 0, 1)] == [0, 1, 2]
    s.pull(1)
    assert pushes(s, 1).staleness == 0
    assert [(kept.worker, kept.staleness) for kept in s.reports] == [(2, 0), (0, 1), (1, 2), (1, 0)]


def refused(worker, round_=0):
    return replace(report(worker, round_=round_), refused=True)


def test_a_mean_leaves_refused_pushes_out_and_still_counts_the_round():
    s = server(mean, workers=3, staleness=0)
    s.push(torch.tensor([3.0, 3.0]), report(0, 1.0))
    s.push(torch.tensor([float("nan"), 1.0]), refused(1))
    s.push(torch.tensor([9.0, 0.0]), report(2, 0.5))
    assert s.snapshot().tolist() == [5.0, 2.0]
    assert (s.clocks, s.refused, len(s.finished)) == ([1, 1, 1], 1, 1)


@pytest.mark.parametrize(("rule", "staleness"), [(ratio, None), (half, None), (mean, 0)])
def test_refused_pushes_change_nothing_but_the_clock(rule, staleness):
    s = server(rule, staleness=staleness)
    for worker in (1, 0):
        s.push(torch.full((2,), float("nan")), refused(worker))
    assert s.snapshot().tolist() == [1.0, 2.0]
    assert (s.version, s.clocks, s.refused) == (0, [1, 1], 2)


def test_epochs_end_without_a_worker_that_was_dropped():
    s = server(ratio, workers=3, staleness=1, rounds_per_epoch=2)
    pushes(s, 0, 0)
    pushes(s, 1)
    assert not may_start(s, 0)
    s.drop(2)
    assert may_start(s, 0)
    assert not s.finished
    pushes(s, 1)
    assert [end.epoch for end in s.finished] == [0]
    pushes(s, 0, 0)
    s.drop(1)  # the last one that the others waited for
    assert [end.epoch for end in s.finished] == [0, 1]


def test_workers_that_are_back_keep_the_bound_and_never_wait_for_each_other():
    s = server(ratio, workers=3, staleness=1)
    for worker, clock in ((1, 2), (2, 3)):
        s.drop(worker)
        s.members.clocks[worker] = clock
    s.members.active = {0, 1, 2}
    assert not any(may_start(s, worker) for worker in (1, 2))
    s.drop(0)
    assert [end.epoch for end in s.finished] == [0, 1]  # the epochs before them end without them
    assert may_start(s, 1)
    assert may_start(s, 2)


def test_state_goes_through_json_and_goes_on_alike():
    one, two = (server(mean, workers=2, staleness=0, rounds_per_epoch=2) for _ in range(2))
    one.push(torch.tensor([3.0, 3.0]), report(0, 0.5))  # collected, not merged yet
    tree, tensors = pack(one.state_dict())
    two.load_state_dict(unpack(json.loads(json.dumps(tree)), tensors))
    for s in (one, two):
        s.push(torch.tensor([9.0, 1.0]), report(1))
    assert torch.equal(one.snapshot(), two.snapshot())
    assert (one.version, one.clocks, list(one.reports)) == (two.version, two.clocks, [*two.reports])


def test_other_workers_take_over_at_one_clock():
    s = server(ratio, workers=3, rounds_per_epoch=2)
    s.load_state_dict(s.state_dict() | {"weights": torch.tensor([7.0, 8.0]), "clocks": [5] * 3})
    assert s.snapshot().tolist() == [7.0, 8.0]
    assert s.clocks == [5, 5, 5]
    pushes(s, *range(3))
    assert [end.epoch for end in s.finished] == [2]  # not the two before, once more


def test_the_momentum_of_an_outer_step_does_not_move_what_is_frozen_since():
    model = torch.nn.Linear(2, 2)
    weights = FlatWeights(model)
    rule = choose_rule(RunConfig(merge="delta"), weights, None)
    for step in range(4):
        model.bias.requires_grad_(step < 2)
        before = [tensor.detach().clone() for tensor in (model.weight, model.bias)]
        pushed = weights.vector + float(step < 2)
        weights.load(rule(weights.vector.clone(), pushed[None], torch.ones(1)))
        assert not torch.equal(model.weight, before[0])
        assert torch.equal(model.bias, before[1]) == (step >= 2)
