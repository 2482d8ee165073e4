import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsl.cluster.wire import (
    CPU,
    ROW,
    Kind,
    SharedPlans,
    answer,
    check_report,
    decode,
    decode_plan,
    encode,
    encode_lines,
    encode_plan,
    exchange_reports,
    line_rows,
    message,
    message_kind,
    message_numbers,
    read_answer,
    with_lines,
)
from dbsl.plan.follow import Planner
from dbsl.plan.joint_steps import plan_steps
from dbsl.plan.ledger import Members
from dbsl.plan.solve import plan_dual_batch
from dbsl.plan.types import RoundReport, Segment, StepLine, TimeModel

MODEL = TimeModel(0.001, 0.01)
REPORT = RoundReport(3, 7, 1, 32, 24, 2**40, 12, 0.1, 2.5, 0.75, 4, 0.05, 1.5, 1.25, 0.5)


def test_a_report_comes_back_as_it_was_sent():
    assert decode(encode(REPORT, CPU)) == REPORT
    assert decode(message(Kind.PLAN, REPORT)[1:]) == REPORT


def test_figures_of_the_loss_are_more_columns_of_a_report_and_of_its_step_lines():
    names, figures = ("kd", "penalty"), {"kd": 1 / 3, "penalty": math.inf}
    line = StepLine(3, 7, 1, 12, 0.5, 2.0, 0.1, 1.0, 9.0, 0.5, {"kd": -1.5, "penalty": 0.25})
    sent = replace(REPORT, figures=figures, logged=1, lines=(line,))
    assert encode(sent, CPU).shape == (ROW + 2,)
    head = decode(encode(sent, CPU), names)
    assert head.figures == figures
    assert line_rows(head).shape == encode_lines([line]).shape
    assert with_lines(head, encode_lines([line])) == replace(sent, logged=0)
    assert message(Kind.DONE, figures=2).shape == message(Kind.PUSH, sent, figures=2).shape
    with pytest.raises(ValueError, match=rf"report must be float64 \[{ROW}\]"):
        decode(encode(sent, CPU))


def test_step_lines_follow_their_report_and_none_is_taken_that_is_not_its_workers():
    lines = tuple(
        StepLine(3, 7, 1, 2**40 + n, 0.5, math.inf, 0.1, 1 / 3, 99.5, 0.25) for n in range(2)
    )
    sent = replace(REPORT, logged=2, lines=lines)
    head = decode(encode(sent, CPU))
    assert line_rows(head).shape == encode_lines(lines).shape
    assert with_lines(head, encode_lines(lines)) == replace(sent, logged=0)
    with pytest.raises(ValueError, match="at most a line for each of 12 steps, got 13"):
        line_rows(replace(head, logged=13))
    for bad, message_ in (
        (lines[0]._replace(worker=2), "step line must be of worker 3, got 2"),
        (lines[0]._replace(step=0.5), "step line must begin with whole numbers"),
    ):
        with pytest.raises(ValueError, match=message_):
            with_lines(head, encode_lines([bad]))


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
    options = {"balance": "dynamic", "every": 2, "members": Members(2, 3)}
    planner = Planner({8: plan}, lambda epoch: 8, {8: [MODEL] * 2}, **options)
    shared = SharedPlans(planner)
    seen = [
        [w.local_batch_size for w in shared.at(epoch, round_).plan.workers]
        for epoch in range(2)
        for round_ in range(3)
    ]
    rest = plan_steps(55, (30, 10), [MODEL] * 2)  # read from a checkpoint, by every rank
    planner.ledger.keep(2, [Segment(rest, left=((5, 20), (60, 100)))])
    seen.append(shared.at(2, 0).left)
    reports = exchange_reports(replace(REPORT, worker=rank), CPU)
    return seen, reports


def test_all_ranks_take_the_server_ranks_plan_and_see_each_report(run_ranks):
    for seen, reports in run_ranks(meeting_rank):
        assert seen == [[30, 10]] * 6 + [((5, 20), (60, 100))]
        assert reports == [replace(REPORT, worker=rank) for rank in range(2)]


def test_reports_keep_integers_that_floats_of_half_the_size_would_lose():
    assert decode(encode(REPORT, CPU)).samples == 2**40
    assert encode(REPORT, CPU).dtype == torch.float64


NUMBERS = st.one_of(st.floats(), st.integers(-3, 2**60).map(float))


@given(st.lists(NUMBERS, min_size=ROW, max_size=ROW))
def test_numbers_of_any_kind_are_a_report_or_refused(numbers):
    try:
        report = decode(torch.tensor(numbers, dtype=torch.float64))
        check_report(report, 3, 7, 1)
    except ValueError:
        return
    assert (report.worker, report.epoch, report.round) == (3, 7, 1)
    assert 0 < report.merge_weight <= 1


@pytest.mark.parametrize(
    "row",
    [
        torch.zeros(3, dtype=torch.float64),
        torch.zeros(ROW),
        torch.full((ROW,), float("nan"), dtype=torch.float64),
    ],
    ids=["length", "dtype", "nan"],
)
def test_rows_of_another_shape_or_dtype_are_no_reports(row):
    with pytest.raises(ValueError, match="report must"):
        decode(row)


@pytest.mark.parametrize(
    "change",
    [
        {"worker": 2},
        {"round": 0},
        {"merge_weight": 0.0},
        {"merge_weight": float("nan")},
        {"time_s": -1.0},
        {"learning_rate": float("inf")},
        {"samples": -5},
    ],
)
def test_a_report_of_another_round_or_with_odd_numbers_is_refused(change):
    check_report(REPORT, 3, 7, 1)
    with pytest.raises(ValueError, match="report must"):
        check_report(replace(REPORT, **change), 3, 7, 1)


def test_unknown_messages_and_epochs_are_refused():
    with pytest.raises(ValueError, match="message must be of a known kind, got 9"):
        message_kind(message(9))
    assert message_numbers(message(Kind.PLAN, epoch=4, round_=2), 5) == (4, 2)
    for epoch in (5, -1, 0.5, float("nan")):
        with pytest.raises(ValueError, match="message must name an epoch below 5"):
            message_numbers(message(Kind.PLAN, epoch=epoch), 5)


def test_what_the_server_answers_comes_back():
    assert read_answer(answer()) == (False, (0, -1))
    assert read_answer(answer(stop=True, announced=(12, 3))) == (True, (12, 3))
