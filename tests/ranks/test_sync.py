"""Real gloo processes: every carrier moves the right weights, keeps its bound and never hangs."""

import contextlib
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from dbsl.base.errors import SyncError
from dbsl.cluster.alive import ControlGroup
from dbsl.cluster.barrier import BarrierCluster
from dbsl.cluster.merges import mean, ratio
from dbsl.cluster.server import Server
from dbsl.cluster.serving import through_server
from dbsl.cluster.weights import FlatWeights
from dbsl.cluster.wire import send
from dbsl.plan.follow import Planner
from dbsl.plan.solve import PlanRules, TimeModel, plan_dual_batch
from dbsl.plan.types import EpochEnd, RoundReport
from tests.helpers import ROOT, slow

FAST = TimeModel(0.001, 0.01)


def make(rank, sync, *, world_size, epochs, rounds=1, staleness=1, timeout_s=20.0, **options):
    torch.manual_seed(rank)  # ranks start unlike: the first pull must make them alike
    weights = FlatWeights(torch.nn.Linear(3, 2).double())
    workers = world_size - options.get("dedicated_server", False)
    plan = plan_dual_batch(100, workers, 1, 10, FAST, PlanRules(time_ratio=1.05))
    planner = Planner(
        {8: plan},
        lambda epoch: 8,
        {8: [FAST] * workers},
        maker=SimpleNamespace(without=lambda resolution, active: plan),
        sampler=SimpleNamespace(count=lambda segment, turn: 10),
    )
    own = rank - options.get("dedicated_server", False)
    server = None
    if rank == 0:
        server = Server(
            weights.vector,
            workers,
            mean if sync == "bsp" else ratio,
            together=sync == "bsp",
            staleness={"bsp": 0, "ssp": staleness, "asp": None}[sync],
            rounds_per_epoch=rounds,
            members=planner.members,
        )
    common = {
        "planner": planner,
        "wire": options.get("wire"),
        "workers": (own,) * (own >= 0),
        "epochs": epochs,
        "rounds_per_epoch": rounds,
    }
    if sync == "bsp":
        cluster = BarrierCluster(weights, server, control=ControlGroup(timeout_s), **common)
    else:
        common |= {name: options[name] for name in ("door", "admission") if name in options}
        cluster = through_server(weights, server, timeout_s=timeout_s, **common)
    return weights, cluster, plan


def make_reports(turn, plan):
    (worker,) = turn.workers
    weight = plan.workers[worker].merge_weight
    return [RoundReport(worker, turn.epoch, turn.round, 8, 1, 1, 1, 0.0, 0.5, weight)]


def bsp_rank(rank, world_size, dedicated):
    weights, cluster, plan = make(
        rank, "bsp", world_size=world_size, epochs=3, rounds=2, dedicated_server=dedicated
    )
    pulled, ends, reports = [], [], []
    for turn in cluster.turns():
        reports += cluster.reports()
        if isinstance(turn, EpochEnd):
            ends.append(weights.vector.clone())
            continue
        cluster.pull(turn)
        pulled.append(weights.vector.clone())
        weights.vector.add_(turn.workers[0] + 1.0)
        cluster.push(make_reports(turn, plan))
    cluster.close()
    return {
        "pulled": [p.tolist() for p in pulled],
        "ends": [e.tolist() for e in ends],
        "weights": [w.merge_weight for w in plan.workers],
        "reports": [(r.worker, r.epoch, r.round, r.loss) for r in reports],
    }


@pytest.mark.parametrize(("world_size", "dedicated"), [(2, False), (3, False), (3, True)])
def test_barrier_sets_everyone_to_the_weighted_mean(run_ranks, world_size, dedicated):
    results = run_ranks(bsp_rank, world_size, dedicated, world_size=world_size)
    training = results[1:] if dedicated else results
    assert all(r["pulled"] == training[0]["pulled"] for r in training)
    assert all(r["ends"] == results[0]["ends"] for r in results)  # each rank sees each epoch end
    f = results[0]["weights"]
    moved = sum(fi * (w + 1) for w, fi in enumerate(f)) / sum(f)
    pulled = torch.tensor(training[0]["pulled"], dtype=torch.float64)
    torch.testing.assert_close(pulled[1:] - pulled[:-1], torch.full_like(pulled[1:], moved))
    workers = range(len(f))
    expected = [(w, e, r, 0.5) for e in range(3) for r in range(2) for w in workers]
    assert results[0]["reports"] == expected
    assert results[1]["reports"] == []


def async_rank(rank, world_size, sync, staleness, slow_s, dedicated):
    weights, cluster, plan = make(
        rank, sync, world_size=world_size, epochs=6, staleness=staleness, dedicated_server=dedicated
    )
    leads, ends, reports, trained = [], [], [], 0
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            ends.append(turn.epoch)
            cluster.load(turn)
            continue
        cluster.pull(turn)
        if cluster.server is not None:
            leads.append(cluster.server.clocks[turn.workers[0]] - min(cluster.server.clocks))
        time.sleep(slow_s[turn.workers[0]])
        weights.vector.fill_(float(turn.workers[0]))
        cluster.push(make_reports(turn, plan))
        trained += 1
    cluster.close()
    reports += cluster.reports()
    return {
        "trained": trained,
        "ends": ends,
        "leads": leads,
        "reports": [(r.worker, r.epoch, r.staleness) for r in reports],
        "final": cluster.server.snapshot().tolist() if cluster.server else None,
    }


@pytest.mark.parametrize(
    ("sync", "staleness", "dedicated"),
    [
        ("asp", 0, True),
        ("ssp", 2, False),
        *(pytest.param(*case, marks=slow) for case in (("ssp", 0, False), ("ssp", 0, True))),
        *(pytest.param(*case, marks=slow) for case in (("asp", 0, False), ("ssp", 2, True))),
    ],
)
def test_server_serves_every_round_of_every_worker(run_ranks, sync, staleness, dedicated):
    workers = 2 if dedicated else 3
    slow_s = [0.002, 0.03, 0.01][:workers]  # worker 0 leads
    results = run_ranks(async_rank, 3, sync, staleness, slow_s, dedicated, world_size=3)
    server = results[0]
    assert server["ends"] == [0, 1, 2, 3, 4, 5]
    assert [r["trained"] for r in results] == ([0, 6, 6] if dedicated else [6, 6, 6])
    assert sorted((w, e) for w, e, _ in server["reports"]) == [
        (w, e) for w in range(workers) for e in range(6)
    ]
    assert 0 <= min(server["final"]) <= max(server["final"]) <= 2
    if sync == "ssp" and not dedicated:
        assert max(server["leads"]) <= staleness
    if sync == "ssp":  # at most (workers-1) others push, each at most 2*s+1 times, since a pull
        assert max(s for *_, s in server["reports"]) <= (workers - 1) * (2 * staleness + 1)


def asked_to_save_rank(rank, dedicated, told):
    _, cluster, plan = make(rank, "asp", world_size=2, epochs=2, dedicated_server=dedicated)
    if rank == 0:  # its own worker, if it has one, has finished long before the other has
        asked = []

        def look():
            asked.append(cluster.announce(len(asked) + 1, -1))
            told.set()

        cluster.idle = look
        for turn in cluster.turns():
            if not isinstance(turn, EpochEnd):
                cluster.pull(turn)
                cluster.push(make_reports(turn, plan))
        cluster.close()
        return len(asked)
    for turn in cluster.turns():
        cluster.pull(turn)
        assert told.wait(20)
        cluster.push(make_reports(turn, plan))
    cluster.close()
    return cluster.announced


@pytest.mark.parametrize("dedicated", [False, True])
def test_rank_0_looks_whether_a_save_is_due_while_others_train(run_ranks, dedicated):
    told = mp.get_context("fork").Event()
    asked, heard = run_ranks(asked_to_save_rank, dedicated, told, world_size=2)
    assert asked >= heard >= 1


def waiting_for_shards_rank(rank, epochs):
    _, cluster, plan = make(rank, "asp", world_size=3, epochs=epochs, dedicated_server=True)
    if rank == 0:
        still = []

        def look():
            if set(cluster._heard) == {2}:  # rank 1 has finished
                cluster.announce(1, -1)
                still.append(cluster.saving(1))

        cluster.idle = look
        list(cluster.turns())
        cluster.close()
        return {"meanwhile": still, "in the end": cluster.saving(1), "of before": cluster.saving(7)}
    for turn in cluster.turns():
        cluster.pull(turn)
        time.sleep((rank - 1) * 1.2)
        cluster.push(make_reports(turn, plan))
    cluster.close()
    return cluster.announced


@pytest.mark.parametrize("epochs", [1, 2])
def test_only_shards_of_workers_that_hear_of_a_save_are_waited_for(run_ranks, epochs):
    told, _, heard = run_ranks(waiting_for_shards_rank, epochs, world_size=3)
    assert told.pop("meanwhile")[:1] == [{2}]
    assert told == {"in the end": {2} if heard else set(), "of before": set()}
    assert heard == epochs - 1  # in its last round it pulls no more


def broken_rule_rank(rank):
    def rule(weights, pushed, factors):
        raise ZeroDivisionError("of the rule")

    _, cluster, plan = make(rank, "asp", world_size=3, epochs=2, dedicated_server=True)
    if cluster.server is not None:
        cluster.server._rule = rule
    try:
        for turn in cluster.turns():
            cluster.pull(turn)
            cluster.push(make_reports(turn, plan))
    except (SyncError, ZeroDivisionError) as error:
        return type(error).__name__, len(list(cluster.membership()))


def test_an_error_of_a_merge_rule_ends_the_run_as_itself_and_costs_no_worker(run_ranks):
    server, *workers = run_ranks(broken_rule_rank, world_size=3)
    assert server == ("ZeroDivisionError", 0)
    assert {name for name, _ in workers} == {"SyncError"}


def asked_to_stop_rank(rank):
    _, cluster, plan = make(rank, "ssp", world_size=3, epochs=3, staleness=0, dedicated_server=True)

    def stop():
        cluster.leave(1)
        raise KeyboardInterrupt

    cluster.on_stop = stop
    with contextlib.suppress(KeyboardInterrupt):
        for turn in cluster.turns():
            cluster.pull(turn)
            if rank == 1:  # the next pull waits for rank 2
                threading.Timer(0.3, cluster.interrupt).start()
                asked = time.monotonic()
            time.sleep(5 * (rank == 2))
            cluster.push(make_reports(turn, plan))
    return time.monotonic() - asked if rank == 1 else None


def test_a_worker_that_waits_for_others_stops_the_run_at_once(run_ranks):
    assert run_ranks(asked_to_stop_rank, world_size=3)[1] < 4


def stop_for(seconds):
    """Have this process stopped, all its threads, as a machine that is not reached."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def pausing_rank(rank, sync, pause, timeout_s):
    _, cluster, plan = make(rank, sync, world_size=3, epochs=4, timeout_s=timeout_s)
    try:
        for turn in cluster.turns():
            if isinstance(turn, EpochEnd):
                continue
            cluster.pull(turn)
            if rank == 2 and turn.epoch == 1:
                pause(3 * timeout_s)
            cluster.push(make_reports(turn, plan))
        cluster.close()
    except SyncError as error:
        return str(error)
    return [(loss.worker, loss.rounds, loss.samples, loss.reason) for loss in cluster.membership()]


@pytest.mark.parametrize("sync", ["asp", pytest.param("ssp", marks=pytest.mark.slow)])
def test_a_silent_worker_is_dropped_and_the_others_finish(run_ranks, sync):
    lost, *others = run_ranks(pausing_rank, sync, stop_for, 0.8, world_size=3)
    ((worker, rounds, samples, reason),) = lost
    assert (worker, rounds) == (2, 1)
    assert samples >= 10
    assert reason == "rank 2 has said nothing for 0.8 s (--worker-timeout)"
    assert others[0] == []
    assert others[1] == (
        "rank 0 has left this process out: rank 0 has heard nothing of this process for 0.8 s "
        "(--worker-timeout); launch it again to join"
    )


@pytest.mark.parametrize("sync", ["ssp", pytest.param("asp", marks=pytest.mark.slow)])
def test_a_worker_that_computes_for_longer_than_the_timeout_is_not_dropped(run_ranks, sync):
    assert run_ranks(pausing_rank, sync, time.sleep, 0.8, world_size=3) == [[], [], []]


def last_rank(rank):
    _, cluster, plan = make(
        rank, "asp", world_size=2, epochs=50, timeout_s=30.0, dedicated_server=True
    )
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            continue
        cluster.pull(turn)
        if turn.epoch == 3:
            raise KeyboardInterrupt  # the process ends without a word
        cluster.push(make_reports(turn, plan))


def said_by_last_rank(rank):
    began = time.monotonic()
    with pytest.raises(SyncError) as error:
        last_rank(rank)
    return str(error.value), time.monotonic() - began


def test_a_dedicated_server_ends_at_once_without_its_last_worker(run_ranks):
    (said, seconds), _ = run_ranks(said_by_last_rank, expect_errors=True)
    assert said.startswith("rank 1, the last worker, was lost: ")
    assert seconds < 10  # the timeout is 30 s


def babbling_rank(rank):
    _, cluster, plan = make(rank, "asp", world_size=2, epochs=2, timeout_s=30.0)
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            continue
        if rank == 1 and turn.epoch == 1:
            send(torch.tensor([9.0, 0, 0], dtype=torch.float64), cluster._link.pair)
            with pytest.raises(SyncError) as error:
                cluster.pull(turn)
            return str(error.value)
        cluster.pull(turn)
        cluster.push(make_reports(turn, plan))
    cluster.close()
    time.sleep(1.5)  # the process lasts until the other one is told
    return [loss.reason for loss in cluster.membership()]


def test_a_worker_whose_message_is_none_is_dropped_and_told(run_ranks):
    assert run_ranks(babbling_rank) == [
        ["message must be of a known kind, got 9"],
        "rank 0 has left this process out: message must be of a known kind, got 9; "
        "launch it again to join",
    ]


def dying_rank(rank, sync, world_size=3):
    _, cluster, plan = make(rank, sync, world_size=world_size, epochs=50, timeout_s=30.0)
    ends = 0
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            ends += 1
            continue
        cluster.pull(turn)
        if rank == world_size - 1 and turn.epoch == 3:
            raise KeyboardInterrupt  # the process ends without a word
        time.sleep(0.01)
        cluster.push(make_reports(turn, plan))
    cluster.close()
    return ends, [loss.rank for loss in cluster.membership()]


@pytest.mark.parametrize("sync", ["ssp", pytest.param("asp", marks=slow)])
def test_a_dead_worker_is_noticed_long_before_the_timeout(run_ranks, sync):
    started = time.monotonic()
    results = run_ranks(dying_rank, sync, world_size=3, expect_errors=True)
    assert results[0] == (50, [2])
    assert results[1] == (0, [])
    assert time.monotonic() - started < 20  # the timeout is 30 s


ONE_OF_TWO = """
import os, signal
import torch.distributed as dist
from tests.ranks.test_sync import dying_rank
dist.init_process_group("gloo")
try:
    print("finished", *dying_rank(dist.get_rank(), "asp", 2), flush=True)
except KeyboardInterrupt:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_with_a_launch_for_each_process_the_others_outlive_one_that_dies(tmp_path):
    (tmp_path / "script.py").write_text(ONE_OF_TWO)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    launches = [
        subprocess.Popen(
            [*command, "--node-rank", str(rank), str(tmp_path / "script.py")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
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


def lost_server_rank(rank):
    _, cluster, plan = make(rank, "asp", world_size=3, epochs=50, timeout_s=10.0)
    try:
        for turn in cluster.turns():
            if isinstance(turn, EpochEnd):
                continue
            cluster.pull(turn)
            if rank == 0 and turn.epoch == 3:
                raise KeyboardInterrupt
            time.sleep(0.01)
            cluster.push(make_reports(turn, plan))
        cluster.close()
    except SyncError as error:
        return str(error)
    return "finished"


def test_without_the_server_every_worker_stops_and_names_it(run_ranks):
    results = run_ranks(lost_server_rank, world_size=3, expect_errors=True)
    assert all("the server (rank 0) was lost" in text for text in results[1:])


def narrow_rank(rank, sync, wire):
    weights, cluster, plan = make(rank, sync, world_size=2, epochs=4, wire=wire)
    weights.vector.fill_(1000.0)  # of which bf16 would lose changes below 4
    if cluster.server is not None:
        cluster.server.snapshot().fill_(1000.0)
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            continue
        cluster.pull(turn)
        weights.vector.add_(1.0 + turn.workers[0])
        cluster.push(make_reports(turn, plan))
    cluster.close()
    return cluster.server.snapshot().tolist() if cluster.server else None


@pytest.mark.parametrize("sync", ["bsp", "ssp"])
def test_a_narrow_wire_carries_changes_that_it_would_lose_of_the_weights(run_ranks, sync):
    wide, narrow = (
        torch.tensor(run_ranks(narrow_rank, sync, wire)[0], dtype=torch.float64)
        for wire in (None, torch.bfloat16)
    )
    assert (wide > 1002).all()
    if sync == "bsp":
        torch.testing.assert_close(narrow - 1000, wide - 1000, rtol=2**-7, atol=0)
    else:  # the order of pushes may differ
        assert (narrow > 1002).all()
