"""A causal language model in a plain loop, with the mean loss over tokens.

    torchrun --nproc_per_node 2 examples/own_loop/plain_lm.py

Sentences differ in length, so `mean_scale` weights each process by its tokens. The next batch's
count is exchanged while this one is computed (`ahead`).
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import dbsl

TOKENS, LENGTH, IGNORED = 50, 16, -100


def sentences(count=300):
    """Return sentences that count upwards, of 4 to 16 tokens, padded."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for first, length in zip(
        torch.randint(TOKENS, (count,), generator=draw).tolist(),
        torch.randint(4, LENGTH + 1, (count,), generator=draw).tolist(),
        strict=True,
    ):
        words = (first + torch.arange(LENGTH)) % TOKENS
        labels = torch.where(torch.arange(LENGTH) < length, words, IGNORED)
        rows.append({"input_ids": words, "labels": labels})
    return rows


def tokens(batch):
    """Return the number of tokens in the mean loss: a sentence's first is not predicted."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=LENGTH,
        )
    )
    parallel = DistributedDataParallel(model) if dist.is_initialized() else model
    dataset = sentences()
    sampler = dbsl.UnevenBatchSampler(len(dataset), local_batch_sizes=local_batch_sizes)
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches = iter(loader)
        batch = next(batches)
        while batch is not None:
            following = next(batches, None)
            ahead = None if following is None else tokens(following)
            loss = parallel(**batch).loss
            sampler.scale(len(batch["labels"]))  # counts the batch; tokens give its weight
            (loss * dbsl.mean_scale(tokens(batch), ahead=ahead)).backward()
            optimizer.step()
            optimizer.zero_grad()
            batch = following
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([1, 7])
    dist.barrier()  # wait until all are done
    dist.destroy_process_group()
