"""Rounded sums of real processes are those of simulated workers, and lose nothing in the end."""

import pytest
import torch
from torch import nn

from dbsl.cluster import formats
from dbsl.cluster.formats import WorkerSum
from dbsl.cluster.weights import FlatWeights
from dbsl.plan.types import BAD_WEIGHTS, RoundReport
from tests.ranks.test_sync import make


def make_weights():
    return FlatWeights(nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30)).double())


def change_of(worker, number, length):
    draw = torch.Generator().manual_seed(100 * number + worker)
    return torch.randn(length, generator=draw, dtype=torch.float64) * 2.0 ** -(number % 5)


def summing_rank(rank, wire, rounds):
    weights = make_weights()
    add = WorkerSum(wire, weights)
    sums = [add(change_of(rank, number, len(weights.vector))) for number in range(rounds)]
    resumed = WorkerSum(wire, weights)
    resumed.load_state_dict(add.state_dict())
    after = [each(change_of(rank, rounds, len(weights.vector))) for each in (add, resumed)]
    return torch.stack([*sums, *after]).tolist()


@pytest.mark.parametrize(
    ("processes", "wire"), [(2, "int2"), (3, "int4"), (4, "int8"), (2, "bf16")]
)
def test_sums_are_alike_on_all_ranks_those_of_simulated_workers_and_resumed_to_the_bit(
    run_ranks, monkeypatch, processes, wire
):
    results = run_ranks(summing_rank, wire, 50, world_size=processes)
    assert all(sums == results[0] for sums in results)
    *sums, again, resumed = torch.tensor(results[0], dtype=torch.float64)
    assert torch.equal(again, resumed)
    rows, decode = [], formats.decode
    monkeypatch.setattr(formats, "decode", lambda m, *how: rows.append(len(m)) or decode(m, *how))
    weights = make_weights()
    simulated, length = WorkerSum(wire, weights, simulated=processes), len(weights.vector)
    for number, summed in enumerate([*sums, again]):
        expected = simulated(*(change_of(w, number, length) for w in range(processes)))
        torch.testing.assert_close(summed, expected, rtol=0, atol=1e-12)
    assert {*rows} == {1}  # one by one: memory is for one
    total = sum(change_of(w, n, length) for w in range(processes) for n in range(51))
    left = sum(row[0] for row in simulated.state_dict() if row is not None)
    matrices, expected = weights.split(sum(sums) + again)[0], weights.split(total)[0]
    torch.testing.assert_close(matrices + left[: len(matrices)], expected, rtol=0, atol=1e-6)


HUGE = 1e300  # of which the scale, float32, is infinite


def refusing_rank(rank, wire):
    weights, cluster, plan = make(rank, "bsp", 4, wire=wire)
    reports, ends = [], []
    for turn in cluster.turns():
        if not hasattr(turn, "round"):
            ends.append(weights.vector.tolist())
            continue
        cluster.plan(turn)
        cluster.pull(turn)
        refused = (rank, turn.epoch) == (1, 1)
        size = HUGE if (rank, turn.epoch) == (1, 2) else 1.0
        weights.vector.add_(change_of(rank, turn.epoch, len(weights.vector)) * size)
        weight = plan.workers[rank].merge_weight
        report = RoundReport(rank, turn.epoch, 0, 8, 1, 1, 1, 0.0, 0.5, weight, refused=refused)
        cluster.push([report])
        reports += [(r.worker, r.epoch, r.refused, r.fault) for r in cluster.reports()]
    cluster.close()
    return ends, reports, cluster.refused, [w.merge_weight for w in plan.workers]


def test_refused_rounds_and_sums_that_are_not_finite_leave_the_others_and_the_remainders_right(
    run_ranks,
):
    results = run_ranks(refusing_rank, "int4", world_size=3)
    ends, reports, refused, factors = results[0]
    assert all(result[0] == ends for result in results)
    ends = torch.tensor(ends, dtype=torch.float64)
    assert torch.equal(ends[2], ends[1])  # the third round's sum was refused
    assert refused == 1 + 3
    assert [fault for _, epoch, bad, fault in reports if bad and epoch == 2] == [BAD_WEIGHTS] * 3
    simulated = WorkerSum("int4", FlatWeights(nn.Linear(3, 2).double()), simulated=3)
    for number in (0, 1):  # the second without worker 1, whose first remainder stays
        taken = [w for w in range(3) if (w, number) != (1, 1)]
        total = sum(factors[w] for w in taken)
        shares = [factors[w] / total if w in taken else 0 for w in range(3)]
        changes = (change_of(w, number, ends.shape[1]) * share for w, share in enumerate(shares))
        moved = simulated(*changes)
    torch.testing.assert_close(ends[1] - ends[0], moved, rtol=0, atol=1e-12)
