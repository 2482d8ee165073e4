"""Workers of several processes equal workers of one process that take the joint batches."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import dbsl.checkpoint.resume
import dbsl.cluster.alive
import dbsl.open
import train as train_script
from dbsl.checkpoint.checkpointer import Checkpointer
from dbsl.cluster.serving import MemberCluster
from dbsl.config.parse import parse_config
from dbsl.data.sources import TensorData
from dbsl.open import open_session
from tests import helpers
from tests.helpers import TINY, end_ranks, rounds_of, rows, samples_by_epoch, short, slow, wait_all
from tests.loop.test_nodes import record
from train import Config, loss_function, train

OWN = {"model", "train_samples", "eval_samples", "resolutions"}
ROUNDS = {"epochs": 1, "rounds_per_epoch": 2, "lr_milestones": (), "save_best": False}
ROUNDS |= {"mixed_precision": "no", "noise_scale": False}


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def make_data(samples):
    rng = torch.Generator().manual_seed(5)
    draws = [torch.randn(n, 5, dtype=torch.float64, generator=rng) for n in (samples, 8)]
    labels = [torch.randint(0, 3, (len(x),), generator=rng) for x in draws]
    return TensorData(*map(TensorDataset, draws, labels), 3)


def samples_seen(folder):
    seen = {}
    for path in folder.glob("rank-*.jsonl"):
        for epoch, _, own in map(json.loads, path.read_text().splitlines()):
            seen.setdefault(epoch, []).extend(own)
    return seen


def build_normalised():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def start(folder, ranks, samples=96, act=lambda: None, build=build, **settings):
    """Start processes that train a model in float64, without batch norm unless it is another."""
    given = {name: value for name, value in TINY.items() if name not in OWN}
    flags = helpers.to_flags(folder, **{**dict.fromkeys(OWN), **given, **ROUNDS, **settings})

    def call():
        act()
        config = parse_config(Config, flags)
        data = make_data(samples)
        with open_session(config, loss_function, data=data, model=build) as session:
            if session is not None:
                train(session)

    return helpers.start_ranks(call, ranks)


def trained(folder, ranks, **settings):
    said = end_ranks(start(folder, ranks, **settings))
    (plan,) = json.loads((folder / "plan.json").read_text()).values()
    return load_file(folder / "model.safetensors"), plan, said


def difference(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


# Processes of each worker, their seconds per sample, those of the workers, their batches, and more
# that both have. In steps of 2 samples one process of three has none.
ISLANDS = {
    "two of two": ((2,), (0.002,), (0.001,), (8, 8), {}),
    "three and one": ((3, 1), (0.003,), (0.001, 0.003), (9, 4), {"wire": "int8"}),
    "uneven inside": ((2, 2), (0.002, 0.006, 0.004, 0.004), (0.0015, 0.002), (8, 5), {}),
    "served": ((3, 1), (0.003,), (0.001, 0.003), (3, 5), {"dedicated_server": True}),
}
ISLANDS["served"][-1].update(merge="delta", micro_batch_size=(1,))


def check_rows(folder):
    """Check that workers of several processes say what workers of one do of rounds and steps."""
    several, ones = (
        sorted(rows(folder / run, "round", "step"), key=lambda r: (r["worker"], r.get("step", 0)))
        for run in ("islands", "ones")
    )
    assert {row["event"] for row in several} == {"round", "step"}
    for row, one in zip(several, ones, strict=True):
        for name in ("event", "worker", "round", "samples", "steps", "step", "learning_rate"):
            assert row.get(name) == one.get(name)
        if row["event"] == "round":
            assert row["loss"] == pytest.approx(one["loss"], rel=1e-6)
        else:  # its loss is weighed by the samples of the whole round
            assert row["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)
            assert row["loss"] == pytest.approx(one["loss"], rel=0.1)


@pytest.mark.parametrize("case", short([*ISLANDS], "three and one", "served"))
def test_workers_of_several_processes_equal_workers_of_one_with_the_joint_batches(tmp_path, case):
    islands, slope, joined, sizes, more = ISLANDS[case]
    common = {"local_batch_sizes": sizes, "momentum": 0.9, "clip_grad": 0.5, **more}
    common |= {"log_every": 2, "noise_scale": "served" not in case}
    several = {"worker_processes": islands, "slope": slope, "intercept": (0.01,) * len(slope)}
    served = "dedicated_server" in more
    found, plan, said = trained(tmp_path / "islands", 4 + served, **common, **several)
    one = {"slope": joined, "intercept": (0.01,) * len(joined)}
    expected, of_one, _ = trained(tmp_path / "ones", 2 + served, **common, **one)
    assert [w["samples"] for w in plan["workers"]] == [w["samples"] for w in of_one["workers"]]
    assert difference(found, expected) < 1e-9
    check_rows(tmp_path)
    sizes = "3 + 1" if islands == (3, 1) else "2 each"
    assert f"2 workers (processes: {sizes}) in {4 + served} processes" in said


def test_one_worker_of_all_processes_takes_the_joint_steps_of_all_workers(tmp_path):
    """Batch norm takes each part by itself in both, and running statistics are averaged alike."""
    common = {"build": build_normalised, "samples": 90, "rounds_per_epoch": 1, "momentum": 0.9}
    common |= {"slope": (0.001, 0.0013), "intercept": (0.0,) * 2}
    joint, *_ = trained(tmp_path / "step", 2, sync="step", local_batch_sizes=(5, 4), **common)
    island = {"worker_processes": (2,), "local_batch_sizes": (9,)}
    found, *_ = trained(tmp_path / "island", 2, **island, **common)
    assert {"1.running_mean", "1.running_var"} <= found.keys()
    assert difference(found, joint) < 1e-9


def test_simulated_steps_take_what_the_slowest_process_does(tmp_path):
    slope = (0.001, 0.003, 0.00075)  # 6 + 2 of 8 samples take 6 ms, as do 8 of worker 1
    how = {"local_batch_sizes": (8, 4), "intercept": (0.0,), "worker_processes": (2, 1)}
    _, plan, said = trained(tmp_path / "run", 1, **how, slope=slope)
    assert "2 workers (processes: 2 + 1) simulated in one process" in said
    assert [worker["samples"] for worker in plan["workers"]] == [48, 48]
    last = rows(tmp_path / "run", "round")[-1]["virtual_time_s"]
    assert last == pytest.approx(2 * 3 * 0.006)  # rounds, steps


# --- stopped, killed, resumed


LONGER = {"epochs": 3, "worker_processes": (2, 1), "local_batch_sizes": (8, 4), "momentum": 0.9}
LONGER |= {"rounds_per_epoch": 1, "checkpoint_every": 1, "worker_timeout": 60, "resume": "auto"}
LONGER |= {"ema_decay": 0.5, "noise_scale": True, "log_every": 3}


def at_step(number, rank, what, often_s=0.0):
    """Return what has this signal come to one process after so many of its steps.

    Processes of a worker ask each other after so many seconds whether to stop.
    """

    def act():
        steps, after_step = [], Checkpointer.after_step

        def counted(self, *, round_over):
            steps.append(round_over)
            if torch.distributed.get_rank() == rank and len(steps) == number:
                os.kill(os.getpid(), what)
            after_step(self, round_over=round_over)

        Checkpointer.after_step = counted
        dbsl.cluster.alive._ASK_EVERY_S = often_s

    return act


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    end_ranks(start(folder, 3, **LONGER))
    return folder


@pytest.mark.parametrize("killed", short([False, True], True))
def test_a_second_process_that_is_stopped_or_killed_ends_the_run_which_resumes_to_the_same_bits(
    tmp_path, whole, killed
):
    folder, second = tmp_path / "run", 1
    # In the third epoch the first one's checkpoint is whole.
    moment = (19, second, signal.SIGKILL) if killed else (11, second, signal.SIGTERM)
    broken = start(folder, 3, act=at_step(*moment), **LONGER)
    assert wait_all(broken) == ([2, -9, 2] if killed else [75] * 3), broken[0].stderr
    if killed:
        said = f"error: rank {second} (a process of worker 0) died or fell silent"
        assert all(said in broken[rank].stderr for rank in (0, 2)), broken[0].stderr
    else:
        shards = sorted(folder.glob("checkpoints/save-*/rank-0000[01].json"))
        assert [json.loads(path.read_text())["progress"]["steps"] for path in shards] == [3, 3]
    again = end_ranks(start(folder, 3, **LONGER))
    assert "resumed from" in again
    assert helpers.fingerprint(folder) == helpers.fingerprint(whole)


@pytest.mark.parametrize("islands", short([((3, 1),), ((1, 1, 2),), (None,)], ((1, 1, 2),)))
def test_other_islands_train_on_each_sample_once(tmp_path, islands):
    settings = LONGER | {"local_batch_sizes": None, "large_batch_size": (4,)}
    stop = at_step(14, 3, signal.SIGTERM, often_s=9.0)  # its round ends before
    broken = start(tmp_path / "run", 4, act=stop, **settings | {"worker_processes": (2, 2)})
    assert wait_all(broken) == [75] * 4, broken[0].stderr

    def recorded():
        record(tmp_path)

    now = {"worker_processes": islands, "allow_config_change": True}
    said = end_ranks(start(tmp_path / "run", 4, act=recorded, **settings | now))
    assert "resumed from" in said
    seen = samples_seen(tmp_path)
    assert sorted(seen[2]) == list(range(96))
    left = [row["samples"] for row in rounds_of(tmp_path / "run") if row["epoch"] == 1]
    assert sorted(set(seen[1])) == sorted(seen[1])
    assert sum(left) == 96


# --- without a barrier


ALONE = {"epochs": 3, "sync": "asp", "rounds_per_epoch": 2, "checkpoint_every": 1, "resume": "auto"}
ALONE |= {"large_batch_size": (4,), "local_batch_sizes": None, "momentum": 0.9}
ALONE |= {"worker_timeout": 60}


def slowly(act=lambda: None, step_s=0.01, slowest=0):
    """Return what has each process take its time; rank 0 is not over before others."""

    def slowed():
        after_step, rank = Checkpointer.after_step, torch.distributed.get_rank

        def waits(self, *, round_over):
            time.sleep(step_s * (3 if rank() == slowest else 1))
            after_step(self, round_over=round_over)

        Checkpointer.after_step = waits
        act()

    return slowed


# Processes of each worker, and more.
ASYNCHRONOUS = {
    "asp": ((2, 1), {"clip_grad": 0.5, "noise_scale": True, "log_every": 3}),
    "ssp": ((1, 2), {"sync": "ssp", "staleness": 0, "balance": "dynamic"}),
    "served": ((2, 1), {"dedicated_server": True, "micro_batch_size": (2,), "ema_decay": 0.5}),
    "all": ((3,), {"sync": "ssp", "large_batch_size": (6,)}),
}


def record_weights(folder):
    """Have this process write down its weights where a round begins and where it ends."""
    pull, hand_over = MemberCluster.pull, MemberCluster._hand_over

    def write(cluster):
        with open(f"{folder}/weights-{torch.distributed.get_rank()}.txt", "a") as file:
            file.write(f"{cluster.weights.vector.tolist()}\n")

    def pulls(self, turn):
        pull(self, turn)
        write(self)

    def hands_over(self, report):
        write(self)
        return hand_over(self, report)

    MemberCluster.pull, MemberCluster._hand_over = pulls, hands_over


@pytest.mark.parametrize("case", short([*ASYNCHRONOUS], "asp"))
def test_workers_of_several_processes_that_wait_for_nobody_train_on_each_sample_once(
    tmp_path, case
):
    islands, more = ASYNCHRONOUS[case]
    settings = ALONE | more | {"worker_processes": islands, "build": build_normalised}
    served = "dedicated_server" in more

    def act():
        record(tmp_path)
        record_weights(tmp_path)

    end_ranks(start(tmp_path / "run", 3 + served, act=act, **settings))
    several = [rank + served for rank in range(3) if islands != (1, 2) or rank]
    first, second = ((tmp_path / f"weights-{r}.txt").read_text() for r in several[:2])
    assert first == second
    assert len({*first.splitlines()}) == 2 * 6  # none is what it was before
    seen = samples_seen(tmp_path)
    assert [sorted(seen[epoch]) for epoch in sorted(seen)] == [list(range(96))] * 3
    assert len(rounds_of(tmp_path / "run")) == 3 * 2 * len(islands)
    assert samples_by_epoch(tmp_path / "run") == [96] * 3


@slow
def test_a_served_worker_of_several_processes_equals_one_of_one_with_the_joint_batch(tmp_path):
    common = ALONE | {"dedicated_server": True, "local_batch_sizes": (9,), "clip_grad": 0.5}
    common |= {"large_batch_size": None, "merge": "half"}
    found, _, said = trained(tmp_path / "island", 4, **common, worker_processes=(3,))
    expected, _, before = trained(tmp_path / "one", 2, **common)
    again, *_ = trained(tmp_path / "given", 2, **common, worker_processes=(1,))
    assert difference(found, expected) < 1e-9
    assert difference(again, expected) == 0
    assert ("processes: 3 each" in said, "processes:" in before) == (True, False)


def kill_at(rank, number, what=signal.SIGKILL):
    return slowly(at_step(number, rank, what))


@pytest.mark.parametrize(
    ("lost", "what"),
    short(
        [(lost, what) for what in (signal.SIGKILL, signal.SIGSTOP) for lost in (2, 1)],
        (2, signal.SIGKILL),
    ),
)
def test_a_worker_is_lost_with_any_of_its_processes_and_is_back_after_a_resume(
    tmp_path, lost, what
):
    """Rank 0 is a worker by itself, ranks 1 and 2 are the other."""
    folder, settings = tmp_path / "run", ALONE | {"worker_processes": (1, 2), "epochs": 5}
    if what == signal.SIGSTOP:  # which is noticed late: the others are to have something left to do
        settings |= {"sync": "ssp", "worker_timeout": 15}
    processes = start(folder, 3, act=kill_at(lost, 20, what), **settings)
    other = processes[3 - lost]
    assert other.wait(60) == 2
    name = f"rank {lost} (a process of worker 1) was lost: "
    assert f"error: rank 0 has left worker 1 out: {name}" in other.stderr
    assert processes[0].wait(60) == 0, processes[0].stderr
    processes[lost].kill()
    said = processes[0].stdout + processes[0].stderr
    assert f"warning: rank {lost} (worker 1) was lost after" in said
    (gone,), by_epoch = rows(folder, "lost"), samples_by_epoch(folder, 5)
    assert sum(by_epoch) + gone["samples"] == 5 * 96
    assert by_epoch[4] == 96
    assert helpers.summary_of(folder)["lost_workers"] == [1]
    again = start(folder, 3, **settings | {"epochs": 7, "allow_config_change": True})
    assert "resumed from" in end_ranks(again)
    assert {row["worker"] for row in rounds_of(folder) if row["epoch"] == 6} == {0, 1}


@slow
def test_the_run_ends_with_the_worker_that_rank_0_is_of(tmp_path):
    settings = ALONE | {"worker_processes": (2, 1), "sync": "ssp"}
    processes = start(tmp_path / "run", 3, act=kill_at(1, 20), **settings)
    assert wait_all(processes) == [2, -9, 2]
    first, _, other = (process.stderr for process in processes)
    assert "error: rank 1 (a process of worker 0) was lost, and rank 0 is of that worker: " in first
    assert "error: the server (rank 0) was lost: " in other


@slow
@pytest.mark.parametrize("islands", [(2, 1), (1, 2), None])
def test_a_stopped_run_goes_on_with_these_or_other_islands_at_the_sample(tmp_path, islands):
    folder, settings = tmp_path / "run", ALONE | {"worker_processes": (2, 1), "sync": "ssp"}
    stop = slowly(at_step(16, 1, signal.SIGTERM))

    def act():
        record(tmp_path)
        stop()

    broken = start(folder, 3, act=act, **settings)
    assert wait_all(broken) == [75] * 3, broken[0].stderr
    moments = {}
    for path in sorted(folder.glob("checkpoints/save-*/rank-0000[01].json")):
        state = json.loads(path.read_text())
        moments[path.name] = state["cluster"]["clock"], state["progress"]["steps"]
    assert moments["rank-00000.json"] == moments["rank-00001.json"]
    for path in tmp_path.glob("rank-*.jsonl"):  # batches are read ahead of steps
        path.unlink()
    now = {"worker_processes": islands, "allow_config_change": True}
    said = end_ranks(start(folder, 3, act=lambda: record(tmp_path), **settings | now))
    assert "resumed from" in said
    seen = samples_seen(tmp_path)
    assert sorted(seen[2]) == list(range(96))
    assert all(len(own) == len(set(own)) for own in seen.values())
    if islands == (2, 1):
        assert samples_by_epoch(folder) == [96] * 3


@slow
def test_a_run_that_is_finished_early_ends_for_all_and_goes_on(tmp_path, monkeypatch):
    folder, settings = tmp_path / "run", ALONE | {"worker_processes": (2, 1), "epochs": 4}
    end = train_script.end_epoch

    def ends(session, epoch_end):
        end(session, epoch_end)
        if epoch_end.epoch == 1:
            session.finish()

    with monkeypatch.context() as patch:
        patch.setattr(train_script, "end_epoch", ends)
        end_ranks(start(folder, 3, act=slowly(), **settings))
    assert helpers.summary_of(folder)["epochs"] == 2
    take_over = dbsl.checkpoint.resume.take_over_folder

    def takes_its_time(*arguments):
        if torch.distributed.get_rank() == 0:  # rank 2 may have no turn left, and saves at once
            time.sleep(2)
        take_over(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(dbsl.checkpoint.resume, "take_over_folder", takes_its_time)
        end_ranks(start(folder, 3, **settings))
    assert samples_by_epoch(folder, 4) == [96] * 4
    assert (folder / "checkpoints/epoch-0004/rank-00002.safetensors").exists()


@slow
def test_a_first_worker_of_several_processes_may_be_done_before_others(tmp_path):
    folder, settings = tmp_path / "run", ALONE | {"worker_processes": (2, 1), "epochs": 1}
    settings |= {"sync": "asp", "lr_milestones": ()}
    end_ranks(start(folder, 3, act=slowly(step_s=0.3, slowest=2), **settings))
    assert samples_by_epoch(folder, 1) == [96]


@slow
def test_processes_that_were_saved_at_unlike_steps_begin_their_round_again_alike(tmp_path):
    """Rank 0 saves when it is time, and the other process of its worker with the next round, if
    it comes so far."""
    folder, settings = tmp_path / "run", ALONE | {"worker_processes": (2, 1), "epochs": 6}
    settings |= {"sync": "ssp", "checkpoint_every": "0.01m", "keep_checkpoints": 1000}
    broken = start(folder, 3, act=slowly(at_step(60, 2, signal.SIGKILL), 0.03), **settings)
    helpers.wait_until(lambda: broken[2].poll() is not None)
    for process in broken:
        process.kill()
    said = end_ranks(start(folder, 3, act=lambda: record_weights(tmp_path), **settings))
    saved = Path(said.partition("resumed from ")[2].partition(" (")[0])
    texts = [path.read_text() for path in sorted(saved.glob("rank-0000[01].json"))]
    steps = [json.loads(text)["progress"]["steps"] for text in texts]
    assert len({*steps}) == 2 or len(steps) == 1, steps
    first, second = ((tmp_path / f"weights-{r}.txt").read_text() for r in (0, 1))
    assert first == second
    assert samples_by_epoch(folder, 6) == [96] * 6
