"""Workers of several processes equal workers of one process that take the joint batches."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from dbsl.config.parse import parse_config
from dbsl.data.sources import TensorData
from tests import helpers
from tests.helpers import TINY, end_ranks, own, rounds_of, rows, short, wait_all
from tests.loop.test_nodes import record
from train import Config, main

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
        for epoch, samples in map(json.loads, path.read_text().splitlines()):
            seen.setdefault(epoch, []).extend(samples)
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
        own(pytest.MonkeyPatch(), make_data(samples), build)
        main(parse_config(Config, flags))

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


@pytest.mark.parametrize("case", short([*ISLANDS], "served"))
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    end_ranks(start(folder, 3, **LONGER))
    return folder


@pytest.mark.parametrize("killed", short([False, True], True))
def test_a_second_process_that_is_stopped_or_killed_ends_the_run_which_resumes_to_the_same_bits(
    tmp_path, monkeypatch, whole, killed
):
    folder, second = tmp_path / "run", 1
    monkeypatch.setattr("dbsl.cluster.alive._ASK_EVERY_S", 0.0)
    # In the third epoch the first one's checkpoint is whole.
    moment = (19, second, signal.SIGKILL) if killed else (11, second, signal.SIGTERM)
    with helpers.signal_at(*moment):
        broken = start(folder, 3, **LONGER)
    assert wait_all(broken) == ([2, -9, 2] if killed else [75] * 3), broken[0].stderr
    if killed:
        said = f"error: rank {second} died or fell silent"
        assert all(said in broken[rank].stderr for rank in (0, 2)), broken[0].stderr
    else:
        shards = sorted(folder.glob("checkpoints/save-*/rank-0000[01].json"))
        assert [json.loads(path.read_text())["progress"]["steps"] for path in shards] == [3, 3]
    again = end_ranks(start(folder, 3, **LONGER))
    assert "resumed from" in again
    assert helpers.fingerprint(folder) == helpers.fingerprint(whole)


@pytest.mark.parametrize("islands", short([((3, 1),), ((1, 1, 2),), (None,)], ((1, 1, 2),)))
def test_other_islands_train_on_each_sample_once(tmp_path, monkeypatch, islands):
    settings = LONGER | {"local_batch_sizes": None, "large_batch_size": (4,)}
    monkeypatch.setattr("dbsl.cluster.alive._ASK_EVERY_S", 9.0)  # its round ends before
    with helpers.signal_at(14, 3, signal.SIGTERM):
        broken = start(tmp_path / "run", 4, **settings | {"worker_processes": (2, 2)})
    assert wait_all(broken) == [75] * 4, broken[0].stderr
    now = {"worker_processes": islands}
    said = end_ranks(start(tmp_path / "run", 4, act=lambda: record(tmp_path), **settings | now))
    assert "resumed from" in said
    seen = samples_seen(tmp_path)
    assert sorted(seen[2]) == list(range(96))
    left = [row["samples"] for row in rounds_of(tmp_path / "run") if row["epoch"] == 1]
    again = seen.get(1, [])
    assert bool(again) == (islands is not None)  # the same workers had taken all of it
    assert sorted(set(again)) == sorted(again)
    assert sum(left) == 96
