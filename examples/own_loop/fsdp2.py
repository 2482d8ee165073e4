"""A model that FSDP2 shards over processes with different batch sizes.

    torchrun --nproc_per_node 2 examples/own_loop/fsdp2.py

FSDP2 averages gradients over the processes as DDP does, so the same scale is right.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dbsl


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 2))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=sum(local_batch_sizes), shuffle=True)
    loader = dbsl.uneven(loader, local_batch_sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(model(images), labels)
            (loss * loader.scale(len(labels))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if loader.rank == 0:
            print(f"epoch {epoch}  loss {loss.item():.3f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([1, 7])
    dist.barrier()  # wait until all are done
    dist.destroy_process_group()
