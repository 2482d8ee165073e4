"""Workers of several processes equal workers of one process that take the joint batches."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

from dbsl.config.parse import parse_config
from dbsl.data.sources import TensorData
from dbsl.open import open_session
from dbsl.run.training import Run
from tests.helpers import TINY, end_ranks, start_ranks, to_flags
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


def record(folder):
    """Have this process write down the samples of each of its batches, by epoch."""
    batches = Run.batches

    def recorded(self, parts, resolution, epoch):
        row = [epoch, [part.indices.tolist() for part in parts]]
        with open(f"{folder}/samples-{torch.distributed.get_rank()}.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        return batches(self, parts, resolution, epoch)

    Run.batches = recorded


def start(folder, ranks, samples=96, act=lambda: None, **settings):
    """Start processes that train a model in float64 without batch norm."""
    given = {name: value for name, value in TINY.items() if name not in OWN}
    flags = to_flags(folder, **{**dict.fromkeys(OWN), **given, **ROUNDS, **settings})

    def call():
        act()
        config = parse_config(Config, flags)
        data = make_data(samples)
        with open_session(config, loss_function, data=data, model=build) as session:
            if session is not None:
                train(session)

    return start_ranks(call, ranks)


def trained(folder, ranks, **settings):
    said = end_ranks(start(folder, ranks, **settings))
    (plan,) = json.loads((folder / "plan.json").read_text()).values()
    return load_file(folder / "model.safetensors"), plan, said


def difference(weights, others):
    return max((weights[name] - others[name]).abs().max().item() for name in weights)


# Processes of each worker, their seconds per sample, those of the workers, and their batches.
ISLANDS = {
    "two of two": ((2,), (0.002,), (0.001,), (8, 8)),
    "three and one": ((3, 1), (0.003,), (0.001, 0.003), (9, 4)),
    "uneven inside": ((2, 2), (0.002, 0.006, 0.004, 0.004), (0.0015, 0.002), (8, 5)),
}


@pytest.mark.parametrize("case", ISLANDS)
def test_workers_of_several_processes_equal_workers_of_one_with_the_joint_batches(tmp_path, case):
    islands, slope, joined, sizes = ISLANDS[case]
    common = {"local_batch_sizes": sizes, "momentum": 0.9, "clip_grad": 0.5}
    several = {"worker_processes": islands, "slope": slope, "intercept": (0.01,) * len(slope)}
    ranks = 4
    found, plan, said = trained(tmp_path / "islands", ranks, **common, **several)
    one = {"slope": joined, "intercept": (0.01,) * len(joined)}
    expected, of_one, _ = trained(tmp_path / "ones", 2, **common, **one)
    assert [w["samples"] for w in plan["workers"]] == [w["samples"] for w in of_one["workers"]]
    assert difference(found, expected) < 1e-9
    sizes = (2, 2) if islands == (2,) else islands
    assert f"2 workers in 4 processes ({sizes[0]} + {sizes[1]})" in said


def test_four_workers_of_one_process_are_not_two_of_two(tmp_path):
    common = {"local_batch_sizes": (8, 8)}
    found, *_ = trained(tmp_path / "islands", 4, **common, worker_processes=(2,))
    fours, *_ = trained(tmp_path / "ones", 4, local_batch_sizes=(4,) * 4)
    assert difference(found, fours) > 1e-4
