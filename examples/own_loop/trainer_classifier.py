"""A classifier with transformers' Trainer: the loss is a sum over the samples of all processes.

    torchrun --nproc_per_node 2 -m examples.own_loop.trainer_classifier

The stock Trainer (transformers 5.23) multiplies a classifier's loss by the number of processes,
with equal batches too: it takes the model to divide by `num_items_in_batch`, which a classifier
does not do. `compute_loss_func` does it here; no scale is needed then.
"""

import torch
from torch.nn import functional

from examples.own_loop.accelerate_bert import build_model, sentences
from examples.own_loop.trainer_lm import fit


def mean_over_all(outputs, labels, num_items_in_batch=None):
    """Return the loss of which the sum over processes is the mean over the joint batch."""
    total = functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    return fit(
        build_model(), sentences(), local_batch_sizes, epochs, compute_loss_func=mean_over_all
    )


if __name__ == "__main__":
    train([1, 7])
