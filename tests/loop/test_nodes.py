"""Nodes of unlike size: three processes on one, one on the other, on a network of their own."""

import copy
import ctypes
import importlib
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from dbsl.config.parse import parse_config
from dbsl.run.turns import WorkerTurn
from tests.helpers import ROOT, TINY, end_ranks, free_port, rounds_of, slow, start_rank, to_flags
from train import Config, main

NODES = (3, 1)  # processes of each
ADDRESSES = ("10.87.0.1", "10.87.0.2")
# Three of speed 1 and one of speed 3: half of the samples are the fast one's.
UNLIKE = {"slope": (0.003, 0.003, 0.003, 0.001), "intercept": (0.0,), "epochs": 2, "lr": 0.01}
JOINT = {**UNLIKE, "sync": "step", "global_batch_size": 12}
ROUNDS = {**UNLIKE, "large_batch_size": (5,), "rounds_per_epoch": 2}
MODES = {"step": JOINT, **{sync: {**ROUNDS, "sync": sync} for sync in ("bsp", "ssp", "asp")}}
RECORDED = """
import runpy, sys
sys.path.insert(0, {root!r})
from tests.loop.test_nodes import record
record({folder!r})
sys.argv[0] = "train.py"
runpy.run_path({root!r} + "/train.py", run_name="__main__")
"""


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import once what each forked process would import."""
    for name in ("datasets", "sklearn.datasets", "timm.optim", "torchvision.transforms.v2"):
        importlib.import_module(name)


def ip(*words):
    subprocess.run(("ip", *words), check=True, capture_output=True)


@contextmanager
def namespaces():
    """Make two network namespaces, each an end of one link, and give their names. Needs root."""
    names = [f"dbsl{side}-{os.getpid()}" for side in range(2)]
    ends = [f"dbv{side}-{os.getpid()}"[:15] for side in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
        yield names
    finally:
        for name in names:  # the link goes with them
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def network():
    """Return each node's address and what its commands begin with: namespaces, if root makes them.

    Without root both nodes are this host.
    """
    with ExitStack() as stack:
        try:
            names = stack.enter_context(namespaces())
        except (subprocess.CalledProcessError, OSError):
            yield [("127.0.0.1", []), ("127.0.0.1", [])]
            return
        prefixes = (["ip", "netns", "exec", name] for name in names)
        yield list(zip(ADDRESSES, prefixes, strict=True))


def enter(prefix):
    """Move this process, which has one thread, to the namespace that a prefix names."""
    if prefix:
        with open(f"/var/run/netns/{prefix[-1]}") as namespace:
            assert ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0) == 0


def record(folder):
    """Have this process write down which samples it is given in each epoch."""
    take = WorkerTurn.steps

    def recorded(self, source, transform):
        class Recording(type(source)):
            def batches(self, samples, *how):
                taken = [int(i) for own in samples for i in own]
                row = [how[-1], taken]
                with open(f"{folder}/rank-{os.environ['RANK']}.jsonl", "a") as file:
                    file.write(json.dumps(row) + "\n")
                return super().batches(samples, *how)

        source = copy.copy(source)
        source.__class__ = Recording
        return take(self, source, transform)

    WorkerTurn.steps = recorded


def run_on_nodes(tmp_path, network, sizes, flags):
    """Train in processes on nodes of these sizes, and return what rank 0 printed."""
    ranks, port = [], free_port()
    for size, (_, prefix) in zip(sizes, network, strict=True):

        def train(prefix=prefix):
            enter(prefix)
            record(tmp_path)
            main(parse_config(Config, flags))

        for local_rank in range(size):
            place = {"LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": size}
            place["MASTER_ADDR"] = network[0][0]
            ranks.append(start_rank(train, len(ranks), sum(sizes), port, **place))
    return end_ranks(ranks)


def samples_by_epoch(tmp_path, ranks=4):
    """Return the samples that each rank was given, [epoch][rank]."""
    given = {}
    for rank in range(ranks):
        for line in (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines():
            epoch, indices = json.loads(line)
            given.setdefault(epoch, [[] for _ in range(ranks)])[rank] += indices
    return [given[epoch] for epoch in sorted(given)]


def check_nodes(tmp_path, said):
    """Check that each sample came once an epoch, half of them to the fast node, as planned."""
    (plan,) = json.loads((tmp_path / "run/plan.json").read_text()).values()
    planned = [worker["samples"] for worker in plan["workers"]]
    assert planned == [10, 10, 10, 30]
    epochs = samples_by_epoch(tmp_path)
    assert len(epochs) == UNLIKE["epochs"]
    for of_ranks in epochs:
        assert sorted(np.concatenate(of_ranks)) == list(range(TINY["train_samples"]))
        assert np.abs(np.subtract([len(own) for own in of_ranks], planned)).max() <= 2
    assert "4 workers in 4 processes on 2 nodes (3 + 1)" in said
    table = [line.split()[0] for line in said.splitlines() if re.match(r" {5,}\d", line)]
    assert table == ["0-2", "3"]


@slow
@pytest.mark.parametrize("mode", MODES)
def test_unlike_nodes_train_on_each_sample_once_an_epoch_in_parts_by_their_speed(
    tmp_path, network, mode
):
    flags = to_flags(tmp_path / "run", **MODES[mode])
    check_nodes(tmp_path, run_on_nodes(tmp_path, network, NODES, flags))
    rounds = {event["worker"] for event in rounds_of(tmp_path / "run")}
    assert rounds == {0, 1, 2, 3} or mode == "step"


@slow
def test_torchrun_starts_three_processes_on_one_node_and_one_on_the_other(tmp_path, network):
    script, port = tmp_path / "train.py", free_port()
    script.write_text(RECORDED.format(root=str(ROOT), folder=str(tmp_path)))
    nodes = [
        subprocess.Popen(
            [
                *(*prefix, sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "2", "--node-rank", str(number), "--nproc-per-node", str(size)),
                *("--master-addr", network[0][0], "--master-port", str(port)),
                *(str(script), *to_flags(tmp_path / "run", **MODES["step"])),
            ],
            **{"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        )
        for number, (size, (_, prefix)) in enumerate(zip(NODES, network, strict=True))
    ]
    try:
        said = [node.communicate(timeout=240) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], said
    check_nodes(tmp_path, said[0][0])
