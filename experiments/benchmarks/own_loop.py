"""What the library costs and gains in a loop that is not train.py.

    python -m experiments.benchmarks.own_loop overhead|burden|merges

Two processes, each on its own core. `overhead`: a plain loop of DDP against the same loop with the
sampler, `scale` and `watch`, in alternate epochs. `burden`: a BERT under Accelerate, while another
program shares the core of process 1; equal batches against ``balance="dynamic"``, in turns.
`merges`: seconds of a merge of `Rounds`, Accelerate's LocalSGD and, where it is installed,
torchft's DiLoCo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import dbsl
from experiments.benchmarks.demos.arms import run_ranks
from experiments.benchmarks.ranks import end_in_order
from experiments.benchmarks.record import record
from experiments.compare.statistics import interval

MODULE = "experiments.benchmarks.own_loop"
BATCH = 32  # of a process, where batches are equal
BURDEN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def overhead(turns: int, steps: int = 25, width: int = 720) -> dict[str, Any]:
    """Return milliseconds of a step with and without the library, by epochs in turns.

    `added_us` is what the library's calls take of the host where nothing else is computed.
    """
    with _process_group():
        data = TensorDataset(
            torch.randn(2 * BATCH * steps, width), torch.randint(10, (2 * BATCH * steps,))
        )
        shared, uneven = DistributedSampler(data), dbsl.UnevenBatchSampler(len(data), 2 * BATCH)
        loaders = (
            DataLoader(data, BATCH, sampler=shared),
            DataLoader(data, batch_sampler=uneven),
        )
        models = [DistributedDataParallel(_perceptron(width)) for _ in loaders]
        uneven.watch(models[1])
        scales: tuple[Callable[[int], float], ...] = (lambda count: 1.0, uneven.scale)
        times_ms: tuple[list[float], list[float]] = ([], [])
        for turn in range(turns + 1):
            for place in (0, 1) if turn % 2 else (1, 0):
                (shared, uneven)[place].set_epoch(turn)
                seconds = _epoch(models[place], loaders[place], scales[place])
                if turn:  # the first warms up
                    times_ms[place].append(1e3 * seconds / steps)
        added_us = 1e6 * _added(data, 20)
        ratio = interval([b / a for a, b in zip(*times_ms, strict=True)])
        plain, ours = (interval(times) for times in times_ms)
    return {
        "plain_ms": f"{plain.mean:.2f}",
        "library_ms": f"{ours.mean:.2f}",
        "ratio": f"{ratio.mean:.4f}",
        "half_interval": f"{ratio.half:.4f}",
        "added_us": f"{added_us:.0f}",
        "epochs": turns,
    }


def _added(data: TensorDataset, turns: int) -> float:
    """Return seconds a step of the sampler, `scale` and `watch` above torch's own samplers."""
    sampler = dbsl.UnevenBatchSampler(len(data), 2 * BATCH)
    batches = BatchSampler(DistributedSampler(data), BATCH, drop_last=False)
    bare, watched = nn.Linear(1, 1), nn.Linear(1, 1)
    sampler.watch(watched)
    x, steps = torch.ones(1, 1), turns * len(sampler)
    began = time.perf_counter()
    for _ in range(turns):
        for _ in batches:
            bare(x).backward()
    plain_s = time.perf_counter() - began
    began = time.perf_counter()
    for epoch in range(turns):
        sampler.set_epoch(epoch)
        for batch in sampler:
            watched(x).backward()
            sampler.scale(len(batch))
    return (time.perf_counter() - began - plain_s) / steps


def _perceptron(width: int) -> nn.Module:
    layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 10))


def _epoch(model: nn.Module, loader: DataLoader, scale: Callable[[int], float]) -> float:
    """Train an epoch as a plain loop does, and return its seconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    dist.barrier()
    began = time.perf_counter()
    for x, labels in loader:
        loss = functional.cross_entropy(model(x), labels)
        (loss * scale(len(labels))).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    return time.perf_counter() - began


def burden(balance: str | None, seed: int, epochs: int = 5, samples: int = 640) -> dict[str, float]:
    """Return seconds of an epoch of BERT: of all, and of those after the second."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import BertConfig, BertForSequenceClassification

    from examples.own_loop import accelerate_bert

    accelerator = Accelerator(cpu=True)
    set_seed(seed)
    accelerate_bert.LENGTH = 64
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=accelerate_bert.TOKENS, intermediate_size=512, **sizes)
    )
    dataset = accelerate_bert.sentences(samples)
    sampler = dbsl.UnevenBatchSampler(
        len(dataset), 2 * BATCH, balance=balance, seed=seed, interleave=True
    )
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    sampler.watch(model)
    seconds = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        sampler.set_epoch(epoch)
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss * sampler.scale(len(batch["labels"])))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.wait_for_everyone()
        seconds.append(time.perf_counter() - began)
    accelerator.end_training()
    later = seconds[2:]
    sizes = dict(zip(("batch_0", "batch_1"), sampler.local_batch_sizes, strict=True))
    return {"all_s": sum(seconds), "epoch_s": sum(later) / len(later), "loss": loss.item()} | sizes


def merges(way: str, width: int = 1100, rounds: int = 20) -> dict[str, Any]:
    """Return the median seconds of a merge: a step that ends a round less one that does not."""
    model = _perceptron(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    x, labels = torch.randn(BATCH, width), torch.randint(10, (BATCH,))
    times_s: list[list[float]] = [[], []]  # of steps inside a round, of those at its end
    with ExitStack() as stack:
        step = _WAYS[way](model, optimizer, stack)
        for number in range(1, 4 * rounds + 1):
            functional.cross_entropy(model(x), labels).backward()
            dist.barrier()
            began = time.perf_counter()
            step()
            times_s[number % 4 == 0].append(time.perf_counter() - began)
            optimizer.zero_grad()
    inside_s, end_s = (torch.tensor(times[4:]).median().item() for times in times_s)
    return {
        "merge_s": f"{end_s - inside_s:.4f}",
        "weights": sum(p.numel() for p in model.parameters()),
    }


def _rounds(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Callable:
    stack.enter_context(_process_group())
    rounds = stack.enter_context(dbsl.Rounds(model, optimizer, every=4, weight=1.0))
    return lambda: (optimizer.step(), rounds.step())


def _outer_rounds(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Callable:
    stack.enter_context(_process_group())
    rounds = stack.enter_context(dbsl.Rounds(model, optimizer, every=4, outer=(0.7, 0.9)))
    return lambda: (optimizer.step(), rounds.step())


def _local_sgd(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Callable:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    stack.callback(accelerator.end_training)
    prepared = DistributedDataParallel(model)
    local = stack.enter_context(
        LocalSGD(accelerator=accelerator, model=prepared, local_sgd_steps=4, enabled=True)
    )
    return lambda: (optimizer.step(), local.step())


def _diloco(model: nn.Module, optimizer: torch.optim.Optimizer, stack: ExitStack) -> Callable:
    from datetime import timedelta

    import torchft
    from torchft.local_sgd import DiLoCo

    stack.enter_context(_process_group())
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=2,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=os.environ["LIGHTHOUSE"],
        replica_id=f"replica_{os.environ['RANK']}",
    )
    stack.callback(manager.shutdown)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    stack.enter_context(DiLoCo(manager, [model], optimizer, outer, sync_every=4))
    return optimizer.step


_WAYS = {
    "Rounds": _rounds,
    "Rounds, outer": _outer_rounds,
    "LocalSGD": _local_sgd,
    "DiLoCo": _diloco,
}


@contextmanager
def _process_group() -> Iterator[None]:
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> None:
    """Run what is asked for in two processes, and write experiments/results/own_loop/."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("overhead", "burden", "merges"))
    parser.add_argument("--turns", type=int, help="default 60 of overhead, 5 of the others")
    arguments = parser.parse_args(argv)
    what, turns = arguments.what, arguments.turns or (60 if arguments.what == "overhead" else 5)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        parser.error(f"cores must be at least 2, got {len(cores)}")
    with ExitStack() as stack:
        if what == "overhead":
            rows = [measure(cores, what, turns)]
        elif what == "burden":
            other = subprocess.Popen(["taskset", "-c", str(cores[1]), sys.executable, "-c", BURDEN])
            stack.callback(other.kill)
            arms = {"equal": None, "dynamic": "dynamic"}
            rows = [
                {"arm": arm, "turn": turn} | _rounded(measure(cores, what, balance, turn))
                for turn in range(turns)
                for arm, balance in arms.items()
            ]
        else:
            ways = [way for way in _WAYS if way != "DiLoCo" or find_spec("torchft")]
            stack.enter_context(_lighthouse())
            rows = [
                {"way": way, "turn": turn, **measure(cores, what, way)}
                for turn in range(turns)
                for way in ways
            ]
    record(Path(f"experiments/results/own_loop/{what}.csv"), rows, f"python -m {MODULE} {what}")


def measure(cores: Sequence[int], *call: Any) -> dict[str, Any]:
    """Return what a function of this module returns on rank 0 of two processes; no cores: any."""
    command = [sys.executable, "-m", MODULE, json.dumps(call)]
    prefixes = [["taskset", "-c", str(core)] for core in cores[:2]] or [[], []]
    return json.loads(run_ranks(command, prefixes, "127.0.0.1").splitlines()[-1])


def _rounded(found: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" for name, value in found.items()}


@contextmanager
def _lighthouse() -> Iterator[None]:
    """Have torchft's lighthouse running, where torchft is installed."""
    if not find_spec("torchft"):
        yield
        return
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    os.environ["LIGHTHOUSE"] = server.address()
    yield
    server.shutdown()


if __name__ == "__main__":
    if "RANK" in os.environ:  # a process of `measure`
        torch.set_num_threads(1)
        name, *given = json.loads(sys.argv[1])
        print(json.dumps({"overhead": overhead, "burden": burden, "merges": merges}[name](*given)))
    else:
        main()
