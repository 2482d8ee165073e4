"""Real gloo processes: every carrier moves the right weights, keeps its bound and never hangs."""

import contextlib
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dbsl.base.errors import RunStopped, SyncError
from dbsl.cluster import alive, serving, wire
from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.meeting import BarrierCluster
from dbsl.cluster.merges import mean, ratio
from dbsl.cluster.server import Server
from dbsl.cluster.serving import through_server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import isend
from dbsl.plan.follow import Planner
from dbsl.plan.members import Members
from dbsl.plan.solve import PlanRules, TimeModel
from dbsl.plan.spec import PlanSpec, make_plan
from dbsl.plan.types import Action, EpochEnd, RoundReport
from tests.helpers import ROOT, free_port, short, slow

FAST = TimeModel(0.001, 0.01)
LOST_SERVER = r"rank 0, the server, was lost or goes on without this process \("


def server_of(weights, members, sync, staleness):
    """Return a server that takes means at a barrier, and else each push by its ratio."""
    bound, together = {"bsp": 0, "ssp": staleness, "asp": None}[sync], sync == "bsp"
    rule = mean if together else ratio
    return Server(weights.vector, members, rule, together=together, staleness=bound)


def make(
    rank, sync, epochs, *, rounds=1, staleness=1, timeout_s=20.0, server_only=False, **options
):
    """Return this rank's weights, its cluster and the plan, one of as many as have met."""
    torch.manual_seed(rank)  # ranks start unlike: the first pull must make them alike
    weights = FlatWeights(options.pop("model", None) or torch.nn.Linear(3, 2).double())
    workers = options.pop("processes", None) or dist.get_world_size()
    workers, own = workers - server_only, rank - server_only
    spec, models = PlanSpec(100, (10,) * workers, PlanRules(), 1), TimeModel.of(FAST, workers)
    plan = make_plan(spec, models)
    planner = Planner(
        *({8: plan}, lambda epoch: 8, {8: models}),
        members=Members(workers, rounds),
        specs={8: spec},
        sampler=SimpleNamespace(count=lambda *turn: 10),
    )
    server = None if rank else server_of(weights, planner.members, sync, staleness)
    options |= {"planner": planner, "workers": (own,) * (own >= 0), "epochs": epochs}
    if sync == "bsp":
        cluster = BarrierCluster(weights, server, control=ControlGroup(timeout_s), **options)
    else:
        cluster = through_server(weights, server, timeout_s=timeout_s, **options)
    return weights, cluster, plan


def train(cluster, plan, inside=lambda turn: None, ended=lambda end: None, idle=lambda: None):
    """Take all rounds, calling `inside` before each push, and `ended` at each epoch's end.

    `idle` is called in turns of no worker.
    """
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            ended(turn)
            continue
        cluster.plan(turn)
        cluster.pull(turn)
        inside(turn) if turn.workers else idle()
        place = turn.epoch, turn.round, 8, 1, 1, 1, 0.0, 0.5
        weights = [(worker, plan.workers[worker].merge_weight) for worker in turn.workers]
        cluster.push([RoundReport(worker, *place, weight) for worker, weight in weights])
    cluster.close()


def bf16_rank(rank):
    model = torch.nn.Linear(99, 9).bfloat16()
    weights, cluster, plan = make(rank, "bsp", 3, model=model)
    seen = []
    train(cluster, plan, lambda _: seen.append(weights.vector.tolist()))
    return seen


def test_the_mean_of_equal_bf16_weights_keeps_their_bits(run_ranks):
    pulled = [each for seen in run_ranks(bf16_rank, world_size=3) for each in seen]
    assert len(pulled) == 9
    assert all(each == pulled[0] for each in pulled)


def bsp_rank(rank, server_only):
    weights, cluster, plan = make(rank, "bsp", 3, rounds=2, server_only=server_only)
    pulled, ends = [], []

    def add(turn):
        pulled.append(weights.vector.tolist())
        weights.vector.add_(turn.workers[0] + 1.0)

    train(cluster, plan, add, lambda end: ends.append(weights.vector.tolist()))
    reports = [(r.worker, r.epoch, r.round, r.loss) for r in cluster.reports()]
    return pulled, ends, reports, [w.merge_weight for w in plan.workers]


@pytest.mark.parametrize(("processes", "server_only"), [(2, False), (3, False), (3, True)])
def test_barrier_sets_everyone_to_the_weighted_mean(run_ranks, processes, server_only):
    results = run_ranks(bsp_rank, server_only, world_size=processes)
    (first, ends, _, f), *_ = results[1 if server_only else 0 :]
    assert all(result[0] == first for result in results[server_only:])
    assert all(result[1] == ends for result in results)  # each rank sees each epoch end
    moved = sum(fi * (w + 1) for w, fi in enumerate(f)) / sum(f)
    pulled = torch.tensor(first, dtype=torch.float64)
    torch.testing.assert_close(pulled[1:] - pulled[:-1], torch.full_like(pulled[1:], moved))
    expected = [(w, e, r, 0.5) for e in range(3) for r in range(2) for w in range(len(f))]
    assert [result[2] for result in results] == [expected, *[[]] * (processes - 1)]


def long_round_rank(rank):
    _, cluster, plan = make(rank, "bsp", 2, timeout_s=1.0, server_only=True, served=True)
    ask = partial(cluster.agree, Action.GO_ON, round_over=True)  # as the checkpointer does

    def inside(turn):
        time.sleep(1.5)
        ask()

    train(cluster, plan, inside, idle=ask)
    return len([*cluster.reports()])


def test_a_server_without_a_worker_waits_for_rounds_longer_than_the_timeout(run_ranks):
    assert run_ranks(long_round_rank, world_size=3) == [4, 0, 0]


def idle_rank(rank):
    serving._LOOK_S = 0.01  # in a fork
    _, cluster, plan = make(rank, "asp", 2, server_only=True)
    idle = []
    train(cluster, plan, lambda turn: time.sleep(0.1), idle=lambda: idle.append(rank))
    return bool(idle)


def test_a_server_without_a_worker_has_turns_in_which_it_may_save(run_ranks):
    assert run_ranks(idle_rank, world_size=3) == [True, False, False]


def async_rank(rank, sync, staleness, slow_s, server_only):
    weights, cluster, plan = make(rank, sync, 6, staleness=staleness, server_only=server_only)
    leads, ends, trained = [], [], []

    def inside(turn):
        (worker,) = turn.workers
        if cluster.server is not None:
            leads.append(cluster.server.clocks[worker] - min(cluster.server.clocks))
        time.sleep(slow_s[worker])
        weights.vector.fill_(float(worker))
        trained.append(turn.epoch)

    def ended(end):
        ends.append(end.epoch)
        cluster.load(end)

    train(cluster, plan, inside, ended)
    reports = [(r.worker, r.epoch, r.staleness) for r in cluster.reports()]
    final = cluster.server.snapshot().tolist() if cluster.server else None
    return len(trained), ends, leads, reports, final


@pytest.mark.parametrize(
    ("sync", "staleness", "server_only"),
    short(
        [(sync, s, alone) for sync, s in (("asp", 0), ("ssp", 0), ("ssp", 2)) for alone in (0, 1)],
        *(("asp", 0, 1), ("ssp", 2, 0)),
    ),
)
def test_server_serves_every_round_of_every_worker(run_ranks, sync, staleness, server_only):
    workers = 2 if server_only else 3
    slow_s = [0.002, 0.03, 0.01][:workers]  # worker 0 leads
    results = run_ranks(async_rank, sync, staleness, slow_s, server_only, world_size=3)
    assert [trained for trained, *_ in results] == ([0, 6, 6] if server_only else [6, 6, 6])
    _, ends, leads, reports, final = results[0]
    assert ends == [*range(6)]
    assert sorted((w, e) for w, e, _ in reports) == [(w, e) for w in range(workers) for e in ends]
    assert 0 <= min(final) <= max(final) <= 2
    if sync == "ssp" and not server_only:
        assert max(leads) <= staleness
    if sync == "ssp":  # at most (workers-1) others push, each at most 2*s+1 times, since a pull
        assert max(s for *_, s in reports) <= (workers - 1) * (2 * staleness + 1)


def broken_rule_rank(rank):
    def rule(weights, pushed, factors):
        raise ZeroDivisionError("of the rule")

    _, cluster, plan = make(rank, "asp", 2, server_only=True)
    if cluster.server is not None:
        cluster.server._rule = rule
    with pytest.raises((SyncError, ZeroDivisionError)) as error:
        train(cluster, plan)
    return error.type.__name__, len(list(cluster.losses()))


def test_an_error_of_a_merge_rule_ends_the_run_as_itself_and_costs_no_worker(run_ranks):
    server, *workers = run_ranks(broken_rule_rank, world_size=3)
    assert server == ("ZeroDivisionError", 0)
    assert {name for name, _ in workers} == {"SyncError"}


def asked_to_stop_rank(rank, stopped):
    _, cluster, plan = make(rank, "ssp", 3, staleness=0, server_only=True)

    def inside(turn):
        if rank == 1:  # the next pull waits for rank 2
            threading.Timer(0.3, cluster.interrupt).start()
        else:
            assert stopped.wait(10)

    with contextlib.suppress(RunStopped):
        try:
            train(cluster, plan, inside)
        finally:
            cluster.leave()
            stopped.set()


def test_a_worker_that_waits_for_others_stops_the_run_at_once(run_ranks):
    run_ranks(asked_to_stop_rank, mp.get_context("fork").Event(), world_size=3)


def stop_for(seconds):
    """Have this process stopped, all its threads, as a machine that is not reached."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def pausing_rank(rank, sync, pause, timeout_s):
    _, cluster, plan = make(rank, sync, 4, timeout_s=timeout_s)
    try:
        train(cluster, plan, lambda turn: rank == 2 and turn.epoch == 1 and pause(2 * timeout_s))
    except SyncError as error:
        return str(error)
    return [(loss.worker, loss.rounds, loss.samples, loss.reason) for loss in cluster.losses()]


@pytest.mark.parametrize("sync", short(["asp", "ssp"], "asp"))
def test_a_silent_worker_is_dropped_and_the_others_finish(run_ranks, sync):
    lost, *others = run_ranks(pausing_rank, sync, stop_for, 0.8, world_size=3)
    ((worker, rounds, samples, reason),) = lost
    assert (worker, rounds) == (2, 1)
    assert samples >= 10
    assert reason == "rank 2 has said nothing for 0.8 s (--worker-timeout)"
    assert others[0] == []
    assert re.match(LOST_SERVER, others[1])


@pytest.mark.parametrize("sync", short(["ssp", "asp"], "ssp"))
def test_a_worker_that_computes_for_longer_than_the_timeout_is_not_dropped(run_ranks, sync):
    assert run_ranks(pausing_rank, sync, time.sleep, 0.5, world_size=3) == [[], [], []]


def dying_rank(rank, sync, dies, server_only=False):
    """Train; one rank ends without a word."""
    ends, (_, cluster, plan) = [], make(rank, sync, 50, timeout_s=90.0, server_only=server_only)

    def inside(turn):
        if rank == dies and turn.epoch == 3:
            raise KeyboardInterrupt
        time.sleep(0.01)

    try:
        train(cluster, plan, inside, ends.append)
    except SyncError as error:
        return str(error)
    return len(ends), [loss.rank for loss in cluster.losses()]


@pytest.mark.parametrize(
    ("sync", "dies", "processes", "server_only"),
    [("ssp", 2, 3, False), ("asp", 1, 2, True), ("asp", 0, 3, False)],
)
def test_a_dead_process_is_noticed_at_once_and_the_rest_go_on_if_they_can(
    run_ranks, sync, dies, processes, server_only
):
    # The timeout is 90 s, the test's own 60 s.
    found = run_ranks(dying_rank, sync, dies, server_only, world_size=processes, expect_errors=True)
    assert "KeyboardInterrupt" in found.pop(dies)
    if dies == 0:
        assert all(re.match(LOST_SERVER, text) for text in found)
    elif server_only:
        assert found[0].startswith("rank 1, the last worker, was lost: ")
    else:
        assert found == [(50, [2]), (0, [])]


def dying_in_a_vector(rank, dies):
    """Train; one rank of two ends when a part of a vector has left it.

    So that no more than a part leaves, the other one is stopped meanwhile, and cannot read.
    """
    wire.CHUNK, alive._END_S = 1 << 28, 0.2  # one message
    ids = torch.tensor([os.getpid() * (rank == n) for n in range(2)])
    dist.all_reduce(ids)
    large = torch.nn.Linear(3000, 2000)  # 24 MB
    _, cluster, plan = make(rank, "asp", 3, timeout_s=5.0, model=large)

    def begin_and_die(vector, pair):
        time.sleep(0.3)  # the other one waits for it
        os.kill(int(ids[1 - rank]), signal.SIGSTOP)
        subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {int(ids[1 - rank])}"])
        isend(vector, pair)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)

    def inside(turn):
        if rank == dies == 1 and turn.epoch == 1:
            cluster._link.send = partial(begin_and_die, pair=cluster._link.pair)

    if rank == dies == 0:
        wire.Channel.send = lambda link, weights: begin_and_die(weights, link.pair)
    train(cluster, plan, inside)
    return [loss.rank for loss in cluster.losses()]


def test_a_worker_that_dies_in_the_middle_of_a_push_is_dropped(run_ranks):
    assert run_ranks(dying_in_a_vector, 1, expect_errors=True) == [[1], None]


def test_a_worker_whose_server_dies_in_the_middle_of_an_answer_ends(run_ranks, capfd):
    assert run_ranks(dying_in_a_vector, 0, expect_errors=True) == [None, None]
    assert re.search(f"error: {LOST_SERVER}", capfd.readouterr().err)


def failing_to_send(rank):
    def fail(vector):
        raise RuntimeError("CUDA out of memory")

    _, cluster, plan = make(rank, "asp", 2)
    if rank:
        cluster._link.send = fail
    train(cluster, plan)
    return [loss.rank for loss in cluster.losses()]


def test_a_workers_own_fault_in_an_exchange_is_not_the_servers(run_ranks):
    others, own = run_ranks(failing_to_send, expect_errors=True)
    assert others == [1]
    assert "RuntimeError: CUDA out of memory" in own
    assert "SyncError" not in own


class Waiting:
    """A connection that counts the receives that are posted and not over."""

    def __init__(self):
        self.posted, self.most = 0, 0

    def rank(self):
        return 0

    def recv(self, tensors, peer, tag):
        self.posted += 1
        self.most = max(self.most, self.posted)
        tensors[0].fill_(self.posted)
        return SimpleNamespace(wait=self.over)

    def over(self, timeout):
        self.posted -= 1


def test_beats_find_room_between_the_parts_of_a_vector(monkeypatch):
    """On a slow link a whole vector in front of them would take longer than the timeout."""
    monkeypatch.setattr(wire, "CHUNK", 40)
    pair, vector = Waiting(), torch.zeros(95)
    wire.Channel(pair, vector).receive()
    assert pair.most == 2
    assert pair.posted == 0
    assert vector.all()


ONE_OF_TWO = """
import os, signal
import torch.distributed as dist
from tests.ranks.test_sync import dying_rank
dist.init_process_group("gloo")
try:
    print("finished", *dying_rank(dist.get_rank(), "asp", 1), flush=True)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@slow
def test_with_a_launch_for_each_process_the_others_outlive_one_that_dies(tmp_path):
    (tmp_path / "script.py").write_text(ONE_OF_TWO)
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node"]
    command += ["1", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    how = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    launches = [
        subprocess.Popen([*command, "--node-rank", rank, tmp_path / "script.py"], **how, text=True)
        for rank in "01"
    ]
    try:
        assert launches[0].stdout.readline() == "finished 50 [1]\n"
        assert launches[1].wait(120) == 1
    finally:
        for launch in launches:  # the one that is left waits minutes for the other one
            launch.terminate()  # which its processes get, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                launch.wait(30)
            launch.kill()
            launch.wait()
            launch.stdout.close()
