"""A causal language model with transformers' Trainer.

torchrun --nproc_per_node 2 examples/own_loop/trainer_lm.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from dbsl.integrations.transformers import UnevenTrainerMixin

TOKENS, LENGTH = 50, 16


class UnevenTrainer(UnevenTrainerMixin, Trainer):
    """A Trainer with `local_batch_sizes`, one for each process."""

    local_batch_sizes = (1, 7)


def sentences(count=300):
    """Return sentences that count upwards."""
    firsts = torch.randint(TOKENS, (count, 1), generator=torch.Generator().manual_seed(0))
    words = (firsts + torch.arange(LENGTH)) % TOKENS
    return [{"input_ids": w, "labels": w} for w in words]


def fit(model, dataset, local_batch_sizes, epochs, **more):
    """Train a model with `UnevenTrainer`, built with `more`, and return it."""
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
