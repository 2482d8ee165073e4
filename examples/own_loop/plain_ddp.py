"""Different batch sizes in a plain DDP loop: the two lines of README, as a program.

    torchrun --nproc_per_node 2 examples/own_loop/plain_ddp.py

The first process trains on 183 of every 256 samples, the second on 73. Gradients are those of all
256, so the weights equal those of one process on the joint batch, up to rounding.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dbsl


def train(local_batch_sizes, epochs=5):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(dataset, batch_size=sum(local_batch_sizes), shuffle=True)
    loader = dbsl.uneven(loader, local_batch_sizes)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for inputs, labels in loader:
            loss = criterion(model(inputs), labels) * loader.scale(len(labels))  # n * b_i / B
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"process {rank}: {local_batch_sizes[rank]} samples a step, last loss {loss:.3f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train([183, 73])
    dist.barrier()  # wait until all are done
    dist.destroy_process_group()
