import pytest
import torch

from dbsl.balance import Planner, Segment
from dbsl.joint import plan_steps
from dbsl.machines import TimeModel
from dbsl.plan import plan_dual_batch
from dbsl.server import RoundReport
from dbsl.wire import (
    CPU,
    PLAN,
    SharedPlans,
    decode,
    decode_plan,
    encode,
    encode_plan,
    exchange_reports,
    message,
)

MODEL = TimeModel(0.001, 0.01)
REPORT = RoundReport(3, 7, 1, 32, 24, 2**40, 12, 0.1, 2.5, 0.75, 4, 0.05, 1.5, 1.25, 0.5)


def test_a_report_comes_back_as_it_was_sent():
    assert decode(encode(REPORT, CPU)) == REPORT
    assert decode(message(PLAN, REPORT)[1:]) == REPORT


@pytest.mark.parametrize(
    "plan",
    [plan_dual_batch(1000, 4, 1, 50, MODEL), plan_steps(1000, (7, 90, 3), [MODEL] * 3)],
    ids=["rounds", "steps"],
)
def test_a_plan_comes_back_with_every_worker_and_its_place(plan):
    rows = encode_plan(Segment(plan, 2, 345), CPU)
    assert decode_plan(rows, plan) == Segment(plan, 2, 345)


def meeting_rank(rank):
    """Ranks that would plan unlike: all must take what the server rank says."""
    sizes = [(30, 10), (20, 20)][rank]
    plan = plan_steps(200, sizes, [MODEL] * 2)
    options = {"balance": "dynamic", "every": 2, "rounds_per_epoch": 3}
    planner = Planner({8: plan}, lambda epoch: 8, {8: [MODEL] * 2}, **options)
    shared = SharedPlans(planner)
    seen = [
        [w.local_batch_size for w in shared.at(epoch, round_).plan.workers]
        for epoch in range(2)
        for round_ in range(3)
    ]
    reports = exchange_reports([REPORT] if rank == 1 else [], CPU)
    return seen, reports


def test_all_ranks_take_the_server_ranks_plan_and_see_each_report(run_ranks):
    for seen, reports in run_ranks(meeting_rank):
        assert seen == [[30, 10]] * 6
        assert reports == [REPORT]


def test_reports_keep_integers_that_floats_of_half_the_size_would_lose():
    assert decode(encode(REPORT, CPU)).samples == 2**40
    assert encode(REPORT, CPU).dtype == torch.float64
