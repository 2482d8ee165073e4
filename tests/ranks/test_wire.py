import math
import os
import signal
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import dbsl.cluster.wire
from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.cluster import Cluster
from dbsl.cluster.wire import Channel, encode, read_report
from dbsl.plan.follow import Planner
from dbsl.plan.islands import Islands
from dbsl.plan.members import Members
from dbsl.plan.solve import plan_dual_batch, plan_steps
from dbsl.plan.types import RoundReport, StepLine, TimeModel, Turn
from dbsl.run.connect import _meet
from train import Config

MODEL = TimeModel(0.001, 0.01)
REPORT = RoundReport(3, 7, 1, 32, 24, 2**40, 12, 0.1, 2.5, 0.75, 4, 0.05, 1.5, 1.25, 0.5)
LINE = StepLine(3, 7, 1, 2**40 + 12, 0.5, math.inf, 0.1, 1 / 3, 99.5, 0.25)


def test_a_report_comes_back_as_it_was_sent_with_figures_and_step_lines():
    line = LINE._replace(figures={"kd": -1.5, "penalty": 0.25})
    figures = {"kd": 1 / 3, "penalty": math.inf}
    for sent in (REPORT, replace(REPORT, figures=figures, lines=(line, LINE))):
        assert read_report(encode(sent)) == sent


@pytest.mark.parametrize(
    "plan",
    [plan_dual_batch(1000, 4, 1, 50, MODEL), plan_steps(1000, (7, 90, 3), [MODEL] * 3)],
    ids=["rounds", "steps"],
)
def test_a_plan_comes_back_with_every_worker_and_its_place(plan):
    sent = replace(plan, first_round=2, taken=345)
    assert dbsl.cluster.wire.read_plan(encode(sent)) == sent


def meeting_rank(rank):
    """Ranks that would plan unlike: all must take what the server rank says."""
    sizes = [(30, 10), (20, 20)][rank]
    plan = plan_steps(200, sizes, [MODEL] * 2)
    options = {"balance": "dynamic", "every": 2, "members": Members(2, 3)}
    planner = Planner({8: plan}, lambda epoch: 8, {8: [MODEL] * 2}, **options)
    control = ControlGroup(20.0)
    cluster = SimpleNamespace(planner=planner, control=control)

    def plan_at(epoch, round_):
        return Cluster.plan(cluster, Turn((), epoch, round_))

    seen = [
        [w.local_batch_size for w in plan_at(epoch, round_).workers]
        for epoch in range(2)
        for round_ in range(3)
    ]
    rest = plan_steps(55, (30, 10), [MODEL] * 2)  # read from a checkpoint, by every rank
    planner.plans.set(2, 3, replace(rest, taken=145))
    seen.append(plan_at(2, 0).taken)
    own = report_of(rank)
    return seen, control.gather_reports(own), control.gather_reports(own if rank else None)


def report_of(rank):
    lines = (LINE._replace(worker=1),) * rank  # rank 0 has none
    return replace(REPORT, worker=rank, lines=lines)


def test_all_ranks_take_the_server_ranks_plan_and_see_each_report(run_ranks):
    expected = [report_of(rank) for rank in range(2)]
    for seen, reports, of_one in run_ranks(meeting_rank):
        assert seen == [[30, 10]] * 6 + [145]
        assert reports == expected
        assert of_one == expected[1:]


def greeting(rank, sizes, dedicated_server):
    """Return the ranks of each group in which numbers are summed before training."""
    config = Config(workers=len(sizes), dedicated_server=dedicated_server)
    plans = SimpleNamespace(config=config, islands=Islands(sizes), place=None)
    seen = []

    def summed(tensor, group):
        seen.append(dist.get_process_group_ranks(group))

    with patch.object(dist, "all_reduce", summed):
        _meet(plans, SimpleNamespace(device=torch.device("cpu")))
    return seen


ALL = [0, 1, 2]


@pytest.mark.parametrize(
    ("sizes", "dedicated_server", "expected"),
    [
        ((1, 1, 1), False, [[ALL]] * 3),
        ((2, 1), False, [[ALL, [0, 1], [0, 2]], [ALL, [0, 1]], [ALL, [2], [0, 2]]]),
        ((2,), True, [[ALL, [0, 1]], [ALL, [1, 2], [0, 1]], [ALL, [1, 2]]]),
    ],
)
def test_each_group_is_connected_before_the_training_clock_runs(
    run_ranks, sizes, dedicated_server, expected
):
    """NCCL connects a group at its first sum."""
    assert run_ranks(greeting, sizes, dedicated_server, world_size=3) == expected


def killed(rank):
    os.kill(os.getpid(), signal.SIGKILL if rank else 0)


def test_a_rank_that_is_killed_fails_its_test_unless_that_expects_it(run_ranks):
    assert run_ranks(killed, expect_errors=True) == [None, None]
    with pytest.raises(AssertionError, match=r"\[.*-9\]"):
        run_ranks(killed)


# --- vectors


def exchange(rank):
    """Send vectors of rank 1 to rank 0 and back; return what came."""
    dbsl.cluster.wire.CHUNK = 400  # bytes: several, of which the last is shorter
    pair, found = dist.new_group([0, 1], backend="gloo"), []
    for length in (7, 350):
        vector = torch.linspace(-1, 1, length) * rank
        channel = Channel(pair, vector)
        for sender in (1, 0):
            if rank == sender:
                channel.send(vector)
                channel.wait()
            else:
                channel.receive()
        found.append(vector.tolist())
    return found


def test_vectors_come_as_they_are(run_ranks):
    sent = [torch.linspace(-1, 1, length).tolist() for length in (7, 350)]
    assert run_ranks(exchange) == [sent, sent]
