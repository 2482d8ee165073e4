"""Real processes that are launched again while the others train: taken in once, or refused."""

import multiprocessing as mp
import os
import socket
import threading
import time
import traceback
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dbsl.base.errors import NothingLeft, SettingError, SyncError
from dbsl.cluster import joining
from dbsl.cluster.joining import Door, find_running_job
from dbsl.plan.types import EpochEnd, LostWorker
from tests.helpers import free_port, wait_until
from tests.ranks.test_sync import make, make_reports, stop_for

TIMEOUT_S = 20.0


def train(cluster, plan, *, rounds=None, pause_s=0.0, until=None):
    """Take rounds, all or so many, and return their numbers and what was seen of others.

    None is over before the event `until`.
    """
    taken, lost, joined = [], [], []
    for turn in cluster.turns():
        if isinstance(turn, EpochEnd):
            continue
        cluster.segment(turn)
        cluster.pull(turn)
        time.sleep(pause_s)
        if until is not None:
            assert until.wait(TIMEOUT_S)
        cluster.push(make_reports(turn, plan))
        taken.append(turn.epoch)
        for change in cluster.membership():
            told = lost if isinstance(change, LostWorker) else joined
            told.append((change.worker, change.rounds))
        if len(taken) == rounds:
            break
    return taken, lost, joined


def first(
    rank, sync, epochs, rounds, pause_s, wire, timeout_s=TIMEOUT_S, stopped_s=0.0, until=None
):
    """Be launched with the others; after so many rounds die, if it is said how many."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S)
    )
    more = {"door": Door({"sync": sync}, 2, timeout_s)} if rank == 0 else {}
    _, cluster, plan = make(
        rank, sync, world_size=2, epochs=epochs, timeout_s=timeout_s, wire=wire, **more
    )
    if stopped_s:
        stop_for(stopped_s)
    seen = train(cluster, plan, rounds=rounds, pause_s=pause_s, until=until)
    if rounds is not None:
        os._exit(9)
    cluster.close()
    return seen


def again(rank, sync, epochs, wire, ready):
    """Be launched once more, and join."""
    ready.wait(TIMEOUT_S)
    job = find_running_job()
    assert (job.rank, job.processes, job.settings) == (rank, 2, {"sync": sync})
    admission = job.enter(TIMEOUT_S)
    weights, cluster, plan = make(
        rank, sync, world_size=2, epochs=epochs, timeout_s=TIMEOUT_S, wire=wire, admission=admission
    )
    taken, *_ = train(cluster, plan)
    cluster.close()
    return admission.clock, taken, weights.vector.isfinite().all().item()


@pytest.fixture
def launch():
    """Return ``launch(fn, rank, *args)``, which starts a process of two beside a launcher's store.

    Its `result` waits for what fn returns, or for the name of what it raises.
    """
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    started = []

    def start(fn, rank, *args):
        queue = mp.get_context("fork").SimpleQueue()

        def main():
            torch.set_num_threads(1)
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank)}
            try:
                queue.put(fn(rank, *args))
            except Exception as error:
                traceback.print_exc()
                queue.put(f"{type(error).__name__}: {error}")
            finally:
                os._exit(0)  # a failed pair must not keep the process in a destructor

        process = mp.get_context("fork").Process(target=main)
        process.start()
        started.append(process)

        def result():
            process.join(60)
            assert not process.is_alive(), "the process did not end within 60 s"
            return None if queue.empty() else queue.get()

        return result

    yield start
    for process in started:
        process.kill()
    del store


@pytest.mark.parametrize(
    ("sync", "wire"),
    [("asp", torch.bfloat16), ("ssp", None), pytest.param("asp", None, marks=pytest.mark.slow)],
)
def test_a_worker_that_died_joins_from_the_first_epoch_that_nobody_has_begun(launch, sync, wire):
    ready = mp.get_context("fork").Event()
    server = launch(first, 0, sync, 60, None, 0.05, wire)
    died = launch(first, 1, sync, 60, 2, 0.0, wire)
    back = launch(again, 1, sync, 60, wire, ready)
    assert died() is None
    ready.set()
    clock, epochs, finite = back()
    taken, lost, joined = server()
    assert taken == list(range(60))
    assert lost in ([(1, 1)], [(1, 2)])  # its last push may have been on its way
    assert joined == [(1, clock)]
    assert epochs == list(range(clock, 60))
    assert 1 < clock < 60
    assert finite


def stopped(rank):
    """Be silent for longer than the timeout, as where a machine is stopped, and come back."""
    return first(rank, "asp", 200, None, 0.02, None, 1.0, 2.0)


def test_a_process_that_was_left_out_is_told_so_when_it_comes_back(launch):
    server = launch(first, 0, "asp", 200, None, 0.02, None, 1.0)
    said = launch(stopped, 1)()
    assert said.startswith("SyncError: rank 0 has left this process out: rank 1 has said nothing")
    assert said.endswith("for 1 s (--worker-timeout); launch it again to join")
    assert [worker for worker, _ in server()[1]] == [1]


class Silent:
    """A launcher's store that has stopped: a word waits until it is there again."""

    def __init__(self):
        self.there, self.kept = threading.Event(), {}

    def set(self, key, value):
        if self.there.wait(5.0):
            self.kept[key] = value


def rank_beside_a_silent_store(rank):
    """Train, one of two; rank 1 ends without a word."""
    store, door = Silent(), Door({}, 2, TIMEOUT_S)
    door.open = lambda host: setattr(door, "_store", store)
    _, cluster, plan = make(
        rank,
        "asp",
        world_size=2,
        epochs=60,
        timeout_s=TIMEOUT_S,
        **({} if rank else {"door": door}),
    )
    _, lost, _ = train(cluster, plan, rounds=1 if rank else None, pause_s=0.02)
    if rank:
        os._exit(9)
    store.there.set()
    cluster.close()
    return [worker for worker, _ in lost], list(store.kept)


def test_training_goes_on_while_the_store_takes_no_word_for_a_worker_that_is_left_out(run_ranks):
    assert run_ranks(rank_beside_a_silent_store) == [([1], ["left out/1/0"]), None]


def test_a_second_process_of_a_rank_that_is_heard_is_refused(launch):
    asked = mp.get_context("fork").Event()
    server = launch(quick_server, 0, 3, asked)
    other = launch(first, 1, "asp", 3, None, 0.0, None, TIMEOUT_S, 0.0, asked)
    said = launch(ask_when_open, 1)()
    asked.set()
    assert said == "SyncError: rank 0 has not taken rank 1 in: another process is heard as rank 1"
    assert server()[0] == other()[0] == [0, 1, 2]


def quick_server(rank, epochs, until):
    """Be rank 0, with little patience for those that ask while their worker is there."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    door = Door({"sync": "asp"}, 2, 0.2)
    _, cluster, plan = make(
        rank, "asp", world_size=2, epochs=epochs, timeout_s=TIMEOUT_S, door=door
    )
    seen = train(cluster, plan, until=until)
    cluster.close()
    return seen


def ask_when_open(rank):
    deadline = time.monotonic() + TIMEOUT_S
    while (job := find_running_job()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    return job.enter(TIMEOUT_S)


def test_without_a_launchers_store_or_on_rank_0_there_is_no_job_to_join(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert find_running_job() is None  # nobody answers
    monkeypatch.setenv("RANK", "0")
    assert find_running_job() is None


@pytest.fixture
def listener(monkeypatch):
    """Return what listens where the launcher's store was, and answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = str(listening.getsockname()[1])
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        yield listening


def test_a_process_of_a_rank_0_that_is_dying_soon_ends_and_without_pages_of_frames(listener, capfd):
    dying = threading.Timer(0.2, listener.close)  # until then its connections are accepted
    dying.start()
    assert joining.why_left_out(0) is None
    assert capfd.readouterr().err == ""
    dying.join()


def test_a_process_does_not_wait_for_ever_for_a_rank_0_that_was_stopped(listener, monkeypatch):
    monkeypatch.setattr("dbsl.base.launcher._CONNECT_S", 0.2)
    asks = threading.Thread(target=joining.why_left_out, args=(0,), daemon=True)
    asks.start()
    asks.join(30)
    assert not asks.is_alive()


class Full:
    """A host that refuses."""

    def __init__(self, reason):
        self._reason = reason

    def is_served(self, rank):
        return False

    def admit(self, rank, pair):
        raise SettingError(self._reason)


class Hiccup:
    """A connection with a store, which breaks."""

    def __init__(self, store):
        self._store = store

    def add(self, *what):
        raise RuntimeError("Connection reset by peer\nframe #0")

    def __getattr__(self, name):
        return getattr(self._store, name)


@pytest.fixture
def launcher(monkeypatch):
    """Return a launcher's store, at which this process is rank 1 of 2."""
    port = free_port()
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def test_the_door_stays_open_when_its_connection_breaks(launcher, monkeypatch, capsys):
    door, connect, broken = Door({}, 2, 1.0), joining._store, [Hiccup]

    def hiccup(**how):
        return broken.pop()(connect(**how)) if broken else connect(**how)

    monkeypatch.setattr(joining, "_store", hiccup)
    door.open(Full("no plan"))
    wait_until(lambda: "answers again" in capsys.readouterr().out, 10)
    with pytest.raises(SyncError, match="no plan"):
        find_running_job().enter(1.0)
    door.close()
    door._thread.join(5)


def test_a_process_whose_connection_is_slow_still_finds_the_job(launcher, monkeypatch, capsys):
    door, errors = Door({}, 2, 1.0), [TimeoutError("timed out"), OSError("no route to host")]
    connect = socket.create_connection

    def slow(*what, **how):
        if errors:
            raise errors.pop(0)
        return connect(*what, **how)

    monkeypatch.setattr(socket, "create_connection", slow)
    door.open(Full("no plan"))
    assert find_running_job() is not None
    assert capsys.readouterr().out.count("does not answer (timed out)") == 1
    door.close()
    door._thread.join(5)


@pytest.mark.parametrize(
    ("reason", "error", "said"),
    [
        ("no plan", SyncError, "rank 0 has not taken rank 1 in: no plan"),
        ("nothing is left to do: the end", NothingLeft, "rank 1 joins no more: nothing is left"),
    ],
)
def test_a_process_that_is_refused_is_told_why_and_the_closed_door_says_so(
    monkeypatch, reason, error, said
):
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    for name, value in (("ADDR", "127.0.0.1"), ("PORT", str(port))):
        monkeypatch.setenv(f"MASTER_{name}", value)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_running_job() is None  # the others are about to start
    door = Door({}, 2, 1.0)
    door.open(Full(reason))
    with pytest.raises(error, match=said):
        find_running_job().enter(1.0)
    door.close()
    door._thread.join(5)
    with pytest.raises(SyncError, match="is over, and takes rank 1 in no more"):
        find_running_job()
    del store
