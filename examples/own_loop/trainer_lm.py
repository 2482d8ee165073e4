"""A causal language model with transformers' Trainer: the sampler alone is right.

    torchrun --nproc_per_node 2 examples/own_loop/trainer_lm.py

Trainer divides a causal language model's loss by the tokens of all processes itself, so that no
scale is needed. It takes `average_tokens_across_devices=True`, which is the default.
"""

import tempfile

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import dbsl

TOKENS, LENGTH = 50, 16


class UnevenTrainer(Trainer):
    """A Trainer whose processes take batches of `local_batch_sizes`."""

    local_batch_sizes = (1, 7)

    def get_train_dataloader(self):
        """Return the loader of the training set."""
        sampler = dbsl.UnevenBatchSampler(
            len(self.train_dataset), local_batch_sizes=self.local_batch_sizes, interleave=True
        )
        loader = DataLoader(
            self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
        )
        return self.accelerator.prepare(loader)


def sentences(count=300):
    """Return sentences that count upwards."""
    firsts = torch.randint(TOKENS, (count, 1), generator=torch.Generator().manual_seed(0))
    words = (firsts + torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": w, "labels": w} for w in words]


def fit(model, dataset, local_batch_sizes, epochs, **more):
    """Train a model with `UnevenTrainer`, which may get `more`, and return it."""
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
        trainer = UnevenTrainer(model, arguments, train_dataset=dataset, **more)
        trainer.local_batch_sizes = local_batch_sizes
        trainer.train()
    return model


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
    return fit(model, sentences(), local_batch_sizes, epochs)


if __name__ == "__main__":
    train([1, 7])
