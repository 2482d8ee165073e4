"""Tokens a second of a language model on processes of unlike speed. Needs root and cgroups.

    sudo python -m experiments.benchmarks.tokens --turns 5

A small Llama with random weights, on sequences as long as instructions are (log-normal, 32 to
1,024 tokens, padded to the longest of a process's batch). Arms, in turns: equal shuffled batches;
transformers' `group_by_length`; `dbsl.uneven` without and with ``lengths=``, shuffled and grouped;
and the first process alone on its part of each batch, whose speed times the sum of all speeds is
the limit. Each arm is timed over one epoch, so all have the same tokens. Processes keep the memory
that they free, as a GPU's allocator does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

import dbsl
from experiments.benchmarks.demos.arms import run_ranks
from experiments.benchmarks.demos.quota import quotas
from experiments.benchmarks.demos.table import Table
from experiments.benchmarks.ranks import end_in_order

MODULE = "experiments.benchmarks.tokens"
ARMS = ("equal", "grouped", "uneven", "uneven lengths", "uneven grouped", "lengths grouped")
ALONE = "alone"
MACHINES = {"1:1": (1.0, 1.0), "2:1": (1.0, 0.5), "4:1": (1.0, 0.25)}
SAMPLES, BATCH, VOCABULARY, WARM = 384, 32, 1000, 2
KEEP = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736"}


def lengths_of(seed: int) -> list[int]:
    """Return the tokens of each sequence."""
    drawn = np.random.default_rng(seed).lognormal(5.3, 0.8, SAMPLES)
    return np.clip(drawn, 32, 1024).astype(int).tolist()


def loader_of(arm: str, lengths: list[int], parts: Sequence[float]) -> Any:
    """Return what an arm's process loops over: batches [b, L] of one process."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    draw = torch.Generator().manual_seed(0)
    data = [torch.randint(VOCABULARY, (length,), generator=draw) for length in lengths]
    world = dist.get_world_size()

    def collate(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.tensor([len(each) for each in samples])
        return pad_sequence(samples, batch_first=True), counts

    # One group of 50 batches or fewer, as in data that are larger than this.
    grouped = get_length_grouped_indices(lengths, BATCH, SAMPLES // BATCH, generator=draw)
    if arm == "equal":
        sampler = DistributedSampler(data, seed=0)
        return DataLoader(data, BATCH // world, sampler=sampler, collate_fn=collate)
    if arm == "grouped":
        batches = BatchSampler(grouped, BATCH // world, drop_last=True)
        mine = BatchSamplerShard(batches, world, dist.get_rank())
        return DataLoader(data, batch_sampler=mine, collate_fn=collate)
    order = {"sampler": grouped} if arm.endswith("grouped") or arm == ALONE else {"shuffle": True}
    model = [dbsl.TimeModel(1 / part, 0.01) for part in parts]
    sizes = dbsl.split_batch(BATCH, model).local_batch_sizes[:world]
    loader = DataLoader(data, sum(sizes), collate_fn=collate, **order)
    return dbsl.uneven(loader, sizes, lengths=lengths if "lengths" in arm else None, seed=0)


def train(arm: str, parts: Sequence[float], seed: int) -> dict[str, float]:
    """Return tokens a second of all processes over an epoch, and the loss of its last steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    config = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, **config))
    model = DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lengths = lengths_of(seed)

    def step(inputs: torch.Tensor, counts: torch.Tensor) -> float:
        mask = torch.arange(inputs.shape[1])[None] < counts[:, None]
        labels = inputs.masked_fill(~mask, -100)
        scored = int(counts.sum()) - len(counts)
        loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
        (loss * dbsl.mean_scale(scored)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    start = {name: value.clone() for name, value in model.state_dict().items()}
    for batch in itertools.islice(loader_of(arm, lengths, parts), WARM):
        step(*batch)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader, tokens, losses = loader_of(arm, lengths, parts), 0, []
    dist.barrier()
    began = time.perf_counter()
    for inputs, counts in loader:
        losses.append(step(inputs, counts))
        tokens += int(counts.sum())
    dist.barrier()
    seconds = time.perf_counter() - began
    total = torch.tensor([float(tokens)])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return {"tokens_per_s": total.item() / seconds, "loss": float(np.mean(losses[-4:]))}


def measure(arm: str, parts: Sequence[float], seed: int) -> dict[str, float]:
    """Return what an arm does with processes that have these parts of a core."""
    text, there = json.dumps([arm, [*parts], seed]), parts[:1] if arm == ALONE else parts
    with quotas(there, range(len(there))) as prefixes:
        said = run_ranks([sys.executable, "-m", MODULE, "--child", text], prefixes, "127.0.0.1")
    return json.loads(said.splitlines()[-1])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all arms in turns; rows of an earlier call stay."""
    end_in_order()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--machines", nargs="+", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--folder", type=Path, default=Path("experiments/results/own_loop"))
    arguments = parser.parse_args(argv)
    if arguments.child:
        print(json.dumps(train(*json.loads(arguments.child))), flush=True)
        return
    os.environ.update(KEEP, HF_HUB_OFFLINE="1")
    table = Table(arguments.folder / "tokens.csv", ("arm", "machine", "turn"), MODULE)
    for turn in range(arguments.turns):
        for name in arguments.machines:
            for arm in (*ARMS, ALONE):
                if not table.has(arm, name, turn):
                    found = measure(arm, MACHINES[name], turn)
                    table.add(arm, name, turn, found)


if __name__ == "__main__":
    main()
