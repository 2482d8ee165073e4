"""A classifier with transformers' Trainer: the same two lines.

torchrun --nproc_per_node 2 -m examples.own_loop.trainer_classifier
"""

import torch

from examples.own_loop.accelerate_bert import build_model, sentences
from examples.own_loop.trainer_lm import fit


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    return fit(build_model(), sentences(), local_batch_sizes, epochs)


if __name__ == "__main__":
    train([1, 7])
