"""A classifier with transformers' Trainer: the loss is a sum over the samples of all processes.

    torchrun --nproc_per_node 2 examples/own_loop/trainer_classifier.py

The stock Trainer (transformers 5.23) multiplies a classifier's loss by the number of processes,
with equal batches too: it takes the model to divide by `num_items_in_batch`, which a classifier
does not do. `compute_loss_func` does it here; no scale is needed then.
"""

import tempfile

import torch
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from examples.own_loop.accelerate_bert import LENGTH, TOKENS, sentences
from examples.own_loop.trainer_lm import UnevenTrainer


def mean_over_all(outputs, labels, num_items_in_batch=None):
    """Return the loss of which the sum over processes is the mean over the joint batch."""
    total = functional.cross_entropy(outputs.logits, labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=TOKENS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            num_train_epochs=epochs,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            optim="sgd",
            max_grad_norm=0.0,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            logging_strategy="epoch",
        )
        trainer = UnevenTrainer(
            model, arguments, train_dataset=sentences(), compute_loss_func=mean_over_all
        )
        trainer.local_batch_sizes = local_batch_sizes
        trainer.train()
    return model


if __name__ == "__main__":
    train([1, 7])
