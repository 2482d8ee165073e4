"""A BERT classifier, fine-tuned with Accelerate: the slower process takes smaller batches.

    torchrun --nproc_per_node 2 examples/own_loop/accelerate_bert.py

`prepare` takes the sizes; the loss is multiplied by the loader's scale.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

from dbsl.integrations.accelerate import prepare

TOKENS, LENGTH = 100, 12


def sentences(count=400):
    """Return random sentences; the class is whether the first word is in the upper half."""
    words = torch.randint(TOKENS, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": w, "labels": (w[0] >= TOKENS // 2).long()} for w in words]


def build_model():
    """Return a small BERT with random weights."""
    return BertForSequenceClassification(
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


def train(local_batch_sizes, epochs=3):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    model = build_model()
    dataset = sentences()
    loader = DataLoader(dataset, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = prepare(
        accelerator, model, optimizer, loader, local_batch_sizes=local_batch_sizes
    )
    for epoch in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss * loader.scale(len(batch["labels"])))
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.3f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    train([1, 7])
