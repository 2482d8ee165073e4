"""Real processes that are launched again while the others train: taken in once, or refused."""

import multiprocessing as mp
import os
import socket
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from dbsl.base.errors import NothingLeft, SettingError, SyncError
from dbsl.cluster import launch
from dbsl.cluster.launch import Door, find_running_job
from dbsl.plan.types import JoinedWorker, LostWorker
from tests.helpers import Forked, free_port, wait_until
from tests.ranks.test_sync import make, train

TIMEOUT_S = 20.0


def take_rounds(cluster, plan, *, rounds=None, pause_s=0.0, until=None):
    """Take rounds, all or so many, none of which is over before the event `until`.

    Return their numbers and what was seen of others.
    """
    taken, seen = [], []

    def inside(turn):
        if len(taken) == rounds:
            os._exit(9)
        time.sleep(pause_s if len(seen) < 2 else 0)
        assert until is None or until.wait(TIMEOUT_S)
        taken.append(turn.epoch)
        seen.extend((type(c), c.worker, c.rounds) for c in cluster.membership())

    train(cluster, plan, inside)
    return taken, seen


def first(rank, sync, epochs, wire="float32", door_s=TIMEOUT_S, **how):
    """Be launched with the others."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    door = None if rank else Door({"sync": sync}, 2, door_s)
    _, cluster, plan = make(rank, sync, epochs, wire=wire, door=door)
    return take_rounds(cluster, plan, **how)


def again(rank, sync, epochs, wire, ready):
    """Be launched once more, and join."""
    ready.wait(TIMEOUT_S)
    job = find_running_job()
    assert (job.rank, job.processes, job.settings) == (rank, 2, {"sync": sync})
    admission = job.enter(TIMEOUT_S)
    weights, cluster, plan = make(rank, sync, epochs, wire=wire, admission=admission, processes=2)
    taken, _ = take_rounds(cluster, plan)
    return admission.clock, taken, weights.vector.isfinite().all().item()


@pytest.fixture
def start(launcher):
    """Return ``start(fn, rank, *args, **how)``: a process of two.

    Its `result` waits for what fn returns, or for what is said where it does not.
    """
    started = []

    def start(fn, rank, *args, **how):
        queue = mp.get_context("fork").SimpleQueue()
        place = launcher[1] | {"WORLD_SIZE": "2", "RANK": str(rank)}
        process = Forked(lambda: queue.put(fn(rank, *args, **how)), **place)
        started.append(process)

        def result():
            process.wait(60)
            return process.stderr if queue.empty() else queue.get()

        return result

    yield start
    for process in started:
        process.kill()


@pytest.mark.parametrize(("sync", "wire"), [("asp", "int4"), ("ssp", "float32")])
def test_a_worker_that_died_joins_from_the_first_epoch_that_nobody_has_begun(start, sync, wire):
    ready = mp.get_context("fork").Event()
    server = start(first, 0, sync, 60, wire, pause_s=0.05)
    died = start(first, 1, sync, 60, wire, rounds=2)
    back = start(again, 1, sync, 60, wire, ready)
    assert died() == ""
    ready.set()
    clock, epochs, finite = back()
    taken, (lost, joined) = server()
    assert taken == list(range(60))
    assert lost in ((LostWorker, 1, 1), (LostWorker, 1, 2))  # a last push may be on its way
    assert joined == (JoinedWorker, 1, clock)
    assert epochs == list(range(clock, 60))
    assert 1 < clock < 60
    assert finite


def test_a_second_process_of_a_rank_that_is_heard_is_refused(start):
    asked = mp.get_context("fork").Event()
    # Rank 0 has little patience for those that ask while their worker is there.
    server = start(first, 0, "asp", 3, door_s=0.2, until=asked)
    other = start(first, 1, "asp", 3, until=asked)
    said = start(ask_when_open, 1)()
    asked.set()
    refused = "error: rank 0 has not admitted rank 1: another process already runs as rank 1\n"
    assert said.startswith(refused)
    assert server()[0] == other()[0] == [0, 1, 2]


def ask_when_open(rank):
    found = []
    wait_until(lambda: found.append(find_running_job()) or found[-1], TIMEOUT_S)
    return found[-1].enter(TIMEOUT_S)


def refuses(reason):
    """Return what refuses all who would join."""

    def admit(rank, pair):
        raise reason

    return admit


class Hiccup:
    """A connection with a store, which breaks."""

    def __init__(self, store):
        self._store = store

    def add(self, *what):
        raise RuntimeError("Connection reset by peer\nframe #0")

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
def store(launcher, monkeypatch):
    """Return a launcher's store, at which this process is rank 1 of 2."""
    store, place = launcher
    for name, value in (place | {"WORLD_SIZE": "2", "RANK": "1"}).items():
        monkeypatch.setenv(name, value)
    return store


def test_the_door_stays_open_when_its_connection_breaks(store, monkeypatch, capsys):
    door, connect, broken = Door({}, 2, 1.0), launch._join_store, [Hiccup]

    def hiccup(**how):
        return broken.pop()(connect(**how)) if broken else connect(**how)

    monkeypatch.setattr(launch, "_join_store", hiccup)
    door.open(lambda rank: False, refuses(SettingError("no plan")))
    wait_until(lambda: "answers again" in capsys.readouterr().out, 10)
    with pytest.raises(SyncError, match="no plan"):
        find_running_job().enter(1.0)
    door.close()


def test_a_process_whose_connection_is_slow_still_finds_the_job(store, monkeypatch, capsys):
    door, errors = Door({}, 2, 1.0), [TimeoutError("timed out"), OSError("no route to host")]
    connect = socket.create_connection

    def slow(*what, **how):
        if errors:
            raise errors.pop(0)
        return connect(*what, **how)

    door.open(lambda rank: False, refuses(SettingError("no plan")))
    monkeypatch.setattr(socket, "create_connection", slow)
    assert find_running_job() is not None
    assert capsys.readouterr().err.count("does not answer (timed out)") == 1
    door.close()


@pytest.mark.parametrize(
    ("reason", "error", "said"),
    [
        (SettingError("no plan"), SyncError, "rank 0 has not admitted rank 1: no plan"),
        (NothingLeft("the end"), NothingLeft, "rank 1 joins no more: nothing is left"),
    ],
)
def test_a_process_that_is_refused_is_told_why_and_the_closed_door_says_so(
    store, monkeypatch, reason, error, said
):
    assert find_running_job() is None  # the others are about to start
    door = Door({}, 2, 1.0)
    door.open(lambda rank: False, refuses(reason))
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with pytest.raises(error, match=said):
        find_running_job().enter(1.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"  # as those that started together
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    for name, value in (("RANK", "0"), ("MASTER_PORT", str(free_port()))):  # no store there
        with monkeypatch.context() as other:
            other.setenv(name, value)
            assert find_running_job() is None
    door.close()
    wait_until(lambda: store.get("dbsl/join/0/open") == b"over", 5)
    with pytest.raises(SyncError, match="is over, and takes rank 1 in no more"):
        find_running_job()
