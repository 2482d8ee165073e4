"""Local steps and weighted merges in a plain loop, with an outer optimizer as in DiLoCo.

    torchrun --nproc_per_node 2 examples/own_loop/rounds_ddp.py

Each process takes 10 steps on batches of its own size, then all merge, weighted by their samples.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dbsl


def train(local_batch_sizes, epochs=5, every=10, outer=(0.7, 0.9)):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 2))
    x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = dbsl.UnevenBatchSampler(len(dataset), local_batch_sizes=local_batch_sizes)
    loader = DataLoader(dataset, batch_sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    weight = local_batch_sizes[sampler.rank]
    with dbsl.Rounds(model, optimizer, every=every, weight=weight, outer=outer) as rounds:
        for epoch in range(epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                sampler.scale(len(labels))  # counts the batch; its own mean is right in a round
                functional.cross_entropy(model(images), labels).backward()
                optimizer.step()
                optimizer.zero_grad()
                rounds.step()
    with torch.no_grad():
        right = (model.eval()(x).argmax(1) == dataset.tensors[1]).double().mean()
    if sampler.rank == 0:
        print(f"{rounds.merges} merges  accuracy {right:.1%}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([4, 12])
    dist.barrier()  # wait until all are done
    dist.destroy_process_group()
