"""Dual-batch learning in a plain loop, without train.py: handwritten digits and a small network.

    torchrun --nproc-per-node 4 examples/own_loop/dual_batch.py               # merges each epoch
    torchrun --nproc-per-node 4 examples/own_loop/dual_batch.py --sync step   # joint steps

Each process is a worker. Three of four train on small batches, in the time of a large-batch worker.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import dbsl
from dbsl.plan.sampler import EpochSampler


def build_model():
    """Return the network, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def build_optimizer(model):
    """Return an optimizer for a model: each worker has its own."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plan_workers(model, data, workers, large=64):
    """Return each worker's samples and batch size, planned with rank 0's times."""
    images, labels = data.tensors
    optimizer = build_optimizer(model)

    def step(size):  # a rate of 0 leaves the weights unchanged
        functional.cross_entropy(model(images[:size]), labels[:size]).backward()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()

    line = dbsl.measure_step(step, [8, 16, 32, 64], seconds=2).model  # a * x + b seconds
    times = torch.tensor([float(line.slope), float(line.intercept)], dtype=torch.float64)
    dist.broadcast(times, 0)
    rules = dbsl.PlanRules(time_ratio=1.1)  # an epoch may take 1.1 times as long
    return dbsl.plan_dual_batch(
        len(data), workers, workers * 3 // 4, large, dbsl.TimeModel(*times.tolist()), rules
    )


def train_rounds(model, data, plan, epochs, seed=0):
    """Train each worker on its share of each epoch, then merge, weighted by the plan."""
    images, labels = data.tensors
    rank, optimizer = dist.get_rank(), build_optimizer(model)
    sampler = EpochSampler([worker.samples for worker in plan.workers], seed=seed)
    mine = plan.workers[rank]
    with dbsl.Rounds(model, optimizer, every=None, weight=mine.merge_weight) as rounds:
        for epoch in range(epochs):
            for step in sampler.steps(rank, epoch, 0, mine.local_batch_size):
                batch = torch.from_numpy(step.parts[0].indices)
                functional.cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
                rounds.step()
            rounds.merge()
    return model


def train_jointly(model, data, local_batch_sizes, epochs, seed=0):
    """Train all workers in joint steps, with the gradient of their joint batch."""
    sampler = dbsl.UnevenBatchSampler(len(data), local_batch_sizes=local_batch_sizes, seed=seed)
    loader = DataLoader(data, batch_sampler=sampler)
    parallel, optimizer = DistributedDataParallel(model), build_optimizer(model)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = functional.cross_entropy(parallel(images), labels)
            (loss * sampler.scale(len(labels))).backward()  # n * b / B
            optimizer.step()
            optimizer.zero_grad()
    return model


def main():
    """Plan, train and evaluate."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sync", choices=["bsp", "step"], default="bsp")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    train, test = TensorDataset(images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    model, workers = build_model(), dist.get_world_size()
    plan = plan_workers(model, train, workers)
    model = build_model()  # measuring changed its running statistics
    if arguments.sync == "bsp":
        model = train_rounds(model, train, plan, arguments.epochs)
    else:
        sizes = [worker.local_batch_size for worker in plan.workers]
        model = train_jointly(model, train, sizes, arguments.epochs)
    if dist.get_rank() == 0:
        with torch.no_grad():
            right = (model.eval()(test[0]).argmax(1) == test[1]).double().mean()
        print(f"batches {[w.local_batch_size for w in plan.workers]}, accuracy {right:.1%}")
    dist.barrier()  # wait until all are done
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
